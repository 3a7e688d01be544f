"""``align labels``: export pairs for human labelling, and import labels into an inbox."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from alignment.flows.cli.serve import TrustOption
from alignment.flows.console import JsonOption, StoreOption, out, print_json, write_file
from alignment_core import journal
from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.errors import DataError, UserError

labels_app = typer.Typer(
    name="labels", no_args_is_help=True, help="Export pairs of completions for human labelling, and import the labels."
)
SHOWN = 20
"""Number of problems that are printed; --json has all of them."""


@labels_app.command("export")
def export(
    round_: Annotated[
        str, typer.Argument(metavar="ROUND", help="Reference of rollouts or scores, id of a run, or `last`.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    stage: Annotated[
        str | None, typer.Option(help="Of a run: the stage with the completions. Default: those of the last round.")
    ] = None,
    as_format: Annotated[
        Literal["jsonl", "argilla"], typer.Option("--format", help="JSON Lines, or a list of Argilla's records.")
    ] = "jsonl",
    most: Annotated[int | None, typer.Option("-n", min=1, help="Maximum number of pairs.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    trust_remote_code: TrustOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write pairs of completions of one prompt, the best and the worst by reward, in random order."""
    from alignment_core.nights.labels import exported, pairs_of

    if output.exists():
        raise UserError(f"{output} is there already, perhaps with labels: give another --output")
    opened, rollouts, scores = _completions(round_, stage, store)
    chosen, cut = pairs_of(opened, rollouts, scores, seed, most, trust_remote_code)
    write_file(output, exported(chosen, as_format))
    result = {"file": str(output), "pairs": len(chosen), "rollouts": str(rollouts), "scores": scores and str(scores)}
    if as_json:
        return print_json({**result, "prompts_cut": cut})
    left_out = f"; prompts that were cut to max_prompt_length and are left out: {cut}" if cut else ""
    return out.print(f"{len(chosen)} pairs of {rollouts.short} in {output}{left_out}", markup=False)


@labels_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="File with labels, in either form of the export.")],
    inbox: Annotated[Path, typer.Option(help="Folder that preference rows are put into.")],
    pairs: Annotated[
        Path | None, typer.Option(help="The exported file, if the labels do not hold the pairs themselves.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read labels and add them to an inbox as preference rows. Labels that are there already are not added again."""
    from alignment_core.nights.labels import add_to_inbox, imported

    if not inbox.is_dir():
        raise UserError(f"--inbox {inbox}: no such folder")
    labels = imported(file, pairs)
    written = add_to_inbox(labels, inbox)
    counts = {name: labels.counts[name] for name in sorted(labels.counts) if labels.counts[name]}
    content = {
        "file": written and str(written),
        "new": written is not None,
        "counts": counts,
        "agreement": labels.agreement,
    }
    if as_json:
        print_json({**content, "problems": labels.problems})
    else:
        for problem in labels.problems[:SHOWN]:
            out.print(problem, markup=False)
        if len(labels.problems) > SHOWN:
            out.print(f"… and {len(labels.problems) - SHOWN} more (--json shows all)")
        shown = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"
        where = f"in {written}" if written else "no new row" if labels.rows else "no preference among them"
        alpha = "" if labels.agreement is None else f"; Krippendorff's alpha {labels.agreement:.3f}"
        out.print(f"{shown}; {where}{alpha}", markup=False)
    if counts and not labels.counts["pairs"]:
        raise DataError(f"{file}: no row could be read as a label")


def _completions(text: str, stage: str | None, store: str | None) -> tuple[Store, Reference, Reference | None]:
    """The store, the rollouts of a reference or run, and their scores if there are some. Raises UserError if there are no
    rollouts."""
    from alignment_core.nights.labels import scored_of

    opened = open_store(store, writes=False)
    if "@" in text:
        return opened, *scored_of(opened, opened.resolve(text))
    record = journal.find(text)
    opened = open_store(store or record.store, writes=False)
    lines = journal.stages(record.run_id)
    outputs = {label: _outputs_by_kind(line) for label, line in lines.items()}
    if stage is None:
        rounds = [label for label, kinds in outputs.items() if "scores" in kinds and "/evaluation/" not in label]
        if not rounds:
            run = journal.short_id(record.run_id)
            raise UserError(f"run {run} has no round with scored completions: name a stage with --stage")
        stage = rounds[-1]
    of_stage = outputs.get(stage, {})
    if "scores" in of_stage:
        inputs: dict[str, Any] = lines[stage].key_parts["inputs"]
        return opened, Reference.parse(inputs["rollouts"]), of_stage["scores"]
    if "rollouts" in of_stage:
        return opened, of_stage["rollouts"], None
    listed = ", ".join(label for label, kinds in outputs.items() if kinds.keys() & {"scores", "rollouts"})
    raise UserError(f"--stage {stage}: it has no completions; stages with completions are {listed or 'none'}")


def _outputs_by_kind(line: journal.StageLine) -> dict[str, Reference]:
    references = [Reference.parse(text) for text in line.outputs.values()]
    return {reference.kind: reference for reference in references}
