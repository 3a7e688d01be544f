"""What a user writes without a library for training or sampling, and the matrix product that bounds all sides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.laps import Laps, Rows
from tests.benchmarks.peer_rows import BATCH, LEAST_FULL, LONGEST

SIZE, PRODUCTS = 4096, 4


def product(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """``PRODUCTS`` products of square matrices are a lap."""
    import torch

    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    left, right = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    while True:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=result)
        laps.over()


def bare_sft(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """A loop of PyTorch: rows end to end in lines whose position ids restart, logits of targets alone, autocast for bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-5)
    while True:
        for first in range(0, len(rows), BATCH):
            batch = rows[first : first + BATCH]
            count = sum(sum(row["loss_mask"]) for row in batch)
            for line in _lines(batch):
                ids = torch.tensor([token for row in line for token in row["input_ids"]])
                positions = torch.cat([torch.arange(len(row["input_ids"])) for row in line])
                targets = torch.tensor([flag for row in line for flag in row["loss_mask"]]).nonzero()[:, 0]
                with torch.autocast("cpu", torch.bfloat16, enabled=settings["bf16"]):
                    hidden = weights.model(ids[None], position_ids=positions[None], use_cache=False).last_hidden_state
                    logits = weights.lm_head(hidden[0, targets - 1])
                loss = torch.nn.functional.cross_entropy(logits.float(), ids[targets], reduction="sum") / count
                loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        laps.over()


def _lines(rows: Rows) -> list[Rows]:
    """The rows, the longest first, in the first line that has room for them."""
    lines: list[Rows] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        for line in lines:
            if sum(len(other["input_ids"]) for other in [*line, row]) <= LONGEST:
                line.append(row)
                break
        else:
            lines.append([row])
    return lines


def bare_vllm(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """Completions of all prompts, with their log-probabilities, by one engine."""
    import vllm

    completions, length = settings["completions"], settings["length"]
    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    llm = vllm.LLM(
        str(model),
        dtype="float32",
        max_model_len=max(len(row["prompt_ids"]) for row in rows) + length,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
        **settings["options"],
    )
    parameters = vllm.SamplingParams(
        n=completions,
        max_tokens=length,
        temperature=1.0,
        logprobs=0,
        detokenize=False,
        stop_token_ids=settings["stop_ids"],
    )
    while True:
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        assert tokens >= LEAST_FULL * len(prompts) * completions * length
        laps.over()
