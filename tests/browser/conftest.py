"""The pages of `align ui` in headless Chromium: `make ui-test`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from alignment_core.artifacts import Store, open_store
from alignment_core.nights.labelling import Labelling, folder_of, make_pairs
from tests.align import run_align

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    raise pytest.UsageError("there is no Chromium: install it, with `apt-get install chromium` for example")


@dataclass
class Ui:
    """A running `align ui`."""

    home: Path
    store: str
    process: subprocess.Popen[str]
    address: str
    token: str
    port: int = 0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def start(home: Path, store: str, port: int = 0) -> Ui:
    """Start `align ui`, and wait until it answers."""
    command = [sys.executable, "-m", "alignment.flows.cli.main", "ui", "--no-open", "--json", "--store", store]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env={**os.environ, "ALIGN_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    address = line["address"].rstrip("/")
    token = Path(line["token_file"]).read_text()
    return Ui(home, store, process, address, token, int(address.rpartition(":")[2]))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A browser's tab, with everything that it complained about and asked elsewhere for."""

    tab: Any
    origin: str
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tab.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        self.tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.tab.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.tab.on("request", self._request)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.origin):
            self.problems.append(f"request: {request.url}")

    def goto(self, path: str) -> None:
        answer = self.tab.goto(f"{self.origin}{path}")
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"


Watch = Callable[..., Watched]


@pytest.fixture
def watch(chromium: Any) -> Iterator[Watch]:
    """Open a tab over a running `align ui`, signed in, for an annotator if one is named; options are those of playwright's
    contexts."""
    contexts = []

    def opened(ui: Ui, annotator: str = "", **options: Any) -> Watched:
        context = chromium.new_context(**options)
        if annotator:
            context.add_cookies([{"name": "annotator", "value": annotator.encode().hex(), "url": ui.address}])
        context.set_default_timeout(60_000)
        contexts.append(context)
        watched = Watched(context.new_page(), ui.address)
        watched.goto(f"/sign-in?token={ui.token}")
        return watched

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def empty_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    """The pages over a run of the quickstart. A home with such a run may be given as QUICKSTART_HOME."""
    given = os.environ.get("QUICKSTART_HOME")
    home = Path(given) if given else tmp_path_factory.mktemp("quickstart")
    if not given:
        run_align(home, "run", "quickstart")
    ui = start(home, str(home / "store"))
    yield ui
    ui.stop()


@pytest.fixture(scope="session")
def paths(quickstart: Ui) -> dict[str, str]:
    """A path of each page, by what it shows."""
    store = open_store(quickstart.store, writes=False)
    policy = store.tags.all()["policy/production"]
    records = {record.label: record for record in store.records.all()}
    run = records["round-2/dpo"].run_ids["prefect"]
    scores = records["round-1/score"].output
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGN_HOME", str(quickstart.home))
        make_pairs(store, scores, 20)
        labelling = Labelling(folder_of(scores))
        for identity, answer in zip(labelling.pairs, "ab" * 10, strict=True):
            for who in ("ada", "bob"):
                labelling.answer(who, identity, "tie" if who == "bob" and answer == "b" else answer)
    artifacts = {
        "policy": policy,
        **{name: records[name].output for name in ("sft/data", "round-1/select", "round-1/generate", "reward-model")},
        "scores": scores,
    }
    tabs = ("", "/touched", "/changed", "/promoted", "/rebuild", "/files")
    return {
        "artifacts": "/artifacts",
        "search": "/artifacts?q=sft&kind=model",
        "nothing": "/artifacts?q=no-such-artifact",
        **{f"{name}{tab}": f"/artifacts/{reference}{tab}" for name, reference in artifacts.items() for tab in tabs},
        "runs": "/runs",
        "run": f"/runs/{run}",
        "nights": "/nights",
        "labels": "/labels",
        "label": f"/labels/{scores}",
        "results": f"/labels/{scores}/results",
        "compare": f"/compare?run={run}",
        "sign in": "/sign-in",
    }
