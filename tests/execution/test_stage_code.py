"""The code of stages: what of it counts for a key, and what it loads and costs until a stage runs."""

from __future__ import annotations

import pkgutil
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import alignment_core.stages
from alignment_core.execution.base import Stage, load_stage
from alignment_core.execution.key import code_digest, stage_key
from alignment_core.source_code import package_source, reachable
from tests.stages.calls import ROOT, call, python

HEAVY = ["torch", "vllm", "ray", "deepspeed"]
HELPERS = {"best", "stopping"}
MODULES = sorted(module.name for module in pkgutil.iter_modules(alignment_core.stages.__path__))


def reached(stage: str) -> set[str]:
    return {
        str(path.relative_to(ROOT)) for path, _ in reachable(f"alignment_core.stages.{stage}", package_source).values()
    }


@pytest.mark.parametrize(
    ("stage", "files"),
    [
        ("sft", {"training/methods/sft.py", "training/trainer.py", "losses/logprobs.py", "canonical.py"}),
        ("dpo", {"training/methods/dpo.py", "training/methods/pairs.py", "losses/preference.py"}),
        ("generate", {"inference/weights.py", "inference/engine.py", "rollout/records.py", "models/saving.py"}),
        (
            "score",
            {"rewards/verify.py", "user_code/process.py"},
        ),
        ("rl", {"rewards/sources.py", "rewards/judges.py"}),
        ("dataset", {"data/build.py", "data/formats.py", "data/template.py"}),
        ("select_pairs", {"rollout/selection.py"}),
        ("evaluate", {"evaluation/statistics.py"}),
    ],
)
def test_the_code_of_a_stage_follows_imports_inside_functions_and_names_in_strings(stage, files):
    assert {f"alignment_core/{name}" for name in files} <= reached(stage)


def test_a_stage_does_not_depend_on_flows_or_on_other_stages():
    for stage in set(MODULES) - HELPERS:
        files = reached(stage)
        assert all(name.startswith("alignment_core/") for name in files)
        assert {name for name in files if name.startswith("alignment_core/host/")} == set()
    assert not {"alignment_core/training/methods/dpo.py", "alignment_core/stages/dpo.py"} & reached("sft")


def test_an_edit_of_a_reachable_module_changes_the_code_digest_and_of_another_does_not(tmp_path):
    """On a copy of the package, in fresh interpreters."""
    shutil.copytree(ROOT / "alignment_core", tmp_path / "alignment_core", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        f"import json, sys; sys.path.insert(0, {str(tmp_path)!r}); from alignment_core.execution import key\n"
        f"assert key.__file__.startswith({str(tmp_path)!r})\n"
        "print(json.dumps([key.code_digest(f'alignment_core.stages.{name}') for name in ('sft', 'dpo')]))"
    )
    before = python(code)
    assert before == [code_digest(f"alignment_core.stages.{name}") for name in ("sft", "dpo")]
    module = tmp_path / "alignment_core" / "training" / "methods" / "dpo.py"
    module.write_text(f'"""Another docstring."""\n\n\n# a comment\n{module.read_text().partition(chr(10))[2]}')
    assert python(code) == before
    with module.open("a") as file:
        file.write("EDITED = True\n")
    sft, dpo = python(code)
    assert sft == before[0]
    assert dpo != before[1]


def test_many_threads_may_ask_for_keys_while_garbage_is_collected():
    # Finalisers that run in the middle of a parse let another thread into Python 3.11's parser, which then fails.
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)

    def ask(_: int) -> str:
        for _ in range(2):
            code_digest.cache_clear()
            package_source.cache_clear()
            for _ in range(20):
                Garbage()
            key = stage_key(call())
        return key

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {stage_key(call())}


def test_a_source_that_changes_during_a_run_makes_no_results(tmp_path):
    """On a copy of the package: nobody could say which version of a module made them."""
    shutil.copytree(ROOT / "alignment_core", tmp_path / "alignment_core", ignore=shutil.ignore_patterns("__pycache__"))
    losses = tmp_path / "alignment_core" / "losses" / "preference.py"
    code = (
        f"import json, pathlib, sys; sys.path.insert(0, {str(tmp_path)!r}); from alignment_core.execution import key\n"
        "key.check_source()\n"
        f"with pathlib.Path({str(losses)!r}).open('a') as file: file.write('# edited')\n"
        "try: key.check_source()\n"
        "except Exception as error: print(json.dumps([type(error).__name__, str(error)]))"
    )
    kind, message = python(code)
    assert kind == "EnvironmentFault"
    assert "alignment_core/losses/preference.py changed since this run started" in message


# ---------------------------------------------------------------- what stages load


@pytest.mark.parametrize("name", sorted(set(MODULES) - HELPERS))
def test_every_stage_module_defines_its_stage_by_its_own_name(name):
    stage = load_stage(name)
    assert isinstance(stage, Stage)
    assert stage.name == name


def test_stages_and_their_keys_need_no_machine_learning_package():
    stages = sorted(set(MODULES) - HELPERS)
    loaded = python(
        "import importlib, json, sys\nfrom alignment_core.execution.key import code_digest\n"
        f"for name in {MODULES}: importlib.import_module(f'alignment_core.stages.{{name}}')\n"
        f"for name in {stages}: code_digest(f'alignment_core.stages.{{name}}')\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    assert loaded == []


@pytest.mark.parametrize("module", ["flows", "flows.cli.main"])
def test_the_flows_package_and_the_command_start_within_a_second_and_a_half(module):
    code = (
        f"import time; t = time.perf_counter(); import json, sys, {module}; t = time.perf_counter() - t\n"
        f"print(json.dumps([t, [name for name in {HEAVY} if name in sys.modules]]))"
    )
    seconds, loaded = zip(*(python(code) for _ in range(3)), strict=True)
    assert loaded == ([], [], [])
    assert min(seconds) <= 1.5


def test_a_run_of_the_command_loads_neither_the_forms_of_deployments_nor_pandas():
    loaded = python(
        "import json, sys\nfrom alignment_core.imports import hidden\n"
        "with hidden('pandas'): import flows.cli.main, flows.any_recipe\n"
        "print(json.dumps([name for name in ('pandas', 'flows.alignment', 'torch') if name in sys.modules]))\n"
        "import pandas"  # hidden no more
    )
    assert loaded == []
