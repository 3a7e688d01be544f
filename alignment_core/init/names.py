"""Other names of columns for the roles of our formats of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    role: tuple(names.split())
    for role, names in {
        "prompt": (
            "instruction question query input problem user human request source context inputs prompt_text "
            "user_input user_message user_prompt turns.0"
        ),
        "completion": (
            "response output solution answer reply assistant target generation outputs completion_text "
            "assistant_message model_output model_response generated_text bot"
        ),
        "messages": "conversation conversations chat dialog dialogue history",
        "text": "content document body article passage raw_content page",
        "chosen": "preferred good winner better accepted response_chosen chosen_response positive win",
        "rejected": "dispreferred bad loser worse response_rejected rejected_response negative lose",
        "label": (
            "answer final_answer solution ground_truth groundtruth gold expected target reference expected_answer "
            "gold_answer result tests reward_model.ground_truth"
        ),
        "unpaired.label": (
            "accepted thumbs_up thumb thumbs good is_good liked like desirable upvoted feedback correct "
            "is_correct approved positive rating vote score"
        ),
        "stepwise.completions": "steps solution_steps reasoning_steps process",
        "stepwise.labels": "ratings step_labels step_ratings scores correctness",
        "math_shepherd.label": "",
        "math_shepherd.input": "",
        "margin": "score_margin score_diff",
    }.items()
}
"""By role, or by format and role where the role has another meaning in that format. The likelier name comes first."""
CONTEXT = ("input", "context")
"""Columns that belong into the prompt beside an `instruction` or `question`, as in Alpaca's rows."""


def names(format: str, role: str) -> tuple[str, ...]:
    """The names that the column of a role may have, the likeliest first."""
    return (role, *OTHER_NAMES.get(f"{format}.{role}", OTHER_NAMES.get(role, ())))


def called(wanted: Iterable[str], columns: Iterable[str]) -> list[str]:
    """Columns with one of the ``wanted`` names, in their order; case and separators do not count."""
    by_name: dict[str, str] = {}
    for column in columns:
        by_name.setdefault(_normalized(column), column)
    matches = []
    for name in wanted:
        head, dot, rest = name.partition(".")
        if _normalized(head) in by_name:
            matches.append(f"{by_name[_normalized(head)]}{dot}{rest}")
    return list(dict.fromkeys(matches))


def _normalized(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
