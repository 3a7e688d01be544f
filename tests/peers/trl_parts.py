"""TRL 1.16's own methods, called on a stand-in with only the attributes that they read.

TRL's losses are methods of its trainers, whose constructors need a model, a tokenizer and data that do not affect
the numbers. Accelerate is the real one.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.data_utils import is_conversational
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

__all__ = [
    "cpo_losses",
    "dpo_loss",
    "entropy_from_logits",
    "generalised_jsd",
    "get_soft_overlong_punishment",
    "grpo_loss",
    "kto_loss",
    "orpo_losses",
    "reward_arguments",
    "reward_loss",
    "rloo_loss",
    "scored",
    "selective_log_softmax",
    "sft_loss",
]


def grpo_loss(
    logps_ST: Tensor,
    old_ST: Tensor,
    advantages: Tensor,
    mask_ST: Tensor,
    loss_type: str,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    delta: float | None = None,
    level: str = "token",
    reference_ST: Tensor | None = None,
    beta: float = 0.0,
    longest: int = 1,
    weights_ST: Tensor | None = None,
    entropy_ST: Tensor | None = None,
    entropy_bonus: float = 0.0,
    quantile: float = 1.0,
    temperatures: tuple[float, float] = (1.0, 1.05),
) -> Tensor:
    """GRPOTrainer's loss; ``advantages`` [S] or [S, T]."""
    entropies = torch.zeros_like(logps_ST) if entropy_ST is None else entropy_ST
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps_ST, entropies, None),
        loss_type=loss_type,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        importance_sampling_level=level,
        beta=beta,
        max_completion_length=longest,
        top_entropy_quantile=quantile,
        get_high_entropy_mask=lambda *given: GRPOTrainer.get_high_entropy_mask(
            SimpleNamespace(accelerator=Accelerator(cpu=True)), *given
        ),
        off_policy_mask_threshold=None,
        use_vllm=weights_ST is not None,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        entropy_coef=entropy_bonus,
        _entropy_bonus_enabled=entropy_bonus > 0,
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=temperatures[0],
            sapo_temperature_neg=temperatures[1],
        ),
    )
    prompts = torch.ones(len(logps_ST), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.zeros(mask_ST.shape, dtype=torch.long),
        "completion_mask": mask_ST.double(),
        "advantages": advantages,
        "old_per_token_logps": old_ST,
        "ref_per_token_logps": reference_ST,
        "importance_sampling_ratio": weights_ST,
        "num_items_in_batch": mask_ST.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def rloo_loss(logps_ST: Tensor, old_ST: Tensor, advantage_S: Tensor, mask_ST: Tensor) -> Tensor:
    """RLOOTrainer's loss, with a clip at 0.2."""
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps_ST, torch.zeros_like(logps_ST), None),
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    prompts = torch.ones(len(logps_ST), 1, dtype=torch.long)
    mask = mask_ST.double()
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.zeros(mask_ST.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantage_S,
        "old_logps": (old_ST * mask).sum(1),
    }
    return RLOOTrainer._compute_loss(trainer, None, inputs)


