"""Recipes: frozen typed objects that are read from YAML.

The names in the stub ``__init__.pyi`` are imported on first use: modules of plug-ins import the sections, which must not load
the modules that collect the plug-ins.
"""

from __future__ import annotations

from pathlib import Path

from alignment_core.public import lazy, names_in

__getattr__ = lazy(__name__, names_in(Path(__file__).with_suffix(".pyi")))
