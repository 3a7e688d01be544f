"""A round of two completions for each prompt, by a policy that has a tokenizer and no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table

AT = {"started_at": "2026-11-25T10:00:00+00:00", "finished_at": "2026-11-25T10:00:01+00:00"}


def publish_round(
    store: Store,
    folder: Path,
    prompts: int = 3,
    texts: Sequence[str] = ("a good answer", "a bad answer"),
    label: str = "round-1",
    images: Mapping[str, bytes] = {},
) -> tuple[Reference, Reference]:
    """The rollouts and scores: of the completions of a prompt, the first one has the highest reward. ``images`` are
    files of images of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    policy = store.publish(folder / "policy", "model")
    rows: list[dict[str, Any]] = []
    for prompt in range(prompts):
        for sample, text in enumerate(texts):
            completion = f"{text} to {prompt}"
            ids = tokenizer(f"{completion}<eos>")["input_ids"]
            rows.append(
                {
                    "policy": str(policy),
                    "prompt": prompt,
                    "sample": sample,
                    "prompt_ids": [1],
                    "completion_ids": ids,
                    "logps": [-0.01, -0.5, -1.0, -3.0] + [-0.01] * (len(ids) - 4),
                    "prompt_text": f"<user>{prompt}",
                    "messages": json.dumps(f"question {prompt} {texts[-1]}"),
                    "completion_text": completion,
                    "finish_reason": "stop",
                    "source": f"p:{prompt}",
                }
            )
    (folder / "rollouts").mkdir()
    write_table(rows, rollout_schema(), folder / "rollouts" / "shard-00000.parquet")
    for name, content in images.items():
        (folder / "rollouts" / "images").mkdir(exist_ok=True)
        (folder / "rollouts" / "images" / name).write_bytes(content)
    keys = [digest_of([stage, label, *texts, str(folder)]) for stage in ("generate", "score")]
    made = ProvenanceDraft(key=keys[0], stage="generate", label=f"{label}/generate", inputs={"policy": policy}, **AT)
    rollouts = store.publish(folder / "rollouts", "rollouts", made)
    (folder / "scores").mkdir()
    scored = [
        {"prompt": row["prompt"], "sample": row["sample"], "reward": -row["sample"], "finish_reason": "stop"}
        for row in rows
    ]
    write_table(scored, score_schema(), folder / "scores" / SCORES)
    made = ProvenanceDraft(key=keys[1], stage="score", label=f"{label}/score", inputs={"rollouts": rollouts}, **AT)
    return rollouts, store.publish(folder / "scores", "scores", made)
