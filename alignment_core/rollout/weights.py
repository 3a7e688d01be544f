"""New weights into a running vLLM worker. vLLM mixes this class into its own worker (``worker_extension_cls``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class WeightUpdate:
    """Methods that the engine calls on every worker of vLLM by ``collective_rpc``."""

    model_runner: Any

    def load_checkpoint(self, model: str) -> None:
        """Replace all weights by those of the folder ``model`` (safetensors, same architecture)."""
        self.model_runner.reload_weights(weights_iterator=_tensors(model))
        _repack_tied_head(self.model_runner.get_model())


def _tensors(model: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, file.get_tensor(name)


def _repack_tied_head(model: Any) -> None:
    """On the CPU a tied ``lm_head`` keeps a handle packed from the old embedding; without this it answers with it."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
