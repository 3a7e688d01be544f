"""All checks of a plan before a run starts. Neither torch, Ray, vLLM nor Prefect is imported here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.reference import MASTERS
from alignment_core.checks import amounts, cache, functions, images, memory_needs, requantization, rows, shapes
from alignment_core.composition.base_model import PROCESS_REWARD_MODELS, REWARD_MODELS
from alignment_core.composition.plan import Plan, PlannedStage
from alignment_core.data.context import longest_sampled, longest_trained
from alignment_core.environments.tool_calls import TOOLS
from alignment_core.errors import Corrupt, DataError, NotFound
from alignment_core.execution.base import load_stage
from alignment_core.models.masters import why_not_trained
from alignment_core.models.quantization import why_not_changed
from alignment_core.models.saving import ADAPTER
from alignment_core.models.tensor_shapes import why_not_split, why_not_trained_in_parts
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import EnvironmentConfig


class Findings(BaseModel):
    """Results of the checks of a plan."""

    problems: list[str] = []
    """Sentences; each keeps the recipe from running."""
    seen: list[rows.Answer] = []
    """The checked data sets."""
    warnings: list[str] = []
    """Sentences about risks that may slow the run down, end it, or spoil its result."""
    caches: list[cache.Need] = []
    """Key-value cache for each stage that samples on this machine's processors, as far as it is known."""

    def refuse(self) -> None:
        """Raise DataError with all problems, if there are any."""
        if self.problems:
            raise DataError("\n".join(self.problems))


def check(plan: Plan, resources: ResourcesConfig, on_parsed: Callable[[], None] = lambda: None) -> Findings:
    """Check all stages that would run, with the cheapest checks first, until one fails.

    ``on_parsed`` is called once no row is malformed; the checks that follow need a tokenizer and call the user's functions.
    Raises EnvironmentFault if this machine cannot run the user's functions, or has too little memory.
    """
    todo = [stage for stage in plan.stages if stage.state != "cached"]
    problems = [*_without_variable(plan, todo)]
    problems += [
        *_wrong_heads(plan, todo, resources),
        *_not_together(plan, todo, resources),
        *_unusable_reward_models(plan, todo),
        *_other_references(plan, todo),
    ]
    problems += [*_quantised(plan.store, todo), *_without_masters(plan.store, todo)]
    if problems:
        return Findings(problems=list(dict.fromkeys(problems)))
    short_of_memory = memory_needs.shortage(_memory_needed(plan, todo, resources))
    called = _functions(todo, resources)
    timeout = resources.reward_timeout_seconds
    read = sorted((stage for stage in todo if _reads(stage)), key=lambda stage: stage.label not in called)
    environments = {label: environment for label, environment in _environments(todo) if environment.name is not None}
    cached = [stage for stage in plan.stages if stage.label in environments and stage.state == "cached"]
    made_before = {stage.label for stage in cached}
    questions = [
        _question(plan, stage, environments.get(stage.label), stage.label not in made_before)
        for stage in (*read, *cached)
    ]
    seen: dict[str, rows.Answer] = {}
    with closing(rows.ask(questions, on_parsed)) as answers:
        for answer in answers:
            seen[answer.label] = answer
            if answer.problem:
                problems.append(f"{answer.label}: {answer.problem}")
            elif not problems and answer.label not in made_before:
                # meanwhile the reader continues with the next data set
                broken = list(_broken(called.pop(answer.label, {}).values(), answer.samples, timeout))
                if broken:
                    return Findings(problems=broken)
    with_images = {answer.label for answer in seen.values() if answer.has_images} | {
        *images.stored(plan.store, plan.stages)
    }
    problems = problems or list(images.problems(todo, with_images, lambda model: shapes.shape_of(plan.store, model)))
    problems = problems or list(_too_long(plan.store, todo, seen))
    needs = list(_caches(plan.store, todo, seen, resources)) if shapes.on_cpu(resources) else []
    problems = problems or [sentence for need in needs if (sentence := need.problem(resources))]
    stored = {stage.label: stage.reference for stage in plan.stages if stage.reference is not None}
    for label, others in called.items() if not problems else ():
        if label in stored:
            problems += _broken(others.values(), rows.samples_of(plan.store.fetch(stored[label])), timeout)
    of_todo = [seen[stage.label] for stage in todo if stage.label in seen]
    for label, sentence in _other_templates(plan):
        if label in seen:
            seen[label].warnings.append(sentence)
    warnings = [*([short_of_memory] if short_of_memory else []), *amounts.warnings(todo, seen)]
    warnings += [*_text_parts(plan.store, todo), *requantization.warnings(plan.store, todo)]
    return Findings(problems=list(dict.fromkeys(problems)), seen=of_todo, warnings=warnings, caches=needs)


