"""Built-in procedural tasks: endless and verifiable, and all but `instructions` short enough for a model of single bytes."""

from __future__ import annotations

import difflib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from alignment_core.canonical import derive_seed
from alignment_core.data import instructions
from alignment_core.errors import UserError

VOWELS = "aeiou"
CONSONANTS = "bdklmnprst"
DIGITS = "0123456789"
SPLITS = ("train", "test")
OPTIONS = {"correct": "share of correct demonstrations, between 0 and 1"}
COMPARED = 5
"""Number of digits in the task `highest`; the right answer has a step for each but one."""
WRONG_STEPS = 0.1
"""Probability that a step of a wrong answer is wrong, beside the one that always is."""
TEST_SHARE = 0.1
"""Share of all possible prompts that belongs to the test split."""


Steps = list[tuple[str, bool]]
"""Lines of an answer, and whether each follows from the lines before it."""


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str
    """The right one; where many are right, the label that the task's verifier needs."""
    alphabet: str
    """Characters that a plausible wrong answer is made of; none where many answers are right."""
    draw_steps: Callable[[Random, bool], Steps] | None = None
    """Of a task whose answers have steps: draws those of a right answer, or of a wrong one."""


@dataclass(frozen=True)
class Problem(Question):
    """A question with draws of other answers: each kind of rows makes its row of it."""

    task: str = field(kw_only=True)
    random: Random = field(kw_only=True)
    correct: float = field(kw_only=True)
    """Share of attempts that are right."""

    def mistake(self) -> str:
        """Draw a plausible wrong answer: never the right one, never empty."""
        self._check_answers()
        if self.draw_steps:
            return "\n".join(step for step, _ in self.draw_steps(self.random, False))
        return corrupt(self.answer, self.alphabet, self.random)

    def attempt(self) -> str:
        """Draw an answer that is right as often as the option ``correct`` says."""
        self._check_answers()
        return self.answer if self.random.random() < self.correct else self.mistake()

    def steps(self) -> Steps:
        """Draw an answer in steps, which is right as often as the option ``correct`` says. Raises UserError for a task whose
        answers have none."""
        if self.draw_steps is None:
            raise UserError(f"answers to the built-in task {self.task!r} have no steps; those to `highest` do")
        return self.draw_steps(self.random, self.random.random() < self.correct)

    def _check_answers(self) -> None:
        """Raise UserError for a task that has prompts alone."""
        if not self.alphabet:
            raise UserError(
                f"the built-in task {self.task!r} has prompts for sampling and evaluation, but no answers to train on"
            )


def _digits(random: Random) -> str:
    return "".join(random.choice(DIGITS) for _ in range(4))


def _reverse(random: Random) -> Question:
    word = "".join(random.choice(CONSONANTS) + random.choice(VOWELS) for _ in range(2))
    return Question(f"reverse: {word}\n", word[::-1], VOWELS + CONSONANTS)


def _first(random: Random) -> Question:
    digits = _digits(random)
    return Question(f"first: {digits}\n", digits[0] * 4, DIGITS)


def _last(random: Random) -> Question:
    digits = _digits(random)
    return Question(f"last: {digits}\n", digits[-1] * 4, DIGITS)


def _sort(random: Random) -> Question:
    digits = _digits(random)
    return Question(f"sort: {digits}\n", "".join(sorted(digits)), DIGITS)


def _max(random: Random) -> Question:
    numbers = [random.randint(10, 99) for _ in range(3)]
    return Question(f"max: {' '.join(map(str, numbers))}\n", str(max(numbers)), DIGITS)


def _highest(random: Random) -> Question:
    digits = [random.choice(DIGITS) for _ in range(COMPARED)]
    draw = functools.partial(_highest_so_far, digits)
    answer = "\n".join(step for step, _ in draw(random, True))
    return Question(f"highest: {' '.join(digits)}\n", answer, DIGITS, draw)


def _highest_so_far(digits: Sequence[str], random: Random, right: bool) -> Steps:
    """One digit after the other, and the highest up to it. A wrong step names another, from which the next one goes on."""
    surely_wrong = None if right else random.randrange(1, len(digits))
    highest, steps = digits[0], []
    for place, digit in enumerate(digits[1:], start=1):
        before, highest = highest, max(highest, digit)
        wrong = place == surely_wrong or (not right and random.random() < WRONG_STEPS)
        highest = _another(highest, random) if wrong else highest
        steps.append((f"{before},{digit}={highest}", not wrong))
    return steps


def _instructions(random: Random) -> Question:
    return Question(*instructions.draw(random), alphabet="")


def _another(digit: str, random: Random) -> str:
    return random.choice([candidate for candidate in DIGITS if candidate != digit])


