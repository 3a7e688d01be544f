"""How values of TRL become values of a recipe, where they are not simply the same."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import yaml

from alignment_core.migrate.rules import (
    Converter,
    Job,
    NoCounterpart,
    Words,
    above_zero,
    as_text,
    code,
    is_on,
    model,
    number,
    only_if,
    positive,
    rows,
    rows_in,
    steps,
    whole,
)
from alignment_core.recipes.sections.preference import LossType
from alignment_core.source_code import spec_of


def processes(job: Job) -> int:
    """Processes that train; one, with a remark, where the launcher does not say."""
    if job.processes is None:
        job.remarks.append(
            "Batches are counted for one GPU, as the command does not say how many there are: multiply `batch_size` by theirs."
        )
    return job.processes or 1


def batch(words: Words, job: Job) -> int:
    """Rows per optimiser step: per device × accumulation × processes."""
    per_device, accumulation = (
        job.number("per_device_train_batch_size", 8),
        job.number("gradient_accumulation_steps", 1),
    )
    return int(per_device * accumulation) * processes(job)


def sampled(job: Job) -> int:
    """Completions that are sampled at once."""
    if given := job.number("generation_batch_size"):
        return int(given)
    rounds = job.number("steps_per_generation") or job.number("gradient_accumulation_steps", 1)
    return int(job.number("per_device_train_batch_size", 8) * rounds) * processes(job)


def prompts_per_step(words: Words, job: Job) -> int:
    """Prompts of a step: completions that are sampled at once ÷ completions of a prompt."""
    return max(1, sampled(job) // int(job.number("num_generations", 8)))


def rl_steps(words: Words, job: Job) -> int | None:
    """Steps of sampling: of `--max_steps` optimiser steps, or of the epochs where the rows can be counted."""
    updates = max(1, sampled(job) // max(1, batch(words, job))) * max(1, int(job.number("num_iterations", 1)))
    limit = job.number("max_steps")
    if limit > 0:
        return steps(limit, updates, 1)
    count, epochs = rows_in(job.text("dataset_name"), job), job.number("num_train_epochs", 3)
    if count is None:
        job.remarks.append(
            f"Set `rl.steps` to rows × {epochs:g} ÷ {prompts_per_step(words, job)}: the number of prompts is not known here."
        )
        return None
    return steps(count, prompts_per_step(words, job), epochs)


def sources(words: Words, job: Job) -> list[dict[str, Any]]:
    """`--dataset_name`."""
    return [{"path": rows(as_text(words, job), job)}]


def mixture(words: Words, job: Job) -> list[dict[str, Any]]:
    """`datasets` of a configuration file."""
    found: list[dict[str, Any]] = []
    for one in yaml.safe_load(as_text(words, job)):
        if not isinstance(one, dict):
            raise NoCounterpart("a list of mappings is needed, each with `path`.")
        files = one.get("data_files") or one.get("path")
        files = [*files.values()] if isinstance(files, dict) else files if isinstance(files, list) else [files]
        own = {"subset": one.get("name"), "split": one.get("split"), "weight": one.get("fraction")}
        told = {key: value for key, value in own.items() if value is not None}
        found += [{"path": rows(str(path), job), **told} for path in files]
        if rest := one.keys() - {"path", "data_files", "name", "split", "fraction"}:
            job.remarks.append(f"`{files[0]}`: {', '.join(sorted(rest))} of `datasets` is not in the recipe.")
    return found


def rows_are_here(job: Job) -> bool:
    """Whether `--dataset_name` is a file or folder, of which splits are nothing."""
    return bool(job.text("dataset_name")) and (job.folder / Path(job.text("dataset_name")).expanduser()).exists()


def held_out(words: Words, job: Job) -> list[dict[str, Any]]:
    """The split that is measured while it trains."""
    if words and words[0] == "no":
        raise NoCounterpart("it is the default.")
    if rows_are_here(job):
        raise NoCounterpart(
            "the rows are files: name those to measure as a source with `held_out: true`, or set `test_rows`."
        )
    split = job.text("dataset_test_split") or "test"
    subset = {"subset": job.text("dataset_config")} if job.text("dataset_config") else {}
    return [{"path": rows(job.text("dataset_name"), job), **subset, "split": split, "held_out": True}]


def evaluates(convert: Converter) -> Converter:
    """A converter for what only counts where rows are measured."""

    def guarded(words: Words, job: Job) -> Any:
        if job.text("eval_strategy") in ("", "no"):
            raise NoCounterpart("without --eval_strategy nothing is measured.")
        if rows_are_here(job):
            raise NoCounterpart("no rows are held out: see --eval_strategy.")
        return convert(words, job)

    return guarded


def warm_up(words: Words, job: Job) -> float:
    """`--warmup_ratio`, and `--warmup_steps`: below 1 a share of the steps, else a number of them."""
    value = number(words, job)
    if job.text("lr_scheduler_type") == "constant":
        raise NoCounterpart("the schedule constant has no warm-up.")
    if value < 1:
        return value
    if (total := job.number("max_steps")) > 0:
        return round(value / total, 6)
    raise NoCounterpart("a number of steps: give it as a share of all steps, `warmup_ratio` of the training section.")


def measured_every(words: Words, job: Job) -> int:
    """`--eval_steps`, a number of steps."""
    value = number(words, job)
    if value < 1:
        raise NoCounterpart("a share of all steps: give `eval_steps` as a number of them.")
    return whole(words, job)


def losses(words: Words, job: Job) -> Any:
    """`--loss_type` of DPO: one loss, or several with `--loss_weights`; `sft` among them is the weight of the nll."""
    known = (*typing.get_args(LossType), "sft")
    if unknown := [word for word in words if word not in known]:
        raise NoCounterpart(f"{', '.join(unknown)} does not exist here; the losses are {', '.join(known[:-1])}.")
    weights = [float(one) for one in job.words("loss_weights")] or [1.0] * len(words)
    weighted = dict(zip(words, weights, strict=False))
    likelihood = weighted.pop("sft", None)
    if len(weighted) == 1 and next(iter(weighted.values())) == 1.0:
        return next(iter(weighted)), None, likelihood
    return None, weighted, likelihood


def smoothing(words: Words, job: Job) -> float:
    """`--label_smoothing`, which TRL reads with two losses alone."""
    if not {"robust", "exo_pair"} & {*job.words("loss_type")}:
        raise NoCounterpart(
            "TRL reads it with the losses robust and exo_pair alone; conservative DPO would be another one."
        )
    return number(words, job)


OWN = "trl.rewards"
"""The module of TRL's own rewards, which are named without it."""
MODEL_REWARD = "model:"
"""Before the name of a model among the words of `--reward_funcs`, where a script has it there."""


