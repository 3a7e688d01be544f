"""The whole graph through the command line, with the real components, on a small cut of the quickstart."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.align import Align, align_here, references, run_align, states

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "quickstart.yaml"
SMALL = [
    "sft.training.max_steps=30",
    "reward_model.training.max_steps=20",
    "iterative_dpo.prompts_per_round=64",
    "iterative_dpo.training.max_steps=4",
    "iterative_dpo.selection.min_margin=0",
    "iterative_dpo.selection.truncated=keep",
    *(f"sft.data.sources.{i}.rows=300" for i in range(3)),
    *(f"reward_model.data.sources.{i}.rows=300" for i in range(3)),
    *(f"iterative_dpo.prompts.sources.{i}.rows=80" for i in range(3)),
    *(f"evaluation.prompts.sources.{i}.rows=16" for i in range(3)),
    "reward_model.data.test_rows=60",
    "promotion.gates=[{metric: accuracy, min: 0.99}]",
    "resources.trainers=1",  # so little does not pay for the start of a second one
    "resources.engines=1",
]


def run_small(align: Align, home: Path, *overrides: str) -> dict[str, Any]:
    """Its gate refuses, which is exit code 4."""
    changes = (part for override in [*SMALL, *overrides] for part in ("--set", override))
    return align(home, "run", str(RECIPE), *changes, expect=4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A folder for temporary files; its path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def first(migrated: Path, home: Path, temporary: Path) -> dict[str, Any]:
    """A run with its own server, whose database already has its tables."""
    (home / "prefect").mkdir()
    shutil.copyfile(migrated, home / "prefect" / "prefect.db")
    return run_small(partial(run_align, TMPDIR=str(temporary)), home)


@pytest.mark.slow
def test_a_run_makes_policy_reward_model_and_report(first: dict[str, Any], home: Path, temporary: Path) -> None:
    assert first["status"] == "completed"
    assert set(first["outputs"]) == {"policy", "reward_model", "report"}
    assert set(states(first).values()) == {"run"}
    assert list(first["metrics"]["policies"]) == ["sft", "round-1", "round-2"]
    for policy in ("round-1", "round-2"):
        measured = first["metrics"]["policies"][policy]
        assert {"accuracy", "reward", "win_rate", "win_rate.low", "win_rate.high", "kl"} <= set(measured)
    assert "reward model, held-out accuracy" in first["metrics"]
    assert [*(home / "tmp").iterdir(), *temporary.iterdir()] == [], "the run left files behind"


@pytest.mark.slow
def test_an_unmet_gate_refuses_with_the_missing_amount(align: Align, first: dict[str, Any], home: Path) -> None:
    assert first["promotion"]["state"] == "refused"
    assert "below the minimum of 0.99" in first["promotion"]["reasons"][0]
    assert align(home, "tags", "ls") == {"tags": {}}


@pytest.mark.slow
def test_the_plan_of_a_run_that_is_over_is_that_all_is_cached(align: Align, first: dict[str, Any], home: Path) -> None:
    changes = [part for override in SMALL for part in ("--set", override)]
    planned = align(home, "check", str(RECIPE), *changes)
    assert {stage["stage"]: stage["state"] for stage in planned["stages"]} == dict.fromkeys(states(first), "cached")
    assert planned["data"] == [], "cached stages are not checked"
    planned = align(home, "check", str(RECIPE), *changes, "--set", "iterative_dpo.loss.beta=0.3")
    changed = {stage["stage"]: stage for stage in planned["stages"] if stage["state"] != "cached"}
    assert changed["round-1/dpo"]["state"] == "runs"
    assert "round-1/reference-logps" not in changed, "another β needs no other numbers"
    assert changed["round-2/generate"]["waits_for"] == ["round-1/dpo"]
    assert "evaluation/prompts" not in changed


@pytest.mark.slow
def test_after_a_weight_update_the_engine_agreed_with_the_model(first: dict[str, Any]) -> None:
    updated = [s["metrics"]["parity"] for s in first["stages"] if "parity" in s["metrics"]]
    assert len(updated) == 1, "the one engine was checked after its first new weights, and not again"
    assert max(updated) <= 1e-4


@pytest.mark.slow
def test_lineage_leads_from_the_policy_to_its_sources_and_back(align: Align, first: dict[str, Any], home: Path) -> None:
    up = json.dumps(align(home, "lineage", first["outputs"]["policy"]))
    for label in ("round-2/dpo", "round-1/select", "sft", "model", "rounds/prompts"):
        assert f'"{label}"' in up
    assert '"path": "task:reverse/train"' in up
    assert '"training.max_steps": 30' in up
    base = references(first)["model"]
    assert first["outputs"]["policy"] in json.dumps(align(home, "lineage", base, "--down"))


@pytest.mark.slow
def test_the_same_recipe_again_is_all_cached_without_prefects_database(first: dict[str, Any], home: Path) -> None:
    shutil.rmtree(home / "prefect")
    again = run_small(run_align, home)
    assert set(states(again).values()) == {"cached"}
    assert references(again) == references(first)
    assert not (home / "logs" / f"{again['run_id']}.log").exists(), "a host has written it, which starts Ray"


@pytest.mark.slow
def test_the_policy_loads_in_transformers(align: Align, first: dict[str, Any], home: Path) -> None:
    import transformers

    path = align(home, "artifacts", "show", first["outputs"]["policy"])["path"]
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "first: 4821\n"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]
    judge_path = align(home, "artifacts", "show", first["outputs"]["reward_model"])["path"]
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(judge_path)
    assert judge.config.num_labels == 1


@pytest.mark.slow
def test_a_changed_field_reruns_exactly_the_stages_below_it(align: Align, first: dict[str, Any], home: Path) -> None:
    changed = run_small(align, home, "iterative_dpo.loss.beta=0.2")
    ran = {label for label, state in states(changed).items() if state == "run"}
    assert ran == {
        "round-1/dpo",
        "round-1/evaluation/generate",
        "round-1/evaluation/score",
        "round-1/evaluation",
        "round-2/generate",
        "round-2/score",
        "round-2/select",
        "round-2/reference-logps",
        "round-2/dpo",
        "round-2/evaluation/generate",
        "round-2/evaluation/score",
        "round-2/evaluation",
        "report",
    }
    reason = next(stage["reason"] for stage in changed["stages"] if stage["label"] == "round-1/dpo")
    assert reason == "changed since round-1/dpo: iterative_dpo.loss.beta: 0.1 → 0.2"
    explained = {stage["label"]: stage for stage in align(home, "explain", changed["run_id"])["stages"]}
    assert explained["round-1/dpo"]["changed"] == ["iterative_dpo.loss.beta: 0.1 → 0.2"]


BESIDE = (
    "align artifacts show policy/production",
    "align artifacts verify",
    "align lineage policy/production --down",
    "align tags history policy/production",
)
"""Commands that other pages show for other runs."""


@pytest.mark.slow
def test_commands_of_the_readme_and_of_operations_work_after_a_run(
    align: Align, first: dict[str, Any], home: Path
) -> None:
    policy = first["outputs"]["policy"]
    assert align(home, "promote", policy, "--if-current", "none")["state"] == "promoted"
    pages = "\n".join((ROOT / page).read_text() for page in ("README.md", "docs/operations.md"))
    lines = re.findall(r"^align (?:artifacts|lineage|tags|samples).*$", pages, re.M)
    shown = [line.partition("#")[0].strip() for line in lines]
    commands = dict.fromkeys([*(command for command in shown if "--delete" not in command), *BESIDE])
    assert len(commands) >= 10
    for command in commands:
        done = align_here(home, *shlex.split(command)[1:])
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), f"{command} printed nothing"
