"""How rows become packed micro-batches."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.models.microbatch import LINE_TOKENS, Row, TokenSequence, cut, pack
from alignment_core.recipes import TrainingConfig
from alignment_core.training.schedule import learning_rate
from alignment_core.training.training_rows import batch_of_step


def row(number: int, length: int) -> Row:
    return Row(number, (TokenSequence.of_prompt_and_completion([1] * (length // 2), [2] * (length - length // 2)),))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    ranks=st.integers(1, 4),
    budget=st.integers(8, 64),
)
def test_a_cut_holds_every_row_once_and_gives_all_ranks_as_many_packs(
    lengths: list[int], ranks: int, budget: int
) -> None:
    rows = [row(number, length) for number, length in enumerate(lengths)]
    parts = cut(rows, ranks, budget)
    assert sorted(row.number for packs in parts for part in packs for row in part) == list(range(len(rows)))
    assert len({len(packs) for packs in parts}) == 1
    for packs in parts:
        for part in packs:
            assert len(part) <= 1 or pack(part).input_ids.numel() <= budget


@given(groups=st.lists(st.tuples(st.integers(1, 9), st.integers(16, 90), st.integers(1, 20)), min_size=1, max_size=8))
def test_rows_of_a_prompt_stay_together_and_shared_tokens_count_once(groups: list[tuple[int, int, int]]) -> None:
    rows = [
        Row(10 * prompt + number, (TokenSequence.of_prompt_and_completion([prompt] * length, [90 + number] * answer),))
        for prompt, (count, length, answer) in enumerate(groups)
        for number in range(count)
    ]
    budget = max(length + count * answer for count, length, answer in groups)
    [packs] = cut(rows, 1, budget)
    assert all(pack(part).input_ids.numel() <= budget for part in packs)
    homes = [{number for number, part in enumerate(packs) for row in part if row.number // 10 == p} for p in range(8)]
    assert all(len(home) <= 1 for home in homes)
    [apart] = cut(rows, 1, budget, share_prefixes=False)
    assert len(apart) >= len(packs)


@given(
    begins=st.lists(st.tuples(st.integers(20, 60), st.integers(1, 9)), min_size=1, max_size=20),
    budget=st.integers(80, 200),
)
def test_no_pack_exceeds_the_budget_with_slightly_different_sharing(begins: list[tuple[int, int]], budget: int) -> None:
    rows = [
        Row(n, (TokenSequence.of_prompt_and_completion([1] * length, [10 + n] * answer),))
        for n, (length, answer) in enumerate(begins)
    ]
    assert all(pack(part).input_ids.numel() <= budget for part in cut(rows, 1, budget)[0])


def behind(prompt: list[int], completions: list[int]) -> list[Row]:
    """Rows of one prompt, with completions of these lengths that share nothing."""
    return [
        Row(n, (TokenSequence.of_prompt_and_completion(prompt, [1000 + n] * length),))
        for n, length in enumerate(completions)
    ]


def test_a_long_completion_does_not_split_the_prefix_shared_by_other_rows() -> None:
    rows = behind([1] * 700, [*[30] * 16, 600, *[30] * 16])
    [packs] = cut(rows, 1, 1024)
    assert sum(pack(part).input_ids.numel() for part in packs) < 7000, "17 pieces of equal numbers of rows were 13460"


def test_a_short_common_beginning_costs_no_packs() -> None:
    rows = behind([1] * 20, random.Random(0).choices(range(100, 700), k=200))
    [shared], [apart] = cut(rows, 1, 1024), cut(rows, 1, 1024, share_prefixes=False)
    assert len(shared) <= len(apart)


def test_rows_above_the_budget_are_separate_packs_and_no_pack_is_empty() -> None:
    assert [[len(part) for part in packs] for packs in cut(behind([], [320, 300, 310]), 1, 16)] == [[1, 1, 1]]


def test_a_family_of_rows_is_work_for_all_ranks() -> None:
    rows = [Row(n, (TokenSequence.of_prompt_and_completion([1] * 200, [10 + n] * 60),)) for n in range(8)]
    assert [[len(part) for part in packs] for packs in cut(rows, 2, 4096)] == [[4], [4]]


def test_a_pack_holds_a_common_prefix_once_and_points_at_the_predicting_tokens() -> None:
    # prompt 5 × 16 + 7 8 | the same prompt + 9 | prompt 1 + 3
    rows = [
        Row(0, (TokenSequence.of_prompt_and_completion([5] * 16, [7, 8]),)),
        Row(1, (TokenSequence.of_prompt_and_completion([1], [3]),)),
        Row(2, (TokenSequence.of_prompt_and_completion([5] * 16, [9]),)),
    ]
    batch = pack(rows)
    assert batch.input_ids.tolist() == [[1, 3, *[5] * 16, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, *range(16), 16, 17, 16]]
    assert batch.multiplicity.tolist() == [[1, 1, *[2] * 16, 1, 1, 1]]
    assert batch.labels_K.tolist() == [7, 8, 3, 9]
    assert batch.predict_K.tolist() == [
        17,
        18,
        0,
        17,
    ]  # the last token of the prompt predicts the first of both answers
    assert batch.sequence_K.tolist() == [0, 0, 1, 2]
    assert batch.last_S.tolist() == [19, 1, 20]
    assert batch.nodes == ((0, 2, 2), (2, 18, 21), (18, 20, 20), (20, 21, 21))


def test_lines_restart_positions_and_point_at_the_predicting_tokens() -> None:
    # prompt 9 + completion 3 | prompt 5 6 + completion 7 8; the longer sequence is laid first, both in one line
    rows = [
        Row(0, (TokenSequence.of_prompt_and_completion([9], [3]),)),
        Row(1, (TokenSequence.of_prompt_and_completion([5, 6], [7, 8]),)),
    ]
    batch = pack(rows, share_prefixes=False)
    assert batch.input_ids.shape == (1, LINE_TOKENS)
    assert batch.input_ids[0, :7].tolist() == [5, 6, 7, 8, 9, 3, 0]
    assert batch.position_ids[0, :7].tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert batch.labels_K.tolist() == [3, 7, 8]
    assert batch.predict_K.tolist() == [4, 1, 2]  # the token before each target
    assert batch.sequence_K.tolist() == [0, 1, 1]
    assert batch.last_S.tolist() == [5, 3]


@given(lengths=st.lists(st.integers(2, 300), min_size=1, max_size=40))
def test_lines_hold_every_sequence_whole(lengths: list[int]) -> None:
    rows = [row(number, length) for number, length in enumerate(lengths)]
    batch = pack(rows, share_prefixes=False)
    lines, width = batch.input_ids.shape
    assert width == max(LINE_TOKENS, *lengths)
    assert lines * width <= 2 * sum(lengths) + width  # first fit leaves at most every other line half empty
    flat = batch.position_ids.flatten()
    for sequence, last in zip(rows, batch.last_S.tolist(), strict=True):
        first = last - sequence.tokens + 1
        assert first // width == last // width
        assert flat[first : last + 1].tolist() == list(range(sequence.tokens))


@pytest.mark.parametrize("share", [True, False])
def test_an_empty_pack_still_has_a_token_for_the_collectives(share: bool) -> None:
    batch = pack([], share_prefixes=share)
    assert batch.input_ids.shape == (1, 1)
    assert batch.sequences == 0


def test_the_first_token_is_never_a_target() -> None:
    assert TokenSequence.of_prompt_and_completion([], [4, 5]).targets.tolist() == [False, True]


@given(rows=st.integers(1, 50), batch_size=st.integers(1, 20), seed=st.integers(0, 5))
def test_an_epoch_takes_every_row_once(rows: int, batch_size: int, seed: int) -> None:
    steps = -(-rows // batch_size)
    for epoch in (0, 1):
        taken = [n for s in range(steps) for n in batch_of_step(epoch * steps + s, rows, batch_size, seed)]
        assert sorted(taken) == list(range(rows))


def test_epochs_and_seeds_have_different_orders() -> None:
    first, second = batch_of_step(0, 50, 50, seed=1), batch_of_step(1, 50, 50, seed=1)
    assert first != second
    assert first != batch_of_step(0, 50, 50, seed=2)
    assert first == batch_of_step(0, 50, 50, seed=1)


def test_cosine_with_warm_up_and_floor_by_hand() -> None:
    # 10 steps, 2 of warm-up: rates 1/3 and 2/3 of the peak, then from the peak down to a tenth of it
    config = TrainingConfig(learning_rate=1.0, warmup_ratio=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5)  # half-way through the 8 steps of decay
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[2:]))
    assert min(rates[2:]) > 0.1


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.5), ("constant", 1.0), ("cosine", 0.5)])
def test_the_middle_of_a_schedule(kind: str, middle: float) -> None:
    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type=kind)  # type: ignore[arg-type]
    assert learning_rate(config, 50, 100) == pytest.approx(middle)
    assert np.isclose(learning_rate(config, 0, 100), 1.0)
