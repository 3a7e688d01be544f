"""The house: which rooms there are, in which order, and that no import goes up or round in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    ("alignment",),
    ("alignment.flows.cli",),
    ("alignment.flows.service", "alignment.flows.ui"),
    ("alignment.flows",),
    ("alignment.tasks",),
    ("nights",),
    ("methods",),
    ("init", "capacity"),
    ("reporting", "checks", "doctor"),
    ("attestation",),
    ("lineage",),
    ("tracking", "host"),
    ("composition",),
    ("stages",),
    ("execution",),
    ("rewards", "environments", "rollout"),
    ("inference", "training"),
    ("migrate",),
    ("evaluation", "user_code", "data", "models", "losses", "cluster"),
    ("recipes",),
    ("artifacts",),
    ("",),
)
"""From top to bottom. A module may import from its own room, from rooms beside it, and from those below; the last
are the modules of ``alignment_core`` itself."""


def sources() -> dict[str, Path]:
    paths = {"alignment": ROOT / "alignment" / "__init__.py"}
    for top in ("alignment_core", "flows", "tasks"):
        for path in (ROOT / top).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name if top == "alignment_core" else f"alignment.{name}"
            paths[name.removesuffix(".__init__")] = path
    return paths


SOURCES = sources()


def imports(module: str) -> Iterator[str]:
    """Modules of ours that a module imports, wherever in it, for type checking alone included."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively within {package}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in SOURCES or node.module in SOURCES:
                    yield inner if inner in SOURCES else str(node.module)


PLUG_INS = {
    "alignment_core.execution.base": {"alignment_core.stages"},
    "alignment_core.methods.nightly": {"alignment.flows.nightly"},
    "alignment_core.recipes.methods": {"alignment_core.methods"},
    "alignment_core.recipes.row_plugins": {"alignment_core.data.kinds", "alignment_core.data.origins"},
    "alignment_core.recipes.sections.rewards": {
        "alignment_core.rewards.base",
        "alignment_core.rewards.kinds",
        "alignment_core.rewards.named",
        "alignment_core.rewards.verifiers",
    },
}
"""Modules that name modules of rooms above them in strings, and which: packages of plug-ins, which are found by name, and the
flow that runs a nightly recipe, which imports Prefect."""
LISTS_MODULES = "alignment_core.source_code"
"""Lists modules by their effect on a stage's key, and imports none of them."""


def named(module: str) -> Iterator[str]:
    """Modules of ours that a module names in strings: for `import_module`, groups of plug-ins (`a.b:c`), actors, commands."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("alignment"):
            target = node.value.partition(":")[0]
            if target in SOURCES and "." in target:
                yield target


IMPORTS = {module: sorted(set(imports(module)) - {module}) for module in SOURCES}


def room_of(module: str) -> str:
    """The room that a module is in: the longest one that has its name."""
    name = module.removeprefix("alignment_core").removeprefix(".")
    rooms = [room for level in ORDER for room in level if name == room or name.startswith(f"{room}.") or not room]
    return max(rooms, key=len)


LEVEL = {room: number for number, level in enumerate(ORDER) for room in level}


def test_every_package_is_in_a_room():
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py" and name != "alignment_core"}
    assert {name for name in packages if not room_of(name)} == set()
    assert {room for level in ORDER for room in level if room} <= {room_of(name) for name in packages}


def test_no_module_imports_from_a_higher_room():
    up = [
        f"{module} → {other}"
        for module, others in IMPORTS.items()
        for other in others
        if LEVEL[room_of(other)] < LEVEL[room_of(module)]
    ]
    assert up == []


def test_strings_name_no_modules_of_higher_rooms_except_plug_ins() -> None:
    above = {
        module: others
        for module in SOURCES.keys() - {LISTS_MODULES}
        if (others := {other for other in named(module) if LEVEL[room_of(other)] < LEVEL[room_of(module)]})
    }
    assert above == PLUG_INS


@pytest.mark.parametrize("packages", [False, True], ids=["modules", "rooms"])
def test_there_are_no_circular_imports(packages: bool):
    graph: dict[str, set[str]] = {}
    for module, others in IMPORTS.items():
        for other in others:
            source, target = (room_of(module), room_of(other)) if packages else (module, other)
            if source != target:
                graph.setdefault(source, set()).add(target)
    assert [" → ".join(circle) for circle in circles(graph)] == []


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """A circle through each node that is in one."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> Iterator[list[str]]:
        if node in path:
            yield [*path[path.index(node) :], node]
            return
        if node in done:
            return
        for other in sorted(graph.get(node, ())):
            yield from walk(other, [*path, node])
        done.add(node)

    for start in sorted(graph):
        yield from walk(start, [])
