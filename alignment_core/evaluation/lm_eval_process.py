"""The process in which lm-eval evaluates a model: ``python -m alignment_core.evaluation.lm_eval_process JSON``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from alignment_core.errors import UserError
from alignment_core.evaluation.directions import STATED
from alignment_core.recipes.sections.lm_eval import PREFIX


def main(request: dict[str, Any]) -> None:
    """Evaluate, and write the metrics together with lm-eval's own results. Completions are not kept."""
    import lm_eval
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from alignment_core.cluster.device import inference_dtype_on_cpu
    from alignment_core.models.loading import load_model
    from alignment_core.models.saving import checkpoint_dtype

    path, trust = Path(request["model"]), request["trust_remote_code"]
    cuda = request["device"] == "cuda" or (request["device"] == "auto" and torch.cuda.is_available())
    device = "cuda" if cuda else "cpu"
    stored = checkpoint_dtype(path)
    dtype = getattr(torch, stored if cuda else inference_dtype_on_cpu(stored))
    model = load_model(str(path), "lm", dtype, trust_remote_code=trust).to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    files = list(request["files"])
    folders = sorted({str(Path(file).parent) for file in files})
    known = {*request["tasks"]} > {*files}  # indexing all tasks of the library takes seconds
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request["batch_size"], device=device),
        tasks=[task_of(Path(task)) if task in files else task for task in request["tasks"]],
        task_manager=TaskManager(include_path=folders or None, include_defaults=known),
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


class _TaskLoader(yaml.SafeLoader):
    """YAML with tags of lm-eval's, such as ``!function``, whose values are not needed here."""


_TaskLoader.add_multi_constructor("!", lambda loader, tag, node: None)


def task_of(path: Path) -> str:
    """The name of the task or group that a YAML file of lm-eval defines: `task`, or `group` if `task` lists its members.

    Raises UserError for a file that names none.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _TaskLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: is not readable YAML: {' '.join(str(error).split())}") from None
    if isinstance(content, dict):
        for field in ("task", "group"):
            if isinstance(content.get(field), str) and content[field].strip():
                return str(content[field])
    raise UserError(f"{path}: names no `task` of lm-eval")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
