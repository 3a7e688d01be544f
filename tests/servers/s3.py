"""An S3 server that keeps conditions, checks SHA-256 and persists acknowledged writes: ministack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import botocore.session
from botocore.config import Config

from tests.processes import free_port, wait_until

PACKAGES = Path(sys.prefix) / "servers"
"""Where `make .venv/.test` installs the server, whose botocore differs from the tested one."""
SECRETS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class S3Server:
    """ministack on a free port of loopback; its data is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Variables for a client."""
        return SECRETS | {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> S3Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        folders = {name: str(self.folder / name.lower()) for name in ("S3_DATA_DIR", "STATE_DIR", "TMPDIR")}
        for folder in folders.values():
            Path(folder).mkdir(exist_ok=True)
        settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(self.port), "SERVICES": "s3", "S3_PERSIST": "1"}
        settings |= {"IOT_MTLS_ENABLED": "0", "SFTP_ENABLED": "0"}  # these listen at all addresses, on fixed ports
        assert PACKAGES.is_dir(), "the tests' S3 server is not installed: make .venv/.test"
        settings |= {"PYTHONPATH": str(PACKAGES)}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ministack"], env=os.environ | settings | folders, stdout=log, stderr=log
            )
        assert wait_until(self._answers, 60), (self.folder / "log").read_text()
        return self

    def make_bucket(self, name: str) -> None:
        client = botocore.session.get_session().create_client(
            "s3",
            region_name=SECRETS["AWS_REGION"],
            endpoint_url=self.url,
            aws_access_key_id=SECRETS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=SECRETS["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket=name)

    def end(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            urllib.request.urlopen(f"{self.url}/", timeout=5).close()
        except OSError:
            return False
        return True
