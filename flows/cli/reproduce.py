"""`align reproduce`: run the stages behind an artifact again, from its records alone, and compare every digest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from alignment.flows.console import JsonOption, StoreOption, err, out, print_json
from alignment_core.artifacts import open_store
from alignment_core.errors import UserError
from alignment_core.home import align_home

DIFFERENT = 1
"""Exit code if something differs."""
_STEP = 0.25
"""Share of a stage after which its progress is printed again."""


def reproduce(
    reference: Annotated[str, typer.Argument(help="Reference, first digits of a digest, or tag.")],
    begin: Annotated[
        str, typer.Option("--from", help="sources, data (take the data sets from the store), or the label of a stage.")
    ] = "sources",
    moved: Annotated[
        list[str], typer.Option("--source", help="OLD=NEW: a file or folder that was read, and its new place.")
    ] = [],
    check: Annotated[bool, typer.Option("--check", help="Say what would run and what differs; run nothing.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Run although code or packages in keys differ.")] = False,
    home: Annotated[
        Path, typer.Option("--home", help="Folder for the rebuilt artifacts, empty or from an earlier attempt.")
    ] = Path("reproduced"),
    trusted: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow stages to run code that their models bring.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run every stage behind an artifact again, in a new home, and compare the digests of all results.

    Exit code 1 if a key or a result differs.
    """
    from alignment_core.lineage.rebuild import plan

    opened = open_store(store, writes=False)
    paths = dict(map(_moved, moved))
    planned = plan(opened, opened.resolve(reference), begin, paths, trusted=trusted)
    if not as_json:
        out.print(_plan_text(planned), markup=False)
    if check or not planned.is_same:
        impossible = bool(planned.missing) or any(step.problems for step in planned.steps)
        if check or impossible or not anyway:
            if as_json:
                print_json({"same": planned.is_same, "plan": planned.model_dump(mode="json"), "stages": []})
            if planned.is_same:
                return
            if not check and not as_json:
                err.print("[red]nothing was run[/]" + ("" if impossible else ": --anyway runs it with what is here"))
            raise SystemExit(DIFFERENT)
    _run(opened, planned, paths, home, as_json)


def _run(opened: Any, planned: Any, paths: dict[str, str], home: Path, as_json: bool) -> None:
    from alignment_core.lineage.rebuild_run import rebuild

    if home.resolve() == align_home().resolve():
        raise UserError(f"--home {home}: the artifacts of this home would count as rebuilt; name another folder")
    place = str(home.absolute() / "store")
    if opened.uri == place:
        raise UserError(f"--home {home}: its store is the one that is rebuilt from; name another folder")
    os.environ["ALIGN_HOME"] = str(home.absolute())
    target = open_store(place)
    shown: dict[str, float] = {}

    def on_progress(label: str, done: float, total: float | None, unit: str) -> None:
        share = done / total if total else 0.0
        if not as_json and share - shown.get(label, -_STEP) >= _STEP:
            shown[label] = share
            err.print(f"  {label}: {done:g}{f' of {total:g}' if total else ''} {unit}", markup=False)

    log = align_home() / "logs" / "reproduce.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    stages = []
    for stage in rebuild(opened, target, planned, paths, log, on_progress):
        stages.append(stage)
        if not as_json:
            verdict = "the same" if not stage.differing else f"differs: {', '.join(stage.differing)}"
            times = f"{stage.seconds:.1f} s, then {stage.seconds_then:.1f} s"
            out.print(f"{stage.label:<32} {stage.state:<7} {verdict}  ({times})", markup=False)
            for name in stage.differing:
                then, now = stage.outputs[name]
                out.print(f"  {name}: {then.short} → {now.short if now else 'not made'}", markup=False)
    differing = next((stage for stage in stages if stage.differing), None)
    if as_json:
        data = {"same": differing is None, "plan": planned.model_dump(mode="json")}
        print_json({**data, "stages": [stage.model_dump(mode="json") for stage in stages], "store": target.uri})
    if differing is not None:
        if not as_json:
            err.print(f"{differing.label} is the first stage with other results; the rebuilt ones are in {target.uri}")
        raise SystemExit(DIFFERENT)
    if not as_json:
        count = sum(len(stage.outputs) for stage in stages)
        out.print(
            f"{count} of {count} artifacts of {len(stages)} stages have the same digests; they are in {target.uri}"
        )


def _moved(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old or not new:
        raise UserError(f"--source {text}: expected OLD=NEW, two paths")
    return old.rstrip("/"), str(Path(new).absolute()).rstrip("/")


def _plan_text(planned: Any) -> str:
    running = [step for step in planned.steps if step.runs]
    same = sum(not step.differs and not step.problems for step in running)
    seconds = sum(step.record.seconds for step in running)
    lines = [
        f"{planned.reference.short}: {same} of {len(running)} stages have the key that they had ({seconds:.0f} s then)",
        *(f"  {reference.short} is taken from the store" for reference in planned.taken),
        *(f"  {sentence}" for sentence in planned.missing),
    ]
    for step in running:
        lines += [f"  {step.record.label}: {change}" for change in step.differs]
        lines += [f"  {problem}" for problem in step.problems]
    if planned.environment:
        lines += ["not in the keys, may change rounding:", *(f"  {change}" for change in planned.environment)]
    return "\n".join(lines)
