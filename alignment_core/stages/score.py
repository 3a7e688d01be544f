"""Stage: score completions by a list of rewards, by a verifier, and by their log-probability under a reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from alignment_core.data.completion_text import CompletionText, with_special_tokens
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import TurnEnd, chat_template_of, eos_token_ids
from alignment_core.errors import DataError, NumericError
from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.execution.forward_passes import ForwardPasses
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.rewards import CHOICE, Reward, RewardConfig
from alignment_core.rewards import base as rewards
from alignment_core.rewards.aggregation import RunningMean, means_by_source, total_rewards
from alignment_core.rewards.base import Opening
from alignment_core.rewards.results import MissingRewards, extras, numbers, reasons
from alignment_core.rewards.scoring_actors import BLOCK, check_tokenizer, pairs_of
from alignment_core.rewards.sources import RewardSources
from alignment_core.rewards.verify import verifier_code, verifier_content, verifier_packages, verify
from alignment_core.rollout.images import with_paths
from alignment_core.rollout.schemas import SCORES, read_rollouts, score_schema, write_table


class ScoreConfig(StageConfig):
    """The scores. Inputs are the ``reference``, the reward models (``reward-<number of the reward>``), and, with rewards or if
    the verifier sees special tokens, the model whose ``tokenizer`` the completions have."""

    rewards: tuple[Reward, ...] = ()
    """Their weighted sum is the column ``reward``."""
    field: str = "evaluation.rewards"
    """Their field in the recipe, for messages."""
    across_policies: bool = False
    """Whether scores are compared between policies with different chat templates, or none."""
    verifier: str | None = None
    max_failed_rewards: float = 0.0
    """Maximum fraction of completions without a result of the verifier."""
    skip_special_tokens: bool = True
    """Whether to remove special tokens from the text for the verifier."""
    temperature: float = 1.0
    """Temperature of the reference's distribution: that of sampling, so that both log-probabilities are comparable."""
    max_completion_length: int | None = None
    """With a reference: that of sampling, because rotary positions of some models depend on the engine's longest sequence."""

    def content(self) -> Any:
        listed = {
            "rewards": rewards.content(self.rewards, self.field),
            "temperature": self.temperature,
            "max_completion_length": self.max_completion_length,
        }
        if self.across_policies and any(reward.KEY == "reward_model" for reward in self.rewards):
            listed["across_policies"] = True
        if self.verifier is None:
            return {**listed, "verifier": None}
        verifier = {"verifier": verifier_content(self.verifier), "max_failed_rewards": self.max_failed_rewards}
        if not self.skip_special_tokens:
            verifier["skip_special_tokens"] = False
        return {**listed, **verifier}

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
    rollouts = with_paths(read_rollouts(context.inputs["rollouts"]), context.inputs["rollouts"])
    columns: dict[str, Sequence[Any]] = {}
    metrics: dict[str, float] = {}
    passes = ForwardPasses(context, BLOCK)
    warnings: list[str] = []
    sources = _sources(context, config, rollouts, passes, warnings) if config.rewards else None
    of_models = any(rewards.kind_of(reward).actors for reward in config.rewards)
    with passes.using_trainers() if of_models or "reference" in context.inputs else nullcontext():
        if sources:
            columns, metrics = _rewarded(context, config, rollouts, sources, warnings)
        if "reference" in context.inputs:
            check_tokenizer(context.model("reference"), "reference", rollouts)
            columns["reference_logp"] = _logps(passes, context.model("reference"), rollouts, config)
    if config.verifier:
        resources, most = context.resources, config.max_failed_rewards
        shown = rollouts
        if not config.skip_special_tokens:
            tokenizer = context.model("tokenizer").tokenizer()
            text = CompletionText(tokenizer, _turn_end(context, tokenizer), skip_special_tokens=False)
            shown = with_special_tokens(rollouts, text)
        columns["verifier"] = verify(
            config.verifier,
            shown,
            resources.reward_timeout_seconds,
            most,
            processes=resources.reward_processes,
            elsewhere=context.machines.actors.elsewhere,
            load_timeout=resources.reward_load_timeout_seconds,
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
    scored = [name for name in ("reward", "verifier") if name in columns]
    failed = sum(any(row[name] is None for name in scored) for row in rows)
    notes = {"warnings": warnings} if warnings else {}
    return {"completions": len(rows), **({"failed_rewards": failed} if scored else {}), **metrics, **notes}


def _turn_end(context: StageContext, tokenizer: Any) -> TurnEnd:
    """The end of the turns of the policy, whose model is the input ``tokenizer``."""
    template = chat_template_of(context.inputs["rollouts"])
    return Renderer(tokenizer, template, eos_token_ids(context.inputs["tokenizer"])).turn_end


def _sources(
    context: StageContext,
    config: ScoreConfig,
    rollouts: list[dict[str, Any]],
    passes: ForwardPasses,
    warnings: list[str],
) -> RewardSources:
    """Open the rewards. Raises the errors of opening them, before any machine is acquired; ``warnings`` gets their warnings."""
    prompts = {row["prompt"]: {**row, "prompt": row["prompt_text"]} for row in rollouts}
    tokenizer = context.model("tokenizer").tokenizer()
    opening = Opening(
        config.field,
        context.resources,
        tokenizer=tokenizer,
        turn_end=_turn_end(context, tokenizer),
        chat_template=chat_template_of(context.inputs["rollouts"]),
        across_policies=config.across_policies,
        policy=context.references["tokenizer"].short,
        prompts=list(prompts.values()),
        elsewhere=context.machines.actors.elsewhere,
        scores=passes.scores,
        starting=context.ticket.starting,
        warnings=warnings,
        over=passes.over,
        progress=context.progress,
    )
    models = {number: context.model(f"reward-{number}") for number, reward in enumerate(config.rewards) if reward.model}
    return RewardSources(config.rewards, opening, models)


def _rewarded(
    context: StageContext,
    config: ScoreConfig,
    rollouts: list[dict[str, Any]],
    sources: RewardSources,
    warnings: list[str],
) -> tuple[dict[str, Sequence[Any]], dict[str, float]]:
    """Columns of the rewards by source and of their weighted sum, and their means. The sum is missing if a source failed or all
    sources ignore the completion; ``warnings`` gets the number of missing ones."""
    with sources:
        given = list(zip(*sources([{**row, "group": row["prompt"]} for row in rollouts]), strict=True))
    complete = [number for number, values in enumerate(given) if reasons(values) is None]
    if not complete:
        raise DataError(f"{config.field}: no completion has a reward")
    context.cost["failed_rewards"] = len(given) - len(complete)
    context.cost.update({f"failed_rewards_{reason}": count for reason, count in sources.failed.items()})
    missing = MissingRewards(len(config.rewards))
    missing.add([numbers(values) for values in given], [reasons(values) for values in given])
    warnings += missing.warnings(
        [rewards.kind_of(reward).description(reward) for reward in config.rewards], config.field
    )
    raw_SR = np.array([numbers(given[number]) for number in complete], float)
    groups_S = np.array([rollouts[number]["prompt"] for number in complete])
    total_S = total_rewards(raw_SR, groups_S, config.rewards, [RunningMean() for _ in config.rewards])
    total = dict(zip(complete, total_S.tolist(), strict=True))
    columns: dict[str, Sequence[Any]] = {"reward": [total.get(number) for number in range(len(given))]}
    columns["rewards"] = [numbers(values) for values in given]
    by_source = means_by_source(raw_SR) if len(config.rewards) > 1 else {}
    means = {f"reward_{number}": mean for number, mean in by_source.items()}
    logged = [extras(values) for values in given]
    for name in sorted({name for values in logged for name in values}):
        means[f"extra_{name}"] = float(np.mean([values[name] for values in logged if name in values]))
    return columns, means


def _logps(passes: ForwardPasses, model: Model, rollouts: list[dict[str, Any]], config: ScoreConfig) -> list[float]:
    """The log-probability of each completion under a model, at the temperature and rotary positions of sampling."""
    longest = None
    if config.max_completion_length is not None:
        longest = max(len(row["prompt_ids"]) for row in rollouts) + config.max_completion_length
    logps = passes(model, "lm", "reference", pairs_of(rollouts), temperature=config.temperature, longest=longest)
    wrong = np.flatnonzero(~np.isfinite(logps))
    if len(wrong):
        raise NumericError(
            f"{len(wrong)} of {len(logps)} completions have a log-probability that is not finite; the first belongs to the "
            f"prompt of {rollouts[wrong[0]]['source']}"
        )
    return logps.tolist()


SHOWS = titles("mean_verifier", "mean_reward")
STAGE = Stage("score", 4, {"scores": "scores"}, ScoreConfig, run, SHOWS, packages=("jinja2", "torch", "transformers"))
