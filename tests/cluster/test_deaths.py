"""Causes of actor deaths: Ray's messages, and whose memory it was if its memory monitor killed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.cluster import deaths
from alignment_core.cluster.deaths import MonitorKill, death
from alignment_core.errors import InfrastructureError, MemoryPressure
from tests.stages.calls import python

GIB = 2**30
OUT_OF_MEMORY = f"""1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1) was \
22.50GB used / 23.54GB limit (0.955820)
OOM kill reason: Memory usage {int(22.5 * GIB)}B exceeded threshold of {int(22.36 * GIB)}B (95.0% of 25276510208B limit)
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(44b2): job ID=01000000, task name=Actor.call, required resources={{}}, pid=3858, \
actual memory used=2.00GB, worker ID=f14b)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
911\t18.25\t/usr/bin/python3 /home/other/train.py --token=hf_secret
3858\t2.00\tray::trainers[1]
"""
"""The message of Ray 2.60 (recorded with ``RAY_memory_usage_threshold`` below the memory in use)."""
DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Actor
\tactor_id: 98186eb48c1fc5f12d7f8c8401000000
\tpid: 3885
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed"""


def test_a_kill_for_memory_of_other_processes_names_the_largest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The killed actor used 2.0 GiB and the rest of the run 1.0 GiB, of 22.5 GiB in use: 19.5 GiB are others'."""
    monkeypatch.setattr(deaths, "used_by", lambda _: GIB)
    error = death("trainers", ["trainers[1]"], "train", Exception(OUT_OF_MEMORY))
    assert isinstance(error, MemoryPressure)
    assert error.needed == 3 * GIB
    assert str(error) == (
        "trainers: an actor died during `train` (trainers[1]): Ray's memory monitor killed it, because 22.5 GiB of memory were "
        "in use and its limit is 22.4 GiB: this run used 3.0 GiB, other processes 19.5 GiB (the largest process: python3, "
        "pid 911, 18.2 GiB)"
    )


def test_a_kill_of_several_actors_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "used_by", lambda _: GIB)
    error = death("trainers", ["trainers[0]", "trainers[1]"], "train", Exception(OUT_OF_MEMORY))
    assert "2 actors died during `train` (trainers[0], trainers[1]): Ray's memory monitor killed them" in str(error)


def test_a_kill_for_the_memory_of_the_run_itself_is_an_ordinary_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB of the killed actor and 12 GiB of the rest of the run are more than the other 8.5 GiB."""
    monkeypatch.setattr(deaths, "used_by", lambda _: 12 * GIB)
    error = death("trainers", ["trainers[1]"], "train", Exception(OUT_OF_MEMORY))
    assert not isinstance(error, MemoryPressure)
    assert str(error).endswith("this run used 14.0 GiB, other processes 8.5 GiB")


def test_other_deaths_name_the_actor_its_process_and_the_cause_that_ray_gives() -> None:
    error = death("engines", ["engines[0]"], "generate", Exception(DIED))
    assert type(error) is InfrastructureError
    assert str(error) == (
        "engines: an actor died during `generate` (engines[0]): its process 3885 ended (SYSTEM_ERROR: Worker unexpectedly "
        "exits with a connection error code 2.)"
    )


KILLED_BY_THE_MONITOR = """
import json, os, time
import psutil
memory = psutil.virtual_memory()
os.environ["RAY_memory_usage_threshold"] = str((memory.total - memory.available) / memory.total / 2)
from pathlib import Path
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Place
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import InfrastructureError
ray = ray_cluster.connect(Path(os.environ["FOLDER"]))
group = ActorGroup(ray, "trainers", [Place()], [{}], 60)
try:
    while True:
        group.drop()
        time.sleep(0.1)
except InfrastructureError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_the_message_of_the_installed_ray_is_understood(short_folder: Path) -> None:
    """Ray's monitor is configured to keep half of the memory now in use free, so that it kills every actor at its start."""
    sentence = python(KILLED_BY_THE_MONITOR, FOLDER=str(short_folder))
    assert "(trainers[0])" in sentence
    assert "Ray's memory monitor killed it" in sentence
    assert "other processes" in sentence


def test_only_messages_of_the_memory_monitor_are_parsed() -> None:
    assert MonitorKill.parse(DIED) is None
