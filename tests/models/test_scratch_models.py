"""Models from scratch: their weights depend only on the seed, even if created concurrently."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alignment_core.models.scratch import create_model
from alignment_core.recipes import ScratchModel


def test_models_that_are_made_at_once_have_the_weights_that_each_has_alone(tmp_path: Path) -> None:
    shapes = [ScratchModel(hidden_size=32 * size, num_attention_heads=2, num_hidden_layers=4) for size in (1, 2, 3, 4)]

    def weights_of(name: str, number: int) -> bytes:
        folder = tmp_path / f"{name}-{number}"
        folder.mkdir()
        create_model(shapes[number], None, 7, folder)
        return (folder / "model.safetensors").read_bytes()

    alone = [weights_of("alone", number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for attempt in range(3):
            at_once = list(pool.map(lambda number: weights_of(f"at-once-{attempt}", number), range(4)))  # noqa: B023
            assert at_once == alone
