"""A store with a small history: data from a file and from the Hub, a base model from the Hub, a policy, its evaluation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.data.pin import PinnedFile, PinnedSource
from alignment_core.recipes import DataConfig, DataSource, ModelConfig
from alignment_core.stages.base_model import BaseModelConfig
from alignment_core.stages.dataset import DatasetConfig
from tests.attestation.hub import use
from tests.servers.hub import ORGANISATION, HubServer

COMMIT, DATA_COMMIT = "c" * 40, "d" * 40
PACKAGES = {"torch": "2.13.0+cpu", "transformers": "5.19.0"}
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
MEASURED = {"confidence": 0.95, "accuracy": 0.5, "accuracy.low": 0.25, "accuracy.high": 0.75, "accuracy.n": 16}
Publish = Callable[..., Reference]


@pytest.fixture
def publish(store: Store, tmp_path: Path) -> Publish:
    """``publish("sft", "model", {"role": reference}, config={…})``; without inputs it is an import, and no stage's."""
    published: list[Reference] = []

    def publish_one(name: str, kind: str, inputs: dict[str, Reference] | None = None, **fields: object) -> Reference:
        folder = tmp_path / "published" / f"{name}-{len(published)}"
        folder.mkdir(parents=True)
        (folder / "content").write_text(folder.name)  # models of one stage differ
        if kind == "model":
            (folder / "config.json").write_text(CONFIG)
        content = {"key": digest_of([name, len(published)]), "stage": name, "label": name, "packages": PACKAGES}
        times = {
            "started_at": "2026-01-01T00:00:00+00:00",
            "finished_at": f"2026-01-01T00:01:{len(published):02}+00:00",
        }
        draft = ProvenanceDraft.model_validate({**content, **times, "inputs": inputs or {}, **fields})
        published.append(store.publish(folder, kind, None if inputs is None else draft))
        return published[-1]

    return publish_one


@pytest.fixture
def references(publish: Publish) -> dict[str, Reference]:
    base = BaseModelConfig(model=ModelConfig(name="org/base"), commit=COMMIT).model_dump(mode="json")
    references = {"base": publish("base_model", "model", {}, config=base, metrics={"parameters": 1000})}
    sources = (
        PinnedSource(
            source=DataSource(path="rows.jsonl"), files=(PinnedFile(path="/d/rows.jsonl", sha256="5" * 64, size=9),)
        ),
        PinnedSource(source=DataSource(path="org/rows"), hub_commit=DATA_COMMIT),
    )
    data = DataConfig(sources=tuple(source.source for source in sources), max_length=64)
    config = DatasetConfig(data=data, sources=sources, kind="demonstrations").model_dump(mode="json")
    references["data"] = publish("dataset", "dataset", {"tokenizer": references["base"]}, config=config)
    fields = {"config": {"learning_rate": 1e-5}, "seed": 7, "code_version": "0.1.0+abc", "hardware": {"cpus": 2}}
    trained = {"model": references["base"], "train": references["data"]}
    references["sft"] = publish("sft", "model", trained, **fields, metrics={"loss": 0.5}, run_ids={"prefect": "run-1"})
    references["samples"] = publish("generate", "rollouts", {"policy": references["sft"]})
    references["scores"] = publish("score", "scores", {"rollouts": references["samples"]})
    references["evaluation"] = publish("evaluate", "evaluation", {"scores": references["scores"]}, metrics=MEASURED)
    return references


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """``keys("one")``: the files of a private key and its public half."""

    def make(name: str, curve: str = "prime256v1") -> tuple[Path, Path]:
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        new = ["openssl", "ecparam", "-name", curve, "-genkey", "-noout", "-out", str(private)]
        subprocess.run(new, check=True, capture_output=True)
        half = ["openssl", "ec", "-in", str(private), "-pubout", "-out", str(public)]
        subprocess.run(half, check=True, capture_output=True)
        return private, public

    return make


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    server = HubServer(tmp_path_factory.mktemp("hub")).start()
    yield server
    server.end()


@pytest.fixture
def hub(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A Hub that this process's client uses; tests use separate repositories."""
    use(hub_server, monkeypatch)
    hub_server.fail("nothing", "503")
    return hub_server


@pytest.fixture
def repo(hub: HubServer, tmp_path: Path) -> str:
    """The name of a repository that no other test uses."""
    return f"{ORGANISATION}/{tmp_path.name[:40].strip('-.')}"
