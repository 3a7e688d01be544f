"""The flow of docs/flows.md, run from its file: cached, resumed, promoted and traced as a recipe is."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import alignment
from alignment.flows.cli.custom_flow import checked, load_flow, parameters_of
from alignment.flows.cli.run import NOT_PROMOTED, _print_outcomes
from alignment.flows.outcome import Outcome
from alignment.flows.shipped_recipes import file_of
from alignment_core.errors import UserError
from alignment_core.public import MODULE_OF
from tests.align import Align, run_align, states
from tests.pages import DOCS, files_of
from tests.processes import processes_of, wait_until

FILES = files_of(DOCS / "flows.md")
SMALL = ("--set", "settings.resources={trainers: 1, engines: 1, threads: 1}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two_betas.py"
    path.write_text(FILES["two_betas.py"])
    return path


def test_every_name_of_the_facade_is_there_and_known_to_type_checkers() -> None:
    assert all(getattr(alignment, name) is not None for name in MODULE_OF)
    stub = Path(str(alignment.__file__)).with_suffix(".pyi").read_text()
    listed = re.findall(r"^from ([\w.]+) import (\w+) as \2$", stub, re.MULTILINE)
    assert {(name, module) for module, name in listed} == set(MODULE_OF.items())
    assert set(dir(alignment)) >= set(MODULE_OF)
    for module, name in listed:
        assert getattr(alignment, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="has no attribute 'spt'"):
        alignment.spt  # type: ignore[attr-defined]  # noqa: B018


def test_the_facade_imports_nothing_until_a_name_is_used() -> None:
    code = "import sys, alignment; print([name for name in ('prefect', 'torch', 'pydantic') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_flow_has_25_lines() -> None:
    text = FILES["two_betas.py"].partition("@flow\n")[2]
    assert len(text.splitlines()) <= 25


def test_parameters_are_set_as_fields_of_recipes_are(file: Path) -> None:
    own = load_flow(f"{file}:two_betas")
    checked_run = checked(
        own, parameters_of(own, ("settings.seed=3", "betas=[1]", "settings.evaluation.generation.temperature=0.5"))
    )
    assert (checked_run["settings"].seed, checked_run["betas"]) == (3, (1.0,))
    assert checked_run["settings"].evaluation.generation.temperature == 0.5
    assert checked_run["settings"].promotion.gates[0].metric == "accuracy"
    with pytest.raises(UserError, match=r"--set beta: the flow has no such parameter; it has settings, betas"):
        parameters_of(own, ("beta=1",))
    with pytest.raises(UserError, match=r"the parameters of the flow 'two-betas': .*give them with --set name=value"):
        checked(own, parameters_of(own, ("betas=many",)))


def test_a_missing_or_broken_flow_is_refused_in_a_sentence(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.py: no such file"):
        load_flow(str(tmp_path / "gone.py"))
    with pytest.raises(UserError, match=r"it has no flow 'three'; there are .*two_betas\.py:two_betas"):
        load_flow(f"{file}:three")
    file.write_text("import no_such_module\n")
    with pytest.raises(UserError, match="does not load: ModuleNotFoundError: No module named 'no_such_module'"):
        load_flow(str(file))
    file.write_text("from prefect import flow\n@flow\ndef one(): ...\n@flow\ndef two(): ...\n")
    with pytest.raises(UserError, match=r"name the flow, as in .*two_betas\.py:NAME; there are .*:one, .*:two"):
        load_flow(str(file))


def test_a_flow_is_not_taken_for_a_recipe(file: Path) -> None:
    with pytest.raises(UserError, match="a flow of your own, no recipe: `align run` calls it"):
        file_of(file)


def test_every_outcome_of_a_flow_with_several_runs_is_printed_before_the_exit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = Outcome(status="completed", run_id="1", store="s", promotion={"state": "refused"}).model_dump(mode="json")
    other = Outcome(status="completed", run_id="2", store="s").model_dump(mode="json")
    with pytest.raises(typer.Exit) as ended:
        _print_outcomes([refused, other], True)
    assert ended.value.exit_code == NOT_PROMOTED
    assert [json.loads(line)["run_id"] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]


def test_a_run_is_opened_inside_a_flow() -> None:
    with pytest.raises(UserError, match="call it inside a function that is a Prefect flow"), alignment.run(settings()):
        pass


def settings(**more: Any) -> Any:
    return alignment.Settings(name="own", model={"scratch": {"hidden_size": 16, "num_attention_heads": 2}}, **more)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "two_betas.py").write_text(FILES["two_betas.py"])
    return folder


@pytest.fixture(scope="module")
def first(home: Path, prefect_api: dict[str, str]) -> dict[str, Any]:
    """The outcome of a run that was killed while it trained, and resumed from another folder."""
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", "two_betas.py", *SMALL, "--json"]
    environment = {**os.environ, **prefect_api, "ALIGN_HOME": str(home)}
    run = subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE)
    assert wait_until(lambda: bool(tags(home)) or run.poll() is not None, 300)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert wait_until(lambda: not processes_of(home), 60)
    return run_align(home, "resume", "last", **prefect_api)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_a_killed_custom_flow_resumes_without_repeating_finished_stages(home: Path, first: dict[str, Any]) -> None:
    assert states(first)["model"] == "cached"
    assert first["status"] == "completed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_custom_flow_branches_evaluates_and_promotes_the_better_policy(first: dict[str, Any]) -> None:
    done = states(first)
    assert [label for label in done if label.endswith("dpo")] == ["beta-0.05/dpo", "beta-0.5/dpo"]
    assert sum(label == "sft" for label in done) == 1
    policies = first["metrics"]["policies"]
    best = max(("beta-0.05", "beta-0.5"), key=lambda name: policies[name]["accuracy"])
    outputs = {stage["label"]: stage["outputs"] for stage in first["stages"]}
    assert first["promotion"]["state"] == "promoted"
    assert first["promotion"]["policy"] in outputs[f"{best}/dpo"].values()
    assert Path(first["report"]).is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_stage_with_an_unknown_stage_is_refused(align: Align, home: Path, first: dict[str, Any]) -> None:
    refused = align(home, "run", str(home / "two_betas.py"), "--from-stage", "dpo2", expect=2)
    assert "--from-stage dpo2: this recipe has no such stage" in refused["error"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_promoted_policy_has_its_lineage(align: Align, home: Path, first: dict[str, Any]) -> None:
    shown = json.dumps(align(home, "lineage", "policy/production"))
    assert all(stage in shown for stage in ("sft", "dataset", "base_model"))


def tags(home: Path) -> list[Path]:
    """Records of finished stages in the store of a home."""
    return [*home.glob("store/stages/**/*.json"), *home.glob("store/records/**/*.json")]
