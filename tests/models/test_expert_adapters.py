"""Adapters of parameters that are no linear layers: the fused experts of mixtures, and routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.artifacts import Reference
from alignment_core.errors import UserError
from alignment_core.models.adapters import adapters_off, add_adapters, merged, save_adapter
from alignment_core.models.loading import load_model
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel
from alignment_core.models.quantization import Bits, round_weights
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import LoraConfig

IDS = torch.arange(40)[None]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**SHAPE, intermediate_size=24, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=4),
    "gpt_oss": transformers.GptOssConfig(**SHAPE, intermediate_size=24, num_local_experts=4),
}
"""The experts of gpt-oss are [E, in, out], those of the others [E, out, in]."""
BOTH = LoraConfig(r=4, lora_alpha=12, target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
ALONE = LoraConfig(r=2, target_modules=(), target_parameters=("experts.down_proj",))
ROUTER = LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_parameters=("gate_up_proj", "gate.weight"))
TARGETS = [("mixtral", BOTH), ("qwen3_moe", BOTH), ("gpt_oss", BOTH), ("gpt_oss", ALONE), ("qwen3_moe", ROUTER)]
IDENTITIES = ["mixtral", "qwen3_moe", "gpt_oss", "gpt_oss, experts alone", "qwen3_moe, router"]

MakeMixture = Callable[[str], Path]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> MakeMixture:
    """The folder of a mixture of four experts."""

    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture]).save_pretrained(folder)
        return folder

    return make


def plain(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def moved(model: Any, config: LoraConfig, seed: int = 7) -> Any:
    """The model with adapters that do something, as if they had been trained."""
    add_adapters(model, model.lm_head, config, seed, train_head=False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize(("architecture", "config"), TARGETS, ids=IDENTITIES)
def test_peft_loads_saved_adapters_computes_the_same_and_merges_to_the_same_weights(
    architecture: str, config: LoraConfig, mixture: MakeMixture, tmp_path: Path
) -> None:
    path = mixture(architecture)
    model = moved(plain(path), config)
    save_adapter(model, model.state_dict(), config, None, "model@sha256:1", tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain(path), tmp_path)
    assert (logits(loaded) - logits(plain(path))).abs().max() > 1e-2
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=1e-6)
    ours, theirs = merged(model, model.state_dict()), loaded.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys() == plain(path).state_dict().keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_each_expert_has_matrices_of_its_own(architecture: str, mixture: MakeMixture) -> None:
    """An expert's change has rank r and the size of alpha / r times its B A, by the layout that the module states."""
    path = mixture(architecture)
    model = moved(plain(path), BOTH)
    weights = model.state_dict()
    layer = "model.layers.1.mlp.experts"
    a, b = (weights[f"{layer}.lora_{part}.default.weight"] for part in "AB")
    assert (a.shape, b.shape) == ((4 * 4, 24), (32, 4 * 4)), (
        "r·E rows of the intermediate size, hidden size of r·E columns"
    )
    changed = merged(model, weights)[f"{layer}.down_proj"] - plain(path).state_dict()[f"{layer}.down_proj"]
    for expert in range(4):
        of_a = torch.stack([a[expert * 4 + rank] for rank in range(4)])
        of_b = torch.stack([b[:, rank * 4 + expert] for rank in range(4)], dim=1)
        expected = 3.0 * of_b @ of_a  # 12 / 4
        found = changed[expert].T if architecture == "gpt_oss" else changed[expert]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
        assert torch.linalg.matrix_rank(expected) == 4


def test_merged_weights_are_rounded_once(mixture: MakeMixture) -> None:
    path = mixture("qwen3_moe")
    model = moved(plain(path, torch.bfloat16), BOTH)
    name = "model.layers.0.mlp.experts"
    a, b = (model.state_dict()[f"{name}.lora_{part}.default.weight"].float() for part in "AB")
    delta = torch.einsum("ore,eri->eoi", b.view(32, 4, 4), a.view(4, 4, 24))
    weight = plain(path, torch.bfloat16).state_dict()[f"{name}.down_proj"]
    expected = (weight.float() + 3.0 * delta).bfloat16()
    assert torch.equal(merged(model, model.state_dict())[f"{name}.down_proj"], expected)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_without_its_adapters_a_mixture_is_bit_for_bit_the_original(architecture: str, mixture: MakeMixture) -> None:
    path = mixture(architecture)
    model = moved(plain(path), BOTH)
    before = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(plain(path)))
    assert torch.equal(logits(model), before)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }


@pytest.mark.parametrize("architecture", CONFIGS)
def test_engines_get_the_checkpoint_of_the_merged_model(
    architecture: str, mixture: MakeMixture, tmp_path: Path
) -> None:
    path = mixture(architecture)
    model = moved(plain(path), BOTH)
    save_adapter(model, model.state_dict(), BOTH, None, "model@sha256:1", tmp_path / "adapter")
    peft.PeftModel.from_pretrained(plain(path), tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    stream = WeightStream(model, rank=0, zero_stage=0, size=5_000)
    sent = dict(stream.tensors())
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor, atol=1e-6, rtol=0)
    start = load_file(path / "model.safetensors")
    below = dict(stream.tensors(merge=False))
    assert below.keys() == start.keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in below.items())


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_beside_quantized_layers_stay_as_they_are(bits: Bits, mixture: MakeMixture, tmp_path: Path) -> None:
    path, config = mixture("qwen3_moe"), BOTH.model_copy(update={f"load_in_{bits}bit": True})
    model = Model(path, Reference(kind="model", digest="a" * 64), bits=bits).load("lm", torch.float32, None)
    moved(model, config)
    save_adapter(model, model.state_dict(), config, None, "model@sha256:1", tmp_path)
    base = plain(path)
    round_weights(base, base.lm_head, torch.float32, bits)
    experts = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(base.state_dict()[experts], plain(path).state_dict()[experts])
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    ours = merged(model, model.state_dict())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0)


