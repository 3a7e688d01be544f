"""verl 0.9.1's own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils, torch_functional
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.utils import losses

__all__ = [
    "compute_rollout_correction_weights",
    "core_algos",
    "overlong_rewards",
    "policy_loss",
    "sft_loss",
    "torch_functional",
]

NO_DUAL_CLIP = 1e9
"""verl always clips twice; beyond this no ratio goes."""


def policy_loss(
    mode: str,
    logps_ST: Tensor,
    old_ST: Tensor,
    advantages_ST: Tensor,
    mask_ST: Tensor,
    aggregation: str = "token-mean",
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float = NO_DUAL_CLIP,
    weights_ST: Tensor | None = None,
    **batch: Any,
) -> Tensor:
    """The loss that verl registers as ``mode``. ``batch``: its ``global_batch_info``."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        clip_ratio_c=dual_clip,
        global_batch_info=batch,
    )
    function = core_algos.get_policy_loss_fn(mode)
    loss, _ = function(
        old_log_prob=old_ST,
        log_prob=logps_ST,
        advantages=advantages_ST,
        response_mask=mask_ST.double(),
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights_ST,
    )
    return loss


def overlong_rewards(lengths_S: np.ndarray, longest: int, buffer: int, penalty: float) -> list[float]:
    """Rewards of verl's DAPO reward manager for completions of these lengths with zero reward."""
    overlong = SimpleNamespace(enable=True, len=buffer, penalty_factor=penalty, log=False)
    manager = DAPORewardManager(
        SimpleNamespace(decode=lambda *_, **__: "", eos_token="</s>"),
        0,
        compute_score=lambda **_: 0.0,
        max_resp_len=longest,
        overlong_buffer_cfg=overlong,
    )
    sequences, places = len(lengths_S), torch.arange(longest)
    tensors = {
        "prompts": torch.zeros(sequences, 1, dtype=torch.long),
        "responses": torch.zeros(sequences, longest, dtype=torch.long),
        "attention_mask": torch.cat(
            [torch.ones(sequences, 1), places < torch.from_numpy(lengths_S)[:, None]], dim=1
        ).long(),
    }
    texts = {
        "reward_model": np.array([{"ground_truth": ""}] * sequences, object),
        "data_source": np.array([""] * sequences, object),
    }
    return manager(DataProto.from_dict(tensors, texts)).sum(1).tolist()


def sft_loss(logps_ST: Tensor, mask_ST: Tensor, tokens_of_batch: int) -> Tensor:
    """verl's loss of fine-tuning of a micro-batch."""
    data = TensorDict({"response_mask": mask_ST}, batch_size=[len(mask_ST)])
    tensordict_utils.assign_non_tensor(data, pad_mode=DatasetPadMode.RIGHT, dp_size=1, batch_num_tokens=tokens_of_batch)
    loss, _ = losses.sft_loss(None, {"log_probs": logps_ST}, data)
    return loss
