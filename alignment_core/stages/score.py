"""Stage: score completions by a reward model, by a verifier, and by their log-probability under a reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.errors import NumericError
from alignment_core.execution.base import Stage, StageConfig, StageContext, below
from alignment_core.files import write_whole
from alignment_core.models.handle import Model
from alignment_core.rewards.judges import BLOCK, check_tokenizer, distinct
from alignment_core.rewards.verify import verifier_code, verifier_content, verifier_packages, verify
from alignment_core.rollout.records import SCORES, read_rollouts, score_schema, write_table

if TYPE_CHECKING:
    from alignment_core.models.packed import Head


class ScoreConfig(StageConfig):
    """Which scores; the reward model and the reference are inputs."""

    verifier: str | None = None
    max_failed_rewards: float = 0.0
    """Share of the completions that the verifier may leave without a reward."""

    def content(self) -> Any:
        if self.verifier is None:
            return {"verifier": None}
        return {"verifier": verifier_content(self.verifier), "max_failed_rewards": self.max_failed_rewards}

    def code_used(self) -> tuple[str, ...]:
        return verifier_code(self.verifier) if self.verifier else ()

    def packages_used(self) -> tuple[str, ...]:
        return verifier_packages(self.verifier) if self.verifier else ()


def run(context: StageContext, config: ScoreConfig) -> dict[str, Any]:
    rollouts = read_rollouts(context.inputs["rollouts"])
    columns: dict[str, Sequence[float | None]] = {}
    forward: tuple[tuple[str, Head, str], ...]
    forward = (("reward_model", "score", "reward"), ("reference", "lm", "reference_logp"))
    for role, head, name in forward:
        if role in context.inputs:
            check_tokenizer(context.model(role), role.replace("_", " "), rollouts)
            columns[name] = _forward(context, context.model(role), head, rollouts)
    if config.verifier:
        resources, most = context.resources, config.max_failed_rewards
        columns["verifier"] = verify(
            config.verifier,
            rollouts,
            resources.reward_timeout_seconds,
            most,
            processes=resources.reward_processes,
            elsewhere=context.machines.elsewhere,
        )
    rows = [
        {
            "prompt": row["prompt"],
            "sample": row["sample"],
            "tokens": len(row["completion_ids"]),
            "finish_reason": row["finish_reason"],
            "policy_logp": float(np.sum(row["logps"], dtype=np.float64)),
            **{name: values[number] for name, values in columns.items()},
        }
        for number, row in enumerate(rollouts)
    ]
    write_table(rows, score_schema(), context.output / SCORES)
    given = {name: [value for value in values if value is not None] for name, values in columns.items()}
    failed = {"failed_rewards": len(rows) - len(given["verifier"])} if config.verifier else {}
    return {"completions": len(rows), **failed, **{f"mean_{name}": float(np.mean(given[name])) for name in given}}


def _forward(context: StageContext, model: Model, head: Head, rollouts: list[dict[str, Any]]) -> list[float]:
    """One number per completion from the model's forward pass, spread over the trainer ranks.

    Finished blocks lie in the progress folder, where an attempt after this one finds them.
    """
    from alignment_core.training.forward import ForwardJob
    from alignment_core.training.forward_ranks import ForwardRanks

    pairs, places = distinct(rollouts)  # the same completion of the same prompt is scored once
    blocks = [pairs[i : i + BLOCK] for i in range(0, len(pairs), BLOCK)]
    files = [context.progress / f"{head}-{number:05d}.npy" for number in range(len(blocks))]
    values = {number: np.load(file) for number, file in enumerate(files) if file.is_file()}
    left = [(number, block) for number, block in enumerate(blocks) if number not in values]
    started = time.monotonic()
    with context.machines.trainers(context.ticket) as trainers:
        ranks = ForwardRanks(trainers, ForwardJob(model, head), context.resources)
        context.report(len(values), len(blocks), "blocks")
        for number, result in ranks.run(left):
            write_whole(files[number], partial(np.save, arr=result))
            values[number] = result
            context.report(len(values), len(blocks), "blocks")
    scored = sum(len(prompt) + len(completion) for _, block in left for prompt, completion in block)
    for name, value in (("score_seconds", time.monotonic() - started), ("score_tokens", scored)):
        context.cost[name] = round(context.cost.get(name, 0.0) + value, 3)
    joined = np.concatenate([values[number] for number in range(len(blocks))])[places]
    wrong = np.flatnonzero(~np.isfinite(joined))
    if len(wrong):
        raise NumericError(
            f"{len(wrong)} of {len(joined)} completions have a score that is not finite; the first answers the prompt of "
            f"{rollouts[wrong[0]]['source']}"
        )
    return joined.tolist()


SHOWS = {"mean_verifier": "verifier", "mean_reward": "reward"}
CODE = (
    "alignment_core.files",
    "alignment_core.losses.logprobs",
    *below("alignment_core.models", "handle microbatch packed saving"),
    *below("alignment_core.rewards", "base failures judges named verify"),
    "alignment_core.rollout.records",
    *below("alignment_core.training", "batches forward forward_ranks memory trainers worker"),
    *below("alignment_core.user_code", "conventions failed functions pool process"),
)
STAGE = Stage("score", 1, {"scores": "scores"}, ScoreConfig, run, SHOWS, code=CODE, packages=("torch", "transformers"))
