"""The nodes on which actors start: those that Ray calls alive and that accept connections."""

from __future__ import annotations

import socket
from typing import Any

from alignment_core.cluster import ray_cluster


class Ray:
    """Ray's answers about a cluster that lost a node. No real Ray: for how long it is mistaken depends on its version."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self.nodes = lambda: nodes

    def get_runtime_context(self) -> Ray:
        return self

    def get_node_id(self) -> str:
        return "here"


def test_a_node_that_ray_calls_alive_is_left_out_once_it_refuses_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            ports = {"here": 1, "second": closed.getsockname()[1], "third": listening.getsockname()[1], "dead": 1}
        nodes = [
            {
                "NodeID": name,
                "Alive": name != "dead",
                "NodeManagerHostname": name,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": port,
            }
            for name, port in ports.items()
        ]
        assert ray_cluster.here_first(Ray(nodes)) == ["here", "third"]
