"""``python -m tests.browser.screens HOME``: the pictures of docs/browsing.md, of a home with a run of the quickstart."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from alignment_core import journal
from alignment_core.artifacts import open_store
from alignment_core.nights.labelling import make_pairs
from tests.browser.conftest import CHROMIUM, start

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SIZE = {"width": 1280, "height": 860}


def main(home: Path) -> None:
    """Write a picture of each page. ``home`` is that of the run."""
    os.environ["ALIGN_HOME"] = str(home)
    store = open_store(home / "store", writes=False)
    scores = next(made.output for made in store.records.all() if made.label == "round-1/score")
    make_pairs(store, scores)
    run = next(record.run_id for record in reversed(journal.runs()) if record.status == "completed")
    pages = {
        "what-made-it": "/artifacts/policy/production",
        "rows": f"/artifacts/{scores}/files",
        "label": f"/labels/{scores}",
        "compare": f"/compare?run={run}",
    }
    ui = start(home, store.uri)
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            context = browser.new_context(viewport=SIZE)
            context.add_cookies([{"name": "annotator", "value": b"you".hex(), "url": ui.address}])
            tab = context.new_page()
            for name, path in pages.items():
                tab.goto(f"{ui.address}{path}")
                tab.screenshot(path=PICTURES / f"ui-{name}.png")
    finally:
        ui.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
