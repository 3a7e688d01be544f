"""The Hugging Face Hub: which commit a name refers to now."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Literal

from alignment_core.errors import UserError, first_line
from alignment_core.network import through_proxy
from alignment_core.recipes.paths import BEGINS
from alignment_core.resolved_names import known_names, remember

_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(name: str, revision: str | None, kind: Literal["model", "dataset"], hint: str = "") -> str:
    """The commit that ``revision`` (default: main) of a Hub repository stands for now; in a run, when it first asked.

    With ``HF_HUB_OFFLINE`` set, or ``HF_DATASETS_OFFLINE`` for a dataset, it is the commit in the local Hub cache. Raises
    UserError in one sentence; ``hint`` names files with similar names, because a mistyped path is taken for a Hub name.
    """
    wanted = revision or "main"
    if _COMMIT.fullmatch(wanted):
        return wanted
    branch = f"{kind} {name}@{wanted}"
    commit = known_names().get(branch) or _commit_now(name, wanted, kind, hint)
    remember(branch, commit)
    return commit


def _commit_now(name: str, wanted: str, kind: Literal["model", "dataset"], hint: str) -> str:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if is_offline(kind):
        return _cached_commit(name, wanted, kind, hint)
    try:
        commit = str(HfApi().repo_info(name, revision=wanted, repo_type=kind, timeout=30).sha)
    except RevisionNotFoundError:
        raise UserError(f"{name}: this Hub {kind} has no revision {wanted!r}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a file or folder{hint} ({BEGINS}) nor a {kind} on the Hub that you can access (private and "
            "gated ones need HF_TOKEN)"
        ) from None
    except Exception as error:  # the client's transport errors have no common base of their own
        raise UserError(
            f"{name}: no such file or folder{hint} ({BEGINS}), and the Hub could not be reached to look for a {kind} of this "
            f"name{through_proxy(constants.ENDPOINT)} ({first_line(error)}); set HF_HUB_OFFLINE=1 to use earlier "
            "downloads"
        ) from None
    _remember(_ref(name, wanted, kind), commit)
    return commit


def is_offline(kind: str) -> bool:
    """Whether the user's settings forbid requests to the Hub for a model or a dataset."""
    from huggingface_hub import constants

    datasets_are = os.environ.get("HF_DATASETS_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    return constants.is_offline_mode() or (kind == "dataset" and datasets_are)


def cache_folder(name: str, kind: str) -> Path:
    """The folder of a repository in the Hub's own cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)


def _ref(name: str, revision: str, kind: str) -> Path:
    """The file in the Hub's own cache that holds the commit of a revision."""
    return cache_folder(name, kind) / "refs" / revision


def _remember(ref: Path, commit: str) -> None:
    """Store the commit as the Hub's client does for a download by revision; ours are by commit, which stores none."""
    with contextlib.suppress(OSError):  # a cache that cannot be written only matters offline
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = ref.with_name(f"{ref.name}.{os.getpid()}")
        partial.write_text(commit)
        partial.replace(ref)


def _cached_commit(name: str, revision: str, kind: str, hint: str) -> str:
    try:
        return _ref(name, revision, kind).read_text().strip()
    except OSError:
        from huggingface_hub import constants

        variable = "HF_HUB_OFFLINE" if constants.is_offline_mode() else "HF_DATASETS_OFFLINE"
        raise UserError(
            f"{name}: no such file or folder{hint} ({BEGINS}), {variable} is set, and the local Hub cache holds no "
            f"revision {revision!r} of a {kind} of this name"
        ) from None
