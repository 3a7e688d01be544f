"""Labelling pairs by keys in a browser: every answer is kept, whatever happens to the server."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference, Store
from alignment_core.nights.labelling import GIVEN, PAIRS
from alignment_core.nights.labels import imported
from tests.answered import publish_round
from tests.browser.conftest import Ui, Watch, start

KEYS = ("ArrowLeft", "ArrowRight", "t", "b", "s")
PROMPTS = 64


@pytest.fixture
def round_(empty_store: Store, tmp_path: Path) -> Reference:
    return publish_round(empty_store, tmp_path / "made", PROMPTS)[1]


@pytest.fixture
def ui(empty_store: Store, tmp_path: Path) -> Any:
    running = start(tmp_path / "home", empty_store.uri)
    yield running
    running.stop()


def begin(tab: Any, address: str, round_: Reference, name: str) -> None:
    tab.goto(f"{address}/labels")
    tab.get_by_role("link", name=round_.short).first.click()
    if tab.get_by_role("button", name="Make the pairs").count():
        tab.get_by_role("button", name="Make the pairs").click()
    tab.get_by_label("Your name").fill(name)
    tab.get_by_role("button", name="Begin").click()
    tab.wait_for_selector("#pair button[data-key=ArrowLeft]")


def test_64_pairs_by_keys_with_a_server_that_is_killed_twice(
    ui: Ui, round_: Reference, watch: Watch, tmp_path: Path
) -> None:
    watched = watch(ui)
    tab = watched.tab
    begin(tab, ui.address, round_, "ada")
    answers: dict[str, str] = {}
    waits: list[float] = []
    for number in range(PROMPTS):
        identity = tab.locator("input[name=pair]").input_value()
        left = tab.get_by_label("Left completion").locator(".text").inner_text()
        right = tab.get_by_label("Right completion").locator(".text").inner_text()
        key = KEYS[number % len(KEYS)]
        answers[identity] = {"ArrowLeft": left, "ArrowRight": right, "t": "tie", "b": "both_bad"}.get(key, key)
        killed = number in (20, 41)
        if killed:
            ui.kill()
        began = time.perf_counter()
        tab.keyboard.press(key)
        if killed:
            tab.get_by_text("not saved yet").wait_for()
            ui.process = start(ui.home, ui.store, ui.port).process
        tab.wait_for_function(
            "before => document.querySelector('input[name=pair]')?.value !== before", arg=identity, polling=5
        )
        if not killed:
            waits.append(time.perf_counter() - began)
    tab.get_by_text(f"All {PROMPTS} pairs have your answer.").wait_for()
    folder = next((tmp_path / "home" / "labels").iterdir())
    labels = imported(folder / GIVEN, folder / PAIRS)
    preferred = {row["pair"]: row["chosen"] for row in labels.rows}
    assert preferred == {identity: text for identity, text in answers.items() if " " in text}
    assert labels.counts["ties"] == sum(text in ("tie", "both_bad") for text in answers.values())
    assert labels.counts["skipped"] == sum(text == "s" for text in answers.values())
    assert labels.counts["malformed"] == labels.counts["duplicates"] == 0
    assert {row["annotators"][0] for row in labels.rows} == {"ada"}
    p95 = statistics.quantiles(waits, n=20)[-1]
    print(f"from key to next pair: median {statistics.median(waits) * 1000:.0f} ms, p95 {p95 * 1000:.0f} ms")
    assert [problem for problem in watched.problems if "ERR_CONNECTION" not in problem] == []
