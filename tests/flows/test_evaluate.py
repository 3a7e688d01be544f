"""Models side by side, of which some cannot be imported, or have other chat templates."""

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
from alignment_core.rollout.schemas import read_rollouts
from tests.align import Align, references
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


RECIPE = """
method: evaluate
name: beside
model: {{name: {model}, chat_template: plain}}
models: {{chat: {{name: {model}, chat_template: "<q>{{{{ messages[0].content }}}}</q>"}}}}
evaluation:
  prompts: {{path: {rows}}}
  generation: {{num_generations: 1, max_completion_length: 4}}
resources: {{trainers: 1, engines: 1, threads: 1}}
"""


@pytest.mark.slow
def test_each_model_gets_the_prompts_in_its_own_chat_template(
    align: Align, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The same prompts under the same numbers, and `align samples` shows both models' answers to them."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(4)))
    (tmp_path / "beside.yaml").write_text(RECIPE.format(model=tiny_model(), rows=rows))
    outcome = align(tmp_path / "home", "run", str(tmp_path / "beside.yaml"))
    store, made = open_store(outcome["store"]), references(outcome)

    def prompts(label: str) -> dict[int, str]:
        rollouts = read_rollouts(store.fetch(Reference.parse(made[f"{label}/evaluation/generate"])))
        return {row["prompt"]: row["prompt_text"] for row in rollouts}

    assert sorted(prompts("model").values()) == [f"question {number}" for number in range(4)]
    assert prompts("chat") == {number: f"<q>{prompt}</q>" for number, prompt in prompts("model").items()}
    shown = align(tmp_path / "home", "samples")["rows"]
    assert [{"prompt", "model", "chat"} <= row.keys() for row in shown] == [True] * 4
