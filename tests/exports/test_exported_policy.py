"""Exported policies and process reward models: ``AutoModelForCausalLM``, ``AutoTokenizer`` and ``GenerationConfig``."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.cluster.device import Device
from alignment_core.errors import UserError
from alignment_core.models.loading import load_model
from alignment_core.models.saving import GENERATION_CONFIG
from alignment_core.models.tokenizer import CHAT_TEMPLATE
from alignment_core.recipes import ModelConfig, ResourcesConfig, TrainingConfig
from alignment_core.stages.base_model import pin_model, run
from alignment_core.training.forward import Forward, ForwardJob
from alignment_core.training.learner import Learner, ModelSource
from tests.exports.conftest import edit, export, handle, learner

INCONSISTENT = [
    {"temperature": 0.9, "top_p": 0.6},  # vicuna, Llama 2: huggingface/transformers issue 29988
    {"length_penalty": 0.5, "early_stopping": True},
]
"""Generation configs that ``GenerationConfig.save_pretrained`` refuses."""


def greedy(model: Any, tokenizer: Any) -> torch.Tensor:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    generated: torch.Tensor = model.generate(ids, do_sample=False, max_new_tokens=24)
    return generated


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_an_exported_policy_generates_as_the_trained_policy(base, tmp_path, architecture, tied):
    source = base(tied, architecture)
    edit(source / GENERATION_CONFIG, eos_token_id=[257, 40], repetition_penalty=1.3)
    trained = export(source, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert greedy(loaded, tokenizer).equal(greedy(trained, tokenizer))
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (config.eos_token_id, config.repetition_penalty) == ([257, 40], 1.3)
    assert loaded.generation_config.eos_token_id == [257, 40]


@pytest.mark.parametrize("entries", INCONSISTENT, ids=lambda entries: next(iter(entries)))
def test_the_base_models_generation_config_is_exported_even_if_transformers_refuses_it(base, tmp_path, entries):
    source = base()
    edit(source / GENERATION_CONFIG, **entries)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        transformers.GenerationConfig.from_pretrained(source).save_pretrained(tmp_path / "refused")
    export(source, tmp_path / "out")
    assert (tmp_path / "out" / GENERATION_CONFIG).read_bytes() == (source / GENERATION_CONFIG).read_bytes()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_without_a_generation_config_the_base_models_config_decides(base, tmp_path):
    """Before the file existed config.json held these entries, and ``transformers`` drops them from there when it saves."""
    source = base()
    (source / GENERATION_CONFIG).unlink()
    edit(source / "config.json", temperature=0.5)
    export(source, tmp_path / "out")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source).generation_config
    assert expected.temperature == 0.5
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (exported.temperature, exported.eos_token_id) == (0.5, expected.eos_token_id)


@pytest.mark.parametrize("head", ["lm", "score"])
def test_a_model_that_cannot_be_saved_is_not_trained(base, head):
    """The learner writes the model without weights before the first step."""
    source = base()
    model = load_model(str(source), head, torch.float32, head_seed=1)
    trained = learner(source, model, head)
    assert trained._why_not_saved() is None
    model.config.unknown = object()
    assert re.fullmatch(
        r"model@\w+:\w+ cannot be trained, because `transformers` does not save it: .+JSON.+", trained._why_not_saved()
    )


def test_a_policy_brings_all_of_its_chat_templates(base, tmp_path):
    """``transformers`` renders rows with tools by the template ``tool_use``, if there is one."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    shows = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}" + CHAT_TEMPLATE
    source = base(chat_template={"default": CHAT_TEMPLATE, "tool_use": shows, "rag": "{{ 1 }}"})
    context: Any = SimpleNamespace(output=tmp_path / "stored", seed=0)
    context.output.mkdir()
    run(context, pin_model(ModelConfig(name=str(source))))
    export(context.output, tmp_path / "out")
    turns = [{"role": "user", "content": "Oslo?"}]
    for folder in (source, context.output, tmp_path / "out"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template(turns, tools=tools, tokenize=False) == "weather;<user>Oslo?"
        assert set(tokenizer.chat_template) == {"default", "tool_use", "rag"}


def test_the_recipes_chat_template_replaces_all_of_the_models(base, tmp_path):
    source = base(chat_template={"default": CHAT_TEMPLATE, "tool_use": "{{ 'tools' }}"})
    context: Any = SimpleNamespace(output=tmp_path / "stored", seed=0)
    context.output.mkdir()
    run(context, pin_model(ModelConfig(name=str(source), chat_template="{{ 'mine' }}")))
    assert transformers.AutoTokenizer.from_pretrained(context.output).chat_template == "{{ 'mine' }}"


def test_an_exported_process_reward_model_scores_steps_by_its_verdict_tokens(base, tmp_path):
    """docs/methods/process-reward-model.md: the log-odds of a step are the logit of its good verdict token at the step's
    placeholder, less that of the bad one."""
    export(base(), tmp_path / "out")
    good, bad, placeholder = 43, 45, 263
    prompt, answer = list(b"2 + 2?"), [*b"It is 4.", placeholder]
    job = ForwardJob(handle(tmp_path / "out"), "lm", verdicts=(good, bad))
    scores_found = Forward(job, ResourcesConfig(), Device.detect("cpu", 0)).run([(prompt, answer)])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, -1]
    np.testing.assert_allclose(scores_found, [float(logits[good] - logits[bad])], rtol=1e-4, atol=1e-5)


def test_an_export_names_no_path_of_this_machine(base, tmp_path):
    export(base(), tmp_path / "out")
    for file in (tmp_path / "out").glob("*.json"):
        assert str(tmp_path) not in file.read_text()
        json.loads(file.read_text())


@pytest.mark.parametrize("reads_images", [True, False])
def test_a_multimodal_policy_brings_its_processor(base, tmp_path, reads_images):
    """vLLM starts Gemma 3 only with it (``MultiModalBudget``); a text model that left its images behind has none."""
    source = base()
    processor = transformers.Gemma3ImageProcessor(image_mean=[0.25, 0.5, 0.75])
    processor.save_pretrained(source)
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    model = transformers.AutoModelForCausalLM.from_config(config if reads_images else config.text_config)
    learner(source, model)._write(model.state_dict(), {}, tmp_path / "out", None)
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert ("preprocessor_config.json" in names) is reads_images
    if reads_images:
        loaded = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
        assert list(loaded.image_mean) == [0.25, 0.5, 0.75]


def test_quantized_weights_are_not_trained(base):
    """`transformers` loads them dequantized and quantizes them again to save them, which the saved config.json does not say."""
    source = base()
    edit(source / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    model = ModelSource(handle(source), "lm")
    training = TrainingConfig(learning_rate=1e-4, batch_size=8)
    with pytest.raises(
        UserError, match=r"model@\w+:a+ has quantized weights \(fp8 in its config\.json\), which are neither"
    ):
        Learner(model, training, ResourcesConfig(), Device.detect("cpu", 0), 0, 1)
