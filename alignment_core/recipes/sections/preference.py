"""The preference loss of DPO and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.recipes.base import Config, unkeyed

LossType = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
    "simpo",
    "cpo",
    "orpo",
]
REFERENCE_FREE = {"simpo", "cpo", "orpo"}
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo", "cpo")
"""Losses that read `label_smoothing`."""
NEED_SMOOTHING = {
    "robust": "the assumed fraction of flipped labels",
    "exo_pair": "the probability of the rejected completion under the target, such as 0.001",
}
NEED_NLL = ("cpo", "orpo")
OF_THE_DIFFERENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair")
"""Losses of the difference of two implicit rewards, in which the unknown constant of another f-divergence cancels."""
LEARNING_RATES = {"orpo": 8e-6}
"""Default learning rates of losses for which DPO's is far too low: that of Hong et al. 2024 (ORPO), appendix C."""


class ReferenceSyncConfig(Config):
    """A reference that is updated during training (TR-DPO), as `sync_ref_model` of TRL."""

    mixup_alpha: float = Field(0.6, gt=0, le=1)
    """α of the update: reference ← α · policy + (1 − α) · reference."""
    sync_steps: int = Field(512, ge=1)
    """Number of steps between updates. With 1 and a small `mixup_alpha`, the reference is a moving average of the policy."""


