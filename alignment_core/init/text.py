"""The text of a recipe: YAML with a comment beside the fields that users change first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

WIDTH = 120


@dataclass(frozen=True)
class Said:
    """A value, and what to say of it."""

    value: Any
    comment: str


def plain(content: Any) -> Any:
    """The values alone."""
    if isinstance(content, Said):
        return plain(content.value)
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list) else content


def written(content: dict[str, Any], head: str) -> str:
    """A recipe of these sections, with ``head`` as the comment at its beginning."""
    lines = [f"# {line}" for line in textwrap.wrap(head, WIDTH - 2)]
    for name, value in content.items():
        found = list(_field(name, value, ""))
        lines += ["", *found] if len(found) > 1 else found
    return "\n".join(lines) + "\n"


def _field(name: str, value: Any, indent: str) -> Iterator[str]:
    comment = f"  # {value.comment}" if isinstance(value, Said) else ""
    value = value.value if isinstance(value, Said) else value
    if isinstance(value, dict) and value and (indent == "" or _has_comments(value) or len(_flow(value)) > WIDTH - 20):
        yield f"{indent}{name}:{comment}"
        for inner, one in value.items():
            yield from _field(inner, one, f"{indent}  ")
    elif isinstance(value, list) and any(isinstance(one, dict) for one in map(plain, value)):
        yield f"{indent}{name}:{comment}"
        for one in value:
            said = f"  # {one.comment}" if isinstance(one, Said) else ""
            yield f"{indent}  - {_flow(plain(one))}{said}"
    else:
        yield f"{indent}{name}: {_flow(plain(value))}{comment}"


def _has_comments(value: Any) -> bool:
    if isinstance(value, Said):
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_comments, inner))


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(
        plain(value), default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.strip().removesuffix("...").strip()
