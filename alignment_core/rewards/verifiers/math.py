"""`verifier: math`: whether a completion's final answer equals the label's, as mathematics by math-verify or as text."""

from __future__ import annotations

import re

from alignment_core.rewards.named import NamedVerifier

_ANSWER = r"[^\S\n]*(?:\*\*|__)?[-+\u2212]?[^\S\n]*(?:[$€£¥\\]|[(\[{]?[-+\u2212]?[.,]?\d)"
"""The beginning of a line with a number, a formula or an amount of money, also in bold."""
_NUMBERED = r"[^\S\n]*[*_]*\d+[.):][^\S\n]+[*_]*[^\W\d]"
MARK = re.compile(r"(?<!#)####(?!#)")
FINAL = re.compile(rf"{MARK.pattern}(?=(?!{_NUMBERED}){_ANSWER}|[^\S\n]*\n|[^\n]*+\s*+\Z)")
"""GSM8K's mark before the final answer. Markdown has it before headings of the fourth level, such as `#### Step 2` and
`#### 2. Add`: unlike them, a mark has its answer behind it, or is alone on its line, or on the last one. An answer in words
is behind any ``MARK``, as it may be a heading's."""
MINUS = "\u2212"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
WORDS_IN_LATEX = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
FORMULA = re.compile(r"(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
AS_LATEX = (
    (re.compile(r"(?<=\d)(?:[ ~\u00a0\u202f]|\\[,:; ])(?=\d{3}(?!\d))"), ""),  # 1 000, 1\,000
    (re.compile(r"(?<=\d)\.$"), ""),  # a full stop
    (re.compile(r"(?<![\d.,])(\d+) (\d+)/(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),  # 1 1/2
    (re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])"), r"\1 \\cdot 10^{\2}"),  # 1e-3
)
"""Notations of numbers that LaTeX reads as products, with replacements."""
DATE = r"\d+([-/.:])\d+(?:\1\d+)+|\d{1,2}:\d{2}(?:\s*[ap]\.?m\.?)?"
"""Dates, times, versions and other numbers with separators, such as 2024-01-02, 10:30 and 192.168.0.1, unlike arithmetic."""
CODE = r"[^\W\d_]+\d\w*|\d+(?!e\d+$)[^\W\d_]+\d\w*|0x[\da-f]+"
"""Codes such as B2, which is not 2B."""
RANGE = r"\d+(?:\.\d+)?[-:]\d+(?:\.\d+)?"
"""Ranges and ratios; a label 3-1 is not a difference."""
DATE_IN_TEXT = re.compile(r"(?<![\w.+*/-])\d{4}-\d{1,2}-\d{1,2}(?![\w*/-])")
OPERATORS = set("+-*/^=<>()[]{}|!%\\")


def verify(prompt: str, completion: str, label: str | None) -> float:
    """1.0 if the completion's final answer equals the label's, else 0.0.

    The final answer is in the last closed box, or the line behind the last ``####`` that is no heading, or the last formula
    or number that math-verify extracts; what comes before ``####`` does not count. An answer that math-verify cannot prove
    equal to the label's within five seconds is wrong. A label of words, a date, a time, a range, a ratio or a code is compared
    as text, ignoring case and white space; ``$…$`` around a label makes it a formula. Raises ValueError for a label without
    an answer.
    """
    import math_verify

    expected, _ = _final(label or "")
    if not expected:
        raise ValueError(f"the label {label!r} has no answer to compare with")
    is_text = _is_text(expected)
    answer, is_marked = _final(completion, MARK if is_text else FINAL)
    gold = [] if is_text else math_verify.parse(_as_formula(expected))
    if all(isinstance(part, str) for part in gold):  # also a formula that math-verify cannot parse
        formulas = [] if is_marked else FORMULA.findall(answer)
        return float(_as_text("".join(formulas[-1]) if formulas else answer) == _as_text(expected))
    if re.fullmatch(f"{DATE}|{CODE}", _as_text(answer)):
        return 0.0
    parsed = math_verify.parse(_as_formula(answer) if is_marked else DATE_IN_TEXT.sub(" ", answer))
    return float(math_verify.verify(gold, parsed))


def _final(text: str, mark: re.Pattern[str] = FINAL) -> tuple[str, bool]:
    """The final answer, or the text that contains it, with minus signs as hyphens, and whether it is in a box."""
    text = text.replace(MINUS, "-")
    behind = behind_mark(text, mark)
    box = _last_box(text if behind is None else behind)
    if box is not None:
        return box, True
    lines = [text] if behind is None else behind.strip().splitlines()
    return (lines[0].strip() if lines else ""), False


def behind_mark(text: str, mark: re.Pattern[str] = FINAL) -> str | None:
    """The text behind the last mark of a final answer; None without a mark."""
    marks = [*mark.finditer(text)]
    return text[marks[-1].end() :] if marks else None


def _last_box(text: str) -> str | None:
    """The content of the last closed box."""
    for box in reversed(list(BOX.finditer(text))):
        depth = 1
        for brace in re.finditer(r"(?<!\\)[{}]", text[box.end() :]):
            depth += 1 if brace.group() == "{" else -1
            if not depth:
                return text[box.end() : box.end() + brace.start()].strip()
    return None


def _is_text(answer: str) -> bool:
    """Whether a label's answer is compared as text: words, a date, a time, a range or a code."""
    text = _as_text(answer)
    if FORMULA.search(answer):
        return False
    if re.fullmatch(f"{DATE}|{CODE}|{RANGE}", text):
        return True
    if not text or text[0].isdigit() or OPERATORS & set(text):
        return False
    words = set(re.split(r"[\s,;.:'’]+", text)) - {"and", "or"}
    return any(len(word) > 1 and word.isalpha() for word in words)


def _as_text(answer: str) -> str:
    """The answer without LaTeX's text commands, dollars, a full stop, case, repeated white space, and white space around
    separators."""
    plain = WORDS_IN_LATEX.sub(r"\1", answer).replace("$", " ").replace("\\ ", " ").replace("~", " ")
    return re.sub(r"\s*([-/:])\s*", r"\1", re.sub("[–—]", "-", " ".join(plain.split()))).removesuffix(".").casefold()


def _as_formula(answer: str) -> str:
    """LaTeX that math-verify parses as a whole, not only the last number in it."""
    latex = answer
    for pattern, meaning in AS_LATEX:
        latex = pattern.sub(meaning, latex)
    return latex if FORMULA.search(latex) else rf"\boxed{{{latex}}}"


VERIFIER = NamedVerifier(function=f"{__name__}:verify", packages=("math-verify", "sympy"))
