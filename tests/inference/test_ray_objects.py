"""Errors of updates that travel as Ray objects name the call that failed."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

from alignment_core.cluster.actor import call
from alignment_core.errors import DeadlineExceeded
from alignment_core.inference.channels.ray_objects import RaySender
from alignment_core.inference.engine import Engine


class Calls:
    """An actor's method. No real actor: its answer comes from the test."""

    def remote(self, *_: object) -> None: ...


class Actor:
    call = call_with = Calls()


@pytest.mark.parametrize("name", ["begin_delta", "load_bucket"])
def test_the_call_that_failed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        rf"^engines: `{name}` failed: ValueError": ray.exceptions.RayTaskError("", "", ValueError("wrong")),
        rf"^engines did not answer `{name}` within": ray.exceptions.GetTimeoutError(),
    }
    for sentence, error in errors.items():

        def get(_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(ray, "get", get)
        monkeypatch.setattr(ray, "put", lambda bucket: bucket)
        begin = call(Engine.begin_delta) if name == "begin_delta" else None
        with pytest.raises((RuntimeError, DeadlineExceeded), match=sentence):
            RaySender([Actor()], "load_bucket", 1.0, begin).send([("weight", torch.zeros(3))])
