"""``launch.py FOLDER WORKER…``: run Ray's worker script in a fork of a preloaded process, or else in this one.

``FOLDER`` has the sockets of the servers. Imports little, for it starts with each actor.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time

READ_AT_START = (
    "CUDA DS_ GLIBC_ GOMP_ HF_ HUGGINGFACE_ KMP_ LD_ MKL_ OMP_ ONEDNN_ PYTHON TOKENIZERS_ TORCH TRANSFORMERS_ VLLM_"
)
"""How the names of variables begin that the system, Python or libraries may read only once: their values tell servers apart."""
OF_TRAINERS_AND_ENGINES = ("DS_ACCELERATOR", "VLLM_ENABLE_V1_MULTIPROCESSING")
IMPORT_SECONDS = 25.0
"""Ray waits for an actor for 60 s; one that waited in vain still has to start."""


def main() -> None:
    folder, *worker = sys.argv[1:]
    python = python_of_ray()
    if python != sys.executable or not any(name in os.environ for name in OF_TRAINERS_AND_ENGINES):
        os.execv(python, [python, *worker])
    read = {name: value for name, value in os.environ.items() if name.startswith(tuple(READ_AT_START.split()))}
    read.pop("VLLM_CONFIG_ROOT", None)  # below a test's home; read on use
    path = f"{folder}/{hashlib.sha256(repr(sorted(read.items())).encode()).hexdigest()[:16]}"
    with socket.socket(socket.AF_UNIX) as connection:
        if not connects(connection, path, 0) and not (
            is_started(folder, path, read) and connects(connection, path, IMPORT_SECONDS)
        ):
            os.execv(python, [python, *worker])
        fields = [*worker, "", os.getcwd(), *(f"{name}={value}" for name, value in os.environ.items())]
        request = chr(0).join(fields).encode("utf-8", "surrogateescape")
        forked = b""
        with contextlib.suppress(OSError):  # the server ended
            os.utime(path)
            socket.send_fds(connection, [b"."], [0, 1, 2])
            connection.sendall(len(request).to_bytes(8, "big") + request)
            forked = connection.recv(1)
        if not forked:
            os.execv(python, [python, *worker])
        status = connection.recv(1)  # empty if the server ended, and the fork with it
    sys.exit(status[0] if status else 1)


def python_of_ray() -> str:
    """The Python of the process that started Ray, from the command line of its raylet, which started this process."""
    with open(f"/proc/{os.getppid()}/cmdline") as line:
        option = next(word for word in line.read().split(chr(0)) if word.startswith("--python_worker_command="))
    return option.partition("=")[2].split()[0]


def connects(connection: socket.socket, path: str, seconds: float) -> bool:
    """Whether the server listens within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            connection.connect(path)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def is_started(folder: str, path: str, read: "dict[str, str]") -> bool:
    """Have the server of this environment started, unless there are too many; whether it runs."""
    others = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as spawner:
        spawner.connect(f"{folder}/spawn")
        spawner.sendall(json.dumps({"path": path, "variables": {**read, **others}}).encode() + b"\n")
        return spawner.recv(1) == b"y"
    return False


main()
