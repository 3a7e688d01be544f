"""Ranks of policy trainers that rest between their steps; started by test_resting.py."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training import resting
from alignment_core.training.checkpoints import complete
from alignment_core.training.policy_trainer import PolicyTrainer, RlJob
from tests.training.sharded_ranks import DEVICE, model_at
from tests.training.test_policy_ranks import ROWS, sampled

ODD_BYTES = 100_003
"""Size of a slab: storages are split over several, at any byte, and no other tensor has it."""
STEPS = 4
LOAD = Model.load
Case = Mapping[str, Any]
"""Fields of the recipe's ``rl``, and ``resources``."""


def results(rank: int, world: int, path: str, cases: Mapping[str, Case]) -> dict[str, Any]:
    """For each case the digests of a run without and with rests, and of a resumed one, and the memory beside rests."""
    with patch.object(resting, "SLAB_BYTES", ODD_BYTES):
        return {name: _result(rank, world, path, case) for name, case in cases.items()}


def _result(rank: int, world: int, path: str, case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # All ranks write into the checkpoint of rank 0.
        folders: list[Any] = [folder]
        torch.distributed.broadcast_object_list(folders)
        checkpoint = Path(folders[0], "step-00000002")
        run = _Run(rank, world, path, case)
        awake = [run.step() for _ in range(STEPS)]
        run.close()
        run = _Run(rank, world, path, case)
        rested = [run.step()]
        memory = run.rest()
        rested.append(run.step())
        run.save(checkpoint)
        for _ in range(2, STEPS):
            run.rest()
            rested.append(run.step())
        sent = run.sent()
        run.trainer.rest(keep_policy=True)
        sent_beside_rest = run.sent()
        run.trainer.rest()
        run.close()
        run = _Run(rank, world, path, case)
        run.trainer.prepare(checkpoint)
        resumed = [run.step() for _ in range(2, STEPS)]
        run.close()
        torch.distributed.barrier()
    return {"awake": awake, "rested": rested, "resumed": resumed, **memory, "sent": [sent, sent_beside_rest]}


class _Run:
    def __init__(self, rank: int, world: int, path: str, case: Case) -> None:
        fields = {name: value for name, value in case.items() if name != "resources"}
        training = {"learning_rate": 1e-2, "batch_size": ROWS, **fields.pop("training", {})}
        section = {"prompts": "none.jsonl", "rewards": [{"verifier": "task"}], "training": training, **fields}
        critic = model_at(path) if "critic" in fields else None
        job = RlJob(RlConfig.model_validate(section), model_at(path), critic, seed=3)
        gc.collect()
        self.before = _bytes()
        resources = ResourcesConfig(trainers=world, threads=1, **case["resources"])
        with patch.object(Model, "load", _load):
            self.trainer = PolicyTrainer(job, resources, DEVICE, rank, world)
        self.rank = rank

    def step(self) -> str:
        """The digest of its results and of the models after it."""
        data = sampled()
        data.numbers.update(dict.fromkeys(("returns", "old_values"), data.numbers["advantages"]))
        self.trainer.load(data)
        columns = self.trainer.forward(True, ["old_logps", "reference_logps", "old_values"])
        reports = self.trainer.update({}, 0.1)
        digest = hashlib.sha256(repr([(report.sums, report.grad_norm) for report in reports.values()]).encode())
        for column in columns.values():
            digest.update(column.tobytes())
        with tempfile.TemporaryDirectory() as folder:
            for name in [*self.trainer.learners, *(["average"] if self.trainer.section.ema else [])]:
                self.trainer.export(name, Path(folder, name))
            for file in sorted(Path(folder).rglob("*.safetensors")):
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def rest(self) -> dict[str, int]:
        """Rest twice, and wake twice; bytes of all tensors in this process, but for those from before the run."""
        gc.collect()
        awake = _bytes()
        self.trainer.rest()
        self.trainer.rest()
        at_rest = _bytes()
        self.trainer.wake()
        self.trainer.wake()
        assert _bytes() == awake
        return {"bytes": awake - self.before, "bytes at rest": at_rest - self.before}

    def sent(self) -> str:
        """The digest of all weights that engines would get, on rank 0."""
        digest = hashlib.sha256()
        for name, tensor in self.trainer.weights.tensors():
            digest.update(name.encode())
            digest.update(tensor.detach().flatten().clone().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest() if self.rank == 0 else ""

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            folder.mkdir()
        torch.distributed.barrier()
        self.trainer.save(folder)
        torch.distributed.barrier()
        if self.rank == 0:
            complete(folder, {**self.trainer.describe(), "driver": {}})
        torch.distributed.barrier()

    def close(self) -> None:
        self.trainer.close()
        del self.trainer
        gc.collect()


def _bytes() -> int:
    """Of all tensors that Python knows in this process, but for the slabs."""
    sizes = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in sizes.values() if size != ODD_BYTES)


def _load(model: Model, *arguments: Any, **more: Any) -> Any:
    """Load weights into memory of their own. On a CPU they are pages of a file, and cannot be emptied; on a GPU none are."""
    loaded = LOAD(model, *arguments, **more)
    for tensor in (*loaded.parameters(), *loaded.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return loaded
