"""TRL's flags: conversions of their words beside the shared ones, and the files that `--config` names."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from alignment_core.errors import UserError
from alignment_core.migrate import convert, tables
from alignment_core.migrate.convert import Flags, NoCounterpart, Words, count_rows, is_on, moved, number, source
from alignment_core.recipes.paths import CodePath, ModelPath
from alignment_core.recipes.sections.preference import LossType
from alignment_core.source_code import spec_of

OWN = "trl.rewards"
"""The module of TRL's own rewards, which `--reward_funcs` names without it."""
MODEL_REWARD = "model:"
"""Prefix of a reward model among the words of `--reward_funcs`, as scripts may have it."""

ACCELERATE_CONFIGS: dict[str, list[Any]] = {
    "zero1": [1, 8],
    "zero2": [2, 8],
    "zero3": [3, 8],
    "single_gpu": ["", 1],
    "multi_gpu": ["", 8],
}
"""ZeRO stage and number of processes of TRL's own files for `--accelerate_config`; ``""`` where there is no stage."""


def with_file(given: Mapping[str, Words], folder: Path) -> dict[str, Words]:
    """The flags with those of the file that `--config` names, and with `--no_x` as `--x false`. Raises UserError."""
    flags: dict[str, Words] = {}
    if words := given.get("config"):
        try:
            content = yaml.safe_load((folder / words[0]).read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(f"--config {words[0]}: cannot be read as YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise UserError(f"--config {words[0]}: a mapping of flags is needed")
        flags = {str(flag): _as_words(value) for flag, value in content.items() if value not in (None, [])}
    for flag, words in given.items():
        if flag != "config":
            flags[flag.removeprefix("no_")] = ["false"] if flag.startswith("no_") else words
    return flags


def _as_words(value: Any) -> list[str]:
    if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [yaml.safe_dump(value) if isinstance(value, list) else str(value)]


def batch_size(words: Words, flags: Flags, rounds: str = "gradient_accumulation_steps") -> int:
    """Rows per optimizer step: per device × accumulation × processes, which are one if their number is unknown."""
    processes = flags.processes or _processes_of_config(flags)
    if processes is None:
        flags.remarks.append(
            "Batches are counted for one GPU, because the command does not say how many there are: multiply `batch_size` by it."
        )
    return convert.product(words, flags, "per_device_train_batch_size=8", f"{rounds}=1") * (processes or 1)


def _processes_of_config(flags: Flags) -> int | None:
    """The number of processes of `--accelerate_config`; None if it is not one of TRL's own files."""
    words = flags.words("accelerate_config")
    return ACCELERATE_CONFIGS[words[0].lower()][1] if words and words[0].lower() in ACCELERATE_CONFIGS else None


def accelerate_config(words: Words, flags: Flags) -> Any:
    """ZeRO stage and processes of `--accelerate_config`. An explicit number of processes overrides the file's."""
    zero_stage, processes = convert.chosen(words, flags, ACCELERATE_CONFIGS)
    return zero_stage, None if flags.processes else processes


def _completions(flags: Flags) -> int:
    """Completions per sampling round."""
    if size := flags.number("generation_batch_size"):
        return int(size)
    rounds = "steps_per_generation" if flags.number("steps_per_generation") else "gradient_accumulation_steps"
    return batch_size((), flags, rounds)


def prompts_per_step(words: Words, flags: Flags) -> int:
    """Prompts per step: completions per sampling round ÷ completions per prompt."""
    return max(1, _completions(flags) // int(flags.number("num_generations", 8)))


def _updates(flags: Flags) -> int:
    """Optimizer steps per step of sampling."""
    iterations = max(1, int(flags.number("num_iterations", 1)))
    return max(1, _completions(flags) // max(1, batch_size((), flags))) * iterations


def rl_warmup(words: Words, flags: Flags) -> tuple[float | None, int | None]:
    """`--warmup_steps`, in steps of sampling."""
    return convert.warmup(words, flags, _updates(flags))


def rl_sync(words: Words, flags: Flags) -> int:
    """`--ref_model_sync_steps`, in steps of sampling."""
    return max(1, round(convert.whole(words, flags) / _updates(flags)))


def rl_steps(words: Words, flags: Flags) -> int | None:
    """Steps of sampling: from the optimizer steps of `--max_steps`, or from the epochs if the rows can be counted."""
    updates = _updates(flags)
    limit = flags.number("max_steps")
    if limit > 0:
        return convert.steps_of_rows(limit, updates, 1, flags)
    count = count_rows(flags.dataset_name, flags)
    return convert.steps_of_rows(count, prompts_per_step(words, flags), flags.number("num_train_epochs", 3), flags)


def sources(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """`--dataset_name`."""
    return [source(" ".join(words), flags)]


def mixture(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """`datasets` of a configuration file. Raises NoCounterpart unless each of them names its rows."""
    datasets = yaml.safe_load(" ".join(words))
    if not isinstance(datasets, list) or not all(_names_rows(dataset) for dataset in datasets):
        raise NoCounterpart("a list of mappings is needed, each with `path`.")
    described: list[dict[str, Any]] = []
    for dataset in datasets:
        files = _files(dataset)
        fields = {"subset": dataset.get("name"), "split": dataset.get("split"), "weight": dataset.get("fraction")}
        described += [source(str(path), flags, **fields) for path in files]
        if unread := dataset.keys() - {"path", "data_files", "name", "split", "fraction"}:
            flags.remarks.append(f"`{files[0]}`: {', '.join(sorted(unread))} of `datasets` is not in the recipe.")
    return described


def _files(dataset: Mapping[str, Any]) -> list[Any]:
    """The files of one of the `datasets`, or its path. Raises NoCounterpart if it has no files of its split."""
    files = dataset.get("data_files") or dataset["path"]
    if isinstance(files, dict):
        split = str(dataset.get("split") or "train").partition("[")[0]
        if split not in files:
            raise NoCounterpart(f"`data_files` has no split {split}.")
        files = files[split]
    return files if isinstance(files, list) else [files]


def _names_rows(dataset: Any) -> bool:
    return isinstance(dataset, dict) and bool(dataset.get("data_files") or dataset.get("path"))


def held_out(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """The split for evaluation during training. Raises NoCounterpart if there is none."""
    if words and words[0] == "no":
        raise NoCounterpart("it is the default.")
    instead = "add held-out rows as a source with `held_out: true`, or set `test_rows`."
    if not flags.dataset_name:
        raise NoCounterpart(f"there is no `dataset_name` with a split for it: {instead}")
    if flags.are_files("dataset_name"):
        raise NoCounterpart(f"the rows are files: {instead}")
    split = flags.text("dataset_test_split") or "test"
    subset = flags.text("dataset_config")
    return [source(flags.dataset_name, flags, subset=subset, split=split, held_out=True)]


def metric(words: Words, flags: Flags) -> str:
    """`--metric_for_best_model`, which may have a prefix."""
    return " ".join(words).removeprefix("eval_")


def max_steps(words: Words, flags: Flags) -> int | None:
    """`--max_steps`, which replaces the epochs in TRL."""
    value = convert.positive(words, flags)
    if value and "num_train_epochs" not in flags.given:
        flags.remarks.append(
            "Training ends after `max_steps` or `num_train_epochs`, whichever comes first; TRL repeats the rows until "
            "`max_steps`: increase the epochs if there are too few rows."
        )
    return value


def trackers(words: Words, flags: Flags) -> Any:
    """`--report_to`: W&B and TensorBoard."""
    wandb, tensorboard = ({name, "all"} & {*words} for name in ("wandb", "tensorboard"))
    return {"project": "trl"} if wandb else None, True if tensorboard else None


def stop_texts(words: Words, flags: Flags) -> list[str] | None:
    """`stop` of `--generation_kwargs`. Raises NoCounterpart if there are other settings."""
    settings = convert.mapping(words, flags) or {}
    stop = settings.pop("stop", None)
    if settings:
        raise NoCounterpart(
            f"{', '.join(settings)}: samples come from the policy itself; `rl.generation` has the supported settings."
        )
    return [stop] if isinstance(stop, str) else stop


def chat_template(words: Words, flags: Flags) -> str:
    """The text of a file with a chat template. Raises NoCounterpart if there is no such file."""
    path = flags.folder / " ".join(words)
    if not path.is_file():
        raise NoCounterpart("no file with a Jinja template: put the template's text into `model.chat_template`.")
    return path.read_text()


def losses(words: Words, flags: Flags) -> Any:
    """`--loss_type` of DPO: one loss, or several with `--loss_weights`; `sft` among them is the weight of the nll."""
    known = (*typing.get_args(LossType), "sft")
    if unknown := [word for word in words if word not in known]:
        raise NoCounterpart(f"{', '.join(unknown)} is not supported; the losses are {', '.join(known[:-1])}.")
    weights = [float(weight) for weight in flags.words("loss_weights")] or [1.0] * len(words)
    weighted = dict(zip(words, weights, strict=False))
    likelihood = weighted.pop("sft", None)
    if [*weighted.values()] == [1.0]:
        return next(iter(weighted)), None, likelihood
    return None, weighted, likelihood


def reward_functions(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """`--reward_funcs`: TRL's own by name, or `module.function`, or in a script `file.py:function`. Raises NoCounterpart."""
    if "get_soft_overlong_punishment" in words:
        raise NoCounterpart("get_soft_overlong_punishment is `rl.shaping: {overlong_buffer: 256}`, not a reward.")
    weights = [float(weight) for weight in flags.words("reward_weights")]
    if flags.text("reward_model_name_or_path"):
        weights = weights[1:]
    if any(_module_of(name) == OWN for name in words) and _is_missing(OWN):
        flags.remarks.append(
            "TRL's own rewards need its package: `pip install trl`; `{verifier: math}` compares answers without it."
        )
    rewards = []
    for name, weight in zip_longest(words, weights[: len(words)]):
        is_model = name.startswith(MODEL_REWARD)
        text, kind = (name.removeprefix(MODEL_REWARD), ModelPath) if is_model else (_function(name, flags), CodePath)
        reward = {"reward_model" if is_model else "function": moved(text, flags, kind)}
        rewards.append(reward if weight is None else {**reward, "weight": weight})
    return rewards


def _function(name: str, flags: Flags) -> str:
    """The name of a function in a recipe. TRL also imports modules from the working folder, which is not on Python's path here:
    for these, and for modules that do not exist, it names the file."""
    module, function = _module_of(name), re.split("[.:]", name)[-1]
    file = Path(*module.split(".")).with_suffix(".py")
    if module.endswith(".py") or module == OWN or not ((flags.folder / file).is_file() or _is_missing(module)):
        return f"{module}:{function}"
    return f"{file}:{function}"


def _module_of(name: str) -> str:
    """The module or file of a function that `--reward_funcs` names."""
    return name.rpartition(":" if ":" in name else ".")[0] or OWN


def _is_missing(module: str) -> bool:
    try:
        return spec_of(module) is None
    except (ImportError, ValueError):
        return True


def reward_model(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """`--reward_model_name_or_path`, the first of the rewards."""
    weights = flags.words("reward_weights")
    reward = {"reward_model": moved(" ".join(words), flags, ModelPath)}
    return [{**reward, "weight": float(weights[0])} if weights else reward]


def epsilon(words: Words, flags: Flags) -> Any:
    """`--epsilon`: both bounds, unless `--epsilon_high` sets the upper one. CISPO has no lower one here, and SAPO none."""
    value = number(words, flags)
    if flags.text("loss_type") == "sapo":
        raise NoCounterpart("SAPO has no clip bounds.")
    if flags.text("loss_type") == "cispo":
        if "epsilon_high" not in flags.given:
            flags.remarks.append(
                f"Without --epsilon_high TRL's CISPO cuts the weight of a token at ε = {value:g}, here it is cut at 5: set "
                "`rl.loss.epsilon_high` to that weight."
            )
        return 1.0, None
    has_own_default = flags.text("importance_sampling_level") == "sequence"  # of the upper bound
    return value, value if has_own_default and "epsilon_high" not in flags.given else None


def sapo_temperatures(words: Words, flags: Flags) -> list[float]:
    """Both temperatures of SAPO, with its paper's values as defaults."""
    return [flags.number("sapo_temperature_pos", 1.0), flags.number("sapo_temperature_neg", 1.05)]


def unbiased_gradient(words: Words, flags: Flags) -> bool | None:
    """`--use_bias_correction_kl`, which has an effect only with a KL penalty."""
    return True if is_on(words) and flags.number("beta") else None


FRAMEWORK = tables.load("trl", {**vars(convert), **globals()})
