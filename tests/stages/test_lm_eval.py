"""Tasks of lm-eval: their settings, metrics, and a custom task for real."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import httpx2
import pytest
import requests
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment_core.cluster.device import Device
from alignment_core.errors import (
    AlignmentError,
    EnvironmentFault,
    InfrastructureError,
    Stopped,
    StoreError,
    Unavailable,
    UserError,
)
from alignment_core.evaluation.lm_eval_errors import explained
from alignment_core.evaluation.lm_eval_process import measured, metrics_of, task_manager
from alignment_core.evaluation.lm_eval_tasks import read_task
from alignment_core.execution.machines import WarmMachines
from alignment_core.execution.scheduling import FIRST
from alignment_core.execution.warm_actors import WarmActors
from alignment_core.nights.attempt import may_be_caused_by_rows
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.lm_eval import LmEvalConfig
from alignment_core.stages import lm_eval
from alignment_core.stages.lm_eval import LmEvalStageConfig, pin_tasks, run

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


class TrainersAlone(WarmActors):
    """Of a machine with two cores. The trainers do nothing, because the stage only takes their place."""

    @property
    def device(self) -> Device:
        return Device("cpu", 2)

    def ready_trainers(self) -> Any:
        return SimpleNamespace(devices=1, drop=lambda: None, reset=lambda _: True)


def machines_alone() -> WarmMachines:
    machines = WarmMachines(ResourcesConfig(), Path("nowhere"))
    machines.actors = TrainersAlone(ResourcesConfig(), Path("nowhere"))
    return machines


def context_of(model: Path, folder: Path, machines: WarmMachines | None = None, **resources: Any) -> Any:
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
        resources=ResourcesConfig(**resources),
        machines=machines or machines_alone(),
        ticket=FIRST,
        trust_remote_code=False,
        seed=7,
        stopping=stopping,
        report=report,
    )


@pytest.mark.parametrize(
    ("text", "name", "is_group"),
    [
        ("task: mine  # my own task\ndataset_path: json\n", "mine", False),
        ("# task: other\n\"task\": 'mine'\n", "mine", False),
        ("dataset_path: json\ntask: >-\n  mine\n", "mine", False),
        ("group: mine\ntask: [arc_easy, gsm8k]\n", "mine", True),
        ("task:\n- task: inner\n- group: inner_group\n  task: [a]\ngroup: mine\n", "mine", True),
        ("tag: some\ntask: mine\nprocess_docs: !function operator.neg\n", "mine", False),
        ("metadata: {task: inner}\ntask: mine\n", "mine", False),
        ("class: !function operator.neg\ntask: mine\ngroup: some\n", "mine", False),
        ("include: base\n", "based", False),
        ("include: [base]\ntask: mine\n", "mine", False),
    ],
)
def test_a_task_file_is_read_as_lm_eval_reads_it(tmp_path: Path, text: str, name: str, is_group: bool) -> None:
    """By `load_yaml` and `TaskIndex._kind_of` of lm-eval 0.4.13: a file's own fields precede those that it includes; a file
    with a `class` defines a task, one with a `group` a group, of which `task` is the list."""
    (tmp_path / "base").write_text("task: based\n")
    (tmp_path / "task.yaml").write_text(text)
    task = read_task(tmp_path / "task.yaml")
    assert (task.name, task.is_group) == (name, is_group)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dataset_path: json\n", "names no `task`"),
        ("task: [a]\n", "names no `task`"),
        ("task: [a\n", "not readable YAML"),
        ("task: a\nprocess_docs: !other utils.process\n", "not readable YAML"),
        ("group: some\ntask: mine\n", "lists its tasks in `task`; write `tag: some` to mark a single task"),
        ("include: task.yaml\ntask: mine\n", "is included twice"),
        ("- task: mine\n", "is not a mapping"),
    ],
)
def test_a_file_that_lm_eval_does_not_take_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(UserError, match=f"task.yaml: .*{says}"):
        read_task(tmp_path / "task.yaml")


def test_the_digest_follows_all_that_a_file_names(tmp_path: Path) -> None:
    """Code counts without its comments, as in every key; files beside the task's do not count."""
    texts = {
        "task.yaml": "task: mine\ninclude: base\nprocess_docs: !function utils.process\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/*.jsonl}}}}\n",
        "base": "dataset_path: json\ntest_split: test\n",
        "utils.py": "import helper\n\ndef process(docs):\n    return helper.same(docs)\n",
        "helper.py": "def same(docs):\n    return docs\n",
        "rows.jsonl": "{}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)

    def digest() -> str:
        return read_task(tmp_path / "task.yaml").digest

    first = digest()
    (tmp_path / "beside.yaml").write_text("task: mine\n")
    (tmp_path / "helper.py").write_text(f"# a comment\n{texts['helper.py']}")
    assert digest() == first
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace("same", "equal").replace("test_split", "x") + "\n# more\nmore: 1\n")
        assert (name, digest() != first) == (name, True)
        (tmp_path / name).write_text(text)
    assert digest() == first
    (tmp_path / "more.jsonl").write_text("{}\n")
    assert digest() != first


