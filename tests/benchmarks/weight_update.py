"""Updates of weights of a running engine by a trainer, with a pretrained model (538 MB in fp32)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from alignment_core.execution.machines import WarmMachines
from alignment_core.recipes import ResourcesConfig
from tests.benchmarks.reinforcement import WAIT, transfer
from tests.real_model import real_model


def main() -> None:
    resources = ResourcesConfig(device="cpu", trainers=1, engines=1, kv_cache_mib=64, wait_timeout_seconds=WAIT)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        machines = WarmMachines(resources, Path(folder))
        try:
            print(json.dumps(transfer(real_model(), Path(folder), machines, resources)))
        finally:
            machines.close()


if __name__ == "__main__":
    main()
