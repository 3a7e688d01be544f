"""Reward models of other vocabularies or chat templates: they score the text, in their own tokens and template."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.data.messages import user
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.models.microbatch import Pair
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.model_reward import AnswerEnd, Judge
from alignment_core.user_code.errors import Failed
from tests.rewards.other_tokenizer import rendered, reward_model_with_another_tokenizer, score_of

CHAT = [
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture
def judge(tiny_model: Any, tmp_path: Path) -> Path:
    return reward_model_with_another_tokenizer(tmp_path / "judge", tiny_model())


def row(prompt: str, completion: str, given: Any = None, finish_reason: str = "stop") -> dict[str, Any]:
    """A completion of the policy of byte_tokenizer; ``given`` is the prompt before its chat template."""
    tokenizer = byte_tokenizer()
    end = [tokenizer.eos_token_id] if finish_reason == "stop" else []
    return {
        "prompt_text": prompt,
        "completion_text": completion,
        "prompt_ids": tokenizer(prompt)["input_ids"],
        "completion_ids": [*tokenizer(completion)["input_ids"], *end],
        "finish_reason": finish_reason,
        "messages": given and json.dumps(given),
    }


def opening_of(model: Path, calls: list[Sequence[Pair]], prompt: str = "<user>2+2=<assistant>") -> Opening:
    """With real forward passes in this process; ``calls`` records their arguments."""

    @contextmanager
    def scores(model: Model, name: str, verdicts: tuple[int, int] | None = None) -> Iterator[Any]:
        from alignment_core.training.forward import ForwardJob

        forward = ForwardJob(model, "score").open(ResourcesConfig(), Device("cpu", 1))

        def run(pairs: Sequence[Pair]) -> list[float]:
            calls.append(pairs)
            return forward.run(pairs).tolist()

        yield run

    prompts = [{"prompt": prompt, "prompt_ids": byte_tokenizer()(prompt)["input_ids"]}]
    opened = Model(model, Reference("model", "a" * 64))
    return Opening(
        "rl.rewards.1",
        ResourcesConfig(),
        byte_tokenizer(),
        policy="the-policy",
        prompts=prompts,
        model=opened,
        scores=scores,
    )


def scored(model: Path, rows: list[dict[str, Any]]) -> tuple[list[Any], list[Sequence[Pair]], list[str]]:
    """The answers, the scored pairs, and the warnings."""
    calls: list[Sequence[Pair]] = []
    opening = opening_of(model, calls)
    judge = Judge.open(opening)
    scores = dict(judge(rows))
    judge.close()
    return [scores[number] for number in range(len(rows))], calls, opening.warnings


def test_the_text_is_scored_as_the_model_itself_reads_the_conversation(judge: Path) -> None:
    rows = [
        row("<user>2+2=<assistant>5<eos><user>Sure?<assistant>", "No, 4.", CHAT),
        row("<user>1+1=<assistant>", "2", "1+1="),  # a text that the policy's template wrapped
        row("<user>3+3=<assistant>", "6"),  # such as truncated: as the policy saw it
        row("<user>1+1=<assistant>", "2", "1+1="),
    ]
    scores, calls, _ = scored(judge, rows)
    by_hand = [
        score_of(judge, rendered(judge, CHAT, "No, 4.")),
        score_of(judge, rendered(judge, user("1+1="), "2")),
        score_of(judge, rendered(judge, user("<user>3+3=<assistant>"), "6")),
    ]
    assert scores == pytest.approx([*by_hand, by_hand[1]], abs=1e-5)
    assert len({round(score, 4) for score in by_hand}) == 3
    assert [len(pairs) for pairs in calls] == [3], "the same completion of the same prompt is scored once"


def test_the_tools_of_a_prompt_are_rendered_by_the_reward_models_template(judge: Path) -> None:
    tools = [{"type": "function", "function": {"name": "square", "parameters": {"type": "object"}}}]
    rows = [{**row("<user>1+1=<assistant>", "2", "1+1="), "tools": json.dumps(tools)}]
    with pytest.raises(
        UserError, match=r"rl\.rewards\.1\.reward_model: .* `tools`, which the chat template does not show"
    ):
        scored(judge, rows)
    template = judge / "chat_template.jinja"
    template.write_text("{% for t in tools or [] %}({{ t.function.name }}){% endfor %}" + template.read_text())
    scores, *_ = scored(judge, [*rows, row("<user>1+1=<assistant>", "2", "1+1=")])
    text = rendered(judge, user("1+1="), "2")
    assert scores == pytest.approx([score_of(judge, f"(square){text}"), score_of(judge, text)], abs=1e-5)


def test_a_model_that_was_trained_here_reads_its_answers_up_to_the_end_of_the_turn(judge: Path) -> None:
    """The rows that it was trained on end there; ``rewards.json`` marks a published copy."""
    rows = [row("<user>1+1=<assistant>", "2", "1+1=")]
    text = rendered(judge, user("1+1="), "2")
    assert text.endswith("2<end>\n")
    (whole,), *_ = scored(judge, rows)
    (judge / "rewards.json").write_text(json.dumps({"mean": 0.0, "deviation": 1.0, "answers": 10}))
    (to_the_turn_end,), *_ = scored(judge, rows)
    by_hand = score_of(judge, text), score_of(judge, text.removesuffix("\n"))
    assert (whole, to_the_turn_end) == pytest.approx(by_hand, abs=1e-5)
    assert abs(by_hand[0] - by_hand[1]) > 1e-3


@pytest.mark.parametrize("trained_here", [False, True])
def test_tokens_of_the_policy_end_as_in_the_training_of_the_reward_model(
    tiny_model: Any, tmp_path: Path, trained_here: bool
) -> None:
    """Qwen's template writes a line break behind <|im_end|>, here <unused0>, which no policy samples."""
    folder = tmp_path / "judge"
    shutil.copytree(tiny_model(), folder)
    transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    template = CLOSED.replace("<unused0>", "<unused0>{{ '\\n' }}")
    byte_tokenizer(template).save_pretrained(folder)
    if trained_here:
        (folder / "rewards.json").write_text("{}")
    calls: list[Sequence[Pair]] = []
    judged = Judge.open(dataclasses.replace(opening_of(folder, calls), chat_template=template))
    prompt = "<user>1+1=<unused0>\n<assistant>"
    (score,) = dict(judged([row(prompt, "2")])).values()
    ids = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [*user("1+1="), {"role": "assistant", "content": "2"}], return_dict=True
    )["input_ids"]
    ids = ids[:-1] if trained_here else ids
    assert [[*p, *answer] for p, answer in calls[0]] == [ids]
    with torch.no_grad():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        assert score == pytest.approx(float(model(torch.tensor([ids])).logits), abs=1e-5)


