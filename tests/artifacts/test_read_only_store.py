"""A store that a user may only read: on a file system that is mounted read-only, as another user, and on a server.

Expected: operations that only read give the same answers as with a writable store.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, collect, open_store
from alignment_core.artifacts.transfer import copy, plan
from alignment_core.errors import EnvironmentFault
from tests.align import align_here
from tests.servers.faulty import Fault, Faulty
from tests.servers.s3 import S3Server

KEYS = {"sft": "1" * 64, "dpo": "2" * 64}


@pytest.fixture
def artifact(store: Store, write: Callable[..., Path]) -> Reference:
    """A policy that was made from another one, under a tag."""
    sft = store.publish(
        write("sft", {"weights": "w" * 100}), "model", ProvenanceDraft(key=KEYS["sft"], stage="sft", label="sft")
    )
    draft = ProvenanceDraft(key=KEYS["dpo"], stage="dpo", label="dpo", inputs={"policy": sft})
    policy = store.publish(write("dpo", {"weights": "v" * 100, "config.json": "{}"}), "model", draft)
    store.tags.move("policy/production", policy, None, "first")
    return policy


@pytest.fixture
def read_only(store: Store, artifact: Reference, tmp_path: Path) -> Iterator[Path]:
    """The store of ``made``, mounted read-only, even for root."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounts = [["mount", "--bind", store.uri, str(folder)], ["mount", "-o", "remount,ro,bind", str(folder)]]
    if any(subprocess.run(mount, capture_output=True, check=False).returncode for mount in mounts):
        subprocess.run(["umount", folder], capture_output=True, check=False)
        pytest.skip("mounting a folder read-only takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_read_only_store_can_be_pulled_from(read_only: Path, artifact: Reference, tmp_path: Path, home: Path) -> None:
    target = tmp_path / "target"
    pull = ("artifacts", "pull", "policy/production", "--from", str(read_only), "--store", str(target), "--ancestors")
    done = align_here(home, *pull, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["sent"] == 3
    pulled = open_store(target)
    assert pulled.verify(artifact) == []
    assert pulled.records.find(KEYS["dpo"]) is not None
    assert (pulled.fetch(artifact) / "weights").read_text() == "v" * 100


@pytest.mark.parametrize(
    "command",
    [
        ("artifacts", "ls"),
        ("artifacts", "show", "policy/production"),
        ("artifacts", "verify"),
        ("artifacts", "gc"),
        ("artifacts", "attest", "policy/production", "--output", "attested"),
        ("tags", "ls"),
        ("tags", "history", "policy/production"),
        ("lineage", "policy/production"),
        ("diff", "policy/production", "sft"),
    ],
)
def test_commands_that_only_read_answer(
    store: Store,
    read_only: Path,
    artifact: Reference,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    sft = store.records.by_key([KEYS["sft"]])[KEYS["sft"]].outputs["model"]
    words = [str(sft) if word == "sft" else word for word in command]
    done = align_here(home, *words, "--store", str(read_only))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    shown = align_here(home, *words, "--store", store.uri)
    if command[1] != "show":  # which shows the path of this machine's copy
        assert done.stdout.replace(str(read_only), store.uri) == shown.stdout


def test_artifacts_of_a_read_only_store_are_fetched_into_the_readers_home(
    read_only: Path, artifact: Reference, home: Path
) -> None:
    opened = open_store(read_only, writes=False)
    fetched = opened.fetch(artifact)
    assert fetched.is_relative_to(home / "stores")
    assert (fetched / "weights").read_text() == "v" * 100
    assert opened.records.find(KEYS["dpo"]) is not None
    assert collect(opened, delete=False).of("blob") == []
    with pytest.raises(EnvironmentFault, match="the file system is read-only"):
        open_store(read_only)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_another_user_with_read_access_pulls_into_their_own_store(
    write: Callable[..., Path], in_children: Callable[..., list[int]]
) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are private
        Path(place).chmod(0o755)
        before = os.umask(0o022)
        store = open_store(Path(place) / "theirs")
        reference = store.publish(write("model", {"weights": "w"}), "model")
        os.umask(before)
        mine = Path(place) / "mine"
        mine.mkdir(mode=0o700)
        os.chown(mine, 4343, 4343)

        def pull() -> None:
            os.setgroups([])
            os.setgid(4343)
            os.setuid(4343)
            os.environ["ALIGN_HOME"] = str(mine / "home")
            source, target = open_store(store.uri, writes=False), open_store(mine / "store")
            copy(source, target, plan(source, target, reference, ancestors=True))
            assert target.verify(reference) == source.verify(reference) == []
            assert (source.fetch(reference) / "weights").read_text() == "w"

        assert in_children(pull) == [0]


def test_a_read_only_bucket_can_be_pulled_from(
    s3_server: S3Server, bucket: str, store: Store, artifact: Reference, tmp_path: Path, home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    team = open_store(f"s3://{bucket}/{tmp_path.name}")
    copy(store, team, plan(store, team, artifact, ancestors=True))

    def refuses_writes(method: str, target: str, number: int) -> Fault | None:
        return Fault(status=403, code="AccessDenied") if method in ("PUT", "POST", "DELETE") else None

    with Faulty(s3_server.url, refuses_writes) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        target = tmp_path / "target"
        done = align_here(
            home,
            "artifacts",
            "pull",
            str(artifact),
            "--from",
            team.uri,
            "--store",
            str(target),
            "--ancestors",
            "--json",
        )
        assert done.returncode == 0, done.stderr
        assert open_store(team.uri, writes=False).fetch(artifact).is_dir()
    assert open_store(target).verify(artifact) == []
