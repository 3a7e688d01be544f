"""OpenRLHF 0.11.2's own functions.

Packages whose ``__init__`` imports flash_attn, peft or vLLM (GPU-only, or not needed for tensors) are entered without
running it, and ``ray.launcher``, which is there for a type hint, is an empty module. Its wheel also brings a package
``tests``, so that modules of this folder import each other without that name.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _enter(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = module


for name in ("openrlhf.models", "openrlhf.utils", "openrlhf.trainer.ray"):
    _enter(name)
launcher = types.ModuleType("openrlhf.trainer.ray.launcher")
launcher.RayActorGroup = object  # type: ignore[attr-defined]
sys.modules[launcher.__name__] = launcher

from openrlhf.models.loss import (  # noqa: E402
    DPOLoss,
    LogExpLoss,
    PairWiseLoss,
    PolicyLoss,
    SFTLoss,
    ValueLoss,
)
from openrlhf.models.utils import (  # noqa: E402
    compute_approx_kl,
    compute_entropy,
    log_probs_from_logits,
)
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController  # noqa: E402
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty  # noqa: E402
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm  # noqa: E402

__all__ = [
    "AdaptiveKLController",
    "DPOLoss",
    "Experience",
    "LogExpLoss",
    "PairWiseLoss",
    "PolicyLoss",
    "SFTLoss",
    "ValueLoss",
    "advantages_and_returns",
    "apply_overlong_penalty",
    "compute_approx_kl",
    "compute_entropy",
    "iter_grad_accum_global_norm",
    "log_probs_from_logits",
]


def advantages_and_returns(
    estimator: str,
    reward_S: Tensor,
    mask_ST: Tensor,
    group_size: int,
    *,
    values_ST: Tensor | None = None,
    kl_ST: Tensor | None = None,
    kl_coefficient: float = 0.0,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    no_std_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of OpenRLHF's experience maker. [S, T] each."""
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=gae_lambda, no_std_norm=no_std_norm)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=group_size),
        reward=SimpleNamespace(clip_range=None),
    )
    maker: Any = object.__new__(RemoteExperienceMaker)  # its constructor requires groups of Ray actors
    maker.strategy, maker.args, maker.advantage_estimator = SimpleNamespace(args=args), args, estimator
    maker.kl_ctl = SimpleNamespace(value=kl_coefficient)
    experience = Experience(
        index=list(range(len(reward_S))),
        rewards=reward_S.clone(),
        action_mask=mask_ST,
        values=values_ST,
        kl=torch.zeros(mask_ST.shape, dtype=torch.float64) if kl_ST is None else kl_ST,
        info={},
    )
    (result,) = maker.compute_advantages_and_returns([experience])
    return result.advantages, result.returns
