"""The optimiser of a training, by its name in the recipe."""

from __future__ import annotations

from typing import Any

import torch

from alignment_core.errors import UserError
from alignment_core.models.quantization import library
from alignment_core.recipes import ResourcesConfig, TrainingConfig

LEAST_BYTES = {"adamw": 12, "adamw_8bit": 6, "paged_adamw_8bit": 6, "muon": 8, "adafactor": 4}
"""Least bytes of a progress checkpoint per trained parameter: fp32 (master) weights and the optimiser's state: two moments, one
for matrices, or only sums over rows and columns."""
FIELD = "training.optimizer"


def make_optimizer(model: torch.nn.Module, config: TrainingConfig, zero_stage: int, resources: ResourcesConfig) -> Any:
    """The optimiser of the trained parameters of ``model``.

    AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization"), also with moments in 8 bits (Dettmers et al.
    2022, "8-bit Optimizers via Block-wise Quantization"); Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in
    neural networks") for hidden matrices with the step size of Liu et al. 2025, "Muon is Scalable for LLM Training", so that
    AdamW's learning rate suits both, and AdamW for the others; Adafactor (Shazeer & Stern 2018, "Adafactor: Adaptive Learning
    Rates with Sublinear Memory Cost"). Raises UserError for resources that the optimiser does not support.
    """
    if config.has_8bit_moments:
        return _adamw_8bit(model, config, resources)
    if config.optimizer != "adamw" and zero_stage:
        raise UserError(
            f"{FIELD}: {config.optimizer!r} needs whole matrices, which ZeRO stage {zero_stage} splits: "
            "set resources.zero_stage to 0 (and no offload_optimizer), or use `adamw`"
        )
    groups = parameter_groups(model, config.weight_decay)
    adam: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optimizer == "adafactor":
        return Adafactor(groups, {"lr": config.learning_rate})
    if config.optimizer == "muon":
        return MuonAndAdamW(*_split(model, groups), config.learning_rate, adam)
    # Fused: on a CPU ten times as fast, and without large temporary tensors. DeepSpeed's own optimiser is not exact after a
    # resume: it multiplies its powers of beta step by step, but computes them from the step's number when it is restored.
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True, **adam)


def _adamw_8bit(model: torch.nn.Module, config: TrainingConfig, resources: ResourcesConfig) -> Any:
    """AdamW of ``bitsandbytes`` with moments in 8 bits, in blocks of 256 of one scale. Those of embeddings, whose gradients
    differ by orders of magnitude between tokens, stay in fp32 (section 2.3 of the paper; the ``Trainer`` of ``transformers``
    does so, too), and those of tensors with fewer than 4,096 elements."""
    if resources.offload_optimizer:
        raise UserError(
            f"{FIELD}: {config.optimizer!r} steps on the GPU: leave out resources.offload_optimizer, or use `adamw`"
        )
    if resources.progress == "store":
        raise UserError(
            f"{FIELD}: {config.optimizer!r} has moments in blocks that depend on the number of trainers, which "
            "resources.progress: store does not write: use `progress: local`, or `adamw`"
        )
    bitsandbytes = library(FIELD)

    class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[name-defined]
        """With the number of bits of each group."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            return {**super().get_config(gindex, pindex, group), "optim_bits": group["optim_bits"]}

        def load_state_dict(self, state_dict: Any, move_to_device: bool = True) -> None:
            super().load_state_dict(state_dict, move_to_device)
            for parameter, state in self.state.items():
                # bitsandbytes loads paged moments as usual ones
                for name in ("state1", "state2") if self.is_paged and parameter.device.type == "cuda" else ():
                    moments = state[name]
                    state[name] = self.get_state_buffer(parameter, dtype=moments.dtype)
                    torch.cuda.synchronize()  # it is filled by the GPU and copied by the CPU
                    state[name].copy_(moments)

    groups = []
    embedded = _embeddings(model)
    for group in parameter_groups(model, config.weight_decay):
        for bits in (8, 32):
            params = [parameter for parameter in group["params"] if (parameter in embedded) is (bits == 32)]
            if params:
                groups.append({**group, "params": params, "optim_bits": bits})
    betas = (config.adam_beta1, config.adam_beta2)
    is_paged = config.optimizer == "paged_adamw_8bit"
    return AdamW8bit(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, is_paged=is_paged)


class Adafactor(torch.optim.Optimizer):
    """Adafactor with steps of the learning rate itself, as in the ``Trainer`` of ``transformers``.

    In algorithm 4 of the paper, and in ``torch.optim.Adafactor``, a step is the learning rate times the root mean square of the
    weights, about 1/30. At AdamW's learning rates the B of LoRA, which is zero at first, would hardly move.
    """

    DECAY = -0.8
    """Exponent of the decay, 1 - β₂ = t^DECAY: section 7.2 of the paper."""
    LEAST_SQUARE = 1e-30
    """Added to squares of gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with the gradients that are there."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(self._update(parameter), alpha=-group["lr"])

    def _update(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient over the root of its estimated square, with a root mean square of at most 1."""
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        sides: dict[str, int | None] = {"row_var": -1, "col_var": -2} if grad.dim() > 1 else {"variance": None}
        if not state:
            state["step"] = torch.zeros(())
        state["step"] += 1
        new = float(state["step"]) ** self.DECAY
        update = grad.clone()
        for name, side in sides.items():
            square = grad.square() if side is None else _mean_square(grad, side)
            square += self.LEAST_SQUARE
            average = state.setdefault(name, torch.zeros_like(square)).lerp_(square, new)
            update *= (average / average.mean(-2, keepdim=True) if name == "row_var" else average).rsqrt()
        return update.div_((update.norm() / update.numel() ** 0.5).clamp(min=1))


def _mean_square(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=True).square() / tensor.shape[dim]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for some groups of parameters and AdamW for the others, as one optimiser with one state."""

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], rate: float, adam: dict[str, Any]
    ) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=rate, fused=True, **adam))
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
    embedded = _embeddings(model)
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Norms and biases are vectors, except for the biases of fused experts: one row an expert.
            is_plain = parameter.dim() <= 1 or name.endswith("bias") or parameter in embedded
            (plain if is_plain else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _embeddings(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights of embeddings, also of those that are tied to a head."""
    modules = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _heads(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights of the heads: of language models, whatever their names, and of scores."""
    heads = [module for name, module in model.named_modules() if name.split(".")[-1] in ("lm_head", "score")]
    of_models = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    heads += [head for get in of_models if get is not None and (head := get()) is not None]
    return {parameter for module in heads for parameter in module.parameters(recurse=False)}


def _split(model: torch.nn.Module, groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups of hidden matrices, for Muon, and of all other parameters: embeddings, heads, vectors, experts in one
    tensor."""
    outer = _embeddings(model) | _heads(model)
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for group in groups:
        for chosen, wanted in ((matrices, True), (others, False)):
            params = [tensor for tensor in group["params"] if (tensor.dim() == 2 and tensor not in outer) is wanted]
            if params:
                chosen.append({**group, "params": params})
    return matrices, others
