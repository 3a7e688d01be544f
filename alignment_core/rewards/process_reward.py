"""The reward of a process reward model: its judgements of an answer's steps, as one number."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from alignment_core.data.context import context_length
from alignment_core.data.messages import as_given, tools_of
from alignment_core.data.steps import STEPS, StepLayout, verdict_ids
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError, one_line
from alignment_core.models.microbatch import Pair, distinct
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.process_reward_model import StepsConfig
from alignment_core.rewards.base import Opening, Rows, Scores
from alignment_core.rewards.results import Answers, RewardValue
from alignment_core.user_code.errors import Failed

REPLACEMENT = "\ufffd"
"""The decoder's output for bytes that are not a whole character."""
LONGEST_RUN = 32
"""Tokens that are decoded together although they end within a character, as bytes may that are no text."""
Aggregate = Literal["min", "product", "last", "mean"]
StepForm = Literal["sum", "min"]


def steps_of(folder: Path, given: StepsConfig | None, field: str) -> StepsConfig:
    """The form of steps that the model in ``folder`` reads: ``given``, or that of its file. Raises UserError without both."""
    if given is not None:
        return given
    try:
        return StepsConfig.model_validate(json.loads((folder / STEPS).read_text()))
    except FileNotFoundError:
        raise UserError(
            f"{field}: the model does not say how it reads steps (it has no {STEPS}): give `steps`, with its separator, "
            "placeholder and verdict tokens"
        ) from None
    except ValueError as error:
        raise UserError(f"{field}: the model's {STEPS} cannot be read: {one_line(error)}") from None


def aggregated(log_odds: Sequence[float], how: Aggregate) -> float:
    """One number in [0, 1] for the steps of an answer, from the log-odds that each is right.

    ``min`` and ``product`` as in Lightman et al. 2023, "Let's Verify Step by Step"; ``last`` as in Snell et al. 2024, "Scaling
    LLM Test-Time Compute Optimally". An answer without steps has 0.
    """
    if not log_odds:
        return 0.0
    chances = [1 / (1 + math.exp(-max(-500.0, odds))) for odds in log_odds]
    if how == "last":
        return chances[-1]
    if how == "mean":
        return math.fsum(chances) / len(chances)
    return min(chances) if how == "min" else math.prod(chances)


