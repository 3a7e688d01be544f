"""Tables of how long runs take, and of what crashes cost them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tests.benchmarks.results import Figure, Line, Run
from tests.benchmarks.tables.markdown import NONE, lines, number, span, table

QUICKSTART = {
    "run_seconds": ("the complete run, empty store and new database", "180"),
    "cached_run_seconds": ("the same run again, all stages cached", "10"),
    "cached_seconds_per_stage": ("one cached stage, including its share of the start-up", "0.5"),
    "first_training_step_seconds": ("from the command to the first training step, empty store", NONE),
    "first_training_step_seconds_with_data_cached": ("the same with model and data cached", NONE),
}
ROUND = {
    "sampling": ("sampling", NONE),
    "training": ("training and the reference's forward passes", NONE),
    "scoring": ("scoring", NONE),
    "rest": ("the rest: selecting pairs, reading, writing, publishing, gaps between stages", "10 %"),
}
STARTUP = {
    "malformed row": ("a malformed row, until the error message", "(3)"),
    "grpo.yaml, a reward that fails": (
        "`grpo.yaml` with a reward function that always fails, until the error message",
        "(5)",
    ),
    "10 steps of SFT": ("10 steps of SFT of 0.5M parameters, in an `ALIGN_HOME` that was used before", NONE),
}


def quickstart(runs: Sequence[Run]) -> str:
    (line,) = lines(runs)
    rows = [[title, f"{number(line[name])} s", goal] for name, (title, goal) in QUICKSTART.items()]
    if "round" in line:
        rows.append(
            ["the second round, from its first stage to its policy", f"{number(line['round']['seconds'])} s", NONE]
        )
        rows += [[f"of these, {title}", f"{line['round'][name]:.0%}", goal] for name, (title, goal) in ROUND.items()]
    return table(("measurement", "result", "goal"), rows)


def startup(runs: Sequence[Run]) -> str:
    """Imports as the benchmark names them, and the runs."""
    results = lines(runs)
    imported = dict.fromkeys(line["imports"] for line in results if "imports" in line)
    rows = [
        [title, _with_wall([line for line in results if line.get("run") == name]), goal]
        for name, (title, goal) in STARTUP.items()
    ]
    rows += [
        [f"imports of {name}", _with_wall([line for line in results if line.get("imports") == name]), NONE]
        for name in imported
    ]
    return table(("command", "CPU seconds (seconds)", "goal"), rows)


def _with_wall(results: Sequence[Line]) -> str:
    cpu, wall = (span((line.get(name) for line in results), 1) for name in ("processor_seconds", "seconds"))
    return cpu if wall == NONE else f"{cpu} ({wall})"


def startup_real(runs: Sequence[Run]) -> str:
    results = lines(runs)
    homes = {home: [line for line in results if line.get("home") == home] for home in ("warm", "empty")}
    rows = [
        ["a run until its first step, in a warm home", span(line["first step"] for line in homes["warm"]), "10"],
        ["the same in an empty home", span(line["first step"] for line in homes["empty"]), NONE],
        ["the first step of a second stage", span(line.get("second stage") for line in homes["warm"]), "2"],
        ["`align serve` until it answers", span(line.get("serve") for line in results), "15"],
    ]
    return table(("command", "seconds", "goal"), rows)


def endings(runs: Sequence[Run]) -> str:
    results = lines(runs)
    rows = []
    for event in dict.fromkeys(line["event"] for line in results):
        same = [line for line in results if line["event"] == event]
        marked, trains = (span((line[name] for line in same), 1) for name in ("marked_seconds", "resumed_seconds"))
        rows.append([event, f"{marked} s", f"{trains} s"])
    return table(("event", "until it is marked as crashed", "from then until it trains from its checkpoint"), rows)


def kills(runs: Sequence[Run]) -> str:
    (line,) = lines(runs)
    roles = sorted(line["roles"].items(), key=lambda role: -role[1]["kills"])
    rows = [[role, number(of["kills"]), number(of["resumed"])] for role, of in roles]
    rows.append(["differences from the undisturbed run", number(len(line["differences"])), ""])
    return table(("killed process", "kills", "the run continued by itself"), rows)


def lost_work(runs: Sequence[Run]) -> str:
    (line,) = lines(runs)
    differences = number(len(line["differences"]))
    rows = [
        [unit, number(lost["kills"]), number(lost["seconds"], 1), differences] for unit, lost in line["lost"].items()
    ]
    return table(("work", "kills during it", "most seconds lost", "differences from the undisturbed run"), rows)


def kills_of_rl(runs: Sequence[Run]) -> str:
    """A row for each command, with its options."""
    rows = []
    for run in runs:
        (line,) = run.lines
        roles = ", ".join(f"{role} {of['kills']} ({of['resumed']})" for role, of in line["roles"].items())
        most = max((lost["seconds"] for lost in line["lost"].values()), default=None)
        options = shlex.join(shlex.split(run.command)[5:])
        lost = NONE if most is None else f"{number(most, 1)} s"
        rows.append([f"`{options}`", roles, lost, number(len(line["differences"]))])
    head = ("options after `--begins-at rl`", "kills (the run continued by itself)", "most work lost", "differences")
    return table(head, rows)


KILLS_OF_RL = (
    "--recipe rl --kills 8 --seed 8 --longest-pause 4 --roles verifier engine trainer replica",
    "--recipe rl-environment --kills 8 --seed 7 --longest-pause 4 --roles environments engine trainer replica",
    "--recipe rl-critic --kills 10 --seed 4 --longest-pause 5",
    "--recipe rl-environment --kills 8 --seed 3 --longest-pause 5",
)
LOST_WORK = (
    "python -m tests.crash --kills 24 --seed 12 --longest-pause 30 --set sft.training.num_train_epochs=60 "
    "--set sft.training.max_steps=2500 --set iterative_dpo.prompts_per_round=512 "
    "--set iterative_dpo.training.max_steps=200 --set resources.progress_seconds=5"
)
FIGURES = (
    Figure("quickstart", "duration of the quickstart", ("python -m tests.benchmarks pipeline",), 10, quickstart),
    Figure("startup", "CPU seconds of short runs and imports", ("python -m tests.benchmarks startup",), 4, startup),
    Figure(
        "startup-real",
        "a pretrained model until work begins",
        ("python -m tests.benchmarks startup_real",),
        4,
        startup_real,
    ),
    Figure("endings", "recovery of runs of a deployment", ("python -m tests.benchmarks endings",), 15, endings, runs=3),
    Figure(
        "kills",
        "a hundred random kills",
        ("python -m tests.crash --kills 100 --seed 2027",),
        60,
        kills,
        exit_codes=(0, 1),
    ),
    Figure("lost-work", "work that kills cost", (LOST_WORK,), 40, lost_work, exit_codes=(0, 1)),
    Figure(
        "kills-of-rl",
        "kills during reinforcement learning",
        tuple(f"python -m tests.crash --begins-at rl {options}" for options in KILLS_OF_RL),
        35,
        kills_of_rl,
        exit_codes=(0, 1),
    ),
)
