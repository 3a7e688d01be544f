"""``python -m alignment_core.inference.server_process``: vLLM's server, with its options, in half of its time to start.

The process of its engine imports this module again, so both of them import vLLM without delay, and on a CPU at the same time.
"""

import json
import os
import signal
import sys

from alignment_core.imports import on_a_cpu, uncompiled, without_ray

with without_ray():
    if __name__ == "__main__":
        # OPTIONS_VARIABLE of http_server, whose imports would delay the start
        sys.argv += json.loads(os.environ.pop("ALIGN_SERVER_OPTIONS", "[]"))
        if on_a_cpu():
            from alignment_core.inference.engine_process import EngineContext

            context = EngineContext()
        with uncompiled():
            from vllm.entrypoints.launchers.api_server.entry import main

            if on_a_cpu():
                import vllm.v1.engine.utils

                vllm.v1.engine.utils.get_mp_context = lambda: context  # on a CPU vLLM itself always spawns
        main()
    else:
        if on_a_cpu():
            from alignment_core.processes import end_with_parent

            end_with_parent(signal.SIGKILL)
        with uncompiled():
            import vllm.v1.engine.core
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                import vllm.v1.worker.cpu_worker
