"""Sweeps: stages shared by variants, their names and ranking, and fields that cannot vary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from alignment.flows.planning import plan
from alignment.flows.shipped_recipes import shipped
from alignment_core.artifacts import open_store
from alignment_core.composition.graph import StageSpec
from alignment_core.composition.plan import Plan
from alignment_core.errors import UserError
from alignment_core.methods.sweep import SweepRecipe
from alignment_core.recipes import load_recipe, parse_recipe
from alignment_core.stages.variants import Variant, VariantsConfig, table
from alignment_core.stages.variants import run as rank
from tests.align import Align, states

TASK = {"task": "first", "rows": 64}
PROMPTS = {"task": "first", "split": "test", "rows": 8}
RECIPE: dict[str, Any] = {
    "method": "dpo",
    "name": "pairs",
    "seed": 3,
    "model": {"scratch": {"hidden_size": 64, "num_attention_heads": 2}},
    "sft": {"data": TASK, "training": {"max_steps": 4}},
    "dpo": {"data": TASK, "training": {"max_steps": 4}},
    "evaluation": {
        "prompts": PROMPTS,
        "generation": {"num_generations": 2, "max_completion_length": 4},
        "verifier": "task",
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(RECIPE))
    return path


def sweep(file: Path, *sweeps: str, overrides: tuple[str, ...] = ()) -> SweepRecipe:
    recipe = load_recipe(file, overrides, sweeps=sweeps)
    assert isinstance(recipe, SweepRecipe)
    return recipe


def planned(recipe: SweepRecipe, folder: Path) -> Plan:
    return plan(recipe, open_store(str(folder / "store")))


def test_equal_stages_of_variants_are_shared_without_a_variants_name(file: Path, tmp_path: Path) -> None:
    labels = [stage.label for stage in planned(sweep(file, "dpo.loss.beta=0.05,0.1,0.3"), tmp_path).stages]
    names = ["beta=0.05", "beta=0.1", "beta=0.3"]
    shared = [label for label in labels if not label.startswith("beta=")]
    assert {"model", "sft/data", "sft", "dpo/data", "dpo/reference-logps", "start/evaluation", "variants"} <= set(
        shared
    )
    for name in names:
        assert {f"{name}/dpo", f"{name}/dpo/evaluation/generate", f"{name}/report"} <= set(labels)
    assert len(labels) == len(set(labels)) == len(shared) + 3 * 5


def test_a_variant_has_the_stages_of_its_recipe_run_alone(file: Path, tmp_path: Path) -> None:
    whole = planned(sweep(file, "dpo.loss.beta=0.05,0.1"), tmp_path)
    alone = plan(load_recipe(file, ["dpo.loss.beta=0.1"]), open_store(str(tmp_path / "store")))
    have = [(stage.stage, stage.config) for stage in whole.stages]
    assert all((stage.stage, stage.config) in have for stage in alone.stages)


def test_several_fields_make_a_grid_with_the_shortest_distinct_names(file: Path) -> None:
    recipe = sweep(file, "sft.training.learning_rate=1e-4,2e-4", "dpo.training.learning_rate=1e-5", "seed=1,2")
    assert [*recipe.variants] == [
        f"sft.training.learning_rate={rate},dpo.training.learning_rate=1e-05,seed={seed}"
        for rate in ("0.0001", "0.0002")
        for seed in (1, 2)
    ]
    assert [variant.seed for variant in recipe.variants.values()] == [1, 2, 1, 2]
    assert [variant.sft.training.learning_rate for variant in recipe.variants.values()] == [1e-4, 1e-4, 2e-4, 2e-4]  # type: ignore[attr-defined]


def test_variants_with_different_seeds_share_no_stage(file: Path, tmp_path: Path) -> None:
    labels = [stage.label for stage in planned(sweep(file, "seed=1,2"), tmp_path).stages]
    assert {label.partition("/")[0] for label in labels} == {"seed=1", "seed=2", "variants"}


def test_fields_beside_the_sweep_apply_to_all_variants(file: Path) -> None:
    recipe = sweep(file, "dpo.loss.beta=0.1,0.2", overrides=("seed=9", "sft.training.max_steps=2"))
    assert {(variant.seed, variant.sft.training.max_steps) for variant in recipe.variants.values()} == {(9, 2)}  # type: ignore[attr-defined]
    again = parse_recipe(recipe.model_dump(mode="json"))
    assert again.variants == recipe.variants, "as a resumed run reads it"  # type: ignore[attr-defined]
    beside = parse_recipe({**recipe.model_dump(mode="json"), "seed": 11})
    assert {variant.seed for variant in beside.variants.values()} == {11}  # type: ignore[attr-defined]


def test_values_may_be_objects_and_paths(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("rows.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "c", "rejected": "r"}) + "\n")
    recipe = sweep(file, "dpo.data=rows.jsonl,{task: first, rows: 8}")
    paths = [variant.dpo.data.sources[0].path for variant in recipe.variants.values()]  # type: ignore[attr-defined]
    assert paths == [f"{tmp_path}/work/rows.jsonl", None]


@pytest.mark.parametrize(
    ("sweeps", "why"),
    [
        (["dpo.loss.beta"], "--sweep dpo.loss.beta: write it as path=value,value"),
        (["dpo.loss.beta="], "write it as path=value,value"),
        (["dpo.loss.beta=[1"], "the values are not valid YAML"),
        (["dpo.loss.beta=1", "dpo.loss.beta=2"], "dpo.loss.beta is given twice"),
        (["dpo.loss.beta=0.1,0.1"], "dpo.loss.beta has the same value twice"),
        (["dpo.loss.betta=0.1,0.2"], "betta: unknown field; did you mean 'beta'"),
        (["dpo.loss.beta=0.1,-1"], "beta=-1: dpo.loss.beta: input should be greater than 0"),
        (["resources.trainers=1,2"], "resources.trainers cannot vary: resources change no result"),
        (["evaluation.generation.temperature=0,1"], "cannot vary: all variants are judged alike"),
        (["method=dpo,kto"], "`method: comparison` compares several"),
    ],
)
def test_a_field_that_cannot_be_swept_is_refused_before_anything_runs(file: Path, sweeps: list[str], why: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(file, sweeps=sweeps)
    assert why in str(error.value)


def test_a_metric_that_would_not_be_comparable_is_refused(file: Path, tmp_path: Path) -> None:
    own_start = sweep(file, "sft.training.max_steps=2,4")
    assert own_start.ranks == "accuracy"
    planned(own_start, tmp_path)
    by_kl = parse_recipe({**own_start.model_dump(mode="json"), "rank_by": "kl"})
    with pytest.raises(UserError, match="'kl' compares each variant with a start of its own"):
        planned(by_kl, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the evaluation does not measure 'reward'"):
        parse_recipe({**own_start.model_dump(mode="json"), "rank_by": "reward"})


@pytest.mark.parametrize("rewards", [{}, {"rewards": [{"reward_model": "ours"}]}])
def test_the_sections_of_the_variants_decide_what_an_evaluation_and_gates_may_name(
    file: Path, rewards: dict[str, Any]
) -> None:
    content = {name: value for name, value in RECIPE.items() if name not in ("sft", "dpo")}
    content |= {"method": "iterative-dpo", "reward_model": {"data": TASK}}
    content |= {"iterative_dpo": {"prompts": TASK, "prompts_per_round": 8}}
    evaluation = {name: value for name, value in RECIPE["evaluation"].items() if name != "verifier"}
    content["evaluation"] = {**evaluation, **rewards}
    file.write_text(json.dumps({**content, "promotion": {"gates": [{"metric": "win_rate.low", "min": 0.5}]}}))
    assert len(sweep(file, "iterative_dpo.loss.beta=0.1,0.2").variants) == 2
    file.write_text(json.dumps({**content, "promotion": {"gates": [{"metric": "accuracy", "min": 0.5}]}}))
    with pytest.raises(UserError, match=r"nothing measures 'accuracy': add `evaluation\.verifier`"):
        sweep(file, "iterative_dpo.loss.beta=0.1,0.2")


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("acuracy", "no metric 'acuracy'; did you mean 'accuracy'"),
        ("truncated.low", "'truncated' has no interval"),
        ("test_loss", "'test_loss' needs held-out rows of the training"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_anything_runs(file: Path, metric: str, why: str) -> None:
    content = {**sweep(file, "dpo.loss.beta=0.1,0.2").model_dump(mode="json", exclude_unset=True), "rank_by": metric}
    with pytest.raises(UserError, match=f"`rank_by`: {why}"):
        parse_recipe(content, refuse_unused=True)
    assert parse_recipe(content), "recipes of earlier runs are read"


def test_rewards_without_the_reward_model_rank_variants_that_train_one_each(file: Path, tmp_path: Path) -> None:
    """Every variant has a reward model of its own, which its rounds use; the evaluation judges all by a verifier."""
    rounds = {"prompts": TASK, "rounds": 1, "prompts_per_round": 8}
    training = {"data": TASK, "training": {"max_steps": 2}}
    content = {name: value for name, value in RECIPE.items() if name != "dpo"} | {"method": "iterative-dpo"}
    content |= {"reward_model": training, "iterative_dpo": {**rounds, "training": {"max_steps": 2}}}
    evaluation = {name: value for name, value in RECIPE["evaluation"].items() if name != "verifier"}
    by_verifier = {**content, "evaluation": {**evaluation, "rewards": [{"verifier": "task"}]}}
    for own, whole in ((False, by_verifier), (True, {**content, "evaluation": evaluation})):
        file.write_text(json.dumps(whole))
        recipe = sweep(file, "sft.training.max_steps=2,4")
        assert recipe.ranks == "reward"
        if own:
            with pytest.raises(UserError, match="every variant has a reward model of its own"):
                planned(recipe, tmp_path)
        else:
            assert planned(recipe, tmp_path).stages[-1].label == "variants"


@pytest.mark.parametrize("metric", ["reward", "reward_0", "reward_1", "win_rate", "kl"])
def test_only_reward_models_that_decide_the_metric_have_to_be_the_same(file: Path, tmp_path: Path, metric: str) -> None:
    """Every variant has a reward model of its own, whose weight in ``reward`` and ``win_rate`` is 0."""
    rounds = {"prompts": TASK, "rounds": 1, "prompts_per_round": 8, "training": {"max_steps": 2}}
    content = {name: value for name, value in RECIPE.items() if name != "dpo"} | {"method": "iterative-dpo"}
    evaluation = {name: value for name, value in RECIPE["evaluation"].items() if name != "verifier"}
    evaluation["rewards"] = [{"verifier": "task"}, {"reward_model": "ours", "weight": 0}]
    content |= {"reward_model": {"data": TASK}, "iterative_dpo": rounds, "evaluation": evaluation}
    file.write_text(json.dumps(content))
    recipe = sweep(file, "reward_model.training.max_steps=2,4")
    assert recipe.ranks == "reward"
    ranked: Any = parse_recipe({**recipe.model_dump(mode="json"), "rank_by": metric})
    if metric == "reward_1":
        with pytest.raises(UserError, match="every variant has a reward model of its own, so that 'reward_1' cannot"):
            planned(ranked, tmp_path)
    else:
        assert planned(ranked, tmp_path).stages[-1].label == "variants"


def saved_model(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({folder.name: np.zeros(1, np.float32)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("metric", ["accuracy", "reward", "win_rate", "judged_win_rate", "kl"])
def test_variants_with_different_seeds_share_existing_models_and_held_out_prompts(
    file: Path, tmp_path: Path, metric: str
) -> None:
    base, reward_model, judge = (saved_model(tmp_path / name) for name in ("base", "reward-model", "judge"))
    evaluation = {**RECIPE["evaluation"], "rewards": [{"reward_model": reward_model}], "judge": {"served_judge": judge}}
    content = {name: value for name, value in RECIPE.items() if name != "sft"}
    file.write_text(json.dumps({**content, "model": base, "evaluation": evaluation}))
    ranked: Any = parse_recipe({**sweep(file, "seed=1,2").model_dump(mode="json"), "rank_by": metric})
    shared = [stage.label for stage in planned(ranked, tmp_path).stages if not stage.label.startswith("seed=")]
    evaluated = {f"evaluation/{name}" for name in ("judge-model", "prompts", "reward-0")}
    assert sorted(shared) == sorted({"model", "variants"} | evaluated)


@pytest.mark.parametrize("method", ["dpo", "conditional-sft"])
def test_held_out_prompts_are_drawn_with_the_seed_of_the_sweep(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Their tokenizers are those of different models here, and so are their stages."""
    attributes = {"correct": {"reward": {"verifier": "task"}, "decimals": 0}}
    conditions = {"prompts": TASK, "attributes": attributes, "wanted": [{"correct": 1}]}
    sections = {"dpo": {"dpo": RECIPE["dpo"]}, "conditional-sft": {"conditional_sft": conditions}}
    content = {name: value for name, value in RECIPE.items() if name != "dpo"}
    file.write_text(json.dumps({**content, "method": method, **sections[method]}))
    seeds: dict[str, int] = {}
    submit = Plan.submit

    def recorded(self: Plan, spec: StageSpec) -> Any:
        seeds[spec.label] = self.seed if spec.seed is None else spec.seed
        return submit(self, spec)

    monkeypatch.setattr(Plan, "submit", recorded)
    planned(sweep(file, "seed=1,2"), tmp_path)
    prompts = {label: seed for label, seed in seeds.items() if label.endswith("evaluation/prompts")}
    policies = ("",) if method == "dpo" else ("", "wanted/")
    assert prompts == {f"seed={seed}/{policy}evaluation/prompts": 3 for seed in (1, 2) for policy in policies}
    assert [seeds[f"seed={seed}/{stage}"] for stage in ("model", "sft/data", "sft") for seed in (1, 2)] == [1, 2] * 3


