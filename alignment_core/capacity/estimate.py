"""The cost of each stage of a recipe on some hardware: the peak of memory on each GPU, and the seconds of a step by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from alignment_core.capacity import memory
from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.hardware import Coefficients, Hardware
from alignment_core.capacity.memory import Peak, Role
from alignment_core.capacity.seconds import Timing
from alignment_core.capacity.workload import Reinforcement, Sampling, Training, Work
from alignment_core.cluster.device import Device, is_sharded, recomputed_activations, zero_stage
from alignment_core.cluster.layout import LearnerRole, host_of
from alignment_core.errors import EnvironmentFault
from alignment_core.inference.kv_cache import most_on_gpu, sequences_at_once
from alignment_core.init.memory import ADAPTERS
from alignment_core.recipes import ResourcesConfig

LEARNED = ("reward_model", "process_reward_model")
"""Rewards that are models of the policy's size."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, and a model of the recipe's size on them."""

    hardware: Hardware
    gpus: int
    model: Architecture
    coefficients: Coefficients = field(default_factory=Coefficients)

    @property
    def timing(self) -> Timing:
        return Timing(self.model, self.hardware, self.coefficients)

    @property
    def device(self) -> Device:
        return Device("cuda", self.gpus, private=False)


@dataclass(frozen=True)
class Estimate:
    """The cost of a stage."""

    stage: str
    roles: tuple[Role, ...]
    peaks: tuple[Peak, ...]
    seconds: dict[str, float]
    """Of a step by part."""
    steps: int | None
    """None if the number of rows is unknown."""
    tokens: dict[str, int]
    """Of a step by kind, as in a stage's cost."""
    once: float = 0.0
    """Seconds before the first step."""
    problems: tuple[str, ...] = ()
    """Sentences that name what does not fit."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def total(self) -> float | None:
        """Seconds of the stage."""
        return None if self.steps is None else self.once + self.steps * self.step


def estimate(work: Work, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    """The cost of a stage. What does not fit is a problem of it; times are computed all the same."""
    resources = resources.on("cuda")
    try:
        cluster.device.gpus_needed(resources)
    except EnvironmentFault as error:
        return Estimate(work.name, (), (), {}, None, {}, problems=(str(error),))
    if isinstance(work, Training):
        return _of_training(work, resources, cluster)
    if isinstance(work, Sampling):
        return _of_sampling(work, resources, cluster)
    return _of_reinforcement(work, resources, cluster)


def _of_training(work: Training, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    ranks = cluster.device.trainers(resources)
    stage = zero_stage(resources, ranks)
    recompute = _recomputes(resources, cluster)
    shards = resources.trainer_tensor_parallel_size
    tokens = work.training.batch_size * work.sequences * work.tokens
    largest = _of_one_rank(max(resources.token_budget, work.sequences * work.tokens), resources)
    role = memory.trained(
        "policy", cluster.model, work.training, ranks, stage, resources.offload_optimizer, recompute, largest, shards
    )
    trained = _trained(work.training.lora is not None)
    timing = cluster.timing
    seconds = {
        "train": timing.training(tokens, work.tokens / 2, ranks, stage, recompute, largest, trained)
        + timing.exchange(tokens, ranks, shards, 2 + recompute),
        "optimiser": timing.optimiser(ranks, stage, resources.offload_optimizer, trained),
    }
    once = 0.0
    if work.has_reference and work.steps is not None:
        once = work.steps * timing.forward(tokens, work.tokens / 2, ranks, stage == 3, largest)
    peaks = (_peak(cluster, "policy", "training", [role], role),)
    return Estimate(
        work.name, (role,), peaks, seconds, work.steps, {"train_tokens": tokens}, once, tuple(_too_large(peaks))
    )


def _of_sampling(work: Sampling, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    batch = work.generation.shard_size * work.generation.num_generations
    engines, role, at_once, problems = _engines(work.prompt, work.completion, batch, resources, cluster)
    shards = resources.tensor_parallel_size
    seconds = cluster.timing.sampling(
        work.prompts, work.prompt, work.completions, work.completion, engines, shards, at_once
    )
    tokens = {
        "prompt_tokens": work.prompts * work.prompt,
        "completion_tokens": work.completions * work.completion,
    }
    peaks = (_peak(cluster, "engines", "sampling", [role], None),)
    return Estimate(f"{work.name}: sampling", (role,), peaks, {"sample": seconds}, 1, tokens, problems=tuple(problems))


def _of_reinforcement(work: Reinforcement, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    section, timing = work.section, cluster.timing
    batch = section.sampled_at_once
    engines, engine, at_once, problems = _engines(work.prompt, work.completion, batch, resources, cluster)
    shards, budget = resources.tensor_parallel_size, max(resources.token_budget, work.prompt + work.completion)
    of_rank = _of_one_rank(budget, resources)
    learners = _learners(work, resources, cluster, of_rank)
    rewards = sum(reward.KEY in LEARNED for reward in section.rewards)
    judges = resources.models.reward.gpus or resources.judges or 1
    is_split = is_sharded(resources.of_model("reward"), judges)
    reward = [
        memory.frozen("reward", cluster.model, judges, is_split, resources.models.reward.offload_parameters, budget)
    ] * rewards

    prompts, completions = section.prompts_per_step, work.completions
    shared = prompts if resources.attention == "auto" else completions
    tokens = shared * work.prompt + completions * work.completion
    context = (work.prompt + work.completion) / 2
    steps_of_update = max(1, round(completions / section.training.batch_size))
    epochs = section.training.num_train_epochs
    layers_shared_by = resources.trainer_tensor_parallel_size
    by_host: dict[str, dict[str, float]] = {}
    for name, role, stage, recompute in learners:
        host = by_host.setdefault(host_of(resources, name), {"logps": 0.0, "train": 0.0, "optimiser": 0.0})
        if name != "policy" or section.needs_old_logps(completions):
            host["logps"] += timing.forward(tokens, context, role.ranks, stage == 3, of_rank)
            host["logps"] += timing.exchange(tokens, role.ranks, layers_shared_by, 1)
        if name != "reference":
            lora = section.training.lora is not None and name == "policy"
            trained = _trained(lora)
            host["train"] += epochs * (
                timing.training(tokens, context, role.ranks, stage, recompute, of_rank, trained)
                + timing.exchange(tokens, role.ranks, layers_shared_by, 2 + recompute)
            )
            offload = (
                resources.of_model("critic").offload_optimizer if name == "critic" else resources.offload_optimizer
            )
            host["optimiser"] += epochs * steps_of_update * timing.optimiser(role.ranks, stage, offload, trained)
    seconds = {
        "sample": timing.sampling(prompts, work.prompt, completions, work.completion, engines, shards, at_once),
        "reward": rewards
        * timing.forward(completions * (work.prompt + work.completion), context, judges, is_split, budget),
        # Groups of other GPUs compute at the same time.
        **{part: max(host[part] for host in by_host.values()) for part in ("logps", "train", "optimiser")},
        "transfer": timing.transfer(),
    }
    if section.execution.max_staleness:
        seconds = _overlapped(seconds)
    roles = [role for _, role, _, _ in learners]
    if cluster.device.trainers_rest(resources, section.execution.max_staleness):  # in pinned CPU memory
        roles = [replace(role, host=role.host + role.resident) for role in roles]
    if (
        resources.weight_update_mode == "delta"
    ):  # a copy of the last update: in the policy's first rank, and in each worker
        copy = 2.0 * cluster.model.parameters
        roles = [replace(role, host=role.host + copy * (role.name == "policy")) for role in roles]
        engine = replace(engine, host=copy)
    peaks = tuple(_peaks(work, resources, cluster, learners, engine, reward))
    counts = {
        "prompt_tokens": prompts * work.prompt,
        "completion_tokens": completions * work.completion,
        "train_tokens": int(epochs * tokens),
    }
    return Estimate(
        work.name,
        (*roles, *reward, engine),
        peaks,
        {part: value for part, value in seconds.items() if value},
        section.steps,
        counts,
        problems=(*problems, *_too_large(peaks)),
    )


def _of_one_rank(tokens: int, resources: ResourcesConfig) -> int:
    """Tokens of a micro-batch that each rank of a group holds."""
    return -(-tokens // resources.sequence_parallel_size)


Learner = tuple[LearnerRole, Role, int, bool]
"""Its role, its memory on a GPU, its ZeRO stage, and whether its backward pass recomputes activations."""


def _learners(work: Reinforcement, resources: ResourcesConfig, cluster: Cluster, budget: int) -> list[Learner]:
    section = work.section
    ranks = cluster.device.trainers(resources)
    recompute, shards = _recomputes(resources, cluster), resources.trainer_tensor_parallel_size
    stage = zero_stage(resources, ranks)
    policy = memory.trained(
        "policy", cluster.model, section.training, ranks, stage, resources.offload_optimizer, recompute, budget, shards
    )
    learners: list[Learner] = [("policy", policy, stage, recompute)]
    if section.critic is not None:
        own = resources.of_model("critic")
        its_ranks = resources.models.critic.gpus or ranks
        stage = zero_stage(own, its_ranks)
        training = section.critic.training_of(section.training).model_copy(update={"lora": None})
        critic = memory.trained(
            "critic", cluster.model, training, its_ranks, stage, own.offload_optimizer, recompute, budget, shards
        )
        learners.append(("critic", critic, stage, recompute))
    if section.kl.coefficient > 0 and not section.trains_adapters_alone:
        place = resources.models.reference
        its_ranks = place.gpus or (resources.models.critic.gpus if place.colocate_with == "critic" else None) or ranks
        stage = zero_stage(resources.of_model("reference"), its_ranks)
        reference = memory.frozen(
            "reference", cluster.model, its_ranks, stage == 3, place.offload_parameters, budget, shards
        )
        learners.append(("reference", reference, stage, False))
    return learners


def _engines(
    prompt: int, completion: int, batch: int, resources: ResourcesConfig, cluster: Cluster
) -> tuple[int, Role, int, list[str]]:
    """Their number, the memory of one on each of its GPUs, sequences that it samples at a time, and what does not fit."""
    device, shards = cluster.device, resources.tensor_parallel_size
    engines = device.engines(resources)
    utilization = resources.engine_memory
    role = memory.engine(cluster.model, cluster.hardware, shards, utilization, engines * shards)
    longest = (prompt + completion) * cluster.model.cache / shards
    held = int(role.terms["cache"] // longest)
    problems = []
    if held < 1:
        needed = role.terms["weights"] + role.terms["reserve"] + longest
        problems.append(
            f"an engine needs {_gb(needed)} on each of its {shards} GPUs for weights and one sequence, and "
            f"gpu_memory_utilization {utilization:g} gives it {_gb(utilization * cluster.hardware.memory)}"
        )
    most = most_on_gpu(cluster.hardware.memory, cluster.hardware.name)
    at_once = sequences_at_once(resources, batch, held, most)
    return engines, role, max(1, min(at_once, held)), problems


def _peaks(
    work: Reinforcement,
    resources: ResourcesConfig,
    cluster: Cluster,
    learners: Sequence[Learner],
    engine: Role,
    rewards: Sequence[Role],
) -> list[Peak]:
    """The fullest moment of the GPUs of each group. Engines that share GPUs with the policy are asleep while it trains, and get
    its weights before they have a cache."""
    engines_apart = not cluster.device.engines_give_way(resources)
    groups: dict[str, list[Role]] = {}
    for name, role, _, _ in learners:
        groups.setdefault(host_of(resources, name), []).append(role)
    place = resources.models.reward
    reward_host = "reward" if place.gpus else (place.colocate_with or "policy")
    groups.setdefault(reward_host, []).extend(rewards)
    peaks = []
    for host, roles in groups.items():
        if roles:
            largest = max(roles, key=lambda role: role.passing)
            peaks.append(_peak(cluster, host, "training" if host != "reward" else "scoring", roles, largest))
    if engines_apart:
        peaks.append(_peak(cluster, "engines", "sampling", [engine], None))
    elif cluster.device.trainers_rest(resources, work.section.execution.max_staleness):
        policy = next(role for name, role, _, _ in learners if name == "policy")
        sent = [_part(policy, "weights"), _part(engine, "weights", "reserve")]
        beside = rewards if reward_host == "policy" else ()
        peaks.append(_peak(cluster, "policy", "weight transfer", [*sent, *beside], None))
        peaks.append(_peak(cluster, "policy", "sampling", [engine, *beside], None))
    else:
        peaks.append(_peak(cluster, "policy", "sampling", [*groups["policy"], engine], None))
    return peaks


def _part(role: Role, *terms: str) -> Role:
    """These terms of a model's memory alone."""
    return replace(role, terms={term: role.terms[term] for term in terms})


