"""Installed distributions for tests: folders as after pip, without pip."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from alignment_core import plugins


def distribution(
    site: Path, name: str, offers: Mapping[str, Mapping[str, str]], files: Mapping[str, str] | None = None
) -> Path:
    """Install ``name`` into the folder ``site``: its entry points by group and name, and its files by path."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in offers.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for path, text in (files or {}).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    return site


def forget() -> None:
    """Let this process see newly installed distributions."""
    plugins._loaded.cache_clear()
    plugins._targets.cache_clear()
    plugins._every_group.cache_clear()


@contextmanager
def site_packages(site: Path) -> Iterator[Path]:
    """Within the block this process finds the distributions in ``site``."""
    before = set(sys.modules)
    sys.path.insert(0, str(site))
    forget()
    try:
        yield site
    finally:
        sys.path.remove(str(site))
        for name in set(sys.modules) - before:
            if str(site) in str(getattr(sys.modules[name], "__spec__", "")):
                del sys.modules[name]
        forget()
