"""How values of OpenRLHF become values of a recipe, where they are not simply the same."""

from __future__ import annotations

from typing import Any

from alignment_core.migrate.rules import (
    PLAIN,
    Converter,
    Job,
    NoCounterpart,
    Words,
    as_text,
    code,
    column,
    is_on,
    model,
    number,
    pair,
    positive,
    prompt_template,
    rows,
    rows_in,
    steps,
    whole,
)
from alignment_core.recipes.paths import is_written_as_path, row_suffix


def sources(words: Words, job: Job) -> list[dict[str, Any]]:
    """``a.jsonl,b@folder`` as sources, with the weights of `--dataset_probs`."""
    paths = [path.strip() for path in as_text(words, job).split(",")]
    probabilities = job.text("dataset_probs") or job.text("prompt_data_probs")
    weights = [float(one) for one in probabilities.split(",")] if probabilities and len(paths) > 1 else []
    found: list[dict[str, Any]] = []
    for position, path in enumerate(paths):
        path, _, part = path.partition("@")
        if part:
            job.remarks.append(
                f"`{path}` is read whole: `@{part}` is a folder of it; give that folder's files as `path`."
            )
        found.append({"path": rows(path, job), **({"weight": weights[position]} if position < len(weights) else {})})
    return found


def held_out(words: Words, job: Job) -> list[dict[str, Any]]:
    """The rows of `--eval_dataset` as sources that are measured."""
    return [{**one, "held_out": True} for one in with_split(words, job)]


def with_split(words: Words, job: Job) -> list[dict[str, Any]]:
    """``a,b@folder`` as sources with the split `--eval_split`, which OpenRLHF takes where there is one."""
    found = []
    for path in as_text(words, job).split(","):
        name = path.strip()
        files = (job.folder / name).exists() or is_written_as_path(name) or row_suffix(name) is not None
        split = job.text("eval_split") if not files or "eval_split" in job.given else ""
        found.append({"path": rows(name, job), **({"split": split} if split else {})})
    return found


def in_both(convert: Converter) -> Converter:
    """A converter of what prompts share with those of `--eval_dataset`."""

    def both(words: Words, job: Job) -> Any:
        value = convert(words, job)
        return value, value if "eval_dataset" in job.given else None

    return both


def mixing(words: Words, job: Job) -> str | None:
    """How sources are mixed by `--dataset_probs`, where there are several."""
    return "all_exhausted" if "," in job.text("dataset") + job.text("prompt_data") else None


def template(words: Words, job: Job) -> str:
    """The template around prompts, which OpenRLHF uses for plain text alone."""
    if job.on("apply_chat_template"):
        raise NoCounterpart("with --apply_chat_template OpenRLHF ignores it.")
    return prompt_template(words, job)


def template_of_pairs(words: Words, job: Job) -> str:
    """The same for pairs, where it needs a column of prompts."""
    if "prompt_key" not in job.given:
        raise NoCounterpart("without --prompt_key OpenRLHF ignores it.")
    return template(words, job)


def demonstrations(words: Words, job: Job) -> dict[str, str] | None:
    """The column `--input_key` of demonstrations: prompts beside answers, or whole conversations."""
    conversations = job.on("apply_chat_template") and "output_key" not in job.given
    return column("messages" if conversations else "prompt")(words, job)


def as_written(words: Words, job: Job) -> str | None:
    """The chat template of rows that OpenRLHF does not apply one to."""
    return None if is_on(words) else PLAIN


def learning_rate_floor(words: Words, job: Job) -> float:
    """`--min_lr_ratio`, which one schedule alone has."""
    if job.text("lr_scheduler") != "cosine_with_min_lr":
        raise NoCounterpart("only the schedule cosine_with_min_lr has it.")
    return number(words, job)


def warm_up(words: Words, job: Job) -> float:
    """The share of steps to warm up in, which the schedule `constant` ignores."""
    if job.text("lr_scheduler") == "constant":
        raise NoCounterpart("the schedule constant has no warm-up.")
    return number(words, job)


def measured_every(words: Words, job: Job) -> int | None:
    """Steps between measurements of the rows that are held out."""
    every = positive(words, job)
    if every and "eval_dataset" not in job.given:
        raise NoCounterpart("no rows are held out: set `test_rows` of the data, and then `training.eval_steps`.")
    return every


def precision(words: Words, job: Job) -> bool:
    """`--param_dtype` of 0.9 and later."""
    if words and words[0] == "fp16":
        raise NoCounterpart("fp16 does not exist here; `bf16` is the half precision.")
    return True


def divergence_weight(words: Words, job: Job) -> float | None:
    """`--kd_coef` c weighs (1 − c) · nll + c · KL; here the weight of the KL is 1, so that of the nll is (1 − c) / c."""
    share = number(words, job)
    if not 0 < share <= 1:
        raise NoCounterpart(f"{share:g} leaves no divergence from the teacher; it has to be above 0 and at most 1.")
    return round((1 - share) / share, 6)


def answers_length(words: Words, job: Job) -> int:
    """The longest answer. Where only prompt and answer together are limited (0.11), it gets half of that."""
    for flag in ("generate_max_len", "max_new_tokens"):
        if flag in job.given and job.text(flag).lower() != "none":
            return whole(job.words(flag), job)
    if "max_len" not in job.given:
        return 1024
    half = int(job.number("max_len")) // 2
    job.remarks.append(f"Prompts and answers get {half} tokens each at most; OpenRLHF limits their sum to {2 * half}.")
    return half


