"""The parity check of a generate stage: when an engine is compared with its model, and the outcomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.errors import NumericError
from alignment_core.inference.engine import Engine
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from alignment_core.stages.generate import PARITY_PROMPTS, _check_parity


class Engines:
    """In place of actors, whose weights cannot be made wrong on purpose: records calls, with a given difference."""

    def __init__(self, difference: float | None) -> None:
        self.difference, self.calls = difference, list[bool]()

    def one(self, rank: int, method: Any, model: Model, prompts: Any, stop: int) -> float | None:
        assert (rank, len(prompts)) == (0, PARITY_PROMPTS)
        self.calls.append(method is Engine.parity)
        return self.difference


def check(engines: Engines, tiny_model: Any, updated: bool = True, **resources: Any) -> dict[str, float]:
    model = Model(tiny_model(), Reference("model", "0" * 64))
    context: Any = SimpleNamespace(model=lambda role: model, resources=ResourcesConfig(**resources))
    return _check_parity(context, engines, [[{"prompt_ids": [1]}] * 9], 0, updated)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("when", "updated", "checked"),
    [
        ("first", True, [False]),
        ("always", True, [True]),
        ("never", True, []),
        ("first", False, []),
        ("always", False, []),
    ],
)
def test_parity_is_checked_on_an_engine_as_often_as_configured(
    when: str, updated: bool, checked: list[Any], tiny_model: Any
) -> None:
    engines = Engines(1e-6)
    assert check(engines, tiny_model, updated, parity_check=when) == ({"parity": 1e-6} if checked else {})
    assert engines.calls == checked


def test_an_engine_checked_before_reports_no_parity(tiny_model: Any) -> None:
    assert check(Engines(None), tiny_model) == {}


@pytest.mark.parametrize("difference", [2.7, float("nan")])
def test_an_engine_that_does_not_hold_the_policy_ends_the_run(difference: float, tiny_model: Any) -> None:
    with pytest.raises(NumericError, match="the engine does not hold the policy"):
        check(Engines(difference), tiny_model)
