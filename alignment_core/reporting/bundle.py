"""A folder about a run, to attach to a question. It has these files, each as far as there is one, and no others:

==================  ====================================================================================
``README.md``       how the run ended and why, its stages, and the files that are missing
``recipe.yaml``     the recipe, with the names of variables instead of secrets
``journal/``        ``run.json``, ``stages.jsonl``, ``metrics.jsonl``
``logs/``           the run's logs
``report/``         ``report.md`` without the sections of rows and answers, and its plots
``versions.json``   Python, the system, and the installed distributions
``doctor.json``     the checks of ``align doctor``
``why.json``        why each stage ran or was cached
==================  ====================================================================================

No environment variable, file of the user's, row or weight is among them. Every text goes through
:class:`~alignment_core.reporting.redaction.Redactor`, because logs and errors may quote anything.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from alignment_core import journal
from alignment_core.artifacts import open_store
from alignment_core.doctor import as_object, examine
from alignment_core.errors import AlignmentError, EnvironmentFault, UserError
from alignment_core.home import align_home
from alignment_core.journal import RunRecord, StageLine
from alignment_core.lineage.explain import Explanation, explain
from alignment_core.reporting.redaction import Redactor, secret_values
from alignment_core.reporting.run_report import MARKDOWN, table

SUMMARY = "README.md"
LONGEST = 4 << 20
"""Bytes of a log or of metrics; of a longer file, only its beginning and end are copied."""
_SAMPLES = ("## Held-out prompts, ", "## Completions of ")
"""Titles of the sections of a run's report that show rows and answers."""
_FENCE = re.compile("`{3,}")


@dataclass
class Bundle:
    """The written folder."""

    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    """Bytes by name."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reasons, by the names of missing files."""
    cut: dict[str, int] = field(default_factory=dict)
    """Numbers of redactions by kind."""


def write_bundle(
    record: RunRecord, folder: Path, samples: bool = False, secrets: tuple[str, ...] = (), store: str | None = None
) -> Bundle:
    """Write the folder, whole or not at all. With ``samples``, texts of rows and answers stay in the report and the logs.

    ``secrets`` are further values to redact. Raises UserError for a folder that is not empty, EnvironmentFault if it cannot be
    written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; choose another folder with --output, or remove it")
    redactor = _redactor(record, samples, secrets)
    done = Bundle(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} cannot be written: {error.strerror}; choose another folder with --output"
        ) from None
    try:
        for name, text in _contents(record, redactor, samples, store or record.store, done):
            (partial / name).parent.mkdir(exist_ok=True)
            done.files[name] = (partial / name).write_text(text)
        with suppress(OSError):
            folder.rmdir()  # it is empty
        partial.chmod(0o755)
        os.rename(partial, folder)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be written: {error.strerror}; nothing was left behind") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    done.cut = {kind: count for kind, count in redactor.cut.items() if count}
    return done


def _redactor(record: RunRecord, samples: bool, secrets: tuple[str, ...]) -> Redactor:
    users, homes = set[str](), {Path.home()}
    with suppress(Exception):  # no such user, as in some containers
        users.add(getpass.getuser())
    return Redactor(
        {*secret_values(os.environ, record.recipe), *filter(None, secrets)},
        align_home(),
        homes,
        users,
        {socket.gethostname(), record.machine},
        rows=samples,
    )


def _contents(
    record: RunRecord, redactor: Redactor, samples: bool, store: str, done: Bundle
) -> Iterator[tuple[str, str]]:
    """Names and texts of the files; missing ones are noted in ``done``."""
    folder = journal.folder_of(record.run_id)
    lines = journal.stages(record.run_id)
    yield "recipe.yaml", yaml.safe_dump(redactor.plain(record.recipe), sort_keys=False, allow_unicode=True)
    yield "journal/run.json", _json(redactor.plain(record.model_dump(mode="json")))
    for name in ("stages.jsonl", "metrics.jsonl"):
        if text := _file(folder / name, done):
            yield f"journal/{name}", redactor.text(text)
    logs = sorted((align_home() / "logs").glob(f"{record.run_id}*.log"))
    for log in logs:
        if text := _file(log, done):
            yield f"logs/{log.name}", redactor.text(text)
    if not logs:
        done.missing["logs"] = "it has none any more"
    if text := _file(folder / MARKDOWN, done):
        yield f"report/{MARKDOWN}", redactor.text(text if samples else without_samples(text))
    for picture in sorted(folder.glob("*.svg")):
        if text := _file(picture, done):
            yield f"report/{picture.name}", redactor.markup(text)
    yield "versions.json", _json(redactor.plain(versions()))
    checks = _tried("doctor.json", lambda: as_object(examine(store)), done)
    if checks is not None:
        yield "doctor.json", _json(redactor.plain(checks))
    why = _tried("why.json", lambda: _explained(lines, store, record.run_id), done)
    if why is not None:
        yield "why.json", _json(redactor.plain([each.model_dump(mode="json") for each in why]))
    yield SUMMARY, redactor.text(_summary(record, lines, why or [], done))


def without_samples(report: str) -> str:
    """A run's report without rows and answers. These are in fences, and may have lines that look like titles."""
    kept: list[str] = []
    fence = ""
    left_out = False
    for line in report.splitlines(keepends=True):
        if fence:
            fence = "" if line.rstrip() == fence else fence
        elif opening := _FENCE.match(line):
            fence = opening[0]
        elif line.startswith("## "):
            left_out = line.startswith(_SAMPLES)
        if not left_out:
            kept.append(line)
    return "".join(kept)


