"""Stages whose models or judges would not see the images of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.composition.plan import PlannedStage
from alignment_core.data.images import FOLDER
from alignment_core.environments.environments import NO_IMAGES as OF_TEXT_POLICY
from alignment_core.errors import Corrupt, NotFound
from alignment_core.rewards.base import kind_of
from alignment_core.rewards.model_reward import NO_IMAGES as OF_REWARD_MODEL
from alignment_core.rewards.sources import NO_IMAGES as OF_TEXT_REWARD
from alignment_core.stages.judge_pairs import NO_IMAGES as OF_JUDGE
from alignment_core.stages.teacher_logps import NO_IMAGES as OF_TEACHER

Input = PlannedStage | Reference
Shape = Callable[[Input], dict[str, Any]]
"""The config.json of a model that no stage trains; empty if it cannot be read now."""

_READ = ("data", "prompts", "held_out", "rollouts")
"""Inputs of stages with rows, or with completions for them."""
_MODEL = re.compile(r"model(-\d+)?|policy|base")
"""Inputs of stages that train or merge models."""


def stored(store: Store, stages: Iterable[PlannedStage]) -> Iterator[str]:
    """Labels of the data sets in the store that have images."""
    for stage in stages:
        if stage.stage == "dataset" and stage.reference is not None:
            try:
                files = store.manifest(stage.reference).files
            except (Corrupt, NotFound):  # the stage that needs it will report this
                continue
            if any(entry.path.startswith(f"{FOLDER}/") for entry in files):
                yield stage.label


def problems(stages: Iterable[PlannedStage], with_images: Container[str], shape: Shape) -> Iterator[str]:
    """A sentence for each reward, judge, teacher or policy that would read images as text alone: those of rows of the data sets
    ``with_images``, and of observations."""
    for stage in stages:
        observes = _observes_images(stage)
        if observes and _reads_no_images(stage.inputs["policy"], shape):
            yield OF_TEXT_POLICY
        if not observes and not any(label in with_images for label in _data_sets(stage)):
            continue
        if stage.stage == "judge_pairs" and "judge" in stage.inputs:  # a model that the stage serves
            yield OF_JUDGE
        if stage.stage == "teacher_logps" and _reads_no_images(stage.inputs["model"], shape):
            yield OF_TEACHER.format(name="the teacher")
        for number, (field, reward) in enumerate(stage.config.rewarded().items()):
            model = stage.inputs.get(f"reward-{number}")
            if kind_of(reward).reads_text:
                yield f"{field}.{reward.KEY}: {OF_TEXT_REWARD}"
            elif reward.KEY == "reward_model" and model is not None and _reads_no_images(model, shape):
                yield f"{field}.reward_model: {OF_REWARD_MODEL.format(name='it')}"


def _observes_images(stage: PlannedStage) -> bool:
    """Whether the environment of a stage may show images."""
    sampling = stage.config.sampling()
    return sampling is not None and sampling.environment is not None and sampling.environment.images


def _data_sets(stage: PlannedStage) -> Iterator[str]:
    """Labels of the data sets whose rows a stage reads, or the prompts of whose completions."""
    for rows in (stage.inputs.get(role) for role in _READ):
        if isinstance(rows, PlannedStage):
            if rows.stage == "dataset":
                yield rows.label
            elif rows.stage == "generate":
                yield from _data_sets(rows)


def _reads_no_images(model: Input | None, shape: Shape) -> bool:
    """Whether a model, or the one that it is trained from, certainly reads no images."""
    while isinstance(model, PlannedStage) and model.stage not in ("base_model", "merge_adapter"):
        model = next((value for role, value in model.inputs.items() if _MODEL.fullmatch(role)), None)
    config = {} if model is None else shape(model)
    return bool(config) and not config.get("vision_config")
