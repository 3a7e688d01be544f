"""A failed run names the stages that did not begin, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import StateType

from alignment.flows import access
from alignment_core import journal
from tests.align import run_align
from tests.processes import wait_until

RECIPE = """
method: sft
name: fails
model: {scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 2}}
sft: {data: {path: rows.jsonl}, training: {max_steps: 1}}
evaluation: {prompts: {task: first, rows: 4}, generation: {max_completion_length: 4}, verifier: task}
resources: {trainers: 1, engines: 1, threads: 1}
"""
ROWS_OF_THE_CHECK = 20_000
"""`align check` reads so many; a mistake below them is found by the stage."""


@pytest.mark.slow
def test_stages_after_a_failed_stage_are_skipped_by_name(prefect_api: dict[str, str], home: Path) -> None:
    row = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    (home / "rows.jsonl").write_text(row * (ROWS_OF_THE_CHECK + 1) + "{broken\n")
    (home / "recipe.yaml").write_text(RECIPE)
    failed = run_align(home, "run", str(home / "recipe.yaml"), expect=2, **prefect_api)  # type: ignore[arg-type]
    assert "sft/data: 1 of 20002 rows is malformed" in failed["error"]
    (record,) = journal.runs()
    run_id = record.run_id
    with SyncPrefectClient(api=prefect_api[access.URL], auth_string=prefect_api[access.TOKEN]) as client:
        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
        tasks = {task_run.name: task_run.state for task_run in client.read_task_runs(flow_run_filter=of_run)}

        def logs() -> list[str]:
            entries = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])))
            return [entry.message for entry in entries]

        assert wait_until(lambda: any(line.startswith("not begun, because") for line in logs()), 10)
        assert not [line for line in logs() if "NotReady" in line]
    assert (tasks["sft"].name, tasks["sft"].type) == ("Skipped", StateType.CANCELLED)
    assert tasks["sft"].message == "sft/data did not complete"
    assert {"sft", "report"} <= {name for name, state in tasks.items() if state.name == "Skipped"}
