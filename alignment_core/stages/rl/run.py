"""The run of the stage around its loop: opens models, engines, trainers, rewards and environments, and links the outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alignment_core.data.completion_text import CompletionText
from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.environments.environments import Environments, chat_template_of_turns
from alignment_core.environments.observed_images import ObservedImages
from alignment_core.errors import DataError, UserError
from alignment_core.execution.base import StageContext
from alignment_core.execution.metric_window import movement
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.inference.decoding import Decoding
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.inference.images import never_sampled
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import read_json
from alignment_core.recipes.sections.rl import REWARDS_FIELD, RlConfig
from alignment_core.rewards.model_reward import spread_of
from alignment_core.rewards.scoring_actors import has_another_tokenizer
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.images import have_images, with_paths
from alignment_core.rollout.lengths import check_length
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.sampling import Sampling, SyncSampler
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.stages.rl.best import Best
from alignment_core.stages.rl.loop import Loop
from alignment_core.stages.rl.rewards import Rewards, open_sources
from alignment_core.stages.rl.weights import WeightSync
from alignment_core.training.checkpoints import drop_incomplete, link_tree
from alignment_core.training.policy_groups import open_groups
from alignment_core.training.policy_trainer import RlJob
from alignment_core.training.training_rows import shuffles, table_has_images

OBSERVED = "observed"
"""Folder of the progress with the images of observations."""
STOP_SECONDS = 0.2
"""Interval at which calls in progress are ended once the run is being stopped."""


def run_section(context: StageContext, section: RlConfig, shows: Container[str]) -> dict[str, Any]:
    """Open everything that the loop needs, run it, and link its outputs; metrics. ``shows`` are the stage's key metrics."""
    policy = context.model("policy")
    tokenizer = policy.tokenizer()
    prompts = _read_prompts(context.inputs["prompts"])
    best = None
    if section.best is not None:
        best = Best(context, section, section.best, _read_prompts(context.inputs["held_out"]))
    warnings: list[str] = []
    chat_template = chat_template_of_turns(section.environment, context.inputs["prompts"])
    turn_end = Renderer(tokenizer, chat_template, eos_token_ids(policy.path)).turn_end
    rewarded = [*prompts, *(best.schedule.prompts if best else ())]
    sources = open_sources(context, section, tokenizer, chat_template, turn_end, rewarded, warnings)
    environments = _environments(context, section, tokenizer, chat_template)
    with_images = have_images(prompts) or (section.environment is not None and section.environment.images)
    longest_prompt = max(len(prompt["prompt_ids"]) for prompt in rewarded)
    length = longest_prompt + section.generation.max_completion_length
    check_length(policy.path, longest_prompt, length)
    critic = critic_of(context, section, tokenizer, warnings)
    pretraining = _pretraining(context, section)
    job = RlJob(
        section,
        policy,
        critic,
        context.seed,
        pretraining,
        _reference(context, tokenizer),
        context.progress,
        length,
        masters=context.masters("policy") if section.training.saves_masters else None,
        chat_template=chat_template,
        has_images=with_images or (pretraining is not None and table_has_images(pretraining)),
    )
    drop_incomplete(context.progress)
    watch = Stopwatch()
    rewards = Rewards(section, sources, watch, context.cost, reward_of_critic(context, section, critic))
    shuffle = shuffles(_table(context.inputs["prompts"]))
    schedule = PromptSchedule(prompts, section.generation, context.seed, shuffle=shuffle)
    trajectories = Trajectories(context.progress / "trajectories", section.trajectories, section.steps, with_images)
    request = EngineRequest(policy, length, section.training.dtype)
    with (
        closing(trajectories),
        context.machines.engines_and_trainers(request, context.ticket) as (engines, trainers),
        sources,
        closing(environments) if environments else nullcontext(),
    ):
        name = str(policy.reference) + (f" in {bits} bits" if (bits := section.training.base_bits) else "")
        text = CompletionText(tokenizer, turn_end)
        special = not all(reward.skip_special_tokens for reward in section.rewards)
        decoding = None if environments else Decoding(policy, turn_end, special)
        sampling = Sampling(engines, environments, schedule, text, turn_end.stop_ids, decoding, name, context.stopping)
        ends = [sources.stop, *([environments.close] if environments else [])]
        with closing(_sampler(context, section, sampling, rewards)) as sampler, _ended_when(context.stopping, *ends):
            rests = trainers.device.trainers_rest(context.resources, section.execution.max_staleness)
            if rests:
                sampler.release()  # until the trainers have loaded their models, and rest
            ranks = open_groups(trainers, job, context.resources, rests)
            weights = WeightSync(context, section, engines, ranks, name)
            loop = Loop(context, section, ranks, weights, sampling, sampler, rewards, best, trajectories, watch, shows)
            metrics = loop.run()
            weights.close()
    link_tree(trajectories.folder, context.outputs["trajectories"])
    trajectories.copy_images(context.progress / OBSERVED, context.inputs["prompts"], context.outputs["trajectories"])
    if best:
        metrics |= best.link_to(context.outputs["best"])
    # Of each, because `rl.result` chooses among the outputs of a stage that may have run with another choice.
    for output, exists in {"policy": True, "average": section.ema is not None, "best": best is not None}.items():
        if exists:
            name = "" if output == "policy" else output
            moved, hardly_moved = movement(context.inputs["policy"], context.outputs[output], name)
            metrics |= moved
            warnings += hardly_moved
    if warnings:
        metrics["warnings"] = [*warnings, *metrics.get("warnings", ())]
    context.cost.update({f"failed_rewards_{reason}": count for reason, count in sources.failed.items()})
    context.cost.update({f"{name}_seconds": round(value, 3) for name, value in watch.seconds.items()})
    return metrics


