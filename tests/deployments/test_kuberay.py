"""What runs in the head's container on Kubernetes: Ray with the dashboard of the images, and the services beside it.

KubeRay gives the container the command that starts Ray, and the token; here the ports are others.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import TinyModel
from tests.deployments.endings import OVERRIDES
from tests.deployments.installed import FEW_STEPS
from tests.deployments.up import BIN, Services
from tests.processes import free_port, processes_of, wait_until
from tests.servers.ray_nodes import TOKEN

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

MANIFESTS = Path(__file__).parents[2] / "deployments" / "kuberay"
TOOLS = Path(sys.prefix) / "launchers"
"""Where `make .venv/.test` installs what Ray's dashboard needs, which the images have beside Ray."""


class Head:
    """The container of the head of raycluster.yaml, as processes of this machine."""

    def __init__(self, home: Path, model: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
        self.services = Services(home, model)
        self.dashboard, self.agent, port = free_port(), free_port(), free_port()
        ray = f"ray start --head --block --port={port} --temp-dir={self.folder} --num-cpus=2 --num-gpus=0"
        ray += f" --dashboard-host=127.0.0.1 --dashboard-port={self.dashboard} --object-store-memory=134217728"
        ray += f" --dashboard-agent-listen-port={self.agent} --metrics-export-port={free_port()}"
        self.environment = {
            **self.services.settings,
            **TOKEN,
            "RAY_AUTH_TOKEN": "a" * 64,
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "KUBERAY_GEN_RAY_START_CMD": ray,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")])),
        }
        cluster = next(
            document
            for document in yaml.safe_load_all((MANIFESTS / "raycluster.yaml").read_text())
            if document["kind"] == "RayCluster"
        )
        (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        (script,) = container["args"]
        assert "align up --foreground &" in script
        script = script.replace("--foreground", f"--foreground --port {self.services.port}")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*container["command"], script], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def probe(self, port: int, path: str) -> str:
        """The answer to one of KubeRay's probes, or why there is none."""
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
        request.add_header("Authorization", f"Bearer {self.environment['RAY_AUTH_TOKEN']}")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError as error:
            return str(error)

    def is_up(self) -> bool:
        """Whether the services have registered the deployments."""
        assert self.process.poll() is None, self.log.read_text()
        state = self.services.home / "services" / "state.json"
        return state.exists() and json.loads(state.read_text())["phase"] == "ready"

    def drivers(self) -> int:
        """Number of Ray drivers that the cluster has had."""
        return len(list(self.folder.glob("session_2*/logs/python-core-driver-*")))

    def end(self) -> None:
        """End the remaining processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in processes_of(self.services.home):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Iterator[Head]:
    assert TOOLS.is_dir(), "Ray's dashboard is not installed: make .venv/.test"
    head = Head(tmp_path_factory.mktemp("home"), tiny_model())
    try:
        assert wait_until(head.is_up, 240), head.log.read_text()
        yield head
    finally:
        head.end()


def test_ray_answers_the_probes_of_kuberay(head: Head) -> None:
    """By these paths KubeRay asks whether a node is ready, and replaces its pod if it does not answer."""
    assert wait_until(lambda: "success" in head.probe(head.agent, "/api/local_raylet_healthz"), 60)
    assert wait_until(lambda: "success" in head.probe(head.dashboard, "/api/gcs_healthz"), 60)


def test_a_submitted_job_runs_align_on_the_cluster(head: Head, tmp_path: Path) -> None:
    """KubeRay submits the entry point of rayjob.yaml in this way."""
    entrypoint = yaml.safe_load((MANIFESTS / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    command = entrypoint.replace("/etc/alignment/recipe.yaml", "quickstart").replace(
        "s3://BUCKET/PREFIX", str(tmp_path)
    )
    command += "".join(f" --set '{setting}'" for setting in FEW_STEPS) + " --json"
    done = subprocess.run(
        [
            str(BIN / "ray"),
            "job",
            "submit",
            f"--address=http://127.0.0.1:{head.dashboard}",
            "--",
            *shlex.split(command),
        ],
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert events[-1]["status"] == "completed"
    assert head.drivers(), "the run started a Ray of its own"


def test_the_worker_runs_deployments_on_the_cluster_and_ends_with_the_pod(head: Head) -> None:
    before = head.drivers()
    run_id = head.services.start_run([*OVERRIDES, "sft.training.max_steps=4"])
    assert head.services.align("watch", run_id)["status"] == "completed"
    assert head.drivers() > before, "the run started a Ray of its own"
    head.process.send_signal(signal.SIGTERM)
    head.process.wait(240)
    assert [line for line in processes_of(head.services.home).values() if "alignment" in line] == []