def test_scores_are_normalised_by_the_models_training_statistics(judge: Path) -> None:
    rows = [row("<user>1+1=<assistant>", "2", "1+1="), row("<user>1+1=<assistant>", "three", "1+1=")]
    (judge / "rewards.json").write_text(json.dumps({"mean": 1.5, "deviation": 4.0, "answers": 10}))
    plain, *_ = scored(judge, rows)
    normalised = dict(Judge.open(opening_of(judge, []), normalised=True)(rows))
    assert [normalised[0], normalised[1]] == pytest.approx([(score - 1.5) / 4.0 for score in plain], abs=1e-6)
    assert scored(judge, rows)[0] == plain, "only if requested"
    for content in (None, "{}", '{"mean": "x", "deviation": 1}'):
        (judge / "rewards.json").unlink(missing_ok=True)
        if content:
            (judge / "rewards.json").write_text(content)
        with pytest.raises(UserError, match=r"rl\.rewards\.1\.normalise: .* does not say the mean and deviation"):
            Judge.open(opening_of(judge, []), normalised=True)


def test_a_truncated_answer_ends_without_eos_as_in_the_policys_own_tokens(judge: Path) -> None:
    scores, *_ = scored(judge, [row("<user>1+1=<assistant>", "2 bec", "1+1=", finish_reason="length")])
    assert scores == pytest.approx(
        [score_of(judge, rendered(judge, user("1+1="), "2 bec").removesuffix("<end>\n"))], abs=1e-5
    )


def test_a_model_without_a_chat_template_reads_plain_text(tiny_model: Any, tmp_path: Path) -> None:
    judge = reward_model_with_another_tokenizer(tmp_path / "plain", tiny_model(), template=None)
    rows = [
        row("1+1=", "2"),
        row("<user>1+1=<assistant>", "2", user("1+1=")),
        row("<user>1+1=<assistant>", "2", "1+1="),
    ]
    scores, _, (warning,) = scored(judge, rows)
    by_hand = [score_of(judge, text) for text in ("1+1=2<end>", "<user>1+1=<assistant>2<end>")]
    assert scores == pytest.approx([*by_hand, by_hand[0]], abs=1e-5)
    assert "as plain text, as it has no chat template" in warning


def test_a_single_warning_names_the_field_both_models_and_the_consequence(judge: Path) -> None:
    *_, warnings = scored(judge, [row("1+1=", "2")] * 3)
    assert warnings == [
        f"rl.rewards.1.reward_model: {Reference('model', 'a' * 64).short} has another tokenizer than the-policy, so it scores "
        "the text of prompt and completion, rendered by its own chat template, instead of the policy's tokens"
    ]


