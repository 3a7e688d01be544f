"""Figures as SVG, with the same bytes for the same numbers. No display is needed."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from alignment_core.home import align_home
from alignment_core.imports import uncollected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTINGS: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "alignment",
    "text.parse_math": False,
}
P = ParamSpec("P")


def as_svg(draw: Callable[P, Figure | None]) -> Callable[P, str | None]:
    """A function that draws a figure → one that returns the text of its SVG element, or None without a figure.

    Matplotlib is imported at the first call, and keeps its cache below ALIGN_HOME.
    """

    @functools.wraps(draw)
    def drawn(*arguments: P.args, **named: P.kwargs) -> str | None:
        os.environ.setdefault("MPLCONFIGDIR", str(align_home() / "cache" / "matplotlib"))
        with uncollected():
            import matplotlib
            from matplotlib.backends.backend_svg import FigureCanvasSVG

        with matplotlib.rc_context(SETTINGS):
            figure = draw(*arguments, **named)
            if figure is None:
                return None
            text = io.StringIO()
            FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
        return text.getvalue()[text.getvalue().index("<svg") :]

    return drawn


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
