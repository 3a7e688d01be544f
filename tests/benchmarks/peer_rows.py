"""Training data of the peers: rows of SFT, pairs, prompts, and a model that never ends a completion by itself.

Real rows are those of the folder ``DATA``.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.laps import Rows

BATCH = 16
"""Rows, or pairs, of an optimiser step. A lap is two steps of SFT, one of DPO or one of GRPO."""
PROMPTS, COMPLETIONS, PROMPT, COMPLETION = 16, 8, 200, 61
"""Of a step of GRPO: prompts, completions of each, and the tokens of both."""
LONGEST = 512
LEAST_FULL = 0.9
"""Of the tokens that completions may have: so many at least they have on average."""
DATA = Path(os.environ.get("REAL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
HH = DATA / "hh-rlhf-harmless" / "train.jsonl"
GSM8K = DATA / "gsm8k" / "train.jsonl"


def demonstrations() -> Rows:
    """Of about 125 tokens, every one a target."""
    source = random.Random(0)
    lengths = [max(16, min(LONGEST, int(source.lognormvariate(4.6, 0.7)))) for _ in range(2 * BATCH)]
    return [{"input_ids": [source.randrange(256) for _ in range(n)], "loss_mask": [1] * n} for n in lengths]


def made_up_pairs() -> Rows:
    """150 tokens, and two completions of 60."""
    source = random.Random(0)
    lengths = {"prompt_ids": 150, "chosen_ids": 60, "rejected_ids": 60}
    return [
        {**{name: [source.randrange(256) for _ in range(n)] for name, n in lengths.items()}, "margin": None}
        for _ in range(BATCH)
    ]


def hh_pairs(encode: Callable[[str], list[int]] = lambda text: list(text.encode()), count: int = BATCH) -> Rows:
    """The first pairs of HH-RLHF that fit, in bytes unless they are encoded otherwise."""
    rows: Rows = []
    for line in HH.read_text().splitlines():
        pair = json.loads(line)
        (prompt, _, chosen), (same, _, rejected) = (
            pair[name].rpartition("\n\nAssistant:") for name in ("chosen", "rejected")
        )
        ids = [encode(text) for text in (f"{prompt}\n\nAssistant:", chosen, rejected)]
        if prompt == same and chosen and rejected and len(ids[0]) + max(map(len, ids[1:])) <= LONGEST:
            rows.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)) | {"margin": None})
        if len(rows) == count:
            break
    return rows


def prompts() -> Rows:
    from alignment_core.models.tokenizer import byte_tokenizer

    source, tokenizer = random.Random(0), byte_tokenizer()
    texts = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT)) for _ in range(PROMPTS)]
    return [
        {"prompt": text, "prompt_ids": tokenizer(text)["input_ids"], "source": f"rows:{number}"}
        for number, text in enumerate(texts)
    ]


def gsm8k(tokenizer: Any, count: int) -> Rows:
    """The first questions of GSM8K with their solutions, as a chat; only those are targets."""
    rows: Rows = []
    for number, line in enumerate(GSM8K.read_text().splitlines()[:count]):
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
        ids, whole = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, tokenizer.apply_chat_template(turns, tokenize=False))
        )
        mask = [int(place >= len(ids)) for place in range(len(whole))]
        rows.append(
            {"input_ids": whole, "loss_mask": mask, "prompt": prompt, "prompt_ids": ids, "source": f"rows:{number}"}
        )
    return rows


def make_endless(model: Path) -> None:
    """Let a model with a head of its own sample EOS with a probability of about e^-15: completions have their full length.

    Its states get a constant component that only EOS's row of the head reads.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        weights.get_input_embeddings().weight[:, 0] = 1.0
        head = weights.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[tokenizer.eos_token_id, 0] = -1.0
    weights.save_pretrained(model)
