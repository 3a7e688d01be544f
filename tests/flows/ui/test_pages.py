"""The pages of `align ui`: what they show, what they refuse, and that text of others stays text."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from starlette.testclient import TestClient

from alignment.flows.ui.app import application
from alignment.flows.ui.curves import curve
from alignment.flows.ui.rendering import LONGEST_TEXT, TEMPLATES
from alignment_core.artifacts import Reference, Store
from alignment_core.evaluation.gates import judged
from alignment_core.journal import Journal, new_record
from alignment_core.lineage.decision import Decision, record
from alignment_core.recipes import Gate
from tests.flows.ui.conftest import TOKEN, Make

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202eabc{{ 7 * 7 }}"


TABS = ("", "/touched", "/changed", "/promoted", "/rebuild", "/files")


@pytest.mark.parametrize("tab", TABS)
def test_every_page_of_an_artifact_answers_with_its_question_marked(make: Make, get: Any, tab: str) -> None:
    data = make("sft/data", "dataset", {"text": "hello"}, stage="dataset")
    model = make("sft", inputs={"data": data}, metrics={"loss": 0.5, "loss.first": 2.0})
    for reference in (data, model):
        page = get(f"/artifacts/{reference}{tab}").text
        assert page.count('aria-current="page"') == 2, "the page and the question"
        assert reference.digest[:12] in page


def test_what_made_it_shows_lanes_evidence_and_the_flag_of_the_tag(make: Make, get: Any, store: Store) -> None:
    base = make("model", stage="base_model")
    rows = make("sft/data", "dataset", stage="dataset", inputs={"tokenizer": base})
    sft = make("sft", inputs={"model": base, "data": rows})
    rollouts = make("sft/evaluation/generate", "rollouts", stage="generate", inputs={"policy": sft})
    scores = make("sft/evaluation/score", "scores", stage="score", inputs={"rollouts": rollouts})
    metrics = {"accuracy": 0.75, "accuracy.low": 0.7, "accuracy.high": 0.8, "accuracy.n": 384.0}
    make("sft/evaluation", "evaluation", stage="evaluate", inputs={"scores": scores}, metrics=metrics)
    store.tags.move("policy/production", sft, None, "gates passed: accuracy 0.75")
    page = get(f"/artifacts/{sft}").text
    assert re.findall(r'<section class="lane" aria-label="([^"]*)"', page) == ["model, 1", "sft, 2"]
    for text in ("sft/data", "[0.700, 0.800]", "n 384", "gates passed: accuracy 0.75", 'class="flag"'):
        assert text in page


def test_what_it_touched_lists_tags_first_then_models(make: Make, get: Any, store: Store) -> None:
    data = make("data", "dataset", stage="dataset")
    first = make("first", inputs={"data": data})
    second = make("second", inputs={"model": first})
    for model in (first, second):
        store.tags.move("policy/production", model, store.tags.get("policy/production"), "better")
    page = get(f"/artifacts/{data}/touched").text
    assert "2 artifacts made from it" in page
    assert page.index(second.digest[:6]) < page.index(first.digest[:6]), "what the tag points to now comes first"


def test_what_changed_is_compared_with_its_predecessor_a_tag_or_any_other(make: Make, get: Any, store: Store) -> None:
    parts = [{"stage": "sft", "config": {"beta": beta}} for beta in (0.1, 0.5)]
    first = make("round-1/dpo", key_parts=parts[0], metrics={"loss": 0.5})
    second = make("round-2/dpo", key_parts=parts[1], metrics={"loss": 0.25}, inputs={"model": first})
    store.tags.move("policy/production", first, None, "first")
    page = get(f"/artifacts/{second}/changed").text
    for text in ("it is one round further, it was made from the other", "0.1 → 0.5", "-0.25"):
        assert text in page
    assert get(f"/artifacts/{second}/changed?against=policy/production").text.count("0.1 → 0.5") == 1
    assert "matches nothing in" in get(f"/artifacts/{second}/changed?against=nothing").text


def test_why_promoted_shows_the_arithmetic_of_decisions_and_refusals(make: Make, get: Any, store: Store) -> None:
    start, policy = make("sft"), make("dpo")
    gates = (Gate(metric="accuracy", min_gain=0.1), Gate(metric="win_rate", min=0.6))
    metrics = {"accuracy": 0.75, "win_rate": 0.5, "win_rate.low": 0.45, "win_rate.high": 0.55}
    found = tuple(judged(gates, metrics, {"accuracy": 0.5}, "sft"))
    reasons = tuple(sentence for gate in found for sentence in gate.failures)
    compared = {"tag": "policy/production", "policy": policy, "previous": start, "beside": "`sft` of this run"}
    record(store, Decision(**compared, passed=False, gates=found, reasons=reasons, run="0eb1c584"))
    page = " ".join(get(f"/artifacts/{policy}/promoted").text.split())
    assert "Not promoted to policy/production" in page
    assert "0.750 − 0.500 = 0.250 ≥ 0.100" in page
    assert "0.500 [0.450, 0.550] · at least 0.600" in page
    assert "win_rate is 0.5 against sft, 0.1 below the minimum of 0.6" in page
    assert "No run decided about it" in get(f"/artifacts/{start}/promoted").text


def test_search_finds_labels_digests_tags_sources_and_runs(make: Make, get: Any, store: Store) -> None:
    config = {"sources": [{"path": "/d/rows_1.jsonl", "sha256": "c" * 64}]}
    data = make("sft/data", "dataset", stage="dataset", config=config)
    model = make("sft", inputs={"data": data}, run_ids={"prefect": "0eb1c584-1111"})
    other = make("other")
    store.tags.move("policy/production", other, None, "")

    def found(query: str) -> set[Reference]:
        page = get(f"/artifacts?q={query}").text
        return {reference for reference in (data, model, other) if str(reference) in page}

    assert found("") == {data, model, other}
    assert found("sft/data") == {data}
    assert found(other.digest[:12]) == {other}
    assert found("production") == {other}
    assert found("rows_1.jsonl") == {data}
    assert found("rowsX1.jsonl") == set(), "an underscore is no pattern"
    assert found("0eb1c584") == {model}
    assert found("%25") == set()
    page = get("/artifacts?kind=dataset").text
    assert re.findall(r'href="/artifacts/(\w+@[^"]*)"', page) == [str(data)]


def test_search_by_a_metric_compares_its_value(make: Make, get: Any) -> None:
    values = {"a": 0.5, "b": 0.75, "c": -1.0, "d": "0.9", "e": True, "f": float("nan")}
    made = {name: make(name, metrics={"accuracy": value, "accuracy.low": 0.99}) for name, value in values.items()}

    def names(query: str) -> set[str]:
        page = get(f"/artifacts?q={query}").text
        return {name for name, reference in made.items() if str(reference) in page}

    assert names("accuracy > 0.5") == {"b"}
    assert names("accuracy>=0.5") == {"a", "b"}
    assert names("accuracy%3D0.75") == {"b"}
    assert names("accuracy<-0.5") == {"c"}
    assert names("accuracy>1e-1") == {"a", "b"}
    assert names("loss>0") == names("accuracy.low>0") == set()


def test_a_list_is_shown_fifty_at_a_time_with_the_filters_in_the_address(make: Make, get: Any) -> None:
    for number in range(51):
        make(f"model-{number}")
    first, second = get("/artifacts?q=model-").text, get("/artifacts?q=model-&from=50").text
    assert first.count("<tr><td>") == 50
    assert second.count("<tr><td>") == 1
    assert 'href="/artifacts?q=model-&amp;kind=&amp;from=50"' in first
    assert "model-50" in first, "the latest first"
    assert get("/artifacts?from=-7").text.count("<tr><td>") == 50
    for text in ("x", "²", "1" * 5000):
        assert get(f"/artifacts?from={text}").text.count("<tr><td>") == 50
    assert "give at most 500" in get("/artifacts?q=" + "_" * 25_000, 400).text


def test_text_of_others_stays_text(make: Make, get: Any, store: Store) -> None:
    row = {"prompt": HOSTILE, "chosen": HOSTILE, "rejected": "x" * 1_000_000}
    config = {"sources": [{"path": f"/d/{HOSTILE}", "sha256": "c" * 64}]}
    data = make(HOSTILE, "dataset", row, stage="dataset", config=config, metrics={HOSTILE: 1.0})
    model = make(f"{HOSTILE}/dpo", inputs={"data": data}, run_ids={"prefect": HOSTILE}, code_version=HOSTILE)
    store.tags.move("policy/production", model, None, HOSTILE)
    pages = [f"/artifacts/{reference}{tab}" for reference in (data, model) for tab in TABS]
    for path in [
        *pages,
        "/artifacts",
        "/artifacts?q=<script>alert(1)",
        f"/artifacts/{model}/changed?against=<script>alert",
    ]:
        text = get(path).text
        assert "<script>alert" not in text
        assert "<img" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        assert "abc49" not in text, "nothing of it is a template"
        assert len(text) < 100_000
    assert "<script>alert" not in get("/artifacts/<script>alert(1)", 404).text


def test_an_answer_carries_a_policy_that_lets_only_its_own_files_load(make: Make, get: Any) -> None:
    make("one")
    for path in ("/artifacts", "/static/ui.js", "/static/style.css", "/runs", "/nights"):
        headers = get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "same-origin")
    text = get("/artifacts").text
    assert not re.search(r'<script(?! src="/static/)', text)
    assert "style=" not in text
    assert not re.search(r'(src|href)="(?![/#])', text)


def test_another_host_name_and_changes_are_refused(make: Make, get: Any, store: Store) -> None:
    assert get("/artifacts", 400, host="evil.example").headers["content-security-policy"]
    for host in ("127.0.0.1:8000", "localhost:8000"):
        get("/artifacts", host=host)
    client = TestClient(application(store, TOKEN), base_url="http://127.0.0.1")
    assert {client.request(method, "/artifacts").status_code for method in ("POST", "PUT", "DELETE")} == {403}
    assert client.get("/static/..%2fapp.py").status_code == 404


def test_an_unknown_artifact_and_an_empty_store_are_said(get: Any) -> None:
    assert "There is no artifact yet" in get("/artifacts").text
    assert "has no artifact" in get("/artifacts/abcdef", 404).text
    assert "no run yet" in get("/runs/abcdef", 404).text
    assert "No run yet" in get("/runs").text
    assert "No night yet" in get("/nights").text


@pytest.fixture
def journal_of_a_run(store: Store) -> Journal:
    return Journal(new_record("0eb1c584-1111", "quickstart", {"name": "quickstart"}, store.uri))


def test_a_run_shows_its_stages_progress_and_waits_while_it_goes_on(journal_of_a_run: Journal, get: Any) -> None:
    with journal_of_a_run.open() as journal:
        parts = {"stage": "sft", "inputs": {}}
        journal.stage("sft", "running", stage="sft", key="1" * 64, key_parts=parts)
        journal.progress("sft", 3, 10, "steps")
        journal.stage("dpo", "running", stage="dpo", key="2" * 64, key_parts=parts)
        journal.waits("dpo", HOSTILE)
        page = get("/runs/0eb1c584").text
        assert "3 of 10 steps" in page
        assert 'data-events="/runs/0eb1c584-1111/events"' in page
        assert "waits for &lt;/td&gt;" in page
        assert "running" in get("/runs").text
        journal.stage("sft", "run", outputs={"model": f"model@sha256:{'3' * 64}"}, seconds=7.0)
    page = get("/runs/0eb1c584").text
    assert "completed" in page
    assert "data-events" not in page
    assert f"/artifacts/model@sha256:{'3' * 64}" in page
    get("/runs/0eb1c584/report", 404)


def test_the_events_of_a_run_end_with_it(journal_of_a_run: Journal, get: Any) -> None:
    with journal_of_a_run.open() as journal:
        journal.stage("sft", "run", stage="sft", key="1" * 64, key_parts={"stage": "sft", "inputs": {}})
    answer = get("/runs/0eb1c584/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("retry: 1000\n\nevent: stages\ndata: ")
    assert answer.text.endswith("event: over\ndata: completed\n\n")


def test_a_long_curve_is_drawn_whole() -> None:
    drawn = curve("loss", [(step, step % 7 / 3) for step in range(1000)])
    assert drawn is not None
    text = TEMPLATES.from_string("{% for line in lines %}{{ line }}{% endfor %}").render(lines=drawn.lines)
    assert len(text) > LONGEST_TEXT
    assert all(re.fullmatch(r"[\d.]+,[\d.]+", point) for point in text.split(" "))


def test_the_pages_import_no_torch() -> None:
    code = "import sys, alignment.flows.ui.app; print(sum(name in sys.modules for name in ('torch', 'ray', 'vllm')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
