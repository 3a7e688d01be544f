"""Answers as mathematics: what equals the label, and what a label must have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment_core.errors import DataError
from alignment_core.rewards.verifiers.math import verify as equal
from alignment_core.rewards.verify import verifier_content, verifier_packages, verify

GSM8K = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("so it is 42.", "42", 1.0),
        ("#### 1,000", "1000", 1.0),
        (r"\boxed{\frac12}", "0.5", 1.0),
        ("$1 + x$", "x+1", 1.0),
        (r"it is $\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        (r"\boxed{7}", r"We add and get \boxed{7}.", 1.0),
        ("no idea", "42", 0.0),
        ("first 42, but then 43", "42", 0.0),
        ("42 #### ", "42", 0.0),
    ],
)
def test_the_final_answers_are_compared_as_mathematics(completion: str, label: str, score: float) -> None:
    assert equal("", completion, label) == score


def test_a_label_without_an_answer_is_a_failure() -> None:
    row = {"source": "p.jsonl:1", "task": None, "prompt_text": "?", "completion_text": "42", "label": None}
    with pytest.raises(DataError, match=r"the verifier math failed: ValueError: the label None has no answer"):
        verify("math", [row])


def test_the_version_of_math_verify_is_part_of_what_the_verifier_is() -> None:
    assert "math-verify" in verifier_packages("math")
    assert verifier_content("code") == {"name": "code"}


@pytest.mark.skipif(not GSM8K.is_file(), reason="../shared/data (GSM8K) is not here")
def test_real_rows_of_gsm8k() -> None:
    with GSM8K.open() as file:
        answers = [json.loads(line)["answer"] for line, _ in zip(file, range(20), strict=False)]
    finals = [answer.rpartition("####")[2].strip() for answer in answers]
    assert [equal("", answer, answer) for answer in answers] == [1.0] * 20
    assert [equal("", f"The answer is {final}.", answer) for final, answer in zip(finals, answers, strict=True)] == [
        1.0
    ] * 20
    assert [equal("", f"The answer is {final}1.", answer) for final, answer in zip(finals, answers, strict=True)] == [
        0.0
    ] * 20