def entry(cfg: dict[str, Any] | None, *tags: str) -> SimpleNamespace:
    """An entry of lm-eval's index, which the quick tests do without: a tag has names of tasks and no configuration."""
    return SimpleNamespace(cfg=cfg, tags=set(tags))


INDEX = {
    "arc_easy": entry({"task": "arc_easy"}, "ai2_arc"),
    "ai2_arc": entry(None, "arc_easy"),
    "humaneval": entry({"task": "humaneval", "unsafe_code": True}),
    "suite": entry(
        {"group": "suite", "task": ["arc_easy", {"group": "part", "task": [{"task": "mine", "repeats": 2}]}]}
    ),
    "mine": entry({"task": "mine"}),
    "code": entry({"group": "code", "task": [{"task": "humaneval", "num_fewshot": 0}]}),
    "broken": entry({"group": "broken", "task": ["arc_easy", "of_a_file"]}),
    "inline": entry({"group": "inline", "task": [{"task": "here", "dataset_path": "json"}]}),
}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["arc_easy", "mine"], ["arc_easy", "mine"]),
        (["mine", "suite"], ["suite"]),
        (["ai2_arc", "arc_easy"], ["ai2_arc"]),
        (["inline"], ["inline"]),
    ],
)
def test_a_task_that_is_part_of_another_one_is_measured_once(names: list[str], left: list[str]) -> None:
    assert measured(names, INDEX) == left


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("arc", "^lm-eval has no task, group or tag 'arc'$"),
        (
            "broken",
            "no task, group or tag 'of_a_file', which broken lists; list the files of your own tasks in `tasks`",
        ),
        ("humaneval", "'humaneval' runs programs that the model writes, and lm-eval has no sandbox for them"),
        ("code", "'humaneval' runs programs"),
    ],
)
def test_tasks_that_lm_eval_cannot_measure_here_are_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        measured([name], INDEX)


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
    with pytest.raises(UserError, match=r"tasks\.1: 'first_letter' is also the name of tasks\.0; rename one"):
        pin_tasks(LmEvalConfig(tasks=(str(task), str(elsewhere))))


@needed
@pytest.mark.slow
def test_the_index_has_the_librarys_tasks_and_the_listed_files_alone(task: Path, tmp_path: Path) -> None:
    """Of lm-eval itself: an unlisted file takes the place of none of its tasks, and a group lists tasks of both."""
    (tmp_path / "gsm8k.yaml").write_text("task: gsm8k\ndataset_path: json\n")
    (tmp_path / "a-backup.yaml").write_text(task.read_text().replace("question", "answer"))
    (tmp_path / "suite.yml").write_text("group: suite\ntask: [first_letter, arc_easy]\n")
    folder = tmp_path / "index"
    folder.mkdir()
    index = task_manager([str(task), str(tmp_path / "suite.yml")], folder, True).task_index
    assert index["gsm8k"].cfg["dataset_path"] != "json"
    assert index["first_letter"].cfg["doc_to_text"] == "{{question}}"
    assert measured(["first_letter", "suite", "gsm8k"], index) == ["suite", "gsm8k"]
    for name in ("humaneval", "mbpp"):
        with pytest.raises(UserError, match=f"'{name}' runs programs"):
            measured([name], index)


