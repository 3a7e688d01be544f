"""The tables of ``make real``, and docs/real-model.md."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.composition.evaluations import PRODUCTION
from alignment_core.evaluation.statistics import wilson
from tests.real.recipe import ROOT, branches

PAGE = ROOT / "docs" / "real-model.md"
RESULTS = ROOT / "docs" / "real-model"
"""Folder of the figures that the page shows."""
PICTURES, PREFIX = ROOT / "docs" / "pictures", "real-model-"
TRL = "trl.json"
"""The file of comparisons with TRL's trainers, by method."""
SAMPLES = 10
SHOWN = {"": ("grpo", "ppo"), "preferences": ("dpo", "ppo")}
"""Policies whose answers the page shows beside those of the baseline, by the branch that compares them."""
TABLES = {
    "": ("accuracy", "answers that follow all instructions: before | after | win rate against the start"),
    "preferences": ("reward", "reward of the judge: before | after | win rate against SFT"),
    "preferences/conditional-sft": (
        "length",
        "tokens: before | after, asked for 8 words, or 32 | win rate against SFT",
    ),
}
"""The measure and its heading, by the branch that compares the policies."""
ACROSS_SEEDS = {
    "": ("accuracy", "answers that follow all instructions"),
    "preferences": ("win_rate", "win rate against SFT by the judge"),
    "preferences/conditional-sft": ("length", "tokens"),
}
"""The measure that is compared across seeds, and its name, by the branch that compares the policies."""
TRL_HEAD = (
    "The model trains with the recipe's stages and with TRL's trainers, from the same weights, with the same rows in the same",
    "order, in fp32: `python -m tests.real.trl_curves`, rows of GSM8K for SFT and pairs of HH for the others.",
)
"""What the comparisons show."""


@dataclass(frozen=True)
class Run:
    """A run of the recipe with one seed, as a file of RESULTS keeps it."""

    seed: int
    machine: str
    outcome: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]
    """Rows of answers, by the branch that compares the policies."""
    memory: int | None
    """Most bytes of all its processes, over the commands that computed some of its stages and ended; None if none did."""
    later: dict[str, Any]
    """Of the runs after it: metrics of the policies of the distillation, and the nights."""

    @classmethod
    def of(
        cls,
        seed: int,
        machine: str,
        outcome: Mapping[str, Any],
        samples: Any,
        memory: int | None,
        later: dict[str, Any],
    ) -> Run:
        """With what the page shows of an outcome."""
        stages = [{name: stage[name] for name in ("label", "key", "cost", "metrics")} for stage in outcome["stages"]]
        metrics = {**outcome["metrics"], "policies": _of_this_run(outcome["metrics"]["policies"])}
        kept = {"metrics": metrics, "stages": stages, "failed": outcome["failed"]}
        computed = any(stage["state"] == "run" for stage in outcome["stages"])
        answers = {branch: [_of_this_run(row) for row in rows] for branch, rows in samples.items()}
        return cls(seed, machine, kept, answers, memory if computed else None, later)

    def save(self, folder: Path) -> None:
        """Write it to its file, with what the file has of branches that this run leaves out."""
        folder.mkdir(exist_ok=True)
        path = folder / f"seed-{self.seed}.json"
        whole = self.with_others_of(Run(**json.loads(path.read_text()))) if path.is_file() else self
        path.write_text(json.dumps(asdict(whole), indent=1) + "\n")

    def with_others_of(self, before: Run) -> Run:
        """With the branches of an earlier run that this one leaves out, and the most memory of both. Policies are only
        kept beside the same baseline."""
        ours, theirs = self.policies(""), before.policies("")
        if not _is_same(next(iter(ours.items()), None), next(iter(theirs.items()), None)):
            return self
        others = before._branches() - self._branches()
        policies = ours | {name: policy for name, policy in theirs.items() if name in others}
        order = branches()
        metrics = {
            **self.outcome["metrics"],
            "policies": dict(
                sorted(policies.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1)
            ),
            "comparisons": {
                name: table
                for name, table in before.outcome["metrics"].get("comparisons", {}).items()
                if name.split("/")[0] in others
            }
            | self.outcome["metrics"].get("comparisons", {}),
        }
        stages = [stage for stage in before.outcome["stages"] if stage["label"].split("/")[0] in others]
        failed = {name: why for name, why in before.outcome["failed"].items() if name.split("/")[0] in others}
        outcome = {
            "metrics": metrics,
            "stages": [*self.outcome["stages"], *stages],
            "failed": self.outcome["failed"] | failed,
        }
        samples = {branch: rows for branch, rows in before.samples.items() if branch.split("/")[0] in others}
        answered = {row["prompt"]: row for row in before.samples.get("", [])}
        samples[""] = [{**answered.get(row["prompt"], {}), **row} for row in self.samples.get("", [])]
        memory = max((each for each in (before.memory, self.memory) if each), default=None)
        return replace(
            self,
            outcome=outcome,
            samples=self.samples | samples,
            memory=memory,
            later={**before.later, **self.later},
        )

    def policies(self, branch: str) -> dict[str, dict[str, float]]:
        """The metrics of the baseline and of each policy that the run, or a branch of it, compares."""
        metrics = self.outcome["metrics"]
        compared: dict[str, Any] = {"": metrics["policies"], **metrics.get("comparisons", {})}
        return compared.get(branch, {})

    def _branches(self) -> set[str]:
        """Names of the recipe's branches that it has."""
        compared = self.outcome["metrics"].get("comparisons", {})
        return {*list(self.policies(""))[1:], *(name.split("/")[0] for name in compared)}

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        """Its stages by label."""
        return {stage["label"]: stage for stage in self.outcome["stages"]}

    def seconds(self, branch: str) -> float:
        """Of the branch's stages, when they were computed, without start-up and waits."""
        stages = {stage["key"]: stage for label, stage in self.stages.items() if label.startswith(f"{branch}/")}
        return sum(float(stage["cost"].get("seconds", 0)) for stage in stages.values())


