"""README and docs name commands, options, fields, files and sections that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main
import yaml

from alignment.flows.cli.main import app
from alignment.flows.shipped_recipes import shipped
from alignment_core.artifacts import open_store
from alignment_core.composition.graph import composing
from alignment_core.errors import UserError
from alignment_core.recipes import peer_defaults, reference
from alignment_core.recipes.methods import method_of
from tests.flows.test_compositions import Composed

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SPOKEN = [page for page in PAGES if page.name != "fields.md"]
RECIPES = [ROOT / "docs" / "recipes.md", *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
TEXT = {page: page.read_text() for page in PAGES}
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`]+)`", re.DOTALL | re.MULTILINE)
OF_A_USER = {"file.py", "train.py", "two_betas.py", "tools.py", "agents.py", "report.md", "report.html"}
"""Files that the docs name as a user's own, or as a run's."""
FILES = [
    file
    for name in ("alignment", "alignment_core", "flows", "tasks", "deployments", "tests", "requirements", "docs")
    for file in (ROOT / name).rglob("*")
    if file.suffix in (".py", ".yaml", ".txt", ".md")
]


def code(page: Path) -> Iterator[str]:
    """Code on a page: each line of a block, and each word or phrase in a sentence."""
    for block, phrase in CODE.findall(TEXT[page]):
        yield from block.splitlines() if block else [" ".join(phrase.split())]


def commands(page: Path) -> Iterator[list[str]]:
    """The words after ``align`` of every command of a page, as far as its comment."""
    for line in code(page):
        for arguments in re.findall(r"(?:^|[\s(/])align (?=[a-z])([^#;|)]*)", line):
            yield arguments.replace("…", " ").split()


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_every_command_and_option_exists(page):
    align = typer.main.get_command(app)
    for words in commands(page):
        command, path, rest = align, "align", [word.strip("\"',") for word in words]
        while (inner := getattr(command, "commands", None)) and rest:
            assert rest[0] in inner, f"{path} {rest[0]}, in {words}"
            command, path = inner[rest[0]], f"{path} {rest.pop(0)}"
        known = {option for parameter in command.params for option in parameter.opts}
        given = {word.split("=")[0] for word in rest if word.startswith("-")}
        assert given <= known, f"{path} has no {given - known}"


@pytest.mark.parametrize(
    ("page", "recipe"), [("recipes/nights.md", "nightly"), ("operations.md", "quickstart")], ids=lambda name: name
)
def test_every_stage_that_is_shown_exists(page, recipe, tmp_path, monkeypatch):
    """The Hub is not asked: its commits are made up."""
    for user in ("data.hub", "data.origins.path"):
        monkeypatch.setattr(f"alignment_core.{user}.commit_of", lambda *_: "c")
    composed = Composed(open_store(tmp_path / "store"))
    with composing(composed):
        content = shipped()[recipe].recipe()
        method_of(content).compose(content)
    stages = [words[words.index("--stage") + 1] for words in commands(ROOT / "docs" / page) if "--stage" in words]
    assert stages
    assert set(stages) <= composed.inputs.keys()


def is_field(path: str) -> bool:
    with suppress(UserError):
        return bool(reference.at(path))
    return False


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_every_field_exists(page):
    """Written from the top of a recipe, or from one of the sections that several methods have."""
    sections = ("sft", "dpo", "iterative_dpo", "rejection_sampling", "rl")
    for text in code(page):
        for path in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_0-9]+)+(?![\w./:-])", text):
            if path.endswith((".yaml", ".jsonl", ".sig")):
                continue
            prefixes = [f"{section}." for section in sections if is_field(f"{section}.{path.partition('.')[0]}")]
            if is_field(path.partition(".")[0]):
                prefixes.append("")
            assert not prefixes or any(is_field(prefix + path) for prefix in prefixes), path


def paths_of(value: object, path: str = "") -> Iterator[str]:
    """Every field of a piece of a recipe; the keys in `options`, `columns` and `verdicts` are the user's."""
    if isinstance(value, list):
        for item in value:
            yield from paths_of(item, path)
    elif isinstance(value, dict) and not path.endswith((".options", ".columns", ".verdicts")):
        for name, item in value.items():
            yield f"{path}.{name}"
            yield from paths_of(item, f"{path}.{name}")


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.name)
def test_every_piece_of_a_recipe_has_fields_that_exist(page):
    """And every page has an example: a piece of a recipe, or a command."""
    blocks = re.findall(r"^```(yaml|sh)\n(.*?)^```", TEXT[page], re.DOTALL | re.MULTILINE)
    assert blocks
    pieces = [yaml.safe_load(block) for language, block in blocks if language == "yaml"]
    for piece in pieces:
        if "trigger" in piece:  # an automation of Prefect
            continue
        wrong = [
            [path for path in paths_of(piece) if not is_field(above + path.lstrip("."))]
            for above in ("", "rl.", "sft.")
        ]
        assert [] in wrong, min(wrong, key=len)


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_every_target_of_make_and_every_option_of_a_measurement_exists(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in code(page):
        assert set(re.findall(r"^make ([\w-]+)", text)) <= set(targets), text
        for name, part, options in re.findall(r"python -m tests\.(\w+)(?: (\w+))?(.*)", text):
            modules = [ROOT / "tests" / name / f"{module}.py" for module in ("__main__", part) if module]
            assert all(module.exists() for module in modules), text
            entries = "".join(module.read_text() for module in modules)
            assert all(f'"{option}"' in entries for option in re.findall(r"--[a-z-]+", options)), text


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_every_file_and_module_exists(page):
    for text in code(page):
        for name in re.findall(r"(?<![\w/.-])[\w/-]+\.(?:py|txt)(?=$|[\s:,)])", text):
            shown = f"**`{name}`**" in TEXT[page]  # with its text
            assert shown or name in OF_A_USER or any(str(file).endswith(f"/{name}") for file in FILES), name
        for name in re.findall(r"(?<![\w.])(?:alignment_core|flows|tasks)(?:\.\w+)+|(?<=python -m )tests\.\w+", text):
            assert find_spec(name) is not None, name


def test_the_page_of_defaults_is_up_to_date():
    written = (ROOT / "docs" / "defaults.md").read_text()
    assert written == peer_defaults.markdown(), "run: align fields --defaults > docs/defaults.md"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", TEXT[page], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```", "", TEXT[page], flags=re.DOTALL | re.MULTILINE)):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def test_the_tour_names_every_part_of_the_library():
    tour = TEXT[ROOT / "docs" / "design.md"].split("```")[1]
    folders = {
        folder.parent.name for place in ("alignment_core", "flows") for folder in (ROOT / place).glob("*/__init__.py")
    }
    named = set(re.findall(r"^  (\w+)/ ", tour, re.MULTILINE))
    assert named == folders