def reward_functions(words: Words, job: Job) -> list[dict[str, Any]]:
    """`--reward_funcs`: TRL's own by name, or `module.function`, or of a script `file.py:function`."""
    if "get_soft_overlong_punishment" in words:
        raise NoCounterpart("get_soft_overlong_punishment is `rl.shaping: {overlong_buffer: 256}`, not a reward.")
    weights = [float(one) for one in job.words("reward_weights")]
    if job.text("reward_model_name_or_path"):
        weights = weights[1:]
    if any(module_of(word) == OWN for word in words) and _is_missing(OWN):
        job.remarks.append(
            "TRL's own rewards need its package: `pip install trl`; `{verifier: math}` compares answers without it."
        )
    found: list[dict[str, Any]] = []
    for position, word in enumerate(words):
        weight = {"weight": weights[position]} if position < len(weights) else {}
        if word.startswith(MODEL_REWARD):
            found.append({"reward_model": model([word.removeprefix(MODEL_REWARD)], job), **weight})
        else:
            found.append({"function": code([_function(word, job)], job), **weight})
    return found


def _function(word: str, job: Job) -> str:
    """A function as a recipe names it. TRL imports modules from the working folder, too, which Python's path here lacks: there
    the file is named, also if it does not exist anywhere."""
    module, function = module_of(word), re.split("[.:]", word)[-1]
    file = Path(*module.split(".")).with_suffix(".py")
    if module.endswith(".py") or module == OWN or not ((job.folder / file).is_file() or _is_missing(module)):
        return f"{module}:{function}"
    return f"{file}:{function}"