def test_a_reward_model_of_a_mixture_is_saved_with_its_head(mixture: MakeMixture, tmp_path: Path) -> None:
    path = mixture("mixtral")
    model = load_model(str(path), "score", torch.float32, head_seed=3)
    add_adapters(model, model.score, BOTH, 7, train_head=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(model, model.state_dict(), BOTH, "score", "model@sha256:1", tmp_path)
    loaded = peft.PeftModel.from_pretrained(load_model(str(path), "score", torch.float32, head_seed=4), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-6, rtol=1e-6)


def test_routers_are_balanced_also_with_adapters(mixture: MakeMixture) -> None:
    """`transformers` finds routers by their class, and the one with an adapter is below PEFT's wrapper."""
    path = mixture("qwen3_moe")
    model, whole = moved(plain(path), ROUTER), plain(path)
    PackedModel(model, "lm").balance_routers()
    whole.load_state_dict(merged(model, model.state_dict()))
    adapted, expected = (each(IDS, output_router_logits=True).router_logits for each in (model, whole))
    assert len(adapted) == len(expected) == 2
    for found, logits_of_layer in zip(adapted, expected, strict=True):
        torch.testing.assert_close(found, logits_of_layer, atol=1e-6, rtol=1e-5)


def test_adapters_follow_from_their_seed_alone(mixture: MakeMixture) -> None:
    path, name = mixture("mixtral"), "model.layers.0.mlp.experts.gate_up_proj"
    torch.manual_seed(0)
    first, again, third = (
        merged(model, model.state_dict()) for model in [moved(plain(path), BOTH, s) for s in (7, 7, 8)]
    )
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], third[name])


def test_a_whole_trained_module_has_no_adapters(mixture: MakeMixture) -> None:
    experts = BOTH.model_copy(update={"modules_to_save": ("layers.0.mlp.experts",)})
    model = moved(plain(mixture("mixtral")), experts)
    assert model.model.layers[0].mlp.experts.gate_up_proj.requires_grad
    adapted = {
        name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name and "experts" in name
    }
    assert adapted == {"model.layers.1.mlp.experts", "model.layers.1.mlp.experts.base_layer"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "mlp.experts.gate_up",
            r"this model has no parameter 'mlp\.experts\.gate_up'; outside of layers it has mlp\.experts\.gate_up_proj, "
            r"mlp\.experts\.down_proj",
        ),
        (
            "w1",
            r"no parameter 'w1'; outside of layers it has mlp\.experts\.down_proj, .*gate_up_proj, mlp\.gate\.weight",
        ),
        ("q_proj.weight", r"'q_proj\.weight' is the weight of a layer; .*`target_modules` adapts linear layers"),
        ("embed_tokens.weight", r"'embed_tokens\.weight' is the weight of a layer"),
        ("lm_head.weight", r"'lm_head\.weight' is the weight of a layer"),
        ("input_layernorm.weight", r"no parameter 'input_layernorm\.weight'"),
        (
            "own.experts.down_proj",
            r"no parameter 'own\.experts\.down_proj'; outside of layers it has mlp\.experts\.down",
        ),
    ],
)
def test_a_name_that_is_no_adaptable_parameter_is_refused(name: str, says: str, mixture: MakeMixture) -> None:
    with pytest.raises(UserError, match=rf"^training\.lora\.target_parameters: .*{says}"):
        moved(plain(mixture("qwen3_moe")), LoraConfig(target_parameters=("experts.down_proj", name)))


def test_a_model_without_such_parameters_is_refused(tiny_model: Any) -> None:
    with pytest.raises(
        UserError, match=r"no parameter 'experts\.down_proj'; it has none outside of layers \(name linear"
    ):
        moved(plain(tiny_model()), LoraConfig(target_parameters=("experts.down_proj",)))


def test_all_linear_layers_are_those_that_peft_does_not_take_for_experts(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSeek-V3 has dense blocks and shared experts; without them, all linear layers are those of its attention."""
    config = transformers.DeepseekV3Config(
        **SHAPE, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    attention = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "attn" in name}
    moved(model, LoraConfig())
    adapted = {
        name.removesuffix(".lora_A.default") for name, _ in model.named_modules() if name.endswith("lora_A.default")
    }
    assert adapted == attention
    assert "all-linear leaves out down_proj, gate_proj, up_proj" in caplog.text


@pytest.mark.parametrize("modules", [("gate_proj", "up_proj"), ("gate_proj",)])
def test_layers_that_peft_takes_for_experts_are_refused(modules: Any) -> None:
    """peft 0.21 maps `gate_proj` of Qwen3-MoE to the fused experts, also where a block is dense and has such a layer."""
    config = transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=48, moe_intermediate_size=24, num_experts=4, mlp_only_layers=[0]
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"^training\.lora.*`peft` .*qwen3_moe model"):
        moved(model, LoraConfig(target_modules=modules))
    model = transformers.AutoModelForCausalLM.from_config(config)
    moved(model, LoraConfig(target_modules=("q_proj",), target_parameters=("experts.down_proj",)))
