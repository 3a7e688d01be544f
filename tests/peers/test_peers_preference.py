"""Losses on pairs and demonstrations, by our training methods and by the peers' trainers on the same tensors."""

from __future__ import annotations

from types import SimpleNamespace

import openrlhf_parts as openrlhf
import pytest
import torch
import trl_parts as trl
import verl_parts as verl
from ragged import MASK_ST, draw, packed, same_with_gradient, sequences_of
from torch import Tensor

from alignment_core.losses.reward import log_exp_loss
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft

PAIRS = len(MASK_ST) // 2
LOGPS_ST, REFERENCE_ST = -draw(60).abs(), -draw(61).abs()
"""In the order of TRL: the chosen completions, then the rejected."""
CHOSEN_P, REJECTED_P, MARGIN_P = draw(62, PAIRS), draw(63, PAIRS), draw(64, PAIRS).abs().float().double()


def pairwise(values_ST: Tensor) -> Tensor:
    """In our order: chosen, rejected, chosen, …"""
    return torch.stack(values_ST.chunk(2), dim=1).flatten(0, 1)


def ours(logps_ST: Tensor, **fields: object) -> Tensor:
    """The loss of a batch of pairs, divided as our trainer divides it."""
    method, mask_ST = Dpo(DpoLossConfig(**fields)), pairwise(MASK_ST)  # type: ignore[arg-type]
    batch = SimpleNamespace(sequence_K=sequences_of(mask_ST), sequences=2 * PAIRS)
    weights_ST = mask_ST.double()
    if (
        method.config.ld_alpha is not None
    ):  # the stage reference_logps weights the tokens that the shorter completion lacks
        beyond_ST = mask_ST.cumsum(1) > mask_ST.sum(1).view(-1, 2).amin(1).repeat_interleave(2)[:, None]
        weights_ST = torch.where(beyond_ST, method.config.ld_alpha * weights_ST, weights_ST)
    reference_S = (pairwise(REFERENCE_ST) * weights_ST).sum(1)
    loss, _ = method.loss(packed(pairwise(logps_ST), mask_ST), batch, reference_S)  # type: ignore[arg-type]
    return loss / method.normaliser([None] * PAIRS)  # type: ignore[list-item]


def openrlhf_dpo(logps_ST: Tensor, loss: openrlhf.DPOLoss) -> Tensor:
    sums, references = (logps_ST * MASK_ST).sum(1), (REFERENCE_ST * MASK_ST).sum(1)
    return loss(*sums.chunk(2), *references.chunk(2))[0]


def test_dpo_is_trls_and_openrlhfs() -> None:
    def mine(x: Tensor) -> Tensor:
        return ours(x, beta=0.3)

    same_with_gradient(mine, lambda x: trl.dpo_loss(x, REFERENCE_ST, MASK_ST, "sigmoid", 0.3), LOGPS_ST)
    same_with_gradient(mine, lambda x: openrlhf_dpo(x, openrlhf.DPOLoss(0.3)), LOGPS_ST)


def test_conservative_dpo_is_openrlhfs() -> None:
    same_with_gradient(
        lambda x: ours(x, beta=0.3, label_smoothing=0.1),
        lambda x: openrlhf_dpo(x, openrlhf.DPOLoss(0.3, label_smoothing=0.1)),
        LOGPS_ST,
    )