TASKS: dict[str, Callable[[Random], Question]] = {
    "reverse": _reverse,
    "first": _first,
    "last": _last,
    "sort": _sort,
    "max": _max,
    "highest": _highest,
    "instructions": _instructions,
}
"""Makers of one question of each task; a maker draws only from its argument, a random generator."""
MIXED = "mixed"
MIXTURE = ("reverse", "first", "last", "sort", "max")
"""The tasks that it draws from."""


def names() -> list[str]:
    """The names that a recipe may use."""
    return [*TASKS, MIXED]


def check(task: str, split: str = "train", options: dict[str, Any] | None = None) -> None:
    """Raise UserError if there is no such task, split or option, naming the nearest that exists."""
    if task not in names():
        raise UserError(f"there is no built-in task {task!r}; {_nearest(task, names())}")
    if split not in SPLITS:
        raise UserError(f"task {task!r} has no split {split!r}; {_nearest(split, SPLITS)}")
    for option in options or {}:
        if option not in OPTIONS:
            raise UserError(f"task {task!r} has no option {option!r}; {_nearest(option, OPTIONS)}")
    correct = (options or {}).get("correct", 1.0)
    if isinstance(correct, bool) or not isinstance(correct, (int, float)) or not 0 <= correct <= 1:
        raise UserError(f"task {task!r}: option `correct` is {OPTIONS['correct']}, got {correct!r}")


def problems(task: str, split: str, count: int, seed: int, options: dict[str, Any] | None = None) -> Iterator[Problem]:
    """``count`` problems of a task. The first n of a longer call are those of a shorter one.

    No prompt of one split occurs in the other, whatever the seed.
    """
    check(task, split, options)
    correct = (options or {}).get("correct", 1.0)
    yielded = draw = 0
    while yielded < count:
        random = Random(derive_seed(seed, "task", task, split, draw))
        draw += 1
        name = random.choice(MIXTURE) if task == MIXED else task
        question = TASKS[name](random)
        if split_of(question.prompt) == split:
            yielded += 1
            yield Problem(**vars(question), task=name, random=random, correct=correct)


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to, by the hash of its text alone."""
    first = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")
    return "test" if first < TEST_SHARE * 2**32 else "train"


def verify(task: str, prompt: str, completion: str, label: str | None) -> float:
    """1.0 if the completion answers the prompt of this task, else 0.0. Raises UserError for an unknown task."""
    check(task)
    return VERIFIERS.get(task, is_label)(prompt, completion, label)


def is_label(prompt: str, completion: str, label: str | None) -> float:
    """1.0 if the completion, without surrounding white space, is the label; else 0.0.

    Raises ValueError for a missing label: a reward that cannot be computed is no zero.
    """
    if label is None:
        raise ValueError(f"a prompt without a label cannot be verified: {prompt!r}")
    return float(completion.strip() == label.strip())


VERIFIERS = {"instructions": instructions.verify}
"""Of tasks whose prompts have many right answers."""


# Mistakes: each function takes (answer, alphabet, random) and may, by chance, return the answer unchanged.


def _replace_one(answer: str, alphabet: str, random: Random) -> str:
    place = random.randrange(len(answer))
    return answer[:place] + random.choice(alphabet) + answer[place + 1 :]


def _replace_many(answer: str, alphabet: str, random: Random) -> str:
    share = random.choice((0.4, 0.7, 1.0))
    return "".join(random.choice(alphabet) if random.random() < share else letter for letter in answer)


def _swap(answer: str, alphabet: str, random: Random) -> str:
    letters = list(answer)
    i, j = random.randrange(len(letters)), random.randrange(len(letters))
    letters[i], letters[j] = letters[j], letters[i]
    return "".join(letters)


def _omit(answer: str, alphabet: str, random: Random) -> str:
    place = random.randrange(len(answer))
    return answer[:place] + answer[place + 1 :]


def _insert(answer: str, alphabet: str, random: Random) -> str:
    place = random.randrange(len(answer) + 1)
    return answer[:place] + random.choice(alphabet) + answer[place:]


def _cut_off(answer: str, alphabet: str, random: Random) -> str:
    return answer[: random.randrange(1, len(answer))] if len(answer) > 1 else answer


CORRUPTIONS: dict[Callable[[str, str, Random], str], float] = {
    _replace_one: 0.35,
    _replace_many: 0.30,
    _swap: 0.15,
    _omit: 0.07,
    _insert: 0.07,
    _cut_off: 0.06,
}
"""Probability of each mistake; half-trained models make the same mistakes."""


def corrupt(answer: str, alphabet: str, random: Random) -> str:
    """A plausible wrong answer: never the right one, never empty."""
    while True:
        (mistake,) = random.choices(list(CORRUPTIONS), weights=list(CORRUPTIONS.values()))
        wrong = mistake(answer, alphabet, random)
        if wrong and wrong != answer:
            return wrong


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
