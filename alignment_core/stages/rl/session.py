"""A run of the stage from its inputs to its artifact: everything that the driver works with is opened here, and closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alignment_core.data.completion_text import CompletionText
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import chat_template_of, eos_token_ids
from alignment_core.environments.environments import Environments
from alignment_core.errors import DataError, UserError
from alignment_core.execution.base import StageContext
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.inference.engines import EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.scoring_actors import has_another_tokenizer, in_actors
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.lengths import check_length
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.sampling import Sampling
from alignment_core.rollout.sync_sampler import SyncSampler
from alignment_core.stages.rl.best import Best
from alignment_core.stages.rl.driver import Driver
from alignment_core.stages.rl.names import BEST, FIELD, TRAJECTORIES
from alignment_core.stages.rl.reward_step import Rewarding
from alignment_core.stages.rl.trajectories import Trajectories
from alignment_core.training.checkpoints import drop_incomplete, link_tree
from alignment_core.training.policy_ranks import PolicyRanks
from alignment_core.training.policy_trainer import RlJob
from alignment_core.training.training_rows import shuffles

END_SECONDS = 0.2
"""How long a call that is under way goes on when the run is stopped."""


def run(context: StageContext, section: RlConfig) -> dict[str, Any]:
    """Learn, and write the models and trajectories; metrics."""
    policy = context.model("policy")
    tokenizer = policy.tokenizer()
    prompts = _read_prompts(context.inputs["prompts"])
    best = None
    if section.best is not None:
        best = Best(context, section, section.best, _read_prompts(context.inputs["held_out"]))
    warnings: list[str] = []
    sources = _sources(context, section, tokenizer, prompts, warnings)
    chat_template = chat_template_of(context.inputs["prompts"])
    turn_end = Renderer(tokenizer, chat_template, eos_token_ids(policy.path)).turn_end
    environments = _environments(context, section, tokenizer, chat_template)
    pretraining = _pretraining(context, section)
    critic = critic_of(context, section, tokenizer, warnings)
    reference, scratch = _reference(context, tokenizer), context.progress
    longest = max(len(prompt["prompt_ids"]) for prompt in [*prompts, *(best.draws.prompts if best else ())])
    length = longest + section.generation.max_completion_length
    check_length(policy.path, longest, length)
    job = RlJob(section, policy, critic, context.seed, pretraining, reference, scratch, length)
    request = EngineRequest(policy, length)
    drop_incomplete(context.progress)
    watch = Stopwatch()
    rewarding = Rewarding(section, sources, watch, context.cost)
    draws = PromptSchedule(
        prompts, section.generation, context.seed, shuffle=shuffles(_table(context.inputs["prompts"]))
    )
    trajectories = Trajectories(context.progress / TRAJECTORIES, section.trajectories, section.steps)
    with (
        closing(trajectories),
        context.machines.engines_and_trainers(request, context.ticket) as (engines, trainers),
        sources,
        closing(environments) if environments else nullcontext(),
    ):
        start = str(policy.reference) + (" in 4 bits" if section.training.in_4bit else "")
        text = CompletionText(tokenizer, turn_end)
        sampling = Sampling(engines, environments, draws, text, turn_end.stop_ids, start, context.stopping)
        ends = [sources.stop, *([environments.close] if environments else [])]
        with closing(_sampler(context, section, sampling, rewarding)) as sampler, _ended_when(context.stopping, *ends):
            ranks = PolicyRanks(trainers, job, context.resources)
            driver = Driver(
                context, section, engines, ranks, sampling, sampler, rewarding, sources, best, trajectories, watch
            )
            metrics = driver.run()
    if warnings:
        metrics["warnings"] = [*warnings, *metrics.get("warnings", ())]
    link_tree(context.progress / TRAJECTORIES, context.outputs[TRAJECTORIES])
    if best:
        metrics |= best.link_to(context.outputs[BEST])
    context.cost.update({f"failed_rewards_{reason}": count for reason, count in sources.failed.items()})
    context.cost.update({f"{name}_seconds": round(value, 3) for name, value in watch.seconds.items()})
    return metrics


def _sources(
    context: StageContext, section: RlConfig, tokenizer: Any, prompts: list[dict[str, Any]], warnings: list[str]
) -> RewardSources:
    """``warnings`` takes what people should know of them once they are open."""
    opening = Opening(
        FIELD,
        context.resources,
        tokenizer=tokenizer,
        policy=context.references["policy"].short,
        prompts=prompts,
        warnings=warnings,
        elsewhere=context.machines.actors.elsewhere,
        scores=in_actors(context.machines.actors, context.resources),
        starting=context.ticket.starting,
    )
    models = {number: context.model(f"reward-{number}") for number, one in enumerate(section.rewards) if one.model}
    of_a_step = section.prompts_per_step * section.generation.num_generations
    return RewardSources(section.rewards, opening, models, of_a_step)


def _environments(
    context: StageContext, section: RlConfig, tokenizer: Any, chat_template: str | None
) -> Environments | None:
    if section.environment is None:
        return None
    return Environments(
        section.environment,
        tokenizer,
        processes=context.resources.environment_processes,
        timeout=context.resources.reward_timeout_seconds,
        chat_template=chat_template,
        eos_token_ids=eos_token_ids(context.model("policy").path),
    )


def _sampler(
    context: StageContext, section: RlConfig, sampling: Sampling, rewarding: Rewarding
) -> SyncSampler | AsyncSampler:
    """What draws prompts and has them answered and rewarded."""
    if section.execution.max_staleness == 0:
        return SyncSampler(sampling, rewarding.of, context.resources.placement == "colocated")
    return AsyncSampler(
        sampling,
        rewarding.of,
        prompts_per_step=section.prompts_per_step,
        steps=section.steps,
        max_staleness=section.execution.max_staleness,
        partial=section.execution.partial_rollouts,
    )


def critic_of(context: StageContext, section: RlConfig, tokenizer: Any, warnings: list[str]) -> Model | None:
    """Where the critic starts, if there is one: at the first reward model if it reads the policy's tokens, or else at the
    policy. ``warnings`` takes what people should know of it."""
    if section.critic is None:
        return None
    policy = context.model("policy")
    if "critic" not in context.inputs:
        return policy
    model = context.model("critic")
    if not has_another_tokenizer(model, tokenizer):
        return model
    warnings.append(
        f"rl.critic: {model.reference.short} has another tokenizer than {policy.reference.short}, so the critic is "
        "initialised from the policy, with a new head"
    )
    return policy


def _reference(context: StageContext, tokenizer: Any) -> Model | None:
    """The model that the KL is measured to, where it is not the start. Raises UserError for another tokenizer."""
    if "reference" not in context.inputs:
        return None
    model = context.model("reference")
    if has_another_tokenizer(model, tokenizer):
        raise UserError(
            f"rl.kl.reference: {model.reference.short} has another tokenizer than the policy, whose tokens it could not read; "
            "give a model with the policy's tokenizer"
        )
    return model


def _pretraining(context: StageContext, section: RlConfig) -> Path | None:
    if section.pretraining is None:
        return None
    path = context.inputs["pretraining"] / "train.parquet"
    if not path.is_file():
        raise DataError("the data set of rl.pretraining holds no training rows")
    return path


def _read_prompts(data: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    if not _table(data).is_file():
        raise DataError("there are no prompts to sample for")
    return pq.read_table(_table(data)).to_pylist()


def _table(data: Path) -> Path:
    return data / "train.parquet"


@contextmanager
def _ended_when(stopping: threading.Event, *end: Callable[[], None]) -> Iterator[None]:
    """Once ``stopping`` is set, call all of ``end`` from another thread, again and again: a next call has no time either."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(END_SECONDS):
            if stopping.is_set():
                for one in end:
                    one()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
