"""Runs under `align up` that end badly: seconds until each is marked as crashed, and until it trains again."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from alignment_core.models.scratch import create_model
from alignment_core.recipes import ScratchModel
from tests.deployments.endings import ENDS, check_that_it_goes_on
from tests.deployments.up import Services

SHAPE = ScratchModel(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)


def main() -> None:
    """One `align up` for all ways to end, each with a run of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model, home = Path(folder) / "model", Path(folder) / "home"
        create_model(SHAPE, None, 0, model)
        os.environ["ALIGN_HOME"] = str(home)
        services = Services(home, model)
        services.align("up", "--port", str(services.port))
        try:
            for event in ENDS:
                marked, resumed = check_that_it_goes_on(services, event)
                line = {"event": event, "marked_seconds": round(marked, 1), "resumed_seconds": round(resumed, 1)}
                print(json.dumps(line), flush=True)
        finally:
            services.align("down")


if __name__ == "__main__":
    main()
