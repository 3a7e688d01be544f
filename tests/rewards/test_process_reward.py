"""Process reward models as rewards: scores of steps, reduced to one number."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.data.build import build
from alignment_core.data.pin import pin
from alignment_core.data.steps import STEPS
from alignment_core.errors import UserError
from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Pair
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.process_reward_model import StepsConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.process_reward import StepJudge, Steps, aggregated
from alignment_core.user_code.errors import Failed
from tests.rewards.test_model_reward import row

LAYOUT = StepsConfig(placeholder="?")


@pytest.fixture
def judge(tiny_model: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "judge"
    shutil.copytree(tiny_model(), folder)
    (folder / STEPS).write_text(LAYOUT.model_dump_json())
    return folder


def opened(
    path: Path,
    calls: list[Sequence[Pair]],
    given: StepsConfig | None = None,
    how: Any = "min",
    per_step: Any = None,
) -> StepJudge:
    """With real forward passes in this process; ``calls`` records their arguments."""

    @contextmanager
    def scores(model: Model, name: str, verdicts: tuple[int, int] | None = None) -> Iterator[Any]:
        from alignment_core.training.forward import ForwardJob

        assert (name, verdicts) == ("reward-1", (ord("+"), ord("-")))
        forward = ForwardJob(model, "lm", verdicts=verdicts).open(ResourcesConfig(), Device("cpu", 1))

        def run(pairs: Sequence[Pair]) -> list[float]:
            calls.append(pairs)
            return forward.run(pairs).tolist()

        yield run

    model = Model(path, Reference("process-reward-model", "a" * 64))
    opening = Opening("rl.rewards.1", ResourcesConfig(), byte_tokenizer(), model=model, scores=scores)
    return StepJudge.open(opening, given, how, per_step)


def by_hand(path: Path, prompt: str, steps: Sequence[str], mark: str = "?") -> list[float]:
    """The probability of + against - behind each step, by one plain pass for each."""
    model, tokenizer = load_model(str(path), "lm", torch.float32), byte_tokenizer()
    probabilities, text = [], prompt
    for step in steps:
        text += step + "\n" + mark
        ids = tokenizer(text)["input_ids"]
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].detach()
        probabilities.append(float(torch.softmax(logits[[ord("+"), ord("-")]], -1)[0]))
    return probabilities


@pytest.mark.parametrize(
    ("how", "value"), [("min", 0.25), ("product", 0.5 * 0.25 * 0.75), ("last", 0.75), ("mean", 0.5)]
)
def test_aggregates_by_hand(how: Any, value: float) -> None:
    log_odds = [math.log(p / (1 - p)) for p in (0.5, 0.25, 0.75)]
    assert aggregated(log_odds, how) == pytest.approx(value)
    assert aggregated([], how) == 0.0, "an answer without steps"
    assert aggregated([-1e5], how) == pytest.approx(0.0, abs=1e-9)


def test_each_step_can_have_a_reward_of_its_own_at_its_last_token(judge: Path) -> None:
    texts = ["first\nsecond\n\nthird", "größer\nelse\n", ""]
    rows = [row("<user>2+2=<assistant>", text, "2+2=") for text in texts]
    rewards = dict(opened(judge, [], per_step="sum")(rows))
    prompt = "<user>2+2=<assistant>"
    for number, steps in enumerate((["first", "second", "third"], ["größer", "else"])):
        chances = by_hand(judge, prompt, steps)
        assert rewards[number].reward == pytest.approx(min(chances), abs=1e-6)
        assert [reward for _, reward in rewards[number].steps] == pytest.approx(chances, abs=1e-6)
    ends = [[place for place, _ in rewards[number].steps] for number in range(3)]
    last = [len(row["completion_ids"]) - 1 for row in rows]
    assert ends == [[5, 12, last[0]], [8, last[1]], [last[2]]], "a token is a byte here"
    assert rewards[2].steps[0][1] == 0.0, "an answer without steps is wrong"
    worst = dict(opened(judge, [], per_step="min")(rows))
    assert [reward.steps for reward in worst.values()] == [
        (min(reward.steps, key=lambda step: step[1]),) for reward in rewards.values()
    ]


def test_each_step_is_scored_with_all_preceding_text(judge: Path) -> None:
    calls: list[Sequence[Pair]] = []
    rows = [
        row("<user>2+2=<assistant>", "first\nsecond\n\nthird", "2+2="),
        row("<user>2+2=<assistant>", "first\nelse", "2+2="),
        row("<user>2+2=<assistant>", "", "2+2="),
        row("<user>2+2=<assistant>", "\n \n", "2+2="),
    ]
    rewards = dict(opened(judge, calls)(rows))
    prompt = "<user>2+2=<assistant>"
    chances = by_hand(judge, prompt, ["first", "second", "third"]), by_hand(judge, prompt, ["first", "else"])
    assert [rewards[number] for number in range(4)] == pytest.approx(
        [min(chances[0]), min(chances[1]), 0.0, 0.0], abs=1e-6
    )
    assert [len(pairs) for pairs in calls] == [4], "the step that both begin with is judged once"


def test_the_reading_of_steps_is_configurable_for_external_models(judge: Path) -> None:
    (judge / STEPS).unlink()
    with pytest.raises(
        UserError, match=r"rl.rewards.1.process_reward_model: .*has no process_reward_model.json\): give `steps`"
    ):
        opened(judge, [])
    rewards = dict(opened(judge, [], StepsConfig(), "last")([row("<user>1<assistant>", "one", "1")]))
    assert rewards[0] == pytest.approx(by_hand(judge, "<user>1<assistant>", ["one"], "")[0], abs=1e-6)
    (judge / STEPS).write_text(json.dumps({"separator": 3}))
    with pytest.raises(UserError, match=r"process_reward_model\.json cannot be read"):
        opened(judge, [])


@pytest.mark.parametrize("template", [True, False], ids=["chat template", "plain text"])
def test_a_row_of_math_shepherd_is_trained_on_as_the_model_is_used(judge: Path, template: bool, tmp_path: Path) -> None:
    """Prompt and step have the same ids, although the data set has both in one text."""
    tokenizer = byte_tokenizer()
    if not template:
        tokenizer.chat_template = None
        (judge / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(judge)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input": "How many? Step 1: Two. ки\n", "label": "How many? Step 1: Two. +\n"}))
    config = DataConfig.model_validate({"path": str(file)})
    (trained,) = build(config, [pin(source) for source in config.sources], tokenizer, "stepwise", 0).train.to_pylist()
    used = row(
        "<user>How many?<assistant>" if template else "How many?", "Step 1: Two.", "How many?" if template else None
    )
    pairs = Steps(Model(judge, Reference("model", "a" * 64)), StepsConfig(), "field").pairs(used)
    assert pairs == [(trained["prompt_ids"], trained["completion_ids"])]


def test_a_model_can_read_a_tag_between_step_and_separator(judge: Path) -> None:
    """As Math-Shepherd's does: each step is judged at the tag."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (judge / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(judge)
    layout = StepsConfig(placeholder="?", placeholder_prefix=" ", answer_prefix=" ")
    pairs = Steps(Model(judge, Reference("model", "a" * 64)), layout, "field").pairs(
        row("1+2+3", "Step 1: a\nStep 2: b")
    )
    assert not isinstance(pairs, Failed)
    assert [bytes([*prompt, *ids]).decode() for prompt, ids in pairs] == [
        "1+2+3 Step 1: a ?",
        "1+2+3 Step 1: a ?\nStep 2: b ?",
    ]


def test_a_completion_longer_than_the_context_fails_alone(judge: Path) -> None:
    rows = [row("<user>1<assistant>", "x" * 300, "1"), row("<user>1<assistant>", "one", "1")]
    rewards = dict(opened(judge, [])(rows))
    assert isinstance(rewards[0], Failed)
    assert str(rewards[0]).startswith("takes at most 256 tokens, but prompt, steps and verdict have")
    assert isinstance(rewards[1], float)
