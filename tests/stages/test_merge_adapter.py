"""The stage that merges an adapter into its model: its output, and refused adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alignment_core.artifacts import Reference
from alignment_core.errors import UserError
from alignment_core.evaluation.files import SPREAD
from alignment_core.models.adapters import QUANTISATION, add_adapters, merged, save_adapter
from alignment_core.models.loading import Head, load_model
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import LoraConfig, ModelConfig
from alignment_core.stages.merge_adapter import WEIGHTS, pin_adapter, run
from tests.exports.conftest import edit
from tests.models.mixtures import tiny_deepseek

EMBEDDINGS = {"modules_to_save": ("embed_tokens",)}
IN_4_BITS = {"load_in_4bit": True}
IN_8_BITS = {"load_in_8bit": True}


def adapter_of(path: Path, folder: Path, head: Head = "lm", **config: Any) -> Any:
    """The model of an adapter that is saved in ``folder``, as if it had been trained."""
    lora = LoraConfig(r=4, **config)
    handle = Model(path, Reference(kind="model", digest="a" * 64), bits=lora.base_bits)
    model = handle.load(head, torch.float32, head_seed=5)
    add_adapters(model, model.lm_head if head == "lm" else model.score, lora, 7, train_head=head != "lm")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or (parameter.requires_grad and "lora" not in name):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, model.state_dict(), lora, None if head == "lm" else "score", "model@sha256:1", folder)
    return model


def merge(path: Path, adapter: Path, output: Path, **fields: Any) -> Path:
    class Context:
        inputs: dict[str, Path] = {}

        def model(self, role: str) -> Model:
            return Model(path, Reference(kind=role, digest="a" * 64))

    output.mkdir()
    context: Any = Context()
    context.output = output
    assert run(context, pin_adapter(str(adapter)).model_copy(update=fields))["parameters"] > 0
    return output


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"use_rslora": True}, EMBEDDINGS, IN_4_BITS, IN_8_BITS])
def test_a_merged_adapter_equals_the_merged_model_of_training(
    config: dict[str, Any], tied: bool, tiny_model: Any, tmp_path: Path
) -> None:
    path = tiny_model(tied=tied)
    model = adapter_of(path, tmp_path / "adapter", **config)
    folder = merge(path, tmp_path / "adapter", tmp_path / "merged")
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == load_file(path / "model.safetensors").keys()
    expected = merged(model, model.state_dict())
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    assert (folder / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("config", [{}, IN_4_BITS])
def test_an_adapter_of_fused_experts_is_merged_into_each_expert(config: dict[str, Any], tmp_path: Path) -> None:
    mixture = transformers.MixtralConfig(
        vocab_size=300, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    path, experts = tmp_path / "model", ("experts.gate_up_proj", "experts.down_proj")
    transformers.AutoModelForCausalLM.from_config(mixture).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    model = adapter_of(path, tmp_path / "adapter", target_parameters=experts, **config)
    weights = load_file(merge(path, tmp_path / "adapter", tmp_path / "merged") / "model.safetensors")
    start = load_file(path / "model.safetensors")
    assert weights.keys() == start.keys()
    of_experts = [name for name in start if ".experts." in name]
    assert len(of_experts) == 2 * 4 * 3, "of two blocks with four experts, w1, w2 and w3"
    assert all(float((weights[name] - start[name]).abs().max()) > 1e-4 for name in of_experts)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = merged(model, model.state_dict())
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)


def test_a_reward_model_has_the_head_of_its_adapter(tiny_model: Any, tmp_path: Path) -> None:
    model = adapter_of(tiny_model(), tmp_path / "adapter", "score")
    (tmp_path / "adapter" / SPREAD).write_text("{}")
    folder = merge(tiny_model(), tmp_path / "adapter", tmp_path / "merged")
    assert (folder / SPREAD).read_text() == "{}", "it marks a reward model that was trained here"
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = load_model(str(folder), "score", torch.float32)(ids).logits  # without a seed: it holds a head
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_merge_keeps_half_precision(tiny_model: Any, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(tiny_model(), half)
    load_model(str(half), "lm", torch.bfloat16).save_pretrained(half)
    adapter_of(half, tmp_path / "adapter")
    weights = load_file(merge(half, tmp_path / "adapter", tmp_path / "merged") / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_a_merge_keeps_the_biases_of_a_router_in_fp32(tmp_path: Path) -> None:
    """DeepSeek-V3 stores them so beside weights in bf16, whose neighbours at 4 are 0.03 apart: all four would be 4."""
    biases = torch.tensor([4.013, 4.012, 4.001, 4.0])
    path = tmp_path / "model"
    model = transformers.AutoModelForCausalLM.from_config(tiny_deepseek(), dtype=torch.bfloat16)
    model.model.layers[1].mlp.gate.e_score_correction_bias = torch.nn.Buffer(biases)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    adapter_of(path, tmp_path / "adapter", target_modules=("o_proj",))
    start = load_file(path / "model.safetensors")
    weights = load_file(merge(path, tmp_path / "adapter", tmp_path / "merged") / "model.safetensors")
    assert weights["model.layers.1.mlp.gate.e_score_correction_bias"].equal(biases)
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        name: tensor.dtype for name, tensor in start.items()
    }


def test_an_adapter_is_not_merged_into_quantized_weights(tiny_model: Any, tmp_path: Path) -> None:
    adapter_of(tiny_model(), tmp_path / "adapter")
    shutil.copytree(tiny_model(), tmp_path / "model")
    edit(tmp_path / "model" / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match=r"model@\w+:a+ has quantized weights \(gptq in its config\.json\)"):
        merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("of_adapter", [True, False])
def test_arguments_of_the_chat_template_reach_that_of_the_adapter_or_of_the_model(
    of_adapter: bool, tiny_model: Any, tmp_path: Path
) -> None:
    adapter_of(tiny_model(), tmp_path / "adapter")
    shutil.copytree(tiny_model(), tmp_path / "model")
    template = "{{ note | default('') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / ("adapter" if of_adapter else "model") / "chat_template.jinja").write_text(template)
    folder = merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged", chat_template_kwargs={"note": "!"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "!a"


@pytest.mark.parametrize("of_base", [True, False])
def test_tokens_beyond_the_embeddings_are_refused_if_the_adapter_added_them(
    of_base: bool, tiny_model: Any, tmp_path: Path
) -> None:
    """Gemma 3 of 1B has a token of images, and no embedding for it, with which its adapters are saved, too."""
    path = tmp_path / "base"
    shutil.copytree(tiny_model(), path)
    rows = json.loads((path / "config.json").read_text())["vocab_size"]
    adapter_of(path, tmp_path / "adapter")
    longer = byte_tokenizer()
    longer.add_tokens([f"<image-{number}>" for number in range(rows - len(longer) + 1)])
    assert max(longer.get_vocab().values()) >= rows
    for folder in (tmp_path / "adapter", *([path] if of_base else [])):
        longer.save_pretrained(folder)
    if of_base:
        merge(path, tmp_path / "adapter", tmp_path / "merged")
        return
    with pytest.raises(UserError, match=f"but the merged model has embeddings for {rows}"):
        merge(path, tmp_path / "adapter", tmp_path / "merged")


def test_an_adapter_of_another_model_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    adapter_of(tiny_model("qwen2", tied=False), tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    wide = {name: torch.cat([tensor, tensor], -1) if "lora_A" in name else tensor for name, tensor in tensors.items()}
    less = dict(list(tensors.items())[2:])
    for number, wrong in enumerate(
        (wide, less, tensors | {"base_model.model.model.layers.9.lora_A.weight": one_of(tensors)})
    ):
        save_file(wrong, tmp_path / "adapter" / WEIGHTS)
        with pytest.raises(
            UserError, match=r"^model\.adapter: .*adapter was not trained beside model@\w+:\w+ \(.+\); name"
        ):
            merge(tiny_model("qwen2", tied=False), tmp_path / "adapter", tmp_path / str(number))


def one_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(tensors.values())).clone()


def test_missing_and_broken_adapters_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.adapter: .*absent: no such folder"):
        pin_adapter(str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"has no adapter_config\.json; give a folder as `peft` saves it"):
        pin_adapter(str(tiny_model()))
    adapter_of(tiny_model(), tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(config.read_text())
    for number, (broken, says) in enumerate(
        [
            ("{", "cannot be read"),
            (json.dumps({**content, "peft_type": "IA3", "feedforward_modules": []}), "is of the kind .*IA3; only LoRA"),
        ]
    ):
        config.write_text(broken)
        with pytest.raises(UserError, match=says):
            merge(tiny_model(), tmp_path / "adapter", tmp_path / f"config-{number}")
    config.write_text(json.dumps(content))
    (tmp_path / "adapter" / QUANTISATION).write_text(json.dumps({"quant_method": "gptq", "bits": 4}))
    with pytest.raises(
        UserError, match=r"quantization_config\.json has .*gptq.*; only .*load_in_4bit.* and .*load_in_8bit"
    ):
        merge(tiny_model(), tmp_path / "adapter", tmp_path / "quantization")
    (tmp_path / "adapter" / QUANTISATION).unlink()
    whole = (tmp_path / "adapter" / WEIGHTS).read_bytes()
    (tmp_path / "adapter" / WEIGHTS).write_bytes(whole[:-10])
    with pytest.raises(UserError, match="cannot be read"):
        merge(tiny_model(), tmp_path / "adapter", tmp_path / "weights")


def test_a_new_model_takes_no_adapter() -> None:
    with pytest.raises(ValueError, match="`adapter` belongs to the model that it was trained with"):
        ModelConfig.model_validate({"scratch": {}, "adapter": "x"})
