"""Samples of text: completions with their rewards, pairs, demonstrations, and a prompt over several policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment.flows.cli.samples import samples as samples_command
from alignment_core.artifacts import ProvenanceDraft, Reference, Store, open_store
from alignment_core.canonical import digest_of
from alignment_core.errors import UserError
from alignment_core.journal import Journal, StageLine, new_record, stages
from alignment_core.lineage.samples import compared, samples, spaced, without_comparison
from alignment_core.recipes.sections.rewards import CHOICE, reward_names
from alignment_core.reporting.run_report import fenced
from alignment_core.rollout.schemas import rollout_schema, score_schema, write_table
from tests.align import align_here

RUN = "0a1b2c3d-0000"


class Run:
    """A run in a store and a journal, stage by stage."""

    def __init__(self, home: Path, store: Store) -> None:
        self.home, self.store = home, store
        self.journal = Journal(new_record(RUN, "small", {}, store.uri))
        self.journal.folder.mkdir(parents=True)
        self.journal._write()

    def stage(
        self, label: str, stage: str, kind: str, rows: list[dict[str, Any]], file: str, **inputs: Any
    ) -> Reference:
        folder = self.home / "made" / label.replace("/", "-")
        (folder / file).parent.mkdir(parents=True)
        schema = {"generate": rollout_schema, "score": score_schema}.get(stage)
        if schema:
            write_table(rows, schema(), folder / file)
        elif rows:
            pq.write_table(pa.Table.from_pylist(rows), folder / file)
        else:
            (folder / file).write_text("{}")
        key = digest_of(label)
        given = {role: reference for role, reference in inputs.items() if isinstance(reference, Reference)}
        draft = ProvenanceDraft(key=key, stage=stage, label=label, inputs=given, finished_at="2026-01-01T00:00:00Z")
        reference = self.store.publish(folder, kind, draft)
        parts = {"inputs": {role: str(reference) for role, reference in inputs.items()}}
        self.journal.stage(label, "run", stage=stage, key=key, key_parts=parts, outputs={kind: str(reference)})
        return reference

    def completions(self, label: str, prompts: str, answer: str) -> Reference:
        """Two completions of each of 4 prompts, with scores."""
        rows = [
            {
                "prompt": number,
                "sample": sample,
                "prompt_ids": [1],
                "completion_ids": [2],
                "logps": [-0.1],
                "finish_reason": "stop",
                "prompt_text": f"say {number}",
                "completion_text": f"{answer} {number} {sample}",
                "label": str(number),
                "source": "rows.jsonl",
                "policy": "p",
            }
            for number in range(4)
            for sample in range(2)
        ]
        rollouts = self.stage(f"{label}/generate", "generate", "rollouts", rows, "shard-00000.parquet", prompts=prompts)
        scores = [
            {
                "prompt": row["prompt"],
                "sample": row["sample"],
                "verifier": row["prompt"] / 4,  # type: ignore[operator]
                "reward": float(len(answer)),
                "rewards": [1.0, len(answer) - 1.0] if label == "round-1" else [float(len(answer))],
            }
            for row in rows
        ]
        return self.stage(f"{label}/score", "score", "scores", scores, "scores.parquet", rollouts=rollouts)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    run = Run(tmp_path, open_store(None))
    run.stage("sft/data", "dataset", "dataset", [{"text": "<user>1<assistant>1"}], "train.parquet")
    pair = {"prompt": "say 1", "chosen": "1", "rejected": "\x1b[31mno", "margin": None, "prompt_ids": [1]}
    run.stage("round-1/select", "select_pairs", "dataset", [pair], "train.parquet")
    for policy in ("sft", "round-1"):
        scores = run.completions(f"{policy}/evaluation", "dataset@sha256:" + "1" * 64, policy)
        run.stage(f"{policy}/evaluation", "evaluate", "evaluation", [], "metrics.json", scores=scores)
    run.completions("round-1", "dataset@sha256:" + "2" * 64, "sampled")
    run.stage("model", "base_model", "model", [], "config.json")
    return run


def lines() -> dict[str, StageLine]:
    return stages(RUN)


def test_completions_have_their_rewards_for_each_stage_of_a_round(run: Run) -> None:
    rows = samples(run.store, lines(), "round-1/generate", 2)
    first = {"prompt": "say 0", "completion": "sampled 0 0", "label": "0", "reward": 7.0, "verifier": 0.0}
    third = {"prompt": "say 2", "completion": "sampled 2 0", "label": "2", "reward": 7.0, "verifier": 0.5}
    more = {"rewards": {"reward_0": 1.0, "reward_1": 6.0}, "finish_reason": "stop"}
    assert rows == [{**row, **more} for row in (first, third)]
    assert samples(run.store, lines(), "round-1/score", 2) == rows
    (sample,) = samples(run.store, lines(), "round-1/evaluation", 1)
    assert sample["completion"] == "round-1 0 0"
    assert "rewards" not in sample, "a single reward is shown once"


def test_samples_show_pairs_and_demonstrations_in_their_own_form(run: Run) -> None:
    assert samples(run.store, lines(), "sft/data", 5) == [{"text": "<user>1<assistant>1"}]
    (pair,) = samples(run.store, lines(), "round-1/select", 5)
    assert pair == {"prompt": "say 1", "chosen": "1", "rejected": "\x1b[31mno"}


def test_a_prompt_is_shown_before_and_after_training(run: Run) -> None:
    policies, rows = compared(run.store, lines(), 2)
    assert policies == ["sft", "round-1"]
    assert rows[1] == {"prompt": "say 2", "label": "2", "sft": "sft 2 0", "round-1": "round-1 2 0"}


def test_a_branch_shows_the_policies_that_it_compares(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("sft", "dpo", "kto"):
        run.completions(f"inner/{policy}/evaluation", "dataset@sha256:" + "3" * 64, f"inner {policy}")
    assert compared(run.store, lines(), 1)[0] == ["sft", "round-1"], "of the run, although the branch has more"
    capsys.readouterr()
    samples_command(RUN, None, "inner", 1, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == {
        "prompt": "say 0",
        "label": "0",
        "sft": "inner sft 0 0",
        "dpo": "inner dpo 0 0",
        "kto": "inner kto 0 0",
    }
    with pytest.raises(UserError, match=r"--branch other: run \S+ \(small\) has no such branch"):
        samples_command(RUN, None, "other", 1)


def test_trajectories_are_found_among_the_outputs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt_text": "say 1", "completion_text": "1", "reward": 0.5}
    run.stage("steps", "rl", "trajectories", [row], "step-000000.parquet")
    trajectories, policy = (lines()[label].reference for label in ("steps", "model"))
    news = {"stage": "rl", "key": "1" * 64, "key_parts": {"inputs": {}}}
    run.journal.stage("rl", "run", outputs={"policy": policy, "trajectories": trajectories}, **news)
    fetched: list[str] = []
    fetch = run.store.fetch
    monkeypatch.setattr(run.store, "fetch", lambda reference: fetched.append(str(reference)) or fetch(reference))
    shown = [{"step": 1, "prompt": "say 1", "completion": "1", "reward": 0.5}]
    assert samples(run.store, lines(), "rl", 1) == shown
    assert policy not in fetched, "weights need not come here for that"


def test_samples_of_a_run_without_an_evaluation_come_from_training(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two thirds in 32 bits is 0.6666666865348816: it has seven significant digits. File 4 holds the samples of step 5."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "other"))
    alone = Run(tmp_path / "other", open_store(None))
    two_thirds = float(np.float32(2 / 3))
    row = {
        "prompt_text": "say 1",
        "completion_text": "1",
        "reward": two_thirds,
        "rewards": [two_thirds, 0.0, None],
        "finish_reason": "length",
    }
    folder = tmp_path / "trajectories"
    folder.mkdir()
    for step in (0, 4):
        pq.write_table(pa.Table.from_pylist([row]), folder / f"step-{step:06d}.parquet")
    rewards = [{"verifier": "math"}, {"function": "/home/me/f.py:format"}, {"urls": "http://a/", "weight": 0.5}]
    key, config = digest_of("rl"), {"section": {"rewards": rewards}}
    draft = ProvenanceDraft(key=key, stage="rl", label="rl", config=config)
    reference = alone.store.publish(folder, "trajectories", draft)
    news = {"stage": "rl", "key": key, "key_parts": {"inputs": {}}, "outputs": {"trajectories": str(reference)}}
    alone.journal.stage("rl", "run", **news)
    label, rows = without_comparison(alone.store, stages(RUN), 3)
    assert label == "rl"
    by_name = {"math": 0.666667, "format": 0.0, "endpoint": None}
    expected = {"step": 5, "prompt": "say 1", "completion": "1", "reward": 0.666667}
    assert rows == [{**expected, "rewards": by_name, "finish_reason": "length"}]
    samples_command(RUN)
    shown = capsys.readouterr().out
    assert "math 0.6667, format 0, endpoint none" in shown
    assert "finish_reason" in shown
    assert "rewards: math 0.6667, format 0, endpoint none" in fenced(rows[0])[1]


def test_rewards_of_the_same_name_are_numbered() -> None:
    listed = [{"function": "a.py:score"}, {"function": "b.py:score"}, {"reward_model": "ours"}]
    assert reward_names([CHOICE.validate(choice) for choice in listed]) == ["score_0", "score_1", "reward_model"]
    listed = [{"function": f"a.py:{name}"} for name in ("score", "score", "score_1")]
    assert reward_names([CHOICE.validate(choice) for choice in listed]) == ["score_0", "score_1", "score_1_2"]


def test_an_unknown_stage_is_refused_with_similar_stages(run: Run) -> None:
    with pytest.raises(
        UserError, match=r"--stage rond-1/generate: it is not a stage of this run; stages with text are round-1/g"
    ):
        samples(run.store, lines(), "rond-1/generate", 1)
    with pytest.raises(UserError, match=r"--stage model: it has no text; stages with text are "):
        samples(run.store, lines(), "model", 1)


def test_the_command_prints_80_columns_and_no_control_characters(run: Run) -> None:
    shown = align_here(run.home, "samples", "last", "--stage", "round-1/select").stdout
    assert "\x1b" not in shown
    assert [line.split() for line in shown.splitlines()] == [
        ["1"],
        ["prompt", "say", "1"],
        ["chosen", "1"],
        ["rejected", "�[31mno"],
    ]
    missing = align_here(run.home, "samples", "last", "--stage", "nothing", "--json")
    assert missing.returncode == 2, missing.stderr


def test_rows_are_spread_over_all_there_are() -> None:
    assert spaced(range(10), 5) == [0, 2, 4, 6, 8]
    assert spaced(range(3), 5) == [0, 1, 2]
    assert spaced([], 5) == []


def test_a_stage_shows_its_own_scores_of_completions_that_another_one_judges_too(run: Run) -> None:
    """A branch with an evaluation of its own may share completions with the whole run, and has other rewards."""
    rollouts = Reference.parse(lines()["sft/evaluation/generate"].outputs["rollouts"])
    given = [{"prompt": i // 2, "sample": i % 2, "reward": 9.0, "rewards": [9.0], "verifier": None} for i in range(8)]
    scores = run.stage("dpo/sft/evaluation/score", "score", "scores", given, "scores.parquet", rollouts=rollouts)
    run.stage("dpo/sft/evaluation", "evaluate", "evaluation", [], "other.json", scores=scores)
    shown = {
        label: samples(run.store, lines(), label, 1)[0]["reward"]
        for label in ("sft/evaluation/score", "dpo/sft/evaluation/score", "sft/evaluation", "dpo/sft/evaluation")
    }
    assert list(shown.values()) == [3.0, 9.0, 3.0, 9.0]
    assert samples(run.store, lines(), "sft/evaluation/generate", 1)[0]["reward"] == 3.0
