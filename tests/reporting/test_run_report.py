"""The report of a run in its folder: tables, curves, text and lineage, from the journal and the store."""

from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment.flows import runs
from alignment.flows.comparison import Compared
from alignment_core.artifacts import ProvenanceDraft, Store, open_store
from alignment_core.artifacts.attachments import attach
from alignment_core.canonical import digest_of
from alignment_core.composition.graph import BranchFailed
from alignment_core.composition.results import Outputs
from alignment_core.errors import EnvironmentFault, Stopped, UserError
from alignment_core.evaluation.gates import refusals
from alignment_core.execution.base import StageResult
from alignment_core.execution.curve import CURVE, Curve
from alignment_core.journal import Journal, folder_of, new_record, read
from alignment_core.lineage.samples import Row
from alignment_core.recipes import Gate, parse_recipe
from alignment_core.reporting.head import head
from alignment_core.reporting.run_report import RunReport, fenced, policies_of, run_report
from alignment_core.reporting.unfinished import Unfinished, unfinished_report
from alignment_core.stages.report import cell, markdown
from alignment_core.tracking import Progress
from alignment_core.tracking.metrics_file import MetricsFile
from tests.answering import answering
from tests.tracking.watched import recipe_with, result

EARLIER, NOW = "0" * 8, "1" * 8


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    return open_store(None)


def finished(store: Store, tmp_path: Path, label: str, run_id: str, **metrics: float) -> StageResult:
    """A stage that run ``run_id`` made, and three of its reports, in the run's folder and beside the artifact."""
    folder = tmp_path / "made" / label
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(label)
    draft = ProvenanceDraft(key=digest_of(label), stage="sft", label=label, run_ids={"prefect": run_id})
    reference = store.publish(folder, "model", draft)
    folder_of(run_id).mkdir(parents=True, exist_ok=True)
    file, curve = MetricsFile(folder_of(run_id)), Curve()
    for step in (1, 2, 3):
        reported = {"loss": 1 / step, "grad_norm": 1.0}
        file.progress(label, Progress(step, 3, "steps", reported))
        curve.add(step, "steps", reported)
    file.ended(True)
    attach(store, reference, {CURVE: curve.to_bytes()})
    return result(label, **metrics).model_copy(update={"outputs": {"model": reference}, "key": draft.key})


def test_a_report_has_curves_of_this_run_and_of_the_runs_of_cached_stages(store: Store, tmp_path: Path) -> None:
    first = finished(store, tmp_path, "sft", EARLIER, loss=0.3)
    cached = first.model_copy(update={"state": "cached"})
    second = finished(store, tmp_path, "again", NOW, **{"loss": 0.25, "loss.first": 1.0, "warnings": ["it is odd"]})  # type: ignore[arg-type]
    report = run_report(store, "small", NOW, [cached, second], {"policy": second.reference})
    assert "**Warning:** again: it is odd" in report.markdown
    assert "| again | run |  |  | 1.0 | loss 1.000 → 0.250 |" in report.markdown
    assert "### sft, again\n\n![sft](curves-sft.svg)" in report.markdown
    curves = report.pictures["curves-sft.svg"]
    assert all(f">{text}</text>" in curves for text in ("loss", "steps", "sft", "again"))
    assert ">again</text>" in report.pictures["lineage.svg"]
    place = report.write(tmp_path)
    assert {path.name for path in tmp_path.glob("*.svg")} == {"curves-sft.svg", "lineage.svg"}
    assert place.read_text() == report.markdown


def test_a_result_that_was_made_in_another_home_has_its_curve(store: Store, tmp_path: Path) -> None:
    """The other home's journal is not here: the curve is stored beside the artifact."""
    stage = finished(store, tmp_path, "sft", EARLIER, loss=0.3)
    shutil.rmtree(folder_of(EARLIER))
    cached = stage.model_copy(update={"state": "cached"})
    assert ">loss<" in run_report(store, "small", NOW, [cached], {}).pictures["curves-sft.svg"]


