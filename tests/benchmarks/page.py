"""The tables of docs/performance.md: each is between two comments that name its figure, and followed by its origin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from textwrap import fill

from tests.benchmarks.results import ROOT, Figure, Results, Run

PAGE = ROOT / "docs" / "performance.md"
WIDTH = 120
END = "<!-- /figures -->"
BLOCK = re.compile(rf"^<!-- figures: ([\w-]+) -->\n(.*?)^{END}$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def block(figure: Figure, runs: Sequence[Run]) -> str:
    """The comments of a figure with its table and the origin of its numbers in between."""
    if not runs:
        commands = " and ".join(f"`{command}`" for command in figure.commands)
        content = fill(f"*Not measured yet: {commands}.*", WIDTH, break_on_hyphens=False)
    else:
        content = f"{figure.table(runs)}\n\n{origin(runs)}"
    return f"<!-- figures: {figure.name} -->\n{content}\n{END}"


def origin(runs: Sequence[Run]) -> str:
    """A sentence with the commands, and the date, machine and commit of each."""
    ordered = sorted(runs, key=lambda run: (run.stamp.date, run.stamp.machine, run.stamp.commit))
    parts = [
        f"{' and '.join(dict.fromkeys(f'`{run.command}`' for run in same))}, {stamp}"
        for stamp, same in groupby(ordered, key=lambda run: run.stamp)
    ]
    return fill(f"*Measured by {'; '.join(parts)}.*", WIDTH, break_on_hyphens=False, break_long_words=False)


def rendered(text: str, figures: Iterable[Figure], results: Results) -> str:
    """The page with these figures rendered again; its other text is unchanged."""
    blocks = {figure.name: block(figure, results.get(figure.name, [])) for figure in figures}
    return BLOCK.sub(lambda match: blocks.get(match[1], match[0]), text)


def problems(text: str, figures: Mapping[str, Figure], results: Results) -> list[str]:
    """Why the page is not the one that the figures and their results make, a sentence each."""
    names = [match[1] for match in BLOCK.finditer(text)]
    sentences = [
        f"{name}: the page has this figure {names.count(name)} times" for name in {*names} if names.count(name) > 1
    ]
    sentences += [
        f"{name}: the page has this table, but no command measures it" for name in names if name not in figures
    ]
    sentences += [f"{name}: the page has no table of this figure" for name in figures if name not in names]
    rest = BLOCK.sub("", CODE.sub("", text))
    sentences += [f"a table without a figure: {line}" for line in _first_lines_of_tables(rest)]
    sentences += [
        f"a comment without its counterpart: {line}" for line in re.findall(r"^<!-- /?figures.*", rest, re.MULTILINE)
    ]
    for name, runs in results.items():
        commands = figures[name].commands if name in figures else ()
        others = sorted({run.command for run in runs} - {*commands})
        sentences += [f"{name}: a kept result is of another command: {command}" for command in others]
    for match in BLOCK.finditer(text):
        figure = figures.get(match[1])
        if figure and match[0] != block(figure, results.get(figure.name, [])):
            sentences.append(f"{figure.name}: its table is not the one of its kept result; render it with --from")
    return sentences


def _first_lines_of_tables(text: str) -> list[str]:
    lines = ["", *text.splitlines()]
    return [line for before, line in pairwise(lines) if line.startswith("|") > before.startswith("|")]
