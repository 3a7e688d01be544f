"""Contexts that are longer than an engine's key-value cache: real vLLM on a small model.

Keys and values of the model take 2 · 2 layers · 1 head · 32 dimensions · 4 bytes = 512 bytes a token, a block of 32 tokens
16 KiB, so that 16 MiB are 1,024 blocks. vLLM keeps one of them free: 1,023 · 32 = 32,736 tokens fit. All 65,536 take 2,048
blocks and that one, 32.02 MiB.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device, Place
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.inference.http_server import authorization, running, served
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig

RESOURCES = ResourcesConfig(device="cpu", kv_cache_mib=16)


@pytest.fixture(scope="module")
def long_model(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 65_536}))
    return folder


@pytest.mark.slow
def test_a_server_reports_the_longest_context_that_fits(long_model: Path) -> None:
    with served(str(long_model), "judge", RESOURCES) as server:
        assert server.context == 32_736
        assert server.shortened == (
            "judge: a context of 32,736 of the model's 65,536 tokens, as long as its key-value cache allows; 33 MiB would hold "
            "all of them"
        )
        below = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = [process for process in below if process.name().startswith("VLLM")]  # each imports vLLM for seconds
        assert engine.name() == "VLLM::EngineCore"
        (tracker,) = [
            process for process in below if process != engine
        ]  # Python starts it with the first other process
        assert "VLLM_WORKER_MULTIPROC_METHOD" not in tracker.environ(), "before vLLM is imported, which sets this"
        maps = [
            entry.path for process in (psutil.Process(server.process.pid), *below) for entry in process.memory_maps()
        ]
        assert not [path for path in maps if "_raylet" in path], "Ray's import takes long, too"
        root = server.url.removesuffix("/v1")
        for path in ("/v1/models", "/tokenize", "/invocations"):
            assert httpx.post(f"{root}{path}", json={}).status_code == 401, (
                "every user of the machine can reach the port"
            )
        assert httpx.get(f"{root}/health").status_code == 200
        models = httpx.get(f"{server.url}/models", headers=authorization(server.token))
        assert models.json()["data"][0]["max_model_len"] == 32_736
        server.process.kill()
        assert psutil.wait_procs(below, timeout=30)[1] == [], "its processes end with it"


@pytest.mark.slow
def test_a_context_that_exceeds_the_cache_is_refused_with_the_reason(long_model: Path) -> None:
    with (
        pytest.raises(EnvironmentFault) as caught,
        running(str(long_model), "policy", "127.0.0.1", 18099, RESOURCES, options=["--max-model-len", "40000"]),
    ):
        pass
    first, _, log = str(caught.value).partition(" (its log: ")
    assert first.startswith(
        "policy: vLLM's server did not start: its key-value cache can hold a context of 32,736 tokens, not of 40,000; its"
    )
    assert "vLLM: ValueError: To serve at least one request with" in first
    assert "the estimated maximum model length is 32736" in first
    assert "\n" not in first
    assert "Traceback" in Path(log.removesuffix(")")).read_text()
    Path(log.removesuffix(")")).unlink()


@pytest.mark.slow
def test_an_engine_with_too_small_a_cache_names_the_size_it_needs(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device("cpu", 1)
    for name, value in device.engine_environment(RESOURCES, Place()).items():
        monkeypatch.setenv(name, value)
    model = Model(long_model, Reference.parse(f"model@sha256:{'a' * 64}"))
    with pytest.raises(
        UserError, match=r"^the engines' key-value cache cannot hold a sequence of 65,536 tokens .* to 33 or more"
    ):
        Engine(EngineRequest(model, 65_536), RESOURCES, device)


@pytest.mark.slow
def test_a_cache_of_the_default_size_has_room_for_all_sequences(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 sequences of 64 tokens take 512 blocks of 16 KiB and one that stays free, 8.02 MiB: 9 MiB are 576 blocks."""
    device, resources = Device("cpu", 1), ResourcesConfig(device="cpu")
    for name, value in device.engine_environment(resources, Place()).items():
        monkeypatch.setenv(name, value)
    model = Model(long_model, Reference.parse(f"model@sha256:{'a' * 64}"))
    engine = Engine(EngineRequest(model, 64), resources, device)
    assert engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 576
