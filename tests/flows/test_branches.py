"""Branches of a comparison: shared stages, their inputs, and the final table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import open_store
from alignment_core.composition.plan import Plan, PlannedStage
from alignment_core.recipes import parse_recipe
from tests.align import Align

SCRATCH = {"scratch": {"hidden_size": 64, "num_attention_heads": 2}}
TASK = {"task": "first", "rows": 40}
PROMPTS = {"task": "first", "split": "test", "rows": 8}
GENERATION = {"num_generations": 2, "max_completion_length": 4}
RECIPE: dict[str, Any] = {
    "method": "comparison",
    "name": "compared",
    "model": SCRATCH,
    "sft": {"data": TASK},
    "reward_model": {"data": {**TASK, "rows": 50}},
    "branches": {
        "pairs": {"method": "dpo", "dpo": {"data": TASK}},
        "weak": {"method": "dpo", "dpo": {"data": TASK, "loss": {"beta": 0.01}}},
        "best": {
            "method": "rejection-sampling",
            "reward_model": "ours",
            "evaluation": "ours",
            "rejection_sampling": {"prompts": TASK, "prompts_per_round": 8, "rounds": 1},
        },
    },
    "evaluation": {"prompts": PROMPTS, "generation": GENERATION, "verifier": "task"},
}


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    return plan(parse_recipe(RECIPE), open_store(str(tmp_path / "store")))


def labels(stage: PlannedStage) -> dict[str, str]:
    return {role: stage.label for role, stage in stage.inputs.items() if isinstance(stage, PlannedStage)}


def test_equal_stages_of_branches_are_shared(planned: Plan) -> None:
    names = [stage.label for stage in planned.stages]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.endswith("sft")] == ["sft", "best/round-1/sft"]
    assert [name for name in names if "reward-model" in name] == ["reward-model/data", "reward-model"]
    of_pairs = [
        stage for stage in planned.stages if stage.stage in ("dataset", "reference_logps") and "dpo" in stage.label
    ]
    assert [stage.label for stage in of_pairs] == ["pairs/dpo/data", "pairs/dpo/reference-logps"], "for any loss"
    by_label = {stage.label: stage for stage in planned.stages}
    shared = {"model": "sft", "data": "pairs/dpo/data", "reference_logps": "pairs/dpo/reference-logps"}
    assert labels(by_label["pairs/dpo"]) == labels(by_label["weak/dpo"]) == shared
    assert by_label["weak/dpo"].config.loss.beta == 0.01  # type: ignore[attr-defined]


def test_a_branch_has_the_stages_of_its_recipe_run_alone(planned: Plan, tmp_path: Path) -> None:
    alone = plan(parse_recipe(RECIPE).recipes["best"], open_store(str(tmp_path / "store")))  # type: ignore[attr-defined]
    have = [(stage.stage, stage.config) for stage in planned.stages]
    own = [stage for stage in alone.stages if stage.stage not in ("report", "overlap")]
    assert all((stage.stage, stage.config) in have for stage in own)
    assert {"sft", "reward_model", "generate", "score", "select_best", "evaluate"} < {stage.stage for stage in own}


def test_held_out_prompts_are_compared_with_the_data_of_all_branches_or_a_single_branch(planned: Plan) -> None:
    by_label = {stage.label: stage for stage in planned.stages}
    every = {"held_out", "sft/data", "reward-model/data", "pairs/dpo/data", "best/rejection-sampling/prompts"}
    assert labels(by_label["evaluation/overlap"]).keys() == every
    assert labels(by_label["best/evaluation/overlap"]).keys() == {
        "held_out",
        "sft/data",
        "reward-model/data",
        "rejection-sampling/prompts",
    }
    assert set(labels(by_label["report"])) >= {"sft", "pairs", "weak", "best", "overlap", "reward_model"}


NESTED: dict[str, Any] = {
    **{key: value for key, value in RECIPE.items() if key not in ("sft", "reward_model", "branches")},
    "branches": {
        "pairs": {"method": "dpo", "dpo": {"data": TASK}},
        "inner": {
            "method": "comparison",
            "sft": RECIPE["sft"],
            "branches": {
                "weak": {"method": "dpo", "dpo": {"data": TASK, "loss": {"beta": 0.01}}},
                "kto": {"method": "kto", "kto": {"data": {**TASK, "rows": 41}}},
            },
            "result": "kto",
            "evaluation": {**RECIPE["evaluation"], "prompts": {**PROMPTS, "rows": 9}},
        },
    },
}


def test_a_branch_may_be_a_comparison_whose_result_is_evaluated_with_the_other_branches(tmp_path: Path) -> None:
    planned = plan(parse_recipe(NESTED), open_store(str(tmp_path / "store")))
    by_label = {stage.label: stage for stage in planned.stages}
    assert len(by_label) == len(planned.stages)
    assert labels(by_label["report"]).keys() == {"start", "pairs", "inner", "overlap"}
    assert labels(by_label["inner/report"]).keys() == {"sft", "weak", "kto", "overlap"}
    assert labels(by_label["inner/evaluation/generate"])["policy"] == "inner/kto/kto"
    assert labels(by_label["inner/weak/dpo"])["model"] == "inner/sft"
    assert labels(by_label["inner/weak/dpo"])["data"] == "pairs/dpo/data", "equal stages are shared by all"
    assert "inner/model" not in by_label
    own = {"inner/sft/data", "pairs/dpo/data", "inner/kto/kto/data"}
    assert set(labels(by_label["evaluation/overlap"]).values()) == own | {"evaluation/prompts"}
    assert set(labels(by_label["inner/evaluation/overlap"]).values()) == own | {"inner/evaluation/prompts"}


def test_a_branch_and_the_whole_may_each_have_a_judge(tmp_path: Path) -> None:
    judges = [{"served_judge": {"scratch": {"hidden_size": size, "num_attention_heads": 2}}} for size in (32, 48)]
    whole, own = ({**RECIPE["evaluation"], "judge": judge} for judge in judges)
    pairs = {**RECIPE["branches"]["pairs"], "evaluation": {**own, "prompts": {**PROMPTS, "rows": 9}}}
    recipe = {**RECIPE, "branches": {"pairs": pairs}, "evaluation": whole}
    names = [stage.label for stage in plan(parse_recipe(recipe), open_store(str(tmp_path / "store"))).stages]
    assert len(set(names)) == len(names)
    assert {"evaluation/judge-model", "pairs/evaluation/judge", "pairs/evaluation/judge-model"} <= set(names)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_policies_share_a_table_with_lengths_and_only_a_changed_branch_runs_again(align: Align, tmp_path: Path) -> None:
    small = {"training": {"max_steps": 2, "batch_size": 4}}
    branches = {
        "dpo": {"method": "dpo", "dpo": {"data": TASK, **small}},
        "kto": {"method": "kto", "kto": {"data": TASK, **small}},
        "inner": {
            "method": "comparison",
            "branches": {"weak": {"method": "dpo", "dpo": {"data": TASK, "loss": {"beta": 0.01}, **small}}},
            "evaluation": {**RECIPE["evaluation"], "prompts": {**PROMPTS, "rows": 7}},
        },
    }
    recipe = {
        **RECIPE,
        "sft": {"data": TASK, **small},
        "branches": branches,
        "resources": {"trainers": 1, "engines": 1},
    }
    del recipe["reward_model"]
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    outcome = align(tmp_path / "home", "run", str(path))
    assert list(outcome["metrics"]["policies"]) == ["sft", "dpo", "kto", "inner"]
    assert list(outcome["metrics"]["comparisons"]["inner"]) == ["sft", "weak"]
    of_inner, table = (part.splitlines() for part in Path(outcome["report"]).read_text().split("| policy |")[1:])
    assert "## Policies on held-out prompts" in of_inner
    assert all(column in table[0] for column in ("verifier accuracy", "win rate", "mean tokens"))
    for lines, policies in ((of_inner, {"sft", "weak"}), (table, {"sft", "dpo", "kto", "inner"})):
        assert policies <= {line.split("|")[1].strip() for line in lines[2:] if line.startswith("|")}
    again = align(tmp_path / "home", "check", str(path), "--set", "branches.kto.kto.loss.beta=0.5")
    assert {stage["stage"] for stage in again["stages"] if stage["state"] != "cached"} == {
        "kto/kto",
        "kto/evaluation/generate",
        "kto/evaluation/score",
        "kto/evaluation",
        "report",
    }
