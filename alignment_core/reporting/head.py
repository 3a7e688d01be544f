"""The head of a report: start and duration of the run, its model and its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from alignment_core import journal
from alignment_core.errors import NotFound
from alignment_core.host.progress_log import duration
from alignment_core.printable import markdown_line
from alignment_core.recipes.sections.data import DataSource


def head(run_id: str, now: datetime | None = None) -> list[str]:
    """Lines of Markdown; none for a run without a journal. ``now`` is the end of the run."""
    try:
        record = journal.read(run_id)
    except NotFound:
        return []
    started = datetime.fromisoformat(record.started_at)
    attempt = f" (attempt {record.attempt})" if record.attempt > 1 else ""
    facts = {
        "Date": f"{started.astimezone(UTC):%Y-%m-%d %H:%M} UTC{attempt}",
        "Duration": duration(((now or datetime.now(UTC)) - started).total_seconds()),
        "Method": str(record.recipe.get("method", "")),
        "Model": _model(record.recipe.get("model") or {}),
        "Data": "; ".join(f"{field}: {origin}" for field, origin in _data(record.recipe)),
    }
    return [f"- {name}: {markdown_line(value)}" for name, value in facts.items() if value]


def _model(model: dict[str, Any]) -> str:
    scratch = model.get("scratch")
    if scratch:
        return (
            f"a new {scratch['architecture']} of {scratch['num_hidden_layers']} layers, {scratch['hidden_size']} wide"
        )
    adapter = f" with the adapter {model['adapter']}" if model.get("adapter") else ""
    return f"{model.get('name') or ''}{adapter}"


def _data(content: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Fields of a recipe that hold data, and the origins of their rows."""
    if isinstance(content, dict) and isinstance(content.get("sources"), list):
        origins = []
        for source in content["sources"]:
            with suppress(ValueError):  # of a plug-in that is no longer installed
                origins.append(DataSource.model_validate(source).origin)
        yield field, ", ".join(origins)
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from _data(value, f"{field}.{name}" if field else name)
