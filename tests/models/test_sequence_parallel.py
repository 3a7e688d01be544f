"""Models that several ranks compute together, each a slice of the tokens: equal to one rank, with less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alignment_core.errors import UserError
from alignment_core.models.packed import PackedModel
from alignment_core.models.prefix_tree import lay_out
from alignment_core.models.sequence import SequenceGroup, Slice, key_repeats
from tests.models import sequence_ranks
from tests.models.test_attention import model_of

Differences = dict[str, dict[str, float]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    """By rank, of so many ranks."""
    world: int = request.param
    return sequence_ranks.run(world, tmp_path_factory.mktemp("ranks"), sequence_ranks.differences, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", sequence_ranks.CASES)
def test_losses_and_gradients_are_those_of_one_rank(case: str, differences: list[Differences]) -> None:
    for of_rank in differences:
        result = of_rank[case]
        assert result["norm"] > 1e-3
        assert max(result["output"], result["loss"], result["gradient"]) < 1e-5, result


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    for ids, logps in sequence_ranks.run(2, tmp_path, sequence_ranks.likeliest, 2):
        assert ids == 0
        assert logps < 1e-5


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_rank_keeps_its_part_of_the_activations(tmp_path: Path) -> None:
    for kept in sequence_ranks.run(4, tmp_path, sequence_ranks.saved_bytes):
        print({size: f"{count / 1e6:.2f} MB" for size, count in kept.items()})
        for size in ("2", "4"):
            assert kept[size] < 1.1 * kept["1"] / int(size), kept


def test_a_line_is_cut_into_slices_of_equal_length_by_hand() -> None:
    """7 tokens on 4 ranks: slices of 2, the last with one token of padding."""
    parts = [Slice(SequenceGroup(4, rank), 7) for rank in range(4)]
    line = torch.arange(1, 8)[None]
    assert [part.of(line).tolist() for part in parts] == [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 0]]]
    here, places = parts[2].here(torch.tensor([5, 0, 4, 6]))
    assert (here.tolist(), places.tolist()) == ([0, 2], [1, 0])
    nodes = lay_out([np.arange(7)]).nodes
    assert [tuple(node) for node in parts[0].padded(nodes)] == [(0, 7, 7), (7, 8, 8)]
    assert [Slice(SequenceGroup(4, rank), 1).of(line[:, :1]).tolist() for rank in (0, 3)] == [[[1]], [[0]]]


@pytest.mark.parametrize(
    ("heads", "keys", "ranks", "repeats"), [(8, 8, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 3, 2, 2), (12, 6, 4, 2)]
)
def test_key_heads_are_repeated_no_more_than_it_takes(heads: int, keys: int, ranks: int, repeats: int) -> None:
    assert key_repeats(heads, keys, ranks) == repeats


@pytest.mark.parametrize(
    ("architecture", "changes", "options", "says"),
    [
        ("llama", {}, {}, r"3 ranks cannot share 4 attention heads evenly; set it to a divisor of 4$"),
        ("mistral", {"sliding_window": 8}, {}, r"because not all of its layers are plain causal attention"),
        ("llama", {}, {"share_prefixes": False}, r"because resources\.attention is `sdpa`; set it to 1$"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            {},
            r"because its rotary positions depend on the length of each sequence; set it to 1$",
        ),
        ("jamba", {"use_mamba_kernels": False, "mamba_dt_rank": 4}, {}, r"because not all of its layers are plain"),
    ],
    ids=["heads", "windows", "sdpa", "rotary positions", "state"],
)
def test_models_that_ranks_cannot_compute_together_are_refused(
    architecture: str, changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=r"^resources\.sequence_parallel_size: .*" + says):
        PackedModel(model_of(architecture, **changes), "lm", sequence_group=SequenceGroup(3), **options)
