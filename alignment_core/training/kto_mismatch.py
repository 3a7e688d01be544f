"""Mismatched pairs: each row's prompt with the completion of a row that has another prompt, or other images in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment_core.errors import DataError
from alignment_core.models.microbatch import Tokens

_REMEDY = {"train": "add rows with other prompts", "test": "hold out more rows (`test_rows`)"}


def partners(prompts: Sequence[Tokens], split: str = "train", images: Sequence[tuple[Any, ...]] = ()) -> list[int]:
    """For each row the number of the row whose completion its prompt is paired with. ``images``: those of each prompt, if any
    has some; prompts of the same tokens with different images are different.

    It depends on the order of the rows alone. With the rows of each prompt side by side, a prompt is paired with the completion
    N places further, where N is the number of rows of the most frequent prompt. So every completion is used once, unless a
    prompt has more than half of the rows. Raises DataError if all prompts in the rows of this ``split`` are the same.
    """
    groups: defaultdict[tuple[bytes, tuple[Any, ...]], list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        groups[np.asarray(prompt, np.int32).tobytes(), images[number] if images else ()].append(number)
    if len(groups) < 2:
        raise DataError(
            f"all {len(prompts)} {split} rows have the same prompt, so it cannot be paired with the completion of another: "
            f"{_REMEDY[split]}, or use a loss without a baseline (`loss_type: apo_zero_unpaired`)"
        )
    ordered = [number for group in groups.values() for number in group]
    largest = max(groups.values(), key=len)
    partner_of = [0] * len(prompts)
    for place, number in enumerate(ordered):
        partner_of[number] = ordered[(place + len(largest)) % len(ordered)]
    same = set(largest)
    others = [number for number in ordered if number not in same]
    for place, number in enumerate(largest):
        if partner_of[number] in same:  # this prompt has more than half of the rows
            partner_of[number] = others[place % len(others)]
    return partner_of


def mismatched(
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    split: str = "train",
    images: Sequence[tuple[Any, ...]] = (),
) -> list[Tokens]:
    """For each prompt the completion of its partner, see :func:`partners`, truncated so that no such pair is longer than the
    longest row, for which the model's context was checked."""
    longest = max(
        (len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)), default=0
    )
    pairs = zip(prompts, partners(prompts, split, images), strict=True)
    return [completions[partner][: longest - len(prompt)] for prompt, partner in pairs]