def scored(
    kind: type[GRPOTrainer] | type[RLOOTrainer],
    reward_S: Tensor,
    group_size: int,
    *,
    scale: str = "group",
    old_ST: Tensor | None = None,
    rollout_ST: Tensor | None = None,
    mask_ST: Tensor | None = None,
    mode: str = "token_mask",
    bounds: tuple[float | None, float | None] = (None, None),
    reference_ST: Tensor | None = None,
    beta: float = 0.0,
) -> dict[str, Tensor]:
    """A trainer's results for sampled and rewarded completions: ``advantages`` [S], ``importance_sampling_ratio``.

    ``mask_ST`` leaves out the tokens of tools.
    """
    sequences = len(reward_S)
    mask = torch.ones(sequences, 1, dtype=torch.bool) if mask_ST is None else mask_ST
    lengths = [int(row.nonzero().max()) + 1 for row in mask]
    old = torch.zeros(mask.shape, dtype=torch.float64) if old_ST is None else old_ST
    rollout = old if rollout_ST is None else rollout_ST
    cut = [range(length) for length in lengths]
    generated = (
        [[0]] * sequences,
        [[0] * length for length in lengths],
        [[int(mask[row, place]) for place in places] for row, places in enumerate(cut)],
        [""] * sequences,
        [rollout[row, : len(places)].tolist() for row, places in enumerate(cut)],
        {},
        None,
        None,
    )
    trainer = _trainer(
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: reward_S[:, None].clone(),
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (
            reference_ST if model == "ref" else old,
            None,
            None,
        ),
        ref_model="ref",
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        mask_truncated_completions=False,
        num_iterations=1,
        num_generations=group_size,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=bounds[0],
        vllm_importance_sampling_clip_max=bounds[1],
        beta=beta,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_funcs=[None],
        reward_func_names=["reward"],
        reward_clip_range=None,
        normalize_advantages=False,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        log_multimodal=False,
        args=SimpleNamespace(
            per_device_train_batch_size=sequences,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        _logs={"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": {}},
        _pending_extra_logs={},
        _pending_metrics={},
    )
    if kind is RLOOTrainer:
        trainer._generate = lambda prompts: _of_rloo(generated)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # TRL makes tensors of lists
    try:
        return kind._generate_and_score_completions(trainer, [{"prompt": "p"}] * sequences)
    finally:
        torch.set_default_dtype(before)


def _of_rloo(generated: tuple) -> tuple:
    prompt_ids, completion_ids, _, completions, *_ = generated
    return prompt_ids, completion_ids, completions


def dpo_loss(
    logps_ST: Tensor,
    reference_ST: Tensor,
    mask_ST: Tensor,
    loss_type: str,
    beta: float,
    label_smoothing: float = 0.0,
    divergence: str = "reverse_kl",
    ld_alpha: float | None = None,
) -> Tensor:
    """DPOTrainer's loss of log-probabilities whose first half are those of the chosen completions."""

    def model(logps: Tensor) -> Any:
        output = SimpleNamespace(
            log_probs=logps * mask_ST,
            entropy=torch.zeros_like(logps),
            mean_logits=torch.zeros_like(logps),
            is_top1=mask_ST,
        )
        return lambda **_: output

    trainer = _trainer(
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        ld_alpha=ld_alpha,
        use_weighting=False,
        precompute_ref_logps=False,
        ref_model=model(reference_ST),
        f_divergence_type=divergence,
        f_alpha_divergence_coef=0.3,
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    completion = torch.nn.functional.pad(mask_ST.long(), (1, 0))  # the first token has no log-probability
    ids = torch.zeros_like(completion)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}
    return DPOTrainer._compute_loss(trainer, model(logps_ST), inputs, False)


def cpo_losses(
    chosen_P: Tensor, rejected_P: Tensor, loss_type: str, beta: float, gamma: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """CPOTrainer's losses [P] of log-probabilities, as they are or (``simpo``) means over tokens."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        beta=beta,
        loss_type=loss_type,
        simpo_gamma=gamma,
        label_smoothing=label_smoothing,
    )
    return CPOTrainer.cpo_loss(trainer, chosen_P, rejected_P)[0]


def generalised_jsd(student_KV: Tensor, teacher_KV: Tensor, beta: float) -> Tensor:
    """GKDTrainer's loss of logits, summed over all places: 0 is forward KL, 1 reverse KL."""
    return GKDTrainer.generalized_jsd_loss(student_KV[None], teacher_KV[None], beta=beta, reduction="sum")


def orpo_losses(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """ORPOTrainer's odds-ratio losses [P] of mean log-probabilities; it subtracts them from the likelihood's loss."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=beta)
    return -ORPOTrainer.odds_ratio_loss(trainer, chosen_P, rejected_P)[0]


def kto_loss(
    logps_ST: Tensor,
    reference_ST: Tensor,
    mask_ST: Tensor,
    desirable_S: Tensor,
    mismatched_S: tuple[Tensor, Tensor],
    loss_type: str,
    beta: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """KTOTrainer's loss of a micro-batch; ``mismatched_S`` are logps of mismatched completions by policy and reference."""
    output = SimpleNamespace(
        log_probs=logps_ST * mask_ST, entropy=torch.zeros_like(logps_ST), mean_logits=torch.zeros_like(logps_ST)
    )
    trainer = _trainer(
        _compute_kl_logps=lambda *_: mismatched_S[0],
        calculate_KL=loss_type == "kto",
        loss_type=loss_type,
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _tp_size=1,
    )
    completion = torch.nn.functional.pad(mask_ST.long(), (1, 0))  # the first token has no log-probability
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "label": desirable_S,
        "ref_logps": (reference_ST * mask_ST).sum(1),
        "ref_KL_logps": mismatched_S[1],
    }
    return KTOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)


def reward_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None) -> Tensor:
    """RewardTrainer's loss."""
    trainer = _trainer(args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1)
    scores = SimpleNamespace(logits=torch.cat([chosen_P, rejected_P])[:, None])
    inputs = {"attention_mask": torch.ones(2 * len(chosen_P), 1)}
    if margin_P is not None:
        inputs["margin"] = margin_P
    return RewardTrainer.compute_loss(trainer, lambda **_: scores, inputs)


def sft_loss(logps_ST: Tensor, mask_ST: Tensor, tokens_of_batch: int | None = None) -> Tensor:
    """SFTTrainer's loss of a micro-batch."""
    trainer = _trainer(
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
        _total_train_tokens=0,
        _tp_size=1,
    )
    output = SimpleNamespace(
        log_probs=logps_ST * mask_ST, label_mask=mask_ST, entropy=torch.zeros_like(logps_ST), is_top1=mask_ST
    )
    inputs = {"attention_mask": mask_ST.long()}
    return SFTTrainer.compute_loss(trainer, lambda **_: output, inputs, num_items_in_batch=tokens_of_batch)


def _trainer(**fields: Any) -> Any:
    """A stand-in in training that goes without accumulation and auxiliary losses."""
    model = torch.nn.Identity()  # a module, because TRL searches it for adapters if PEFT is installed
    model.is_gradient_checkpointing = False
    return SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        model=model,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **fields,
    )


def reward_arguments(
    rows: list[dict[str, Any]], completions: list[str], completion_ids: list[list[int]]
) -> dict[str, Any]:
    """GRPOTrainer's arguments of a reward function for rows with a completion each, without its own objects."""
    given: dict[str, Any] = {}

    def keep(**arguments: Any) -> list[float]:
        given.update(arguments)
        return [0.0] * len(completions)

    prompts = [row["prompt"] for row in rows]
    as_messages = is_conversational({"prompt": prompts[0]})
    messages = [
        [{"role": "assistant", "content": completion}] if as_messages else completion for completion in completions
    ]
    trainer = _trainer(
        reward_funcs=[keep],
        reward_processing_classes=[None],
        reward_func_names=["keep"],
        environments=None,
        state=SimpleNamespace(global_step=0),
        _log_completion_extra=None,
        _log_metric=None,
        args=SimpleNamespace(report_to=[]),
    )
    GRPOTrainer._calculate_rewards.__wrapped__(trainer, rows, prompts, messages, completion_ids)
    return {name: values for name, values in given.items() if isinstance(values, list)}
