"""The defaults of TRL and OpenRLHF on the page of defaults, against the installed packages."""

from __future__ import annotations

import ast
import dataclasses
from importlib.metadata import version
from typing import Any

import pytest
import trl
import yaml
from trl.experimental.cpo import CPOConfig
from trl.experimental.orpo import ORPOConfig

from alignment_core.recipes.peer_defaults import FILE, HEAD
from tests.peers.test_peers_flags import flags_of, newer

ROWS = yaml.safe_load(FILE.read_text())["rows"]
EXPERIMENTAL = {"CPOConfig": CPOConfig, "ORPOConfig": ORPOConfig}


def test_the_page_names_the_installed_versions() -> None:
    assert f"TRL {version('trl').rpartition('.')[0]} and" in HEAD
    assert f"OpenRLHF {version('openrlhf')} " in " ".join(HEAD.split())


@pytest.mark.parametrize(("name", "value"), [item for row in ROWS for item in row.get("trl", {}).items()])
def test_defaults_on_the_page_are_those_of_trl(name: str, value: Any) -> None:
    config, _, field = name.partition(".")
    theirs = EXPERIMENTAL.get(config) or getattr(trl, config)
    assert value == {field.name: field.default for field in dataclasses.fields(theirs)}[field]


@pytest.mark.parametrize(("name", "value"), [item for row in ROWS for item in row.get("openrlhf", {}).items()])
def test_defaults_on_the_page_are_those_of_openrlhf(name: str, value: Any) -> None:
    program, flag = name.split()
    default = ast.unparse(flags_of(newer() / f"{program}.py")[flag])
    theirs = eval(default, {"prefix": flag.partition(".")[0]})  # some defaults depend on the model, `actor` or `critic`
    assert (list(theirs) if isinstance(theirs, tuple) else theirs) == value
