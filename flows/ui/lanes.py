"""The stages behind an artifact as lanes: one for each model that was trained, with what was made for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignment_core.artifacts import Reference
from alignment_core.artifacts.index import View
from alignment_core.artifacts.index_facts import Brief
from alignment_core.artifacts.reference import BATCH

MODELS = ("model", "reward-model", "critic")
DATA = ("dataset", BATCH)
"""Stages whose results are shown beside the lanes."""
STARTS = ("model", "policy", "adapter", "start", "model-1", "base")
"""Roles of the model that a training or a merge goes on from."""
EVALUATED = ("scores", "rollouts")
"""Roles that lead from an evaluation to the policy that it is of."""
EVALUATION = (("generate", "policy"), ("score", "rollouts"), ("evaluate", "scores"))
"""The stages from a policy to its evaluation, with the roles in which each uses the result before. In the role
``baseline_scores`` an evaluation uses those of another policy."""
MOST, LAST = 9, 6
"""Of more lanes than ``MOST``, the first one and the ``LAST`` ones are shown."""
RAILS = 5


@dataclass(frozen=True)
class Mark:
    """What a rail does beside a lane: a model's line from the lane that makes it to the last one that uses it."""

    track: int
    model: Reference | None
    above: bool
    below: bool
    made: bool
    used: bool


@dataclass(eq=False)
class Lane:
    """The stages of one training, or what is left out between lanes."""

    name: str
    run: str
    steps: list[Brief]
    makes: Reference | None
    is_side: bool = False
    """Whether its model is only used: a judge, say, that the artifact itself does not go on from."""
    data: list[Brief] = field(default_factory=list)
    """Data sets that were made for it."""
    again: list[Brief] = field(default_factory=list)
    """Data sets that an earlier lane used, too."""
    evaluations: list[Brief] = field(default_factory=list)
    """Of the model that it makes."""
    marks: list[Mark] = field(default_factory=list)
    left_out: int = 0
    """Number of lanes that it stands for."""

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def device_seconds(self) -> float:
        return sum(step.device_seconds for step in self.steps)

    @property
    def finished_at(self) -> str:
        return max(step.finished_at for step in self.steps)

    def uses(self, model: Reference) -> bool:
        return any(model in step.inputs.values() for step in self.steps)


@dataclass(frozen=True)
class Ancestry:
    """The lanes behind an artifact, the oldest first."""

    history: list[Brief]
    lanes: list[Lane]
    """Those that are shown."""
    all_lanes: list[Lane]

    @property
    def device_seconds(self) -> float:
        return sum(brief.device_seconds for brief in self.history)

    @property
    def runs(self) -> int:
        return len({lane.run for lane in self.all_lanes})


def ancestry(view: View, reference: Reference, everything: bool = False) -> Ancestry:
    """The lanes behind an artifact; with ``everything``, none of them is left out."""
    history = view.history(reference)
    all_lanes = _lanes(history, reference)
    shown = all_lanes if everything else _ends(all_lanes)
    for lane in shown:
        if lane.makes is not None and not lane.left_out:
            lane.evaluations = evaluations_of(view, lane.makes)
    _mark(shown)
    return Ancestry(history, shown, all_lanes)


def evaluations_of(view: View, model: Reference) -> list[Brief]:
    """The evaluations of a model: of scores of completions that it sampled, the latest first."""
    reached = {model}
    users: list[Brief] = []
    for stage, role in EVALUATION:
        users = [brief for reference in reached for brief in view.using(reference)]
        users = [brief for brief in users if brief.stage == stage and brief.inputs.get(role) in reached]
        reached = {output for brief in users for output in brief.outputs.values()}
    return sorted({brief.key: brief for brief in users}.values(), key=lambda brief: brief.finished_at, reverse=True)


