"""Every page by the rules of axe-core, in light and dark, on wide and narrow screens."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

from tests.browser.conftest import Ui, Watch

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
SCREENS = {"wide": {"width": 1440, "height": 900}, "narrow": {"width": 700, "height": 900}}


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_no_page_violates_a_rule_or_complains_or_asks_elsewhere(
    quickstart: Ui, paths: dict[str, str], watch: Watch, colours: str, screen: str
) -> None:
    known = watch(quickstart, "ada", color_scheme=colours, viewport=SCREENS[screen])
    newcomer = watch(quickstart, "eve", color_scheme=colours, viewport=SCREENS[screen])
    violations: dict[str, Any] = {}
    for watched, path in [*((known, path) for path in paths.values()), (newcomer, paths["label"])]:
        watched.goto(path)
        watched.tab.evaluate(AXE)
        result = watched.tab.evaluate("axe.run()")
        found = [f"{rule['id']}: {node['html'][:120]}" for rule in result["violations"] for node in rule["nodes"]]
        if found:
            violations[path] = found
        wide = watched.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if wide > 0:
            violations.setdefault(path, []).append(f"the page is {wide} pixels wider than the screen")
    assert violations == {}
    assert known.problems + newcomer.problems == []
