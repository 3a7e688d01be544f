"""Options of vLLM that are passed through to engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.errors import UserError
from alignment_core.inference import engine
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from tests.exports.conftest import edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_batched_token": 1}, "does not accept max_num_batched_token: .*unexpected keyword"),
        ({"max_num_batched_tokens": "many"}, "does not accept max_num_batched_tokens: .*valid integer"),
    ],
)
def test_options_that_vllm_refuses_are_the_users_error(options: dict[str, Any], says: str, tiny_model: Any) -> None:
    model = Model(tiny_model(), Reference.parse(f"model@sha256:{'a' * 64}"))
    with pytest.raises(UserError, match=f"^resources.engine_options: vLLM {says}"):
        Engine(EngineRequest(model, 64), ResourcesConfig(engine_options=options), Device("cpu", 1))


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_vllm_has_the_options_of_engines_on_gpus(tensor_parallel_size: int) -> None:
    """They reach no vLLM on a machine without one."""
    from vllm import EngineArgs

    options = Device("cuda", 2).engine_options(ResourcesConfig(tensor_parallel_size=tensor_parallel_size), 0)
    assert options["sleep_mode_offload_cudagraph"]
    assert EngineArgs(model="none", **options).gpu_memory_utilization == 0.4


@pytest.mark.parametrize("reads_images", [True, False])
def test_models_that_also_read_images_start_with_their_tokenizer(
    reads_images: bool, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cannot make a processor of images without it: "requires a tokenizer and cannot be initialized when
    `skip_tokenizer_init=True`"."""

    class Started(Exception):
        pass

    def started(make: Any, *_: Any) -> None:
        raise Started(make.keywords["skip_tokenizer_init"])

    shutil.copytree(tiny_model(), tmp_path / "model")
    if reads_images:
        edit(tmp_path / "model" / "config.json", vision_config={"image_size": 28})
    monkeypatch.setattr(engine, "started", started)
    model = Model(tmp_path / "model", Reference.parse(f"model@sha256:{'a' * 64}"))
    with pytest.raises(Started) as begun:
        Engine(EngineRequest(model, 64), ResourcesConfig(), Device("cpu", 1))
    assert begun.value.args == (not reads_images,)
