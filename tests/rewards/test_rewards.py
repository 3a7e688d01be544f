"""Rewards of a user's function that fails: each failure is counted and left out, none hangs the run or counts as zero."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from alignment_core.errors import DataError, UserError
from alignment_core.evaluation.statistics import per_prompt, win_rate_per_prompt
from alignment_core.recipes import SelectionConfig
from alignment_core.rewards.verify import verify
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table
from alignment_core.stages import evaluate, select_pairs

SOURCE = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path

calls = 0

def moody(prompt, completion, label):
    global calls
    calls += 1
    print("I print what I like", calls)
    if completion == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["CHILD"]).write_text(str(child.pid))
        time.sleep(600)
    if completion == "killed once" and not Path(os.environ["KILLED"]).exists():
        Path(os.environ["KILLED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "exit":
        sys.exit(3)
    if completion == "raise":
        raise ValueError("what is this?")
    return 0.25
"""


@pytest.fixture
def moody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A verifier that executes the completion's command, and otherwise returns 0.25."""
    (tmp_path / "checks.py").write_text(SOURCE)
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    return f"{tmp_path}/checks.py:moody"


def rows(*completions: str) -> list[dict[str, Any]]:
    return [
        {
            "source": f"prompts.jsonl:{number}",
            "task": None,
            "prompt_text": f"prompt {number}",
            "completion_text": completion,
            "label": None,
        }
        for number, completion in enumerate(completions, start=1)
    ]


def test_rows_that_fail_are_left_out_and_the_others_keep_their_rewards(moody: str) -> None:
    given = rows("a", "raise", "b", "crash", "c", "exit", "d")
    assert verify(moody, given, max_failed=0.5) == [0.25, None, 0.25, None, 0.25, None, 0.25]


def test_a_row_whose_process_is_killed_from_outside_is_scored_by_another_process(moody: str, tmp_path: Path) -> None:
    assert verify(moody, rows("a", "killed once", "b")) == [0.25, 0.25, 0.25]
    assert (tmp_path / "killed").exists()


@pytest.mark.slow
def test_a_hanging_function_is_killed_with_its_children_and_the_next_row_is_scored(
    moody: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert verify(moody, rows("a", "hang", "b", "c"), timeout=5.0, max_failed=0.25) == [0.25, None, 0.25, 0.25]
    assert (
        "gave no answer within 5 seconds (resources.reward_timeout_seconds), for the prompt 'prompt 2'" in caplog.text
    )
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_too_many_failures_end_the_stage_with_verifier_row_prompt_and_field(moody: str) -> None:
    says = (
        r"^prompts\.jsonl:1: the verifier .*checks\.py:moody failed: ValueError: what is this\? \(checks\.py, line \d+\), "
        r"for the prompt 'prompt 1'; "
        r"1 of 4 completions may lack a reward \(evaluation\.max_failed_rewards 0\.25\)$"
    )
    assert verify(moody, rows("raise", "a", "b", "c"), max_failed=0.25) == [None, 0.25, 0.25, 0.25]
    with pytest.raises(DataError, match=says):
        verify(moody, rows("raise", "exit", "a", "b"), max_failed=0.25)


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("crash", r"ended its process \(exit code -11\)"),
        ("exit", r"ended its process \(exit code 3\)"),
    ],
)
def test_errors_of_a_verifier_are_reported(moody: str, completion: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        verify(moody, rows(completion))


def test_a_process_killed_during_its_start_is_started_once_more(tmp_path: Path) -> None:
    dies = "import os, pathlib\n{when}os.kill(os.getpid(), 9)\ndef f(*_): return 0.5\n"
    once = f"marker = pathlib.Path({str(tmp_path / 'marker')!r})\nif not marker.exists():\n marker.touch()\n "
    (tmp_path / "once.py").write_text(dies.format(when=once))
    assert verify(f"{tmp_path}/once.py:f", rows("a")) == [0.5]
    (tmp_path / "always.py").write_text(dies.format(when=""))
    with pytest.raises(UserError, match=r"cannot be loaded: it ended its process \(exit code -9\)"):
        verify(f"{tmp_path}/always.py:f", rows("a"))


def test_a_file_that_hangs_while_loading_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    with pytest.raises(UserError, match=r"cannot be loaded: it was not loaded within 0\.5 seconds"):
        verify(f"{tmp_path}/slow.py:f", rows("a"), timeout=0.5)


def test_statistics_leave_out_missing_values() -> None:
    mine = [{"prompt": p, "v": v} for p, v in [(0, 1.0), (0, None), (1, None), (2, 0.0), (2, 1.0)]]
    theirs = [{"prompt": p, "v": v} for p, v in [(0, 0.0), (1, 0.0), (2, None), (2, 0.5)]]
    assert per_prompt(mine, "v").tolist() == [1.0, 0.5]  # prompt 1 has none
    assert win_rate_per_prompt(mine, theirs, "v", 0.0).tolist() == [1.0, 0.5]


def test_later_stages_leave_out_and_count_completions_without_a_reward(tmp_path: Path) -> None:
    rewards = {0: [1.0, None, 0.0], 1: [None, None, None], 2: [0.0, None, None]}
    scores, rollouts = [], []
    for prompt, values in rewards.items():
        for sample, value in enumerate(values):  # type: ignore[arg-type]
            scores.append({"prompt": prompt, "sample": sample, "tokens": 1, "verifier": value, "policy_logp": -1.0})
            rollouts.append({"prompt": prompt, "sample": sample, "prompt_ids": [1], "completion_ids": [prompt, sample]})
            rollouts[-1] |= {"prompt_text": "p", "completion_text": f"{sample}", "source": "prompts.jsonl:1"}
    folders = {name: tmp_path / name for name in ("scores", "rollouts", "output", "origins")}
    for folder in folders.values():
        folder.mkdir()
    write_table(scores, score_schema(), folders["scores"] / SCORES)
    write_table(rollouts, rollout_schema(), folders["rollouts"] / "shard-00000.parquet")
    given = {"inputs": folders, "output": folders["output"], "outputs": folders}
    context: Any = SimpleNamespace(**given, derive=lambda *_: 0)

    config = select_pairs.SelectPairsConfig(selection=SelectionConfig(score="verifier"))
    assert select_pairs.run(context, config) == {
        "pairs": 1,
        "truncated": 0.0,
        "dropped_failed_reward": 1,
        "dropped_identical": 1,
    }

    metrics = evaluate.run(context, evaluate.EvaluateConfig(resamples=100))
    assert metrics["failed_rewards"] == 6
    assert metrics["accuracy"] == pytest.approx((0.5 + 0.0) / 2)  # prompts 0 and 2; nothing is known of prompt 1
    assert json.loads((folders["output"] / "metrics.json").read_text())["failed_rewards"] == 6


def test_the_process_has_the_callers_modules_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seen.py").write_text("import os\ndef it(*_):\n    return float(os.environ['SEEN'])")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SEEN", "0.125")
    assert verify("seen:it", rows("a")) == [0.125]
