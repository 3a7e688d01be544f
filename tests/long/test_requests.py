"""The network traffic of a day of use is listed in docs/trust.md, and requested by the user."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.servers.outside import is_possible, resolver

ROOT = Path(__file__).parents[2]
ASKED = {
    "recorders work": ["control.example"],
    "publish": ["hub.example"],
    "a name of the Hub": ["huggingface.co"],
    "W&B": ["api.forge.coreweave.com"],
    "a store on S3": ["bucket.s3.amazonaws.com", "169.254.169.254"],
}
"""By step, the hosts that it contacts; other steps contact none. `hub.example` is in `HF_ENDPOINT`."""


def listed() -> list[str]:
    """The hosts of the table in docs/trust.md."""
    section = (ROOT / "docs" / "trust.md").read_text().split("## What leaves the machine")[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    return [word for cell in cells for number, word in enumerate(cell.split("`")) if number % 2]


def host_of(place: str) -> str:
    """Of ``huggingface.co:443`` and of ``tcp 169.254.169.254:80``."""
    return place.rpartition(" ")[2].partition(":")[0]


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not is_possible(), reason="`unshare -rn` is not allowed here, or there are no veth interfaces")
@pytest.mark.skipif(
    resolver().startswith("127."), reason="names are asked of a server on loopback, where nobody sees it"
)
def test_all_network_requests_of_a_day_are_documented_and_requested(tmp_path: Path) -> None:
    command = ["unshare", "-rn", sys.executable, "-m", "tests.long.requests_of_a_day", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["recorders work"] == {"proxy": ["control.example"], "packets": ["tcp 192.0.2.1:443"]}
    for step, requests in seen.items():
        if step == "recorders work":
            continue
        hosts = {host_of(place) for places in requests.values() for place in places}
        assert hosts <= {*ASKED.get(step, ())}, step
        for host in hosts - {"hub.example"}:
            assert any(fnmatch(host, pattern) for pattern in listed()), host
        beside_proxy = {host_of(place) for place in requests["packets"]}
        assert beside_proxy <= {"169.254.169.254"}, f"{step}: past the proxy"
    assert {"publish", "a name of the Hub", "W&B", "a store on S3"} <= {
        step for step, places in seen.items() if places["proxy"]
    }
