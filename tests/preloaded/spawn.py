"""``spawn.py FOLDER PID``: start a server for each environment that a launcher asks for, until process ``PID`` ends.

``FOLDER`` is deleted then. Launchers do not start servers themselves: what descends from a run ends with it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys

SERVERS = 6
"""At most so many, for each has its copy of the libraries. One more ends that which was asked longest ago and has no fork."""


def main() -> None:
    folder, owner = sys.argv[1], os.pidfd_open(int(sys.argv[2]))
    started: dict[str, subprocess.Popen[bytes]] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/spawn")
        listening.listen()
        while owner not in select.select([listening.fileno(), owner], [], [])[0]:
            with listening.accept()[0] as connection, connection.makefile() as lines:
                request = json.loads(lines.readline() or "null")
                if request and request["path"] not in started and has_room(started):
                    started[request["path"]] = start(request["path"], request["variables"])
                server = started.get(request["path"]) if request else None
                connection.send(b"y" if server is not None and server.poll() is None else b"n")
    shutil.rmtree(folder)


def has_room(started: dict[str, subprocess.Popen[bytes]]) -> bool:
    """Whether one more server may run, after one without forks was ended for it if need be."""
    if len(started) < SERVERS:
        return True
    idle = [path for path, server in started.items() if os.path.exists(path) and not has_forks(server.pid)]
    if not idle:
        return False
    oldest = min(idle, key=os.path.getmtime)  # launchers touch the socket
    server = started.pop(oldest)
    server.kill()
    server.wait()
    os.unlink(oldest)
    return True


def has_forks(server: int) -> bool:
    """Whether this server has a fork, unless both ended."""
    try:
        with open(f"/proc/{server}/task/{server}/children") as children:
            return bool(children.read())
    except FileNotFoundError:
        return False


def start(path: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the server that listens at ``path`` once it has imported all."""
    server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
    with open(f"{path}.log", "w") as log:
        command = [sys.executable, server, path, sys.argv[2]]
        space = {"SPACE_FOR_ENVIRONMENT": " " * 65_536}  # see publish_environment in server.py
        return subprocess.Popen(command, env={**variables, **space}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


if __name__ == "__main__":
    main()
