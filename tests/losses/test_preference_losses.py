"""DPO's relatives against numbers worked out by hand, and which of them a recipe can ask for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from alignment_core.losses.preference import LOSSES, f_derivative, tail_weights
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.base import REFUSE_UNUSED
from alignment_core.recipes.sections.preference import REFERENCE_FREE, LossType
from alignment_core.training.methods.dpo import Dpo

LOG3 = math.log(3)  # σ(log 3) = 3/4, so -log σ(log 3) = log(4/3) and -log σ(-log 3) = log 4


def loss(name: str, chosen: float, rejected: float, **fields: Any) -> float:
    config = DpoLossConfig(loss_type=name, **fields)  # type: ignore[arg-type]
    chosen_P, rejected_P = (torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected))
    return LOSSES[name].of(chosen_P, rejected_P, config).item()


@pytest.mark.parametrize(
    ("result", "by_hand"),
    [
        # β δ = 0.5 · (1 - 0.4) = 0.3; and beyond the margin of 1 nothing is left
        (loss("hinge", 1.0, 0.4, beta=0.5), 0.7),
        (loss("hinge", 3.0, 0.4, beta=0.5), 0.0),
        # β δ = log 3, ε = 0.1: (0.9 log(4/3) - 0.1 log 4) / 0.8
        (loss("robust", LOG3, -LOG3, beta=0.5, label_smoothing=0.1), (0.9 * math.log(4 / 3) - 0.1 * math.log(4)) / 0.8),
        # q = (3/4, 1/4), p = (0.9, 0.1): 3/4 log(0.75 / 0.9) + 1/4 log(0.25 / 0.1)
        (
            loss("exo_pair", LOG3, -LOG3, beta=0.5, label_smoothing=0.1),
            0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(2.5),
        ),
        # β r_w = log 3, β r_l = -log 3: log(4/3) + ½ log 4 + ½ log(4/3)
        (loss("nca_pair", 2 * LOG3, -2 * LOG3, beta=0.5), 1.5 * math.log(4 / 3) + 0.5 * math.log(4)),
        # (1.5 - 1)² + (-0.5 + 1)² with 1 / (2 β) = 1
        (loss("sppo_hard", 1.5, -0.5, beta=0.5), 0.5),
        # 1 - 3/4 + 1/4
        (loss("apo_zero", 2 * LOG3, -2 * LOG3, beta=0.5), 0.5),
        # σ(log 3) + 1 - σ(log 3 - 0) = 1
        (loss("apo_down", 2 * LOG3, 0.0, beta=0.5), 1.0),
        # σ(-log 3) + 1 - σ(-log 3 + 2 log 3) = 1/4 + 1/4
        (loss("apo_down", -2 * LOG3, -4 * LOG3, beta=0.5), 0.5),
        # β of the difference of means - γ = 2 · 0.75 - (1.5 - log 3) = log 3
        (loss("simpo", -0.25, -1.0, beta=2.0, simpo_gamma=1.5 - LOG3), math.log(4 / 3)),
        (loss("sigmoid_norm", 0.5, 0.5 - LOG3, beta=1.0), math.log(4 / 3)),
        (loss("cpo", -1.0, -1.0 - 2 * LOG3, beta=0.5, nll_weight=1.0), math.log(4 / 3)),
        # p_w = 3/4 with odds 3, p_l = 1/2 with odds 1: -0.1 log σ(log 3)
        (loss("orpo", math.log(3 / 4), math.log(1 / 2), beta=0.1, nll_weight=1.0), 0.1 * math.log(4 / 3)),
    ],
)
def test_by_hand(result: float, by_hand: float) -> None:
    assert result == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.parametrize(
    ("divergence", "ratio", "by_hand"),
    [
        ("reverse_kl", 2.0, math.log(2)),
        ("forward_kl", 2.0, 0.5),  # 1 - 1/2
        ("forward_kl", 0.25, -3.0),  # 1 - 4
        ("js_divergence", 3.0, math.log(1.5)),  # 2 · 3 / 4
        ("js_divergence", 1 / 3, math.log(0.5)),  # 2 · 1/3 / (4/3)
        ("alpha_divergence", 4.0, 1.0),  # α = 1/2: (4^-½ - 1) / -½
        ("alpha_divergence", 0.25, -2.0),  # (2 - 1) / -½
    ],
)
def test_the_implicit_reward_of_another_divergence(divergence: str, ratio: float, by_hand: float) -> None:
    log_ratio_S = torch.tensor([ratio], dtype=torch.float64).log()
    assert f_derivative(log_ratio_S, divergence, 0.5).item() == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, -1000.0), (1000.0, -1000.0), (1000.0, 1000.0)])
def test_a_far_log_ratio_has_a_finite_loss_and_gradient(divergence: str, chosen: float, rejected: float) -> None:
    ratios = torch.tensor([chosen, rejected], requires_grad=True)
    scores = f_derivative(ratios, divergence, 0.5)
    LOSSES["sigmoid"].of(scores[:1], scores[1:], DpoLossConfig()).sum().backward()
    assert ratios.grad is not None
    assert torch.isfinite(scores).all()
    assert torch.isfinite(ratios.grad).all()


def test_tokens_beyond_the_shorter_completion_of_a_pair_weigh_alpha() -> None:
    # lengths 3 and 1, then 2 and 2, then 0 and 1
    sequence_K = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 5])
    weights = tail_weights(sequence_K, torch.tensor([3, 1, 2, 2, 0, 1]), 0.25)
    assert weights.tolist() == [1, 0.25, 0.25, 1, 1, 1, 1, 1, 0.25]


def test_ld_dpo_by_hand() -> None:
    """Chosen -1 - 2 - ½ · 4 = -5, less the reference's -4: r = -1. Rejected -1 - 1, less -2: r = 0. Their nll is unweighted."""
    method = Dpo(DpoLossConfig(beta=1.0, ld_alpha=0.5, nll_weight=1.0))
    batch: Any = SimpleNamespace(sequence_K=torch.tensor([0, 0, 0, 1, 1]), sequences=2)
    logps = torch.tensor([-1.0, -2.0, -4.0, -1.0, -1.0])
    loss, metrics = method.loss(logps, batch, torch.tensor([-4.0, -2.0]))
    assert loss.item() == pytest.approx(math.log(1 + math.e) + 7 / 3)
    assert metrics["margin"].item() == pytest.approx(-1.0)


