"""The optimiser of a training, by its name in the recipe."""

from __future__ import annotations

from typing import Any

import torch

from alignment_core.errors import UserError
from alignment_core.recipes import TrainingConfig

LEAST_BYTES = {"adamw": 12, "muon": 8, "adafactor": 4}
"""Least bytes of a progress checkpoint per trained parameter: fp32 (master) weights and the optimiser's state: two moments, one
for matrices, or only sums over rows and columns."""


def make_optimizer(model: torch.nn.Module, config: TrainingConfig, zero_stage: int, offloaded: bool) -> Any:
    """The optimiser of the trained parameters of ``model``.

    AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization"); Muon (Jordan et al. 2024, "Muon: An optimizer for
    hidden layers in neural networks") for hidden matrices with the step size of Liu et al. 2025, "Muon is Scalable for LLM
    Training", so that AdamW's learning rate suits both, and AdamW for the others; Adafactor (Shazeer & Stern 2018, "Adafactor:
    Adaptive Learning Rates with Sublinear Memory Cost"). Raises UserError if ZeRO would split matrices.
    """
    if config.optimizer != "adamw" and zero_stage:
        raise UserError(
            f"training.optimizer: {config.optimizer!r} needs whole matrices, which ZeRO stage {zero_stage} splits: "
            "set resources.zero_stage to 0 (and no offload_optimizer), or use `adamw`"
        )
    groups = parameter_groups(model, config.weight_decay)
    adam: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.learning_rate)
    if config.optimizer == "muon":
        return MuonAndAdamW(*_split(model, groups), config.learning_rate, adam)
    # Offloaded, the fused kernel steps on the CPU. DeepSpeed's own optimiser is not exact after a resume: it multiplies its
    # powers of beta step by step, but computes them from the step's number when it is restored.
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=offloaded or None, **adam)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for some groups of parameters and AdamW for the others, as one optimiser with one state."""

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], rate: float, adam: dict[str, Any]
    ) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=rate, **adam))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts use the groups and the state of the whole optimiser."""
        first = 0
        for part in self.parts:
            part.param_groups = self.param_groups[first : first + len(part.param_groups)]
            part.state = self.state
            first += len(part.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with each part."""
        assert closure is None, "gradients are computed before"
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the output of ``state_dict``."""
        super().load_state_dict(state_dict)
        self._share()


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters of ``model`` as an optimiser's groups: with and without weight decay.

    Norms, biases and embeddings do not decay, nor does a head that is tied to an embedding. An untied head and adapters are
    linear layers and do. Empty groups are left out.
    """
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    embedded = {parameter for module in embeddings for parameter in module.parameters(recurse=False)}
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Norms and biases are vectors, except for the biases of fused experts: one row an expert.
            is_plain = parameter.dim() <= 1 or name.endswith("bias") or parameter in embedded
            (plain if is_plain else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _split(model: torch.nn.Module, groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups of hidden matrices, for Muon, and of all other parameters: embeddings, heads, vectors, experts in one
    tensor."""
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    outer = {parameter for module in embeddings for parameter in module.parameters()}
    outer |= {
        parameter for name, parameter in model.named_parameters() if name.split(".")[-2:-1] in (["lm_head"], ["score"])
    }
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for group in groups:
        for chosen, wanted in ((matrices, True), (others, False)):
            params = [tensor for tensor in group["params"] if (tensor.dim() == 2 and tensor not in outer) is wanted]
            if params:
                chosen.append({**group, "params": params})
    return matrices, others
