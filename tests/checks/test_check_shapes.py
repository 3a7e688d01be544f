"""Rows that do not fit into the model's context are refused before a run starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from alignment_core.checks import cache, shapes
from alignment_core.checks.rows import Answer
from alignment_core.cluster import device
from alignment_core.errors import UserError
from alignment_core.recipes import ResourcesConfig
from tests.checks.recipes import MODEL, look, rl, sft


def rounds(rows: Path) -> dict[str, Any]:
    section = {"rounds": 1, "prompts_per_round": 8, "prompts": {"path": str(rows)}}
    section["generation"] = {"num_generations": 2, "max_completion_length": 50}
    recipe = {"method": "iterative-dpo", "name": "demo", "model": MODEL, "iterative_dpo": section}
    return recipe | {"reward_model": {"data": {"task": "first", "rows": 20}}}


def test_heads_that_vllm_does_not_serve_on_this_machine_are_refused(store, rows, monkeypatch):
    assert {32, 64, 128} <= set(shapes.head_sizes_on_cpu())
    recipe = rl(rows, {"verifier": "math"}, num_attention_heads=4) | {"resources": {"device": "cpu"}}
    (problem,) = look(store, recipe).problems
    assert "its heads have 16 dimensions (hidden_size 64 / num_attention_heads 4)" in problem
    assert look(store, sft(rows) | {"model": recipe["model"]}).problems == [], "nothing samples"


def test_a_model_of_which_ranks_cannot_compute_a_part_each_is_refused(store, rows):
    recipe = sft(rows) | {"resources": {"sequence_parallel_size": 4}}
    assert look(store, recipe).problems == [
        "resources.sequence_parallel_size: the model does not support 4, because its 2 attention heads cannot be shared by 4 "
        "ranks; set it to 1"
    ]
    assert look(store, sft(rows) | {"resources": {"sequence_parallel_size": 2}}).problems == []


def test_layers_that_ranks_cannot_share_are_refused(store, rows):
    recipe = sft(rows) | {"resources": {"trainer_tensor_parallel_size": 4}}
    field = "resources.trainer_tensor_parallel_size"
    assert look(store, recipe).problems == [
        f"{field}: the model does not support 4, because its 2 attention heads cannot be shared evenly by 4 ranks; set it to 1"
    ]
    recipe["resources"] = {"trainer_tensor_parallel_size": 2}
    recipe["model"] = {"scratch": {**MODEL["scratch"], "num_key_value_heads": 2}}
    assert look(store, recipe).problems == []
    for name, value, problem in (
        ("training", {"lora": {}}, "adapters are not split: leave out training.lora, or set it to 1"),
        ("training", {"optimizer": "muon"}, "the optimizer 'muon' needs whole matrices: use `adamw`, or set it to 1"),
        (
            "disable_dropout",
            False,
            "each rank would leave out other numbers: set disable_dropout to true, or set it to 1",
        ),
    ):
        changed = recipe | {"sft": {**recipe["sft"], name: value}}
        assert look(store, changed).problems == [f"{field}: {problem}"]


def test_a_critic_of_which_ranks_cannot_train_a_part_each_is_refused(store, rows):
    """By its own ZeRO stage, which may be another than the policy's."""
    recipe = rl(rows, {"verifier": "math"}, num_key_value_heads=2)
    recipe["rl"] |= {"critic": {}, "advantage": {"estimator": "gae"}, "training": {"bf16": True}}
    recipe["resources"] = {"device": "cpu", "trainer_tensor_parallel_size": 2, "models": {"critic": {"zero_stage": 0}}}
    assert look(store, recipe).problems == [
        "resources.trainer_tensor_parallel_size: DeepSpeed clips gradients wrongly in bf16 without ZeRO: set "
        "resources.models.critic.zero_stage to 1 or 2, or set it to 1"
    ]
    recipe["resources"]["models"] = {}
    assert look(store, recipe).problems == []


