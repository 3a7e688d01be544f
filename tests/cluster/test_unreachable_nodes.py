"""Nodes of a cluster that Ray calls alive and that cannot be reached."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from alignment_core.cluster.ray_cluster import other_nodes


def node(name: str, port: int, alive: bool = True) -> dict[str, Any]:
    address = {"NodeManagerHostname": f"host-{name}", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    return {"NodeID": name, "Alive": alive, **address}


def test_a_node_that_cannot_be_reached_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """No real Ray, which would call a lost node alive for only so long."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        open_port, closed_port = server.getsockname()[1], bound.getsockname()[1]

        class Ray:
            def nodes(self) -> list[dict[str, Any]]:
                dead = node("dead", closed_port, alive=False)
                return [node("here", closed_port), node("reached", open_port), node("lost", closed_port), dead]

            def get_runtime_context(self) -> Any:
                return self

            def get_node_id(self) -> str:
                return "here"

        with caplog.at_level(logging.WARNING):
            assert other_nodes(Ray()) == ["reached"]
    [record] = caplog.records
    assert "host-lost" in record.getMessage()
    assert f"127.0.0.1:{closed_port}" in record.getMessage()
