"""Two nodes that share nothing but the store: a run over both has the results of a single machine, even if a node is lost."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import alignment_core
from alignment_core import journal
from tests.align import references, run_align, states
from tests.flows.test_quickstart import RECIPE, SMALL
from tests.servers.ray_nodes import RayNodes
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SET = [
    part
    for override in [*SMALL, "resources.trainers=2", "resources.engines=2", "resources.progress_seconds=1"]
    for part in ("--set", override)
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The results of a single machine with a store in a folder."""
    return references(run_align(tmp_path_factory.mktemp("alone"), "run", str(RECIPE), *SET, expect=4))


@pytest.fixture
def nodes(s3_server: S3Server) -> Iterator[RayNodes]:
    nodes = RayNodes(s3_server.environment())
    yield nodes
    nodes.end()


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path / "one", tmp_path / "two"


@pytest.fixture
def run(nodes: RayNodes, homes: tuple[Path, Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run it from the first node."""
    command = ["run", str(RECIPE), *SET, "--store", f"s3://bucket/{tmp_path.name}"]
    return lambda expect: run_align(homes[0], *command, expect=expect, timeout=550, **nodes.environment())


def test_a_run_over_two_nodes_gives_the_same_digests(
    nodes: RayNodes, homes: tuple[Path, Path], run: Callable[..., dict[str, Any]], alone: dict[str, str]
) -> None:
    nodes.start(homes[0])
    nodes.start(homes[1], hidden=[homes[0]])
    assert references(run(expect=4)) == alone
    (workspace,) = (homes[1] / "stores").iterdir()
    assert len(list((workspace / "cache").iterdir())) >= 5, "the other node took part, with its own cache"


@pytest.mark.parametrize("stage", ["sft", "round-1/dpo", "round-2/generate"])
def test_a_run_that_loses_a_node_resumes_to_the_same_digests(
    stage: str, nodes: RayNodes, homes: tuple[Path, Path], run: Callable[..., dict[str, Any]], alone: dict[str, str]
) -> None:
    nodes.start(homes[0])
    other, over, lost = nodes.start(homes[1], hidden=[homes[0]]), threading.Event(), []

    def lose() -> None:
        while not over.wait(0.1):
            for file in homes[0].glob(f"runs/*/{journal.PROGRESS}"):
                try:
                    done = json.loads(file.read_text()).get(stage, {}).get("done", 0)
                except (OSError, ValueError):
                    continue
                if done and not lost:
                    nodes.kill(other)
                    lost.append(stage)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        outcome = run(expect=4)
    finally:
        over.set()
        thread.join()
    assert lost == [stage]
    assert set(states(outcome).values()) == {"run"}
    assert references(outcome) == alone


def test_a_node_with_another_source_is_refused_before_anything_runs(
    nodes: RayNodes, homes: tuple[Path, Path], run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    source, copy = Path(alignment_core.__file__).parent, tmp_path / "copy"
    shutil.copytree(source, copy)
    with (copy / "losses" / "kto.py").open("a") as file:
        file.write("\nBETA = 2\n")
    nodes.start(homes[0])
    nodes.start(homes[1], hidden=[homes[0]], instead={source: copy})
    failure = run(expect=3)
    assert "losses/kto.py differs" in failure["error"]
    assert "install the same version of the project" in failure["error"]