def main_line(history: Sequence[Brief], reference: Reference) -> set[Reference]:
    """The artifact, and the models that its training went on from, one after the other."""
    makers = {output: brief for brief in reversed(history) for output in brief.outputs.values()}
    line: set[Reference] = set()
    here: Reference | None = reference
    while here is not None and here not in line:
        line.add(here)
        maker = makers.get(here)
        inputs = maker.inputs if maker else {}
        starts = [inputs[role] for role in STARTS if role in inputs and inputs[role].kind in MODELS]
        here = next(iter([*starts, *(inputs[role] for role in EVALUATED if role in inputs)]), None)
    return line


def _lanes(history: Sequence[Brief], reference: Reference) -> list[Lane]:
    users: dict[Reference, list[Brief]] = defaultdict(list)
    for brief in history:
        for used in dict.fromkeys(brief.inputs.values()):
            users[used].append(brief)
    # The training that each stage is for: the first one that needs its results. Users come later, so they are known first.
    training: dict[str, Brief] = {}
    for brief in sorted(history, key=lambda brief: (brief.finished_at, brief.key), reverse=True):
        later = [
            training[user.key] for output in brief.outputs.values() for user in users[output] if user.key in training
        ]
        trains = any(output.kind in MODELS for output in brief.outputs.values())
        training[brief.key] = (
            brief if trains or not later else min(later, key=lambda user: (user.finished_at, user.key))
        )
    lanes: dict[str, Lane] = {}
    for brief in history:
        if brief.stage not in DATA or training[brief.key] is brief:
            trained = training[brief.key]
            lane = lanes.setdefault(trained.key, Lane("", trained.run, [], None))
            lane.steps.append(brief)
    line = main_line(history, reference)
    for key, lane in lanes.items():
        trained = training[key]
        models = [output for output in trained.outputs.values() if output.kind in MODELS]
        lane.makes = next((model for model in models if model in line), models[0] if models else None)
        lane.is_side = lane.makes not in line and reference not in trained.outputs.values()
        lane.name = _name([step.label for step in lane.steps], trained.label)
    ordered = sorted(lanes.values(), key=lambda lane: (lane.finished_at, lane.name))
    for brief in history:
        if brief.stage in DATA and training[brief.key] is not brief:
            using = [lane for lane in ordered if any(lane.uses(output) for output in brief.outputs.values())]
            for lane in using[:1]:
                lane.data.append(brief)
            for lane in using[1:]:
                lane.again.append(brief)
    return ordered


def _name(labels: Sequence[str], trained: str) -> str:
    """The part that the labels of a lane share, such as ``round-1``; the training's label if they share none."""
    paths = [label.split("/") for label in labels]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared) or trained


def _ends(lanes: list[Lane]) -> list[Lane]:
    if len(lanes) <= MOST:
        return lanes
    last = lanes[-LAST:]
    # The lane of a judge stays where a lane that is shown uses it.
    judges = [
        lane for lane in lanes[1:-LAST] if lane.is_side and lane.makes and any(later.uses(lane.makes) for later in last)
    ]
    hidden = [lane for lane in lanes[1:-LAST] if lane not in judges]
    steps = [step for lane in hidden for step in lane.steps]
    gap = Lane(f"{len(hidden)} lanes between", "", steps, None, left_out=len(hidden))
    return [lanes[0], *judges, gap, *last]


def _mark(lanes: Sequence[Lane]) -> None:
    """Rails, as `git log --graph` draws branches: the first track is the artifact's own line; every other model has one from
    the lane that makes it to the last one that uses it."""
    tracks: list[tuple[Reference | None, int, int]] = [(None, 0, len(lanes) - 1)]
    for number, lane in enumerate(lanes):
        if lane.is_side and lane.makes is not None and len(tracks) < RAILS:
            last = max((later for later, other in enumerate(lanes) if other.uses(lane.makes)), default=number)
            tracks.append((lane.makes, number, last))
    for number, lane in enumerate(lanes):
        for track, (model, first, last) in enumerate(tracks):
            if first <= number <= last:
                made = not lane.is_side and not lane.left_out if model is None else lane.makes == model
                used = model is not None and not lane.left_out and lane.uses(model)
                lane.marks.append(Mark(track, model, number > first, number < last, made, used and not made))
