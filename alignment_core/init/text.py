"""The text of a recipe: YAML with comments beside values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

WIDTH = 120


@dataclass(frozen=True)
class Commented:
    """A value, and the comment beside it."""

    value: Any
    comment: str


def plain(content: Any) -> Any:
    """The content without comments."""
    if isinstance(content, Commented):
        return plain(content.value)
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list) else content


def written(content: dict[str, Any], head: str) -> str:
    """The YAML text of a recipe, which begins with ``head`` as a comment."""
    lines = [f"# {line}" for line in textwrap.wrap(head, WIDTH - 2)]
    for name, value in content.items():
        section = list(_field(name, value, ""))
        lines += ["", *section] if len(section) > 1 else section
    return "\n".join(lines) + "\n"


def _field(name: str, value: Any, indent: str) -> Iterator[str]:
    value, comment = _split(value)
    if isinstance(value, dict) and value:
        yield f"{indent}{name}:{comment}"
        for inner, item in value.items():
            yield from _field(inner, item, f"{indent}  ")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in plain(value)):
        yield f"{indent}{name}:{comment}"
        for item in value:
            yield f"{indent}  - {_flow(item)}{_split(item)[1]}"
    else:
        yield f"{indent}{name}: {_flow(value)}{comment}"


def _split(value: Any) -> tuple[Any, str]:
    return (value.value, f"  # {value.comment}") if isinstance(value, Commented) else (value, "")


def _flow(value: Any) -> str:
    """The value on one line."""
    text: str = yaml.safe_dump(
        plain(value), default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.strip().removesuffix("...").strip()
