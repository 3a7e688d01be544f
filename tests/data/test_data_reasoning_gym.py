"""Prompts of reasoning-gym: reproducible, split without overlap, and scored by the library itself."""

# mypy: disable-error-code="call-arg, attr-defined"
# The fields of a source are those of its origin, a plug-in.

from __future__ import annotations

import json
from typing import Any

import pytest

from alignment_core.data import kinds
from alignment_core.data.build import build
from alignment_core.data.origins import reasoning_gym
from alignment_core.data.pin import pin
from alignment_core.errors import DataError, UserError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.rewards.verify import verifier_content, verify

NEEDED = "the extra `environments` is not in `.venv`: `make peers` runs this"


def rows(name: str, split: str = "train", count: int = 20, seed: int = 0, **options: object) -> list[dict]:
    return list(reasoning_gym.rows(name, split, count, seed, options))


def completion(text: str, label: str) -> dict:
    return {"source": "x", "task": None, "prompt_text": "?", "completion_text": text, "label": label}


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    for use in (lambda: pin(DataSource(reasoning_gym="leg_counting")), lambda: verifier_content("reasoning_gym")):
        with pytest.raises(UserError, match=r"install the extra: pip install 'alignment\[environments\]'"):
            use()


def test_a_source_has_exactly_one_origin() -> None:
    (source,) = DataConfig.model_validate({"reasoning_gym": "leg_counting", "options": {"max_animals": 2}}).sources
    assert (source.field, source.origin) == ("reasoning_gym", "leg_counting")
    with pytest.raises(ValueError, match="give exactly one"):
        DataSource(reasoning_gym="leg_counting", task="reverse")


def test_rows_follow_from_the_seed_and_a_shorter_call_has_the_first() -> None:
    pytest.importorskip("reasoning_gym", reason=NEEDED)
    problems = rows("leg_counting")
    assert problems == rows("leg_counting") == rows("leg_counting", count=30)[:20]
    assert problems != rows("leg_counting", seed=1)
    assert rows("leg_counting", max_animals=2, min_animals=2) != problems
    train, test = ({row["prompt"] for row in rows("coin_flip", split, 300)} for split in ("train", "test"))
    assert not train & test


def test_a_data_set_is_built_from_a_reasoning_gym_task() -> None:
    pytest.importorskip("reasoning_gym", reason=NEEDED)
    pinned = pin(DataSource(reasoning_gym="leg_counting", rows=3))
    located: list[Any] = list(pinned.read(0, 7, kinds.load("prompts")))
    assert [where for where, _ in located] == [f"reasoning_gym:leg_counting/train:{number}" for number in (1, 2, 3)]
    config = DataConfig(sources=(pinned.source,), shuffle=False)
    table = build(config, [pinned], byte_tokenizer(), "prompts", 7).train.to_pylist()
    assert [row["label"] for row in table] == [row["label"] for _, row in located]
    content = pinned.content()
    assert (content["made"], content["version"]) == ({"reasoning_gym": "leg_counting"}, reasoning_gym.version())
    with pytest.raises(UserError, match="provides only prompts"):
        list(pinned.read(0, 7, kinds.load("demonstrations")))


@pytest.mark.parametrize("name", ["leg_counting", "arc_agi", "countdown"])
def test_the_librarys_own_score_survives_the_label(name: str) -> None:
    pytest.importorskip("reasoning_gym", reason=NEEDED)
    label = rows(name, count=1)[0]["label"]
    answer = json.loads(label)["entry"]["answer"]
    answers = [answer, f"<answer>no</answer> I mean <answer> {answer} </answer>.", "I do not know"]
    right, marked, wrong = verify("reasoning_gym", [completion(text, label) for text in answers])
    assert right == marked == 1.0
    assert wrong is not None
    assert wrong < 0.1


def test_a_label_of_no_row_is_refused() -> None:
    pytest.importorskip("reasoning_gym", reason=NEEDED)
    with pytest.raises(DataError, match="'42' is not the label of a `reasoning_gym` row"):
        verify("reasoning_gym", [completion("42", "42")])


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"reasoning_gym": "leg_countin"}, "'leg_countin' with the options .*not registered"),
        ({"reasoning_gym": "leg_counting", "options": {"legs": 3}}, "unexpected keyword argument 'legs'"),
        ({"reasoning_gym": "leg_counting", "options": {"min_animals": 0}}, "AssertionError"),
        ({"reasoning_gym": "leg_counting", "split": "dev"}, "no split 'dev'"),
        ({"reasoning_gym": "list_functions"}, "gives different rows each time"),
    ],
)
def test_an_invalid_source_is_refused_when_pinned(source: dict, problem: str) -> None:
    pytest.importorskip("reasoning_gym", reason=NEEDED)
    with pytest.raises(UserError, match=problem):
        pin(DataSource.model_validate(source))
