"""The built-in task `instructions`: questions for pretrained chat models, with instructions that a program can verify.

Each prompt has two instructions, as those of IFEval (Zhou et al. 2023, arXiv 2311.07911); an answer is right if it follows
both. The label of a prompt is its instructions as JSON: ``[["words", 12], ["first", "Well"]]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

COUNT = 2
"""Instructions of a prompt."""


@dataclass(frozen=True)
class Instruction:
    """A kind of instruction."""

    sentences: tuple[str, ...]
    """Ways to give it; ``{}`` stands for the value."""
    values: tuple[Any, ...]
    follows: Callable[[str, Any], bool]
    """Whether an answer, without surrounding white space, follows it with this value."""
    begins: bool = False
    """Whether it determines how the answer begins; a prompt has one such instruction at most."""


def _words(answer: str) -> list[str]:
    return re.findall(r"\w[\w'-]*", answer)


def _numbered(answer: str, count: int) -> bool:
    lines, marks = answer.splitlines(), [f"{number}. " for number in range(1, count + 1)]
    return len(lines) == count and all(
        line.startswith(mark) and _words(line.removeprefix(mark)) for line, mark in zip(lines, marks, strict=True)
    )


KINDS: dict[str, Instruction] = {
    "words": Instruction(
        ("Use at most {} words.", "Answer in no more than {} words."),
        (8, 10, 12, 15),
        lambda answer, most: 0 < len(_words(answer)) <= most,
    ),
    "keyword": Instruction(
        ('Use the word "{}".', 'Your answer must contain the word "{}".'),
        ("always", "good", "people", "small", "water", "world"),
        lambda answer, word: word in _words(answer.lower()),
    ),
    "no-comma": Instruction(
        ("Use no commas.", "Do not use any comma."),
        (None,),
        lambda answer, _: bool(_words(answer)) and "," not in answer,
    ),
    "first": Instruction(
        ('Begin your answer with the word "{}".', 'The first word of your answer must be "{}".'),
        ("Well", "Honestly", "Simply", "Sure", "Indeed"),
        lambda answer, word: answer.startswith(word) and _words(answer)[0] == word,
        begins=True,
    ),
    "numbers": Instruction(
        ("List exactly {} items, numbered from 1.", "Give a numbered list of {} short items."),
        (2, 3),
        _numbered,
        begins=True,
    ),
    "question": Instruction(
        ("Answer with a question.", "End your answer with a question mark."),
        (None,),
        lambda answer, _: bool(_words(answer)) and answer.endswith("?"),
    ),
}
QUESTIONS = (
    "What are {} good for?",
    "Tell me a fact about {}.",
    "Why do people like {}?",
    "Describe {} to a child.",
    "What is special about {}?",
    "Where does one find {}?",
)
SUBJECTS = (
    "apples bread bridges butter candles cats chairs chess clouds coffee dogs elephants flowers forests gold honey horses ice "
    "jazz lakes lemons libraries lions maps milk mirrors money mountains music paper penguins pianos rain rivers rockets salt "
    "sand schools ships snow soap spiders stars sugar tea tigers trains trees violins volcanoes water whales wheels windows "
    "wolves"
)


def draw(random: Random) -> tuple[str, str]:
    """A prompt and its label."""
    kinds: list[str] = []
    for kind in random.sample(list(KINDS), len(KINDS)):
        taken = any(KINDS[other].begins for other in kinds)
        if len(kinds) < COUNT and not (taken and KINDS[kind].begins):
            kinds.append(kind)
    instructions = [[kind, random.choice(KINDS[kind].values)] for kind in kinds]
    sentences = [random.choice(KINDS[kind].sentences).format(value) for kind, value in instructions]
    question = random.choice(QUESTIONS).format(random.choice(SUBJECTS.split()))
    return " ".join([question, *sentences]), json.dumps(instructions)


def followed(completion: str, label: str) -> list[bool]:
    """For each instruction of the label, whether the completion follows it."""
    answer = completion.strip()
    return [KINDS[kind].follows(answer, value) for kind, value in json.loads(label)]


def _followed(prompt: str, completion: str, label: str | None) -> list[bool]:
    if label is None:
        raise ValueError(f"a prompt without a label cannot be verified: {prompt!r}")
    return followed(completion, label)


def verify(prompt: str, completion: str, label: str | None) -> float:
    """1.0 if the completion follows all instructions of the label, else 0.0. Raises ValueError for a missing label."""
    return float(all(_followed(prompt, completion, label)))


def share(rows: list[dict[str, Any]]) -> list[float]:
    """A reward function: the share of its instructions that each completion follows. Raises ValueError for a missing label."""
    of_rows = [_followed(row["prompt"], row["completion"], row["label"]) for row in rows]
    return [sum(each) / len(each) for each in of_rows]
