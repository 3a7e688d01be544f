"""The reward of a reward model: from the policy's tokens, or from text if it has another tokenizer or chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from alignment_core.data.context import context_length
from alignment_core.data.messages import as_given, assistant, tools_of
from alignment_core.data.template import Ids, Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.errors import UserError
from alignment_core.evaluation.files import SPREAD
from alignment_core.models.microbatch import Pair, distinct
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import read_json
from alignment_core.rewards.base import Opening, Rows, Scores
from alignment_core.rewards.results import Answers
from alignment_core.rewards.scoring_actors import has_another_tokenizer, pairs_of
from alignment_core.user_code.errors import Failed

LEAST_DEVIATION = 1e-6
"""Of rewards that hardly differ."""
TRAINED = "reward-model"
"""The kind of the artifacts of reward models that are trained here."""
NO_IMAGES = (
    "prompts or observations have images, and {name} reads none: use an image-text model with the policy's tokenizer and chat "
    "template, a verifier or a function"
)
"""Why a reward model for text is refused; ``name`` is its name in the sentence."""


class AnswerEnd(NamedTuple):
    """The end of an answer for a reward model that reads the policy's tokens."""

    ids: Ids
    """Tokens behind an answer that is not truncated, as in the training of the reward model."""
    stop_ids: tuple[int, ...]
    """Stop tokens of the model and of the policy, which they replace."""


class Judge:
    """An open reward model. The same completion of the same prompt is scored once."""

    def __init__(
        self,
        scores: Scores,
        close: Callable[[], None] = lambda: None,
        text: InText | None = None,
        spread: tuple[float, float] = (0.0, 1.0),
        answer_end: AnswerEnd | None = None,
    ) -> None:
        """``close`` ends its actors; ``text`` is given for a model that scores text, ``answer_end`` for one that scores the
        policy's tokens; ``spread`` is the mean and deviation for normalising scores."""
        self._scores = scores
        self.close = close
        self._text = text
        self._spread = spread
        self._answer_end = answer_end

    @classmethod
    def open(cls, opening: Opening, normalised: bool = False) -> Judge:
        """With ``normalised`` scores have the mean 0 and the deviation 1 on answers that the model was trained on.

        A model with another tokenizer than the policy's, or with another chat template than the prompts', scores text, with a
        warning in ``opening.warnings``. Raises UserError if it cannot.
        """
        assert opening.model is not None
        assert opening.scores is not None
        if text := _in_text(opening.model, opening):
            opening.warnings.append(text.warning)
        spread = spread_of(opening.model, opening.field) if normalised else (0.0, 1.0)
        answer_end = None if text else _answer_end(opening.model, opening)
        stack = ExitStack()
        scores = stack.enter_context(opening.scores(opening.model, f"reward-{opening.field.rpartition('.')[2]}"))
        return cls(scores, stack.close, text, spread, answer_end)

    def __call__(self, rows: Rows) -> Answers:
        read: Sequence[Pair | Failed] = self._text.pairs(rows) if self._text else self._pairs(rows)
        pairs, places = distinct([pair for pair in read if not isinstance(pair, Failed)])
        scores = self._scores(pairs) if pairs else ()
        place = iter(places)
        mean, deviation = self._spread
        yield from (
            (number, pair if isinstance(pair, Failed) else (float(scores[next(place)]) - mean) / deviation)
            for number, pair in enumerate(read)
        )

    def _pairs(self, rows: Rows) -> list[Pair]:
        """The policy's tokens. A turn that is not truncated ends as the model's own turns do, in place of the stop token that
        ended it, or behind the text of ``generation.stop`` that did."""
        if self._answer_end is None:
            return pairs_of(rows)
        end, stop_ids = self._answer_end
        pairs: list[Pair] = []
        for row, (prompt, answer, *images) in zip(rows, pairs_of(rows), strict=True):
            if row["finish_reason"] != "length" and len(answer):
                answer = [*(answer[:-1] if int(answer[-1]) in stop_ids else answer), *end]
            pairs.append((prompt, answer, *images))
        return pairs


def check_reads_images(opening: Opening) -> None:
    """Raise UserError for a reward model that would not see the images of prompts."""
    assert opening.model is not None
    if not read_json(opening.model.path / "config.json").get("vision_config"):
        raise UserError(f"{opening.field}.reward_model: {NO_IMAGES.format(name=opening.model.reference.short)}")
    if text := _in_text(opening.model, opening):
        raise text.no_images()


def _in_text(model: Model, opening: Opening) -> InText | None:
    """How a model scores text, if it has another tokenizer than the policy's, or another chat template than the prompts';
    otherwise None."""
    field = f"{opening.field}.reward_model"
    if has_another_tokenizer(model, opening.tokenizer):
        return InText(model, field, f"tokenizer than {opening.policy}")
    if _has_another_template(model, opening):
        return InText(model, field, "chat template than the prompts")
    return None


def _answer_end(model: Model, opening: Opening) -> AnswerEnd:
    """The end of answers is that of the prompts' own chat template, as the data of the model has it then, too, unless this
    closes no turns: prompts may be plain text for one stage."""
    tokenizer, eos = model.tokenizer(), eos_token_ids(model.path)
    renderer = Renderer(tokenizer, opening.chat_template, eos)
    if opening.chat_template is not None and not renderer.turn_end.text:
        renderer = Renderer(tokenizer, None, eos)
    of_policy = opening.turn_end.stop_ids if opening.turn_end else ()
    ids = [renderer.turn_end.token_id] if trained_to_turn_end(model) else renderer.tail_ids()
    return AnswerEnd(ids, (*renderer.turn_end.stop_ids, *of_policy))


