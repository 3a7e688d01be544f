"""Tasks of lm-eval: their settings, metrics, and a custom task for real."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment_core.errors import DataError, Stopped, UserError
from alignment_core.evaluation.lm_eval_process import metrics_of, task_of
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.lm_eval import LmEvalConfig
from alignment_core.stages.lm_eval import pin_tasks, run

THERE = importlib.util.find_spec("lm_eval") is not None
needed = pytest.mark.skipif(not THERE, reason="the extra `lm-eval` is not in `.venv`: `make peers` runs this")
ROWS = 20
TASK = """task: first_letter
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task in which the right choice is a token that the model predicts, or one that it does not."""
    rows = [{"question": f"row {number}:", "choices": ["a", "b"], "label": number % 2} for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "first.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    return tmp_path / "first.yaml"


def context_of(model: Path, folder: Path) -> Any:
    output, progress = folder / "output", folder / "progress"
    for path in (output, progress):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    stopping = threading.Event()

    def report(*_: Any) -> None:
        if stopping.is_set():
            raise Stopped("stopped")

    return SimpleNamespace(
        inputs={"model": model},
        output=output,
        progress=progress,
        resources=ResourcesConfig(),
        trust_remote_code=False,
        seed=7,
        stopping=stopping,
        report=report,
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("task: mine  # my own task\ndataset_path: json\n", "mine"),
        ("# task: other\n\"task\": 'mine'\n", "mine"),
        ("dataset_path: json\ntask: >-\n  mine\n", "mine"),
        ("group: mine\ntask: [arc_easy, gsm8k]\n", "mine"),
        ("task:\n- task: inner\n- group: inner_group\n  task: [a]\ngroup: mine\n", "mine"),
        ("group: tag_of_old\ntask: mine\nprocess_docs: !function utils.process\n", "mine"),
        ("metadata: {task: inner}\ntask: mine\n", "mine"),
    ],
)
def test_a_task_file_is_read_as_yaml(tmp_path: Path, text: str, name: str) -> None:
    """The names are those that PyYAML reads for the field `task`, or `group` if `task` is a list, as in lm-eval."""
    (tmp_path / "task.yaml").write_text(text)
    assert task_of(tmp_path / "task.yaml") == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dataset_path: json\n", "names no `task`"),
        ("task: [a]\n", "names no `task`"),
        ("task: [a\n", "not readable YAML"),
    ],
)
def test_a_task_file_without_a_name_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(UserError, match=f"task.yaml: .*{says}"):
        task_of(tmp_path / "task.yaml")


def test_metrics_are_named_by_task_metric_and_filter() -> None:
    results = {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.1,
            "sample_len": 4,
        },
        "arc": {"acc,none": 0.25, "acc_stderr,none": "N/A"},
    }
    assert metrics_of(results, {"gsm8k": {"original": 9, "effective": 4}}) == {
        "lm_eval/gsm8k/exact_match@strict-match": 0.5,
        "lm_eval/gsm8k/exact_match@strict-match.stderr": 0.1,
        "lm_eval/gsm8k/exact_match@strict-match.n": 4.0,
        "lm_eval/arc/acc": 0.25,
    }


@pytest.mark.skipif(THERE, reason="lm-eval is there")
def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(
        UserError, match=r"evaluation\.lm_eval: the package lm-eval is not installed; .*alignment\[lm-eval\]"
    ):
        pin_tasks(LmEvalConfig(tasks=("gsm8k",)))


@needed
def test_the_key_follows_the_content_of_a_file_and_not_its_place(task: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.yaml"
    shutil.copyfile(task, elsewhere)
    first, second = (pin_tasks(LmEvalConfig(tasks=(str(path),))) for path in (task, elsewhere))
    assert first.content() == second.content()
    elsewhere.write_text(task.read_text().replace("acc", "acc_norm"))
    assert pin_tasks(LmEvalConfig(tasks=(str(elsewhere),))).content() != first.content()
    assert pin_tasks(LmEvalConfig(tasks=(str(task),), batch_size=2)).content() == first.content()
    with pytest.raises(UserError, match=r"evaluation\.lm_eval\.tasks\.1: .*absent\.yaml: no such file"):
        pin_tasks(LmEvalConfig(tasks=("gsm8k", str(tmp_path / "absent.yaml"))))


def is_right(model: Path, number: int) -> bool:
    """Whether plain ``transformers`` finds the right letter likelier, which comes behind a space."""
    ids = AutoTokenizer.from_pretrained(model)(f"row {number}: ")["input_ids"]
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits[0, -1]
    return bool(logits[ord("b")] > logits[ord("a")]) == bool(number % 2)


@needed
@pytest.mark.slow
def test_a_users_task_is_measured_reproducibly(
    task: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metrics = []
    for limit in (None, 6, 6):
        context = context_of(tiny_model(), tmp_path)
        metrics.append(run(context, pin_tasks(LmEvalConfig(tasks=(str(task),), limit=limit))))
        assert json.loads((context.output / "results.json").read_text())["metrics"] == metrics[-1]
    assert metrics[0]["lm_eval/first_letter/acc"] == sum(map(is_right, [tiny_model()] * ROWS, range(ROWS))) / ROWS
    assert [result["lm_eval/first_letter/acc.n"] for result in metrics] == [ROWS, 6, 6]
    assert metrics[1] == metrics[2]


@needed
@pytest.mark.slow
def test_errors_are_reported_and_a_stop_ends_the_process(
    task: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    context = context_of(tiny_model(), tmp_path)
    with pytest.raises(DataError, match=r"^evaluation\.lm_eval: lm-eval failed: .*no_such_task"):
        run(context, pin_tasks(LmEvalConfig(tasks=("no_such_task",))))
    config = pin_tasks(LmEvalConfig(tasks=(str(task),)))
    context.stopping.set()
    with pytest.raises(Stopped):
        run(context, config)
    task.write_text(task.read_text() + "\n")
    with pytest.raises(UserError, match=r"first\.yaml changed while the run was starting"):
        run(context, config)
