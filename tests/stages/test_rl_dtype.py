"""The float type in which reinforcement learning samples: that in which the policy is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers

from alignment_core.cluster import device as devices
from alignment_core.cluster.device import Device
from alignment_core.errors import EnvironmentFault
from alignment_core.inference.engine import EngineRequest
from alignment_core.models.saving import save_checkpoint
from alignment_core.recipes import RlConfig
from alignment_core.stages.rl.run import run_section
from tests.stages.rl_runs import prompts, section_of
from tests.stages.test_rl_critic import context_of


@pytest.mark.parametrize(("bf16", "stored"), [(False, torch.bfloat16), (True, torch.float32)], ids=["fp32", "bf16"])
def test_engines_are_asked_for_the_type_of_the_training_whatever_the_policy_is_stored_in(
    bf16: bool, stored: torch.dtype, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or bf16 would round each change of weights in fp32 away, and log-probabilities would differ by 1e-2, uncorrected."""
    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: True)
    monkeypatch.setattr("alignment_core.stages.rl.run.open_sources", lambda *_: None)  # nothing is rewarded
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=stored)
    save_checkpoint(model, tiny_model(), tmp_path / "policy")
    pq.write_table(prompts(), tmp_path / "train.parquet")
    requests: list[EngineRequest] = []

    def engines_and_trainers(request: EngineRequest, _ticket: Any) -> Any:
        requests.append(request)
        raise EnvironmentFault("there are no engines here")

    machines: Any = SimpleNamespace(engines_and_trainers=engines_and_trainers)
    context = replace(
        context_of(policy=tmp_path / "policy", prompts=tmp_path), progress=tmp_path / "progress", machines=machines
    )
    context.progress.mkdir()
    section = section_of(1, {"verifier": "task"}, {"max_completion_length": 8}, {"bf16": bf16})
    with pytest.raises(EnvironmentFault, match="there are no engines here"):
        run_section(context, RlConfig.model_validate(section), ())
    (request,) = requests
    assert request.policy.dtype == str(stored).removeprefix("torch.")
    assert request.dtype_on(Device("cpu", 2)) == ("bfloat16" if bf16 else "float32")
    as_stored = EngineRequest(request.policy, request.max_model_len)
    assert as_stored.dtype_on(Device("cpu", 2)) == request.policy.dtype, "as evaluations ask"
