"""The peers' names in the docs: versions, OpenRLHF's flags, TRL's fields."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from trl import DPOConfig, GRPOConfig, ModelConfig, RewardConfig, RLOOConfig, SFTConfig

DOCS = Path(__file__).parents[2] / "docs"
NAMES = (DOCS / "names.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:4]] for line in NAMES.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(("peer", "release"), [("TRL", "1.16.0"), ("OpenRLHF", "0.11.2"), ("verl", "0.9.1")])
def test_the_peers_are_the_releases_that_the_docs_speak_of(peer: str, release: str) -> None:
    assert version(peer.lower()) == release
    assert f"{peer} {release}" in (DOCS / "peers.md").read_text()


def test_every_flag_of_openrlhf_in_the_docs_exists() -> None:
    package = importlib.util.find_spec("openrlhf")
    assert package is not None
    assert package.origin is not None
    commands = "\n".join(path.read_text() for path in (Path(package.origin).parent / "cli").glob("*.py"))
    flags = set(re.findall(r'"(--[\w.{}]+)"', commands))
    flags |= {flag.replace("{prefix}", model) for flag in flags for model in ("actor", "critic")}
    named = {flag for row in ROWS for flag in re.findall(r"--[\w.]+", row[0])}
    assert len(named) > 30
    assert named <= flags


def test_every_name_of_trl_in_the_docs_is_a_field_of_trls_configurations() -> None:
    configs = (DPOConfig, GRPOConfig, ModelConfig, RLOOConfig, RewardConfig, SFTConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    named = {name for row in ROWS for name in re.findall(r"`(\w+)", row[1])}
    assert len(named) > 20
    assert named - fields == {"get_soft_overlong_punishment"}, "a function of trl.rewards, which a test calls"
