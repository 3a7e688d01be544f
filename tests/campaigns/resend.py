"""An upload is killed (SIGKILL) at a random byte and started again: how much is sent twice, counted before the server."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from unittest.mock import patch

from alignment_core.artifacts.downloads import _THREADS, PART
from alignment_core.artifacts.s3 import S3Backend
from tests.campaigns.places import Outcome, Place
from tests.processes import ended, in_child
from tests.servers.faulty import Faulty

COUNT, STORES = 20, ("s3",)
_PARTS = 10


def run(place: Place, count: int, seed: int) -> Outcome:
    assert place.server is not None
    rng, worst, size = random.Random(seed), 0, _PARTS * PART - 12345
    source = place.folder / "large"
    source.write_bytes(rng.randbytes(1 << 20) * (size >> 20) + rng.randbytes(size % (1 << 20)))
    with Faulty(place.server.url) as proxy, patch.dict(os.environ, {"AWS_ENDPOINT_URL": proxy.url}):
        for number in range(count):
            backend = S3Backend("bucket", f"resend-{number}/")
            before, death = _sent(proxy), rng.randrange(size)
            child = in_child(lambda: backend.put("large", source))  # noqa: B023
            while _sent(proxy) - before < death:
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            assert ended(child) == -signal.SIGKILL
            assert backend.put("large", source), "the next publisher ends it"
            worst = max(worst, _sent(proxy) - before - size)
            backend.delete("large")
    figures = {"campaign": "resend", "store": place.kind, "seed": seed, "of": count}
    figures |= {"most parts sent again": round(worst / PART, 2), "goal": f"at most {_THREADS}, one of each thread"}
    return Outcome(json.dumps(figures), worst <= _THREADS * PART)


def _sent(proxy: Faulty) -> int:
    return sum(request.up for request in list(proxy.requests) if "partNumber" in request.target)