class DpoLossConfig(Config):
    """The preference loss."""

    RENAMED: ClassVar = {"sync_reference": "sync_ref_model"}

    DEFAULTS_BY: ClassVar = {
        "loss_type": {
            "simpo": {"beta": 2.0},  # 2.0 to 2.5 for the models of Meng et al. 2024 (README of princeton-nlp/SimPO)
            "cpo": {"nll_weight": 1.0},
            "orpo": {"nll_weight": 1.0},
        }
    }

    loss_type: LossType = "sigmoid"
    """`sigmoid` is DPO, `ipo` identity preference optimisation, `hinge` SLiC, `robust` robust DPO, `exo_pair` EXO, `nca_pair`
    NCA, `sppo_hard` SPPO, `apo_zero` and `apo_down` are anchored (APO), `sigmoid_norm` is length-normalised DPO. `simpo`, `cpo`
    and `orpo` need no reference. docs/methods/preference.md has the formulas."""
    loss_weights: dict[LossType, Annotated[float, Field(gt=0)]] | None = unkeyed(None)
    """Weighted sum of several losses instead of `loss_type`: `{sigmoid: 0.8, apo_zero: 0.2}`. They share the fields below. Not
    part of the stage's key while unset."""
    beta: float = Field(0.1, gt=0)
    """β: strength of the KL penalty to the reference policy. For losses without a reference: scale of the rewards (default
    with `simpo`: 2, and 2 to 2.5 in its paper), or weight of the odds ratio (`orpo`)."""
    final_beta: float | None = unkeyed(None, gt=0)
    """β of the last step; β changes linearly from `beta`. Default: β is constant. Not part of the stage's key while unset."""
    beta_alpha: float = unkeyed(0.0, ge=0)
    """α of β-DPO: β of a batch is multiplied by 1 + α (m − `beta_margin`), where m is the mean margin of the implicit rewards
    of its pairs before the step, which takes an additional forward pass. 0.6 in its authors' example. Not part of the stage's
    key while 0."""
    beta_margin: float = unkeyed(0.0)
    """Margin at which β of a batch equals `beta`; only with `beta_alpha`."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = unkeyed("reverse_kl")
    """f-divergence from the reference that β weighs, with the implicit reward β f′(π / π_ref) (Wang et al. 2024, "Beyond
    Reverse KL"): `reverse_kl` is DPO's. For losses of the difference of two rewards: `sigmoid`, `sigmoid_norm`, `hinge`, `ipo`,
    `robust` and `exo_pair`. Not part of the stage's key while `reverse_kl`."""
    f_alpha_divergence_coef: float = unkeyed(0.5, gt=0, lt=1)
    """α of `alpha_divergence`, f′(t) = (t^(α−1) − 1) / (α − 1), as in TRL 1.16: near 1 it is `reverse_kl`, near 0
    `forward_kl`; the α of the paper is 1 − α."""
    ld_alpha: float | None = unkeyed(None, ge=0, le=1)
    """α of LD-DPO (Liu et al. 2024, "Length Desensitization in Direct Preference Optimization"): weight of the tokens of the
    longer completion beyond the length of the shorter one, so that length alone is worth less. 0 ignores these tokens. For
    losses with a fixed reference. Default: 1, DPO."""
    sync_ref_model: ReferenceSyncConfig | None = unkeyed(None)
    """Update the reference during training (TR-DPO). It is then a second copy of the model with a forward pass in every step.
    Default: the reference is fixed, and its log-probabilities are computed once. Not part of the stage's key while unset."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """ε: assumed fraction of flipped labels (`sigmoid`: conservative DPO; `robust`, which needs it; `simpo`, `cpo`), or the
    target's probability of the rejected completion (`exo_pair`, which needs it)."""
    simpo_gamma: float | None = unkeyed(None, ge=0)
    """γ: target reward margin; only with `simpo`. Default: half of `beta`, where the authors of SimPO advise to start. Not
    part of the stage's key while unset."""
    nll_weight: float = Field(0.0, ge=0)
    """Weight of the chosen completion's mean negative log-likelihood per token, which is added to the loss. Default with `cpo`
    and `orpo`, which need it: 1, as in their papers."""

    @property
    def weights(self) -> dict[str, float]:
        """The losses, by name, and their weights."""
        return {str(name): weight for name, weight in (self.loss_weights or {self.loss_type: 1.0}).items()}

    @property
    def target_margin(self) -> float:
        """SimPO's γ."""
        return self.beta / 2 if self.simpo_gamma is None else self.simpo_gamma

    @property
    def needs_reference(self) -> bool:
        """Whether a loss compares the policy with a reference."""
        return not self.weights.keys() <= REFERENCE_FREE

    @property
    def beta_changes(self) -> bool:
        """Whether β differs between steps."""
        return self.final_beta is not None or self.beta_alpha > 0

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> DpoLossConfig:
        if self.sync_ref_model and not self.needs_reference:
            raise ValueError("`sync_ref_model` is for losses with a reference: remove it")
        if self.ld_alpha is not None and (self.sync_ref_model or REFERENCE_FREE & self.weights.keys()):
            raise ValueError(
                "`ld_alpha` is for losses with a fixed reference: use one without `sync_ref_model`, or remove it"
            )
        if self.f_divergence_type != "alpha_divergence":
            self.refuse_unused(
                info, ("f_alpha_divergence_coef",), f"with `f_divergence_type: {self.f_divergence_type}`"
            )
        if self.f_divergence_type != "reverse_kl":
            if others := sorted(self.weights.keys() - {*OF_THE_DIFFERENCE}):
                raise ValueError(
                    f"`f_divergence_type: {self.f_divergence_type}` is not defined for `{others[0]}`: use one of "
                    f"{', '.join(OF_THE_DIFFERENCE)}"
                )
            if self.beta_alpha:
                raise ValueError("`beta_alpha` is defined for `f_divergence_type: reverse_kl`: remove one of them")
        if not self.beta_alpha:
            self.refuse_unused(info, ("beta_margin",), "without `beta_alpha`")
        elif REFERENCE_FREE & self.weights.keys():
            raise ValueError("`beta_alpha` needs log-ratios to a reference: use losses with a reference, or remove it")
        names = tuple(self.weights)
        if self.loss_weights is not None:
            self.refuse_unused(info, ("loss_type",), "with `loss_weights`, which names the losses")
            if not self.loss_weights:
                raise ValueError("`loss_weights` is empty: name a loss and its weight, as in `{sigmoid: 1.0}`")
        losses = " and ".join(f"`loss_type: {name}`" if self.loss_weights is None else f"`{name}`" for name in names)
        if not set(names) & set(SMOOTHED):
            self.refuse_unused(info, ("label_smoothing",), f"with {losses}")
        if "simpo" not in names:
            self.refuse_unused(info, ("simpo_gamma",), f"with {losses}")
        for name in names:
            if name in NEED_SMOOTHING and not self.label_smoothing:
                raise ValueError(f"`{name}` needs `label_smoothing`: {NEED_SMOOTHING[name]}")
            if name in NEED_NLL and not self.nll_weight:
                raise ValueError(f"`{name}` adds the chosen completions' likelihood: set `nll_weight`, 1 in its paper")
        return self

    def check_trained(self, with_lora: bool) -> None:
        """Raise ValueError if the reference cannot be updated from a policy with adapters."""
        if self.sync_ref_model and with_lora:
            raise ValueError(
                "`loss.sync_ref_model` mixes whole weights, and `training.lora` trains none: remove one of them"
            )


def learning_rate(loss: Any, usual: float) -> float:
    """The default learning rate with a loss, as in a recipe or as a section, where that of others is ``usual``."""
    name = loss.get("loss_type") if isinstance(loss, Mapping) else getattr(loss, "loss_type", None)
    return LEARNING_RATES.get(name, usual) if isinstance(name, str) else usual


def with_learning_rate(
    defaults: Mapping[str, dict[str, Any]], content: Mapping[str, Any]
) -> Mapping[str, dict[str, Any]]:
    """The defaults of a section with `loss` and `training`, with the learning rate of the loss."""
    training = defaults["training"]
    rate = learning_rate(content.get("loss"), training["learning_rate"])
    return {**defaults, "training": {**training, "learning_rate": rate}}
