"""The cost of each stage of a recipe on some hardware: the peak of memory on each GPU, and the seconds of a step by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alignment_core.capacity import memory
from alignment_core.capacity.cluster import Cluster, Passes, of_one_rank, recomputes, shares_prefix, trained_fraction
from alignment_core.capacity.learners import Learner, learners_of, reward_places, seconds_of
from alignment_core.capacity.memory import Peak, Role
from alignment_core.capacity.scoring import RewardPlace, Scoring, scoring
from alignment_core.capacity.workload import LEARNED, Reinforcement, Sampling, Training, Work, models_of
from alignment_core.checks.memory_needs import DELTA_BYTES
from alignment_core.checks.shapes import why_not_together
from alignment_core.cluster.device import zero_stage
from alignment_core.cluster.layout import LEARNERS
from alignment_core.errors import EnvironmentFault
from alignment_core.inference.kv_cache import max_num_seqs_on_cpu, max_num_seqs_on_gpu
from alignment_core.models.tensor_shapes import why_not_split, why_not_trained_in_parts
from alignment_core.recipes import ResourcesConfig


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
    notes: tuple[str, ...] = ()
    """Sentences about what is assumed, or not counted."""

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
    if problem := _why_not_placed(work, resources, cluster):
        return Estimate(work.name, (), (), {}, None, {}, problems=(problem,))
    notes = cluster.assumed(models_of([work]))
    if cluster.model.tower:
        notes.append("the time of the vision tower is not counted; tokens of images count as others do")
    if isinstance(work, Training):
        result = _of_training(work, resources, cluster)
    elif isinstance(work, Sampling):
        result = _of_sampling(work, resources, cluster)
    else:
        result = _of_reinforcement(work, resources, cluster)
    if not cluster.hardware.memory:
        result = replace(result, roles=(), peaks=(), problems=())
        notes.append("memory is not estimated on a processor; `align check` compares the least that a run needs")
    return replace(result, notes=(*notes, *result.notes))


def _why_not_placed(work: Work, resources: ResourcesConfig, cluster: Cluster) -> str | None:
    """Why the models cannot be placed so; None if they can."""
    try:
        cluster.device.gpus_needed(resources)
    except EnvironmentFault as error:
        return str(error)
    if isinstance(work, Sampling):
        return None
    training = work.training if isinstance(work, Training) else work.section.training
    shards, together = resources.trainer_tensor_parallel_size, resources.sequence_parallel_size
    if shards > 1:
        reason = why_not_split(cluster.model.shape, shards) or why_not_trained_in_parts(
            training, resources.zero_stage, dropout=False
        )
        if reason:
            return f"resources.trainer_tensor_parallel_size: {reason}"
    if together > 1 and (reason := why_not_together(cluster.model.shape, together)):
        return f"resources.sequence_parallel_size: {reason}"
    return None


def _of_training(work: Training, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    ranks = cluster.device.trainers(resources)
    stage = zero_stage(resources, ranks)
    recompute = recomputes(resources, cluster)
    shards = resources.trainer_tensor_parallel_size
    of_row = work.computed(shares_prefix(resources, cluster, work.shared))
    tokens, context = work.training.batch_size * of_row, work.tokens / 2
    largest = of_one_rank(max(resources.token_budget, of_row), resources)
    policy = memory.trained(
        "policy", cluster.model, work.training, ranks, stage, resources.offload_optimizer, recompute, largest, shards
    )
    roles = [policy]
    if work.follows:
        roles.append(memory.frozen("reference", cluster.model, ranks, stage == 3, False, largest, shards))
    trained = trained_fraction(work.training)
    passes = Passes(cluster.timing, resources, ranks, stage, largest, recompute)
    forward = passes.forward(tokens, context)
    seconds = {
        "reference": forward * (1 + work.passes) if work.follows else 0.0,
        "logps": forward * work.passes,
        "train": passes.training(tokens, context, trained),
        "optimiser": passes.optimiser(resources.offload_optimizer, trained),
    }
    peaks = [_peak(cluster, "policy", "training", roles, policy)]
    once = 0.0
    rows = _rows_of(work)
    if work.has_reference and rows is not None:
        once += (1 + (work.name == "kto") * work.passes) * passes.forward(rows * of_row, context)
    if work.teacher is not None:
        model = cluster.architecture(work.teacher)
        teacher = memory.frozen("teacher", model, ranks, stage == 3, False, largest, shards)
        peaks.append(_peak(cluster, "teacher", "scoring", [teacher], teacher))
        if rows is not None:
            once += replace(passes, timing=cluster.timing_of(model)).forward(rows * of_row, context)
    return Estimate(
        work.name,
        tuple(roles),
        tuple(peaks),
        {part: value for part, value in seconds.items() if value},
        work.steps,
        {"train_tokens": tokens},
        once,
        tuple(_too_large(peaks)),
        tuple(f"{note} is not counted" for note in work.notes),
    )


def _rows_of(work: Training) -> int | None:
    """Rows that the steps take, each once; None if their number is unknown."""
    if work.steps is None:
        return None
    taken = work.steps * work.training.batch_size
    return taken if work.rows is None else min(taken, work.rows)


def _of_sampling(work: Sampling, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    engines, role, at_once, problems = _engines(work.prompt, work.completion, resources, cluster)
    shards = resources.tensor_parallel_size
    sample = cluster.timing.sampling(
        work.prompts, work.prompt, work.completions, work.completion, engines, shards, at_once
    )
    tokens = {
        "prompt_tokens": work.prompts * work.prompt,
        "completion_tokens": work.completions * work.completion,
    }
    ranks = cluster.device.trainers(resources)
    places = [RewardPlace("trainers", ranks, ranks)] * _learned(work)  # one after the other
    rewards = _scoring(work, work.prompts, work.completions, resources, cluster, places)
    peaks = [_peak(cluster, "engines", "sampling", [role], None)]
    if rewards.roles or rewards.served:
        largest = max(rewards.roles, key=lambda each: each.passing, default=None)
        scored_by = [*([largest] if largest else []), *rewards.served]  # one after the other, beside the server
        peaks.append(_peak(cluster, "rewards", "scoring", scored_by, largest))
    return Estimate(
        f"{work.name}: sampling",
        (role, *rewards.roles, *rewards.served),
        tuple(peaks),
        {"sample": sample, **({"reward": rewards.seconds} if rewards.seconds else {})},
        1,
        tokens,
        problems=(*problems, *rewards.problems, *_too_large(peaks)),
        notes=rewards.notes,
    )


def _scoring(
    work: Sampling | Reinforcement,
    prompts: int,
    completions: int,
    resources: ResourcesConfig,
    cluster: Cluster,
    places: Sequence[RewardPlace],
) -> Scoring:
    """The rewards of these completions; see :func:`alignment_core.capacity.scoring.scoring`."""
    shares = shares_prefix(resources, cluster, work.prompt)
    return scoring(
        work.scorers,
        [cluster.architecture(scorer.model) for scorer in work.scorers],
        (prompts if shares else completions) * work.prompt + completions * work.completion,
        (completions, work.prompt, work.completion),
        resources,
        cluster.timing,
        places,
    )


def _learned(work: Sampling | Reinforcement) -> int:
    """Rewards that are models in actors."""
    return sum(scorer.kind in LEARNED for scorer in work.scorers)


def _of_reinforcement(work: Reinforcement, resources: ResourcesConfig, cluster: Cluster) -> Estimate:
    section = work.section
    engines, engine, at_once, problems = _engines(work.prompt, work.completion, resources, cluster)
    learners = learners_of(work, resources, cluster)
    prompts, completions = section.prompts_per_step, work.completions
    places = reward_places(_learned(work), resources, cluster, learners)
    rewards = _scoring(work, prompts, completions, resources, cluster, places)
    sample = cluster.timing.sampling(
        prompts, work.prompt, completions, work.completion, engines, resources.tensor_parallel_size, at_once
    )
    tokens = (prompts if shares_prefix(resources, cluster, work.prompt) else completions) * work.prompt
    tokens += completions * work.completion
    seconds = {
        "sample": sample,
        "reward": rewards.seconds,
        **seconds_of(work, learners, resources, tokens),
        "transfer": cluster.timing.transfer(),
    }
    rests = cluster.device.trainers_rest(resources, section.execution.max_staleness)
    roles = [learner.role for learner in learners]
    if rests:  # in pinned CPU memory, with those models that share its GPUs
        resting = [learner.role for learner in learners if learner.host == "policy"]
        seconds["rest"] = cluster.timing.rests(sum(role.resident for role in resting))
        roles = [replace(role, host=role.host + role.resident) if role in resting else role for role in roles]
    if section.execution.max_staleness:
        seconds = _overlapped(seconds)
    if resources.weight_update_mode == "delta":
        # A copy of the last update: in the policy's first rank, and in each worker of an engine.
        copy = float(DELTA_BYTES * cluster.model.parameters)
        roles = [replace(role, host=role.host + copy) if role.name == "policy" else role for role in roles]
        engine = replace(engine, host=copy)
    peaks = tuple(_peaks(learners, engine, rewards, resources, cluster, rests))
    counts = {
        "prompt_tokens": prompts * work.prompt,
        "completion_tokens": completions * work.completion,
        "train_tokens": int(section.training.num_train_epochs * tokens),
    }
    return Estimate(
        work.name,
        (*roles, *rewards.roles, engine, *rewards.served),
        peaks,
        {part: value for part, value in seconds.items() if value},
        section.steps,
        counts,
        problems=(*problems, *rewards.problems, *_too_large(peaks)),
        notes=(*rewards.notes, *_not_counted(work)),
    )


def _not_counted(work: Reinforcement) -> list[str]:
    """Sentences about parts of the section that the estimate leaves out."""
    section = work.section
    parts = {
        "environment": (
            "the time of the environment, and tokens of its observations beyond --completion-tokens",
            "are",
        ),
        "filter": ("samples in the place of prompts without a gradient", "are"),
        "best": ("evaluation during training", "is"),
    }
    return [
        f"{work.name}.{field}: {what} {verb} not counted"
        for field, (what, verb) in parts.items()
        if getattr(section, field) is not None
    ]


def _engines(
    prompt: int, completion: int, resources: ResourcesConfig, cluster: Cluster
) -> tuple[int, Role, int, list[str]]:
    """Their number, the memory of one on each of its GPUs, sequences that it samples at a time, and what does not fit."""
    device, shards = cluster.device, resources.tensor_parallel_size
    engines = device.engines(resources)
    utilization = resources.engine_memory
    role = memory.engine(cluster.model, cluster.hardware, shards, utilization, engines * shards)
    longest = (prompt + completion) * cluster.model.cache / shards
    hardware = cluster.hardware
    problems: list[str] = []
    if not hardware.memory:  # a processor
        return engines, role, max_num_seqs_on_cpu(resources), problems
    in_cache = int(role.terms["cache"] // longest)
    if in_cache < 1:
        needed = role.terms["weights"] + role.terms["reserve"] + longest
        problems.append(
            f"an engine needs {_gb(needed)} on each of its {shards} GPUs for weights and one sequence, and "
            f"gpu_memory_utilization {utilization:g} gives it {_gb(utilization * hardware.memory)}"
        )
    most = max_num_seqs_on_gpu(resources, hardware.memory, hardware.name)
    return engines, role, max(1, min(most, in_cache)), problems


def _peaks(
    learners: Sequence[Learner],
    engine: Role,
    rewards: Scoring,
    resources: ResourcesConfig,
    cluster: Cluster,
    rests: bool,
) -> list[Peak]:
    """The fullest moment of the GPUs of each group. Engines that share GPUs with the policy are asleep while it trains, and get
    its weights before they have a cache. The server of a judge stays on the first GPUs, which are the policy's."""
    groups: dict[str, list[Role]] = {}
    for learner in learners:
        groups.setdefault(learner.host, []).append(learner.role)
    for host, together in rewards.together.items():
        groups.setdefault(host, []).extend(together)
    peaks = []
    for host, roles in groups.items():
        if roles:
            largest = max(roles, key=lambda role: role.passing)
            beside = rewards.served if host == "policy" else ()
            moment = "training" if host in LEARNERS else "scoring"
            peaks.append(_peak(cluster, host, moment, [*roles, *beside], largest))
    always = [*rewards.together.get("policy", ()), *rewards.served]
    if not cluster.device.engines_give_way(resources):
        peaks.append(_peak(cluster, "engines", "sampling", [engine], None))
    elif rests:
        policy = next(learner.role for learner in learners if learner.name == "policy")
        sent = [_part(policy, "weights"), _part(engine, "weights", "reserve")]
        peaks.append(_peak(cluster, "policy", "weight transfer", [*sent, *always], None))
        peaks.append(_peak(cluster, "policy", "sampling", [engine, *always], None))
    else:
        peaks.append(_peak(cluster, "policy", "sampling", [*groups["policy"], engine, *rewards.served], None))
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


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