def _environments(
    context: StageContext, section: RlConfig, tokenizer: Any, chat_template: str | None
) -> Environments | None:
    if section.environment is None:
        return None
    model = context.model("policy")
    policy, processor = model.path, model.image_processor()
    return Environments(
        section.environment,
        tokenizer,
        processes=context.resources.environment_processes,
        timeout=context.resources.reward_timeout_seconds,
        load_timeout=context.resources.reward_load_timeout_seconds,
        chat_template=chat_template,
        eos_token_ids=eos_token_ids(policy),
        image_tokens=never_sampled(read_json(policy / "config.json")),
        images=ObservedImages(processor, context.progress / OBSERVED) if processor else None,
    )


def _sampler(
    context: StageContext, section: RlConfig, sampling: Sampling, rewards: Rewards
) -> SyncSampler | AsyncSampler:
    if section.execution.max_staleness == 0:
        return SyncSampler(sampling, rewards.add_rewards, context.resources.placement == "colocated")
    return AsyncSampler(
        sampling,
        rewards.add_rewards,
        prompts_per_step=section.prompts_per_step,
        steps=section.steps,
        max_staleness=section.execution.max_staleness,
        partial_rollouts=section.execution.partial_rollouts,
        max_num_seqs=min(sampling.engines.all(Engine.max_num_seqs)),
    )


def critic_of(context: StageContext, section: RlConfig, tokenizer: Any, warnings: list[str]) -> Model | None:
    """The model that the critic is initialised from: the first reward model if it has the policy's tokenizer, or else the
    policy, which is added to ``warnings``. None without a critic."""
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


def reward_of_critic(
    context: StageContext, section: RlConfig, critic: Model | None
) -> tuple[int, tuple[float, float]] | None:
    """The number of the reward whose model the critic is initialised from, and the mean and deviation of its scores; None for a
    critic with a new head."""
    number = section.first_reward_model
    if critic is None or number is None or critic.path != context.inputs.get("critic"):
        return None
    field = f"{REWARDS_FIELD}.{number}"
    return number, spread_of(critic, field) if section.rewards[number].normalise == "model" else (0.0, 1.0)


def _reference(context: StageContext, tokenizer: Any) -> Model | None:
    """The reference of the KL, if it is not the initial policy. Raises UserError for another tokenizer."""
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
    path = _table(context.inputs["pretraining"])
    if not path.is_file():
        raise DataError("the data set of rl.pretraining holds no training rows")
    return path


def _read_prompts(data: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    if not _table(data).is_file():
        raise DataError("there are no prompts to sample for")
    return with_paths(pq.read_table(_table(data)).to_pylist(), data)


def _table(data: Path) -> Path:
    return data / "train.parquet"


@contextmanager
def _ended_when(stopping: threading.Event, *ends: Callable[[], None]) -> Iterator[None]:
    """Once ``stopping`` is set, call all of ``ends`` from another thread, repeatedly: calls that begin later must end, too."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(STOP_SECONDS):
            if stopping.is_set():
                for end in ends:
                    end()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
