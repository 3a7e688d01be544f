"""A stage exports a plain Hugging Face folder, and the packed model agrees with ``transformers``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.saving import architecture_digest, checkpoint_dtype, dtype_of, save_checkpoint
from alignment_core.models.tokenizer import CHAT_TEMPLATE

MESSAGES = [{"role": "user", "content": "2 + 2?"}]
every_shape = pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen2", False)]
)


@pytest.fixture
def exported(tiny_model: Any, tmp_path: Path) -> Any:
    """Load a tiny model with a head and save it again, as a training stage does."""

    def export(head: Any, architecture: str = "llama", tied: bool = True) -> Path:
        source = tiny_model(architecture, tied)
        save_checkpoint(load_model(str(source), head, torch.float32, head_seed=4), source, tmp_path / "out")
        return tmp_path / "out"

    return export


@every_shape
def test_an_exported_policy_loads_as_a_causal_language_model(
    exported: Any, tiny_model: Any, architecture: str, tied: bool
) -> None:
    folder = exported("lm", architecture, tied)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float32
    before = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(architecture, tied)).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shared == tied


def test_an_exported_folder_brings_its_tokenizer_and_chat_template(exported: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported("lm"))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<user>2 + 2?<assistant>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("head", ["lm", "score"])
def test_an_exported_folder_holds_no_pickle_and_no_path_of_this_machine(exported: Any, head: Any) -> None:
    folder = exported(head)
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors" in names
    assert {Path(name).suffix for name in names} <= {".json", ".jinja", ".safetensors"}
    assert "_name_or_path" not in json.loads((folder / "config.json").read_text())
    assert checkpoint_dtype(folder) == "float32"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),  # Qwen3-VL and Qwen3.5
        ({"dtype": None, "text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "float16"),
        ({"text_config": None}, "float32"),
    ],
)
def test_the_float_type_of_a_checkpoint_is_that_of_its_config(
    shape: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert checkpoint_dtype(tmp_path) == dtype_of(shape) == dtype


def test_saving_twice_writes_the_same_bytes(tiny_model: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_checkpoint(load_model(str(tiny_model()), "lm", torch.float32), tiny_model(), tmp_path / name)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert first == second


@every_shape
def test_the_packed_score_is_the_logit_of_sequence_classification(exported: Any, architecture: str, tied: bool) -> None:
    folder = exported("score", architecture, tied)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["short", "a somewhat longer one", "?" * 90, "two", "x" * 200]  # of two widths of line together
    padded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.num_labels == 1
    rows = [
        Row(number, (TokenSequence.of_prompt_and_completion(tokenizer(text)["input_ids"], []),))
        for number, text in enumerate(texts)
    ]
    with torch.no_grad():
        expected = model(**padded).logits[:, 0]
        scores = run_packed(PackedModel(load_model(str(folder), "score", torch.float32), "score"), pack(rows))
    assert expected.std() > 0.1
    assert scores.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)


def test_a_new_score_head_follows_from_its_seed_and_a_saved_head_is_kept(exported: Any, tiny_model: Any) -> None:
    def head(folder: Path, seed: int) -> torch.Tensor:
        return load_model(str(folder), "score", torch.float32, head_seed=seed).score.weight.detach()

    assert torch.equal(head(tiny_model(), 4), head(tiny_model(), 4))
    assert not torch.equal(head(tiny_model(), 4), head(tiny_model(), 5))
    assert torch.equal(head(exported("score"), 5), head(tiny_model(), 4))


def test_weights_do_not_change_the_architecture_digest_but_shapes_do(exported: Any, tiny_model: Any) -> None:
    assert architecture_digest(tiny_model(seed=1)) == architecture_digest(tiny_model(seed=2))
    assert architecture_digest(exported("lm")) == architecture_digest(tiny_model())
    assert architecture_digest(tiny_model(tied=False)) != architecture_digest(tiny_model(tied=True))
    assert architecture_digest(tiny_model("qwen2")) != architecture_digest(tiny_model("llama"))


def test_stop_tokens_of_the_generation_config_change_the_architecture_digest(tiny_model: Any, tmp_path: Path) -> None:
    """An engine goes on to stop at those of the model with which it started."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model(), copy)
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(config | {"top_p": 0.5}))
    assert architecture_digest(copy) == architecture_digest(tiny_model())
    (copy / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [257, 98]}))
    assert architecture_digest(copy) != architecture_digest(tiny_model())


def test_equal_seeds_make_equal_models(tiny_model: Any, tmp_path: Path) -> None:
    from alignment_core.models.scratch import create_model
    from alignment_core.recipes import ScratchModel

    shape = ScratchModel(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        torch.manual_seed(hash(name) % 1000)  # for any state of the global generator
        create_model(shape, None, seed, tmp_path / name)
    first, second, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert first == second != third
