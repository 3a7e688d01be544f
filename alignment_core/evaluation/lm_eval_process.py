"""The process in which lm-eval evaluates a model: ``python -m alignment_core.evaluation.lm_eval_process JSON``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alignment_core.errors import UserError
from alignment_core.evaluation.directions import STATED
from alignment_core.evaluation.lm_eval_errors import describe
from alignment_core.evaluation.lm_eval_tasks import read_task
from alignment_core.recipes.sections.lm_eval import PREFIX

DEFINES_A_MEMBER = {"group", "dataset_path", "custom_dataset"}
"""Fields, of which lm-eval needs one to make a member of a group that is not in its index."""


def main(request: dict[str, Any]) -> None:
    """Evaluate, and write the metrics together with lm-eval's own results. Completions are not kept."""
    import lm_eval

    files = {file: read_task(Path(file)) for file in request["files"]}
    names = [files[task].name if task in files else task for task in request["tasks"]]
    uses_library = len(files) < len(names) or any(task.is_group for task in files.values())
    with TemporaryDirectory() as folder:
        manager = task_manager(list(files), Path(folder), uses_library)
        tasks = measured(names, manager.task_index)
        results = lm_eval.simple_evaluate(
            model=_model(request),
            tasks=tasks,
            task_manager=manager,
            num_fewshot=request["num_fewshot"],
            limit=request["limit"],
            apply_chat_template=request["apply_chat_template"],
            log_samples=False,
            random_seed=request["seed"],
            numpy_random_seed=request["seed"],
            torch_random_seed=request["seed"],
            fewshot_random_seed=request["seed"],
        )
    rows = results.get("n-samples", {})
    scores = {**results["results"], **results.get("groups", {})}
    content = {
        "metrics": metrics_of(scores, rows, results.get("higher_is_better", {})),
        "results": scores,
        "versions": results.get("versions", {}),
        "rows": rows,
    }
    Path(request["output"]).write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


def _model(request: dict[str, Any]) -> Any:
    """The model as lm-eval takes it."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from alignment_core.cluster.device import inference_dtype_on_cpu
    from alignment_core.models.load_tokenizer import load_tokenizer
    from alignment_core.models.loading import load_model
    from alignment_core.models.saving import checkpoint_dtype

    path, trust = Path(request["model"]), request["trust_remote_code"]
    cuda = request["device"] == "cuda" or (request["device"] == "auto" and torch.cuda.is_available())
    device = "cuda" if cuda else "cpu"
    stored = checkpoint_dtype(path)
    dtype = getattr(torch, stored if cuda else inference_dtype_on_cpu(stored))
    model = load_model(str(path), "lm", dtype, trust_remote_code=trust).to(device)
    tokenizer = load_tokenizer(path, trust)
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request["batch_size"], device=device)


def task_manager(files: Sequence[str], folder: Path, uses_library: bool) -> Any:
    """lm-eval's ``TaskManager`` of these task files and, if ``uses_library``, of its own tasks, whose index takes seconds.

    lm-eval takes folders, and of each name the first file below them. ``folder``, which is empty, gets a file for each of
    ``files`` that includes it.
    """
    from lm_eval.tasks import TaskManager

    for number, file in enumerate(files):
        including = json.dumps({"include": str(Path(file).absolute())}, ensure_ascii=False)
        (folder / f"{number}.yaml").write_text(including, encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=uses_library)


def measured(names: Sequence[str], index: Mapping[str, Any]) -> list[str]:
    """The tasks, groups and tags to measure: all that are not part of another one, because lm-eval measures no task twice.

    ``index`` is that of a ``TaskManager``. Raises UserError for a task, also of a group, that is not in it, or that runs
    programs which the model writes.
    """
    parts = {name: {*_parts(name, index)} - {name} for name in names}
    return [name for name in names if not any(name in others for others in parts.values())]


def _parts(item: Any, index: Mapping[str, Any], inherited: Mapping[str, Any] = {}, group: str = "") -> Iterator[str]:
    """The names of a task, group or tag and of all its parts. ``item`` is its name or, in a ``group``, its settings there."""
    own = item if isinstance(item, dict) else {"task": item}
    name = str(own.get("group", own.get("task")))
    entry = index.get(name)
    known = own if entry is None else entry.cfg or {}  # a tag has no configuration
    settings = {**inherited, **known, **own}
    if entry is None and DEFINES_A_MEMBER.isdisjoint(settings):
        listed = f", which {group} lists; list the files of your own tasks in `tasks`, too" if group else ""
        raise UserError(f"lm-eval has no task, group or tag {name!r}{listed}")
    if settings.get("unsafe_code"):
        raise UserError(
            f"{name!r} runs programs that the model writes, and lm-eval has no sandbox for them: leave it out, or use "
            "`verifier: code`, which has one"
        )
    yield name
    members = sorted(entry.tags) if entry is not None and entry.cfg is None else known.get("task")
    if isinstance(members, list):
        shared = {field: value for field, value in settings.items() if field not in ("group", "task")}
        for member in members:
            yield from _parts(member, index, shared, name)


def metrics_of(
    results: dict[str, dict[str, Any]],
    rows: dict[str, dict[str, int]],
    directions: Mapping[str, Mapping[str, bool | None]] | None = None,
) -> dict[str, float]:
    """Metrics by name, ``lm_eval/<task>/<metric>``, with ``.stderr``, ``.higher_is_better`` (1 or 0, if the task defines it)
    and, except for groups, ``.n``.

    Args: ``results``, ``n-samples`` and ``higher_is_better`` of ``lm_eval.simple_evaluate``. A filter other than ``none`` is in
    the name: ``exact_match@strict-match``.
    """
    metrics: dict[str, float] = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or isinstance(value, bool) or not isinstance(value, int | float):
                continue  # a name, or a missing standard error
            name, is_error = metric.removesuffix("_stderr"), metric.endswith("_stderr")
            whole = f"{PREFIX}{task}/{name}" + (f"@{chosen}" if chosen != "none" else "")
            metrics[f"{whole}.stderr" if is_error else whole] = float(value)
            if not is_error and task in rows:
                metrics[f"{whole}.n"] = float(rows[task]["effective"])
            stated = (directions or {}).get(task, {}).get(name)
            if not is_error and stated is not None:
                metrics[whole + STATED] = float(stated)
    return metrics


if __name__ == "__main__":
    requested = json.loads(sys.argv[1])
    try:
        main(requested)
    except Exception as error:
        describe(error, requested["batch_size"], Path(requested["failure"]))
        raise