@pytest.mark.parametrize(
    ("name", "label_smoothing"),
    [
        *(("hinge", 0.0), ("nca_pair", 0.0), ("sppo_hard", 0.0), ("apo_zero", 0.0), ("apo_down", 0.0)),
        *(("sigmoid_norm", 0.0), ("robust", 0.1), ("exo_pair", 0.05)),
    ],
)
def test_dpos_relatives_are_trls(name: str, label_smoothing: float) -> None:
    same_with_gradient(
        lambda x: ours(x, beta=0.3, loss_type=name, label_smoothing=label_smoothing),
        lambda x: trl.dpo_loss(x, REFERENCE_ST, MASK_ST, name, 0.3, label_smoothing=label_smoothing),
        LOGPS_ST,
    )


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "sigmoid_norm"])
def test_dpo_of_another_divergence_is_trls(divergence: str, name: str) -> None:
    """In single precision, as TRL has no α-divergence in double."""
    fields = {"loss_type": name, "f_divergence_type": divergence, "beta": 0.3}
    if divergence == "alpha_divergence":
        fields["f_alpha_divergence_coef"] = 0.3
    near_ST = REFERENCE_ST + 0.3 * draw(65)
    same_with_gradient(
        lambda x: ours(x.float(), **fields),
        lambda x: trl.dpo_loss(x.float(), REFERENCE_ST.float(), MASK_ST, name, 0.3, divergence=divergence),
        near_ST,
        tolerance=1e-5,
    )


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_ld_dpo_is_trls(name: str, alpha: float) -> None:
    same_with_gradient(
        lambda x: ours(x, beta=0.3, loss_type=name, ld_alpha=alpha),
        lambda x: trl.dpo_loss(x, REFERENCE_ST, MASK_ST, name, 0.3, ld_alpha=alpha),
        LOGPS_ST,
    )


def test_weighted_losses_are_summed_as_in_trl() -> None:
    def theirs(x: Tensor) -> Tensor:
        sigmoid, apo = (trl.dpo_loss(x, REFERENCE_ST, MASK_ST, name, 0.3) for name in ("sigmoid", "apo_zero"))
        return 0.8 * sigmoid + 0.2 * apo

    same_with_gradient(lambda x: ours(x, beta=0.3, loss_weights={"sigmoid": 0.8, "apo_zero": 0.2}), theirs, LOGPS_ST)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_simpo_and_cpo_are_trls(label_smoothing: float) -> None:
    def theirs(x: Tensor, name: str, divisor: Tensor, gamma: float) -> Tensor:
        sums = (x * MASK_ST).sum(1) / divisor
        return trl.cpo_losses(*sums.chunk(2), name, 0.3, gamma, label_smoothing).mean()

    tokens_S = MASK_ST.sum(1)
    fields = {"beta": 0.3, "label_smoothing": label_smoothing}
    same_with_gradient(
        lambda x: ours(x, loss_type="simpo", simpo_gamma=0.4, **fields),
        lambda x: theirs(x, "simpo", tokens_S, 0.4),
        LOGPS_ST,
    )
    nll = 1e-9  # so that it can be left out of the comparison
    same_with_gradient(
        lambda x: ours(x, loss_type="cpo", nll_weight=nll, **fields),
        lambda x: theirs(x, "sigmoid", torch.ones_like(tokens_S), 0.0),
        LOGPS_ST,
    )


def test_orpos_odds_ratio_is_trls_up_to_single_precision() -> None:
    def theirs(x: Tensor) -> Tensor:
        means = (x * MASK_ST).sum(1) / MASK_ST.sum(1)
        return trl.orpo_losses(*means.chunk(2), 0.3).mean().double()

    same_with_gradient(lambda x: ours(x, loss_type="orpo", beta=0.3, nll_weight=1e-9), theirs, LOGPS_ST)


def test_ipo_is_trls_and_openrlhfs_with_means_in_place_of_sums() -> None:
    def mine(x: Tensor) -> Tensor:
        return ours(x, beta=0.3, loss_type="ipo")

    def theirs(x: Tensor) -> Tensor:
        means, references = ((values * MASK_ST).sum(1) / MASK_ST.sum(1) for values in (x, REFERENCE_ST))
        return openrlhf.DPOLoss(0.3, ipo=True)(*means.chunk(2), *references.chunk(2))[0]

    same_with_gradient(mine, lambda x: trl.dpo_loss(x, REFERENCE_ST, MASK_ST, "ipo", 0.3), LOGPS_ST)
    same_with_gradient(mine, theirs, LOGPS_ST)