@pytest.mark.parametrize("name", ["iterative-dpo", "ppo"])
@pytest.mark.parametrize("values", ["reward_model.training.learning_rate=5e-6,1e-5", "seed=1,2"])
def test_variants_of_recipes_with_a_second_reward_model_are_ranked_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, values: str
) -> None:
    """The Hub is not asked: its commits are made up."""
    for user in ("data.hub", "data.origins.path"):
        monkeypatch.setattr(f"alignment_core.{user}.commit_of", lambda *_: "c")
    recipe = sweep(shipped()[name].path, values)
    assert recipe.ranks == "reward"
    labels = [stage.label for stage in planned(recipe, tmp_path).stages]
    assert {"model", "evaluation/reward-0", "evaluation/prompts", "variants"} <= set(labels)
    assert len([label for label in labels if label.endswith("/reward-model")]) == 2


def test_without_an_evaluation_variants_are_ranked_on_held_out_rows(file: Path) -> None:
    bare = {name: value for name, value in RECIPE.items() if name != "evaluation"}
    file.write_text(json.dumps(bare))
    with pytest.raises(UserError, match="nothing ranks the variants: add a section `evaluation`, or hold rows out"):
        load_recipe(file, sweeps=["dpo.loss.beta=0.1,0.2"])
    assert sweep(file, "dpo.loss.beta=0.1,0.2", overrides=("dpo.data.test_rows=8",)).ranks == ""


