"""``align doctor``: its findings on a healthy machine and on several faulty ones, and that it never shows a secret."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignment_core import doctor
from alignment_core.doctor import environment, machine
from alignment_core.init import machine as init_machine
from tests.answering import answering

ROOT = Path(__file__).parents[2]


def run_doctor(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_", "WANDB_", "PREFECT_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "alignment.flows.cli.main", "doctor", *arguments],
        cwd=ROOT,
        env=inherited | {"ALIGN_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["state"], check["sentence"]) for check in json.loads(done.stdout)["checks"]}


def test_a_healthy_machine_passes_and_leaves_nothing_behind(tmp_path):
    done = run_doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stdout
    checks = findings(done)
    assert list(checks) == list(doctor.checks(None))
    assert all(state != "failed" for state, _ in checks.values())
    assert checks["packages"][1].startswith("alignment ")
    assert "wrote, refused to overwrite, read and deleted" in checks["store"][1]
    assert not any((tmp_path / "store" / "tmp").iterdir())
    lines = run_doctor(tmp_path).stdout.splitlines()
    assert len(lines) == len(checks)
    assert lines[0].split()[:2] == ["python", "ok"]


@pytest.mark.parametrize(("kind", "state"), [("nfs4", "failed"), ("fuse.sshfs", "failed"), ("ext4", "ok")])
def test_a_home_on_a_network_file_system_is_refused(tmp_path, monkeypatch, kind, state):
    def mounted(place, kind):
        return SimpleNamespace(mountpoint=str(place), fstype=kind)

    disks = [mounted("/", "overlay"), mounted(tmp_path, kind)]  # to mount a real one needs a server
    monkeypatch.setattr(machine.psutil, "disk_partitions", lambda all: disks)
    verdict, sentence = machine.own_disk(tmp_path / "not" / "there" / "yet")
    assert verdict == state
    assert kind in sentence
    assert ("only the store can be shared" in sentence) == (state == "failed")


def test_a_failed_check_exits_3_with_the_fix(tmp_path):
    (tmp_path / "store").write_text("not a folder")
    done = run_doctor(tmp_path, "--json", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 3
    checks = findings(done)
    assert checks["store"] == ("failed", f"{tmp_path}/store is a file: a store is a folder")
    state, sentence = checks["prefect"]
    assert state == "failed"
    assert sentence.startswith("http://127.0.0.1:9 does not answer (")
    assert sentence.endswith("start the server, or unset PREFECT_API_URL")


def test_no_part_of_a_secret_is_ever_shown(tmp_path):
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws" / "credentials").write_text("[default]\naws_secret_access_key = hush-aws-file\n")
    (home / ".netrc").write_text("machine api.wandb.ai login user hush-netrc-malformed\n")
    (home / ".netrc").chmod(0o600)
    secrets = {
        "HF_TOKEN": "hush-hub",
        "AWS_SECRET_ACCESS_KEY": "hush-aws",
        "HTTPS_PROXY": "http://user:hush-proxy@proxy:3128",
        "PREFECT_API_URL": "http://user:hush-prefect@127.0.0.1:9/api",
        "NO_PROXY": "",
        "no_proxy": "",
    }
    for arguments in (("--json",), ()):
        done = run_doctor(tmp_path, *arguments, HOME=str(home), **secrets)
        assert "hush" not in done.stdout + done.stderr
        if arguments:
            checks = findings(done)
    assert checks["Hub credentials"] == ("ok", "present (HF_TOKEN)")
    assert checks["AWS credentials"][0] == "warning"  # half a pair
    assert checks["W&B credentials"] == (
        "warning",
        "cannot be read (NetrcParseError); check the file or variable",
    )
    assert checks["proxies"] == ("ok", "HTTPS_PROXY, but not for 127.0.0.1")


def test_a_check_that_raises_or_hangs_fails_and_other_checks_still_answer(monkeypatch):
    release = threading.Event()

    def broken() -> doctor.Answer:
        raise ZeroDivisionError("no such luck")

    def hangs() -> doctor.Answer:
        release.wait(60)
        return "ok", "too late"

    monkeypatch.setattr(doctor, "checks", lambda _: {"a": broken, "b": hangs, "c": lambda: ("ok", "fine")})
    monkeypatch.setattr(doctor, "SECONDS", 0.3)
    checks = {check.name: (check.state, check.sentence) for check in doctor.examine()}
    release.set()
    assert checks["a"] == ("failed", "the check itself failed: ZeroDivisionError: no such luck")
    assert checks["b"][0] == "failed"
    assert checks["b"][1].startswith("did not answer within 0.3 seconds")
    assert checks["c"] == ("ok", "fine")


@pytest.mark.parametrize(("code", "state"), [(200, "ok"), (401, "ok"), (404, "failed")])
def test_the_health_of_prefects_server_is_checked(monkeypatch, code, state):
    with answering(code) as (port, paths):
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api/")
        assert environment.prefect()[0] == state
    assert paths == ["/api/health"]


@pytest.mark.parametrize("url", ["localhost:4200/api", "file:///etc/passwd", "http:///api"])
def test_an_invalid_prefect_address_is_refused_without_a_request(monkeypatch, url):
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert environment.prefect() == (
        "failed",
        "PREFECT_API_URL is not an http address: write it as http://host:4200/api",
    )


@pytest.mark.parametrize(
    ("torch", "torchvision", "fits"),
    [
        ("2.13.0+cpu", None, True),
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.13.0", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0", False),
    ],
)
def test_a_torchvision_of_another_build_is_named(
    torch: str, torchvision: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = machine._version
    versions = {"torch": torch, "torchvision": torchvision, "torchaudio": None, "torchcodec": None}
    monkeypatch.setattr(machine, "_version", lambda name: versions[name] if name in versions else real(name))
    state, sentence = machine.packages()
    assert state == ("ok" if fits else "failed")
    assert fits or "`pip uninstall torchvision`" in sentence


def test_packages_outside_the_locked_ranges_are_named(monkeypatch):
    wanted = ["ray<2", "numpy>=1", "absent-package>=3", 'pytest<1; extra == "test"']
    monkeypatch.setattr(machine.metadata, "requires", lambda _: wanted)
    state, sentence = machine.packages()
    assert state == "failed"
    assert "ray 2" in sentence
    assert "is not <2" in sentence
    assert "absent-package is missing" in sentence
    assert "vllm is missing" in sentence
    assert "pytest" not in sentence


def test_a_temporary_folder_too_deep_for_sockets_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("ALIGN_HOME", f"/tmp/{'deep/' * 10}")
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: f"/tmp/{'x' * 40}")
    state, sentence = machine.socket_paths()
    assert state == "failed"
    assert sentence.endswith("set TMPDIR=/tmp")
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/tmp")
    assert machine.socket_paths()[0] == "ok"


def test_too_few_open_files_are_a_warning():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        state, sentence = machine.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert state == "warning"
    assert "`ulimit -n " in sentence


def test_a_read_only_folder_and_missing_shared_memory_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.os, "access", lambda *_: False)  # the tests may run as root, who may write anywhere
    assert machine.disk(tmp_path / "new" / "home") == (
        "failed",
        f"{tmp_path} is not writable: give this user access, or choose another directory",
    )
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "absent")
    assert machine.shared_memory()[0] == "warning"


UNREADABLE = (
    "Unable to determine the device handle for GPU1: 0000:41:00.0: GPU is lost.  Reboot the system to recover it."
)
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.mark.parametrize(
    ("output", "code", "says", "sizes"),
    [
        ("0, 81559 MiB\n1, 40960 MiB\n", 0, None, [81559, 40960]),
        (f"{NO_DRIVER}\n", 9, f"nvidia-smi fails: {NO_DRIVER}", []),
        (f"0, 81559 MiB\n{UNREADABLE}\n", 15, f"nvidia-smi fails: {UNREADABLE}; it lists 81559 MiB", [81559]),
        ("0, 81559 MiB\n", 14, "nvidia-smi fails: exit code 14; it lists 81559 MiB", [81559]),
        ("", 6, "nvidia-smi fails: exit code 6", []),
    ],
)
def test_gpus_that_work_are_listed_and_a_failure_of_the_driver_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, says: str | None, sizes: list[int]
) -> None:
    """Its exit codes are in the manual of nvidia-smi, under "Return value"."""
    program = tmp_path / "nvidia-smi"
    (tmp_path / "output").write_text(output)
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/output\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(init_machine, "torch_is_for_cpus", lambda: False)
    found = init_machine.this_machine()
    assert found.gpus == len(sizes)
    assert not sizes or found.memory == sum(sizes) << 20
    assert bool(found.problem) == (code != 0)
    if says is not None:
        assert machine.accelerators() == ("warning", says)