def test_a_certain_completion_has_a_finite_odds_ratio_and_gradient() -> None:
    chosen = torch.tensor([-0.0], requires_grad=True)
    config = DpoLossConfig(loss_type="orpo", nll_weight=1.0)
    value = LOSSES["orpo"].of(chosen, torch.tensor([-1.0]), config)
    value.sum().backward()
    assert math.isfinite(value.item())
    assert chosen.grad is not None
    assert math.isfinite(chosen.grad.item())


def test_a_recipe_can_name_every_loss_and_no_other() -> None:
    assert set(get_args(LossType)) == set(LOSSES)
    assert {name for name, loss in LOSSES.items() if not loss.reference} == set(REFERENCE_FREE)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"loss_type": "robust"}, "`robust` needs `label_smoothing`: the assumed fraction of flipped labels"),
        ({"loss_type": "exo_pair"}, "`exo_pair` needs `label_smoothing`"),
        ({"loss_type": "orpo", "nll_weight": 0}, "`orpo` adds the chosen completions' likelihood: set `nll_weight`"),
        ({"loss_weights": {"hinge": 1.0, "cpo": 1.0}}, "`cpo` adds the chosen completions' likelihood"),
        ({"loss_weights": {}}, "`loss_weights` is empty"),
        ({"loss_weights": {"hinge": 0.0}}, "greater than 0"),
        ({"loss_weights": {"hing": 1.0}}, "Input should be 'sigmoid', 'ipo'"),
        ({"loss_type": "ipo", "loss_weights": {"hinge": 1.0}}, "`loss_type` has no effect with `loss_weights`"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "`label_smoothing` has no effect with `loss_type: hinge`"),
        ({"simpo_gamma": 1.0}, "`simpo_gamma` has no effect with `loss_type: sigmoid`"),
        (
            {"loss_weights": {"hinge": 1.0, "ipo": 1.0}, "label_smoothing": 0.1},
            "`label_smoothing` has no effect with `hinge` and `ipo`",
        ),
    ],
)
def test_inconsistent_settings_are_refused_in_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        DpoLossConfig.model_validate(fields, context=REFUSE_UNUSED)


def test_the_key_of_a_plain_dpo_is_unchanged() -> None:
    assert DpoLossConfig().model_dump() == {
        "loss_type": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "nll_weight": 0.0,
    }
