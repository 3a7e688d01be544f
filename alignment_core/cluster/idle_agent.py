"""What a private Ray runs as its dashboard agent: it says that it serves nothing, and ends with the raylet.

Ray's own says the same where there is no dashboard, after importing Ray and all modules that it could serve, and the raylet
waits for it. The raylet ends if this process does.
"""

import os
import select
import sys

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_SERVED = "-1"


def main() -> None:
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    for port in PORTS:
        file = os.path.join(options["session-dir"], f"{port}_{options['node-id']}")
        with open(f"{file}.new", "w") as output:
            output.write(NOT_SERVED)
        os.rename(f"{file}.new", file)  # the raylet may read it at any time
    select.select([raylet], [], [])


if __name__ == "__main__":
    main()