def module_of(word: str) -> str:
    """The module or file of a function that `--reward_funcs` names."""
    return word.rpartition(":" if ":" in word else ".")[0] or OWN


def _is_missing(module: str) -> bool:
    try:
        return spec_of(module) is None
    except (ImportError, ValueError):
        return True


def reward_model(words: Words, job: Job) -> list[dict[str, Any]]:
    """`--reward_model_name_or_path`, the first of the rewards."""
    weights = job.words("reward_weights")
    return [{"reward_model": model(words, job), **({"weight": float(weights[0])} if weights else {})}]


def mismatch(words: Words, job: Job) -> Any:
    """`--vllm_importance_sampling_mode`: correction and level."""
    level, _, treatment = as_text(words, job).partition("_")
    known = {"truncate": "clip", "mask": "mask"}
    if level not in ("token", "sequence") or treatment not in known:
        raise NoCounterpart("it is none of token_truncate, token_mask, sequence_truncate and sequence_mask.")
    return known[treatment], level


def with_engines(convert: Converter) -> Converter:
    """A converter for what counts with vLLM and its correction alone."""

    def guarded(words: Words, job: Job) -> Any:
        if not job.on("use_vllm") or not job.on("vllm_importance_sampling_correction"):
            raise NoCounterpart("it belongs to --use_vllm with --vllm_importance_sampling_correction.")
        return convert(words, job)

    return guarded


def clip(words: Words, job: Job) -> Any:
    """`--epsilon`: both bounds, unless `--epsilon_high` sets the upper one. CISPO has no lower one."""
    value = number(words, job)
    if job.text("loss_type") == "cispo":
        return 1.0, None
    return value, None if "epsilon_high" in job.given else value


def clip_high(words: Words, job: Job) -> float | None:
    """`--epsilon_high`; of CISPO it is the bound itself, and not its distance from 1."""
    value = above_zero(words, job)
    if value is None or job.text("loss_type") != "cispo":
        return value
    return max(0.0, value - 1)


def with_kl(words: Words, job: Job) -> bool | None:
    """`--use_bias_correction_kl`, which counts where there is a KL."""
    return True if is_on(words) and job.number("beta") else None


def refreshed(words: Words, job: Job) -> int:
    """`--ref_model_sync_steps` of reinforcement learning, where the reference becomes the policy as it is."""
    if not job.on("sync_ref_model"):
        raise NoCounterpart("it belongs to --sync_ref_model.")
    if job.number("ref_model_mixup_alpha", 0.6) != 1:
        raise NoCounterpart(
            "a mixture of policy and reference does not exist here; `rl.kl.refresh_every` takes the policy."
        )
    return whole(words, job)


def adapters(words: Words, job: Job) -> dict[str, Any] | None:
    """`--use_peft`."""
    if not is_on(words):
        return None
    if "lora_target_modules" not in job.given:
        job.remarks.append(
            "Adapters are on every linear layer here; TRL leaves the choice to PEFT, which has `q_proj` and `v_proj` for most "
            "models: set `target_modules` of `lora` for those."
        )
    return {}


def most_steps(words: Words, job: Job) -> int | None:
    """`--max_steps`, which in TRL counts alone."""
    value = positive(words, job)
    if value and "num_train_epochs" not in job.given:
        job.remarks.append(
            "Training ends after `max_steps` or `num_train_epochs`, whatever comes first; TRL repeats the rows up to "
            "`max_steps`: raise the epochs where there are too few rows for it."
        )
    return value


def with_lora(convert: Converter) -> Converter:
    """A converter for what only counts with adapters."""
    return only_if("use_peft", convert, "without --use_peft there are no adapters.")


def several(words: Words, job: Job) -> Any:
    """One name, which may stand for all, or a list."""
    return "all-linear" if list(words) == ["all-linear"] else list(words)


def template(words: Words, job: Job) -> str:
    """The text of a file with a chat template."""
    path = job.folder / as_text(words, job)
    if not path.is_file():
        raise NoCounterpart("not a file with a Jinja template: put the template's text into `model.chat_template`.")
    return path.read_text()
