"""Forward and backward passes over rows with common prefixes: with shared tokens computed once, and each row separately."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Row, TokenSequence, cut, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.scratch import create_model
from alignment_core.recipes import ScratchModel
from tests.benchmarks.training import alternate

BUDGET = 1024
SHAPE = ScratchModel(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    max_position_embeddings=1024,
)


def rows_of_each_kind() -> dict[str, list[Row]]:
    """4 prompts of 200 tokens with 8 completions of 61; 8 pairs of 150 + 60 tokens; 16 rows of about 125; 128 rows of 17."""
    source = random.Random(0)

    def some(count: int) -> list[int]:
        return [source.randrange(256) for _ in range(count)]

    def sequences(prompt: list[int], *lengths: int) -> tuple[TokenSequence, ...]:
        return tuple(TokenSequence.of_prompt_and_completion(prompt, some(length)) for length in lengths)

    groups = [sequences(some(200), *[61] * 8) for _ in range(4)]
    lengths = [max(16, min(512, int(source.lognormvariate(4.6, 0.7)))) for _ in range(16)]
    kinds: dict[str, list[tuple[TokenSequence, ...]]] = {
        "completions": [(completion,) for group in groups for completion in group],
        "pairs": [sequences(some(150), 60, 60) for _ in range(8)],
        "demonstrations": [sequences(some(length // 3), length - length // 3) for length in lengths],
        "short_demonstrations": [sequences(some(8), 9) for _ in range(128)],
    }
    return {name: [Row(number, sequence) for number, sequence in enumerate(rows)] for name, rows in kinds.items()}


def passes(model: PackedModel, rows: list[Row]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of all rows."""
    model.zero_grad()
    loss = 0.0
    for part in cut(rows, 1, BUDGET, model.shares_prefixes)[0]:
        loss_of_pack = -run_packed(model, pack(part, share_prefixes=model.shares_prefixes)).sum()
        loss_of_pack.backward()
        loss += float(loss_of_pack)
    return loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        parameters = create_model(SHAPE, None, 0, Path(folder))
        trees, lines = (
            PackedModel(load_model(folder, "lm", torch.float32), "lm", share_prefixes=share).train()
            for share in (True, False)
        )
    assert trees.shares_prefixes
    for name, rows in rows_of_each_kind().items():
        (loss, gradient), (loss_of_lines, gradient_of_lines) = passes(trees, rows), passes(lines, rows)
        parts = {"trees": partial(passes, trees, rows), "lines": partial(passes, lines, rows)}
        seconds = alternate(parts)  # type: ignore[arg-type]
        difference = (gradient - gradient_of_lines).norm() / gradient_of_lines.norm()
        print(
            json.dumps(
                {
                    "parameters": parameters,
                    "rows": name,
                    "tokens": sum(row.tokens for row in rows),
                    "mean_length": round(statistics.mean(row.tokens / len(row.sequences) for row in rows)),
                    "seconds": round(seconds["trees"], 3),
                    "lines_over_trees": round(seconds["lines"] / seconds["trees"], 2),
                    "loss_differs_by": float(f"{abs(loss - loss_of_lines) / loss_of_lines:.1e}"),
                    "gradient_differs_by": float(f"{float(difference):.1e}"),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
