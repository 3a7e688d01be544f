"""The stage that merges models: its output loads, and incompatible models are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from alignment_core.errors import UserError
from alignment_core.models.loading import load_model
from alignment_core.stages.merge import MergeStageConfig, run
from tests.exports.conftest import edit

Merge = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def merge(tmp_path: Path) -> Merge:
    def run_stage(*folders: Path, base: Path | None = None, **config: Any) -> dict[str, torch.Tensor]:
        inputs = {f"model-{number}": folder for number, folder in enumerate(folders, start=1)}
        output = tmp_path / "merged"
        output.mkdir()
        given = inputs | ({"base": base} if base else {})
        context: Any = SimpleNamespace(inputs=given, output=output, report=lambda *_: None, trust_remote_code=False)
        settings = {"merge_method": "linear", "weights": (1,) * len(folders), **config}
        metrics = run(context, MergeStageConfig.model_validate(settings))
        model = load_model(str(output), "lm", torch.float32)
        assert metrics == {
            "models": len(folders),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        return dict(model.state_dict())

    return run_stage


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(str(folder), "lm", torch.float32).state_dict())


def test_the_mean_of_two_models_loads_as_a_model(merge: Merge, tiny_model: Any) -> None:
    first, second = tiny_model(), tiny_model(seed=2)
    merged = merge(first, second, weights=(1, 3))
    for name, tensor in weights(first).items():
        torch.testing.assert_close(merged[name], 0.25 * tensor + 0.75 * weights(second)[name])


def test_the_first_model_decides_shards_and_precision_of_a_merge(merge: Merge, tiny_model: Any, tmp_path: Path) -> None:
    first = tmp_path / "cut"
    shutil.copytree(tiny_model(), first)
    (first / "model.safetensors").unlink()
    load_model(str(tiny_model()), "lm", torch.bfloat16).save_pretrained(first, max_shard_size="50KB")
    assert len(list(first.glob("*.safetensors"))) > 1
    merged = merge(first, tiny_model(seed=2), weights=(1, 0))
    assert (tmp_path / "merged" / "model.safetensors.index.json").is_file()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in weights(first).items():
        assert merged[name].equal(tensor)


@pytest.mark.parametrize("how", ["slerp", "ties"])
def test_a_model_merged_with_itself_is_itself(how: str, merge: Merge, tiny_model: Any) -> None:
    more = {"density": 1, "scale": 1} if how == "ties" else {}
    merged = merge(tiny_model(), tiny_model(), merge_method=how, base=tiny_model(seed=2), **more)
    for name, tensor in weights(tiny_model()).items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)


def test_a_merge_stops_where_the_first_models_template_ends_a_turn(
    merge: Merge, tiny_model: Any, tmp_path: Path
) -> None:
    """A base model names its EOS alone, and its fine-tuned successor the end of a turn, too."""
    base = tmp_path / "base"
    shutil.copytree(tiny_model(), base)
    template = "{% for m in messages %}<user>{{ m.content }}<system>{% endfor %}"
    (base / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(base)
    end, eos = tokenizer.convert_tokens_to_ids("<system>"), tokenizer.eos_token_id
    edit(base / "generation_config.json", eos_token_id=eos, temperature=0.6)
    merge(base, base)
    content = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert (content["eos_token_id"], content["temperature"]) == ([end, eos], 0.6)


def test_a_merge_names_no_master_weights_of_its_first_model(merge: Merge, tiny_model: Any, tmp_path: Path) -> None:
    """Training would continue from them, and not from the merged weights."""
    first = tmp_path / "first"
    shutil.copytree(tiny_model(), first)
    (first / "masters.json").write_text('{"masters": "masters@sha256:' + 64 * "0" + '"}')
    merge(first, tiny_model(seed=2))
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {path.name for path in tiny_model().iterdir()}


def test_models_of_another_shape_are_refused(merge: Merge, tiny_model: Any) -> None:
    with pytest.raises(
        UserError, match=r"merge\.models: model-2 has the tensor lm_head\.weight \[\d+, 64\], model-1 not at all; merge"
    ):
        merge(tiny_model(), tiny_model(tied=False))


@pytest.fixture
def with_head(tiny_model: Any, tmp_path: Path) -> Path:
    """A model that stores its tied head, too, as Qwen3-0.6B on the Hub; ``save_pretrained`` leaves it out."""
    folder = tmp_path / "with-head"
    shutil.copytree(tiny_model(), folder)
    tensors = load_file(tiny_model() / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tied_head_that_one_model_stores_is_merged_as_its_embeddings(
    is_first: bool, merge: Merge, with_head: Path, tiny_model: Any, tmp_path: Path
) -> None:
    other = tiny_model(seed=2)
    merged = merge(*((with_head, other) if is_first else (other, with_head)))
    for name, tensor in weights(tiny_model()).items():
        torch.testing.assert_close(merged[name], (tensor + weights(other)[name]) / 2)
    assert ("lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")) == is_first


@pytest.mark.parametrize("how", ["slerp", "ties"])
def test_the_base_of_a_merge_may_store_its_tied_head(how: str, merge: Merge, with_head: Path, tiny_model: Any) -> None:
    more = {"density": 1, "scale": 1} if how == "ties" else {}
    other = tiny_model(seed=2)
    merged = merge(other, other, merge_method=how, base=with_head, **more)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)


def test_a_head_that_differs_from_the_embeddings_is_refused_beside_a_tied_one(
    merge: Merge, with_head: Path, tiny_model: Any
) -> None:
    tensors = load_file(tiny_model() / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, with_head / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model-2 has the tensor lm_head\.weight \[\d+, 64\], model-1 not at all"):
        merge(tiny_model(seed=2), with_head)


def test_slerp_and_ties_are_refused_without_the_model_that_was_changed(merge: Merge, tiny_model: Any) -> None:
    with pytest.raises(
        UserError, match="merge: slerp merges the changes of models to the input `base`, which is missing"
    ):
        merge(tiny_model(), tiny_model(seed=2), merge_method="slerp")


def test_ties_keeps_the_largest_changes_of_all_tensors_together(merge: Merge, tiny_model: Any, tmp_path: Path) -> None:
    """One model that changed one tensor by 1 and all others by 0.01: a density of the first one's share keeps just that."""
    base, other = tiny_model(), tmp_path / "other"
    shutil.copytree(base, other)
    changed = {name: tensor + 0.01 for name, tensor in load_file(base / "model.safetensors").items()}
    large = "model.layers.0.mlp.up_proj.weight"
    changed[large] += 0.99
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    density = changed[large].numel() / sum(tensor.numel() for tensor in changed.values())
    merged = merge(other, other, merge_method="ties", base=base, density=density, scale=1)
    for name, tensor in weights(base).items():
        torch.testing.assert_close(merged[name], tensor + (1 if name == large else 0))


def test_models_of_another_tokenizer_are_refused(merge: Merge, tiny_model: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model(), other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<system>", "<sys>"))
    with pytest.raises(
        UserError,
        match=r"merge\.models: the tokenizer of model-2 differs from that of model-1 \(the token '<system>' is 260 in one and",
    ):
        merge(tiny_model(), other)


def test_the_same_tokenizer_in_another_file_is_equal(merge: Merge, tiny_model: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model(seed=2), other)
    content = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(dict(reversed(content.items())), indent=None))
    assert merge(tiny_model(), other)


def test_quantized_models_are_refused(merge: Merge, tiny_model: Any, tmp_path: Path) -> None:
    """The mean of two matrices in 8 bits, each with scales of its own, is noise."""
    quantized = tmp_path / "quantized"
    shutil.copytree(tiny_model(), quantized)
    edit(quantized / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(
        UserError, match=r"merge\.models: model-2 has quantized weights \(fp8 in its config\.json\), which"
    ):
        merge(tiny_model(), quantized)
