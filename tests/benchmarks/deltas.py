"""Bytes of weight updates as deltas, of a pretrained model in bf16 after steps of AdamW, and seconds that both sides take.

Each line is the update after a step: gradients are those of the next token's log-likelihood in texts of this project.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment_core.inference.channels.buckets import Assembler, from_bucket, to_buckets
from alignment_core.inference.channels.deltas import DeltaDecoder, DeltaEncoder
from tests.real_model import real_model

RATES, STEPS = (1e-6, 1e-5), 4
ROWS, TOKENS = 4, 128
DOCS = Path(__file__).parents[2] / "docs"


def updates(rate: float) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights in bf16 before the first step and after each, whose master weights are fp32."""
    model = AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32)
    text = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(real_model())(text)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for rows in tokens[: STEPS * ROWS * TOKENS].view(STEPS, ROWS, TOKENS):
        yield _in_bf16(model)
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    yield _in_bf16(model)


def _in_bf16(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach().bfloat16()) for name, parameter in model.named_parameters()]


def measured(rate: float) -> Iterator[dict[str, float]]:
    """A line for each step; the bytes are those in buckets and their layouts, which each channel sends."""
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    last: dict[str, torch.Tensor] = {}
    for step, weights in enumerate(updates(rate)):
        version = decoder.begin()
        started = time.perf_counter()
        buckets = [(layout, data.copy()) for layout, data in to_buckets(encoder.encode(weights, [version]))]
        encoded = time.perf_counter()
        assembler = Assembler()
        received = [weight for bucket in buckets for weight in decoder.decode(from_bucket(assembler, bucket))]
        decoded = time.perf_counter()
        for (_, tensor), (_, sent) in zip(received, weights, strict=True):
            assert torch.equal(tensor.view(torch.int16), sent.view(torch.int16))
        full = sum(tensor.nbytes for _, tensor in weights)
        size = sum(len(data) + len(json.dumps(layout)) for layout, data in buckets)
        if step:
            changed = sum(int((tensor != last[name]).sum()) for name, tensor in weights)
            yield {
                "learning_rate": rate,
                "step": step,
                "changed_elements": round(changed / (full / 2), 5),
                "bytes": size,
                "full_bytes": full,
                "full_over_delta": round(full / size, 1),
                "encode_seconds_per_gib": round((encoded - started) / full * 2**30, 2),
                "decode_seconds_per_gib": round((decoded - encoded) / full * 2**30, 2),
            }
        last = dict(weights)


def main() -> None:
    torch.set_num_threads(1)
    for rate in RATES:
        for line in measured(rate):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
