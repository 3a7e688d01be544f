"""Recipes are loaded from a file, as users load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.recipes import BaseRecipe, load_recipe
from tests.recipes.contents import Load


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """``load(content, *overrides)`` writes ``recipe.yaml`` (text, or data as YAML) and loads it."""
    monkeypatch.chdir(tmp_path)

    def written(content: Any, *overrides: str) -> BaseRecipe:
        Path("recipe.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return load_recipe(Path("recipe.yaml"), overrides)

    return written
