"""A day of use behind a proxy that records, in a network whose gateway records the rest: all traffic, step by step.

``unshare -rn python -m tests.long.requests_of_a_day FOLDER`` prints, as its last line, a JSON object: for each step the hosts
that the proxy was asked for, and the packets that took the way out.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.align import Align, run_align
from tests.processes import free_port, processes_of, wait_until
from tests.servers.hub import ORGANISATION, HubServer
from tests.servers.outside import Outside
from tests.servers.recording import RecordingProxy, recording_proxy

HUB = "hub.example"
align: Align = run_align
ALIGN = [sys.executable, "-m", "alignment.flows.cli.main"]
NIGHT = """
method: nightly
name: night
model: policy/production
nightly: {{min_rows: 8}}
dpo: {{data: {inbox}, training: {{batch_size: 8, max_steps: 4}}}}
evaluation:
  prompts: {{task: first, split: test, rows: 16}}
  generation: {{num_generations: 2, max_completion_length: 9}}
  verifier: task
promotion: {{gates: [{{metric: accuracy, min: 0}}]}}
resources: {{trainers: 1, engines: 1, threads: 1}}
"""
SMALL = """
method: sft
name: small
model: {scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}
sft: {data: {task: reverse, rows: 64}, training: {batch_size: 32, max_steps: 2}}
resources: {trainers: 1, engines: 1, threads: 1}
"""


class Day:
    """The steps; ``seen`` has the traffic of each."""

    def __init__(self, folder: Path, outside: Outside, proxy: RecordingProxy, hub: HubServer) -> None:
        self.folder, self.home = folder, folder / "home"
        self.outside, self.proxy, self.hub = outside, proxy, hub
        self.seen: dict[str, dict[str, list[str]]] = {}
        (folder / "small.yaml").write_text(SMALL)
        for name in ("WANDB_MODE", "WANDB_API_KEY", "HF_HUB_OFFLINE", "DO_NOT_TRACK", "AWS_ACCESS_KEY_ID"):
            os.environ.pop(name, None)
        os.environ.pop("NO_PROXY", None)
        os.environ.pop("no_proxy", None)
        user = {"HOME": str(folder), "HF_HOME": str(folder / "huggingface")}
        os.environ.update({**proxy.variables(), **user, "ALIGN_HOME": str(self.home)})

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """The traffic of the block's processes, until the last of them has ended, belongs to this step.

        W&B has some seconds to write its last news once the command is over, and no longer.
        """
        print(f"{name} …", file=sys.stderr, flush=True)
        self.outside.taken()
        self.proxy.requests.clear()
        began = time.monotonic()
        yield
        assert wait_until(lambda: not processes_of(self.home), 60), processes_of(self.home)
        packets = self.outside.taken()
        hosts = sorted({_host(*request) for request in self.proxy.requests})
        self.seen[name] = {"proxy": hosts, "packets": packets}
        print(f"{name}: {self.seen[name]} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def recorders_work(self) -> None:
        """Traffic sent on purpose is seen: otherwise silence would prove nothing."""
        script = (
            "import socket, urllib.request\n"
            "s = socket.socket(); s.setblocking(False); s.connect_ex(('192.0.2.1', 443))\n"
            "try: urllib.request.urlopen('http://control.example/', timeout=5)\n"
            "except OSError: pass\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)

    def quickstart(self) -> None:
        align(self.home, "run", "quickstart", timeout=3000)

    def nightly(self) -> None:
        """Deployed, run by the worker of `align up`, over rows in an inbox."""
        inbox = self.folder / "inbox"
        inbox.mkdir()
        rows = [{"prompt": f"first {n}?", "chosen": "a", "rejected": "b"} for n in range(16)]
        (inbox / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = self.folder / "night.yaml"
        recipe.write_text(NIGHT.format(inbox=inbox))
        align(self.home, "up", "--port", str(free_port()))
        try:
            align(self.home, "deploy", str(recipe), "--name", "night")
            align(self.home, "run", str(recipe), timeout=1500)
            exported = subprocess.run([*ALIGN, "env"], capture_output=True, text=True, check=True).stdout
            script = f'{exported}\nexec "{Path(sys.executable).parent}/prefect" deployment run alignment/night --watch'
            subprocess.run(["sh", "-c", script], check=True, timeout=1500, stdout=sys.stderr)
        finally:
            align(self.home, "down")

    def serve(self) -> None:
        """One answer of a served policy."""
        port = free_port()
        with (self.folder / "serve.log").open("wb") as log:
            server = subprocess.Popen(
                [*ALIGN, "serve", "policy/production", "--port", str(port)], stdout=log, stderr=log
            )
        try:
            ask = json.dumps({"model": "policy/production", "prompt": "first abc?", "max_tokens": 4}).encode()
            deadline = time.monotonic() + 900
            while not _answers(port, ask) and time.monotonic() < deadline:
                assert server.poll() is None, (self.folder / "serve.log").read_text()[-2000:]
                time.sleep(1)
            assert _answers(port, ask)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)

    def publish(self) -> None:
        variables = {**self.hub.environment(), "HF_ENDPOINT": f"http://{HUB}"}
        repo = f"hf://{ORGANISATION}/policy"
        align(self.home, "artifacts", "publish", "policy/production", repo, **variables)

    def names_of_the_hub(self) -> None:
        """A model that the Hub has not answered for, as it cannot be reached: the command refuses."""
        align(self.home, "check", str(self.folder / "small.yaml"), "--set", "model={name: org/model}", expect=2)

    def wandb(self) -> None:
        """Recorded offline in the end, as W&B cannot be reached."""
        tracking = ("--set", "tracking={wandb: {project: p, mode: online}}")
        align(self.home, "run", str(self.folder / "small.yaml"), *tracking, WANDB_API_KEY="0123456789" * 4)

    def s3_store(self) -> None:
        """Without keys in the environment, AWS's library asks the metadata service of AWS machines."""
        align(self.home, "artifacts", "ls", "--store", "s3://bucket/prefix", expect=3, timeout=300)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "k")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
            align(self.home, "artifacts", "ls", "--store", "s3://bucket/prefix", expect=1, timeout=300)

    def doctor(self) -> None:
        subprocess.run([*ALIGN, "doctor"], check=False, stdout=sys.stderr)


STEPS: dict[str, Callable[[Day], None]] = {
    "recorders work": Day.recorders_work,
    "quickstart": Day.quickstart,
    "nightly": Day.nightly,
    "serve": Day.serve,
    "publish": Day.publish,
    "doctor": Day.doctor,
    "a name of the Hub": Day.names_of_the_hub,
    "W&B": Day.wandb,
    "a store on S3": Day.s3_store,
}


def _host(method: str, target: str) -> str:
    return target if method == "CONNECT" else str(urlsplit(target).netloc)


def _answers(port: int, body: bytes) -> bool:
    request = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(request.encode() + body)
            return b" 200 " in connection.makefile("rb").readline()
    except OSError:
        return False


def main() -> None:
    """All steps, or those that are named after the folder."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [*STEPS]
    outside = Outside()
    hub = HubServer(folder / "hub").start()
    try:
        with recording_proxy() as proxy:
            proxy.ports[HUB] = hub.port
            day = Day(folder, outside, proxy, hub)
            for name in names:
                with day.step(name):
                    STEPS[name](day)
    finally:
        hub.end()
    print(json.dumps(day.seen))


if __name__ == "__main__":
    main()
