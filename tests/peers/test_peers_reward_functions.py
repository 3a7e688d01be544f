"""Arguments of a reward function for TRL, from GRPOTrainer and from us, for the same rows of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl_parts as trl

from alignment_core.data import build, pin
from alignment_core.data.completion_text import CompletionText
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.rewards.group_function import GroupFunction
from alignment_core.rollout.schemas import shard_rows

TOLD = """
import json
from pathlib import Path

def told(completions, **kwargs):
    seen = {name: values for name, values in kwargs.items() if isinstance(values, list)} | {"completions": completions}
    Path(__file__).with_suffix(".json").write_text(json.dumps(seen))
    return [0.0] * len(completions)
"""
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}]
SAID = ["4", "five"]


class Completion:
    logps = ()
    finish_reason = "stop"
    texts = None

    def __init__(self, ids: Any) -> None:
        self.token_ids = ids


@pytest.mark.parametrize("prompt", [CHAT, "2+2="])
def test_reward_functions_get_the_arguments_of_trl(prompt: Any, tmp_path: Path) -> None:
    import numpy as np

    row = {"prompt": prompt, "solution": "4", "difficulty": {"level": [1, None]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(sources=[{"path": str(tmp_path / "rows.jsonl"), "keep_columns": ["solution", "difficulty"]}])
    tokenizer = byte_tokenizer()
    if isinstance(prompt, str):
        tokenizer.chat_template = None  # TRL shows a text to the policy as it is
    prompts = build.build(config, [pin.pin(config.sources[0])], tokenizer, "prompts", 0).train.to_pylist()
    ids = [tokenizer(text)["input_ids"] for text in SAID]
    sampled = shard_rows(
        prompts, 0, [Completion(np.array(completion)) for completion in ids], CompletionText(tokenizer), "policy"
    )

    (tmp_path / "told.py").write_text(TOLD)
    function = GroupFunction(f"{tmp_path / 'told.py'}:told", 60.0, "rl.rewards.0.function")
    list(function([{**sample, "group": 0} for sample in sampled]))
    function.close()
    ours = json.loads((tmp_path / "told.json").read_text())
    theirs = trl.reward_arguments([row, row], SAID, ids)
    assert theirs.keys() == {"prompts", "completions", "completion_ids", "solution", "difficulty"}
    assert {name: ours[name] for name in theirs} == theirs