def test_the_head_has_date_duration_model_and_data(store: Store) -> None:
    """From 2026-11-25 10:00:00 to 11:02:03 it took 1 h 2 min."""
    recipe = recipe_with(
        {}, sft={"data": {"sources": [{"task": "reverse"}, {"path": "org/name<br>"}]}}, model="org/small"
    )
    record = new_record(NOW, "small", recipe.model_dump(mode="json"), store.uri)
    record = record.model_copy(update={"started_at": "2026-11-25T11:00:00.000+01:00", "attempt": 2})
    folder_of(NOW).mkdir(parents=True)
    (folder_of(NOW) / "run.json").write_text(record.model_dump_json())
    assert head(NOW, datetime(2026, 11, 25, 11, 2, 3, tzinfo=UTC)) == [
        "- Date: 2026-11-25 10:00 UTC (attempt 2)",
        "- Duration: 1 h 2 min",
        "- Method: sft",
        "- Model: org/small",
        "- Data: sft.data: reverse, org/name\\<br>",
    ]
    assert "- Model: org/small" in run_report(store, "small", NOW, [], {}).markdown
    assert head(EARLIER) == []


def test_policies_stay_in_the_order_of_their_creation(store: Store, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.md").write_text("# Run small\n\n| policy |\n|---|\n")
    policies = {"round-1": {"accuracy": 0.5}, "sft": {"accuracy": 0.25, "accuracy.low": 0.2, "accuracy.high": 0.3}}
    config, key = {"policies": ["sft", "round-1"]}, digest_of("report")
    draft = ProvenanceDraft(key=key, stage="report", label="report", config=config, metrics={"policies": policies})
    reference = store.publish(tmp_path / "report", "report", draft)
    cached = result("report", policies=policies).model_copy(
        update={"stage": "report", "state": "cached", "key": key, "outputs": {"report": reference}}
    )
    assert list(policies_of(store, cached)) == ["sft", "round-1"]
    report = run_report(store, "small", NOW, [cached], {"report": reference})
    assert "![metrics of the policies](policies.svg)" in report.markdown
    assert 0 < report.pictures["policies.svg"].index(">sft<") < report.pictures["policies.svg"].index(">round-1<")


@pytest.mark.parametrize("value", [None, "NaN", "Infinity"])
def test_a_metric_that_is_not_finite_is_shown_and_passes_no_gate(store: Store, value: Any) -> None:
    """It is null in the result of a stage that ran, and text in that of a cached one."""
    metrics = {"confidence": 0.95, "lm_eval/words/perplexity": value}
    compared = result("report", policies={"sft": metrics}).model_copy(update={"stage": "report", "key": "0" * 64})
    policies = policies_of(store, compared)
    gate = Gate(metric="lm_eval/words/perplexity", max=100)
    assert len(refusals((gate,), policies["sft"], {}, "start")) == 1
    shown = json.loads(json.dumps(policies).replace("NaN", "null"))["sft"]  # as an outcome has them
    assert (cell(shown, "lm_eval/words/perplexity"), cell(policies["sft"], "lm_eval/words/perplexity")) == ("—", "nan")


def test_the_report_has_the_comparison_of_a_promotion_if_there_is_one(store: Store, tmp_path: Path) -> None:
    results = []
    for label, policies in (("report", ["sft"]), ("promotion/report", ["sft", "production"])):
        folder, content = tmp_path / label.replace("/", "-"), {name: {"accuracy": 0.5} for name in policies}
        folder.mkdir()
        (folder / "report.md").write_text(f"# Run small\n\n| {label} |\n|---|\n")
        draft = ProvenanceDraft(
            key=digest_of(label), stage="report", label=label, config={"policies": policies}, metrics={}
        )
        news = {"stage": "report", "key": draft.key, "outputs": {"report": store.publish(folder, "report", draft)}}
        results.append(result(label, policies=content).model_copy(update=news))
    report = run_report(store, "small", NOW, results, {})
    assert "| promotion/report |\n" in report.markdown
    assert ">production<" in report.pictures["policies.svg"]


def test_a_table_names_the_opponent_of_each_win_rate() -> None:
    metrics = {"confidence": 0.95, "win_rate": 0.5}
    content: dict[str, Any] = {
        "title": "Run small",
        "baseline": "start",
        "against": {"sft against production": "production"},
        "policies": {"sft": metrics, "sft against production": metrics},
        "notes": {},
        "overlap": {"overlap": 0},
    }
    sentence = "Win rates are against start, in the row 'sft against production' against production. Intervals"
    assert sentence in markdown(content, list(content["policies"]))


def test_the_page_embeds_its_images_and_loads_nothing_else(store: Store, tmp_path: Path) -> None:
    stage = finished(store, tmp_path, "sft", NOW, loss=0.3)
    page = run_report(store, "small", NOW, [stage], {"policy": stage.reference}).html
    assert page.count('src="data:image/svg+xml;base64,') == 2
    assert page.count("src=") == 2
    assert "<table>" in page


def test_text_of_a_model_stays_text() -> None:
    report = RunReport()
    row: Row = {
        "prompt": "a\n```\n<script>alert(1)</script>",
        "sft": "![x](http://127.0.0.1/x.png)",
        "reward": 0.123456,
    }
    report.say(*fenced(row))
    assert "<script>" not in report.html
    assert "<img" not in report.html
    assert "reward: 0.1235" in report.html


def test_a_server_that_refuses_artifacts_of_the_ui_fails_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from alignment.flows import run_page

    logger = logging.Logger("run")  # there is no run here, and Prefect may take the root logger's handlers
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(run_page, "get_run_logger", lambda: logger)
    with answering(401) as (port, _), temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
        run_page.leave_tables([], {})
    assert "the run's tables: not on the run's page: PrefectHTTPStatusError" in caplog.text


def test_report_of_a_failed_run_has_its_results_and_how_to_resume(store: Store, tmp_path: Path) -> None:
    """``sft`` is done, ``again`` was cached, ``rl`` failed at its third step, and ``report`` never began."""
    for label, run_id in (("sft", NOW), ("again", EARLIER)):
        finished(store, tmp_path, label, run_id, loss=0.3)
    record = new_record(NOW, "small", {}, store.uri)
    file = MetricsFile(folder_of(NOW))
    for step in (1, 2):
        file.progress("rl", Progress(step, 20, "steps", {"reward": step / 8}))
    file.ended(False)
    with Journal(record).open() as journal:
        for label in ("sft", "again"):
            journal.stage(label, "running", stage="sft", key=digest_of(label), key_parts={"inputs": {}})
        journal.stage("again", "cached")
        journal.stage("rl", "running", stage="rl", key=digest_of("rl"), key_parts={"inputs": {}})
        journal.progress("rl", 2, 20, "steps")
        journal.stage("rl", "failed", reason="rl: ![x](http://127.0.0.1/x.png)")
        journal.end("failed", ValueError("it failed"))
    why = Unfinished("failed", "rl: ![x](http://127.0.0.1/x.png)", "`align resume 11111111` continues.", "/logs/x.log")
    report = unfinished_report(store, "small", NOW, ["sft", "again", "rl", "report"], why)
    for line in (
        "# Run small failed",
        "problem: rl: ![x](http://127.0.0.1/x.png)",
        "`align resume 11111111` continues.",
        "Its log is `/logs/x.log`.",
        "| sft | run |  |  |  |  |",
        "| again | cached |  |  |  |  |",
        "| rl | failed |  |  |  | 2 of 20 steps |",
        "| report | not started |  |  |  |  |",
    ):
        assert line in report.lines or line in report.markdown.splitlines()
    assert "### sft, again\n\n![sft](curves-sft.svg)" in report.markdown
    assert ">reward</text>" in report.pictures["curves-rl.svg"]
    assert "http://127.0.0.1/x.png" not in re.findall('src="([^"]*)"', report.html)


def test_a_stage_that_is_not_installed_is_reported_by_its_label(store: Store, tmp_path: Path) -> None:
    finished(store, tmp_path, "rl/policy", EARLIER)
    with Journal(new_record(NOW, "small", {}, store.uri)).open() as journal:
        journal.stage("rl/policy", "running", stage="part", key=digest_of("rl/policy"), key_parts={"inputs": {}})
        journal.stage("rl/policy", "cached")
    why = Unfinished("was stopped", None, "`align resume 11111111` continues.", "/logs/x.log")
    assert "| rl/policy | cached |  |  |  |  |" in unfinished_report(store, "small", NOW, [], why).lines


@pytest.mark.parametrize(
    ("error", "cancelled", "heading", "sentence", "how"),
    [
        (UserError("row 3 has no label"), False, "failed", "row 3 has no label", "Once that is fixed, `align resume"),
        (ZeroDivisionError("by zero"), False, "failed", "ZeroDivisionError: by zero", "continues where it stopped"),
        (KeyboardInterrupt(), False, "was interrupted", None, "continues where it stopped"),
        (SystemExit(143), False, "was stopped", None, "continues where it stopped"),
        (Stopped("the run was stopped"), True, "was cancelled", None, "continues where it stopped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_report_of_an_unfinished_run_has_the_reason(
    error: BaseException, cancelled: bool, heading: str, sentence: str | None, how: str
) -> None:
    from alignment.flows.run_page import why_unfinished

    reason = why_unfinished("0123456789", error, cancelled, "/logs/x.log")
    assert (reason.what, reason.sentence) == (heading, sentence)
    assert how in reason.how
    assert "`align resume 01234567`" in reason.how


RECIPE = parse_recipe({"method": "sft", "name": "small", "model": "some/model", "sft": {"data": "rows.jsonl"}})


@pytest.mark.parametrize(
    ("error", "cancelled", "status"),
    [
        (ValueError("wrong"), False, "failed"),
        (Stopped("ended by the services"), False, "stopped"),
        (KeyboardInterrupt(), False, "stopped"),
        (Stopped("cancelled"), True, "cancelled"),
    ],
    ids=["failed", "stopped", "interrupted", "cancelled"],
)
def test_the_journal_has_the_outcome_of_a_run_before_its_report_is_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException, cancelled: bool, status: str
) -> None:
    """The process may be killed meanwhile."""
    seen = _opening(store, monkeypatch, cancelled)
    with nullcontext() if cancelled else pytest.raises(type(error)), runs.open_run(RECIPE):
        raise error
    assert [seen_status for seen_status, _ in seen] == [status]
    assert read(NOW).status == status


def test_a_comparison_that_could_not_be_made_ends_the_run_as_its_cause(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages behind samples of production that may fail may fail, too, such as those that ask a judge; without the table the
    run has no result."""
    seen = _opening(store, monkeypatch)
    cause = EnvironmentFault("the judge does not answer")

    def result() -> Any:
        raise BranchFailed(cause)

    compared = Compared(None, "sft", "production", SimpleNamespace(result=result))
    monkeypatch.setattr(runs, "compare", lambda *_: compared)
    with pytest.raises(EnvironmentFault, match="the judge does not answer"), runs.open_run(RECIPE) as opened:
        opened.outputs = Outputs()
    assert seen == [("failed", cause)]


def _opening(store: Store, monkeypatch: pytest.MonkeyPatch, cancelled: bool = False) -> list[tuple[str, BaseException]]:
    """Let runs open without a host or a server. Gets the journal's status and the cause at the time of the last report."""

    @contextmanager
    def opened(*_: Any) -> Any:
        with Journal(new_record(NOW, "small", {}, store.uri)).open() as journal:
            host = SimpleNamespace(close=lambda: None)
            yield SimpleNamespace(journal=journal, host=host, steps=[], store=store, wait=lambda: None)

    seen: list[tuple[str, BaseException]] = []
    watch = SimpleNamespace(lost=False, cancelled=cancelled)
    monkeypatch.setattr(runs, "_running", opened)
    monkeypatch.setattr(runs, "Watch", lambda *_: nullcontext(watch))
    monkeypatch.setattr(runs, "_leave_unfinished", lambda *given: seen.append((read(NOW).status, given[2])))
    monkeypatch.setattr(runs, "_prune", lambda *_: None)
    return seen


def test_the_section_of_the_last_stage_of_a_kind_is_shown(store: Store, tmp_path: Path) -> None:
    results = []
    for number in (1, 2):
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        (folder / "section.md").write_text(f"## Rounds\n\nSo far {number}.\n")
        label, key = f"round-{number}/gain", digest_of(number)
        reference = store.publish(folder, "section", ProvenanceDraft(key=key, stage="gain", label=label))
        news = {"stage": "gain", "key": key, "outputs": {"gain": reference}}
        results.append(result(label).model_copy(update=news))
    report = run_report(store, "small", NOW, results, {})
    assert "## Rounds\n\nSo far 2.\n" in report.markdown
    assert "So far 1" not in report.markdown


def test_the_section_of_each_branch_is_shown_with_its_name(store: Store, tmp_path: Path) -> None:
    results = []
    for number, label in enumerate(("a/round-1/gain", "a/round-2/gain", "b/round-1/gain", "c/sft/evaluation/gain")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "section.md").write_text(f"## Rounds\n\nSo far {number}.\n")
        reference = store.publish(folder, "section", ProvenanceDraft(key=digest_of(label), stage="gain", label=label))
        news = {"stage": "gain", "key": digest_of(label), "outputs": {"gain": reference}}
        results.append(result(label).model_copy(update=news))
    report = run_report(store, "small", NOW, results, {})
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        assert f"## Rounds: {name}\n\nSo far {number}.\n" in report.markdown
    assert "So far 0" not in report.markdown
