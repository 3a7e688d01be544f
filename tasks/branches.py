"""Compositions inside a composition: each has labels of its own, and what several ask for is one stage. Imports no Prefect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from alignment.tasks.graph import CURRENT, Input, Step, training_data
from alignment_core.artifacts import Reference
from alignment_core.checks.plan import Plan
from alignment_core.execution.base import StageConfig


class Branch:
    """Part of a composition: ``CURRENT`` while it is composed. Its labels begin with its name, but for those that are
    ``common`` to all branches."""

    def __init__(
        self,
        whole: Any,
        name: str,
        made: dict[Any, Step],
        common: frozenset[str] = frozenset(),
        seed: int | None = None,
        may_fail: bool = False,
    ) -> None:
        """``may_fail`` says that the rest of the composition continues if a stage of it fails that is not common."""
        self.whole, self.name, self.made, self.common = whole, name, made, common
        self.may_fail = may_fail
        self.store, self.seed = whole.store, whole.seed if seed is None else seed
        self.asked: dict[str, Step] = {}
        """What it has asked for, by its own labels."""
        self.of_branches: set[str] = set()
        """Labels of training data that only branches of it train on."""

    def submit(
        self,
        stage: str,
        label: str,
        config: StageConfig,
        inputs: Mapping[str, Input | None],
        stream: str = "",
        needs: tuple[str, ...] = (),
        after: Step | None = None,
        seed: int | None = None,
        may_fail: bool = False,
    ) -> Step:
        """Submit a stage to the whole, unless the whole has it: of the same configuration and inputs, by whatever label."""
        given = frozenset((role, _name(one)) for role, one in inputs.items() if one is not None)
        seed = self.seed if seed is None else seed
        asked = (stage, config.model_dump_json(), given, stream, needs, seed)
        if asked not in self.made:
            token = CURRENT.set(self.whole)  # what its task finds when its turn comes
            try:
                full = f"{self.name}/{label}" if self.name and label not in self.common else label
                may_fail = may_fail or (self.may_fail and label not in self.common)
                self.made[asked] = self.whole.submit(stage, full, config, inputs, stream, needs, after, seed, may_fail)
            finally:
                CURRENT.reset(token)
        self.asked[label] = self.made[asked]
        return self.made[asked]


def _name(value: Input) -> tuple[str, str | None]:
    return (str(value), None) if isinstance(value, Reference) else (value.label, getattr(value, "name", None))


@contextmanager
def sharing(common: frozenset[str] = frozenset()) -> Iterator[None]:
    """What is composed inside shares its stages with the branches inside; ``common`` are :func:`common_labels` of these."""
    with _current(Branch(CURRENT.get(), "", {}, common)):
        yield


@contextmanager
def branch(name: str, seed: int | None = None) -> Iterator[Branch]:
    """What is composed inside is the branch ``name`` of what is :func:`sharing`, with a ``seed`` of its own if it has one.

    If it fails, the others continue: see :class:`~alignment.tasks.graph.BranchFailed`. It is compared with data that the whole
    has trained on so far, not with that of other branches; the whole, with all.
    """
    whole: Branch = CURRENT.get()
    common = {label: step for label, step in training_data().items() if label not in whole.of_branches}
    one = Branch(whole.whole, name, whole.made, whole.common, seed, may_fail=True)
    with _current(one):
        training_data().update(common)
        yield one
        own = {step.label: step for label, step in training_data().items() if label not in common}
    whole.of_branches |= own.keys() - training_data().keys()
    training_data().update(own)


@contextmanager
def independent() -> Iterator[None]:
    """Stages that are submitted inside may fail: what does not need them continues."""
    with _current(Branch(CURRENT.get(), "", {}, may_fail=True)):
        yield


def common_labels(compositions: Mapping[str, tuple[int, Callable[[], Any]]]) -> frozenset[str]:
    """Labels that all of these branches, each a seed and a composition, give to one stage; nothing is submitted."""
    whole, asked = CURRENT.get(), []
    outline = Plan(whole.store, whole.seed)
    with _current(outline), sharing():
        for name, (seed, compose) in compositions.items():
            with branch(name, seed) as one:
                compose()
            asked.append(one.asked)
    first, *others = asked
    return frozenset(label for label, step in first.items() if all(other.get(label) is step for other in others))


@contextmanager
def _current(one: Branch | Plan) -> Iterator[None]:
    token = CURRENT.set(one)
    try:
        yield
    finally:
        CURRENT.reset(token)
