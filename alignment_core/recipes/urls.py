"""URLs of servers in recipes: http or https, without a password. ``env:NAME`` stands for the whole URL or for the value of a
parameter of its query, see :mod:`alignment_core.credentials`."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from alignment_core.credentials import is_reference


def _or_one_text(schema: dict[str, Any]) -> None:
    """Allow a text for a list with one item."""
    schema["anyOf"] = [{"type": schema.pop("type"), "items": schema.pop("items")}, {"type": "string"}]


def _as_list(urls: Any) -> Any:
    return (urls,) if isinstance(urls, str) else urls


def _are_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if is_reference(url):
            continue
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        if parts.username or parts.password:
            raise ValueError(
                "a URL in a recipe must not contain a password: write `env:NAME`, the environment variable that holds the URL, "
                "or name that of a token in `token_variable`"
            )
    return urls


Urls = Annotated[
    tuple[str, ...],
    Field(min_length=1, json_schema_extra=_or_one_text),
    BeforeValidator(_as_list),
    AfterValidator(_are_urls),
]
"""URLs of the replicas of a server. In a recipe, a text stands for a list with one URL."""
