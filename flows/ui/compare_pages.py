"""The page that compares policies of runs: what differs, one plot, and the prompts where two of them disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from alignment.flows.ui.curves import MARGIN, WIDTH
from alignment.flows.ui.rendering import page, start_of
from alignment.flows.ui.run_pages import run_of
from alignment.flows.ui.sample_rows import LARGEST_READ, fetched, without_images
from alignment_core import journal
from alignment_core.artifacts import Provenance, Reference
from alignment_core.artifacts.index import View
from alignment_core.artifacts.index_snapshot import IndexSnapshot
from alignment_core.errors import AlignmentError, UserError
from alignment_core.evaluation.metric_names import in_order, metric_of, single_numbers
from alignment_core.journal import RunRecord, StageLine
from alignment_core.lineage.diff import flattened
from alignment_core.lineage.samples import SHARDS
from alignment_core.reporting.results import title_with_arrow, value_with_interval

MOST = 12
"""Policies that one page compares."""
A_PAGE = 10
FILTERS = {
    "differ": "where A and B disagree",
    "b": "where B is better",
    "a": "where A is better",
    "": "all prompts",
}
VERIFIED = ("verifier", "reward")
"""Numbers of a completion that say which of two is better, the first that both have."""
NO_SETTINGS = ("name", "store", "tracking")
"""Parts of a recipe that change no result."""


@dataclass(frozen=True)
class Side:
    """A policy of a run, by its evaluation."""

    name: str
    run: RunRecord
    record: Provenance
    rollouts: Reference | None
    """The completions of the evaluation; None if this run did not sample any."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the run's recipe, or those in which a variant of a sweep differs from the others."""

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for name, value in self.record.metrics.items() if isinstance(value, (int, float))}


@dataclass(frozen=True)
class Row:
    """A name with a cell for each side."""

    name: str
    cells: list[str]


@dataclass(frozen=True)
class Whisker:
    """A side's value with its interval, in a box of the plot."""

    name: str
    value: float
    x: float
    low: float
    high: float


@dataclass(frozen=True)
class Example:
    """A prompt with a completion of two sides, and their numbers."""

    prompt: str
    label: str | None
    texts: tuple[str, str]
    values: tuple[float | None, float | None]


class ComparePages:
    """Comparisons over a snapshot of a store's index, and the journals of this home."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.snapshot = snapshot

    def one(self, request: Request) -> Response:
        """The policies of one run or sweep, or the last ones of several runs. Raises UserError."""
        texts = request.query_params.getlist("run")[:MOST]
        runs = list({run.run_id: run for run in map(run_of, texts)}.values())
        with self.snapshot.reading() as view:
            by_run = [_sides(view, run, only_last=len(runs) > 1) for run in runs]
        policies = [side for several in by_run for side in several]
        sides = policies[:MOST]
        without = [run for run, several in zip(runs, by_run, strict=True) if not several]
        names = [side.name for side in sides]
        a, b = (_number(request, key, len(sides), default) for key, default in (("a", 0), ("b", len(sides) - 1)))
        where = request.query_params.get("where", "differ")
        metrics = _metrics(sides)
        metric = request.query_params.get("metric", "")
        metric = metric if metric in metrics else next(iter(metrics), "")
        examples, problem = self._examples(sides[a], sides[b]) if len(sides) > 1 else ([], "")
        shown = [example for example in examples if _fits(example, where)]
        start = start_of(request)
        return page(
            request,
            "compare.html",
            snapshot=self.snapshot,
            runs=runs,
            without=without,
            left_out=len(policies) - len(sides),
            sides=sides,
            settings=_differing(sides),
            metrics=[
                Row(
                    title_with_arrow(name, sides[0].metrics),
                    [value_with_interval(name, side.metrics) for side in sides],
                )
                for name in metrics
            ],
            names=names,
            metric=metric,
            choices={name: metric_of(name).title for name in metrics},
            plot=_plot(sides, metric),
            a=a,
            b=b,
            where=where if where in FILTERS else "differ",
            filters=FILTERS,
            examples=shown[start : start + A_PAGE],
            total=len(shown),
            prompts=len(examples),
            start=start,
            problem_of_examples=problem,
        )

    def _examples(self, a: Side, b: Side) -> tuple[list[Example], str]:
        """The prompts that both sides answered, with the first completion of each; or why there are none."""
        try:
            left, right = self._answers(a), self._answers(b)
        except (AlignmentError, OSError, ValueError, KeyError) as error:
            return [], f"The completions cannot be read: {error}"
        both = [prompt for prompt in left if prompt in right]
        if not both:
            return [], "The two policies answered no prompt in common."
        name = next(
            (
                name
                for name in VERIFIED
                if all(_has(answers[prompt], name) for answers in (left, right) for prompt in both)
            ),
            "",
        )
        return [
            Example(
                prompt,
                left[prompt]["label"],
                (left[prompt]["completion_text"], right[prompt]["completion_text"]),
                (left[prompt].get(name), right[prompt].get(name)),
            )
            for prompt in both
        ], ""

    def _answers(self, side: Side) -> dict[str, dict[str, Any]]:
        """The first completion of each prompt of an evaluation, with its scores, by the prompt's text."""
        import pyarrow.parquet as pq

        from alignment_core.rollout.schemas import SCORES

        if side.rollouts is None:
            raise UserError(f"{side.name} has no completions")
        scores, rollouts = side.record.inputs["scores"], side.rollouts
        if (size := sum(entry.size for entry in without_images(self.snapshot, rollouts))) > LARGEST_READ:
            raise UserError(f"{rollouts.short} has {size >> 20} MiB, more than a page reads ({LARGEST_READ >> 20} MiB)")
        columns = ["prompt", "sample", "prompt_text", "completion_text", "label"]
        with fetched(self.snapshot, rollouts) as folder:
            tables = [pq.read_table(path, columns=columns) for path in sorted(folder.glob(SHARDS))]
        rows = [row for table in tables for row in table.to_pylist() if row["sample"] == 0]
        stored = self.snapshot.store.fetch(scores)
        known = {
            row["prompt"]: row
            for row in pq.read_table(stored / SCORES, columns=["prompt", "sample", *VERIFIED]).to_pylist()
            if row["sample"] == 0
        }
        return {row["prompt_text"]: {**known.get(row["prompt"], {}), **row} for row in rows}