def test_an_evaluation_that_ranks_nothing_leaves_the_ranking_to_the_training(file: Path, tmp_path: Path) -> None:
    """As in the recipe that `align init` writes for demonstrations: README's sweep of it was refused."""
    rows = [{"prompt": f"p{number}", "completion": f"c{number}"} for number in range(8)]
    for name in ("rows.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(tmp_path / "rows.jsonl")}, {"path": str(tmp_path / "held-out.jsonl"), "held_out": True}]
    prompts = {"sources": [{"path": str(tmp_path / "held-out.jsonl")}]}
    content = {
        **{name: value for name, value in RECIPE.items() if name in ("model", "resources")},
        "method": "sft",
        "name": "rows",
        "sft": {"data": {"sources": sources}},
        "evaluation": {"prompts": prompts},
    }
    file.write_text(json.dumps(content))
    recipe = sweep(file, "sft.training.learning_rate=1e-5,1e-4")
    assert (recipe.ranks, recipe.by_training) == ("", True)
    (table,) = [stage for stage in planned(recipe, tmp_path).stages if stage.label == "variants"]
    assert table.label == "variants"
    (tmp_path / "verifier.py").write_text("def exact(prompt, completion, label):\n    return 1.0\n")
    verifier = f"evaluation.verifier={tmp_path / 'verifier.py'}:exact"
    named = sweep(file, "sft.training.learning_rate=1e-5,1e-4", overrides=(verifier,))
    assert (named.ranks, named.by_training) == ("accuracy", False)
    content["sft"]["data"]["sources"] = sources[:1]  # type: ignore[index]
    file.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match="nothing ranks the variants: add a `verifier`, or name a metric of the evaluation"
    ):
        sweep(file, "sft.training.learning_rate=1e-5,1e-4")


