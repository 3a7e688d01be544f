"""NEFTune: the size of the noise, whose row it is, and the log-probabilities of a model with noisy embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence, pack
from alignment_core.models.neftune import embedding_noise
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes import TrainingConfig
from alignment_core.stages.reward_model import RewardModelStageConfig
from alignment_core.stages.sft import SftStageConfig

HIDDEN = 64
LENGTHS = (30, 90, 60, 7)


def rows() -> list[Row]:
    random = np.random.default_rng(0)
    return [
        Row(10 + number, (TokenSequence(random.integers(0, 256, length), np.arange(length) > 0),))
        for number, length in enumerate(LENGTHS)
    ]


def of_row(noise: torch.Tensor, micro: MicroBatch, number: int) -> torch.Tensor:
    """The noise of a row of a pack. [T, H]"""
    (place,) = [place for place, row in enumerate(micro.rows) if row.number == number]
    end = int(micro.last_S[place]) + 1
    return noise.flatten(0, 1)[end - micro.rows[place].tokens : end]


def test_noise_is_uniform_within_the_bound_of_the_papers_algorithm_by_hand() -> None:
    """α = 5, T = 100 tokens of 64 numbers: between ±5/√6400 = ±0.0625, with a deviation of 0.0625/√3 = 0.03608."""
    row = Row(0, (TokenSequence(np.ones(100, np.int64), np.arange(100) > 0),))
    noise = embedding_noise(pack([row], share_prefixes=False), 5.0, HIDDEN, seed=1).flatten(0, 1)[:100]
    assert float(noise.abs().max()) == pytest.approx(0.0625, rel=1e-3)
    assert float(noise.abs().max()) <= 0.0625
    assert float(noise.std()) == pytest.approx(0.03608, rel=0.02)
    assert abs(float(noise.mean())) < 3 * 0.03608 / 80


def test_fields_of_stages_that_are_unset_are_not_in_keys() -> None:
    assert SftStageConfig(training=TrainingConfig()).model_dump().keys() == {"training"}
    assert SftStageConfig(training=TrainingConfig(), neftune_noise_alpha=5).model_dump()["neftune_noise_alpha"] == 5
    assert RewardModelStageConfig(training=TrainingConfig()).model_dump().keys() == {"training", "loss_type"}


def test_each_row_of_a_pack_has_the_noise_of_its_own_length_and_number_and_padding_has_none() -> None:
    packed = pack(rows(), share_prefixes=False)
    noise = embedding_noise(packed, 5.0, HIDDEN, seed=1)
    for row in rows():
        own = of_row(noise, packed, row.number)
        assert float(own.abs().max()) == pytest.approx(5 / math.sqrt(row.tokens * HIDDEN), rel=0.01)
        single = pack([row], share_prefixes=False)
        assert torch.equal(own, of_row(embedding_noise(single, 5.0, HIDDEN, seed=1), single, row.number))
        other = of_row(embedding_noise(single, 5.0, HIDDEN, seed=2), single, row.number)
        assert not torch.equal(own, other), "each step has its own noise"
    assert float(noise.flatten(0, 1)[packed.multiplicity.flatten() == 0].abs().max()) == 0


@pytest.mark.parametrize("alone", [False, True], ids=["rows in lines", "a line for each row"])
def test_log_probabilities_are_those_of_the_model_with_noise_on_its_embeddings(alone: bool, tiny_model: Any) -> None:
    model = load_model(str(tiny_model()), "lm", torch.float32)
    packed = PackedModel(model, "lm", share_prefixes=False)
    packed.accept_noise()
    packed.one_sequence_per_line = alone
    micro = pack(rows(), share_prefixes=False)
    noise = embedding_noise(micro, 50.0, HIDDEN, seed=1)
    with torch.no_grad():
        plain_K = run_packed(packed, micro)
        packed.noise = noise
        noisy_K = run_packed(packed, micro)
        packed.noise = None
        assert torch.equal(run_packed(packed, micro), plain_K)
        for place, row in enumerate(micro.rows):
            ids = torch.from_numpy(row.sequences[0].ids)[None]
            embeddings = model.get_input_embeddings()(ids) + of_row(noise, micro, row.number)
            logits = model(inputs_embeds=embeddings).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(1, ids[0, 1:, None])[:, 0]
            assert torch.allclose(noisy_K[micro.sequence_K == place], expected, atol=1e-5)
    assert float((noisy_K - plain_K).abs().max()) > 0.01