def _number(request: Request, key: str, count: int, default: int) -> int:
    """The side that a key of the address names, from 0."""
    text = request.query_params.get(key, "")
    return int(text) if text.isdecimal() and len(text) < 4 and int(text) < count else max(default, 0)


def _sides(view: View, run: RunRecord, only_last: bool) -> list[Side]:
    """The policies of a run that were evaluated, in the order of the run; or the one that was evaluated last."""
    lines = journal.stages(run.run_id)
    evaluated = [line for line in lines.values() if line.stage == "evaluate" and line.reference]
    ranked = [line for line in lines.values() if line.stage == "variants" and line.reference]
    records = view.by_key([line.made_by for line in (*evaluated, *ranked)])
    variants = [
        variant for line in ranked if line.made_by in records for variant in records[line.made_by].config["variants"]
    ]
    fields = {variant["name"]: variant["fields"] for variant in variants}
    sides = []
    for line in sorted(evaluated, key=lambda line: line.at)[-1:] if only_last else evaluated:
        record = records.get(line.made_by)
        if record is None:  # of another store
            continue
        policy = line.label.removesuffix("/evaluation")
        title = f"{run.name} {journal.short_id(run.run_id)} {policy}" if only_last else policy
        variant = next(
            (given for name, given in fields.items() if policy == name or policy.startswith(f"{name}/")), None
        )
        counted = {name: value for name, value in run.recipe.items() if name not in NO_SETTINGS}
        settings = flattened(counted) if variant is None else variant
        sides.append(Side(title, run, record, _rollouts_of(line, lines), settings))
    return sides


def _rollouts_of(line: StageLine, lines: Mapping[str, StageLine]) -> Reference | None:
    """The completions of an evaluation. They are those of its own scoring: other completions may have equal scores, which are
    the same artifact."""
    scored = lines.get(f"{line.label}/score")
    text = (scored.key_parts.get("inputs") or {}).get("rollouts") if scored else None
    return Reference.parse(text) if text else None


def _has(answer: Mapping[str, Any], name: str) -> bool:
    return answer.get(name) is not None


def _differing(sides: Sequence[Side]) -> list[Row]:
    """The settings in which sides differ."""
    names = dict.fromkeys(name for side in sides for name in side.settings)
    rows = []
    for name in names:
        cells = [str(side.settings[name]) if name in side.settings else "" for side in sides]
        if len(set(cells)) > 1:
            rows.append(Row(name, cells))
    return rows


def _metrics(sides: Sequence[Side]) -> list[str]:
    """The metrics of the evaluations, those of the group Evaluation first."""
    return in_order(name for side in sides for name in single_numbers(side.metrics))


def _plot(sides: Sequence[Side], metric: str) -> list[Whisker]:
    """A line for each side: its value with its interval, on one scale."""
    values = [
        (side, side.metrics[metric], side.metrics.get(f"{metric}.low"), side.metrics.get(f"{metric}.high"))
        for side in sides
        if metric in side.metrics
    ]
    ends = [end for _, *several in values for end in several if end is not None]
    if not ends:
        return []
    low, high = min(ends), max(ends)

    def x(value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * ((value - low) / ((high - low) or 1))

    return [
        Whisker(
            side.name,
            value,
            x(value),
            x(value if start is None else start),
            x(value if end is None else end),
        )
        for side, value, start, end in values
    ]


def _fits(example: Example, where: str) -> bool:
    a, b = example.values
    if a is None or b is None:
        return where not in ("a", "b") and (not where or example.texts[0] != example.texts[1])
    return {"a": a > b, "b": b > a, "": True}.get(where, a != b)
