"""Pages of the docs as programs: the files that a page shows, and its shell blocks, run in order in an empty folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILE = re.compile(r"^\*\*`([^`]+)`\*\*\n\n```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows, each below its name in bold."""
    return dict(FILE.findall(page.read_text()))


def script_of(page: Path) -> str:
    """The page's shell blocks (``sh``), one after the other; each file is written where the page shows it."""
    return "\n".join(SHELL.findall(page.read_text()))


def run_page(page: Path, folder: Path, seconds: float) -> str:
    """Run all commands of a page in ``folder``, with a separate ALIGN_HOME; returns their output. The first failure ends it."""
    work, tools = folder / "work", folder / "bin"
    work.mkdir(parents=True)
    tools.mkdir()
    for name, module in (("align", "alignment.flows.cli.main"), ("prefect", "prefect")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (tools / name).chmod(0o755)
    for name, text in files_of(page).items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-euxo", "pipefail", "-c", script_of(page)],
        cwd=work,
        env={**os.environ, "PATH": path, "ALIGN_HOME": str(folder / "home"), "HOME": str(folder / "user")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        raise AssertionError(f"{page.name} took more than {seconds:g} s:\n{output[-6000:]}") from None
    assert process.returncode == 0, f"{page.name}: exit {process.returncode}\n{output[-6000:]}"
    return output
