"""A night in Prefect: a Markdown artifact on the run's page, and an event for automations."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from alignment.flows.run_page import only_shown
from alignment.flows.runs import flow_run
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.nights.ledger import Night, summary
from alignment_core.stages.report import cell, columns_of

EVENT = "alignment.night."
"""Prefix of the event; the state follows, as in ``alignment.night.refused``."""


def announce(recipe: NightlyRecipe, night: Night) -> None:
    """Publish the outcome of a night, which the ledger already has, to the run's page and to automations."""
    with only_shown("the night's page"):
        create_markdown_artifact(markdown=page(recipe, night), description=f"Night {night.night}: {night.state}")
    emit_event(
        event=EVENT + night.state,
        resource={"prefect.resource.id": EVENT + recipe.name, "prefect.resource.name": recipe.name},
        related=[{"prefect.resource.id": f"prefect.flow-run.{flow_run().id}", "prefect.resource.role": "flow-run"}],
        payload=night.model_dump(mode="json", exclude={"malformed"}),
    )


def page(recipe: NightlyRecipe, night: Night) -> str:
    """The night as Markdown."""
    lines = [f"# {summary(night)}", ""]
    named = {"rows": night.batch, "production": night.production, "candidate": night.candidate}
    lines += [f"- {name}: `{reference}`" for name, reference in named.items() if reference]
    if night.state == "promoted":
        lines.append(f"- `{recipe.promotion.tag}` points to the candidate now")
    if night.metrics:
        shown = columns_of(night.metrics)
        lines += ["", "| policy | " + " | ".join(title for _, title in shown) + " |", "|---" * (len(shown) + 1) + "|"]
        for label, values in night.metrics.items():
            lines.append(f"| {label} | " + " | ".join(cell(values, name) for name, _ in shown) + " |")
    if night.inbox:
        lines += ["", "Looked for new rows in", "", *(f"- {line}" for line in night.inbox)]
    if night.malformed:
        lines += ["", f"{night.malformed_rows} malformed; the next night takes them once they are fixed:", ""]
        lines += [f"- {problem}" for problem in night.malformed]
    return "\n".join(lines) + "\n"
