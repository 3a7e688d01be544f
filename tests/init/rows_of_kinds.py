"""Rows of every kind, under several names, with the method that they suggest and the columns that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

N = range(40)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


def hh(n: int, answer: str) -> str:
    return f"\n\nHuman: {n}?\n\nAssistant: {answer}"


ROWS: dict[str, tuple[str, dict[str, str], list[dict[str, Any]]]] = {
    "prompt and completion": (
        "sft", {"prompt": "prompt", "completion": "completion"},
        [{"prompt": f"q {n}", "completion": f"a {n}"} for n in N],
    ),
    "question and response": (
        "sft", {"prompt": "question", "completion": "response"},
        [{"id": n, "question": f"q {n}", "response": f"a {n}"} for n in N],
    ),
    "capitals": (
        "sft", {"prompt": "User Input", "completion": "Response"},
        [{"User Input": f"q {n}", "Response": f"a {n}"} for n in N],
    ),
    "input and output": (
        "sft", {"prompt": "input", "completion": "output"}, [{"input": f"q {n}", "output": f"a {n}"} for n in N],
    ),
    "Alpaca": (
        "sft", {"prompt": "instruction", "completion": "output"},
        [{"instruction": f"do {n}", "input": "it" * (n % 2), "output": f"a {n}"} for n in N],
    ),
    "good and bad": (
        "dpo", {"prompt": "question", "chosen": "good", "rejected": "bad"},
        [{"question": f"q {n}", "good": f"a {n}", "bad": f"b {n}"} for n in N],
    ),
    "messages": ("sft", {"messages": "messages"}, [{"messages": turns(f"q {n}", f"a {n}")} for n in N]),
    "conversation": ("sft", {"messages": "conversation"}, [{"conversation": turns(f"q {n}", f"a {n}")} for n in N]),
    "worked solutions": (
        "sft", {"prompt": "question", "completion": "answer"},
        [{"question": f"q {n}", "answer": f"It is {n}.\n#### {n}"} for n in N],
    ),
    "solution and answer": (
        "sft", {"prompt": "problem", "completion": "solution"},
        [{"problem": f"q {n}", "solution": rf"It is \boxed{{{n}}}", "answer": str(n)} for n in N],
    ),
    "preferences": (
        "dpo", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        [{"prompt": f"q {n}", "chosen": f"a {n}", "rejected": f"b {n}"} for n in N],
    ),
    "preferences with other names": (
        "dpo", {"prompt": "question", "chosen": "preferred", "rejected": "dispreferred"},
        [{"question": f"q {n}", "preferred": f"a {n}", "dispreferred": f"b {n}"} for n in N],
    ),
    "whole conversations": (
        "dpo", {"chosen": "chosen", "rejected": "rejected"},
        [{"chosen": turns(f"q {n}", "a"), "rejected": turns(f"q {n}", "b")} for n in N],
    ),
    "HH": ("dpo", {"chosen": "chosen", "rejected": "rejected"}, [{"chosen": hh(n, "a"), "rejected": hh(n, "b")} for n in N]),
    "labels": (
        "kto", {"prompt": "prompt", "completion": "completion", "label": "label"},
        [{"prompt": f"q {n}", "completion": f"a {n}", "label": n % 2 == 0} for n in N],
    ),
    "thumbs": (
        "kto", {"prompt": "question", "completion": "answer", "label": "accepted"},
        [{"question": f"q {n}", "answer": f"a {n}", "accepted": n % 2} for n in N],
    ),
    "prompt and label": ("rl", {"prompt": "prompt", "label": "label"}, [{"prompt": f"q {n}", "label": str(n)} for n in N]),
    "numbers": ("rl", {"prompt": "problem", "label": "answer"}, [{"problem": f"q {n}", "answer": n} for n in N]),
    "tests of programs": (
        "rl", {"prompt": "prompt", "label": "tests"},
        [{"prompt": f"q {n}", "tests": json.dumps({"tests": "assert True"})} for n in N],
    ),
    "steps": (
        "process-reward-model", {"prompt": "prompt", "completions": "completions", "labels": "labels"},
        [{"prompt": f"q {n}", "completions": ["a", "b"], "labels": [True, False]} for n in N],
    ),
    "steps with other names": (
        "process-reward-model", {"prompt": "question", "completions": "steps", "labels": "ratings"},
        [{"question": f"q {n}", "steps": ["a", "b"], "ratings": [1, 0.5]} for n in N],
    ),
    "Math-Shepherd": (
        "process-reward-model", {"input": "input", "label": "label"},
        [{"input": f"{n}? Step 1: a ки", "label": f"{n}? Step 1: a +"} for n in N],
    ),
    "text": ("continued-pretraining", {"text": "text"}, [{"text": f"words {n}"} for n in N]),
    "content": ("continued-pretraining", {"text": "content"}, [{"url": "x", "content": f"words {n}"} for n in N]),
    "prompts alone": ("generate", {"prompt": "prompt"}, [{"prompt": f"q {n}"} for n in N]),
    "turns of MT-Bench": ("generate", {"prompt": "turns.0"}, [{"question_id": n, "turns": [f"q {n}", "and?"]} for n in N]),
}  # fmt: skip
"""By a name for people."""


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