def _peak(cluster: Cluster, where: str, moment: str, roles: Sequence[Role], passing: Role | None) -> Peak:
    parts: dict[str, float] = {}
    for role in roles:
        parts[role.name] = parts.get(role.name, 0.0) + role.resident
    if passing is not None:
        parts["activations"] = passing.passing
    return Peak(where, moment, parts, memory.usable(cluster.hardware))


def _too_large(peaks: Sequence[Peak]) -> list[str]:
    sentences = []
    for peak in peaks:
        if not peak.fits:
            parts = ", ".join(f"{name} {_gb(size)}" for name, size in peak.parts.items())
            sentences.append(
                f"a GPU of the {peak.where} needs {_gb(peak.size)} in {peak.moment} ({parts}), "
                f"of which {_gb(peak.capacity)} are usable"
            )
    return sentences


def _overlapped(seconds: dict[str, float]) -> dict[str, float]:
    """Sampling and rewards beside the rest: what takes longer is counted, and the other is left out."""
    beside = seconds["sample"] + seconds["reward"]
    rest = sum(seconds.values()) - beside - seconds["transfer"]
    if beside > rest:
        return {"sample": seconds["sample"], "reward": seconds["reward"], "transfer": seconds["transfer"]}
    return {**seconds, "sample": 0.0, "reward": 0.0}


def _recomputes(resources: ResourcesConfig, cluster: Cluster) -> bool:
    return recomputed_activations(resources, cluster.device, cluster.model.parameters) == "all"


def _trained(lora: bool) -> float:
    return ADAPTERS if lora else 1.0


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