def _memory_needed(plan: Plan, todo: list[PlannedStage], resources: ResourcesConfig) -> int:
    base = next((shapes.below_adapters(stage) for stage in plan.stages if stage.label == "model"), None)
    shape = (
        shapes.shape_of(plan.store, base)
        if base is not None and getattr(base, "stage", "base_model") == "base_model"
        else {}
    )
    return memory_needs.bytes_needed(todo, memory_needs.parameters(shape), resources, shape)


def _reads(stage: PlannedStage) -> bool:
    config: Any = stage.config
    return stage.stage == "dataset" and bool(config.sources)


def _other_templates(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and warning for each data set whose chat template differs from that of the same model's other data. Prompts of
    agents do not count, because the policy reads the agent's messages instead of them."""
    rendered: dict[str, list[tuple[str, str | None]]] = {}
    of_agents = {label for label, environment in _environments(plan.stages) if environment.agent is not None}
    for stage in filter(_reads, plan.stages):
        if stage.label in of_agents:
            continue
        config, tokenizer = stage.config, stage.inputs.get("tokenizer")
        label = tokenizer.label if isinstance(tokenizer, PlannedStage) else str(tokenizer)
        rendered.setdefault(label, []).append((stage.label, config.data.chat_template))  # type: ignore[attr-defined]
    for data in rendered.values():
        for label, template in data:
            others = [other for other, its_template in data if its_template != template]
            if template is not None and others:
                yield (
                    label,
                    f"`chat_template` is not that of {', '.join(others)}: a model that is trained in one chat template would "
                    "be sampled in another; set `model.chat_template` instead, for all of them",
                )


def _without_variable(plan: Plan, todo: list[PlannedStage]) -> Iterator[str]:
    for field, name in plan.variables if todo else ():
        if not os.environ.get(name):
            yield f"{field}: the environment has no variable {name}"


def _wrong_heads(plan: Plan, todo: list[PlannedStage], resources: ResourcesConfig) -> Iterator[str]:
    base = next((shapes.below_adapters(stage) for stage in plan.stages if stage.label == "model"), None)
    if isinstance(base, PlannedStage) and base.stage == "base_model" and any(stage.config.sampling() for stage in todo):
        config: Any = base.config
        yield from shapes.wrong_heads(shapes.model_shape(config), resources)


def _not_together(plan: Plan, todo: list[PlannedStage], resources: ResourcesConfig) -> Iterator[str]:
    """A sentence for each model that trainers would compute, and that groups of ranks cannot compute together."""
    rules: dict[str, Callable[[dict[str, Any], int], str | None]] = {
        "sequence_parallel_size": shapes.why_not_together,
        "trainer_tensor_parallel_size": why_not_split,
    }
    for field, why_not in rules.items():
        if (ranks := getattr(resources, field)) > 1:
            yield from _not_in_groups(plan, todo, field, ranks, why_not)
    for stage in todo if resources.trainer_tensor_parallel_size > 1 else ():
        training = memory_needs.training_of(stage.config)
        if training is None:
            continue
        dropout = not getattr(stage.config, "disable_dropout", True)
        problem = why_not_trained_in_parts(training, resources.zero_stage, dropout)
        critic = getattr(getattr(stage.config, "section", None), "critic", None)
        if problem is None and critic is not None:
            own = resources.of_model("critic").zero_stage
            field = "resources.models.critic.zero_stage"
            problem = why_not_trained_in_parts(critic.training_of(training), own, dropout, field)
        if problem is not None:
            yield f"resources.trainer_tensor_parallel_size: {problem}"


def _not_in_groups(
    plan: Plan, todo: list[PlannedStage], field: str, ranks: int, why_not: Callable[[dict[str, Any], int], str | None]
) -> Iterator[str]:
    for stage in todo:
        trains = memory_needs.training_of(stage.config) is not None
        if not trains and stage.stage not in _FORWARD_PASSES:
            continue
        for role, value in stage.inputs.items():
            model = shapes.below_adapters(value)
            is_made = isinstance(model, PlannedStage) and model.stage != "base_model"  # from one of these models
            if is_made or not (_TRAINED if trains else _SCORED).fullmatch(role):
                continue
            if (problem := why_not(shapes.shape_of(plan.store, model), ranks)) is not None:
                label = model.label if isinstance(model, PlannedStage) else model.short
                name = "the model" if label == "model" else label
                yield f"resources.{field}: {name} does not support {ranks}, because {problem}; set it to 1"


_TRAINED = re.compile(r"model(-\d+)?|policy|critic|reference")
_SCORED = re.compile(r"model|reference|reward-\d+")
"""Roles of models that trainers compute in stages that train, and in others; reward models of `rl` have actors of their own."""
_FORWARD_PASSES = ("score", "reference_logps", "teacher_logps")
"""Stages whose trainers only compute models."""


def _unusable_reward_models(plan: Plan, todo: list[PlannedStage]) -> Iterator[str]:
    for stage in todo:
        for number, (field, reward) in enumerate(stage.config.rewarded().items()):
            model = stage.inputs.get(f"reward-{number}")
            if reward.KEY != "reward_model" or not isinstance(model, PlannedStage) or model.stage != "base_model":
                continue
            config: Any = model.config
            where = "reward_model.model" if model.label == "reward-model" else f"{field}.reward_model"
            name = config.model.name or "a model from scratch"
            if problem := shapes.why_no_rewards(shapes.model_shape(config), plan.trust_remote_code):
                yield f"{where}: {name} {problem}; use another one, or serve it as an `endpoint`"
            elif not plan.trust_remote_code and shapes.without_score_head(config):  # code may name its head otherwise
                yield f"{where}: {name} is a language model without a score head, not a reward model"


def _other_references(plan: Plan, todo: list[PlannedStage]) -> Iterator[str]:
    """References that take over the policy's weights but have another architecture."""
    for stage in todo:
        config: Any = stage.config
        if stage.stage != "rl" or config.section.kl.sync_ref_model is None or "reference" not in stage.inputs:
            continue
        for prompts in list(_prompts_of(stage))[:1]:
            policy = shapes.shape_of(plan.store, prompts.inputs["tokenizer"])
            reference = shapes.shape_of(plan.store, stage.inputs["reference"])
            if (field := shapes.difference(policy, reference)) is not None:
                yield (
                    f"{stage.label}: with rl.kl.sync_ref_model the reference takes over the policy's weights, but the model of "
                    f"rl.kl.reference has another {field}: give one of the policy's architecture, or leave sync_ref_model out"
                )


_CHANGED = re.compile(r"model(-\d+)?|policy|critic|base")
"""Roles of the models that a stage trains or merges."""


def _changed(todo: list[PlannedStage]) -> Iterator[tuple[PlannedStage, PlannedStage | Reference, str]]:
    """Models, named by the recipe or in the store, that a stage trains or merges, each with the first stage and its name."""
    seen: set[str] = set()
    for stage in todo:
        if not {"model", *REWARD_MODELS, *PROCESS_REWARD_MODELS} & {*load_stage(stage.stage).outputs.values()}:
            continue
        for model in [shapes.below_adapters(value) for role, value in stage.inputs.items() if _CHANGED.fullmatch(role)]:
            label = model.label if isinstance(model, PlannedStage) else model.short
            if label in seen or (isinstance(model, PlannedStage) and model.stage != "base_model"):
                continue
            seen.add(label)
            config: Any = model.config if isinstance(model, PlannedStage) else None
            yield stage, model, config.model.name if config else label


def _quantised(store: Store, todo: list[PlannedStage]) -> Iterator[str]:
    for stage, model, name in _changed(todo):
        if problem := why_not_changed(name, shapes.shape_of(store, model)):
            yield f"{stage.label}: {problem}"


def _text_parts(store: Store, todo: list[PlannedStage]) -> Iterator[str]:
    for stage, model, name in _changed(todo):
        if stage.stage not in ("merge", "reward_model") and shapes.is_loaded_without_images(
            shapes.shape_of(store, model)
        ):
            yield (
                f"{stage.label}: {name} also reads images or sounds, and `transformers` loads only the part that reads text: "
                "the result is a model for text"
            )


def _without_masters(store: Store, todo: list[PlannedStage]) -> Iterator[str]:
    """Policies of the store to be trained further, of earlier runs, whose master weights are not there."""
    problems: dict[Reference, str | None] = {}
    for stage in todo:
        config: Any = stage.config
        policy = stage.inputs.get("policy" if stage.stage == "rl" else "model")
        training = getattr(config.section if stage.stage == "rl" else config, "training", None)
        if not isinstance(policy, Reference) or training is None or not training.saves_masters:
            continue
        if MASTERS not in load_stage(stage.stage).outputs:
            continue
        if policy not in problems:  # of which a sweep has many stages, and a large model many files
            problems[policy] = _masters_problem(store, policy)
        if problem := problems[policy]:
            yield f"{stage.label}: {problem}"


def _masters_problem(store: Store, policy: Reference) -> str | None:
    """Why training cannot continue from the master weights that a policy names; None if it can, or it names none."""
    try:
        masters = store.masters_of(store.manifest(policy))
    except (Corrupt, NotFound) as error:
        return str(error)
    if masters is None or store.cache.folder(masters.digest).is_dir():
        return None
    problem = _why_not_whole(store, masters)
    return problem and why_not_trained(policy, masters, problem)


def _why_not_whole(store: Store, reference: Reference) -> str | None:
    """Why an artifact cannot be fetched, as far as is known without reading its content."""
    if store.is_pruned(reference):
        return f"the bytes of {reference.short} were pruned"
    try:
        files = store.manifest(reference).files
    except (Corrupt, NotFound) as error:
        return str(error)
    broken = (entry for entry in files if not store.blobs.is_intact(entry))
    return next((f"{entry.path} of {reference.short} is missing or damaged" for entry in broken), None)


def _too_long(store: Store, todo: list[PlannedStage], seen: dict[str, rows.Answer]) -> Iterator[str]:
    for stage in todo:
        if (sampling := stage.config.sampling()) is None:
            continue
        for prompts in _prompts_of(stage):
            answer = seen.get(prompts.label)
            if answer is not None and (longest := answer.certain(sampling.prompts)):
                most = longest_sampled(shapes.shape_of(store, prompts.inputs["tokenizer"]))
                yield from shapes.too_long(stage, sampling.generation.max_completion_length, longest, most)


def _caches(
    store: Store, todo: list[PlannedStage], seen: dict[str, rows.Answer], resources: ResourcesConfig
) -> Iterator[cache.Need]:
    for stage in todo:
        prompts = list(_prompts_of(stage))
        if not prompts or (sampling := stage.config.sampling()) is None:
            continue
        labels = [data.label for data in prompts]
        longest = max(seen[label].certain(sampling.prompts) if label in seen else 0 for label in labels)
        tokens = longest + sampling.generation.max_completion_length
        policy = shapes.below_adapters(stage.inputs["policy"])
        trained = isinstance(policy, PlannedStage) and policy.stage != "base_model"
        shape = shapes.shape_of(store, prompts[0].inputs["tokenizer"] if trained else policy)
        yield from cache.needs(stage.label, tokens, shape, resources, trained, sampling.dtype)


def _prompts_of(stage: PlannedStage) -> Iterator[PlannedStage]:
    """The data sets whose prompts a stage samples for."""
    if stage.config.sampling():
        inputs = (stage.inputs.get(role) for role in ("prompts", "held_out"))
        yield from (prompts for prompts in inputs if isinstance(prompts, PlannedStage))


def _broken(called: Iterable[functions.Called], samples: list[dict[str, Any]], timeout: float) -> Iterator[str]:
    """Problems of functions that are called on these samples; none without samples."""
    if samples:
        yield from (problem for function in called if (problem := function.problem(samples, timeout)))


def _functions(todo: list[PlannedStage], resources: ResourcesConfig) -> dict[str, dict[str, functions.Called]]:
    """The user's functions by the label of the data set whose prompts they judge, and by the field that names them."""
    by_label: dict[str, dict[str, functions.Called]] = {}
    for stage in todo:
        for prompts, function in _functions_of(stage, resources):
            by_label.setdefault(prompts.label, {})[function.field] = function
    return by_label


def _functions_of(stage: PlannedStage, resources: ResourcesConfig) -> Iterator[tuple[PlannedStage, functions.Called]]:
    """The user's functions that a stage calls, each with the data set whose prompts it judges."""
    samples = stage if stage.config.sampling() else stage.inputs.get("rollouts")
    sampling = samples.config.sampling() if isinstance(samples, PlannedStage) else None
    if isinstance(samples, PlannedStage) and sampling:
        for prompts in [*_prompts_of(samples)][:1]:
            called = functions.called_by(stage.config.rewarded(), sampling, resources)
            yield from ((prompts, function) for function in called)


def _environments(stages: list[PlannedStage]) -> Iterator[tuple[str, EnvironmentConfig]]:
    """Labels of the data sets whose prompts are sampled in an environment, and that environment."""
    for stage in stages:
        sampling = stage.config.sampling()
        if sampling is not None and sampling.environment is not None:
            for prompts in _prompts_of(stage):
                yield prompts.label, sampling.environment


def _question(plan: Plan, stage: PlannedStage, environment: EnvironmentConfig | None, of_rows: bool) -> rows.Question:
    config: Any = stage.config
    return rows.Question(
        label=stage.label,
        dataset=config,
        tokenizer=_tokenizer(plan.store, stage.inputs["tokenizer"], plan.trust_remote_code),
        context=longest_trained(shapes.shape_of(plan.store, stage.inputs["tokenizer"])),
        seed=plan.seed,
        role=environment.role if environment else None,
        reads_images=bool(shapes.shape_of(plan.store, stage.inputs["tokenizer"]).get("vision_config")),
        reads_calls=environment is not None and environment.name == TOOLS,
        rows=of_rows,
    )


_OF_TOKENIZER = ("chat_template", "chat_template_kwargs", "eos_token")
"""Settings of a model that change its tokenizer."""


def _tokenizer(store: Store, model: PlannedStage | Reference, trust: bool) -> rows.TokenizerSource:
    if isinstance(model, PlannedStage) and model.stage == "merge_adapter":
        return _of_adapter(store, model, _tokenizer(store, model.inputs["model"], trust))
    if isinstance(model, Reference):
        return rows.TokenizerSource(folder=str(store.fetch(model)), trust_remote_code=trust)
    config: Any = model.config
    place: dict[str, str | None] = {}
    if config.commit is not None:
        place = {"hub": config.model.name, "commit": config.commit}
    elif config.remote:
        place = {"folder": str(shapes.without_weights(config.remote))}
    elif config.model.scratch is None:
        place = {"folder": str(Path(config.model.name).expanduser())}
    templates = {name: getattr(config.model, name) for name in _OF_TOKENIZER}
    return rows.TokenizerSource(**place, **templates, trust_remote_code=trust)


def _of_adapter(store: Store, merged: PlannedStage, base: rows.TokenizerSource) -> rows.TokenizerSource:
    """The tokenizer of an adapter merged into a model: the adapter's, as far as it has one, else that of the ``base``."""
    config: Any = merged.config
    place: dict[str, Any] = {"hub": None, "folder": str(Path(config.adapter).expanduser()), "commit": None}
    if isinstance(stored := merged.inputs.get(ADAPTER), Reference):
        place["folder"] = str(store.fetch(stored))
    elif config.remote:
        place["folder"] = str(shapes.without_weights(config.remote))
    elif config.commit is not None:
        place = {"hub": config.adapter, "folder": None, "commit": config.commit}
    base = base.model_copy(update={name: getattr(config, name) for name in _OF_TOKENIZER[1:]})
    if _file_of(place, "tokenizer_config.json"):
        return base.model_copy(update={**place, "chat_template": config.chat_template})
    template = _file_of(place, "chat_template.jinja")
    if template and config.chat_template is None:
        return base.model_copy(update={"chat_template": template.read_text()})
    return base


def _file_of(place: dict[str, Any], name: str) -> Path | None:
    """A file of a folder or of a repository on the Hub, if it exists and can be read now."""
    if place["folder"] is not None:
        file = Path(place["folder"]) / name
        return file if file.is_file() else None
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(place["hub"], name, revision=place["commit"]))
    except Exception:  # no network, no such file: the stage that needs it will report this
        return None
