"""The start of a private Ray: it is waited for in short steps."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import services, state

from alignment_core.cluster.ray_cluster import _registered_at_once


def test_ray_is_asked_for_its_node_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own call sleeps for 2 s if it comes too early. No real Ray: when its node registers depends on the machine."""
    calls: list[str] = []

    class GlobalState:
        def _initialize_global_state(self, _options: Any) -> None:
            calls.append("connected")

        def node_table(self) -> list[str]:
            calls.append("looked")
            return ["node"] if calls.count("looked") == 3 else []

    def get_node(*address: str) -> str:
        calls.append("asked")
        return "/".join(address)

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(services, "_get_gcs_client_options", lambda address: address)
    monkeypatch.setattr(state, "GlobalState", GlobalState)
    with _registered_at_once():
        assert services.get_node("gcs", "id") == "gcs/id"
    assert calls == ["connected", "looked", "looked", "looked", "asked"]
    assert services.get_node is get_node
