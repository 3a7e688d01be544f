"""A model folder without some of its weights: `transformers` would initialise them at random, and warn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from alignment_core.errors import UserError  # noqa: E402
from alignment_core.models.loading import Head, load_model  # noqa: E402
from alignment_core.models.scratch import create_model  # noqa: E402
from alignment_core.recipes.sections.model import ScratchModel  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_model(ScratchModel(hidden_size=32, num_hidden_layers=1, num_attention_heads=2), None, 0, tmp_path)
    return tmp_path


def without(folder: Path, *names: str) -> None:
    """Take weights out of the folder."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if name not in names},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def test_a_head_that_is_neither_tied_nor_there_is_no_model(folder: Path) -> None:
    """As in a reward model's folder, which has a score head instead."""
    config = json.loads((folder / "config.json").read_text())
    without(folder, "lm_head.weight")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"the weights of the model lack lm_head\.weight, which its config"):
        load_model(str(folder), "lm", torch.float32)


def test_a_reward_model_may_lack_its_score_head_alone(folder: Path) -> None:
    assert load_model(str(folder), "score", torch.float32, head_seed=0).score.weight.shape == (1, 32)
    without(folder, "model.norm.weight")
    with pytest.raises(UserError, match=r"lack model\.norm\.weight,"):
        load_model(str(folder), "score", torch.float32, head_seed=0)


@pytest.mark.parametrize("encoder", [False, True])
def test_classifiers_with_several_labels_or_another_head_are_no_reward_models(tmp_path: Path, encoder: bool) -> None:
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    model: transformers.PreTrainedModel
    if encoder:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=1))
        sentence = "loaded as a BertForSequenceClassification, which has no head `score`"
    else:
        config = transformers.Qwen2Config(**sizes, num_key_value_heads=2, num_labels=3, pad_token_id=0)
        model = transformers.Qwen2ForSequenceClassification(config)
        sentence = r"weights score\.weight of the shape \[3, 32\] instead of \[1, 32\]"
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=sentence):
        load_model(str(tmp_path), "score", torch.float32)


def test_a_new_head_of_values_is_smaller_than_one_of_scores(tmp_path: Path) -> None:
    create_model(ScratchModel(hidden_size=512, num_hidden_layers=1, num_attention_heads=2), None, 0, tmp_path)
    scores, values = (
        load_model(str(tmp_path), head, torch.float32, head_seed=0).score.weight for head in ("score", "value")
    )
    assert scores.std().item() == pytest.approx(512**-0.5, rel=0.1)
    assert values.std().item() == pytest.approx(1 / 513, rel=0.1)


def test_a_tied_head_needs_no_weight_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    without(folder, "lm_head.weight")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_model(str(folder), "lm", torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("lm", "model.layers.0.self_attn.q_proj.weight_scale_inv"),
        ("score", "model.layers.0.mlp.up_proj.weight_scale"),
        ("score", "score.bias"),
    ],
)
def test_weights_that_would_be_left_out_are_named(folder: Path, head: Head, name: str) -> None:
    """Without its scales a quantized matrix is noise, and without its bias a reward model has other rewards. Heads of other
    kinds of models are left out."""
    weights = load_file(folder / "model.safetensors") | {
        "score.weight": torch.ones(1, 32),
        "v_head.bias": torch.ones(1),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(str(folder), head, torch.float32)
    save_file(weights | {name: torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"the weights of the model have {name}, without which"):
        load_model(str(folder), head, torch.float32)
