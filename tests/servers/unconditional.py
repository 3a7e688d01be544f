"""An S3 server that ignores every condition, and so cannot hold a store: ``rclone serve s3``."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import free_port, wait_until
from tests.servers.s3 import SECRETS


@contextmanager
def unconditional_server(folder: Path) -> Iterator[str]:
    """Its URL; ``folder`` holds a bucket named ``bucket``."""
    (folder / "bucket").mkdir(parents=True)
    address = f"127.0.0.1:{free_port()}"
    keys = f"{SECRETS['AWS_ACCESS_KEY_ID']},{SECRETS['AWS_SECRET_ACCESS_KEY']}"
    command = [
        str(Path(sys.executable).with_name("rclone")),
        "serve",
        "s3",
        "--config",
        "",
        "--addr",
        address,
        "--auth-key",
        keys,
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: _answers(f"http://{address}/"), 30)
            yield f"http://{address}"
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True  # it requires a signature
    except OSError:
        return False
    return True
