"""The built-in task `instructions`: what follows an instruction and what does not, by hand."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from alignment_core.data import instructions, kinds, tasks
from alignment_core.errors import UserError

FOLLOWED = {
    ("words", 8): [
        "Bees make it, and we eat it.",
        "one two three four five six seven eight",
        "It's sweet -- very well-known!",
    ],
    ("keyword", "small"): ["They are small.", "SMALL", "a small, cold lake"],
    ("no-comma", None): ["They float."],
    ("first", "Well"): ["Well, it floats.", "Well", "Well: yes"],
    ("numbers", 2): ["1. They float.\n2. They are cold."],
    ("question", None): ["Do they float?"],
}
NOT_FOLLOWED = {
    ("words", 8): ["", "...", "one two three four five six seven eight nine"],
    ("keyword", "small"): ["", "They are smaller.", "small-minded", "smal l"],
    ("no-comma", None): ["", "!", "Well, they float."],
    ("first", "Well"): [
        "",
        "They float well.",
        "well, it floats.",
        "Wells are deep.",
        "Well-known.",
        '"Well, it floats."',
    ],
    ("numbers", 2): [
        "",
        "1. They float.",
        "1. One.\n2. ",
        "1. One.\n3. Two.",
        "1) One.\n2) Two.",
        "1. One.\n2. Two.\n3. Three.",
    ],
    ("question", None): ["", "?", "They float.", "Do they float? Yes."],
}


@pytest.mark.parametrize("instruction", FOLLOWED, ids=str)
def test_each_kind_of_instruction(instruction: tuple[str, Any]) -> None:
    label = json.dumps([instruction])
    for answer in FOLLOWED[instruction]:
        assert instructions.verify("", f" {answer}\n", label) == 1.0, answer
    for answer in NOT_FOLLOWED[instruction]:
        assert instructions.verify("", answer, label) == 0.0, answer


def test_every_kind_is_tested_above() -> None:
    assert {kind for kind, _ in FOLLOWED} == {kind for kind, _ in NOT_FOLLOWED} == set(instructions.KINDS)


def test_an_answer_is_right_if_it_follows_all_and_its_share_is_the_reward() -> None:
    label = '[["words", 8], ["no-comma", null], ["question", null]]'
    answers = {
        "Do they float?": (1.0, 1.0),
        "Well, do they?": (0.0, 2 / 3),
        "Well, they float.": (0.0, 1 / 3),
        "": (0.0, 0.0),
    }
    for answer, (right, share) in answers.items():
        assert tasks.verify("instructions", "", answer, label) == right
        assert instructions.share([{"prompt": "", "completion": answer, "label": label}]) == [share]


def test_prompts_give_two_instructions_that_one_answer_can_follow() -> None:
    seen = set()
    for seed in range(300):
        prompt, label = instructions.draw(Random(seed))
        given = json.loads(label)
        assert len(given) == 2
        assert sum(instructions.KINDS[kind].begins for kind, _ in given) < 2, given
        for kind, value in given:
            assert any(sentence.format(value) in prompt for sentence in instructions.KINDS[kind].sentences)
        seen |= {kind for kind, _ in given}
    assert seen == set(instructions.KINDS)


@pytest.mark.parametrize("kind", ["demonstrations", "preferences", "unpaired", "stepwise"])
def test_rows_to_train_on_are_refused(kind: str) -> None:
    (problem,) = tasks.problems("instructions", "train", 1, 0)
    with pytest.raises(UserError, match=r"'instructions'.* no (answers|steps)"):
        kinds.load(kind).of_problem(problem)


def test_a_prompt_without_a_label_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="without a label"):
        tasks.verify("instructions", "Describe ice.", "Cold!", None)
    with pytest.raises(ValueError, match="without a label"):
        instructions.share([{"prompt": "Describe ice.", "completion": "Cold!", "label": None}])
