"""The page that compares runs: one table, one plot, and the prompts where two policies disagree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from alignment.flows.ui import compare_pages
from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.journal import Journal, new_record
from tests.answered import AT, publish_round
from tests.flows.ui.test_pages import HOSTILE

Run = Callable[..., str]
NONE: Mapping[str, bytes] = MappingProxyType({})


@pytest.fixture
def run(store: Store, tmp_path: Path) -> Run:
    """A run with an evaluation of completions with a text for each prompt."""

    def finished(
        number: int,
        text: str,
        accuracy: float,
        label: str = "dpo",
        images: Mapping[str, bytes] = MappingProxyType({}),
        **recipe: Any,
    ) -> str:
        folder = tmp_path / f"run-{number}"
        rollouts, scores = publish_round(store, folder, texts=(text,), label=label, images=images)
        metrics = {"accuracy": accuracy, "accuracy.low": accuracy - 0.1, "accuracy.high": accuracy + 0.1}
        (folder / "evaluation").mkdir()
        (folder / "evaluation" / "e.json").write_text(str(number))
        key = digest_of(["evaluate", number])
        made = ProvenanceDraft(
            key=key, stage="evaluate", label=f"{label}/evaluation", inputs={"scores": scores}, metrics=metrics, **AT
        )
        evaluation: Reference = store.publish(folder / "evaluation", "evaluation", made)
        run_id = f"{number}eb1c584-1111"
        with Journal(
            new_record(run_id, f"run-{number}", {"name": f"run-{number}", **recipe}, store.uri)
        ).open() as journal:
            scored = {"stage": "score", "inputs": {"rollouts": str(rollouts)}}
            outputs = {"scores": str(scores)}
            journal.stage(
                f"{label}/evaluation/score",
                "run",
                stage="score",
                key=key,
                key_parts=scored,
                outputs=outputs,
                made_by=key,
            )
            line = {"stage": "evaluate", "key": key, "key_parts": {"stage": "evaluate", "inputs": {}}}
            journal.stage(f"{label}/evaluation", "run", **line, outputs={"evaluation": str(evaluation)}, made_by=key)
        return run_id

    return finished


def test_runs_differ_in_settings_metrics_and_completions(run: Run, get: Any) -> None:
    first = run(1, "same", 0.5, dpo={"loss": {"beta": 0.1}, "steps": 3})
    second = run(2, "other", 0.75, dpo={"loss": {"beta": 0.5}, "steps": 3})
    page = get(f"/compare?run={first}&run={second}&where=").text
    for text in ("0.500 [0.400, 0.600]", "0.750 [0.650, 0.850]", "dpo.loss.beta", "same to 0", "other to 0"):
        assert text in page
    assert "dpo.steps" not in page
    # On a scale from 0.4 to 0.85 the points are at (0.5-0.4)/0.45 and (0.75-0.4)/0.45 of 308 pixels from 6.
    assert re.findall(r'circle class="made track-0" cx="([\d.]+)"', page) == ["74.4", "245.6"]
    assert f'value="{first}"' in get("/runs").text


def test_images_of_prompts_do_not_count_in_the_size_of_completions(
    run: Run, get: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_pages, "LARGEST_READ", 1 << 20)
    for number, text in ((1, "same"), (2, "other")):
        run(number, text, 0.5, images={"a" * 64: bytes(2 << 20)})
    page = get("/compare?run=1eb1c584-1111&run=2eb1c584-1111&where=").text
    assert "same to 0" in page
    assert "more than a page reads" not in page


def test_a_filter_shows_the_prompts_where_a_side_is_better(run: Run, get: Any) -> None:
    page = get(f"/compare?run={run(1, 'same', 0.5)}&run={run(2, 'same', 0.5)}&where=b").text
    assert "0 of 3" in page
    assert get("/compare?run=1eb1c&run=1eb1c584").text.count('href="/runs/1eb1c584-1111"') == 1, "one run, named twice"
    assert "3 of 3" in get("/compare?run=1eb1c584-1111&run=2eb1c584-1111&where=").text


def test_the_variants_of_a_sweep_differ_in_the_fields_that_it_sweeps(
    store: Store, tmp_path: Path, run: Run, get: Any
) -> None:
    names = ("beta-0.1", "beta-0.5")
    for number, name in enumerate(names):
        run(number, f"text {number}", 0.5, label=f"{name}/dpo")
    keys = [digest_of(["evaluate", number]) for number in range(len(names))]
    folder = tmp_path / "variants"
    folder.mkdir()
    (folder / "variants.json").write_text("{}")
    variants = [{"name": name, "fields": {"dpo.loss.beta": float(name[5:])}, "metrics": {}} for name in names]
    made = {"key": digest_of("variants"), "stage": "variants", "label": "variants", "config": {"variants": variants}}
    section = store.publish(folder, "section", ProvenanceDraft.model_validate(made | AT))
    with Journal(
        new_record("5eb1c584-1111", "sweep", {"name": "sweep", "method": "sweep"}, store.uri)
    ).open() as journal:
        for name, key in zip(names, keys, strict=True):
            evaluation = store.records.by_key([key])[key].output
            parts = {"stage": "evaluate", "inputs": {}}
            line = {"stage": "evaluate", "key": key, "key_parts": parts, "outputs": {"evaluation": str(evaluation)}}
            journal.stage(f"{name}/dpo/evaluation", "cached", made_by=key, **line)
        line = {"stage": "variants", "key": made["key"], "key_parts": {}, "outputs": {"variants": str(section)}}
        journal.stage("variants", "run", made_by=made["key"], **line)
    page = get("/compare?run=5eb1c584").text
    row = re.findall(r"<code>dpo.loss.beta</code></th>(.*?)</tr>", page)[0]
    assert re.findall(r"<code>([^<]*)</code>", row) == ["0.1", "0.5"]
    assert "A: beta-0.1/dpo" in page


def test_what_cannot_be_compared_is_said(run: Run, get: Any) -> None:
    assert "Choose the runs" in get("/compare").text
    assert "no run" in get("/compare?run=nothing", 404).text
    only = run(1, "same", 0.5)
    page = get(f"/compare?run={only}&a=x&b=99&metric=none&from=-1").text
    assert "0.500 [0.400, 0.600]" in page
    assert "Prompts" not in page
    with Journal(new_record("3eb1c584-1111", "no-evaluation", {}, "/elsewhere")).open():
        pass
    assert "has no evaluated policy" in get("/compare?run=3eb1c584-1111").text


def test_text_of_others_stays_text(run: Run, get: Any) -> None:
    runs = [run(1, HOSTILE, 0.5, dpo={"x": HOSTILE}), run(2, "b", 0.5, label="x<script>alert(1)")]
    text = get(f"/compare?run={runs[0]}&run={runs[1]}&where=").text
    assert "<script>alert" not in text
    assert "<img" not in text
