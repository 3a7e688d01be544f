"""``server.py SOCKET PID``: import what actors import, then fork one for each launcher that asks, until ``PID`` ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import tempfile

from alignment_core.imports import hidden

PR_SET_PDEATHSIG = 1
SPACE = "SPACE_FOR_ENVIRONMENT"
"""The server's variable that only reserves memory: a fork writes its environment there, for other processes to read."""
BASE = sys.path[1:]
"""The import path without the folder of the script."""


def main() -> None:
    path, owner = sys.argv[1], os.pidfd_open(int(sys.argv[2]))
    gc.disable()
    load()
    gc.freeze()
    gc.enable()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.new")
    listening.listen()
    os.rename(f"{path}.new", path)
    forks: dict[int, tuple[int, socket.socket]] = {}
    while True:
        launchers = [launcher.fileno() for _, launcher in forks.values()]
        ready, _, _ = select.select([listening.fileno(), owner, *forks, *launchers], [], [])
        if owner in ready:
            return  # its forks end with it
        for child, (pid, launcher) in list(forks.items()):
            if child in ready:  # ended
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    launcher.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
                launcher.close()
                os.close(child)
                del forks[child]
            elif launcher.fileno() in ready:  # killed: so would its actor have been
                os.kill(pid, signal.SIGKILL)
        if listening.fileno() in ready:
            launcher, _ = listening.accept()
            _, files, _, _ = socket.recv_fds(launcher, 1, 3)
            length = int.from_bytes(launcher.recv(8, socket.MSG_WAITALL), "big")
            request = launcher.recv(length, socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                listening.close()
                launcher.close()
                for child, (_, other) in forks.items():
                    os.close(child)
                    other.close()
                os.close(owner)
                become(request.decode("utf-8", "surrogateescape").split(chr(0)), files)
            with contextlib.suppress(OSError):
                launcher.sendall(b"y")  # forked
            for file in files:
                os.close(file)
            forks[os.pidfd_open(pid)] = (pid, launcher)


def load() -> None:
    """Import as an engine or a trainer rank does, without Ray, which reads the environment of its actor on import."""
    with hidden("ray"):
        if "VLLM_ENABLE_V1_MULTIPROCESSING" in os.environ:
            from alignment_core.inference import engine

            engine.prepare()
        else:
            import deepspeed  # noqa: F401
            from transformers import AutoModelForCausalLM  # noqa: F401

            import alignment_core.training.trainer  # noqa: F401


def become(request: list[str], files: list[int]) -> None:
    """Run the worker of Ray in this process, as if it had been started so; does not return."""
    between = request.index("")
    worker, folder, variables = request[:between], request[between + 1], request[between + 2 :]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    tempfile.tempdir = None  # that of the server, which imports may have looked for
    os.environ.clear()
    for variable in variables:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    publish_environment(variables)
    script, *arguments = [word for word in worker if word != "-u"]
    sys.path[:] = [os.path.dirname(script), *BASE]
    sys.argv[:] = [script, *arguments]
    code = 0
    if (without_ray := sys.modules.get("vllm.v1.executor.ray_utils")) is not None:
        importlib.reload(without_ray)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def publish_environment(variables: list[str]) -> None:
    """Add these variables to ``/proc/PID/environ`` of this fork, which has those that the server was started with."""
    with open("/proc/self/environ", "rb") as file:
        at_start = file.read()
    with open("/proc/self/stat") as file:
        address = int(file.read().rpartition(")")[2].split()[47])  # env_start, the 50th field
    begin = at_start.index(f"{SPACE}=".encode())
    length = at_start.index(0, begin) - begin
    content = chr(0).join(variables).encode("utf-8", "surrogateescape")[:length].ljust(length, b"\0")
    ctypes.memmove(address + begin, content, length)


if __name__ == "__main__":
    main()
