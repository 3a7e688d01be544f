"""The form of a ``prompt_template``: ``{prompt}`` and columns of the row in braces."""

from __future__ import annotations

from string import Formatter

PROMPT = "prompt"
"""The name of the user's text in a template."""


def checked(template: str) -> str:
    """The template. Raises ValueError if no row can fill it."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"`prompt_template` is not well formed: {error}; write {{{{ and }}}} for braces") from None
    names = [name for _, name, _, _ in parts if name is not None]
    if PROMPT not in names:
        raise ValueError("`prompt_template` has no {prompt}, so the prompts would all be alike")
    for _, name, spec, conversion in parts:
        if name is not None and (not name or conversion or "[" in name or "{" in (spec or "")):
            raise ValueError(
                f"`prompt_template`: {{{name}}} is not the name of a column, with `:` and a format at most"
            )
    return template
