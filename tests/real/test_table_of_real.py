"""The recipe, the tables and the page of ``make real``, from rows and outcomes written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment_core.recipes import parse_recipe
from tests.real import __main__ as command
from tests.real.later_runs import later_runs
from tests.real.page import Run, page, saved, tables
from tests.real.recipe import recipe_for


def stage(label: str, key: str, seconds: float, **metrics: float) -> dict[str, Any]:
    return {"label": label, "key": key, "state": "run", "cost": {"seconds": seconds}, "metrics": metrics}


def measured(name: str, value: float, **others: float) -> dict[str, float]:
    return {name: value, f"{name}.low": value - 0.05, f"{name}.high": value + 0.05, **others}


OUTCOME: dict[str, Any] = {
    "metrics": {
        "policies": {
            "start": measured("accuracy", 0.1, length=30.0, baseline_perplexity=3.0),
            "grpo": measured("accuracy", 0.75, length=12.25, kl=20.04, baseline_perplexity=4.5)
            | measured("win_rate", 0.8),
            "ppo": measured("accuracy", 0.5),
        },
        "comparisons": {"preferences": {"sft": measured("reward", -1.0), "dpo": measured("reward", 0.5)}},
    },
    "stages": [
        stage("start/evaluation", "a", 500.0),
        stage("grpo/rl", "b", 600.0),
        stage("grpo/evaluation/generate", "c", 30.0),
        stage("grpo/evaluation/generate", "c", 30.0),
        stage("grpo-strict/rl", "d", 900.0),
        stage("preferences/reward-model/data", "e", 1.0, test_rows=20),
        stage("preferences/reward-model", "f", 60.0, test_accuracy=0.5, **{"test_accuracy.first": 0.45}),
        stage("preferences/dpo/dpo", "g", 30.0),
    ],
    "failed": {"rloo/rl": "the loss is not finite\nat step 3"},
}
SAMPLES = {
    "": [{"prompt": "Describe\nice.", "label": "[]", "start": "Ice is\n\ncold.", "grpo": "COLD", "ppo": "Cold!"}],
    "preferences": [{"prompt": "Hello", "dpo/sft": "Hi", "dpo": "Good day"}],
}
LATER = {
    "distillation": {"start": measured("accuracy", 0.1), "round-1": {}, "round-2": measured("accuracy", 0.4)},
    "nights": [
        {
            "rows": 60,
            "state": "promoted",
            "metrics": {"start": measured("reward", 0.1), "dpo": measured("win_rate", 0.55)},
        },
        {"rows": 60, "state": "failed", "metrics": None},
    ],
}
RUN = Run.of(
    2, "2 cores of a CPU", {**OUTCOME, "report": "/home/report.md", "run_id": "1"}, SAMPLES, 5_600_000_000, LATER
)


def test_the_policy_that_an_earlier_run_promoted_has_no_row() -> None:
    earlier = {"production": measured("accuracy", 0.7), "grpo against production": measured("accuracy", 0.75)}
    metrics = {**OUTCOME["metrics"], "policies": OUTCOME["metrics"]["policies"] | earlier}
    answers = {**SAMPLES, "": [{**SAMPLES[""][0], "production": "Cool"}]}
    outcome = {**OUTCOME, "metrics": metrics}
    assert Run.of(2, "2 cores of a CPU", outcome, answers, 5_600_000_000, LATER) == RUN


def test_tables_have_a_row_for_each_policy_and_each_held_out_metric() -> None:
    rows = [line for line in tables([RUN]) if line.startswith("| 2")]
    assert rows == [
        "| 2 | grpo | 0.100 [0.050, 0.150] | 0.750 [0.700, 0.800] | 0.800 [0.750, 0.850] | 20.0 | 3.00 → 4.50 | 30.0 → 12.2 "
        "| 10.5 |",
        "| 2 | ppo | 0.100 [0.050, 0.150] | 0.500 [0.450, 0.550] | — | — | 3.00 → — | 30.0 → — | 0.0 |",
        "| 2 | dpo | -1.000 [-1.050, -0.950] | 0.500 [0.450, 0.550] | — | — | — → — | — → — | 0.5 |",
        # Wilson's interval of 10 of 20: 0.5 ± 1.96 / (1 + 0.192) √(0.0125 + 0.0024)
        "| 2 | preferences/reward-model | accuracy | 0.450 | 0.500 [0.299, 0.701] n=20 |",
        "| 2 | distillation | answers that follow all instructions | 0.100 [0.050, 0.150] | 0.400 [0.350, 0.450] |",
        "| 2 | night 1: 60 pairs, promoted | win rate against production | 0.5 | 0.550 [0.500, 0.600] |",
        "| 2 | night 2: 60 pairs, failed | win rate against production | 0.5 | — |",
    ]
    assert list(tables([RUN]))[-1] == "Seed 2: rloo/rl failed: the loss is not finite"


def test_seeds_are_compared_by_their_means() -> None:
    other = json.loads(json.dumps(OUTCOME))
    other["metrics"]["policies"] = {
        "start": {"accuracy": 0.3, "length": 20.0},
        "grpo": {"accuracy": 0.85, "length": 8.0},
    }
    other["metrics"]["comparisons"]["preferences"] = {"sft": {"length": 50.0}, "dpo": {"win_rate": 0.6, "length": 40.0}}
    second = replace(RUN, seed=3, outcome=other)
    rows = list(tables([RUN, second]))[2:5]
    assert rows == [
        "| grpo | 2 | answers that follow all instructions | 0.200 (0.100 to 0.300) | 0.800 (0.750 to 0.850) "
        "| 25.0 (20.0 to 30.0) → 10.1 (8.0 to 12.2) |",
        "| ppo | 1 | answers that follow all instructions | 0.100 | 0.500 | 30.0 → — |",
        "| preferences/dpo | 2 | win rate against SFT by the judge | 0.5 | 0.600 | 50.0 → 40.0 |",
    ]
    assert "mean of seeds" not in "".join(tables([second]))


def test_runs_of_other_machines_are_in_the_page_of_a_later_one(tmp_path: Path) -> None:
    for each in (RUN, replace(RUN, seed=1)):
        each.save(tmp_path / "results")
    assert [run.seed for run in saved(tmp_path / "results")] == [1, 2]
    assert list(tables(saved(tmp_path / "results"))) == list(tables([replace(RUN, seed=1), RUN]))
    replace(RUN, memory=None).save(tmp_path / "results")
    assert saved(tmp_path / "results")[1].memory == 5_600_000_000, "of the command that computed it"
    assert "/home" not in (tmp_path / "results" / "seed-2.json").read_text()


def test_a_run_of_some_branches_keeps_what_is_saved_of_the_others(tmp_path: Path) -> None:
    RUN.save(tmp_path)
    start = OUTCOME["metrics"]["policies"]["start"]  # type: ignore[index]
    again = measured("accuracy", 0.6)
    rounded = {name: value * (1 + 1e-8) for name, value in start.items()}  # by another number of threads
    rounded["length.low"] = 28.0  # which evaluations did not measure then
    few = {
        "metrics": {"policies": {"start": rounded, "ppo": again}},
        "stages": [stage("ppo/rl", "h", 120.0)],
        "failed": {},
    }
    rows = [{"prompt": "Describe\nice.", "label": "[]", "start": "Ice is\n\ncold.", "ppo": "Frozen"}]
    Run.of(2, "2 cores of a CPU", few, {"": rows}, None, {"distillation": {"start": {}}}).save(tmp_path)
    (merged,) = saved(tmp_path)
    assert list(merged.policies("")) == ["start", "grpo", "ppo"], "as in the recipe"
    assert merged.policies("")["ppo"] == again
    assert (merged.seconds("ppo"), merged.seconds("grpo")) == (120.0, 630.0)
    assert "d" not in {each["key"] for each in merged.outcome["stages"]}, "of a branch that is not compared"
    assert merged.memory == 5_600_000_000
    assert merged.samples[""] == [{**rows[0], "grpo": "COLD"}]
    assert merged.samples["preferences"] == SAMPLES["preferences"]
    assert merged.later == {"distillation": {"start": {}}, "nights": LATER["nights"]}
    other = {**few, "metrics": {"policies": {"start": measured("accuracy", 0.2), "ppo": again}}}
    Run.of(2, "2 cores of a CPU", other, {"": rows}, None, {}).save(tmp_path)
    assert list(saved(tmp_path)[0].policies("")) == ["start", "ppo"], "another start is not the one of the others"


def test_a_run_is_there_to_be_saved_before_the_runs_that_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def align(*arguments: str) -> tuple[dict[str, Any], int]:
        if arguments[0] == "samples":
            return {"rows": SAMPLES["preferences" if "--branch" in arguments else ""]}, 1
        return {**OUTCOME, "report": "report.md", "run_id": "1"}, 5_600_000_000

    monkeypatch.setattr(command, "align", align)
    monkeypatch.setattr(command, "later_runs", lambda *_: LATER)
    first, second = (run for run, _ in command.runs({"model": "m"}, 2, tmp_path, tmp_path, []))
    assert first.outcome == second.outcome == RUN.outcome
    assert first.samples == second.samples == RUN.samples
    assert (first.later, second.later) == ({}, LATER)
    assert [run.later for run, _ in command.runs({"model": "m"}, 2, tmp_path, tmp_path, ["seed=3"])] == [{}]


def test_the_page_shows_answers_before_and_after_uncut() -> None:
    written = page([RUN], ["pictures/real-model-lineage.svg"])
    assert "![real model lineage](pictures/real-model-lineage.svg)\n" in written
    assert "Measured on 2 cores of a CPU. All processes of a run together had at most 5.6 GB of memory" in written
    assert "**Describe ice.**\n\nstart:\n\n~~~text\nIce is\n\ncold.\n~~~\n\ngrpo:\n\n~~~text\nCOLD\n~~~" in written
    assert (
        "not all of these runs had: rloo, reinforce-baseline, rejection-sampling, iterative-dpo, preferences."
        in written
    )
    assert "memory" not in page([replace(RUN, memory=None)])
    assert "## start and ppo\n" in written
    assert "## sft and dpo of preferences\n" in written
    assert "sft:\n\n~~~text\nHi\n~~~\n\ndpo:\n\n~~~text\nGood day\n~~~" in written


def test_later_runs_need_a_promoted_policy_and_a_judge(tmp_path: Path) -> None:
    commands: list[tuple[str, ...]] = []

    def align(*arguments: str) -> dict[str, Any]:
        commands.append(arguments)
        if arguments[0] == "nights":
            return {arguments[2]: [{"rows": 60}]}
        return {"metrics": {"policies": {"start": {}, "round-1": {}}}}

    data = tmp_path / "data"
    (data / "hh-rlhf-harmless").mkdir(parents=True)
    for name in ("train", "test"):
        (data / "hh-rlhf-harmless" / f"{name}.jsonl").write_text("{}\n" * 200)
    judge = {"label": "preferences/reward-model", "outputs": {"reward-model": "reward-model@sha256:" + "1" * 64}}
    settings = {"model": str(tmp_path), "seed": 3}
    assert later_runs(align, settings, data, {"promotion": {"state": "refused"}, "stages": []}, tmp_path) == {}
    assert commands == []
    outcome = {"promotion": {"state": "unchanged"}, "stages": [judge]}
    done = later_runs(align, settings, data, outcome, tmp_path)
    assert done == {"distillation": {"start": {}, "round-1": {}}, "nights": [{"rows": 60}]}
    nights = tmp_path / "real-model-nights-3.json"
    expected = ("run", str(nights))
    assert commands == [
        ("run", str(tmp_path / "real-model-distillation-3.json")),
        expected,
        expected,
        ("nights", "list", nights.stem),
    ]
    night: Any = parse_recipe(json.loads(nights.read_text()))
    assert (night.seed, night.promotion.tag) == (3, "policy/real-model-nights-3")
    student = json.loads((tmp_path / "real-model-distillation-3.json").read_text())
    assert student["distillation"]["teacher"] == {"model": "policy/real-model-3"}
    assert len(list((tmp_path / "inbox").iterdir())) == 2


def test_the_recipe_reads_files_in_place_of_the_hub(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "rows"
    pairs = [
        {"chosen": f"\n\nHuman: {n}\n\nAssistant: a", "rejected": f"\n\nHuman: {n}\n\nAssistant: b"} for n in range(903)
    ]
    files: dict[str, list[dict[str, Any]]] = {
        "hh-rlhf-harmless/train.jsonl": pairs,
        "hh-rlhf-harmless/test.jsonl": pairs[:2],
        "gsm8k/train.jsonl": [{"question": "1 + 1?", "answer": "2"}],
        "bench-prompts/mt_bench.jsonl": [{"turns": ["Write.", "Rewrite."]}],
    }
    model = tmp_path / "model"
    recipe, left_out = recipe_for(model, data, folder)
    assert "preferences" not in recipe["branches"]
    assert left_out == [f"preferences is left out: there is no hh-rlhf-harmless or gsm8k in {data}"]
    for name, rows in files.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe, left_out = recipe_for(model, data, folder)
    assert left_out == []
    read: Any = parse_recipe(recipe)
    preferences = read.recipes["preferences"]
    judge, rewarding = preferences.reward_model.data, preferences.recipes["ppo"].reward_model.data
    contents = [Path(data.sources[0].path).read_text().splitlines() for data in (rewarding, judge)]
    assert [len(content) for content in contents] == [900, 3]
    assert json.loads(contents[1][0]) == pairs[900]
    (prompts,) = preferences.evaluation.prompts.sources
    assert Path(prompts.path).read_text() == '{"prompt": "Write."}\n'
    assert "Anthropic" not in json.dumps(recipe)
