"""Answers as mathematics: equality with the label, and valid labels."""

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


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        (r"\boxed{4} … wait, I forgot one. \boxed{5}", "5", 1.0),
        (r"\boxed{4} … wait, I forgot one. \boxed{5}", "4", 0.0),
        (r"$\boxed{4}$ and $\boxed{5}$", "5", 1.0),
        (r"\boxed{5}. Let me check: $4 + 1 = 5$ and not 6", "5", 1.0),
        (r"\boxed{\frac{1}{\sqrt{2}}}, or \boxed{\dfrac{\sqrt{2}}{2}}", r"\frac{\sqrt{2}}{2}", 1.0),
        (r"\boxed{5} and then \boxed{6", "5", 1.0),  # cut off: the last one that is closed
        (r"\boxed{4} \boxed{}", "4", 0.0),
        (r"\boxed{4} #### 5", "5", 1.0),
        (r"#### \boxed{4} = \boxed{5}", "5", 1.0),
        ("#### Step 3: Conclusion\nThe answer is $\\boxed{5}$.", "5", 1.0),  # a heading of Markdown
        ("#### Step 3: Conclusion\nThe answer is $\\boxed{5}$.", "3", 0.0),
        ("\\boxed{5}\n##### 3", "5", 1.0),
        ("\\boxed{5}\n### 3", "5", 1.0),
        (r"\fbox{4} then \boxed {5}", "5", 1.0),
        (r"\boxed{7}", r"First \boxed{4}, but in the end \boxed{7}.", 1.0),
        (r"\boxed{4}", r"First \boxed{4}, but in the end \boxed{7}.", 0.0),
        (r"\boxed{1, 2}", "{2, 1}", 1.0),  # one box may hold several values
    ],
)
def test_the_last_box_counts(completion: str, label: str, score: float) -> None:
    assert equal("", completion, label) == score


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### Step 2: Add\nThe total is 18.", "18"),
        ("#### 2. Add\nThe total is 18.", "18"),
        ("#### **2) Add**\nThe total is 18.", "18"),
        ("#### Final Answer\n18", "18"),
        ("#### Final Answer\n\n**18**\n", "18"),
        ("The total is 18.\n#### Step 2", "2"),  # on the last line it is a mark
        ("#### 18\nThat is more than 2.", "18"),
        ("#### 1,800.50\nI am sure, 2.", "1800.5"),  # as GSM8K and lm-eval match: #### (\-?[0-9\.\,]+)
        ("#### -18\nThat is less than 2.", "-18"),
        ("#### −18\nThat is less than 2.", "-18"),
        ("#### $18\nThat is more than 2.", "18"),
        ("#### **18**\nThat is more than 2.", "18"),
        ("#### $\\frac{1}{2}$\nThat is less than 2.", "1/2"),
        ("####\n18\nThat is more than 2.", "18"),
        ("#### Answer: 18 apples\n\n", "18"),
    ],
)
def test_a_heading_is_not_taken_for_the_mark_of_gsm8k(completion: str, answer: str) -> None:
    assert equal("", completion, answer) == 1.0
    assert equal("", completion, {"2": "18"}.get(answer, "2")) == 0.0


