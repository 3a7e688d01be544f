"""The reward that a process reward model gives: what it thinks of an answer's steps, as one number."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from alignment_core.data.context import context_length
from alignment_core.data.messages import as_given
from alignment_core.data.steps import STEPS, StepLayout, verdict_ids
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.models.handle import Model
from alignment_core.models.microbatch import Pair, distinct
from alignment_core.recipes.sections.process_reward_model import StepsConfig
from alignment_core.rewards.base import Opening, Rows, Scores
from alignment_core.rewards.failures import Answers
from alignment_core.user_code.failed import Failed

Aggregate = Literal["min", "product", "last", "mean"]


def steps_of(folder: Path, given: StepsConfig | None, field: str) -> StepsConfig:
    """How the model in ``folder`` reads steps: as ``given``, or as its own file says. Raises UserError if nothing does."""
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
        raise UserError(f"{field}: the model's {STEPS} cannot be read: {error}") from None


def aggregated(log_odds: Sequence[float], how: Aggregate) -> float:
    """One number in [0, 1] for the steps of an answer, from the log-odds that each is right.

    ``min`` and ``product`` as in Lightman et al. 2023, "Let's Verify Step by Step"; ``last`` as in Snell et al. 2024, "Scaling
    LLM Test-Time Compute Optimally". An answer without steps has 0.
    """
    if not log_odds:
        return 0.0
    chances = [1 / (1 + math.exp(-max(-500.0, one))) for one in log_odds]
    if how == "last":
        return chances[-1]
    if how == "mean":
        return math.fsum(chances) / len(chances)
    return min(chances) if how == "min" else math.prod(chances)


class StepJudge:
    """A process reward model that is open. It reads text, so that its tokenizer need not be the policy's.

    Each step is asked for with all that precedes it, which prefix trees compute once.
    """

    def __init__(self, steps: Steps, scores: Scores, how: Aggregate, close: Callable[[], None] = lambda: None) -> None:
        """``close`` ends its actors."""
        self._steps, self._scores, self._how, self.close = steps, scores, how, close

    @classmethod
    def open(cls, opening: Opening, given: StepsConfig | None, how: Aggregate) -> StepJudge:
        """Raises UserError for a model that cannot judge steps."""
        assert opening.model is not None
        assert opening.scores is not None
        steps = Steps(opening.model, given, f"{opening.field}.process_reward_model")
        held = ExitStack()
        name = f"reward-{opening.field.rpartition('.')[2]}"
        return cls(steps, held.enter_context(opening.scores(opening.model, name, steps.verdicts)), how, held.close)

    def __call__(self, rows: Rows) -> Answers:
        read = [self._steps.pairs(row) for row in rows]
        pairs, places = distinct([pair for one in read if not isinstance(one, Failed) for pair in one])
        scores = self._scores(pairs) if pairs else ()
        place = iter(places)
        for number, one in enumerate(read):
            if isinstance(one, Failed):
                yield number, one
            else:
                yield number, aggregated([float(scores[next(place)]) for _ in one], self._how)


class Steps:
    """Answers as the model reads them, one step after the other."""

    def __init__(self, model: Model, given: StepsConfig | None, field: str) -> None:
        config = steps_of(model.path, given, field)
        self._renderer = Renderer(model.tokenizer())
        self._layout = StepLayout(config.separator, config.placeholder)
        self.verdicts = verdict_ids(self._renderer, config.verdict_tokens, f"{field}.steps.verdict_tokens")
        self._most = context_length(model.path)

    def pairs(self, row: dict[str, Any]) -> list[Pair] | Failed:
        """The prompt with each beginning of the answer that ends with a step, or why the model cannot judge it."""
        prompt = as_given(row) or row["prompt_text"]
        if isinstance(prompt, list) and not self._renderer.template:
            prompt = row["prompt_text"]
        try:
            prompt_ids, _ = self._renderer.prompt(prompt)
        except ValueError as error:
            return Failed("raised", f"cannot read the conversation: {error}")
        ids, places = self._layout.lay_out(self._renderer, self._layout.split(row["completion_text"]))
        length = len(prompt_ids) + len(ids) + 1
        if self._most is not None and length > self._most:
            return Failed("too_long", f"takes at most {self._most} tokens, but prompt, steps and verdict have {length}")
        return [(prompt_ids, ids[: place + 1]) for place in places]
