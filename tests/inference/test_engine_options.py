"""Options of vLLM that are passed through to engines."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.errors import UserError
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig


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
