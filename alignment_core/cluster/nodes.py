"""Checks that the other nodes of a Ray cluster have the source, packages and store of this one, before anything runs there."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of_file
from alignment_core.cluster.device import Place
from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.ray_cluster import other_nodes
from alignment_core.errors import EnvironmentFault

PROBE = "alignment_core.cluster.nodes:InstallationProbe"
_SHOWN = 5
_SOURCE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Installed:
    """The software of a node."""

    python: str
    source: dict[str, str]
    """Digests of the files of this package, by path."""
    packages: dict[str, str]
    """Versions of installed distributions, by name; builds for other devices count as the same."""

    def differences(self, other: Installed) -> list[str]:
        """Differences of another node, as clauses of a sentence."""
        clauses = [f"Python {other.python} instead of {self.python}"] if self.python != other.python else []
        clauses += [f"{path} differs" for path in _changed(self.source, other.source)]
        for name in _changed(self.packages, other.packages):
            clauses.append(f"{name} {other.packages.get(name, 'none')} instead of {self.packages.get(name, 'none')}")
        return clauses


class InstallationProbe:
    """Reports what its node has, from an actor."""

    def installed(self) -> Installed:
        """See :class:`Installed`."""
        return installed()

    def has(self, folder: Path) -> bool:
        """Whether this node has the folder."""
        return folder.is_dir()


def installed() -> Installed:
    """The software of this node."""
    files = {path.relative_to(_SOURCE).as_posix(): path for path in sorted(_SOURCE.rglob("*.py"))}
    versions = {
        package.metadata["Name"].lower().replace("_", "-").removesuffix("-cpu"): package.version.partition("+")[0]
        for package in metadata.distributions()
        if package.metadata["Name"]
    }
    return Installed(platform.python_version(), {name: digest_of_file(path) for name, path in files.items()}, versions)


def check_nodes(ray: Any, packages: Sequence[str], timeout: float, in_store: Path | None = None) -> None:
    """Compare the source and these packages of every other node with those of this one, and look there for ``in_store``, a new
    folder in the store. Raises EnvironmentFault that names the nodes that differ or have no such folder, and
    InfrastructureError if a node does not answer within ``timeout`` seconds."""
    nodes = other_nodes(ray)
    if not nodes:
        return
    addresses = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    group: ActorGroup[InstallationProbe] = ActorGroup(
        ray, "nodes", [Place(node=node) for node in nodes], [{}] * len(nodes), timeout
    )
    try:
        group.make(PROBE, [{}] * len(nodes))
        installations = group.all(InstallationProbe.installed)
        sees_store = group.all(InstallationProbe.has, in_store) if in_store else [True] * len(nodes)
    finally:
        group.kill()
    here = _only(installed(), packages)
    wrong = []
    for node, installation in zip(nodes, installations, strict=True):
        clauses = here.differences(_only(installation, packages))
        if clauses:
            more = f" and {len(clauses) - _SHOWN} more" if len(clauses) > _SHOWN else ""
            wrong.append(f"{addresses[node]} ({node[:8]}): {', '.join(clauses[:_SHOWN])}{more}")
    if wrong:
        raise EnvironmentFault(
            f"nodes of the Ray cluster have other software than this one: {'; '.join(wrong)}; "
            "install the same version of the project and of its packages on every node"
        )
    without = [f"{addresses[node]} ({node[:8]})" for node, sees in zip(nodes, sees_store, strict=True) if not sees]
    if without:
        raise EnvironmentFault(
            f"nodes of the Ray cluster do not see the folder of the store, which is on this one: {', '.join(without)}; "
            "use a store in S3 or in a folder that every node mounts (--store)"
        )


def _only(everything: Installed, packages: Sequence[str]) -> Installed:
    names = {name.removesuffix("-cpu") for name in packages}
    return Installed(
        everything.python,
        everything.source,
        {name: version for name, version in everything.packages.items() if name in names},
    )


def _changed(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
