"""Labelling pairs by keys in a browser: every answer is kept, whatever happens to the server."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.nights.labelling import GIVEN, PAIRS
from alignment_core.nights.labels import imported
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table
from tests.browser.conftest import Ui, Watch, start

KEYS = ("ArrowLeft", "ArrowRight", "ArrowDown", "b", "s")
PROMPTS = 64


def publish_round(store: Store, folder: Path, texts: tuple[str, str] = ("a good answer", "a bad answer")) -> Reference:
    """Scores of two completions of each of 64 prompts, by a policy that has a tokenizer and no weights."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    policy = store.publish(folder / "policy", "model")
    rows: list[dict[str, Any]] = []
    for prompt in range(PROMPTS):
        for sample, text in enumerate(texts):
            completion = f"{text} to {prompt}"
            rows.append(
                {
                    "policy": str(policy),
                    "prompt": prompt,
                    "sample": sample,
                    "prompt_ids": [1],
                    "completion_ids": tokenizer(f"{completion}<eos>")["input_ids"],
                    "logps": [-1.0],
                    "prompt_text": f"<user>{prompt}",
                    "messages": json.dumps(f"question {prompt} {texts[1]}"),
                    "completion_text": completion,
                    "finish_reason": "stop",
                    "source": f"p:{prompt}",
                }
            )
    (folder / "rollouts").mkdir()
    write_table(rows, rollout_schema(), folder / "rollouts" / "shard-00000.parquet")
    made = {"started_at": "2026-11-25T10:00:00+00:00", "finished_at": "2026-11-25T10:00:01+00:00"}
    rollouts = store.publish(folder / "rollouts", "rollouts")
    (folder / "scores").mkdir()
    scored = [{"prompt": row["prompt"], "sample": row["sample"], "reward": -row["sample"]} for row in rows]
    write_table(scored, score_schema(), folder / "scores" / SCORES)
    draft = ProvenanceDraft(key="1" * 64, stage="score", label="round-1/score", inputs={"rollouts": rollouts}, **made)
    return store.publish(folder / "scores", "scores", draft)


@pytest.fixture
def round_(empty_store: Store, tmp_path: Path) -> Reference:
    return publish_round(empty_store, tmp_path)


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
    tab.wait_for_selector("button[value=left]")


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
        answers[identity] = {"ArrowLeft": left, "ArrowRight": right, "ArrowDown": "tie", "b": "both_bad"}.get(key, key)
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