def prompts_length(words: Words, job: Job) -> int:
    """The longest prompt: its own limit (to 0.10), or what answers leave of the limit of both."""
    if "prompt_max_len" in job.given:
        return int(job.number("prompt_max_len"))
    if "generate_max_len" in job.given:
        return 1024
    return int(job.number("max_len", 2048)) - answers_length(words, job)


def number_of_steps(words: Words, job: Job) -> int | None:
    """Steps, of which each takes `--rollout_batch_size` prompts, if it is known how many there are."""
    count = job.number("max_samples") or None
    there = [rows_in(path.strip(), job) for path in job.text("prompt_data").split(",")]
    if all(one is not None for one in there):
        count = min(count or float("inf"), sum(one or 0 for one in there))
    per_step, episodes = job.number("rollout_batch_size", 1024), job.number("num_episodes", 1)
    if count is None:
        job.remarks.append(
            f"Set `rl.steps` to rows × {episodes:g} ÷ {per_step:g}: the number of prompts is not known here."
        )
        return None
    return steps(count, per_step, episodes)


def reward_models(words: Words, job: Job) -> list[dict[str, Any]]:
    """One reward for each of the models, which OpenRLHF adds up."""
    return [{"reward_model": model([one.strip()], job)} for one in as_text(words, job).split(",")]


def normalised(words: Words, job: Job) -> str:
    """`--normalize_reward`, by what the reward model knows of its rewards."""
    job.remarks.append(
        "`normalise: model` is for reward models that were trained here and know their mean and deviation; for another one "
        "`running` is the nearest."
    )
    return "model"


def remote_rewards(words: Words, job: Job) -> list[dict[str, Any]]:
    """`--remote_rm_url`: a file with `reward_func`, or replicas of an endpoint."""
    text = as_text(words, job)
    if text.endswith(".py"):
        return [{"function": code([f"{text}:reward_func"], job)}]
    return [{"urls": [url.strip() for url in text.split(",")]}]


def environment(words: Words, job: Job) -> Any:
    """`--agent_func_path`: a file that has to be written anew, as the interface is another."""
    job.remarks.append(
        "`rl.environment.name` needs a class `Environment` with `reset` and `step` in place of OpenRLHF's `AgentExecutor` "
        "(docs/recipes/environments.md)."
    )
    return {"name": code([f"{as_text(words, job)}:Environment"], job)}, [{"environment": True}]


def placement(words: Words, job: Job) -> str:
    """Whether engines have GPUs of their own."""
    shared = job.on("colocate_all_models") and not job.on("async_train")
    return "colocated" if shared else "disaggregated"


def trainers(words: Words, job: Job) -> int:
    """Ranks of the policy's trainer."""
    return int(job.number("actor_num_gpus_per_node", 8) * job.number("actor_num_nodes", 1))


def clip(words: Words, job: Job) -> Any:
    """Both bounds of the ratio, unless `--eps_clip_low_high` sets them."""
    if "eps_clip_low_high" in job.given:
        raise NoCounterpart("--eps_clip_low_high sets both bounds.")
    return number(words, job)


def clip_bounds(words: Words, job: Job) -> Any:
    """Lower and upper bound of the ratio."""
    return tuple(pair(words, job))


def of_critic(convert: Any) -> Any:
    """A converter for what only the estimator gae has."""

    def guarded(words: Words, job: Job) -> Any:
        if job.text("advantage_estimator") != "gae":
            raise NoCounterpart("there is a critic with --advantage_estimator gae alone.")
        return convert(words, job)

    return guarded


def whitening(words: Words, job: Job) -> str:
    """`--no_advantage_std_norm`, of the estimators whose advantages are whitened."""
    if job.text("advantage_estimator") not in ("gae", "reinforce", "reinforce_baseline"):
        raise NoCounterpart("with this estimator advantages are not whitened.")
    return "mean"


def correction_bounds(words: Words, job: Job) -> Any:
    """Bounds of the importance ratio: the upper one alone, or both."""
    values = [number([word], job) for word in words]
    return (None, values[0]) if len(values) == 1 else (values[0], values[1])


def older_correction(words: Words, job: Job) -> Any:
    """`--vllm_is_correction_type`: correction and level."""
    known = {"tis": ("clip", "token"), "icepop": ("mask", "token"), "seq-mask-tis": ("mask", "sequence")}
    if (words or [""])[0] not in known:
        raise NoCounterpart(f"it is none of {', '.join(known)}.")
    return known[words[0]]


def correction_of_level(words: Words, job: Job) -> str | None:
    """`--algo.advantage.is_correction_mode`, which counts with a level alone."""
    if job.text("is_correction_level") in ("", "off"):
        raise NoCounterpart("--algo.advantage.is_correction_level is off.")
    return words[0]


def bounds_of_level(words: Words, job: Job) -> Any:
    """`--algo.advantage.is_correction_threshold`, likewise."""
    correction_of_level(job.words("is_correction_mode"), job)
    return correction_bounds(words, job)
