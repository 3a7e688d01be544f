"""The peers are those that docs/peers.md speaks of."""

from __future__ import annotations

from importlib.metadata import version

import pytest


@pytest.mark.parametrize(("peer", "release"), [("trl", "1.16.0"), ("openrlhf", "0.11.2"), ("verl", "0.9.1")])
def test_versions(peer: str, release: str) -> None:
    assert version(peer) == release
