"""What pages show in a browser: the policy of the quickstart, a live run, and texts that want to be run."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import ProvenanceDraft, Store
from alignment_core.canonical import digest_of
from alignment_core.journal import Journal, new_record
from tests.answered import AT, publish_round
from tests.browser.conftest import Ui, Watch, start

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202eabc{{ 7 * 7 }}"


def test_the_policy_of_the_quickstart_has_five_lanes_a_rail_and_a_flag_with_its_gates(
    quickstart: Ui, paths: dict[str, str], watch: Watch
) -> None:
    watched = watch(quickstart, viewport={"width": 1440, "height": 1000})
    tab = watched.tab
    watched.goto(paths["policy"])
    lanes = [
        lane.split(",")[0] for lane in tab.locator("section.lane").evaluate_all("all => all.map(x => x.ariaLabel)")
    ]
    assert lanes == ["model", "sft", "reward-model", "round-1", "round-2"]
    # The reward model's own track begins at its lane, and has a mark at each round that it judged.
    kinds = "[...lane.querySelectorAll('circle.track-1')].map(circle => circle.classList.contains('made'))"
    marks = tab.locator("section.lane").evaluate_all(f"lanes => lanes.map(lane => {kinds})")
    assert marks == [[], [], [True], [False], [False]]
    box = "rail => rail.getBoundingClientRect()"
    boxes = [tab.locator("section.lane .rail").nth(number).evaluate(box) for number in range(5)]
    assert all(abs(above["bottom"] - below["top"]) < 1 for above, below in pairwise(boxes)), "the rail has no gap"
    flag = tab.locator(".flag").inner_text()
    assert "policy/production" in flag
    assert tab.locator(".flag .gates li.ok").count() == 3
    assert "accuracy" in flag
    assert "win_rate.low" in flag
    assert watched.problems == []


def test_the_pages_are_used_by_keyboard_alone(quickstart: Ui, watch: Watch) -> None:
    watched = watch(quickstart)
    tab = watched.tab
    watched.goto("/runs")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    tab.keyboard.press("/")
    tab.keyboard.type("round-2/dpo")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/artifacts?q=*")
    for _ in range(40):
        tab.keyboard.press("Tab")
        if "model@sha256" in (tab.evaluate("document.activeElement.getAttribute('href')") or ""):
            break
    outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus is visible"
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/artifacts/model@*")
    assert tab.get_by_role("heading", level=1).inner_text().startswith("model")
    assert watched.problems == []


def test_every_page_and_a_label_without_javascript(
    quickstart: Ui, paths: dict[str, str], watch: Watch, empty_store: Store, tmp_path: Path
) -> None:
    watched = watch(quickstart, java_script_enabled=False)
    for path in paths.values():
        watched.goto(path)
    _, scores = publish_round(empty_store, tmp_path / "made")
    ui = start(tmp_path / "home", empty_store.uri)
    try:
        tab = watch(ui, java_script_enabled=False).tab
        tab.goto(f"{ui.address}/labels/{scores}")
        tab.get_by_role("button", name="Make the pairs").click()
        tab.get_by_label("Your name").fill("ada")
        tab.get_by_role("button", name="Begin").click()
        for number in range(3):
            assert f"{number} of 3" in tab.get_by_role("status").inner_text()
            tab.get_by_role("button", name="left is better").click()
        assert "All 3 pairs have your answer" in tab.content()
    finally:
        ui.stop()


@pytest.fixture
def live(tmp_path: Path, empty_store: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pages of a home whose runs belong to this process."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    ui = start(tmp_path / "home", empty_store.uri)
    yield ui
    ui.stop()


def test_a_metric_is_in_the_page_soon_after_it_was_measured(live: Ui, watch: Watch) -> None:
    with Journal(new_record("0eb1c584-1111", "quickstart", {"name": "quickstart"}, live.store)).open() as journal:
        parts = {"stage": "sft", "inputs": {}}
        journal.stage("sft", "running", stage="sft", key="1" * 64, key_parts=parts)
        watched = watch(live)
        tab = watched.tab
        watched.goto("/runs/0eb1c584")
        waits = []
        for step in range(1, 6):
            tab.wait_for_timeout(400)
            began = time.perf_counter()
            line = {"stage": "sft", "step": step, "metrics": {"loss": 1.0 / step}}
            with (journal.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            tab.get_by_text(f"{1.0 / step:.3f}").first.wait_for()
            waits.append(time.perf_counter() - began)
        print(f"from metric to page: {', '.join(f'{1000 * wait:.0f}' for wait in waits)} ms")
        # The server is started again at the same port: the page goes on by itself.
        live.kill()
        live.process = start(live.home, live.store, live.port).process
        journal.stage("sft", "run", outputs={"model": f"model@sha256:{'3' * 64}"}, seconds=7.0)
        tab.get_by_text("model 333333").wait_for()
    tab.get_by_text("completed").wait_for()
    assert [problem for problem in watched.problems if "ERR_" not in problem] == []


def test_the_place_of_the_keyboard_stays_while_a_live_table_changes(live: Ui, watch: Watch) -> None:
    with Journal(new_record("0eb1c584-1111", "quickstart", {"name": "quickstart"}, live.store)).open() as journal:
        parts = {"stage": "sft", "inputs": {}}
        made = {"outputs": {"model": f"model@sha256:{'3' * 64}"}, "seconds": 7.0}
        journal.stage("sft", "run", stage="sft", key="1" * 64, key_parts=parts, **made)
        watched = watch(live)
        watched.goto("/runs/0eb1c584")
        watched.tab.get_by_text("model 333333").focus()
        journal.stage("dpo", "running", stage="dpo", key="2" * 64, key_parts=parts)
        watched.tab.get_by_role("rowheader", name="dpo").wait_for()
        assert watched.tab.evaluate("document.activeElement.textContent") == "model 333333"


def test_texts_that_want_to_be_run_are_shown(empty_store: Store, tmp_path: Path, watch: Watch) -> None:
    store = empty_store
    folder = tmp_path / "data"
    folder.mkdir()
    row = {"prompt": [HOSTILE], "chosen": [HOSTILE], "rejected": ["x" * 1_000_000]}
    pq.write_table(pa.table(row), folder / "train.parquet")
    (folder / "<img src=x onerror=alert(1)>").write_text("x")
    config = {"sources": [{"path": f"/d/{HOSTILE}", "sha256": "c" * 64}]}
    made = ProvenanceDraft(
        key=digest_of(1), stage="dataset", label=HOSTILE, config=config, metrics={HOSTILE: 1.0}, **AT
    )
    data = store.publish(folder, "dataset", made)
    (folder / "model").write_text("x")
    draft = {
        "key": digest_of(2),
        "stage": "sft",
        "label": f"{HOSTILE}/dpo",
        "code_version": HOSTILE,
        "inputs": {"data": data},
    }
    model = store.publish(
        folder, "model", ProvenanceDraft.model_validate(draft | AT | {"run_ids": {"prefect": HOSTILE}})
    )
    store.tags.move("policy/production", model, None, HOSTILE)
    _, scores = publish_round(store, tmp_path / "made", texts=(f"a {HOSTILE}", f"b {HOSTILE}"))
    ui = start(tmp_path / "home", store.uri)
    try:
        watched = watch(ui, viewport={"width": 700, "height": 900})
        tabs = ("", "/touched", "/changed", "/promoted", "/rebuild", "/files")
        artifacts = [f"/artifacts/{each}{tab}" for each in (data, model, scores) for tab in tabs]
        for path in (*artifacts, "/artifacts", "/artifacts?q=%3Cscript%3Ealert(1)%3C/script%3E", "/labels", "/nights"):
            watched.goto(path)
            assert watched.tab.evaluate("[...document.scripts].every(x => x.src.endsWith('/static/ui.js'))"), path
            assert watched.tab.locator("img").count() == 0, path
            wide = watched.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, path
        assert watched.problems == []
    finally:
        ui.stop()
