"""`verifier: math`: whether a completion's answer equals the label as mathematics, by math-verify."""

from __future__ import annotations

from alignment_core.rewards.named import NamedVerifier

FINAL = "####"
"""What comes before the final answer of GSM8K."""


def verify(prompt: str, completion: str, label: str | None) -> float:
    """1.0 if the completion's final answer equals the label's, else 0.0.

    The final answer follows the last ``####``, or is what math-verify finds: the last ``\\boxed{…}``, formula or number. One
    that cannot be shown to equal the label's within math-verify's five seconds is wrong. Raises ValueError for a label
    without an answer.
    """
    import math_verify

    answer = _final(label or "")
    marked = "$" in answer or r"\boxed" in answer
    gold = math_verify.parse(answer if marked else rf"\boxed{{{answer}}}") if answer else []
    if not gold:
        raise ValueError(f"the label {label!r} has no answer to compare with")
    return float(math_verify.verify(gold, math_verify.parse(_final(completion))))


def _final(text: str) -> str:
    _, found, answer = text.rpartition(FINAL)
    lines = answer.strip().splitlines() if found else [text]
    return lines[0].strip() if lines else ""


VERIFIER = NamedVerifier(function=f"{__name__}:verify", packages=("math-verify",))
