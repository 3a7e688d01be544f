"""Installed packages that the modules of a stage import: a check of the packages that it declares."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from alignment_core.source_code import PACKAGE, package_source

PACKAGES_THAT_DO_NOT_COMPUTE = {
    "pyarrow",  # reads and writes tables: the same values in every version
    "safetensors",  # the same for weights
    "huggingface_hub",  # fetches content pinned by a commit
    "numpy",  # where its random numbers decide, the stage declares it all the same
    "pydantic",  # settings
    "httpx",  # calls endpoints
    "fastapi",  # answers agents
    "uvicorn",
    "psutil",
    "ray",  # placement
    "PIL",  # decodes images; recorded, and not counted: each of its security releases would retrain models of text
}


def imported_packages(modules: Iterable[str]) -> set[str]:
    """Installed packages that these modules of ours import, by the names that imports know them by."""
    reached = set[str]()
    for module in modules:
        known = package_source(module)
        assert known is not None
        reached |= {name.partition(".")[0] for name in known[1].imports}
    return reached - {PACKAGE} - set(sys.stdlib_module_names)
