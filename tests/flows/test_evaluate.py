"""Models side by side, of which some cannot be imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import Reference, open_store
from alignment_core.composition.graph import BranchFailed, Input, artifact
from alignment_core.composition.plan import PlannedStage
from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import parse_recipe
from tests.conftest import TinyModel


def test_a_model_that_cannot_be_imported_does_not_end_the_composition(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose download fails; a folder that is no model is refused before the run."""
    failure = BranchFailed(EnvironmentFault("lost: the download failed"))

    def artifact_of(model: Input) -> Reference | None:
        if isinstance(model, PlannedStage) and model.label == "lost":
            raise failure
        return artifact(model)

    monkeypatch.setattr("alignment_core.methods.evaluate.artifact", artifact_of)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "question"}) + "\n")
    recipe = parse_recipe(
        {
            "method": "evaluate",
            "name": "beside",
            "model": str(tiny_model()),
            "models": {"lost": str(tiny_model(seed=2)), "other": str(tiny_model(seed=3))},
            "evaluation": {"prompts": str(rows), "generation": {"num_generations": 1, "max_completion_length": 4}},
        }
    )
    labels = {stage.label for stage in plan(recipe, open_store(str(tmp_path / "store"))).stages}
    assert {"model/evaluation", "other/evaluation"} <= labels
