"""Templates of the pages: text of models, data and other users is only ever shown, never run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from alignment_core.artifacts import Reference
from alignment_core.data.messages import in_words
from alignment_core.host.progress_log import duration, number
from alignment_core.printable import printable

FOLDER = Path(__file__).parent
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{what}-src 'self'" for what in ("script", "style", "img", "connect")),
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
"""The pages load nothing but their own files, run no script in them, and lie in no other page's frame."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LONGEST_TEXT = 4000
"""Characters of a text that a page shows; a completion may be a megabyte on one line."""
LONGEST_WHOLE = 40_000
"""Characters of a completion that is judged as a whole."""


def page(request: Request, name: str, http_status: int = 200, **values: Any) -> HTMLResponse:
    """A page from a template."""
    began: float = request.scope.get("began", time.perf_counter())
    text = TEMPLATES.get_template(name).render(request=request, **values)
    took = {"Server-Timing": f"page;dur={1000 * (time.perf_counter() - began):.1f}"}
    return HTMLResponse(text, http_status, {**HEADERS, **took})


def start_of(request: Request) -> int:
    """The number of the first entry of a list that the address asks for; the first one, if it asks for nothing sensible."""
    text = request.query_params.get("from", "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def moment(text: str) -> str:
    """Minute of a time in ISO 8601: ``2026-11-25 13:15``."""
    return text[:16].replace("T", " ")


def count(value: float) -> str:
    """A number of things with thin spaces between thousands; others as metrics."""
    return f"{value:,}".replace(",", "\u2009") if isinstance(value, int) else number(value)


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """The beginning of a text that is too long to be shown."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]} … ({count(len(text) - longest)} characters more)"


def whole_text(text: str) -> Markup:
    """A completion that somebody judges: as long as a page can be."""
    return escape(shortened(printable(text), LONGEST_WHOLE))


def prompt_text(row: Mapping[str, Any]) -> str:
    """The prompt of a pair: its messages in words, with the tools."""
    try:
        return in_words(row["prompt"], row.get("tools"))
    except (TypeError, KeyError):  # parts of messages that are no text
        return json.dumps(row["prompt"], ensure_ascii=False)


def size(value: int) -> str:
    """Bytes in a unit of three digits."""
    amount, units = float(value), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while amount >= 1000 and unit != "TB":
        amount, unit = amount / 1000, next(units)
    return f"{value} B" if unit == "B" else f"{amount:.3g} {unit}"


def _safe(value: Any) -> Any:
    """Text without control characters and marks of writing direction; templates escape it afterwards."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Reference):
        return str(value)
    return shortened(printable(value)) if isinstance(value, str) else value


TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    finalize=_safe,
)
TEMPLATES.filters |= {
    "moment": moment,
    "count": count,
    "number": number,
    "duration": duration,
    "shortened": shortened,
    "size": size,
    "whole_text": whole_text,
    "prompt_text": prompt_text,
}
