"""The code's commit, as git knows it, in checkouts of every kind; and the installed distributions."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from alignment_core.execution import environment as module
from alignment_core.execution.environment import Code, distributions


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package as ours, and one commit."""
    root = tmp_path / "checkout"
    for name in ("alignment_core", "flows", "tasks", "docs"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("")
    (root / ".gitignore").write_text("ignored/\n")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    return root


def test_the_commit_is_known_when_git_packs_its_references_and_in_a_worktree(checkout, tmp_path):
    commit = git(checkout, "rev-parse", "HEAD")
    assert module._commit_of(checkout) == (commit, ())
    git(checkout, "pack-refs", "--all")
    assert not (checkout / ".git" / "refs" / "heads" / "main").exists()
    assert module._commit_of(checkout) == (commit, ())
    git(checkout, "worktree", "add", "-q", str(tmp_path / "other"))
    assert module._commit_of(tmp_path / "other") == (commit, ())


def test_changed_and_new_files_of_the_package_are_named_and_others_are_not(checkout):
    (checkout / "alignment_core" / "__init__.py").write_text("x = 1\n")
    (checkout / "flows" / "new file.py").write_text("")
    (checkout / "docs" / "__init__.py").write_text("x = 1\n")
    commit, changed = module._commit_of(checkout)
    assert changed == ("alignment_core/__init__.py", "flows/new file.py")
    assert str(Code("0.1.0", commit, changed)) == f"0.1.0+{commit[:12]}.dirty"
    assert str(Code("0.1.0", commit)) == f"0.1.0+{commit[:12]}"


def test_a_package_that_is_installed_below_another_project_has_no_commit(checkout):
    installed = checkout / "ignored" / "site-packages"
    (installed / "alignment_core").mkdir(parents=True)
    (installed / "alignment_core" / "__init__.py").write_text("")
    assert module._commit_of(installed) == ("", ())
    assert str(Code("0.1.0")) == "0.1.0"


def test_without_git_the_version_is_all_that_is_known(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._commit_of(checkout) == ("", ())


def test_every_installed_distribution_is_listed_with_its_version():
    installed = distributions()
    assert installed["torch"] == metadata.version("torch")
    assert installed["huggingface-hub"] == metadata.version("huggingface_hub"), "names are normalised"
    assert list(installed) == sorted(installed)
