"""The run host: stages run in it, errors come back typed, and nothing of it outlives the calling process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from alignment_core.artifacts import open_store
from alignment_core.errors import DeadlineExceeded, Stopped, UserError
from alignment_core.execution.base import StageCall
from alignment_core.host.client import Host
from alignment_core.recipes import ModelConfig, ResourcesConfig, ScratchModel
from alignment_core.stages.base_model import BaseModelConfig, pin_model
from tests.conftest import TinyModel
from tests.host.idle_flow import check_that_nothing_outlives

pytestmark = pytest.mark.slow


def model_call(config: BaseModelConfig) -> StageCall:
    return StageCall(stage="base_model", label="model", config=config.model_dump(mode="json"), inputs={})


def test_nothing_outlives_the_calling_process(tmp_path: Path, tiny_model: TinyModel) -> None:
    """Ended by Ctrl-C. In tests/host/test_stopping.py it trains, and `make test-long` kills it as it is idle, too."""
    check_that_nothing_outlives(signal.SIGINT, tmp_path, tiny_model())


def test_calls_errors_deadlines_and_closing(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    tiny = pin_model(ModelConfig(name=str(tiny_model())))
    store = open_store(tmp_path / "store")
    host = Host(store.uri, ResourcesConfig(trainers=1), tmp_path / "host.log")

    result = host.run(model_call(tiny))
    assert result.state == "run"
    assert result.reason == "first run of this stage in this store"
    assert (store.fetch(result.reference) / "model.safetensors").is_file()

    again = host.run(model_call(tiny))
    assert (again.state, again.reference) == ("cached", result.reference)

    empty = tmp_path / "no-weights"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no \*\.safetensors"):
        host.run(model_call(pin_model(ModelConfig(name=str(empty)))))

    hurried = Host(store.uri, ResourcesConfig(trainers=1, no_progress_timeout_seconds=0.01), tmp_path / "hurried.log")
    other = ScratchModel(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(DeadlineExceeded, match=r"model made no progress for 0\.01 seconds"):
        hurried.run(model_call(pin_model(ModelConfig(scratch=other))))
    hurried.close()

    host.close()
    with pytest.raises(Stopped):
        host.run(model_call(pin_model(ModelConfig(scratch=other))))
    assert not list((tmp_path / "home").glob("tmp/*"))
