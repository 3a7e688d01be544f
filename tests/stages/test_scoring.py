"""The score stage with real trainer ranks: the right numbers, duplicates included, and only for the same tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.artifacts import Reference
from alignment_core.errors import Stopped, UserError
from alignment_core.execution.base import StageContext
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.rollout.records import read_scores, rollout_schema, write_table
from alignment_core.stages import score

COMPLETIONS = [("2+2=", "4"), ("2+2=", "5"), ("2+2=", "4"), ("1+1=", "4"), ("1+1=", "two")]


@pytest.fixture
def reward_model(tiny_model: Any, tmp_path: Path) -> Path:
    import torch
    import transformers

    folder = tmp_path / "reward-model"
    shutil.copytree(tiny_model(), folder)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return folder


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    tokenizer = byte_tokenizer()
    rows = [
        {
            "prompt": number // 2,
            "sample": number % 2,
            "prompt_ids": tokenizer(prompt)["input_ids"],
            "completion_ids": [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id],
            "logps": [-1.0] * (len(completion) + 1),
            "finish_reason": "stop",
            "prompt_text": prompt,
            "completion_text": completion,
            "label": None,
            "task": None,
            "source": "test",
            "policy": "model@sha256:" + "a" * 64,
        }
        for number, (prompt, completion) in enumerate(COMPLETIONS)
    ]
    write_table(rows, rollout_schema(), folder / "shard-00000.parquet")
    return folder


def context_of(machines: Any, tmp_path: Path, **inputs: Path) -> StageContext:
    output = tmp_path / "scores"
    output.mkdir()
    return StageContext(
        inputs=inputs,
        references={name: Reference(kind="model", digest="a" * 64) for name in inputs},
        outputs={"scores": output},
        progress=tmp_path,
        seed=0,
        resources=ResourcesConfig(),
        machines=machines(1),
        reporter=lambda *_: None,
    )


def test_each_completion_gets_the_score_of_its_own_forward_pass(
    machines: Any, reward_model: Path, rollouts: Path, tmp_path: Path
) -> None:
    import torch
    import transformers

    context = context_of(machines, tmp_path, rollouts=rollouts, reward_model=reward_model)
    score.run(context, score.ScoreConfig())
    scored = [row["reward"] for row in read_scores(context.output)]

    judge = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = byte_tokenizer()
    for value, (prompt, completion) in zip(scored, COMPLETIONS, strict=True):
        ids = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            assert value == pytest.approx(float(judge(torch.tensor([ids])).logits[0, 0]), abs=1e-5)
    assert scored[0] == scored[2]
    assert len({np.float32(value) for value in scored}) == 4


def test_a_stage_that_goes_on_scores_no_block_again(
    machines: Any, reward_model: Path, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "BLOCK", 1)  # four different completions
    told: list[float] = []

    def ends_after_two(done: float, *_: Any) -> None:
        told.append(done)
        if done == 2:
            raise Stopped("ended")

    def scored(reporter: Any) -> list[float]:
        shutil.rmtree(tmp_path / "scores", ignore_errors=True)
        context = context_of(machines, tmp_path, rollouts=rollouts, reward_model=reward_model)
        score.run(dataclasses.replace(context, reporter=reporter), score.ScoreConfig())
        return [row["reward"] for row in read_scores(context.output)]

    with pytest.raises(Stopped):
        scored(ends_after_two)
    in_pieces = scored(lambda done, *_: told.append(done))
    assert told == [0, 1, 2, 2, 3, 4]

    for block in tmp_path.glob("score-*.npy"):
        block.unlink()
    assert scored(lambda *_: None) == in_pieces


def test_a_reward_model_with_another_tokenizer_is_refused(
    machines: Any, reward_model: Path, rollouts: Path, tmp_path: Path
) -> None:
    path = reward_model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["4"], vocabulary["5"] = vocabulary["5"], vocabulary["4"]
    path.write_text(json.dumps(content))
    context = context_of(machines, tmp_path, rollouts=rollouts, reward_model=reward_model)
    with pytest.raises(UserError, match=r"another tokenizer than the policy: it reads '5' where the policy wrote '4'"):
        score.run(context, score.ScoreConfig())