def test_a_completion_that_the_model_cannot_read_fails_alone(judge: Path) -> None:
    rows = [
        row("?", "2", [{"role": "system", "content": "be brief"}, *user("1+1=")]),
        row("?", "x" * 300, "1+1="),
        row("?", "!"),
    ]
    scores, *_ = scored(judge, rows)
    refused, long, fine = scores
    assert isinstance(refused, Failed)
    assert (refused.reason, "cannot read the conversation: the chat template refuses" in str(refused)) == (
        "raised",
        True,
    )
    assert isinstance(long, Failed)
    assert long.reason == "too_long"
    assert str(long).startswith("takes at most 256 tokens, but prompt and completion have 3")
    assert isinstance(fine, float)


@pytest.fixture
def same(tiny_model: Any, tmp_path: Path) -> Path:
    """A reward model of the policy's vocabulary, with a token more."""
    judge = tmp_path / "same"
    shutil.copytree(tiny_model(), judge)
    transformers.AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).save_pretrained(judge)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<further>"])
    tokenizer.save_pretrained(judge)
    return judge


def test_the_policys_tokens_are_scored_if_ids_agree_despite_added_tokens(same: Path) -> None:
    completion = row("<user>1+1=<assistant>", "2", "1+1=")
    scores, calls, warnings = scored(same, [completion])
    assert (calls, warnings) == ([[(completion["prompt_ids"], completion["completion_ids"])]], [])
    assert scores == pytest.approx([score_of(same, "<user>1+1=<assistant>2<eos>")], abs=1e-5)


OTHERS = {
    "a system message of its own": "<system>Judge.{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}",
    "system messages otherwise": CHAT_TEMPLATE.replace("'<' ~", "('!' if message['role'] == 'system' else '<') ~"),
}


