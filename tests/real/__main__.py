"""``make real``: the shipped recipe real-model with a pretrained model and real rows; its tables and samples.

    python -m tests.real [--seeds N | --seed N] [--data FOLDER] [--branches NAME …] [--model FOLDER] [--set FIELD=VALUE …]

Runs resume and are cached, in ``ALIGN_HOME``: the same command again goes on where it ended. Figures and samples are saved
below docs/real-model, one file for each seed, as soon as its graph is done, and again after the runs that follow it.
docs/real-model.md shows all of these files. With another model or ``--set`` nothing is saved. Of branches that a run leaves
out, the file keeps what it has. A part whose rows are not in the folder of data
(``REAL_DATA``, or ../shared/data) is left out, with a sentence, and nothing is saved.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignment.flows.cli.run import NOT_PROMOTED, PARTLY_FAILED
from alignment_core.cluster.device import cpu_model
from tests.benchmarks.laps import Taken, sampled_memory
from tests.benchmarks.peer_rows import DATA
from tests.real.later_runs import later_runs
from tests.real.page import PICTURES, PREFIX, RESULTS, SAMPLES, SHOWN, Run, tables, write_page
from tests.real.recipe import PREFERENCES, ROOT, recipe_for, tag_of
from tests.real_model import RealModelError, real_model


def align(*arguments: str) -> tuple[dict[str, Any], int]:
    """The object that ``align … --json`` prints last, and the peak memory of its processes. Raises CalledProcessError."""
    command = [sys.executable, "-m", "alignment.flows.cli.main", *arguments, "--json"]
    taken = Taken()
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        sampled_memory(process.pid, taken),
    ):
        printed, _ = process.communicate()
    if process.returncode not in (0, NOT_PROMOTED, PARTLY_FAILED):  # whether it learnt enough is for the table
        raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(printed.strip().splitlines()[-1]), taken.memory


def runs(
    recipe: Mapping[str, Any], seed: int, data: Path, folder: Path, overrides: Sequence[str]
) -> Iterator[tuple[Run, Path]]:
    """The run of the recipe with ``seed``, the answers that its policies gave, and its report; then the same with the runs
    after it."""
    path = folder / "real-model.json"
    path.write_text(json.dumps(recipe))
    settings = [
        part for each in (f"seed={seed}", f"promotion.tag={tag_of(seed)}", *overrides) for part in ("--set", each)
    ]
    outcome, memory = align("run", str(path), *settings)
    samples = {}
    for branch in SHOWN.keys() & {"", *outcome["metrics"].get("comparisons", {})}:
        of_branch = ["--branch", branch] if branch else []
        samples[branch] = align("samples", outcome["run_id"], "-n", str(SAMPLES), *of_branch)[0]["rows"]
    machine = f"{len(os.sched_getaffinity(0))} cores of {cpu_model()}"
    run, report = Run.of(seed, machine, outcome, samples, memory, {}), Path(outcome["report"])
    yield run, report
    if not overrides:
        of_later = {"model": recipe["model"], "seed": seed}
        later = later_runs(lambda *arguments: align(*arguments)[0], of_later, data, outcome, folder)
        yield replace(run, later=later), report


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    given = _options(arguments)
    try:
        model = given.model or real_model()
    except RealModelError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory(prefix="real-") as folder:
        recipe, left_out = recipe_for(model, given.data, Path(folder))
        if given.branches:
            if unknown := sorted(set(given.branches) - set(recipe["branches"])):
                sys.exit(f"--branches: there is no {', '.join(unknown)}; there are {', '.join(recipe['branches'])}")
            recipe["branches"] = {name: recipe["branches"][name] for name in given.branches}
            recipe["result"] = next(iter(recipe["branches"]))
        for sentence in left_out:
            print(sentence, file=sys.stderr)
        saves = not (given.set or given.model or left_out)
        done: dict[int, Run] = {}
        try:
            for seed in range(1, given.seeds + 1) if given.seed is None else [given.seed]:
                for run, report in runs(recipe, seed, given.data, Path(folder), given.set):
                    done[seed] = run
                    if saves:
                        _save(run, report, is_whole=not given.branches)
        except subprocess.CalledProcessError as error:  # which printed the reason
            sys.exit(f"the run ended with exit code {error.returncode}; the same command resumes it")
    print("\n".join(tables([*done.values()])))


def _save(run: Run, report: Path, is_whole: bool) -> None:
    """Save a run, and show it on the page."""
    run.save(RESULTS)
    if run.seed == 1:
        _copy_pictures(report.parent, is_whole)
    write_page()


def _copy_pictures(report: Path, is_whole: bool) -> None:
    """Put the pictures of a run's report beside the docs, in the place of all others if the run has all branches."""
    for old in PICTURES.glob(f"{PREFIX}*.svg") if is_whole else ():
        old.unlink()
    for picture in report.glob("*.svg"):
        shutil.copyfile(picture, PICTURES / f"{PREFIX}{picture.name}")


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m tests.real")
    parser.add_argument("--seeds", type=int, default=int(os.environ.get("SEEDS") or 1), help="by default SEEDS, or 1")
    parser.add_argument("--seed", type=int, help="this seed alone; the page has those of other runs, too")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of rows; by default REAL_DATA, or ../shared/data"
    )
    parser.add_argument(
        "--branches", nargs="+", default=[], metavar="NAME", help=f"of the recipe, such as {PREFERENCES}"
    )
    parser.add_argument("--model", type=Path, help="folder of the model; by default SmolLM2-135M-Instruct is made")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the recipe")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