def _has_another_template(model: Model, opening: Opening) -> bool:
    """Whether a model's own chat template renders conversations otherwise than the prompts' does.

    Plain prompts may be no conversation: the policy's tokens are scored, as by TRL. Across policies they are questions, as for
    policies with a template, unless a `chat_template` of the prompts makes them plain for all. A model that was trained here
    has the template of its data, which may be plain text; one from elsewhere without a template gets the tokens of the policy.
    A `chat_template` of the prompts is that of the data of a model that was trained here.
    """
    trained_here = trained_to_turn_end(model)
    if trained_here and opening.chat_template is not None:
        return False
    own, prompts = Renderer(model.tokenizer()), Renderer(opening.tokenizer, opening.chat_template)
    if prompts.is_plain:
        return opening.across_policies and opening.chat_template is None and not own.is_plain
    if own.is_plain:
        return trained_here
    return not own.renders_as(prompts)


def trained_to_turn_end(model: Model) -> bool:
    """Whether a reward model was trained on conversations up to the end of their last turn, as those trained here.

    Others read all that the chat template writes, such as the line break behind ``<|im_end|>``: TRL trains them on it, and the
    scores on their pages are those of ``apply_chat_template``. A model that was trained here is an artifact of this kind, or,
    if it was published and imported again, has the mean and deviation of its rewards beside its weights.
    """
    return model.reference.kind == TRAINED or (model.path / SPREAD).is_file()


def spread_of(model: Model, field: str) -> tuple[float, float]:
    """Mean and deviation of a model's rewards on its training data. Raises UserError if the model does not hold them."""
    try:
        spread = json.loads((model.path / SPREAD).read_text())
        mean, deviation = float(spread["mean"]), float(spread["deviation"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{field}.normalise: {model.reference.short} does not say the mean and deviation of its rewards (it has no usable "
            f"{SPREAD}, as reward models that are trained here have): choose `running` or `batch`"
        ) from None
    return mean, max(deviation, LEAST_DEVIATION)


class InText:
    """Completions in the tokens of a reward model, which reads them as a conversation in its own chat template.

    The prompt is the row's messages with its tools, or the text that it was before the policy's template; where neither is
    known, as of a truncated prompt, the text that the policy saw. The completion is one answer to it: of an episode with
    several turns, all that the policy said. A model without a chat template reads the text of the prompt and that of the
    completion. As in the policy's own tokens, the turn is ended unless the answer was truncated.
    """

    def __init__(self, model: Model, field: str, other: str) -> None:
        """``other`` says what it has another one of than what. Raises UserError for a tokenizer without EOS."""
        tokenizer = model.tokenizer()
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"{field}: its tokenizer differs from the policy's and has no end-of-sequence token to end answers with"
            )
        self.field = field
        self.model = model
        self._other = other
        self._renderer = Renderer(tokenizer)
        self._with_tail = not trained_to_turn_end(model)
        self._most = context_length(model.path)

    @property
    def warning(self) -> str:
        """The sentence that people should read."""
        how = (
            "rendered by its own chat template"
            if self._renderer.template
            else "as plain text, as it has no chat template"
        )
        return (
            f"{self.field}: {self.model.reference.short} has another {self._other}, so it scores the text of prompt and "
            f"completion, {how}, instead of the policy's tokens"
        )

    def no_images(self) -> UserError:
        """Why it cannot score completions for prompts with images."""
        return UserError(
            f"{self.field}: prompts or observations have images, and {self.model.reference.short} has another {self._other}, "
            "so it would read text alone: give a reward model with the policy's tokenizer and chat template"
        )

    def pairs(self, rows: Rows) -> list[Pair | Failed]:
        """Prompt and answer of each row, or the reason why the model cannot score it."""
        known: dict[Any, Pair | Failed] = {}
        pairs = []
        for row in rows:
            content = (
                row.get("messages"),
                row.get("tools"),
                *(row[name] for name in ("prompt_text", "completion_text", "finish_reason")),
                row.get("images"),
            )
            if content not in known:
                try:
                    known[content] = self._pair(row)
                except Failed as failure:
                    known[content] = failure
            pairs.append(known[content])
        return pairs

    def _pair(self, row: dict[str, Any]) -> Pair:
        if row.get("images"):
            raise self.no_images()
        prompt = as_given(row) or row["prompt_text"]
        tools = tools_of(row)
        if (isinstance(prompt, list) or tools) and not self._renderer.template:
            prompt, tools = row["prompt_text"], None
        try:
            completion = row["completion_text"]
            answered = self._renderer.answered(
                prompt,
                assistant(completion) if isinstance(prompt, list) else completion,
                tools,
                closed=row["finish_reason"] != "length" or not completion,
                whole=False,  # a judge's template may leave out thoughts
                with_tail=self._with_tail,
            )
        except ValueError as error:
            raise Failed("raised", f"cannot read the conversation: {error}") from None
        except UserError as error:  # a template that no conversation with tools fits
            raise UserError(f"{self.field}: {self.model.reference.short}: {error}") from None
        length = len(answered.prompt_ids) + len(answered.ids)
        if self._most is not None and length > self._most:
            raise Failed("too_long", f"takes at most {self._most} tokens, but prompt and completion have {length}")
        return answered.prompt_ids, answered.ids
