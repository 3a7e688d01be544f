"""A model merged of several: its public loader gives the weights that plain arithmetic on state dicts gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from alignment_core.stages.merge import MergeStageConfig, run
from tests.exports.conftest import export, logits

IDS = torch.arange(40)[None]


def merge(output: Path, *models: Path, base: Path | None = None, **config: Any) -> None:
    output.mkdir()
    inputs = {f"model-{number}": model for number, model in enumerate(models, start=1)}
    read = inputs | ({"base": base} if base else {})
    context: Any = SimpleNamespace(inputs=read, output=output, report=lambda *_: None, trust_remote_code=False)
    run(context, MergeStageConfig.model_validate({"weights": (1, 3), **config}))


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def arc(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Three quarters of the way from one change to the other, by the definition."""
    first, second = (left - base).double(), (right - base).double()
    angle = torch.arccos((first * second).sum() / first.norm() / second.norm())
    return base + ((torch.sin(angle / 4) * first + torch.sin(3 * angle / 4) * second) / torch.sin(angle)).float()


@pytest.fixture
def models(base: Any, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base model and two fine-tunes of it."""
    source = base(tied=False)
    export(source, tmp_path / "one")
    export(source, tmp_path / "other", seed=5)
    return source, tmp_path / "one", tmp_path / "other"


@pytest.mark.parametrize("how", ["linear", "slerp"])
def test_a_merged_model_has_the_logits_of_plain_arithmetic_on_its_models(models: Any, tmp_path: Path, how: str) -> None:
    base, fine_tuned, other_fine_tuned = models
    merge(tmp_path / "out", fine_tuned, other_fine_tuned, base=base if how == "slerp" else None, merge_method=how)
    start, first, second = (state(folder) for folder in models)
    expected = transformers.AutoModelForCausalLM.from_pretrained(base)
    expected.load_state_dict(
        {
            name: 0.25 * first[name] + 0.75 * second[name]
            if how == "linear"
            else arc(start[name], first[name], second[name])
            for name in start
        }
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged, IDS), logits(expected, IDS), atol=1e-4, rtol=1e-4)


def test_a_merged_model_has_the_first_models_tokenizer_templates_and_generation_config(
    models: Any, tmp_path: Path
) -> None:
    _, first, second = models
    (first / "additional_chat_templates").mkdir()
    (first / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (first / "generation_config.json").write_text('{"temperature": 0.9}')
    merge(tmp_path / "out", first, second, merge_method="linear")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template["tool_use"] == "tools"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.9


def test_reward_models_are_merged_to_a_reward_model(base: Any, tmp_path: Path) -> None:
    source = base(pad_token="<eos>")
    trained = export(source, tmp_path / "one", "score")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    merge(tmp_path / "out", tmp_path / "one", tmp_path / "other", merge_method="linear")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged, IDS), logits(trained, IDS), atol=1e-5, rtol=1e-5)
    assert merged.config.pad_token_id not in (None, 257)
