"""``python -m alignment_core.inference.server_process``: vLLM's server, with its options, in half of its time to start.

The process of its engine, which it spawns, imports this module again, so both of them import vLLM without delay.
"""

import json
import os
import sys

from alignment_core.imports import uncompiled, without_ray

with without_ray():
    if __name__ == "__main__":
        with uncompiled():
            from vllm.entrypoints.launchers.api_server.entry import main

        # OPTIONS_VARIABLE of http_server, whose imports would delay the start
        sys.argv += json.loads(os.environ.pop("ALIGN_SERVER_OPTIONS", "[]"))
        main()
    else:
        with uncompiled():
            import vllm.v1.engine.core
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                import vllm.v1.worker.cpu_worker  # noqa: F401
