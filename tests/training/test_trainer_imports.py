"""A trainer compiles nothing when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.execution.warm_actors import TRAINER_IMPORTS
from tests.stages.calls import python

JOINS = """
import json, os, sys
started = []
def note(event, arguments):
    if event == "subprocess.Popen":
        started.append(os.path.basename(str(arguments[1][0])))
sys.addaudithook(note)
from pathlib import Path
from alignment_core.cluster.actor import Actor
from alignment_core.cluster.device import Device
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.ranks import join
actor = Actor("trainers[0]")
if os.environ["PREPARED"]:
    actor.prepare(os.environ["PREPARED"])
device = Device("cpu", 2)
rendezvous = f"file://{os.environ['FOLDER']}/rendezvous"
actor.run(join, (), {"rank": 0, "world": 1, "rendezvous": rendezvous, "resources": ResourcesConfig(), "device": device})
import torch
number = torch.ones(1)
torch.distributed.all_reduce(number)
print(json.dumps([number.item(), started]))
"""


@pytest.mark.parametrize("prepared", [TRAINER_IMPORTS, ""])
def test_deepspeeds_search_for_operators_is_left_out(prepared: str, tmp_path: Path) -> None:
    """Without our import it links a program against libaio, for an operator that nothing here uses."""
    result, started = python(JOINS, PREPARED=prepared, FOLDER=str(tmp_path), DS_ACCELERATOR="cpu")
    assert result == 1
    compilers = {name for name in started if name.endswith(("cc", "c++", "ld"))}
    assert bool(compilers) == (not prepared), started
