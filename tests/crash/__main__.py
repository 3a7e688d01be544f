"""``python -m tests.crash --kills 100``: kill processes of small runs and compare results; exit 1 if they differ."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.align import prefect_server
from tests.crash import recipe
from tests.crash.campaign import Campaign, by_role, campaign_of, lost_work, summary
from tests.crash.machines import lose_machines
from tests.crash.replicas import replicas


def main() -> int:
    """Run a campaign and print its outcome."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--recipe", choices=recipe.NAMES, default="quickstart")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--losses", type=int, default=0, help="lose so many whole machines instead, over a store in S3")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--longest-pause", type=float, default=Campaign.longest_pause, help="seconds between two kills")
    parser.add_argument("--begins-at", default="", help="label of a stage before which nothing is killed")
    parser.add_argument("--roles", nargs="+", default=[], help="what is killed, as the output names it; none for all")
    parser.add_argument("--set", action="append", default=[], help="a field of the recipe, as in align run")
    options = parser.parse_args()
    if options.losses:
        return lose_machines(options.losses, options.seed)
    with (
        tempfile.TemporaryDirectory(prefix="crash-") as folder,
        prefect_server(Path(folder) / "server") as server,
        replicas(2) as rewarding,
    ):
        campaign = campaign_of(options.recipe, Path(folder), random.Random(options.seed), rewarding)
        campaign.command += [part for override in options.set for part in ("--set", override)]
        campaign.longest_pause, campaign.begins_at = options.longest_pause, options.begins_at
        campaign.roles, campaign.environment = options.roles, server
        campaign.say = lambda text: print(text, flush=True)
        print(f"seed {options.seed}; an undisturbed run takes {campaign.undisturbed():.0f} s", flush=True)
        campaign.run(options.kills)
    print(summary(campaign.kills))
    figures = {"roles": by_role(campaign.kills), "lost": lost_work(campaign.kills)}
    print(json.dumps({**figures, "differences": campaign.differences}))
    print("\n".join(campaign.differences) or f"{len(campaign.kills)} kills without a difference")
    return 1 if campaign.differences else 0


if __name__ == "__main__":
    sys.exit(main())