def test_the_best_variant_is_first_and_overlapping_intervals_are_noted(tmp_path: Path) -> None:
    def variant(beta: float, accuracy: float) -> Variant:
        metrics = {
            "accuracy": accuracy,
            "accuracy.low": accuracy - 0.1,
            "accuracy.high": accuracy + 0.1,
            "confidence": 0.95,
        }
        return Variant(name=f"beta={beta}", fields={"dpo.loss.beta": beta}, metrics=metrics)

    config = VariantsConfig(metric="accuracy", variants=(variant(0.1, 0.3), variant(0.2, 0.8), variant(0.3, 0.7)))

    class Context:
        output = tmp_path

    ranking = rank(Context(), config)  # type: ignore[arg-type]
    assert (ranking["best"], ranking["accuracy"]) == ("beta=0.2", 0.8)
    text = (tmp_path / "section.md").read_text()
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| 0")] == ["0.2", "0.3", "0.1"]
    assert "The interval of the best overlaps that of beta=0.3: their order may be chance." in text
    head, rows = table("accuracy", ranking["variants"])
    assert head == ["dpo.loss.beta", "verifier accuracy"]
    assert rows[0] == ["0.2", "0.800 [0.700, 0.900]"]
    lower = config.model_copy(update={"lower_is_better": True})
    assert rank(Context(), lower)["best"] == "beta=0.1"  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_runs_shared_stages_once_and_promotes_the_best(align: Align, file: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    more = {"promotion": {"gates": [{"metric": "accuracy", "min": 0}]}, "resources": {"trainers": 1, "engines": 1}}
    file.write_text(json.dumps({**RECIPE, **more}))
    outcome = align(home, "run", str(file), "--sweep", "dpo.loss.beta=0.05,0.5")
    ran = states(outcome)
    assert [label for label in ran if label.endswith(("sft", "dpo"))] == ["sft", "beta=0.05/dpo", "beta=0.5/dpo"]
    assert all(state == "run" for state in ran.values())
    rows = outcome["metrics"]["variants"]
    assert [row["metrics"]["accuracy"] for row in rows] == sorted(
        (r["metrics"]["accuracy"] for r in rows), reverse=True
    )
    outputs = {stage["label"]: stage["outputs"] for stage in outcome["stages"]}
    assert outcome["promotion"]["policy"] in outputs[f"{outcome['metrics']['best']}/dpo"].values()
    assert "## Variants, best first" in Path(outcome["report"]).read_text()

    wider = align(home, "check", str(file), "--sweep", "dpo.loss.beta=0.05,0.5,1.0")
    new = [stage["stage"] for stage in wider["stages"] if stage["state"] != "cached"]
    parts = ("dpo", "dpo/evaluation/generate", "dpo/evaluation/score", "dpo/evaluation", "report")
    assert new == [*(f"beta=1.0/{part}" for part in parts), "variants"]
    alone = align(home, "check", str(file), "--set", "dpo.loss.beta=0.5")
    assert {stage["state"] for stage in alone["stages"]} == {"cached"}, "a variant is its recipe alone"
