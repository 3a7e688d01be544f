"""Metrics of a step stay on the device until the step is done: a GPU is waited for once, not for each metric of each pack."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment_core.training.methods.sft import Sft
from alignment_core.training.step_report import MetricSums
from tests.stages.calls import ROOT


def test_sums_have_double_precision() -> None:
    """2²⁴ + 1 + 1 is no number of fp32 after either addition, and one in fp64."""
    sums = MetricSums()
    for value in (2.0**24, 1.0, 1.0):
        sums.add({"loss": torch.tensor(value), "accuracy": torch.tensor(int(value))})
    sums.add({"rare": torch.tensor(0.5)})
    assert sums.read() == {"loss": 2.0**24 + 2, "accuracy": 2.0**24 + 2, "rare": 0.5}
    assert MetricSums().read() == {}


COUNTING = """
import json, pickle, sys, traceback
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from alignment_core.cluster.device import Device
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.ranks import join

class Reads(TorchDispatchMode):
    "Counts how often our code reads a number out of a tensor."
    count = 0
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            caller = [frame.filename for frame in traceback.extract_stack() if "/torch/" not in frame.filename][-2]
            Reads.count += "alignment_core" in caller
        return function(*arguments, **(options or {}))

folder = sys.argv[1]
resources = ResourcesConfig(device="cpu", trainers=1, threads=1, zero_stage=0)
device = Device.detect("cpu")
join(0, 1, f"file://{folder}/meet", resources, device)
reads = {}
for tokens in (16, 4096):
    with open(f"{folder}/job", "rb") as file:
        cut = resources.model_copy(update={"max_tokens_per_microbatch": tokens})
        trainer = pickle.load(file).open(cut, device, 0, 1)
    for name, take in (("train", lambda: trainer.train(1, 3600.0)), ("evaluate", trainer.evaluate)):
        Reads.count = 0
        with Reads():
            take()
        reads.setdefault(name, []).append(Reads.count)
print(json.dumps(reads))
"""


@pytest.mark.slow
def test_the_numbers_read_per_step_do_not_depend_on_the_number_of_micro_batches(make_job: Any, tmp_path: Path) -> None:
    (tmp_path / "job").write_bytes(pickle.dumps(make_job(Sft(), batch_size=14)))
    command = [sys.executable, "-c", COUNTING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    for many, single in json.loads(done.stdout.splitlines()[-1]).values():
        assert many == single
