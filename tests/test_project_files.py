"""Files for maintainers: they name only targets, versions and folders that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]


def commands() -> list[str]:
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    return [*steps, *(hook["entry"] for hook in HOOKS)]


def test_the_workflow_and_the_hooks_run_make_targets_and_nothing_else() -> None:
    for command in commands():
        words = command.split()
        assert words[0] == "make"
        assert words[1] in TARGETS
    assert {"lint", "test", "peers", "wheel"} <= {command.split()[1] for command in commands()}
    assert "make lint" in {hook["entry"] for hook in HOOKS}


def test_every_job_ends_by_itself() -> None:
    assert all(job["timeout-minutes"] <= 90 for job in WORKFLOW["jobs"].values())


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    tested = set(WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"])
    versions = {classifier.rpartition(" ")[2] for classifier in PROJECT["classifiers"] if "Python :: 3." in classifier}
    assert tested == versions
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert versions == {f"3.{minor}" for minor in range(int(low), int(high))}
    assert all(version in (ROOT / "README.md").read_text() for version in versions)


def test_the_changelog_ends_with_the_version_of_the_project() -> None:
    released = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[:2] == ["Unreleased", PROJECT["version"]]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md"])
def test_files_and_targets_named_by_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    assert set(re.findall(r"`make ([a-z][\w-]*)", text)) <= TARGETS
    named = re.findall(r"`((?:alignment_core|flows|tasks|tests|docs|deployments|requirements)/[\w./-]*)`", text)
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_folder_of_the_public_name_links_to_the_others() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "alignment").iterdir() if path.is_symlink()}
    expected = {
        "flows": "../flows",
        "tasks": "../tasks",
        "recipes": "../deployments/recipes",
        "prefect.yaml": "../prefect.yaml",
    }
    assert links == {name: Path(target) for name, target in expected.items()}
    kept = subprocess.check_output(["git", "ls-files", "-s", "alignment"], cwd=ROOT, text=True).splitlines()
    assert sum(line.startswith("120000") for line in kept) == len(expected)