class StepJudge:
    """An open process reward model. It reads text, so that its tokenizer need not be the policy's.

    Each step is judged together with everything before it, which prefix trees compute once.
    """

    def __init__(
        self,
        steps: Steps,
        scores: Scores,
        how: Aggregate,
        close: Callable[[], None] = lambda: None,
        form: StepForm | None = None,
        tokenizer: Any = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """``close`` ends its actors; with a ``form`` it rewards steps at tokens of the policy's ``tokenizer``.
        ``skip_special_tokens`` says whether the texts of rows are without special tokens."""
        self._steps = steps
        self._scores = scores
        self._how = how
        self.close = close
        self._form = form
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    @classmethod
    def open(
        cls,
        opening: Opening,
        given: StepsConfig | None,
        how: Aggregate,
        per_step: StepForm | None = None,
        skip_special_tokens: bool = True,
    ) -> StepJudge:
        """Raises UserError for a model that cannot judge steps."""
        assert opening.model is not None
        assert opening.scores is not None
        steps = Steps(opening.model, given, f"{opening.field}.process_reward_model")
        stack = ExitStack()
        name = f"reward-{opening.field.rpartition('.')[2]}"
        scores = stack.enter_context(opening.scores(opening.model, name, steps.verdicts))
        return cls(steps, scores, how, stack.close, per_step, opening.tokenizer, skip_special_tokens)

    def __call__(self, rows: Rows) -> Answers:
        read = [self._steps.pairs(row) for row in rows]
        pairs, places = distinct([pair for steps in read if not isinstance(steps, Failed) for pair in steps])
        scores = self._scores(pairs) if pairs else ()
        place = iter(places)
        for number, steps in enumerate(read):
            if isinstance(steps, Failed):
                yield number, steps
            else:
                log_odds = [float(scores[next(place)]) for _ in steps]
                reward = aggregated(log_odds, self._how)
                yield number, RewardValue(reward, steps=self._by_step(rows[number], log_odds)) if self._form else reward

    def _by_step(self, row: dict[str, Any], log_odds: Sequence[float]) -> tuple[tuple[int, float], ...]:
        """The last token of each step, and the chance that it is right; of the worst step alone, where the form asks for it.
        The last step ends with the completion; a completion without steps is one that is wrong for certain."""
        if not len(row["completion_ids"]):
            return ()
        ids = [int(number) for number in row["completion_ids"]]
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        lead = max(0, text.find(row["completion_text"]))  # white space of the chat template
        places = [lead + end for end in self._steps.ends(row["completion_text"])]
        ends = token_ends(self._tokenizer, ids, places, self._skip_special_tokens)
        ends[-1:] = [len(ids) - 1]
        chances = [aggregated([odds], "last") for odds in log_odds] or [0.0]
        rewards = tuple(zip(ends, chances, strict=True))
        return rewards if self._form == "sum" else (min(rewards, key=itemgetter(1)),)


def token_ends(tokenizer: Any, ids: Sequence[int], ends: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
    """For each beginning of the text that ``ids`` stand for, in characters, the token with which it is complete, from 0."""
    lengths = text_lengths(tokenizer, ids, skip_special_tokens)
    return [min(bisect_left(lengths, end), len(ids) - 1) for end in ends]


def text_lengths(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
    """Characters of the text up to and with each token; a character of several tokens counts from its last one on.

    Each token is decoded with the few before it, as streaming detokenizers do, because a token may be part of a character, or
    begin with a space only behind another one.
    """
    added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
    skipped = {number for number, token in added if token.special}
    lengths: list[int] = []
    total, complete = 0, 0
    window: list[int] = []  # the last tokens, of which the first ``complete`` ones are counted
    for number in ids:
        if number not in skipped:
            window.append(number)
            known = len(tokenizer.decode(window[:complete], skip_special_tokens=skip_special_tokens))
            text = tokenizer.decode(window, skip_special_tokens=skip_special_tokens)
            if not text.endswith(REPLACEMENT) or len(window) - complete >= LONGEST_RUN:
                total += max(0, len(text) - known)
                window, complete = window[complete:], len(window) - complete
        lengths.append(total)
    return lengths


class Steps:
    """Answers as the model reads them, one step after the other."""

    def __init__(self, model: Model, given: StepsConfig | None, field: str) -> None:
        config = steps_of(model.path, given, field)
        self._field = field
        self._renderer = Renderer(model.tokenizer())
        self._layout = StepLayout(**config.model_dump(exclude={"verdict_tokens"}))
        self.verdicts = verdict_ids(self._renderer, config.verdict_tokens, f"{field}.steps.verdict_tokens")
        self._most = context_length(model.path)

    def ends(self, answer: str) -> list[int]:
        """For each step how many characters of the answer there are up to its end."""
        return self._layout.ends(answer)

    def pairs(self, row: dict[str, Any]) -> list[Pair] | Failed:
        """The prompt with each beginning of the answer that ends with a step, or why the model cannot judge it."""
        prompt = as_given(row) or row["prompt_text"]
        tools = tools_of(row)
        if (isinstance(prompt, list) or tools) and not self._renderer.template:
            prompt, tools = row["prompt_text"], None
        try:
            text = self._layout.prompt(self._renderer, prompt, tools)
        except ValueError as error:
            return Failed("raised", f"cannot read the conversation: {error}")
        except UserError as error:  # a template that no conversation with tools fits
            raise UserError(f"{self._field}: {error}") from None
        steps = self._layout.split(row["completion_text"])
        prompt_ids, ids, places = self._layout.lay_out(self._renderer, text, steps)
        length = len(prompt_ids) + len(ids) + 1
        if self._most is not None and length > self._most:
            return Failed("too_long", f"takes at most {self._most} tokens, but prompt, steps and verdict have {length}")
        return [(prompt_ids, ids[: place + 1]) for place in places]
