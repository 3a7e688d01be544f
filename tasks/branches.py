"""Compositions inside a composition: each has labels of its own, and what several ask for is one stage. Imports no Prefect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from alignment.tasks.graph import CURRENT, Input, Step, training_data
from alignment_core.artifacts import Reference
from alignment_core.execution.base import StageConfig


class Branch:
    """Part of a composition: ``CURRENT`` while it is composed. Its labels begin with its name."""

    def __init__(self, whole: Any, name: str, made: dict[Any, Step]) -> None:
        self.whole, self.name, self.made = whole, name, made
        self.store, self.seed = whole.store, whole.seed
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
    ) -> Step:
        """Submit a stage to the whole, unless the whole has it: of the same configuration and inputs, by whatever label."""
        given = frozenset((role, _name(one)) for role, one in inputs.items() if one is not None)
        asked = (stage, config.model_dump_json(), given, stream, needs)
        if asked not in self.made:
            token = CURRENT.set(self.whole)  # what its task finds when its turn comes
            try:
                full = f"{self.name}/{label}" if self.name else label
                self.made[asked] = self.whole.submit(stage, full, config, inputs, stream, needs, after)
            finally:
                CURRENT.reset(token)
        return self.made[asked]


def _name(value: Input) -> tuple[str, str | None]:
    return (str(value), None) if isinstance(value, Reference) else (value.label, getattr(value, "name", None))


@contextmanager
def sharing() -> Iterator[None]:
    """What is composed inside shares its stages with the branches inside."""
    with _current(Branch(CURRENT.get(), "", {})):
        yield


@contextmanager
def branch(name: str) -> Iterator[None]:
    """What is composed inside is the branch ``name`` of what is :func:`sharing`.

    It is compared with data that the whole has trained on so far, not with that of other branches; the whole, with all.
    """
    whole: Branch = CURRENT.get()
    common = {label: step for label, step in training_data().items() if label not in whole.of_branches}
    one = Branch(whole.whole, name, whole.made)
    with _current(one):
        training_data().update(common)
        yield
        own = {step.label: step for label, step in training_data().items() if label not in common}
    whole.of_branches |= own.keys() - training_data().keys()
    training_data().update(own)


@contextmanager
def _current(one: Branch) -> Iterator[None]:
    token = CURRENT.set(one)
    try:
        yield
    finally:
        CURRENT.reset(token)