def test_a_judge_of_which_ranks_cannot_compute_a_part_each_is_refused_before_the_training(store, rows, tiny_model):
    recipe = sft(rows) | {"model": {"scratch": {**MODEL["scratch"], "num_attention_heads": 4}}}
    recipe["evaluation"] = {
        "prompts": {"path": str(rows), "columns": {"label": "completion"}},
        "generation": {"max_completion_length": 8},
        "rewards": [{"reward_model": str(tiny_model())}],
    }
    problems = look(store, recipe | {"resources": {"sequence_parallel_size": 4}}).problems
    (problem,) = [problem for problem in problems if "sequence_parallel_size" in problem]
    assert problem.endswith(
        "does not support 4, because its 2 attention heads cannot be shared by 4 ranks; set it to 1"
    )
    assert not [problem for problem in look(store, recipe).problems if "sequence_parallel_size" in problem]


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"num_attention_heads": 6}, "its 6 attention heads cannot be shared by 4 ranks"),
        (
            {"num_attention_heads": 4, "layer_types": ["full_attention", "linear_attention"]},
            "it has layers of other kinds than full attention (linear_attention)",
        ),
        ({"num_attention_heads": 4, "sliding_window": 4096}, "its attention has a sliding window"),
        ({"num_attention_heads": 4, "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"text_config": {"num_attention_heads": 2}}, "its 2 attention heads cannot be shared by 4 ranks"),
        ({}, None),
    ],
)
def test_reasons_in_a_configuration_against_four_ranks(shape, problem):
    assert shapes.why_not_together(shape, 4) == problem


def test_a_language_model_is_no_reward_model(store, rows, tiny_model, tmp_path):
    sentence = "{}: {} is a language model without a score head, not a reward model"
    policy, scores = str(tiny_model()), tmp_path / "scores"
    assert look(store, rl(rows, {"reward_model": {"name": policy}})).problems == [
        sentence.format("rl.rewards.0.reward_model", policy)
    ]
    assert look(store, rl(rows, {"reward_model": MODEL})).problems == [
        sentence.format("rl.rewards.0.reward_model", "a model from scratch")
    ]
    assert look(store, rounds(rows) | {"reward_model": {"model": {"name": policy}}}).problems == [
        sentence.format("reward_model.model", policy)
    ]
    shutil.copytree(policy, scores)
    weights = load_file(scores / "model.safetensors") | {"score.weight": np.zeros((1, 64), np.float32)}
    save_file(weights, scores / "model.safetensors")
    assert look(store, rl(rows, {"reward_model": {"name": str(scores)}})).problems == []
    (scores / "model.safetensors").unlink()
    with pytest.raises(UserError, match="pickled weights are not loaded"):
        look(store, rl(rows, {"reward_model": {"name": str(scores)}}))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForSequenceClassification"],
                "id2label": dict.fromkeys("012"),
            },
            "is a classifier with 3 labels, and a reward model has one score",
        ),
        (
            {
                "model_type": "xlm-roberta",
                "architectures": ["XLMRobertaForSequenceClassification"],
                "id2label": {"0": ""},
            },
            "is a XLMRobertaForSequenceClassification, which has no head `score`, as encoders have none",
        ),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": ""}}, None),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"], "id2label": {"0": ""}}, None),
        ({"model_type": "new", "architectures": ["NewForSequenceClassification"]}, None),  # not in this transformers
    ],
)
def test_classifiers_that_have_not_one_score_are_refused_before_anything_is_sampled(
    store, rows, tiny_model, tmp_path, config, problem
):
    shutil.copytree(tiny_model(), tmp_path / "scores")
    weights = load_file(tmp_path / "scores" / "model.safetensors") | {"score.weight": np.zeros((1, 64), np.float32)}
    save_file(weights, tmp_path / "scores" / "model.safetensors")
    (tmp_path / "scores" / "config.json").write_text(json.dumps(config))
    name = str(tmp_path / "scores")
    sentence = f"rl.rewards.0.reward_model: {name} {problem}; use another one, or serve it as an `endpoint`"
    assert look(store, rl(rows, {"reward_model": {"name": name}})).problems == ([sentence] if problem else [])