@pytest.mark.parametrize(
    ("completion", "label"),
    [
        ("No doubt.\n#### Yes\n\nQuestion: And is 2 even?", "yes"),
        ("#### AB\nQuestion: What is 1 + 1?", "AB"),
    ],
)
def test_an_answer_in_words_may_be_followed_by_text(completion: str, label: str) -> None:
    """As base models continue."""
    assert equal("", completion, label) == 1.0


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        (r"\boxed{AB}", "AB", 1.0),
        (r"\boxed{BA}", "AB", 0.0),
        (r"\boxed{\text{AB}}", "AB", 1.0),
        (r"\boxed{BA}", r"\text{AB}", 0.0),
        (r"\boxed{BA}", r"\boxed{AB}", 0.0),
        ("#### AB", "AB", 1.0),
        ("#### BA", "AB", 0.0),
        ("AB", "AB", 1.0),
        ("AB is wrong, so it is BA", "AB", 0.0),
        ("it is $AB$.", "AB", 1.0),
        (r"\boxed{ton}", "not", 0.0),
        (r"\boxed{Yes}", "yes", 1.0),
        (r"\boxed{solution  no}", "no solution", 0.0),
        (r"\boxed{\text{no  solution.}}", "No solution", 1.0),
        (r"\boxed{5 June}", "June 5", 0.0),
        (r"\boxed{2024-01-02}", "2024-01-02", 1.0),
        (r"\boxed{2021}", "2024-01-02", 0.0),
        (r"\boxed{2024-02-01}", "2024-01-02", 0.0),
        (r"\boxed{2024-01-02}", "2021", 0.0),
        ("#### 2024-01-02", "2021", 0.0),
        ("on 2024-01-02", "2021", 0.0),
        (r"\boxed{1/2/2024}", "1/4048", 0.0),
        (r"\boxed{1:3}", "10:30", 0.0),
        (r"\boxed{10:30}", "10:30", 1.0),
        (r"\boxed{2}", "3-1", 0.0),
        (r"\boxed{3 – 1}", "3-1", 1.0),
        (r"\boxed{3}", "3:1", 0.0),
        (r"\boxed{0}", "0xFF", 0.0),
        (r"\boxed{0xff}", "0xFF", 1.0),
        (r"\boxed{C++}", "C++", 1.0),
        (r"\boxed{C}", "C++", 0.0),
        (r"\boxed{10.0.0.1}", "10.0.0.1", 1.0),
        (r"\boxed{0}", "10.0.0.1", 0.0),
        (r"\boxed{2B}", "B2", 0.0),
        (r"\boxed{B2}", "2B", 0.0),
        (r"\boxed{东京}", "东京", 1.0),
        (r"\boxed{京东}", "东京", 0.0),
    ],
)
def test_words_dates_and_codes_are_compared_as_text(completion: str, label: str, score: float) -> None:
    assert equal("", completion, label) == score


@pytest.mark.parametrize(
    ("completion", "label"),
    [
        (r"\boxed{BA}", "$AB$"),  # dollars make a formula of it
        (r"\boxed{1 + x}", "x+1"),
        (r"\boxed{3y^2x}", "3xy^2"),
        (r"\boxed{c+ab}", "ab+c"),
        (r"\boxed{7}", "10 - 4 + 1"),
        (r"\boxed{10-3}", "7"),
        (r"\boxed{1:2}", "1/2"),
        (r"so $10-3=7$", "7"),
        (r"\boxed{B}", "B"),
        (r"\boxed{x = 6 \text{ or } x = 5}", "x = 5 or x = 6"),
        (r"\boxed{10}", "10 cm"),
        (r"\boxed{18.9}", r"\$18.90"),
        (r"\boxed{6.02 \times 10^{23}}", "6.02e23"),
        (r"\boxed{1e-3}", "0.001"),
        (r"\boxed{1,000}", "1000"),
        (r"\boxed{1000}", "1 000"),
        (r"\boxed{12\,345\,678}", "12345678"),  # thin spaces; math-verify alone reads 12·345·678 or less
        (r"\boxed{100000}", r"100\,000"),
        (r"\boxed{5.}", "5"),
        (r"\boxed{−5}", "-5"),  # the minus sign of Unicode
        ("so x is −5", "-5"),
        ("#### −5", "-5"),
        (r"\boxed{-5}", "−5"),
        (r"\boxed{\frac{3}{2}}", "1 1/2"),
        (r"\boxed{3e5}", "300000"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{(1, 2)}", "(1,2)"),
    ],
)
def test_formulas_and_numbers_are_compared_as_mathematics(completion: str, label: str) -> None:
    assert equal("", completion, label) == 1.0


def test_a_label_without_an_answer_is_a_failure() -> None:
    row = {"source": "p.jsonl:1", "task": None, "prompt_text": "?", "completion_text": "42", "label": None}
    with pytest.raises(DataError, match=r"the verifier math failed: ValueError: the label None has no answer"):
        verify("math", [row])


def test_the_version_of_math_verify_is_part_of_the_verifiers_identity() -> None:
    assert verifier_packages("math") == ("math-verify", "sympy")
    assert verifier_content("math") == {"name": "math"}


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