@pytest.mark.parametrize("template", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("trained_here", [False, True])
def test_a_model_reads_a_conversation_in_its_own_chat_template(template: str, trained_here: bool, same: Path) -> None:
    """As TRL renders it for each reward model, although this one has embeddings for the tokens of the prompts' template. One
    that was trained here has the chat template of its data, and has seen no other."""
    (same / "chat_template.jinja").write_text(template)
    if trained_here:
        (same / "rewards.json").write_text("{}")
    conversation = [{"role": "system", "content": "be brief"}, *user("1+1=")]
    completion = row("<system>be brief<user>1+1=<assistant>", "2", conversation)
    scores, _, warnings = scored(same, [completion])
    text = rendered(same, conversation, "2")
    assert text != "<system>be brief<user>1+1=<assistant>2<eos>"
    assert scores == pytest.approx([score_of(same, text)], abs=1e-5)
    assert warnings == [
        f"rl.rewards.1.reward_model: {Reference('model', 'a' * 64).short} has another chat template than the prompts, so it "
        "scores the text of prompt and completion, rendered by its own chat template, instead of the policy's tokens"
    ]


def test_a_model_that_was_trained_here_on_plain_text_reads_plain_text(same: Path) -> None:
    """Behind no chat template, which it has never seen; the turn ends with EOS, as in its data."""
    (same / "chat_template.jinja").unlink()
    (same / "rewards.json").write_text("{}")
    scores, _, (warning,) = scored(same, [row("<user>1+1=<assistant>", "2", "1+1=")])
    assert scores == pytest.approx([score_of(same, "1+1=2<eos>")], abs=1e-5)
    assert "another chat template than the prompts" in warning


@pytest.mark.parametrize(
    ("own", "prompts", "trained_here"),
    [
        ("plain", None, False),
        ("other", "plain", False),
        ("other", "plain", True),
        ("other", CHAT_TEMPLATE, True),  # the data of the reward model had it, too
        ("default", None, True),
    ],
)
def test_the_policys_tokens_are_scored_if_its_template_is_that_of_the_model_or_one_side_has_none(
    own: str, prompts: str | None, trained_here: bool, same: Path
) -> None:
    if own == "other":
        (same / "chat_template.jinja").write_text(OTHERS["a system message of its own"])
    if own == "plain":
        (same / "chat_template.jinja").unlink()
    if trained_here:
        (same / "rewards.json").write_text("{}")
    calls: list[Sequence[Pair]] = []
    opening = dataclasses.replace(opening_of(same, calls), chat_template=prompts, across_policies=True)
    completion = row("1+1=", "2")
    assert len(list(Judge.open(opening)([completion]))) == 1
    assert [prompt for prompt, _ in calls[0]] == [completion["prompt_ids"]]
    assert opening.warnings == []


@pytest.mark.parametrize("trained_here", [False, True])
def test_policies_with_and_without_a_chat_template_are_compared_in_that_of_the_model(
    trained_here: bool, same: Path
) -> None:
    """A base model beside its chat model, which has the template of the reward model: equal answers have equal scores. In
    training, plain prompts stay plain, as with TRL."""
    if trained_here:
        (same / "rewards.json").write_text("{}")
    calls: list[Sequence[Pair]] = []
    of_chat = dataclasses.replace(opening_of(same, calls), across_policies=True)
    of_base = dataclasses.replace(of_chat, tokenizer=byte_tokenizer("plain"), warnings=[])
    plain = row("1+1=", "2")
    (chat_score,) = dict(Judge.open(of_chat)([row("<user>1+1=<assistant>", "2", "1+1=")])).values()
    (base_score,) = dict(Judge.open(of_base)([plain])).values()
    by_hand = score_of(same, "<user>1+1=<assistant>2<eos>")
    assert [chat_score, base_score] == pytest.approx([by_hand, by_hand], abs=1e-5)
    assert (len(of_chat.warnings), len(of_base.warnings)) == (0, 1)
    (alone,) = dict(Judge.open(dataclasses.replace(of_base, across_policies=False))([plain])).values()
    assert calls[-1] == [(plain["prompt_ids"], plain["completion_ids"])]
    assert alone == pytest.approx(score_of(same, "1+1=2<eos>"), abs=1e-5)
    assert abs(alone - base_score) > 1e-3


def test_a_tokenizer_without_an_end_of_sequence_token_is_refused(judge: Path) -> None:
    config = json.loads((judge / "tokenizer_config.json").read_text())
    (judge / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(UserError, match=r"rl\.rewards\.1\.reward_model: its tokenizer .* has no end-of-sequence token"):
        scored(judge, [])


def test_a_scored_answer_ends_as_in_the_reward_models_training_for_any_stop_token() -> None:
    """A policy may stop at EOS, at another token of its generation config, or at a text, where the reward model has <|im_end|>
    (300)."""
    calls: list[Pair] = []

    def scores(pairs: Sequence[Pair]) -> list[float]:
        calls.extend((prompt, [int(token) for token in answer]) for prompt, answer in pairs)
        return [0.0] * len(pairs)

    end = AnswerEnd(ids=[300], stop_ids=(257, 300))
    rows = [
        {"prompt_ids": [1], "completion_ids": ids, "finish_reason": reason}
        for ids, reason in (
            ([5, 257], "stop"),
            ([6, 300], "stop"),
            ([7, 8], "length"),
            ([9, 257], "length"),
            ([10, 62], "stop"),
        )
    ]
    list(Judge(scores, answer_end=end)(rows))
    assert [answer for _, answer in calls] == [[5, 300], [6, 300], [7, 8], [9, 257], [10, 62, 300]]


CLOSED = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<unused0>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "end", "kind"),
    [
        (CLOSED, "<unused0>", "reward-model"),
        (None, "<eos>", "model"),
        ("{{ messages[-1].content }}", "<eos>", "model"),
        ("plain", "<eos>", "model"),
    ],
)
def test_a_scored_answer_ends_as_the_chat_template_of_the_data_closes_turns(
    template: str | None, end: str, kind: str, tmp_path: Path
) -> None:
    """The tokenizer of the reward model knows only the template that closes turns with EOS; <unused1> is a stop token of the
    policy's generation config alone."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    calls: list[Pair] = []

    @contextmanager
    def scores(model: Model, name: str, verdicts: tuple[int, int] | None = None) -> Iterator[Any]:
        def run(pairs: Sequence[Pair]) -> list[float]:
            calls.extend(pairs)
            return [0.0] * len(pairs)

        yield run

    token, further = tokenizer.convert_tokens_to_ids([end, "<unused1>"])
    judge = Judge.open(
        Opening(
            "rl.rewards.0",
            ResourcesConfig(),
            tokenizer,
            turn_end=Renderer(tokenizer, template, [further]).turn_end,
            chat_template=template,
            model=Model(tmp_path, Reference(kind, "a" * 64)),
            scores=scores,
        )
    )
    answers = ([50, token], [51, tokenizer.eos_token_id], [52, further], [53])
    list(judge([{"prompt_ids": [1], "completion_ids": answer, "finish_reason": "stop"} for answer in answers]))
    assert [answer for _, answer in calls] == [[50, token], [51, token], [52, token], [53, token]]
