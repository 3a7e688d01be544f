"""``align explain``: why each stage of a run ran or was cached."""

from __future__ import annotations

from alignment.flows.cli.services import run_row
from alignment.flows.console import JsonOption, RunArgument, out, print_json
from alignment_core import journal
from alignment_core.artifacts import open_store


def explain(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show why each stage of a run ran or was cached: the changes since the most similar earlier run of the stage."""
    from alignment_core.lineage.explain import explain as explanations

    record = journal.find(run)
    lines = journal.stages(record.run_id).values()
    stages = {str(line.key_parts.get("stage", line.stage)) for line in lines}
    explained = explanations(lines, open_store(record.store, writes=False).records.all(*stages), record.run_id)
    if as_json:
        return print_json({**run_row(record), "stages": [stage.model_dump(mode="json") for stage in explained]})
    out.print(f"run {record.run_id} ({record.name}): {journal.status_of(record)}", markup=False)
    for stage in explained:
        seconds = f", {stage.seconds:.1f} s" if stage.state == "run" else ""
        out.print(f"{stage.label}: {stage.state}{seconds}\n    {stage.why}", markup=False)
        for change in stage.changed:
            out.print(f"      {change}", markup=False)
        for change in stage.elsewhere:
            out.print(f"      not in the key: {change}", markup=False)
    return None
