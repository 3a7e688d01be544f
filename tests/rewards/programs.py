"""Programs of completions as rows, and their tests."""

from __future__ import annotations

import json

DOUBLES = json.dumps({"tests": "assert double(2) == 4\nassert abs(double(-3) + 6) == 0"})
ADDS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})


def row(completion: str, label: str | None = DOUBLES) -> dict:
    return {"source": "p.jsonl:1", "task": None, "prompt_text": "?", "completion_text": completion, "label": label}
