"""Divergences between teacher and student, ours and TRL's of the same logits."""

from __future__ import annotations

import pytest
import trl_parts as trl
from ragged import draw, same_with_gradient
from torch import Tensor

from alignment_core.losses.distillation import forward_kl, generalised_jsd, reverse_kl

PLACES, VOCABULARY = 7, 11
STUDENT_KV, TEACHER_KV = draw(80, PLACES, VOCABULARY), draw(81, PLACES, VOCABULARY)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_distillation_losses_over_the_whole_vocabulary_are_trls(beta: float) -> None:
    def mine(student_KV: Tensor) -> Tensor:
        teacher, student = TEACHER_KV.log_softmax(-1), student_KV.log_softmax(-1)
        if beta in (0.0, 1.0):
            return (reverse_kl if beta else forward_kl)(teacher, student).sum()
        return generalised_jsd(teacher, student, beta).sum()

    same_with_gradient(mine, lambda x: trl.generalised_jsd(x, TEACHER_KV, beta), STUDENT_KV)
