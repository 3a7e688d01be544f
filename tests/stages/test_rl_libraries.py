"""Libraries of environments: their prompts go through the whole stage, and their own code gives the rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from alignment_core.data.build import build
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.rewards.verify import verify
from tests.stages.conftest import RunRl
from tests.stages.rl_runs import GENERATIONS, PROMPTS, RESOURCES, rows_of, section_of

pytestmark = pytest.mark.slow
NEEDED = "the extra `environments` is not in `.venv`: `make peers` runs this"
TASKSETS = Path(__file__).parents[1] / "environments" / "tasksets"
STEPS = 2


def prompts_of(source: dict[str, Any]) -> pa.Table:
    config = DataConfig.model_validate(source)
    return build(config, [pin(config.sources[0])], byte_tokenizer(), "prompts", 7).train


@pytest.mark.parametrize("environment", [{}, {"id": "asked_again"}], ids=["one turn", "two turns"])
def test_an_environment_of_verifiers_drives_the_policy_token_for_token(
    environment: dict, monkeypatch: pytest.MonkeyPatch, run: RunRl
) -> None:
    pytest.importorskip("verifiers", reason=NEEDED)
    monkeypatch.syspath_prepend(TASKSETS)
    options = {"largest": 7}
    section = section_of(
        STEPS,
        {"environment": True},
        {"max_completion_length": 100, "shard_size": 2},
        {"learning_rate": 1e-3, "adam_epsilon": 1e-5},
        prompts={"verifiers": "sums_taskset", "options": options},
        environment={
            "agent": "alignment_core.environments.verifiers_environments:rollout",
            "options": {
                "taskset": {"id": "sums_taskset", **options},
                "agent": {"sampling": {"max_tokens": 10}},
                **environment,
            },
        },
    )
    rows = prompts_of(section["prompts"])
    outputs, result = run(section, resources=RESOURCES, rows=rows)
    tokenizer, turns = byte_tokenizer(), 2 if environment else 1
    rows_found = rows_of(outputs)
    assert len(rows_found) == STEPS * PROMPTS * GENERATIONS
    for row in rows_found:
        number = int(row["label"])
        assert tokenizer.decode(row["prompt_ids"]) == f"<system>Say it.<user>{number}+{number}<assistant>"
        ids, mask = np.asarray(row["completion_ids"]), np.asarray(row["mask"])
        parts = np.split(ids, np.flatnonzero(np.diff(mask.astype(int))) + 1)
        assert len(parts) == 2 * turns - 1
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in parts[0::2]]
        for text, observation in zip(texts, parts[1::2], strict=False):
            assert tokenizer.decode(observation).removeprefix("<eos>") == f"<user>no: {len(text.strip())}<assistant>"
        right, characters = texts[-1].strip() == str(2 * number), sum(map(len, texts))
        assert row["rewards"] == [2.0 * right + 0.25 * characters]
    assert len({row["rewards"][0] for row in rows_found}) > 3
    assert result.metrics["mismatch"] < 1e-6, "the trainer reads what the engine read"


def test_prompts_and_scores_of_reasoning_gym_go_through_the_stage(run: RunRl) -> None:
    pytest.importorskip("reasoning_gym", reason=NEEDED)
    source = {"reasoning_gym": "letter_counting", "rows": 8, "options": {"min_words": 1, "max_words": 2}}
    section = section_of(STEPS, {"verifier": "reasoning_gym"}, {"max_completion_length": 20}, prompts=source)
    rows = prompts_of(source)
    outputs, _ = run(section, resources=RESOURCES, rows=rows)
    rows_found = rows_of(outputs)
    assert len(rows_found) == STEPS * PROMPTS * GENERATIONS
    scores = [row["rewards"][0] for row in rows_found]
    assert scores == pytest.approx(verify("reasoning_gym", rows_found)), "as fp32"
    assert len(set(scores)) > 1