def versions() -> dict[str, Any]:
    """Python, the system, and all installed distributions."""
    installed = [each for each in metadata.distributions() if each.metadata["Name"]]
    packages = {f"{each.metadata['Name']}=={each.version}" for each in installed}
    return {
        "python": sys.version,
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "packages": sorted(packages, key=str.lower),
    }


def _explained(lines: Mapping[str, StageLine], store: str, run_id: str) -> list[Explanation]:
    stages = {str(line.key_parts.get("stage", line.stage)) for line in lines.values()}
    return explain(lines.values(), open_store(store, writes=False).records.all(*stages), run_id)


def _tried(name: str, make: Callable[[], Any], done: Bundle) -> Any:
    try:
        return make()
    except (AlignmentError, OSError) as error:
        done.missing[name] = str(error)
    except Exception as error:  # of a back end, or of records that a newer version wrote
        done.missing[name] = f"{type(error).__name__}: {error}"
    return None


def _file(path: Path, done: Bundle) -> str | None:
    """A file's text, of a long one the beginning and the end; None if it is missing."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= LONGEST:
                return file.read().decode(errors="replace")
            begin = file.read(LONGEST // 2).decode(errors="replace")
            file.seek(size - LONGEST // 2)
            end = file.read().decode(errors="replace")
    except FileNotFoundError:
        done.missing[path.name] = "it has none"
        return None
    except OSError as error:
        done.missing[path.name] = str(error.strerror)
        return None
    left_out = f"\n\n[… {size - LONGEST} bytes are left out here …]\n\n"
    return begin.rpartition("\n")[0] + left_out + end.partition("\n")[2]


def _summary(record: RunRecord, lines: Mapping[str, StageLine], why: list[Explanation], done: Bundle) -> str:
    """The page that a maintainer reads first."""
    status = journal.status_of(record)
    facts = {
        "status": status,
        "attempt": str(record.attempt),
        "started": record.started_at,
        "run by": "a worker" if record.deployed else "align run",
        "method": str(record.recipe.get("method", "")),
        "flow": record.flow,
        "store": record.store,
        "overrides": ", ".join(record.overrides),
        "from stage": record.from_stage or "",
        "alignment": _version("alignment"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    page = [f"# Run {record.name}", "", f"Run `{record.run_id}`.", ""]
    page += [f"* {name}: `{value}`" for name, value in facts.items() if value]
    if record.error:
        page += ["", "## Why it ended", "", "```text", record.error, "```"]
    failed = [line for line in lines.values() if line.state == "failed"]
    for line in failed:
        page += ["", f"## Where it failed: {line.label}", "", "```text", line.reason, "```"]
    reasons = {each.label: each.why for each in why}
    rows = [
        (label, line.state, f"{line.seconds:.1f}", reasons.get(label, line.reason).replace("\n", " ").replace("|", "/"))
        for label, line in lines.items()
    ]
    page += ["", "## Stages", "", *table(("stage", "state", "seconds", "why"), rows)]
    if done.missing:
        page += [
            "",
            "## What is missing",
            "",
            *(f"* {name}: {reason}" for name, reason in sorted(done.missing.items())),
        ]
    page += [
        "",
        "Secrets, home folders, names of the user and the machine, and texts of rows are cut out.",
    ]
    return "\n".join(page) + "\n"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"
