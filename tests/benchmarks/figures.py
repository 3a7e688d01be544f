"""The tables of docs/performance.md: measures them, keeps the results in docs/performance.json, and writes the page.

    python -m tests.benchmarks figures [NAME …] [--list | --check | --from FILE | --again]

The result of a command is kept and shown as soon as it ends, with its date, machine and commit. A result of the same code and
machine is not measured again, so that the same command continues one that was killed. A command that fails leaves its figure as
it is, and the exit code is 1.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import page, results
from tests.benchmarks.results import Figure, MeasurementError, Results, Run
from tests.benchmarks.tables import durations, learning, sampling, stores, training

FIGURES: dict[str, Figure] = {
    figure.name: figure for tables in (training, sampling, stores, durations, learning) for figure in tables.FIGURES
}
"""By name, in the order in which they are measured."""


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    options = _options(arguments)
    chosen = [FIGURES[name] for name in options.names or FIGURES]
    if options.list:
        kept = results.load()
        print("\n".join(describe(figure, kept.get(figure.name, [])) for figure in chosen))
        return 0
    if options.check:
        sentences = page.problems(page.PAGE.read_text(), FIGURES, results.load())
        print("\n".join(sentences), end="\n" if sentences else "")
        return 1 if sentences else 0
    if options.source:
        return _show_again(chosen, options.source)
    failed = [figure.name for figure in chosen if not measure(figure, options.again)]
    return 1 if failed else 0


def measure(figure: Figure, again: bool = False) -> bool:
    """Run the commands of a figure and show its table after each; False if one failed.

    Unless ``again``, runs of this code on this machine that are kept are not repeated.
    """
    done = True
    for command in figure.commands:
        kept = [run for run in results.load().get(figure.name, []) if run.command == command]
        current = [] if again else [run for run in kept if is_current(run)]
        while len(current) < figure.runs:
            _say(f"{figure.name}: {command}, run {len(current) + 1} of {figure.runs}")
            try:
                current = [*current, results.measure(command, figure.exit_codes)]
                keep(figure, command, current)
            except MeasurementError as error:
                _say(f"{figure.name}: {error}")
                done = False
                break
    return done


def is_current(run: Run) -> bool:
    """Whether it is of this machine, and of the code as it is."""
    return run.stamp.machine == results.machine() and results.is_same_code(run.stamp.commit)


def keep(figure: Figure, command: str, runs: Sequence[Run]) -> None:
    """Keep the runs of a command in the place of its earlier ones, and show them. Raises MeasurementError if the table does not
    show what they printed, and then keeps nothing."""
    kept = results.load()
    others = [run for run in kept.get(figure.name, []) if run.command in figure.commands and run.command != command]
    kept[figure.name] = sorted([*others, *runs], key=lambda run: figure.commands.index(run.command))
    _write([figure], kept)


def _show_again(figures: Sequence[Figure], source: Path) -> int:
    """Render the tables of these figures again, with the results of a file, which are kept."""
    try:
        given = results.load(source)
    except (OSError, ValueError) as error:
        _say(f"--from {source}: {error}")
        return 1
    if not any(figure.name in given for figure in figures):
        _say(f"--from {source}: it has no result of {', '.join(figure.name for figure in figures)}")
        return 1
    try:
        _write(
            figures, results.load() | {figure.name: given[figure.name] for figure in figures if figure.name in given}
        )
    except MeasurementError as error:
        _say(f"--from {source}: {error}")
        return 1
    return 0


def _write(figures: Sequence[Figure], kept: Results) -> None:
    """Write the page with these figures, and the results. Raises MeasurementError before anything is written."""
    try:
        text = page.rendered(page.PAGE.read_text(), figures, kept)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise MeasurementError(f"the table cannot show what was printed: {error!r}") from error
    results.save(kept)
    page.PAGE.write_text(text)


def describe(figure: Figure, runs: Sequence[Run]) -> str:
    """A line with its name, duration, content and commands."""
    seconds = [run.seconds for run in runs if run.seconds is not None]
    is_measured = len(seconds) == len(figure.commands) * figure.runs
    minutes = f"{sum(seconds) / 60:.1f}" if is_measured else f"about {figure.minutes:g}"
    times = f", {figure.runs} times" if figure.runs > 1 else ""
    return "\n".join(
        [f"{figure.name}: {figure.measures}, {minutes} minutes", *(f"    {c}{times}" for c in figure.commands)]
    )


def _options(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m tests.benchmarks figures")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a figure, by default all; --list names them")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--list", action="store_true", help="show the figures and their commands, and how long they take")
    way.add_argument("--check", action="store_true", help="check that the page and its results agree; measures nothing")
    way.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="show the results of a file; measures nothing"
    )
    way.add_argument("--again", action="store_true", help="measure again what this code has measured on this machine")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.names} - {*FIGURES}):
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    if options.check and options.names:
        parser.error("--check checks the whole page; leave out the names")
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
