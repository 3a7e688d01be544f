"""Models of which several ranks have a part of each linear layer: equal to one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from alignment_core.errors import UserError
from alignment_core.models.tensor_parallel import Part, TensorGroup, split
from alignment_core.models.tensor_shapes import FAMILIES, why_not_split, why_not_trained_in_parts
from alignment_core.recipes import TrainingConfig
from tests.models import sequence_ranks, tensor_ranks

Differences = dict[str, dict[str, float]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    """By rank, of so many ranks."""
    world: int = request.param
    return sequence_ranks.run(world, tmp_path_factory.mktemp("ranks"), tensor_ranks.differences, world)


@pytest.mark.slow
@pytest.mark.parametrize("case", tensor_ranks.CASES)
def test_losses_gradients_and_norms_are_those_of_one_rank(case: str, differences: list[Differences]) -> None:
    for of_rank in differences:
        result = of_rank[case]
        assert result["norm"] > 1e-3
        names = ("output", "loss", "gradient", "difference of norms")
        assert max(result[name] for name in names) < 1e-5, result
        assert result["weights"] == 0, "gathered weights are those of the whole model"
        assert result["part"] == 1 / len(differences), "each rank has its part of all linear layers"


def test_each_family_that_can_be_split_is_tested() -> None:
    assert {*FAMILIES} == {case.get("architecture", "llama") for case in tensor_ranks.CASES.values()}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_engines_get_whole_weights(tmp_path: Path) -> None:
    first, second = sequence_ranks.run(2, tmp_path, tensor_ranks.streamed, 2)
    assert {*first.values()} == {0.0}
    assert second == {}


@pytest.mark.slow
def test_activations_are_added_up_twice_in_each_layer_and_pass(tmp_path: Path) -> None:
    """After attention and after the MLP; backwards, before each of them."""
    assert sequence_ranks.run(2, tmp_path, tensor_ranks.sums, 2) == [[4, 4], [4, 4]]


def test_slices_by_hand() -> None:
    whole = torch.arange(8).view(2, 4)
    parts = [Part(TensorGroup(2, rank), dim).of(whole).tolist() for dim in (0, 1) for rank in (0, 1)]
    assert parts == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"model_type": "llama", "num_attention_heads": 6}, "its 6 attention heads cannot be shared evenly by 4 ranks"),
        (
            {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2},
            "its 2 key-value heads cannot be shared evenly by 4 ranks",
        ),
        (
            {"architecture": "llama", "intermediate_size": 90},
            "its 90 units of its feed-forward layers cannot be shared evenly by 4 ranks",
        ),
        ({"model_type": "mixtral"}, "no test shows how a mixtral model is split; those of the types gemma, "),
        ({"text_config": {"model_type": "llama", "num_attention_heads": 2}}, "its 2 attention heads cannot"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {"hidden_size": 8}},
            "no test shows how a model that reads images or sounds is split",
        ),
        (
            {"text_config": {"model_type": "llama"}, "audio_config": {"hidden_size": 8}},
            "no test shows how a model that ",
        ),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "its weights are stored quantized"),
        ({"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}, None),
        ({}, None),
    ],
)
def test_reasons_in_a_configuration_against_four_ranks(shape: dict[str, object], problem: str | None) -> None:
    reason = why_not_split(shape, 4)
    assert reason is None if problem is None else reason is not None and reason.startswith(problem)


@pytest.mark.parametrize(
    ("training", "zero_stage", "dropout", "problem"),
    [
        ({"lora": {"r": 4}}, None, False, "adapters are not split: leave out training.lora, or set it to 1"),
        ({"optimizer": "muon"}, 0, False, "the optimizer 'muon' needs whole matrices: use `adamw`, or set it to 1"),
        (
            {"optimizer": "adafactor"},
            0,
            False,
            "the optimizer 'adafactor' needs whole matrices: use `adamw`, or set it to 1",
        ),
        ({}, None, True, "each rank would leave out other numbers: set disable_dropout to true, or set it to 1"),
        (
            {"bf16": True},
            0,
            False,
            "DeepSpeed clips gradients wrongly in bf16 without ZeRO: ",
        ),
        ({"bf16": True}, None, False, None),
    ],
)
def test_reasons_in_a_training(
    training: dict[str, object], zero_stage: int | None, dropout: bool, problem: str | None
) -> None:
    reason = why_not_trained_in_parts(TrainingConfig.model_validate(training), zero_stage, dropout)
    assert reason is None if problem is None else reason is not None and reason.startswith(problem)


def test_models_that_the_plan_does_not_describe_are_refused() -> None:
    """Norms of query and key heads of Phi, which its plan leaves out: each rank would have the gradient of its heads alone."""
    shape = {**sequence_ranks.SHAPE, "num_key_value_heads": 4, "qk_layernorm": True}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("phi", **shape))
    says = r"does not say how ranks share layers\.0\.self_attn\.q_layernorm\.weight of this phi model; set it to 1"
    with pytest.raises(UserError, match=says):
        split(model, TensorGroup(2))
