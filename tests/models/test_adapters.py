"""Adapters: their parameters, their merge, and the modules that may have them."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from alignment_core.errors import UserError
from alignment_core.models.adapters import adapters_off, add_adapters, fitting, merged, save_adapter
from alignment_core.models.loading import load_model
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import LoraConfig, TrainingConfig

CONFIG = LoraConfig(r=4, lora_alpha=12)
DORA = LoraConfig(r=4, lora_alpha=12, use_dora=True)
IDS = torch.arange(40)[None]


def adapted(path: Any, config: LoraConfig = CONFIG, seed: int = 7, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose adapters do something, as if they had been trained."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    add_adapters(model, model.lm_head, config, seed, train_head=False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        if "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def test_a_critic_has_the_adapters_of_the_policy_that_fit_it(tiny_model: Any) -> None:
    """`add_adapters` refuses names that a model has not: here experts and the head of a language model."""
    critic = transformers.AutoModelForTokenClassification.from_pretrained(tiny_model())
    named = LoraConfig(
        r=4,
        target_modules=("q_proj", "in_proj_qkv"),
        target_parameters=("mlp.experts.down_proj",),
        modules_to_save=("embed_tokens", "lm_head"),
    )
    own = LoraConfig(r=4, target_modules=("q_proj",), modules_to_save=("embed_tokens",))
    assert fitting(critic, named) == own
    assert fitting(critic, CONFIG) == CONFIG
    of_experts = LoraConfig(r=4, target_modules=(), target_parameters=("mlp.experts.down_proj",))
    assert fitting(critic, of_experts) == LoraConfig(r=4), "all linear layers"
    add_adapters(critic, critic.score, fitting(critic, named), seed=0, train_head=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_is_base_plus_alpha_over_r_times_the_product(dtype: torch.dtype, tiny_model: Any) -> None:
    model, base = (
        adapted(tiny_model("qwen2"), dtype=dtype),
        transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=dtype),
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = merged(model, model.state_dict())
    assert plain.keys() == base.state_dict().keys()
    changed = set()
    for name, weight in base.state_dict().items():
        layer = name.removesuffix(".weight")
        expected = weight
        if f"{layer}.lora_A.default.weight" in before:
            a, b = (before[f"{layer}.lora_{matrix}.default.weight"].float() for matrix in "AB")
            assert (a.shape, b.shape) == ((4, weight.shape[1]), (weight.shape[0], 4))
            expected = (weight.float() + 3.0 * (b @ a)).to(dtype)  # 12 / 4
            changed.add(layer.rpartition(".")[2])
        torch.testing.assert_close(plain[name], expected, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-7)
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "it is left alone"

    base.load_state_dict(plain)
    assert (logits(base) - logits(model)).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("config", [CONFIG, DORA], ids=["LoRA", "DoRA"])
def test_without_its_adapters_a_model_is_bit_for_bit_the_original(config: LoraConfig, tiny_model: Any) -> None:
    model, base = adapted(tiny_model(), config), transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    before = logits(model)
    assert (before - logits(base)).abs().max() > 1e-2
    with adapters_off(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), before)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }


@pytest.mark.parametrize(("tied", "config"), [(True, CONFIG), (False, CONFIG), (True, DORA)])
def test_engines_get_the_merged_weights(tied: bool, config: LoraConfig, tiny_model: Any) -> None:
    model = adapted(tiny_model("qwen2", tied), config)
    stream = WeightStream(model, rank=0, zero_stage=0, size=50_000)
    assert len(stream.groups) > 3
    sent = dict(stream.tensors())
    plain = merged(model, model.state_dict())
    assert sent.keys() == plain.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in sent.items())


@pytest.mark.parametrize(
    "config", [CONFIG, LoraConfig(r=4, lora_alpha=3, use_rslora=True), DORA], ids=["LoRA", "rsLoRA", "DoRA"]
)
def test_peft_loads_saved_adapters_and_computes_as_the_merged_model(
    config: LoraConfig, tiny_model: Any, tmp_path: Path
) -> None:
    model = adapted(tiny_model("qwen2"), config)
    save_adapter(model, model.state_dict(), config, None, "model@sha256:1", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    before = logits(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (logits(loaded) - before).abs().max() > 1e-2
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    whole.load_state_dict(merged(model, model.state_dict()))
    torch.testing.assert_close(logits(whole), logits(loaded), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_that_are_trained_whole_are_saved_as_peft_does(tied: bool, tiny_model: Any, tmp_path: Path) -> None:
    """With tied embeddings to name one of both is to name both."""
    path = tiny_model(tied=tied)
    config = LoraConfig(r=4, modules_to_save=("embed_tokens",) if tied else ("embed_tokens", "lm_head"))
    model = adapted(path, config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora" not in name}
    assert trained == {"model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))}
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name).mul_(1.25)
    save_adapter(model, model.state_dict(), config, None, "model@sha256:1", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    whole.load_state_dict(merged(model, model.state_dict()))
    torch.testing.assert_close(logits(whole), logits(loaded), atol=1e-4, rtol=1e-4)


def test_a_module_to_train_whole_that_there_is_not_is_refused(tiny_model: Any) -> None:
    with pytest.raises(UserError, match=r"modules_to_save: this model has no module 'embed'; it has .*embed_tokens"):
        adapted(tiny_model(), LoraConfig(modules_to_save=("embed",)))


def test_the_factor_of_rslora_is_alpha_over_the_root_of_r(tiny_model: Any) -> None:
    model = adapted(tiny_model(), LoraConfig(r=4, lora_alpha=6, use_rslora=True))
    weights = model.state_dict()
    a, b = (weights[f"model.layers.0.mlp.up_proj.lora_{matrix}.default.weight"] for matrix in "AB")
    plain = merged(model, weights)["model.layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(plain, weights["model.layers.0.mlp.up_proj.base_layer.weight"] + 3.0 * (b @ a))


def test_the_rows_of_dora_have_the_lengths_that_were_trained(tiny_model: Any) -> None:
    model = adapted(tiny_model(), DORA)
    weights = model.state_dict()
    layer = "model.layers.0.mlp.up_proj"
    a, b, length = (weights[f"{layer}.{part}.default.weight"] for part in ("lora_A", "lora_B", "lora_magnitude_vector"))
    plain = merged(model, weights)[f"{layer}.weight"]
    torch.testing.assert_close(plain.norm(dim=1), length)
    direction = weights[f"{layer}.base_layer.weight"] + 3.0 * (b @ a)
    torch.testing.assert_close(plain / plain.norm(dim=1)[:, None], direction / direction.norm(dim=1)[:, None])
    fresh = adapted(tiny_model(), LoraConfig(r=4, use_dora=True)).state_dict()
    assert (
        fresh[f"{layer}.lora_magnitude_vector.default.weight"] >= weights[f"{layer}.base_layer.weight"].norm(dim=1)
    ).all()


def test_the_head_of_a_reward_model_is_saved_with_its_adapters_and_the_same_bytes_each_time(
    tiny_model: Any, tmp_path: Path
) -> None:
    model = load_model(str(tiny_model()), "score", torch.float32, head_seed=3)
    add_adapters(model, model.score, CONFIG, 7, train_head=True)
    for name in ("one", "two"):
        save_adapter(model, model.state_dict(), CONFIG, "score", "model@sha256:1", tmp_path / name)
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", ["adapter_config.json", "adapter_model.safetensors"])[0]
    other = load_model(str(tiny_model()), "score", torch.float32, head_seed=4)
    loaded = peft.PeftModel.from_pretrained(other, tmp_path / "one")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)


def test_adapters_follow_from_their_seed_alone(tiny_model: Any) -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = merged(model := adapted(tiny_model()), model.state_dict())
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(1)
    again = merged(model := adapted(tiny_model()), model.state_dict())
    third = merged(model := adapted(tiny_model(), seed=8), model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not torch.equal(first[name], third[name])


def test_named_layers_alone_are_adapted(tiny_model: Any) -> None:
    model = adapted(tiny_model(), LoraConfig(target_modules=("q_proj", "mlp.down_proj")))
    names = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert names == {f"model.layers.{n}.{module}" for n in range(2) for module in ("self_attn.q_proj", "mlp.down_proj")}


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens", "proj"])
def test_a_name_that_is_no_adaptable_layer_is_refused(name: str, tiny_model: Any) -> None:
    says = rf"training\.lora\.target_modules: .* no linear layer '{name}'; it has down_proj, .*, v_proj"
    with pytest.raises(UserError, match=says):
        adapted(tiny_model(), LoraConfig(target_modules=("q_proj", name)))


def test_unset_options_of_lora_are_not_in_the_key_of_a_stage() -> None:
    assert "lora" not in TrainingConfig().model_dump(mode="json")
    stored = TrainingConfig(lora=LoraConfig(target_modules=("q_proj",))).model_dump(mode="json")
    assert stored["lora"] == {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "lora_dropout": 0.0}
    assert TrainingConfig.model_validate(stored).model_dump(mode="json") == stored
    named = TrainingConfig(lora=LoraConfig(target_modules=(), target_parameters=("experts.down_proj",)))
    assert named.model_dump(mode="json")["lora"]["target_parameters"] == ["experts.down_proj"]
