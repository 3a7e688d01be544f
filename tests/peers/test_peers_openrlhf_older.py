"""Losses that OpenRLHF had until 0.8.11: KTO, distillation and process reward models, and ours on the same tensors."""

from __future__ import annotations

import importlib
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ragged import draw, same, same_with_gradient
from torch import Tensor

from alignment_core.losses.distillation import forward_kl
from alignment_core.losses.kto import kl_baseline, kto_loss
from alignment_core.training.methods.process_reward_model import ProcessRewardModel

FOLDER = Path(sys.prefix) / "openrlhf-0.8.11"
PLACES, VOCABULARY, GOOD, BAD, PLACEHOLDER = 7, 11, 3, 5, 9


@pytest.fixture(scope="module")
def older() -> Any:
    """Its module of losses, beside the newer release of the same name."""
    package = types.ModuleType("openrlhf_older_models")
    package.__path__ = [str(FOLDER / "openrlhf" / "models")]
    sys.modules[package.__name__] = package
    return importlib.import_module("openrlhf_older_models.loss")


@pytest.fixture
def one_rank() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def of_steps(logits_KV: Tensor, labels: Tensor) -> Tensor:
    """Our loss of one row whose steps are judged at these logits, divided as our trainer divides it."""
    method = ProcessRewardModel((GOOD, BAD))
    logps_KV = logits_KV.log_softmax(-1)
    output = torch.stack([logps_KV[:, 0], logps_KV[:, GOOD], logps_KV[:, BAD]], dim=1)
    values = torch.stack([labels, 1 - labels], dim=1).numpy()
    rows = (SimpleNamespace(sequences=(SimpleNamespace(candidate_values=values),)),)
    loss, _ = method.loss(output, SimpleNamespace(rows=rows), None)  # type: ignore[arg-type]
    return loss / len(labels)


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_of_steps_is_openrlhfs_for_hard_and_soft_labels(older: Any, soft: bool) -> None:
    labels = torch.tensor([1.0, 0.25, 0.5, 0.0] if soft else [1.0, 0.0, 0.0, 1.0])
    ids = torch.tensor([[1, PLACEHOLDER, 2, PLACEHOLDER, PLACEHOLDER, 4, PLACEHOLDER]])
    at = ids == PLACEHOLDER
    given = torch.full(ids.shape, -100.0 if soft else -100)
    given = given if soft else given.long()
    given[at] = labels if soft else torch.where(labels > 0, GOOD, BAD)
    theirs = older.PRMLoss(PLACEHOLDER, [GOOD, BAD])
    logits = draw(90, 1, PLACES, VOCABULARY).float()
    same_with_gradient(lambda x: of_steps(x[at], labels), lambda x: theirs(ids, x, given), logits)


def test_openrlhfs_loss_without_reward_tokens_is_over_the_vocabulary_and_ours_over_two_tokens(older: Any) -> None:
    ids, labels = torch.full((1, 3), PLACEHOLDER), torch.tensor([[GOOD, BAD, GOOD]])
    logits = draw(91, 1, 3, VOCABULARY).float()
    whole = older.PRMLoss(PLACEHOLDER)(ids, logits, labels)
    same(whole, -logits[0].log_softmax(-1).gather(1, labels.T).mean())
    assert whole > of_steps(logits[0], torch.tensor([1.0, 0.0, 1.0])) + 0.1


def test_kto_is_openrlhfs(older: Any, one_rank: None) -> None:
    beta, weights = 0.3, (1.2, 0.7)
    ratio_S, sign_S = draw(92, 6), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    others_S, zero_S = draw(93, 6) + 1.0, torch.zeros(6)
    theirs = older.KTOLoss(beta, *weights, 1, torch.device("cpu"))

    def mine(ratio_S: Tensor) -> Tensor:
        weight_S = torch.where(sign_S > 0, weights[0], weights[1])
        return (weight_S * kto_loss(ratio_S, sign_S, kl_baseline(others_S.sum(), 6), beta)).mean()

    def of_theirs(ratio_S: Tensor) -> Tensor:
        chosen, rejected = ratio_S[sign_S > 0], ratio_S[sign_S < 0]
        return theirs(chosen, rejected, others_S, zero_S[:3], zero_S[:3], zero_S)[0]

    same_with_gradient(mine, of_theirs, ratio_S)


def test_distillation_is_openrlhfs_up_to_the_teachers_entropy(older: Any) -> None:
    teacher_KV, label = draw(94, PLACES, VOCABULARY).float(), torch.tensor([4, -100, 2, 0, -100, 1, 7])
    kept = label != -100
    entropy = -(teacher_KV.softmax(-1) * teacher_KV.log_softmax(-1)).sum(-1)[kept].mean()

    def mine(student_KV: Tensor) -> Tensor:
        return forward_kl(teacher_KV.log_softmax(-1), student_KV.log_softmax(-1))[kept].mean() + entropy

    same_with_gradient(mine, lambda x: older.KDLoss()(x, teacher_KV, label), draw(95, PLACES, VOCABULARY).float())
