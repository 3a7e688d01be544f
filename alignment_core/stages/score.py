"""Stage: score completions by a list of rewards, by a verifier, and by their log-probability under a reference."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.errors import DataError, NumericError, Stopped
from alignment_core.execution.base import Stage, StageConfig, StageContext, below
from alignment_core.files import write_whole
from alignment_core.models.handle import Model
from alignment_core.recipes.sections.rewards import CHOICE, Reward, RewardConfig
from alignment_core.rewards import base as rewards
from alignment_core.rewards.base import Opening, Pair, Scores
from alignment_core.rewards.failures import extras, numbers, reasons
from alignment_core.rewards.judges import BLOCK, check_tokenizer, distinct, pairs_of
from alignment_core.rewards.sources import RewardSources
from alignment_core.rewards.totals import RunningMean, total_rewards
from alignment_core.rewards.verify import verifier_code, verifier_content, verifier_packages, verify
from alignment_core.rollout.records import SCORES, read_rollouts, score_schema, write_table

if TYPE_CHECKING:
    from alignment_core.models.loading import Head
    from alignment_core.training.trainers import Trainers


class ScoreConfig(StageConfig):
    """Which scores. Inputs are the ``reference``, the reward models (``reward-<number of the reward>``), and where there are
    rewards, whose ``tokenizer`` made the completions."""

    rewards: tuple[Reward, ...] = ()
    """Their weighted sum is the column ``reward``."""
    field: str = "evaluation.rewards"
    """Where the recipe has them; for messages."""
    verifier: str | None = None
    max_failed_rewards: float = 0.0
    """Share of the completions that the verifier may leave without a reward."""

    def content(self) -> Any:
        listed = rewards.content(self.rewards, self.field)
        if self.verifier is None:
            return {"rewards": listed, "verifier": None}
        verifier = {"verifier": verifier_content(self.verifier), "max_failed_rewards": self.max_failed_rewards}
        return {"rewards": listed, **verifier}

    def code_used(self) -> tuple[str, ...]:
        return (*rewards.code_used(self.rewards), *(verifier_code(self.verifier) if self.verifier else ()))

    def packages_used(self) -> tuple[str, ...]:
        return (*rewards.packages_used(self.rewards), *(verifier_packages(self.verifier) if self.verifier else ()))

    def rewarded(self) -> dict[str, RewardConfig]:
        listed = {f"{self.field}.{number}": reward for number, reward in enumerate(self.rewards)}
        if self.verifier is None:
            return listed
        verifier = CHOICE.validate({"verifier": self.verifier, "max_failed": self.max_failed_rewards})
        return listed | {"evaluation": verifier}


def run(context: StageContext, config: ScoreConfig) -> dict[str, Any]:
    rollouts = read_rollouts(context.inputs["rollouts"])
    columns: dict[str, Sequence[Any]] = {}
    metrics: dict[str, float] = {}
    passes = _ForwardPasses(context)
    warnings: list[str] = []
    sources = _sources(context, config, rollouts, passes, warnings) if config.rewards else None
    of_models = any(rewards.kind_of(one).actors for one in config.rewards)
    with passes.held() if of_models or "reference" in context.inputs else nullcontext():
        if sources:
            columns, metrics = _rewarded(context, config, rollouts, sources)
        if "reference" in context.inputs:
            check_tokenizer(context.model("reference"), "reference", rollouts)
            columns["reference_logp"] = _logps(passes, context.model("reference"), rollouts)
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
    for name, values in columns.items():
        if name != "rewards":
            metrics[f"mean_{name}"] = float(np.mean([value for value in values if value is not None]))
    asked = [name for name in ("reward", "verifier") if name in columns]
    failed = sum(any(row[name] is None for name in asked) for row in rows)
    told = {"warnings": warnings} if warnings else {}
    return {"completions": len(rows), **({"failed_rewards": failed} if asked else {}), **metrics, **told}


def _sources(
    context: StageContext,
    config: ScoreConfig,
    rollouts: list[dict[str, Any]],
    passes: _ForwardPasses,
    warnings: list[str],
) -> RewardSources:
    """Raises what opening a reward raises, before any machine is taken. ``warnings`` takes what people should know of them once
    they are open."""
    prompts = {row["prompt"]: {**row, "prompt": row["prompt_text"]} for row in rollouts}
    opening = Opening(
        config.field,
        context.resources,
        tokenizer=context.model("tokenizer").tokenizer(),
        policy=context.references["tokenizer"].short,
        prompts=list(prompts.values()),
        elsewhere=context.machines.elsewhere,
        scores=passes.scores,
        warnings=warnings,
        over=passes.over,
    )
    models = {number: context.model(f"reward-{number}") for number, one in enumerate(config.rewards) if one.model}
    return RewardSources(config.rewards, opening, models)


def _rewarded(
    context: StageContext, config: ScoreConfig, rollouts: list[dict[str, Any]], sources: RewardSources
) -> tuple[dict[str, Sequence[Any]], dict[str, float]]:
    """Columns of what each source gives, and of the weighted sum, which is missing where a source failed; and their means."""
    with sources:
        given = list(zip(*sources([{**row, "group": row["prompt"]} for row in rollouts]), strict=True))
    complete = [number for number, one in enumerate(given) if reasons(one) is None]
    if not complete:
        raise DataError(f"{config.field}: no completion has all of its rewards")
    context.cost["failed_rewards"] = len(given) - len(complete)
    context.cost.update({f"failed_rewards_{reason}": count for reason, count in sources.failed.items()})
    raw_SR = np.array([numbers(given[number]) for number in complete])
    groups_S = np.array([rollouts[number]["prompt"] for number in complete])
    total_S = total_rewards(raw_SR, groups_S, config.rewards, [RunningMean() for _ in config.rewards])
    total = dict(zip(complete, total_S.tolist(), strict=True))
    columns: dict[str, Sequence[Any]] = {"reward": [total.get(number) for number in range(len(given))]}
    columns["rewards"] = [numbers(one) for one in given]
    several = raw_SR.T if len(config.rewards) > 1 else ()
    means = {f"reward_{number}": float(values.mean()) for number, values in enumerate(several)}
    shown = [extras(one) for one in given]
    for name in sorted({name for one in shown for name in one}):
        means[f"extra_{name}"] = float(np.mean([one[name] for one in shown if name in one]))
    return columns, means


def _logps(passes: _ForwardPasses, model: Model, rollouts: list[dict[str, Any]]) -> list[float]:
    """The log-probability of each completion under a model."""
    pairs, places = distinct(pairs_of(rollouts))  # the same completion of the same prompt is scored once
    logps = passes(model, "lm", "reference", pairs)[places]
    wrong = np.flatnonzero(~np.isfinite(logps))
    if len(wrong):
        raise NumericError(
            f"{len(wrong)} of {len(logps)} completions have a log-probability that is not finite; the first answers the "
            f"prompt of {rollouts[wrong[0]]['source']}"
        )
    return logps.tolist()


class _ForwardPasses:
    """Forward passes of models over the trainer ranks, which one model has at a time; from any thread, while they are held.

    Finished blocks lie in the progress folder, where an attempt after this one finds them.
    """

    def __init__(self, context: StageContext) -> None:
        self.context, self._alone = context, threading.Lock()
        self._trainers: Trainers | None = None
        self.over = threading.Event()
        """Set once nobody waits for scores any more."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the trainers."""
        with self.context.machines.trainers(self.context.ticket) as self._trainers:
            yield

    @contextmanager
    def scores(self, model: Model, name: str) -> Iterator[Scores]:
        """A reward model as :class:`Opening` has it."""
        yield lambda pairs: self(model, "score", name, pairs, self.over).tolist()

    def __call__(
        self, model: Model, head: Head, name: str, pairs: Sequence[Pair], over: threading.Event | None = None
    ) -> np.ndarray:
        """One number for each pair; the files of the blocks begin with ``name``. Raises Stopped at the end of the block that is
        under way when ``over`` is set."""
        from alignment_core.training.forward import ForwardJob
        from alignment_core.training.forward_ranks import ForwardRanks

        assert self._trainers is not None, "the trainers are not held"
        context = self.context
        blocks = [pairs[first : first + BLOCK] for first in range(0, len(pairs), BLOCK)]
        files = [context.progress / f"{name}-{_digest(model, head, block)}.npy" for block in blocks]
        values = {number: np.load(file) for number, file in enumerate(files) if file.is_file()}
        left = [(number, block) for number, block in enumerate(blocks) if number not in values]
        with self._alone:
            _check(over)
            started = time.monotonic()
            ranks = ForwardRanks(self._trainers, ForwardJob(model, head), context.resources)
            context.report(len(values), len(blocks), "blocks")
            for number, result in ranks.run(left):
                write_whole(files[number], partial(np.save, arr=result))
                values[number] = result
                _check(over)
                context.report(len(values), len(blocks), "blocks")
            scored = sum(len(prompt) + len(completion) for _, block in left for prompt, completion in block)
            for what, value in (("score_seconds", time.monotonic() - started), ("score_tokens", scored)):
                context.cost[what] = round(context.cost.get(what, 0.0) + value, 3)
        return np.concatenate([values[number] for number in range(len(blocks))])


def _check(over: threading.Event | None) -> None:
    if over is not None and over.is_set():
        raise Stopped("nobody waits for these scores")


def _digest(model: Model, head: Head, block: Sequence[Pair]) -> str:
    """Of what decides the numbers of a block: a model may be asked several times, and several under one name."""
    found = hashlib.sha256(f"{model.reference} {head}".encode())
    for ids in (ids for pair in block for ids in pair):
        found.update(len(ids).to_bytes(8, "little"))
        found.update(np.asarray(ids, np.int32).tobytes())
    return found.hexdigest()[:32]


SHOWS = {"mean_verifier": "verifier", "mean_reward": "reward"}
CODE = (
    "alignment_core.files",
    "alignment_core.losses.logprobs",
    *below("alignment_core.models", "attention handle loading microbatch packed prefix_tree saving"),
    *below("alignment_core.rewards", "base failures judges named sources totals verify"),
    "alignment_core.rollout.records",
    *below("alignment_core.training", "batches forward forward_ranks memory trainers worker"),
    *below("alignment_core.user_code", "conventions failed functions pool process"),
)
STAGE = Stage("score", 3, {"scores": "scores"}, ScoreConfig, run, SHOWS, code=CODE, packages=("torch", "transformers"))
