"""Exit codes: `align --help` lists those of the table in docs/operations.md."""

from __future__ import annotations

import re
from pathlib import Path

from alignment.flows.cli import main

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def test_help_lists_every_exit_code_of_the_docs() -> None:
    table = OPERATIONS.read_text().split("## Exit codes")[1]
    documented = re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)))
    listed = re.findall(r"(?:Exit codes:|,)\s+(\d+) ", str(main.__doc__))
    assert listed == documented
