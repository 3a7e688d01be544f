"""OpenRLHF's flags: conversions of their words beside the shared ones."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from alignment_core.migrate import convert, tables
from alignment_core.migrate.convert import (
    Flags,
    NoCounterpart,
    Words,
    column,
    count_rows,
    is_on,
    moved,
    number,
    parts,
    source,
)
from alignment_core.recipes.paths import CodePath, ModelPath, is_written_as_path, row_suffix


def sources(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """``a.jsonl,b@folder`` as sources, with the weights of `--dataset_probs`."""
    paths = parts(" ".join(words))
    probabilities = flags.text("dataset_probs") or flags.text("prompt_data_probs")
    weights = [float(weight) for weight in parts(probabilities)] if probabilities and len(paths) > 1 else []
    described = []
    for text, weight in zip_longest(paths, weights[: len(paths)]):
        path, _, part = text.partition("@")
        if part:
            flags.remarks.append(
                f"All of `{path}` is read, not only its folder `{part}`: give that folder's files as `path`."
            )
        described.append(source(path, flags, weight=weight))
    return described


def with_split(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """``a,b`` as sources with the split `--eval_split`, which OpenRLHF uses if a data set has splits."""
    described = []
    for path in parts(" ".join(words)):
        are_files = (flags.folder / path).exists() or is_written_as_path(path) or row_suffix(path) is not None
        split = flags.text("eval_split") if not are_files or "eval_split" in flags.given else ""
        described.append(source(path, flags, split=split))
    return described


def held_out(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """The rows of `--eval_dataset` as held-out sources."""
    return [{**source, "held_out": True} for source in with_split(words, flags)]


def hf_save_steps(words: Words, flags: Flags) -> int | None:
    """Steps between checkpoints, which are models with `--save_hf_ckpt` alone. Raises NoCounterpart without it."""
    if not flags.on("save_hf_ckpt"):
        raise NoCounterpart(
            "without --save_hf_ckpt they are for resuming alone: progress is saved by time (`resources.progress_seconds`)."
        )
    return convert.save_steps(words, flags)


def hf_save_total_limit(words: Words, flags: Flags) -> int | None:
    """The number of such checkpoints."""
    hf_save_steps(flags.words("save_steps"), flags)
    return convert.save_total_limit(words, flags)


def mixing(words: Words, flags: Flags) -> str | None:
    """How several sources are mixed if they have weights."""
    return "all_exhausted" if "," in flags.text("dataset") + flags.text("prompt_data") else None


def plain(words: Words, flags: Flags) -> str | None:
    """The chat template without `--apply_chat_template`."""
    return None if is_on(words) else convert.PLAIN


def prompt_template(words: Words, flags: Flags) -> str:
    """A template with ``{}`` for the prompt, which is ``{prompt}`` here. Raises NoCounterpart for one without it."""
    before, braces, after = (part.replace("\\n", "\n") for part in " ".join(words).partition("{}"))
    if not braces:
        raise NoCounterpart("it has no {}, so OpenRLHF ignores it.")
    before, after = (part.replace("{", "{{").replace("}", "}}") for part in (before, after))
    return f"{before}{{prompt}}{after}"


def input_column(words: Words, flags: Flags) -> dict[str, str] | None:
    """The column `--input_key` of demonstrations: prompts beside completions, or whole conversations."""
    conversations = flags.on("apply_chat_template") and "output_key" not in flags.given
    return column(words, flags, "messages" if conversations else "prompt")


def nll_weight(words: Words, flags: Flags) -> float:
    """`--kd_coef` c weighs (1 − c) · nll + c · KL; here the weight of the KL is 1, so that of the nll is (1 − c) / c."""
    share = number(words, flags)
    if not 0 < share <= 1:
        raise NoCounterpart(f"{share:g} leaves no divergence from the teacher; it has to be above 0 and at most 1.")
    return round((1 - share) / share, 6)


def completion_length(words: Words, flags: Flags) -> int:
    """The longest completion: half of the limit of prompt and completion together, where that alone is given (0.11)."""
    for flag in ("generate_max_len", "max_new_tokens"):
        if flag in flags.given and flags.text(flag).lower() != "none":
            return convert.whole(flags.words(flag), flags)
    if "max_len" not in flags.given:
        return 1024
    half = int(flags.number("max_len")) // 2
    flags.remarks.append(
        f"Prompts and completions get up to {half} tokens each; OpenRLHF limits their sum to {2 * half}."
    )
    return half


def prompt_length(words: Words, flags: Flags) -> int:
    """The longest prompt: its own limit (until 0.10), or the rest of the limit of prompt and completion together."""
    if "prompt_max_len" in flags.given:
        return int(flags.number("prompt_max_len"))
    if "generate_max_len" in flags.given:
        return 1024
    return int(flags.number("max_len", 2048)) - completion_length(words, flags)


def rl_steps(words: Words, flags: Flags) -> int | None:
    """Steps of `--rollout_batch_size` prompts each, if the number of prompts is known."""
    count = flags.number("max_samples") or None
    counts = [count_rows(path, flags) for path in parts(flags.text("prompt_data"))]
    if all(rows is not None for rows in counts):
        count = min(count or float("inf"), sum(rows or 0 for rows in counts))
    return convert.steps_of_rows(
        count, flags.number("rollout_batch_size", 1024), flags.number("num_episodes", 1), flags
    )


def reward_models(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """A reward for each of the models, whose rewards OpenRLHF adds."""
    return [{"reward_model": moved(name, flags, ModelPath)} for name in parts(" ".join(words))]


def remote_rewards(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """`--remote_rm_url`: a file with `reward_func`, or replicas of an endpoint."""
    address = " ".join(words)
    if address.endswith(".py"):
        return [{"function": moved(f"{address}:reward_func", flags, CodePath)}]
    return [{"urls": parts(address)}]


def environment(words: Words, flags: Flags) -> Any:
    """`--agent_func_path`: the environment, and the reward that it returns."""
    return {"name": moved(f"{' '.join(words)}:Environment", flags, CodePath)}, [{"environment": True}]


def placement(words: Words, flags: Flags) -> str:
    """Whether engines have GPUs of their own."""
    return "colocated" if flags.on("colocate_all_models") and not flags.on("async_train") else "disaggregated"


def engines(words: Words, flags: Flags) -> Any:
    """The number of engines, and their placement."""
    return convert.positive(words, flags), placement(words, flags)


FRAMEWORK = tables.load("openrlhf", {**vars(convert), **globals()})
