"""Policy, critic and reference of reinforcement learning: their memory, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignment_core.capacity import memory
from alignment_core.capacity.cluster import Cluster, Passes, of_one_rank, recomputes, trained_fraction
from alignment_core.capacity.memory import Role
from alignment_core.capacity.scoring import RewardPlace
from alignment_core.capacity.workload import Reinforcement
from alignment_core.cluster.device import zero_stage
from alignment_core.cluster.layout import LearnerRole, host_of, host_of_reward, judges_of
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.rl import RlConfig


@dataclass(frozen=True)
class Learner:
    """A model on the ranks of a process group: the policy, the critic or the reference."""

    name: LearnerRole
    host: LearnerRole
    """The model whose ranks these are."""
    role: Role
    """Its memory on each GPU."""
    passes: Passes
    offload: bool
    """Whether its optimiser is in CPU memory."""


def learners_of(work: Reinforcement, resources: ResourcesConfig, cluster: Cluster) -> list[Learner]:
    section = work.section
    names: list[LearnerRole] = ["policy"]
    names += ["critic"] if section.critic is not None else []
    names += ["reference"] if section.kl.coefficient > 0 and not _reference_is_policy(section) else []
    return [_learner(name, work, resources, cluster) for name in names]


def _reference_is_policy(section: RlConfig) -> bool:
    """Whether the reference is the policy without its adapters."""
    return section.trains_adapters_alone and section.kl.reference is None


def _learner(name: LearnerRole, work: Reinforcement, resources: ResourcesConfig, cluster: Cluster) -> Learner:
    section = work.section
    host = host_of(resources, name)
    ranks = (host != "policy" and getattr(resources.models, host).gpus) or cluster.device.trainers(resources)
    own = resources if name == "policy" else resources.of_model(name)
    stage = zero_stage(own, ranks)
    shards = resources.trainer_tensor_parallel_size
    budget = of_one_rank(max(resources.token_budget, work.prompt + work.completion), resources)
    if name == "reference":
        model = cluster.architecture(section.kl.reference)
        offload = resources.models.reference.offload_parameters
        role = memory.frozen(name, model, ranks, stage == 3, offload, budget, shards)
        return Learner(name, host, role, Passes(cluster.timing_of(model), resources, ranks, stage, budget), False)
    training, model, average = section.training, cluster.model, section.ema is not None
    if section.critic is not None and name == "critic":
        training = section.critic.training_of(section.training).model_copy(update={"lora": None})
        model, average = cluster.architecture(_model_of_critic(work)), False
    recompute = recomputes(resources, cluster, model)
    role = memory.trained(
        name, model, training, ranks, stage, own.offload_optimizer, recompute, budget, shards, average
    )
    passes = Passes(cluster.timing_of(model), resources, ranks, stage, budget, recompute)
    return Learner(name, host, role, passes, own.offload_optimizer)


def _model_of_critic(work: Reinforcement) -> ModelConfig | None:
    """The model that the critic starts from: that of the first reward model, or else the policy's."""
    number = work.section.first_reward_model
    return None if number is None else work.scorers[number].model


def seconds_of(
    work: Reinforcement, learners: Sequence[Learner], resources: ResourcesConfig, tokens: int
) -> dict[str, float]:
    """Seconds of the learners of a step by part. Groups of other GPUs compute at the same time."""
    section, completions = work.section, work.completions
    context = (work.prompt + work.completion) / 2
    updates = max(1, round(completions / section.training.batch_size))
    epochs = section.training.num_train_epochs
    by_host: dict[str, dict[str, float]] = {}
    for learner in learners:
        host = by_host.setdefault(learner.host, {"logps": 0.0, "train": 0.0, "optimiser": 0.0})
        passes, is_policy = learner.passes, learner.name == "policy"
        forward = passes.forward(tokens, context)
        if not is_policy or section.needs_old_logps(completions):
            host["logps"] += forward
        if is_policy and section.kl.coefficient > 0 and _reference_is_policy(section):
            host["logps"] += forward
        if learner.name == "reference":
            continue
        trained = trained_fraction(section.training) if is_policy else 1.0
        host["train"] += epochs * passes.training(tokens, context, trained)
        if is_policy and section.pretraining is not None:
            more = updates * section.pretraining.batch_size * work.pretraining
            host["train"] += epochs * passes.training(more, work.pretraining / 2, trained)
        host["optimiser"] += epochs * updates * passes.optimiser(learner.offload, trained)
    return {part: max(host[part] for host in by_host.values()) for part in ("logps", "train", "optimiser")}


def reward_places(
    count: int, resources: ResourcesConfig, cluster: Cluster, learners: Sequence[Learner]
) -> list[RewardPlace]:
    """The actors of each of so many reward models."""
    ranks: dict[str, int] = {learner.host: learner.role.ranks for learner in learners}
    places = []
    for number in range(count):
        host, gpus = host_of_reward(resources, number) or "policy", resources.models.of_reward(number).gpus
        beside = gpus or ranks.get(host, cluster.device.trainers(resources))
        places.append(RewardPlace(host, judges_of(resources, number), beside))
    return places