def saved(folder: Path) -> list[Run]:
    """The runs that are saved in a folder, by seed."""
    runs = [Run(**json.loads(path.read_text())) for path in folder.glob("seed-*.json")]
    return sorted(runs, key=lambda run: run.seed)


def tables(runs: Sequence[Run]) -> Iterator[str]:
    """All tables in Markdown: one row for each policy over all seeds, if there are several; then one for each seed and policy,
    reward model, and held-out metric of training."""
    if len(runs) > 1:
        yield from _across_seeds(runs)
        yield ""
    for branch in TABLES:
        if any(run.policies(branch) for run in runs):
            yield from _policies(runs, branch)
            yield ""
    yield from _of_training(runs)
    if any(run.later for run in runs):
        yield ""
        yield from _of_later(runs)
    for run in runs:
        for name, problem in run.outcome["failed"].items():
            yield ""
            yield f"Seed {run.seed}: {name} failed: {problem.splitlines()[0]}"


def save_trl(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Keep comparisons with TRL in the place of those of the same methods."""
    folder.mkdir(exist_ok=True)
    kept = saved_trl(folder) | {line["method"]: dict(line) for line in lines}
    (folder / TRL).write_text(json.dumps(kept, indent=1) + "\n")


def saved_trl(folder: Path) -> dict[str, dict[str, Any]]:
    """The comparisons that are saved in a folder, by method."""
    path = folder / TRL
    return json.loads(path.read_text()) if path.is_file() else {}


def trl_table(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Comparisons with TRL in Markdown: a row for each method and side."""
    yield (
        "| method | side | loss of the first step → the last | greatest difference of a step | held-out loss before → after "
        "| held-out accuracy before → after | held-out margin before → after | seconds | GB |"
    )
    yield "|" + "---|" * 9
    for line in lines:
        for side, name in (("ours", "ours"), ("trl", "TRL")):
            figures = line[side]
            cells = [line["method"], name, _change([figures["losses"][0], figures["losses"][-1]])]
            cells.append(f"{line['difference']:.1e}" if side == "ours" else "—")
            cells += [_change(figures["held_out"].get(metric)) for metric in ("loss", "accuracy", "margin")]
            if "accuracy_interval" in figures:
                low, high = figures["accuracy_interval"]
                cells[5] += f" [{low:.3f}, {high:.3f}]"
            cells += [f"{figures['seconds']:.0f}", f"{figures['memory_gb']:.1f}"]
            yield f"| {' | '.join(cells)} |"


def _change(values: Sequence[float] | None) -> str:
    return "—" if values is None else f"{values[0]:.4f} → {values[1]:.4f}"


def _policies(runs: Sequence[Run], branch: str) -> Iterator[str]:
    measure, head = TABLES[branch]
    yield f"| seed | method | {head} | KL, nats | perplexity under the baseline | tokens | minutes |"
    yield "|" + "---|" * 9
    for run in runs:
        policies = run.policies(branch)
        baseline = next(iter(policies.values()), {})
        for name, after in list(policies.items())[1:]:
            stages = f"{branch}/{name}" if branch else name
            cells = [str(run.seed), name, _interval(baseline, measure), _interval(after, measure)]
            cells += [_interval(after, "win_rate"), _number(after.get("kl"), 1)]
            cells += [" → ".join(_number(each.get("baseline_perplexity"), 2) for each in (baseline, after))]
            cells += [" → ".join(_number(each.get("length"), 1) for each in (baseline, after))]
            yield f"| {' | '.join([*cells, _number(run.seconds(stages) / 60, 1)])} |"


def _across_seeds(runs: Sequence[Run]) -> Iterator[str]:
    """Means of the seeds, each with the lowest and the highest of them."""
    yield "| method | seeds | measure, mean of seeds (lowest to highest) | before | after | tokens |"
    yield "|" + "---|" * 6
    for branch, (measure, name_of_measure) in ACROSS_SEEDS.items():
        decimals = 1 if measure == "length" else 3
        for name in dict.fromkeys(name for run in runs for name in list(run.policies(branch))[1:]):
            compared = [run.policies(branch) for run in runs if name in run.policies(branch)]
            before, after = ([each[of] for each in compared] for of in (next(iter(compared[0])), name))
            cells = ["/".join(filter(None, [branch, name])), str(len(compared)), name_of_measure]
            cells.append("0.5" if measure == "win_rate" else _spread(before, measure, decimals))
            cells += [
                _spread(after, measure, decimals),
                _spread(before, "length", 1) + " → " + _spread(after, "length", 1),
            ]
            yield f"| {' | '.join(cells)} |"


def _spread(policies: Sequence[Mapping[str, float]], metric: str, decimals: int) -> str:
    """The mean of a metric over seeds, and its lowest and highest value if there are several."""
    values = [policy[metric] for policy in policies if metric in policy]
    if not values:
        return "—"
    mean, low, high = (_number(value, decimals) for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def _of_training(runs: Sequence[Run]) -> Iterator[str]:
    """Held-out metrics that trainings measure on their own test rows."""
    yield "| seed | training | held-out metric | before | after |"
    yield "|" + "---|" * 5
    for run in runs:
        for label, stage in run.stages.items():
            metrics = stage["metrics"]
            for name in ("accuracy", "loss", "margin"):
                after, before = metrics.get(f"test_{name}"), metrics.get(f"test_{name}.first")
                if after is not None:
                    rows = run.stages.get(f"{label}/data", {"metrics": {}})["metrics"].get("test_rows")
                    ends = f" {_of_rows(after, rows)}" if name == "accuracy" and rows else ""
                    yield f"| {run.seed} | {label} | {name} | {_number(before, 3)} | {_number(after, 3)}{ends} |"


def _of_later(runs: Sequence[Run]) -> Iterator[str]:
    """Of distillation by the policy of reinforcement learning, and of the nights."""
    yield "| seed | run | measure | before | after |"
    yield "|" + "---|" * 5
    for run in runs:
        if policies := run.later.get("distillation"):
            first, *_, last = policies.values()
            ends = [_interval(each, "accuracy") for each in (first, last)]
            yield f"| {run.seed} | distillation | answers that follow all instructions | {' | '.join(ends)} |"
        for number, night in enumerate(run.later.get("nights", []), start=1):
            measured = [each for each in (night["metrics"] or {}).values() if "win_rate" in each]
            won = _interval(measured[-1], "win_rate") if measured else "—"
            name = f"night {number}: {night['rows']} pairs, {night['state']}"
            yield f"| {run.seed} | {name} | win rate against production | 0.5 | {won} |"


def _of_rows(share: float, rows: int) -> str:
    """The interval of an accuracy on this many rows."""
    right = round(share * rows)
    ends = wilson(np.repeat([1.0, 0.0], [right, rows - right]), 0.95)
    return f"[{ends.low:.3f}, {ends.high:.3f}] n={rows}"


def _interval(policy: Mapping[str, float], measure: str) -> str:
    decimals = 1 if measure == "length" else 3
    if f"{measure}.low" not in policy:
        return _number(policy.get(measure), decimals)
    mean, low, high = (_number(policy[f"{measure}{end}"], decimals) for end in ("", ".low", ".high"))
    return f"{mean} [{low}, {high}]"


def _number(value: float | None, decimals: int) -> str:
    return "—" if value is None else f"{value:.{decimals}f}"


def write_page() -> None:
    """Write the page of all results that are saved."""
    pictures = [f"{PICTURES.name}/{path.name}" for path in sorted(PICTURES.glob(f"{PREFIX}*.svg"))]
    PAGE.write_text(page(saved(RESULTS), pictures, saved_trl(RESULTS).values()))


def page(runs: Sequence[Run], pictures: Sequence[str] = (), trl: Collection[Mapping[str, Any]] = ()) -> str:
    """The page with the tables, comparisons with ``trl``, and samples and ``pictures`` of the first seed."""
    machines = sorted({run.machine for run in runs})
    peak = max((run.memory for run in runs if run.memory), default=None)
    most = "" if peak is None else f" All processes of a run together had at most {peak / 1e9:.1f} GB of memory."
    lines = [
        "# A pretrained model",
        "",
        "Written by `make real`: the recipe [real-model](../deployments/recipes/real-model.yaml) with SmolLM2-135M-Instruct,",
        "pairs of HH, rows of GSM8K, and the prompts of MT-Bench and Vicuna. Intervals are of 95 % over held-out prompts.",
        "",
        *tables(runs),
        "",
        f"Measured on {' and '.join(machines)}.{most}",
    ]
    if left_out := [name for name in branches() if any(name not in run.policies("") for run in runs)]:
        lines += ["", f"Branches of the recipe that not all of these runs had: {', '.join(left_out)}."]
    if trl:
        lines += ["", "## Beside TRL", "", *TRL_HEAD, "", *trl_table(trl)]
    if pictures:
        lines += ["", "## Lineage and curves", ""]
        lines += [f"![{Path(picture).stem.replace('-', ' ')}]({picture})" for picture in pictures]
    first = runs[0]
    for branch, names in SHOWN.items():
        for name in names if branch in first.samples else ():
            rows = [row for row in first.samples[branch] if name in row]
            if not rows:
                continue
            baseline = next(iter(first.policies(branch)))
            where = f" of {branch}" if branch else ""
            lines += ["", f"## {baseline} and {name}{where}", "", "Held-out prompts, evenly spaced; answers are uncut."]
            for row in rows:
                lines += ["", f"**{_one_line(row['prompt'])}**"]
                for policy in (baseline, name):
                    lines += ["", f"{policy}:", "", "~~~text", _answer(row, policy), "~~~"]
    return "\n".join(lines) + "\n"


def _of_this_run(by_policy: Mapping[str, Any]) -> dict[str, Any]:
    """Without the policy of the tag that an earlier run promoted, and the comparison with it."""
    return {name: value for name, value in by_policy.items() if not name.endswith(PRODUCTION)}


def _is_same(ours: tuple[str, dict[str, float]] | None, theirs: tuple[str, dict[str, float]] | None) -> bool:
    """Whether two policies have one name and, up to the rounding of machines and threads, the same metrics, of those that
    the code of both times measures."""
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return False
    both = ours[1].keys() & theirs[1].keys()
    return bool(both) and all(math.isclose(ours[1][name], theirs[1][name], rel_tol=1e-6) for name in both)


def _answer(row: Mapping[str, str], policy: str) -> str:
    """A start that several branches evaluate has the label of one of them before its name."""
    return next(text for name, text in row.items() if name == policy or name.endswith(f"/{policy}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())
