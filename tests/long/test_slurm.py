"""The batch script for Slurm over three nodes: its runs have the results of a single machine, whatever is lost on the way."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment_core import journal
from tests.align import references, run_align, states
from tests.crash.recipe import RL
from tests.flows.test_quickstart import RECIPE, SMALL
from tests.processes import wait_until
from tests.servers.s3 import S3Server
from tests.servers.slurm import Allocation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SPREAD = ["resources.trainers=2", "resources.engines=3", "resources.progress_seconds=1"]
OF_RL = {name: value for name, value in RL.items() if name != "rl.filter"} | {"promotion.gates": []}
RECIPES = {
    "quickstart": (str(RECIPE), [*SMALL, *SPREAD], 4),
    "grpo": (
        str(RECIPE.with_name("grpo.yaml")),
        [*(f"{field}={json.dumps(value)}" for field, value in OF_RL.items()), *SPREAD],
        0,
    ),
}
"""Each with its settings and its exit code: the gate of the first refuses."""


def command(recipe: str) -> list[str]:
    """What follows ``align run``, and the batch script."""
    path, overrides, _ = RECIPES[recipe]
    return [path, *(part for override in overrides for part in ("--set", override))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The results of a recipe on a single machine."""
    known: dict[str, dict[str, str]] = {}

    def results(recipe: str) -> dict[str, str]:
        if recipe not in known:
            home = tmp_path_factory.mktemp("alone")
            known[recipe] = references(run_align(home, "run", *command(recipe), expect=RECIPES[recipe][2]))
        return known[recipe]

    return results


@pytest.fixture
def allocate(tmp_path: Path) -> Iterator[Callable[..., Allocation]]:
    """Makes allocations of three nodes, whose local disks have this name and are empty at first."""
    allocations: list[Allocation] = []

    def made(disks: str, **variables: str) -> Allocation:
        allocations.append(Allocation(3, tmp_path / disks, variables))
        return allocations[-1]

    yield made
    for allocation in allocations:
        allocation.end()


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    """The option for a store that all nodes see."""
    return ["--store", str(tmp_path / "store"), "--json"]


def outcome_of(job: subprocess.Popen[str], allocation: Allocation, expect: int) -> dict[str, Any]:
    """What `align run` said last, once the job has ended with this exit code."""
    output, _ = job.communicate(timeout=900)
    assert job.returncode == expect, f"exit {job.returncode}\n{output[-2000:]}\n{allocation.log.read_text()[-4000:]}"
    return json.loads(output.strip().splitlines()[-1])


def wait_for_steps(home: Path, stage: str, job: subprocess.Popen[str]) -> None:
    """Wait until a stage has done some of its steps, and not all."""

    def begun() -> bool:
        for file in home.glob(f"runs/*/{journal.PROGRESS}"):
            try:
                progress = json.loads(file.read_text()).get(stage, {})
            except (OSError, ValueError):
                continue
            if progress.get("done", 0):
                return True
        return job.poll() is not None

    assert wait_until(begun, 600)
    assert job.poll() is None


def test_the_quickstart_over_three_nodes_gives_the_same_digests(
    allocate: Callable[..., Allocation], s3_server: S3Server, tmp_path: Path, alone: Callable[[str], dict[str, str]]
) -> None:
    allocation = allocate("disks", **s3_server.environment())
    job = allocation.submit(*command("quickstart"), "--store", f"s3://bucket/{tmp_path.name}", "--json")
    assert references(outcome_of(job, allocation, expect=4)) == alone("quickstart")
    for node in allocation.nodes[1:]:
        assert list(allocation.local_disk(node).glob("stores/*/cache/*")), "the node took part, with a cache of its own"
    assert allocation.processes() == []
    assert not allocation.requeued


@pytest.mark.parametrize(
    ("recipe", "stage", "forever"),
    [
        ("quickstart", "sft", False),
        ("quickstart", "round-1/dpo", False),
        ("quickstart", "round-2/generate", False),
        ("grpo", "rl", False),
        ("quickstart", "sft", True),
        ("grpo", "rl", True),
    ],
)
def test_a_job_that_loses_a_node_ends_with_the_same_digests(
    recipe: str,
    stage: str,
    forever: bool,
    allocate: Callable[..., Allocation],
    store: list[str],
    alone: Callable[[str], dict[str, str]],
) -> None:
    """Ray starts there again, unless the node is lost ``forever``: Slurm's option --no-kill lets a job go on without it."""
    allocation = allocate("disks")
    job = allocation.submit(*command(recipe), *store)
    wait_for_steps(allocation.home, stage, job)
    allocation.lose("node2", forever)
    outcome = outcome_of(job, allocation, RECIPES[recipe][2])
    assert set(states(outcome).values()) == {"run"}
    assert references(outcome) == alone(recipe)
    assert "Ray on node2 ended" in allocation.log.read_text()


def test_a_job_that_is_out_of_time_is_requeued_and_resumes_on_other_nodes(
    allocate: Callable[..., Allocation], store: list[str], alone: Callable[[str], dict[str, str]]
) -> None:
    first, second = allocate("first"), allocate("second")
    job = first.submit(*command("quickstart"), *store)
    wait_for_steps(first.home, "round-1/dpo", job)
    job.send_signal(signal.SIGUSR1)
    outcome_of(job, first, expect=143)
    assert first.requeued
    assert first.processes() == []
    resumed = outcome_of(second.submit(*command("quickstart"), *store), second, expect=4)
    assert references(resumed) == alone("quickstart")
    assert states(resumed)["sft"] == "cached"


def test_a_job_that_loses_its_head_is_requeued(
    allocate: Callable[..., Allocation], store: list[str], alone: Callable[[str], dict[str, str]]
) -> None:
    first, second = allocate("first"), allocate("second")
    job = first.submit(*command("quickstart"), *store)
    wait_for_steps(first.home, "sft", job)
    first.lose("node1")
    job.communicate(timeout=900)
    assert job.returncode not in (0, 4)
    assert first.requeued
    assert first.processes() == []
    resumed = outcome_of(second.submit(*command("quickstart"), *store), second, expect=4)
    assert references(resumed) == alone("quickstart")


def test_a_store_on_the_disk_of_the_head_is_refused(allocate: Callable[..., Allocation]) -> None:
    """As the default store is."""
    allocation = allocate("disks")
    failure = outcome_of(allocation.submit(*command("quickstart"), "--json"), allocation, expect=3)
    assert "nodes of the Ray cluster do not see the folder of the store" in failure["error"]
    assert "use a store in S3 or in a folder that every node mounts (--store)" in failure["error"]


def test_a_cancelled_job_leaves_no_process(allocate: Callable[..., Allocation], store: list[str]) -> None:
    allocation = allocate("disks")
    job = allocation.submit(*command("quickstart"), *store)
    wait_for_steps(allocation.home, "sft", job)
    job.terminate()
    outcome_of(job, allocation, expect=143)
    assert allocation.processes() == []
    assert not allocation.requeued
