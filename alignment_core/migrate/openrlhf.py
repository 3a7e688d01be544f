"""OpenRLHF's flags: conversions of their words beside the shared ones, and the dotted names that they have since 0.11."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment_core.migrate import convert, tables
from alignment_core.migrate.convert import (
    Flags,
    NoCounterpart,
    Words,
    code,
    column,
    count_rows,
    is_on,
    model,
    number,
    rows,
)
from alignment_core.recipes.paths import is_written_as_path, row_suffix


def variant(program: str, given: Mapping[str, Words]) -> str:
    """The table of a program, which a flag may decide."""
    if program == "batch_inference" and [*given.get("eval_task", ())] == ["rm"]:
        return "batch_inference --eval_task rm"
    pretrains = any(is_on(given[flag]) for flag in ("pretrain_mode", "model.pretrain_mode_enable") if flag in given)
    return f"{program} --pretrain_mode" if program == "train_sft" and pretrains else program


def defaults(command: tables.Command, given: Mapping[str, Words], remarks: list[str]) -> dict[str, str | Words]:
    """The framework's defaults for a command: the precision is that of the release that its flags show."""
    trains = isinstance(command.rules.get("bf16"), tables.Rule)
    if trains and any("." in flag for flag in given):
        return {**command.defaults, "param_dtype": "bf16"}
    if trains and not {"bf16", "param_dtype"} & given.keys():
        remarks.append(
            f"`{command.place('training.bf16')}` is off; OpenRLHF 0.9 and later train in bfloat16 by default: set it to true "
            "if you used one of those."
        )
    return dict(command.defaults)


def canonical(flag: str, rules: Mapping[str, Any]) -> str:
    """The name of a flag in a table; the flag itself if the table has none."""
    groups = flag.removesuffix("_enable").split(".")
    of_policy = ".".join(groups[1:] if groups[0] == "actor" else groups)
    tries = (flag, NAMES.get(flag), NAMES.get(of_policy), of_policy, "_".join(groups[-2:]))
    last = () if groups[0] == "critic" else (groups[-1],)
    return next((name for name in (*tries, *last) if name in rules), flag)


def sources(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """``a.jsonl,b@folder`` as sources, with the weights of `--dataset_probs`."""
    paths = [path.strip() for path in " ".join(words).split(",")]
    probabilities = flags.text("dataset_probs") or flags.text("prompt_data_probs")
    weights = [float(weight) for weight in probabilities.split(",")] if probabilities and len(paths) > 1 else []
    described: list[dict[str, Any]] = []
    for position, path in enumerate(paths):
        path, _, part = path.partition("@")
        if part:
            flags.remarks.append(
                f"All of `{path}` is read, not only its folder `{part}`: give that folder's files as `path`."
            )
        weight = {"weight": weights[position]} if position < len(weights) else {}
        described.append({"path": rows(path, flags), **weight})
    return described


def with_split(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """``a,b`` as sources with the split `--eval_split`, which OpenRLHF uses if a data set has splits."""
    described = []
    for path in " ".join(words).split(","):
        path = path.strip()
        are_files = (flags.folder / path).exists() or is_written_as_path(path) or row_suffix(path) is not None
        split = flags.text("eval_split") if not are_files or "eval_split" in flags.given else ""
        described.append({"path": rows(path, flags), **({"split": split} if split else {})})
    return described


def held_out(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """The rows of `--eval_dataset` as held-out sources."""
    return [{**source, "held_out": True} for source in with_split(words, flags)]


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


def eval_steps(words: Words, flags: Flags) -> int | None:
    """Steps between evaluations on held-out rows. Raises NoCounterpart if there are none."""
    every = convert.positive(words, flags)
    if every and "eval_dataset" not in flags.given:
        raise NoCounterpart("no rows are held out: set `test_rows` of the data, and then `training.eval_steps`.")
    return every


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
    counts = [count_rows(path.strip(), flags) for path in flags.text("prompt_data").split(",")]
    if all(rows is not None for rows in counts):
        count = min(count or float("inf"), sum(rows or 0 for rows in counts))
    return convert.steps_of_rows(
        count, flags.number("rollout_batch_size", 1024), flags.number("num_episodes", 1), flags
    )


def reward_models(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """A reward for each of the models, whose rewards OpenRLHF adds."""
    return [{"reward_model": model([name.strip()], flags)} for name in " ".join(words).split(",")]


def normalise(words: Words, flags: Flags) -> str:
    """`--normalize_reward`, with the mean and deviation that the reward model stores."""
    flags.remarks.append(
        "`normalise: model` requires a reward model that was trained here, which stores mean and deviation of its rewards; for "
        "others the nearest is `running`."
    )
    return "model"


def remote_rewards(words: Words, flags: Flags) -> list[dict[str, Any]]:
    """`--remote_rm_url`: a file with `reward_func`, or replicas of an endpoint."""
    address = " ".join(words)
    if address.endswith(".py"):
        return [{"function": code(f"{address}:reward_func", flags)}]
    return [{"urls": [url.strip() for url in address.split(",")]}]


def environment(words: Words, flags: Flags) -> Any:
    """`--agent_func_path`: a file that has to be rewritten, because the interface differs."""
    flags.remarks.append(
        "`rl.environment.name` needs a class `Environment` with `reset` and `step` in place of OpenRLHF's `AgentExecutor` "
        "(docs/recipes/environments.md)."
    )
    return {"name": code(f"{' '.join(words)}:Environment", flags)}, [{"environment": True}]


def placement(words: Words, flags: Flags) -> str:
    """Whether engines have GPUs of their own."""
    return "colocated" if flags.on("colocate_all_models") and not flags.on("async_train") else "disaggregated"


def engines(words: Words, flags: Flags) -> Any:
    """The number of engines, and their placement."""
    return convert.positive(words, flags), placement(words, flags)


def trainers(words: Words, flags: Flags) -> int:
    """Ranks of the policy's trainer."""
    return int(flags.number("actor_num_gpus_per_node", 8) * flags.number("actor_num_nodes", 1))


COMMANDS, ELSEWHERE, NAMES = tables.load("openrlhf", {**vars(convert), **globals()})
