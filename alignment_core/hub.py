"""The Hugging Face Hub, asked for one thing: which commit a name means now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from alignment_core.errors import UserError

_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(name: str, revision: str | None, kind: Literal["model", "dataset"], hint: str = "") -> str:
    """The commit that ``revision`` (default: main) of a Hub repository stands for now.

    With ``HF_HUB_OFFLINE`` set, what the local Hub cache remembers. Raises UserError in one sentence; ``hint`` names
    files whose names are near, because a mistyped path is taken for a Hub name.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    wanted = revision or "main"
    if _COMMIT.fullmatch(wanted):
        return wanted
    if constants.is_offline_mode():
        return _cached_commit(name, wanted, kind, hint)
    try:
        return str(HfApi().repo_info(name, revision=wanted, repo_type=kind, timeout=30).sha)
    except RevisionNotFoundError:
        raise UserError(f"{name}: this Hub {kind} has no revision {wanted!r}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a file or folder here{hint} nor a {kind} on the Hub that you may see "
            "(a private or gated one asks for HF_TOKEN)"
        ) from None
    except Exception as error:  # the client's transport errors have no common base of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name}: no such file or folder here{hint}, and the Hub cannot be asked for a {kind} of this name ({reason}); "
            "set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from None


def _cached_commit(name: str, revision: str, kind: str, hint: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    ref = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "refs" / revision
    try:
        return ref.read_text().strip()
    except OSError:
        raise UserError(
            f"{name}: no such file or folder here{hint}, HF_HUB_OFFLINE is set, and the local Hub cache holds no revision "
            f"{revision!r} of a {kind} of this name"
        ) from None