ALONE = """
import json, os, pathlib, sys, time
request = json.loads(sys.argv[1])
busy = pathlib.Path(request["model"], "busy")
busy.touch(exist_ok=False)
time.sleep(0.3)
busy.unlink()
metrics = {"threads": int(os.environ["OMP_NUM_THREADS"])}
pathlib.Path(request["output"]).write_text(json.dumps({"metrics": metrics}))
"""
"""Stands for lm-eval's process in quick tests. It fails if two of them run at once."""


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the stage run this code in its process."""
    monkeypatch.setattr(lm_eval, "COMMAND", (sys.executable, "-c", code))


def test_one_model_at_a_time_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages of a run, each of which has a thread of its own."""
    runs(monkeypatch, ALONE)
    machines = machines_alone()
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    def evaluate(folder: Path) -> dict[str, Any]:
        return run(context_of(tmp_path, folder, machines), LmEvalStageConfig(tasks=("task",)))

    with ThreadPoolExecutor(2) as stages:
        assert list(stages.map(evaluate, folders)) == [{"threads": 2}] * 2


@pytest.mark.parametrize(("threads", "has"), [(None, 2), (1, 1)])
def test_the_process_has_the_threads_of_a_single_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, has: int
) -> None:
    """Of two cores all, or as many as the recipe says; the host itself has one thread."""
    runs(monkeypatch, ALONE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = context_of(tmp_path, tmp_path, threads=threads)
    assert run(context, LmEvalStageConfig(tasks=("task",))) == {"threads": has}


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (
            "print('12%|#', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
            InfrastructureError,
            r"lm-eval's process was killed by SIGKILL, probably by the kernel because memory ran out \(its log: .*\)$",
        ),
        ("os.kill(os.getpid(), signal.SIGTERM)", InfrastructureError, r"lm-eval's process was killed by SIGTERM \("),
        ("sys.exit('no module')", InfrastructureError, r"lm-eval's process ended with exit code 1: no module \("),
        ("fails('Unavailable', 'no Hub')", Unavailable, r"no Hub \(its log: .*lm-eval\.log\)$"),
        ("fails('UserError', 'no task')", UserError, r"no task \("),
    ],
)
def test_the_end_of_the_process_decides_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[AlignmentError], says: str
) -> None:
    """What kills a process, and a server that does not answer, may pass; a wrong task does not."""
    fails = (
        "def fails(*described):\n"
        "    pathlib.Path(json.loads(sys.argv[1])['failure']).write_text(json.dumps(described))\n"
        "    sys.exit(1)\n"
    )
    runs(monkeypatch, f"import json, os, pathlib, signal, sys\n{fails}{code}\n")
    with pytest.raises(AlignmentError, match=rf"^evaluation\.lm_eval: {says}") as raised:
        run(context_of(tmp_path, tmp_path), LmEvalStageConfig(tasks=("task",)))
    assert type(raised.value) is kind
    assert raised.value.retryable is issubclass(kind, InfrastructureError)


def answer(status: int) -> HfHubHTTPError:
    """The error of the Hub's client for an answer with this status."""
    request = httpx2.Request("GET", "https://huggingface.co/api/datasets/x")
    return HfHubHTTPError(f"HTTP {status}", response=httpx2.Response(status, request=request))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def unhandled(error: Exception, earlier: Exception) -> Exception:
    """An error that was raised, ``from None``, while another one was handled."""
    error.__context__ = earlier
    error.__suppress_context__ = True
    return error