def test_the_nll_beside_dpo_is_that_of_each_chosen_completion_and_trls_that_of_all_their_tokens() -> None:
    def nll(x: Tensor) -> Tensor:
        return ours(x, beta=0.3, nll_weight=1.0) - ours(x, beta=0.3)

    def by_length(x: Tensor) -> Tensor:
        tokens_P = MASK_ST[:PAIRS].sum(1)
        return -((x * MASK_ST)[:PAIRS].sum(1) / tokens_P).mean()

    same_with_gradient(nll, by_length, LOGPS_ST)
    even_ST = torch.ones_like(MASK_ST)  # where completions are equally long the two are one
    method, batch = (
        Dpo(DpoLossConfig(nll_weight=1.0)),
        SimpleNamespace(sequence_K=sequences_of(even_ST), sequences=2 * PAIRS),
    )

    def even(x: Tensor) -> Tensor:
        reference_S = pairwise(x).sum(1).detach()  # at the reference the loss is log 2, and its gradient is taken off
        loss, _ = method.loss(packed(pairwise(x), even_ST), batch, reference_S)  # type: ignore[arg-type]
        plain, _ = Dpo(DpoLossConfig()).loss(packed(pairwise(x), even_ST), batch, reference_S)  # type: ignore[arg-type]
        return (loss - plain) / PAIRS

    same_with_gradient(even, lambda x: trl.dpo_loss(x, REFERENCE_ST, even_ST, "sft", 0.1), LOGPS_ST)


@pytest.mark.parametrize("margin_P", [None, MARGIN_P])
def test_the_reward_models_loss_is_trls_and_openrlhfs(margin_P: Tensor | None) -> None:
    margins = [0.0] * PAIRS if margin_P is None else margin_P.tolist()
    rows = [SimpleNamespace(margin=margin) for margin in margins]

    def mine(x: Tensor) -> Tensor:
        loss, _ = RewardModel().loss(torch.stack(x.chunk(2), 1).flatten(), SimpleNamespace(rows=rows), None)  # type: ignore[arg-type]
        return loss / PAIRS

    scores = torch.cat([CHOSEN_P, REJECTED_P])
    same_with_gradient(mine, lambda x: trl.reward_loss(*x.chunk(2), margin_P), scores)
    same_with_gradient(mine, lambda x: openrlhf.PairWiseLoss()(*x.chunk(2), margin_P), scores)


def test_openrlhfs_log_exp_loss_ignores_the_margin_and_ours_does_not() -> None:
    scores = torch.cat([CHOSEN_P, REJECTED_P])
    theirs = openrlhf.LogExpLoss()
    same_with_gradient(lambda x: log_exp_loss(*x.chunk(2)).mean(), lambda x: theirs(*x.chunk(2), MARGIN_P), scores)
    same_with_gradient(
        lambda x: log_exp_loss(*x.chunk(2), MARGIN_P).mean(),
        lambda x: openrlhf.PairWiseLoss()(*x.chunk(2), MARGIN_P),
        scores,
    )


def test_fine_tuning_divides_by_the_tokens_of_the_whole_batch_as_trl_openrlhf_and_verl_do() -> None:
    halves, tokens = [slice(0, 2), slice(2, len(MASK_ST))], int(MASK_ST.sum())
    method = Sft()
    rows = [SimpleNamespace(sequences=[SimpleNamespace(targets=row)]) for row in MASK_ST.numpy()]

    def mine(x: Tensor) -> Tensor:
        losses = [method.loss(packed(x[half], MASK_ST[half]), None, None)[0] for half in halves]  # type: ignore[arg-type]
        return sum(losses) / method.normaliser(rows)  # type: ignore[arg-type]

    def of_openrlhf(x: Tensor) -> Tensor:
        items = list(openrlhf.iter_grad_accum_global_norm(halves, None, 2, lambda half: MASK_ST[half]))
        losses = [openrlhf.SFTLoss()(x[half], MASK_ST[half], **totals) for half, totals in items]
        return sum(losses) / 2  # as DeepSpeed divides by the steps of accumulation

    def of_verl(x: Tensor) -> Tensor:
        return sum(verl.sft_loss(x[half], MASK_ST[half], tokens) for half in halves)  # type: ignore[return-value]

    def of_trl(x: Tensor) -> Tensor:
        return sum(trl.sft_loss(x[half], MASK_ST[half], tokens) for half in halves)  # type: ignore[return-value]

    for theirs in (of_openrlhf, of_verl, of_trl):
        same_with_gradient(mine, theirs, LOGPS_ST)
