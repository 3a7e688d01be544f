"""The shipped recipes: ours in ``deployments/recipes``, and those of installed distributions.

A recipe's file has the name of its deployment. A distribution brings the YAML files of a package by an entry point of the
group ``alignment.recipes``, as in ``mine = "my_package.recipes"``. Imports no Prefect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from alignment_core.errors import UserError
from alignment_core.plugins import entry_points
from alignment_core.recipes import BaseRecipe, load_recipe
from alignment_core.recipes.methods import method_of

GROUP = "alignment.recipes"
OURS = "alignment"
"""The distribution that is this project."""
FOLDER = Path(__file__).parents[1] / "recipes"
"""Ours; in a checkout a link to ``deployments/recipes``."""
SIZES = ("gpu", "node")
"""Folders of ours for models of 0.5B to 8B: on one GPU, and on a node of eight."""
HEAD = """\
# Made by `align deployments --prefect-yaml > prefect.yaml` from the recipes; a deployment has the name of its recipe's file.
# Every deployment is alignment/<name>. The work pool must exist first:
# prefect work-pool create alignment --type process; prefect work-pool set-concurrency-limit alignment 1
name: alignment
prefect-version: 3.7.7

pull:
  - prefect.deployments.steps.set_working_directory:
      directory: "{{ $PWD }}"

definitions:
  pool: &pool
    name: alignment
    job_variables:
      stream_output: false # a dead worker must not break the flow at its next log line
      env:
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: "30" # the reconciler counts on it (flows/service/reconcile.py)
        PYTHONSAFEPATH: "1" # a folder alignment/ in the working folder must not be taken for ours

deployments:
"""


@dataclass(frozen=True)
class Shipped:
    """A recipe that comes with a distribution."""

    path: Path
    distribution: str

    @property
    def name(self) -> str:
        """Name of the recipe's file and of its deployment."""
        return self.path.stem

    @property
    def function(self) -> str:
        """Its flow in :mod:`alignment.flows.deployment_flows`."""
        return "deployed_" + self.name.replace("-", "_").replace(".", "_")

    @property
    def description(self) -> str:
        """The comment at the head of the file."""
        lines = takewhile(lambda line: line.startswith("#"), self.path.read_text().splitlines())
        return " ".join(line.strip("# ") for line in lines)

    def recipe(self) -> BaseRecipe:
        """The recipe; its relative paths begin at its file. Raises UserError."""
        return load_recipe(self.path, working_folder=self.path.parent)  # not at the folder of the caller

    def cron(self) -> str | None:
        """When it runs by itself, in UTC. Raises UserError, also for a schedule that can only be a mistake."""
        from alignment.flows.schedules import schedule

        method = method_of(self.recipe())
        if method.cron:
            schedule(method.cron, "UTC", f"the schedule of the method {method.name}:")
        return method.cron


def shipped(distribution: str | None = None) -> dict[str, Shipped]:
    """All shipped recipes, or those of one distribution, by name; of two with one name, ours or that of the first distribution.

    Raises UserError if that distribution ships none.
    """
    recipes: dict[str, Shipped] = {}
    for recipe in _files():
        if distribution in (None, recipe.distribution):
            recipes.setdefault(recipe.name, recipe)
    if not recipes:
        known = ", ".join(sorted({recipe.distribution for recipe in _files()}))
        raise UserError(f"no distribution {distribution!r} that ships recipes is installed; there are {known}")
    return recipes


def file_of(recipe: Path) -> Path:
    """The file of a recipe: a path, or the name of a shipped recipe, such as ``quickstart`` or ``gpu/dpo``.

    Raises UserError for an unknown name.
    """
    if recipe.suffix == ".py":
        raise UserError(
            f"{recipe}: a flow of your own, no recipe: `align run` calls it, and `prefect deploy` deploys it"
        )
    is_name = len(recipe.parts) == 1 or (len(recipe.parts) == 2 and recipe.parts[0] in SIZES)
    if recipe.is_file() or not is_name or recipe.suffix in (".yaml", ".yml"):
        return recipe
    known = {**shipped(), **for_large_models()}
    if (name := recipe.as_posix()) in known:
        return known[name].path
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"{recipe}: neither a recipe file nor a recipe that is installed; {hint}")


def for_large_models() -> dict[str, Shipped]:
    """Recipes with published hyperparameters, by name, such as ``gpu/dpo``. They are copied and edited, and not deployed."""
    files = [(size, path) for size in SIZES for path in sorted((FOLDER.resolve() / size).glob("*.yaml"))]
    return {f"{size}/{path.stem}": Shipped(path, OURS) for size, path in files}


def hidden() -> dict[str, str]:
    """Recipes that are not deployed because another one has their name: a sentence by path."""
    known = shipped()
    return {
        str(recipe.path): f"{recipe.distribution} brings a recipe {recipe.name!r}, and so does "
        f"{known[recipe.name].distribution}"
        for recipe in _files()
        if known[recipe.name] != recipe
    }


def _files() -> Iterator[Shipped]:
    for folder, distribution in _folders():
        yield from (Shipped(path, distribution) for path in sorted(folder.glob("*.yaml")))


def _folders() -> Iterator[tuple[Path, str]]:
    yield FOLDER.resolve(), OURS
    for entry in sorted(entry_points(GROUP)):
        try:
            spec = util.find_spec(entry.value)
        except Exception:  # its package does not import; its methods report why
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder), entry.dist.name if entry.dist else entry.name


def pool() -> dict[str, Any]:
    """The work pool of all deployments, with its job variables."""
    pool: dict[str, Any] = yaml.safe_load(HEAD)["definitions"]["pool"]
    return pool


def prefect_yaml(distribution: str = OURS) -> str:
    """The file from which ``prefect deploy --all`` registers the recipes of a distribution. Raises UserError."""
    return HEAD + "".join(_entry(recipe) for recipe in shipped(distribution).values())


def _entry(recipe: Shipped) -> str:
    text = f"  - name: {recipe.name}\n    entrypoint: alignment.flows.deployment_flows.{recipe.function}\n"
    text += "    work_pool: *pool\n"
    if cron := recipe.cron():
        text += f'    schedules:\n      - cron: "{cron}"\n        timezone: UTC\n'
    return text
