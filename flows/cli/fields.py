"""The command ``align fields``: the reference of all recipe fields."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from alignment.flows.console import JsonOption, err, out, print_json


def fields(
    path: Annotated[
        str, typer.Argument(help="A section or field, such as sft.data or rl.loss.epsilon. Default: all.")
    ] = "",
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the complete reference as a Markdown page.")
    ] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Print defaults beside those of TRL and OpenRLHF as a Markdown page.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the fields of recipes with their types, defaults and descriptions."""
    from alignment_core.recipes import methods, peer_defaults, reference

    if defaults:
        return print(peer_defaults.markdown(), end="")
    if as_markdown:
        return print(reference.markdown(), end="")
    for problem in methods.loaded()[1]:
        err.print(f"[yellow]left out:[/] {escape(problem)}")
    config, fields_at = reference.at(path)
    if as_json:
        return print_json({"path": path, "fields": [field.model_dump(exclude_none=False) for field in fields_at]})
    out.print(f"{path or 'every recipe'}: {' '.join((config.__doc__ or '').split())}\n", markup=False)
    for field in fields_at:
        default = "required" if field.default is None else f"default {field.default}"
        out.print(f"[bold]{field.name}[/]", end="")
        out.print(f"  {field.type}, {default}\n    {field.description}", markup=False)
    if not path:
        out.print("\nThe sections of each method, and all below them:\n", markup=False)
        paths = sorted({path for paths in reference.sections().values() for path in paths if path.count(".") < 2})
        out.print(", ".join(paths), markup=False)
    return None
