"""The trainer against a bare PyTorch loop with the same model and packing; packed against padded."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, REPEATS, TOKENS = 4, 3, 512


def alternate(parts: dict[str, Callable[[], None]], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Median seconds of each part, run in turn so that drift of the machine affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for part in parts.values():
        part()
    for _ in range(REPEATS):
        for name, part in parts.items():
            started = clock()
            part()
            seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from alignment_core.artifacts import Reference
    from alignment_core.cluster.device import Device
    from alignment_core.models.loading import load_model
    from alignment_core.models.microbatch import cut, pack
    from alignment_core.models.model_ref import Model
    from alignment_core.models.packed import PackedModel, run_packed
    from alignment_core.models.scratch import create_model
    from alignment_core.recipes import ResourcesConfig, ScratchModel, TrainingConfig
    from alignment_core.training.methods.sft import Sft
    from alignment_core.training.ranks import join
    from alignment_core.training.trainer import TrainJob
    from alignment_core.training.training_rows import batch_of_step

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    shape = ScratchModel(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8)
    parameters = create_model(shape, None, 0, folder / "model")
    rng = random.Random(0)
    lengths = [max(16, min(TOKENS, int(rng.lognormvariate(4.6, 0.7)))) for _ in range(64)]
    rows = [{"input_ids": [rng.randrange(256) for _ in range(n)], "loss_mask": [1] * n} for n in lengths]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")

    resources = ResourcesConfig(trainers=1, max_tokens_per_microbatch=TOKENS)
    device = Device.detect("cpu")
    join(0, 1, f"file://{folder}/meet", resources, device)
    training = TrainingConfig(batch_size=8, num_train_epochs=1000)
    job = TrainJob(
        Sft(),
        Model(folder / "model", Reference("model", "0" * 64)),
        None,
        folder / "train.parquet",
        None,
        training,
        0,
    )
    trainer = job.open(resources, device, 0, 1)
    trainer.prepare(None)

    model = PackedModel(load_model(str(folder / "model"), "lm", torch.float32), "lm").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    method = Sft()
    table = method.rows(pq.read_table(folder / "train.parquet"))
    step = 0

    def bare() -> None:
        nonlocal step
        for _ in range(STEPS):
            batch = [table[number] for number in batch_of_step(step, len(table), 8, 0)]
            normaliser = method.normaliser(batch)
            for part in cut(batch, 1, TOKENS)[0]:
                micro = pack(part)
                loss, _ = method.loss(run_packed(model, micro), micro, None)
                (loss / normaliser).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1

    def padded() -> None:
        for start in range(0, 8 * STEPS, 8):
            part = [row.sequences[0].ids for row in table[start : start + 8]]
            width = max(map(len, part))
            ids, mask = torch.zeros(8, width, dtype=torch.long), torch.zeros(8, width, dtype=torch.long)
            for index, sample in enumerate(part):
                ids[index, : len(sample)], mask[index, : len(sample)] = torch.from_numpy(sample), 1
            labels = ids.masked_fill(mask == 0, -100)
            model.model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    ours: Callable[[], Any] = lambda: trainer.train(STEPS, 1e9)  # noqa: E731
    seconds = alternate({"trainer": ours, "bare": bare, "padded": padded})
    tokens = statistics.mean(lengths) * 8 * STEPS
    print(
        json.dumps(
            {
                "parameters": parameters,
                "trainer_tokens_per_second": round(tokens / seconds["trainer"]),
                "trainer_over_bare_loop": round(seconds["bare"] / seconds["trainer"], 3),
                "packed_over_padded": round(seconds["padded"] / seconds["bare"], 3),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
