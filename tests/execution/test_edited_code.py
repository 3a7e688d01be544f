"""A user's file that is edited while a stage runs: no result under the key of source that did not make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store
from alignment_core.environments.environments import environment_content
from alignment_core.errors import UserError
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.key import check_unchanged, key_of
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rollout.schemas import rollout_schema, write_table
from alignment_core.user_code.dependencies import code_of
from tests.stages.calls import run_alone

VERIFIER = """
from pathlib import Path
from helper import VALUE

def score(prompt, completion, label):
    for name, source in {edits!r}.items():
        Path(__file__).with_name(name).write_text(source)
    return VALUE
"""


def scored(store: Store, folder: Path, edits: dict[str, str]) -> tuple[StageCall, StageResult]:
    """One completion, scored by a verifier whose source is edited by the time that it has answered."""
    rollouts = folder / "rollouts"
    rollouts.mkdir(exist_ok=True)
    row: dict[str, Any] = {"prompt": 0, "sample": 0, "prompt_ids": [1], "completion_ids": [2], "logps": [-1.0]}
    row |= {"finish_reason": "stop", "prompt_text": "a", "completion_text": "b", "label": None, "task": None}
    row |= {"source": "test", "policy": "model@sha256:" + "a" * 64}
    write_table([row], rollout_schema(), rollouts / "shard-00000.parquet")
    (folder / "helper.py").write_text("VALUE = 0.5\n")
    (folder / "reward.py").write_text(VERIFIER.format(edits=edits))
    inputs = {"rollouts": store.publish(rollouts, "rollouts")}
    call = StageCall(stage="score", label="score", config={"verifier": f"{folder / 'reward.py'}:score"}, inputs=inputs)
    return call, run_alone(store, call)


@pytest.mark.parametrize("name", ["reward.py", "helper.py"])
def test_a_file_edited_while_its_stage_runs_fails_the_stage_with_a_sentence(
    store: Store, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match=rf"{name} changed while score ran") as caught:
        scored(store, tmp_path, {name: "VALUE = 1.0\ndef score(*_): return VALUE\n"})
    assert "run it again" in str(caught.value)
    assert list(store.records.all()) == []


def test_a_file_deleted_or_broken_while_its_stage_runs_fails_the_stage_with_the_same_sentence(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"helper\.py changed while score ran"):
        scored(store, tmp_path, {"helper.py": "def broken(:"})


def test_a_comment_added_during_the_stage_is_accepted(store: Store, tmp_path: Path) -> None:
    call, result = scored(store, tmp_path, {"helper.py": "# half a point\nVALUE = 0.5\n"})
    assert result.metrics["mean_verifier"] == 0.5
    assert store.records.find(key_of(call).value) is not None


ENVIRONMENT = """
from pathlib import Path

class World:
    @staticmethod
    def content(service):
        return Path(service).read_text()
"""


def with_service(folder: Path) -> EnvironmentConfig:
    """An environment whose content comes from a service."""
    (folder / "world.py").write_text(ENVIRONMENT)
    (folder / "service").write_text("here")
    return EnvironmentConfig(name=f"{folder / 'world.py'}:World", options={"service": str(folder / "service")})


def test_an_unreachable_service_loses_no_result_and_a_changed_answer_or_file_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = with_service(tmp_path).model_dump(mode="json")
    section = {"prompts": {"task": "copy"}, "rewards": [{"environment": True}], "environment": environment, "steps": 1}
    call = StageCall(stage="rl", label="rl", config={"section": section}, inputs={})
    key = key_of(call)
    (tmp_path / "service").unlink()
    check_unchanged(call, key)
    assert "its key cannot be checked" in caplog.text
    (tmp_path / "world.py").write_text(ENVIRONMENT + "VALUE = 1\n")
    with pytest.raises(UserError, match=r"world\.py changed while rl ran"):
        check_unchanged(call, key)
    (tmp_path / "world.py").write_text(ENVIRONMENT)
    (tmp_path / "service").write_text("there")
    with pytest.raises(UserError, match="here → there changed while rl ran"):
        check_unchanged(call, key)


def test_errors_of_an_environments_content_are_sentences(tmp_path: Path) -> None:
    config = with_service(tmp_path)
    (tmp_path / "service").unlink()
    with pytest.raises(UserError, match=r"^rl\.environment\.options: .*World\.content failed: FileNotFoundError: "):
        environment_content(config)


@pytest.mark.parametrize("module", ["tools", "verifiers_environments", "verifiers_harness", "examples", "agents"])
def test_the_code_of_a_built_in_environment_is_in_the_keys_of_stages_that_use_this_environment(module: str) -> None:
    users = {"verifiers_harness": "verifiers_environments", "agents": "calls"}
    assert (
        f"alignment_core.environments.{module}"
        in code_of(f"alignment_core.environments.{users.get(module, module)}").digests
    )
