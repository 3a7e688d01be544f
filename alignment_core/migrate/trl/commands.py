"""What becomes of the flags of each command of TRL."""

from __future__ import annotations

from alignment_core.migrate.rules import (
    Choice,
    Command,
    Rule,
    To,
    column,
    everywhere,
    if_on,
    nothing,
    number,
    of_section,
    only_if,
    whole,
)
from alignment_core.migrate.trl.reinforcement import GRPO, RLOO
from alignment_core.migrate.trl.training import COMMON, DEFAULTS, MODEL, TRUNCATES
from alignment_core.migrate.trl.values import losses, smoothing

SYNC: dict[str, Rule] = {
    "sync_ref_model": To(("dpo.loss.sync_reference",), if_on({})),
    "ref_model_mixup_alpha": To(("dpo.loss.sync_reference.mixup_alpha",), only_if("sync_ref_model", number)),
    "ref_model_sync_steps": To(("dpo.loss.sync_reference.sync_steps",), only_if("sync_ref_model", whole)),
}


COMMANDS: dict[str, Command] = {
    "sft": Command(
        "sft",
        {
            **MODEL,
            **COMMON,
            "completion_only_loss": "a row's prompt is never trained on; without a prompt, give `messages` or `text`.",
            "assistant_only_loss": "not needed: of a conversation, the assistant's turns are trained on.",
            "loss_type": Choice({"nll": {}, "dft": "DFT does not exist here.", "chunked_nll": {}}),
        },
        of_section("sft"),
        {**DEFAULTS, "learning_rate": "2e-5"},
        TRUNCATES,
    ),
    "sft --dataset_text_field": Command(
        "continued-pretraining",
        {
            **MODEL,
            **COMMON,
            "truncation_mode": "long documents are cut into blocks of `max_length`; nothing is lost.",
            "dataset_text_field": To(("{data}.sources.columns",), column("text")),
            **everywhere("completion_only_loss assistant_only_loss", "every token of a document is trained on."),
            "loss_type": Choice({"nll": {}, "dft": "DFT does not exist here.", "chunked_nll": {}}),
        },
        of_section("continued_pretraining"),
        {**DEFAULTS, "learning_rate": "2e-5"},
    ),
    "dpo": Command(
        "dpo",
        {
            **MODEL,
            **COMMON,
            "loss_type": To(("dpo.loss.loss_type", "dpo.loss.loss_weights", "dpo.loss.nll_weight"), losses),
            "loss_weights": To(("dpo.loss.loss_weights",), nothing, "with --loss_type"),
            "beta": To(("dpo.loss.beta",), number),
            "label_smoothing": To(("dpo.loss.label_smoothing",), smoothing),
            **SYNC,
            **everywhere(
                "ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau",
                "does not exist here; docs/methods/preference.md has the losses that do.",
            ),
        },
        of_section("dpo"),
        {**DEFAULTS, "learning_rate": "1e-6"},
        TRUNCATES,
    ),
    "reward": Command(
        "reward-model",
        {
            **MODEL,
            **COMMON,
            "center_rewards_coefficient": "does not exist here; `normalise: model` centres rewards where they are used.",
        },
        of_section("reward_model"),
        {**DEFAULTS, "learning_rate": "1e-4"},
        TRUNCATES,
    ),
    "kto": Command(
        "kto",
        {
            **MODEL,
            **COMMON,
            "loss_type": Choice(
                {"kto": {"kto.loss.loss_type": "kto"}, "apo_zero_unpaired": {"kto.loss.loss_type": "apo_zero_unpaired"}}
            ),
            "beta": To(("kto.loss.beta",), number),
            "desirable_weight": To(("kto.loss.desirable_weight",), number),
            "undesirable_weight": To(("kto.loss.undesirable_weight",), number),
            **everywhere(
                "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
                "KTO's reference stays here; `dpo.loss.sync_reference` moves that of pairs.",
            ),
        },
        of_section("kto"),
        {**DEFAULTS, "learning_rate": "1e-6"},
        TRUNCATES,
    ),
    "grpo": GRPO,
    "rloo": RLOO,
}

ELSEWHERE = {
    "distillation": "has no table of flags: start from the recipe `distillation` (docs/methods/distillation.md)",
    "vllm-serve": "is not needed for training, whose engines start by themselves; `align serve MODEL` serves a model",
    "env": "is `align doctor`",
}
"""Programs that are no recipe."""
