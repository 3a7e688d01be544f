"""An engine that does not get its memory of a GPU back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alignment_core.errors import EnvironmentFault
from alignment_core.inference.options import wakes
from alignment_core.recipes import ResourcesConfig


@pytest.mark.parametrize(("wanted", "share"), [({}, "0.4"), ({"gpu_memory_utilization": 0.6}, "0.6")])
def test_no_smaller_micro_batch_is_tried_where_an_engine_needs_the_memory(wanted: dict[str, Any], share: str) -> None:
    says = rf"gpu_memory_utilization: {share}\), .* lower the field, .*placement: disaggregated\); vLLM: CUDA out of"
    with pytest.raises(EnvironmentFault, match=says), wakes(ResourcesConfig(**wanted)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nadvice")


def test_other_errors_of_an_engine_that_wakes_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"), wakes(ResourcesConfig()):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