NOT_THERE = "Couldn't reach 'x' on the Hub (ConnectError)"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ConnectionError(NOT_THERE), Unavailable, "Couldn't reach 'x' on the Hub"),
        (
            caused(LocalEntryNotFoundError("not in the cache"), httpx2.ConnectError("refused")),
            Unavailable,
            "not in the",
        ),
        (httpx2.ReadTimeout("too slow"), Unavailable, "too slow"),
        (requests.exceptions.ReadTimeout("too slow"), Unavailable, "too slow"),
        (URLError("no route"), Unavailable, "no route"),
        (answer(503), Unavailable, "HTTP 503"),
        (answer(429), Unavailable, "HTTP 429"),
        (answer(404), UserError, "lm-eval failed: HfHubHTTPError: HTTP 404"),
        (HTTPError("https://a", 502, "Bad Gateway", Message(), BytesIO()), Unavailable, "502"),
        (HTTPError("https://a", 404, "Not Found", Message(), BytesIO()), UserError, "404"),
        (caused(ConnectionError(NOT_THERE), OfflineModeIsEnabled("offline")), EnvironmentFault, "HF_HUB_OFFLINE"),
        (unhandled(ConnectionError(NOT_THERE), OfflineModeIsEnabled("off")), EnvironmentFault, "HF_HUB_OFFLINE"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), EnvironmentFault, "batches of 8 .*lm_eval.batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), EnvironmentFault, "memory ran out"),
        (OSError(errno.ENOSPC, "No space left on device"), EnvironmentFault, "the disk is full"),
        (KeyError("question"), UserError, "lm-eval failed: KeyError: 'question'"),
        (UserError("lm-eval has no task 'x'"), UserError, "^lm-eval has no task 'x'$"),
        (StoreError("as it was"), StoreError, "^as it was$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_of_libraries_are_known_by_their_remedy(error: Exception, kind: type[Exception], says: str) -> None:
    """And no rows of a night are given up for them, which lm-eval never reads."""
    known = explained(error, batch_size=8)
    assert type(known) is kind
    with pytest.raises(kind, match=says):
        raise known
    assert not may_be_caused_by_rows(known)


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
def test_a_listed_file_is_measured_and_not_one_beside_it(
    task: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from before an edit comes first by its name: the edit turned all labels round, so that every answer is right
    where it was wrong. A second task is a `.yml` that includes the first and has its own function, both within a group."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copyfile(task, tmp_path / "a-backup.yaml")
    task.write_text(task.read_text().replace("doc_to_target: label", 'doc_to_target: "{{1 - label}}"'))
    (tmp_path / "second.yml").write_text("include: first.yaml\ntask: second\ndoc_to_target: !function utils.target\n")
    (tmp_path / "utils.py").write_text("def target(doc):\n    return doc['label']\n")
    (tmp_path / "suite.yaml").write_text(
        "group: suite\ntask: [first_letter, second]\naggregate_metric_list: [{metric: acc}]\n"
    )
    paths = tuple(str(tmp_path / name) for name in ("suite.yaml", "first.yaml", "second.yml"))
    metrics = run(context_of(tiny_model(), tmp_path), pin_tasks(LmEvalConfig(tasks=paths)))
    right = sum(map(is_right, [tiny_model()] * ROWS, range(ROWS))) / ROWS
    assert metrics["lm_eval/first_letter/acc"] == pytest.approx(1 - right)
    assert metrics["lm_eval/second/acc"] == pytest.approx(right)
    assert metrics["lm_eval/suite/acc"] == pytest.approx(0.5)


@needed
@pytest.mark.slow
def test_errors_are_reported_and_a_stop_ends_the_process(
    task: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    context = context_of(tiny_model(), tmp_path)
    with pytest.raises(UserError, match=r"^evaluation\.lm_eval: lm-eval has no task, group or tag 'no_such_task'"):
        run(context, pin_tasks(LmEvalConfig(tasks=("no_such_task",))))
    config = pin_tasks(LmEvalConfig(tasks=(str(task),)))
    context.stopping.set()
    with pytest.raises(Stopped):
        run(context, config)
    task.write_text(task.read_text() + "\n")
    with pytest.raises(UserError, match=r"first\.yaml, or a file that it names, changed since the run started"):
        run(context, config)