def test_code_of_a_model_needs_a_class_that_scores():
    """As that of internlm2-7b-reward and of Qwen2.5-Math-PRM-7B, which is loaded by AutoModel."""
    code = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}
    problem = "brings code without a class for AutoModelForSequenceClassification (auto_map of its config.json)"
    assert shapes.why_no_rewards({"auto_map": code}, trust_remote_code=True) == problem
    scores = code | {"AutoModelForSequenceClassification": "modeling.Scores"}
    assert shapes.why_no_rewards({"auto_map": scores}, trust_remote_code=True) is None


def test_prompts_whose_completions_do_not_fit_into_the_context_are_refused(store, rows):
    recipe = rl(rows, {"verifier": "math"})
    recipe["rl"]["generation"]["max_completion_length"] = 62
    (problem,) = look(store, recipe).problems
    assert (
        "rl: the longest prompt has 5 tokens or more; with max_completion_length 62 that makes 67, "
        "but the model takes at most 64" in problem
    )


@pytest.mark.parametrize(
    ("seen", "count", "longest"),
    [
        ({"whole": True, "used": True}, None, 9),
        ({"whole": True, "used": True}, 2, 5),  # any two prompts: one has five tokens or more
        ({"whole": True, "used": True}, 7, 9),
        ({"whole": False, "used": True}, None, 9),
        ({"whole": False, "used": True}, 2, 0),  # unread rows may be short
        ({"whole": True, "used": False}, None, 2),  # the longer ones may be held out
        ({"whole": False, "used": False}, None, 0),
    ],
)
def test_certain_lengths_of_prompts_hold_for_any_choice_of_rows(seen, count, longest):
    assert Answer(label="prompts", lengths=[2, 5, 9], **seen).certain(count) == longest


def test_a_round_that_may_not_draw_the_longest_prompt_is_not_refused(store, rows):
    rows.write_text(rows.read_text() + json.dumps({"prompt": "?" * 20, "completion": "yes"}) + "\n")
    recipe = rounds(rows)
    assert look(store, recipe).problems == []
    recipe["iterative_dpo"]["prompts_per_round"] = 101
    (problem,) = look(store, recipe).problems
    assert "round-1/generate: the longest prompt has 22 tokens or more" in problem


def test_a_sequence_that_the_engines_cache_cannot_hold_is_refused_and_the_need_is_named(store, rows, tmp_path):
    """Keys and values of 16 layers with 8 heads of 64 in fp32 are 2 · 16 · 8 · 64 · 4 = 65,536 bytes a token. The longest of
    100 prompts has 5 tokens; with 2,000 of a completion that is 2,005, in 63 blocks of 32 and one that vLLM keeps free:
    64 · 32 · 64 KiB = 128 MiB."""
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 16, "max_position_embeddings": 4096}
    recipe = rl(rows, {"verifier": "math"}, **shape) | {"resources": {"device": "cpu", "kv_cache_mib": 127}}
    recipe["rl"]["generation"]["max_completion_length"] = 2000
    (problem,) = look(store, recipe).problems
    assert problem.startswith(
        "rl: a sequence of 2,005 tokens (the longest prompt and max_completion_length) needs 128 MiB of "
    )
    assert "raise resources.kv_cache_mib to 128 or more (it is 127;" in problem
    recipe["resources"]["kv_cache_mib"] = 128
    findings = look(store, recipe)
    assert findings.problems == []
    assert [need.model_dump() for need in findings.caches] == [{"stage": "rl", "tokens": 2005, "mib": 128}]


