"""Stage: a model → metrics of the library lm-eval, in a separate process that can be killed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from alignment_core.errors import Stopped, UserError
from alignment_core.evaluation.files import LM_EVAL as RESULTS
from alignment_core.evaluation.lm_eval_errors import FIELD, ended
from alignment_core.evaluation.lm_eval_tasks import read_task
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.processes import inherited
from alignment_core.recipes.paths import is_written_as_path
from alignment_core.recipes.sections.lm_eval import LmEvalConfig

COMMAND = (sys.executable, "-m", "alignment_core.evaluation.lm_eval_process")
POLL_SECONDS = 0.2
"""Poll interval of the process and of the stop flag."""


class LmEvalStageConfig(StageConfig):
    """The tasks; YAML files are pinned by their digests."""

    tasks: tuple[str, ...]
    files: dict[str, str] = {}
    """Digests by path, see :class:`~alignment_core.evaluation.lm_eval_tasks.TaskFile`."""
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 8
    apply_chat_template: bool = False

    def content(self) -> Any:
        content = self.model_dump(mode="json", exclude={"batch_size", "files"})
        return {**content, "tasks": [self.files.get(task, task) for task in self.tasks]}


def pin_tasks(section: LmEvalConfig) -> LmEvalStageConfig:
    """Pin the files of the tasks. Raises UserError if one is missing or no task, if two tasks have one name, or if lm-eval is
    not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"{FIELD}: the package lm-eval is not installed; install the extra: pip install 'alignment[lm-eval]'"
        )
    files: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for number, task in enumerate(section.tasks):
        name = task
        if is_written_as_path(task) or task.endswith((".yaml", ".yml")):
            if not Path(task).is_file():
                raise UserError(
                    f"{FIELD}.tasks.{number}: {task}: no such file; give the YAML file of a task, or a task's name"
                )
            defined = read_task(Path(task))
            files[task] = defined.digest
            name = defined.name
        if name in numbers:
            raise UserError(f"{FIELD}.tasks.{number}: {name!r} is also the name of tasks.{numbers[name]}; rename one")
        numbers[name] = number
    return LmEvalStageConfig(**section.model_dump(), files=files)


def run(context: StageContext, config: LmEvalStageConfig) -> dict[str, Any]:
    _check_files(config)
    request = {
        **config.model_dump(mode="json"),
        "model": str(context.inputs["model"]),
        "trust_remote_code": context.trust_remote_code,
        "device": context.resources.device,
        "seed": context.seed % 2**31,
        "output": str(context.output / RESULTS),
        "failure": str(context.output / "failure.json"),
    }
    # The process computes on the device of the trainers, in their place.
    with context.machines.trainers(context.ticket) as trainers:
        _evaluate(context, request, trainers.device.trainer_environment(context.resources, 1))
    _check_files(config)
    metrics: dict[str, Any] = json.loads((context.output / RESULTS).read_text())["metrics"]
    return metrics


def _evaluate(context: StageContext, request: dict[str, Any], environment: dict[str, str]) -> None:
    """Run the process to its end. Raises its error, and Stopped."""
    log = context.progress / "lm-eval.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=inherited(**environment),
        )
        try:
            written = -1
            while not _is_over(process):
                # lm-eval's progress bars are in its log: if that does not grow, it makes no progress
                if (size := log.stat().st_size) != written:
                    written = size
                    context.report(0, len(request["tasks"]), "tasks")
                if context.stopping.is_set():
                    raise Stopped("stopped while lm-eval was running")
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise ended(process.returncode, Path(request["failure"]), log)


def _check_files(config: LmEvalStageConfig) -> None:
    """Raise UserError if a file of a task, or one that it names, differs from the digest in the key."""
    for path, digest in config.files.items():
        if not Path(path).is_file() or read_task(Path(path)).digest != digest:
            raise UserError(f"{FIELD}.tasks: {path}, or a file that it names, changed since the run started; run again")


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


STAGE = Stage(
    "lm_eval",
    1,
    {"lm-eval": "section"},
    LmEvalStageConfig,
    run,
    packages=("lm-eval", "torch", "transformers"),
)
