"""What a stage read from outside the store, found in its recorded configuration, of whatever version and stage it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class ReadSource(NamedTuple):
    """A file, a folder's file, an address, or a name on the Hub, as a stage read it."""

    path: str
    sha256: str
    """Digest of a file's bytes; empty if there is none."""
    version: str
    """Commit of a Hub name, or the version of a file at an address; empty if there is none."""


def read_sources(config: Mapping[str, Any]) -> list[ReadSource]:
    """The sources in the configuration of a stage, each once."""
    return list(dict.fromkeys([*_of_folder(config), *_pinned(config)]))


def _of_folder(config: Mapping[str, Any]) -> Iterator[ReadSource]:
    """The files of a model or an adapter, which are pinned by name."""
    model = config.get("model")
    base = model.get("name") if isinstance(model, Mapping) else config.get("adapter")
    if not isinstance(base, str):
        return
    if isinstance(commit := config.get("commit"), str):
        yield ReadSource(base, "", commit)
    files = config.get("files")
    for name, digest in files.items() if isinstance(files, Mapping) else ():
        if isinstance(digest, str):
            yield ReadSource(f"{base.rstrip('/')}/{name}", digest, "")


def _pinned(value: Any) -> Iterator[ReadSource]:
    """Everything in nested data that has the form of a pinned file, address or Hub name."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            waiting += reversed(list(here.values()))
            path, digest, address = (here.get(name) for name in ("path", "sha256", "address"))
            if isinstance(path, str) and isinstance(digest, str):
                yield ReadSource(path, digest, "")
            if isinstance(address, str):
                yield ReadSource(address, "", str(here.get("version") or ""))
            source, commit = here.get("source"), here.get("hub_commit")
            if isinstance(source, Mapping) and isinstance(source.get("path"), str) and isinstance(commit, str):
                yield ReadSource(source["path"], "", commit)
        elif isinstance(here, list):
            waiting += reversed(here)