@pytest.mark.parametrize(("multiplies_bf16", "mib"), [(True, 64), (False, 128)])
def test_the_cache_of_a_policy_in_bf16_has_numbers_of_the_type_in_which_the_engine_computes(
    monkeypatch, multiplies_bf16, mib
):
    """Half of the 128 MiB above in bf16; all of them on a processor that has no instructions for it."""
    monkeypatch.setattr(device, "cpu_multiplies_bf16", lambda: multiplies_bf16)
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 16}
    for stored, trained, dtype in (({"dtype": "bfloat16"}, False, None), ({}, True, None), ({}, False, "bfloat16")):
        (need,) = cache.needs("rl", 2005, shape | stored, ResourcesConfig(), trained, dtype)
        assert need.mib == mib
    (need,) = cache.needs("rl", 2005, shape | {"dtype": "bfloat16"}, ResourcesConfig(), False, "float32")
    assert need.mib == 128, "reinforcement learning in fp32 samples in fp32"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_reference_that_takes_over_the_policy_s_weights_has_its_architecture(store, rows, tiny_model, architecture):
    recipe = rl(rows, {"verifier": "math"}) | {"model": {"name": str(tiny_model(seed=2))}}
    recipe["rl"]["kl"] = {"coefficient": 0.1, "reference": {"name": str(tiny_model(architecture, seed=1))}}
    assert look(store, recipe).problems == [], "a reference that stays may be any model with the policy's tokens"
    recipe["rl"]["kl"]["sync_ref_model"] = {"sync_steps": 2}
    sentence = (
        "rl: with rl.kl.sync_ref_model the reference takes over the policy's weights, but the model of rl.kl.reference has "
        "another model_type: give one of the policy's architecture, or leave sync_ref_model out"
    )
    assert look(store, recipe).problems == ([sentence] if architecture == "qwen2" else [])


def test_shapes_of_models_from_scratch_and_from_folders_are_compared():
    scratch = {"architecture": "llama", "hidden_size": 64, "num_key_value_heads": None}
    folder = {"model_type": "llama", "hidden_size": 64, "num_key_value_heads": 1}
    assert shapes.difference(scratch, folder) is None
    assert shapes.difference(scratch, folder | {"hidden_size": 32}) == "hidden_size"
    assert shapes.difference({}, folder) is None, "the stage reports files that cannot be read"


def test_a_quantized_model_is_sampled_and_judges_but_is_not_trained(store, rows, tiny_model, tmp_path):
    quantized = tmp_path / "quantized"
    shutil.copytree(tiny_model(), quantized)
    shape = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(shape | {"quantization_config": {"quant_method": "fp8"}}))
    model = {"name": str(quantized)}
    sentence = (
        f"{{}}: {quantized} has quantized weights (fp8 in its config.json), which are neither trained nor merged: name the "
        "unquantized model; `training.lora.load_in_4bit` quantizes that beside adapters"
    )
    assert look(store, sft(rows) | {"model": model}).problems == [sentence.format("sft")]
    judged = rl(rows, {"verifier": "math"}) | {"model": {"name": str(tiny_model())}}
    assert look(store, judged | {"model": model}).problems == [sentence.format("rl")]
    judged["rl"]["kl"] = {"coefficient": 0.1, "reference": model}
    assert look(store, judged).problems == []
    prompts = {"path": str(rows), "columns": {"label": "completion"}}
    generate = {"prompts": prompts, "generation": {"max_completion_length": 16}}
    assert look(store, {"method": "generate", "name": "demo", "model": model, "generate": generate}).problems == []


def test_a_model_that_will_lose_its_images_is_named(store, rows, tiny_model, tmp_path):
    folder = tmp_path / "multimodal"
    shutil.copytree(tiny_model(), folder)
    shape = json.loads((folder / "config.json").read_text()) | {"vision_config": {"depth": 1}}
    llama = shape | {"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(llama))
    sentence = f"sft: {folder} also reads images or sounds, and `transformers` loads only the part that reads text"
    warnings = look(store, sft(rows) | {"model": {"name": str(folder)}}).warnings
    assert [warning.startswith(sentence) for warning in warnings].count(True) == 1
    gemma = shape | {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    qwen = shape | {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    assert not shapes.is_loaded_without_images(gemma), "all of it is loaded"
    assert not shapes.is_loaded_without_images(qwen)


def test_the_language_models_of_transformers_are_read_without_importing_it():
    from transformers.models.auto import modeling_auto

    assert shapes.language_models() == dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
