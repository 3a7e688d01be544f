"""Compositions inside a composition: each has labels of its own, and equal stages of several branches are one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.composition.graph import Composition, Input, StageSpec, Step, composing, current
from alignment_core.composition.plan import Plan


class Branch:
    """Part of a composition, and the current one while it is composed.

    Labels of its stages begin with its name, except those that are ``common`` to all branches.
    """

    def __init__(
        self,
        whole: Composition,
        name: str,
        submitted: dict[Any, Step],
        common: frozenset[str] = frozenset(),
        seed: int | None = None,
        may_fail: bool = False,
    ) -> None:
        """``submitted`` are the stages of all branches of ``whole``, by everything that makes two of them equal.

        With ``may_fail``, the rest of the composition continues if a stage of the branch fails that is not common.
        """
        self.whole = whole
        self.name = name
        self.submitted = submitted
        self.common = common
        self.may_fail = may_fail
        self.store = whole.store
        self.seed = whole.seed if seed is None else seed
        self.trust_remote_code = whole.trust_remote_code
        self.training_data: dict[str, Step] = {}
        self.steps: dict[str, Step] = {}
        """Its stages, by its own labels."""
        self.of_branches: set[str] = set()
        """Labels of training data that only branches of it train on."""

    def submit(self, spec: StageSpec) -> Step:
        """Submit a stage to the whole, unless it has one of the same configuration and inputs, under whatever label."""
        inputs = frozenset((role, _identity(value)) for role, value in spec.inputs.items())
        seed = self.seed if spec.seed is None and not spec.common_seed else spec.seed
        identity = (spec.stage, spec.config.model_dump_json(), inputs, spec.stream, spec.needs, seed)
        if identity not in self.submitted:
            is_common = spec.label in self.common
            label = spec.label if is_common or not self.name else f"{self.name}/{spec.label}"
            may_fail = spec.may_fail or (self.may_fail and not is_common)
            with composing(self.whole):  # a task runs in a copy of this context, and looks for its run there
                step = self.whole.submit(replace(spec, label=label, seed=seed, may_fail=may_fail))
            self.submitted[identity] = step
        self.steps[spec.label] = self.submitted[identity]
        return self.submitted[identity]


def _identity(value: Input) -> tuple[str, str | None]:
    return (str(value), None) if isinstance(value, Reference) else (value.label, getattr(value, "name", None))


@contextmanager
def sharing(common: frozenset[str] = frozenset()) -> Iterator[None]:
    """Stages that are composed inside are shared with the branches inside; ``common`` are :func:`common_labels` of these."""
    whole = current()
    part = _part_of(whole, common)
    part.training_data.update(whole.training_data)
    with composing(part):
        yield
    own = {step.label: step for label, step in part.training_data.items() if label not in whole.training_data}
    whole.training_data.update(own)


@contextmanager
def branch(name: str, seed: int | None = None) -> Iterator[Branch]:
    """Compose the branch ``name`` inside a block of :func:`sharing`, with a ``seed`` of its own if it has one.

    If it fails, the others continue: see :class:`~alignment_core.composition.graph.BranchFailed`. Its held-out prompts are
    compared with data that the whole has trained on so far, not with that of other branches; those of the whole, with all.
    """
    whole = current()
    assert isinstance(whole, Branch), "branches are composed inside a block of sharing()"
    common = {label: step for label, step in whole.training_data.items() if label not in whole.of_branches}
    part = Branch(whole.whole, name, whole.submitted, whole.common, seed, may_fail=True)
    part.training_data.update(common)
    with composing(part):
        yield part
    own = {step.label: step for label, step in part.training_data.items() if label not in common}
    whole.of_branches |= own.keys() - whole.training_data.keys()
    whole.training_data.update(own)


@contextmanager
def independent() -> Iterator[None]:
    """Stages that are submitted inside may fail: stages that do not need them continue."""
    with composing(_part_of(current(), may_fail=True)):
        yield


def _part_of(whole: Composition, common: frozenset[str] = frozenset(), may_fail: bool = False) -> Branch:
    return Branch(whole, "", {}, common, may_fail=may_fail)


def common_labels(compositions: Mapping[str, tuple[int, Callable[[], Any]]]) -> frozenset[str]:
    """Labels that all of these branches, each a seed and a composition, give to one stage; nothing is submitted."""
    whole = current()
    branches: list[dict[str, Step]] = []
    with composing(Plan(whole.store, whole.seed, trust_remote_code=whole.trust_remote_code)), sharing():
        for name, (seed, compose) in compositions.items():
            with branch(name, seed) as part:
                compose()
            branches.append(part.steps)
    first, *others = branches
    return frozenset(label for label, step in first.items() if all(other.get(label) is step for other in others))
