"""The process of an untrusted program: it gives up its rights, and then runs the program.

Landlock (files) and seccomp (system calls) need no privilege, hold for root, and cannot be taken back. This file is started as
a script, so it imports nothing of this package by name. Arguments: the file descriptors of the job, and of the socket that gets
``ready``, or the reason of a failure.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import json
import os
import resource
import socket
import struct
import sys
import types
from pathlib import Path
from typing import Any

CPU_SECONDS = 10
MEMORY_BYTES = 1 << 30
FILE_BYTES = 4 << 20
OPEN_FILES = 64
PREFIXES = {sys.prefix, sys.base_prefix, "/usr", "/usr/local", ""}
PASSED = b"passed"

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR, WRITE_FILE, REMOVE_FILE, MAKE_REG, TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 5, 1 << 8, 1 << 14
RIGHTS_OF_ABI = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 5: 1 << 16}
"""From this version of Landlock on, every right is a bit below this one."""


def confine(job: dict[str, Any], status: socket.socket) -> None:
    """Give up, for good, every right except to compute, read Python's own files and write to the folder. Raises OSError."""
    limits = {"CPU": CPU_SECONDS, "AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "CORE": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _landlock(libc, job["folder"])
    # root could raise its limits again
    _checked("capset", libc.syscall(job["capset"], struct.pack("II", 0x20080522, 0), bytes(24)))
    # the counting filter comes first, because the other one forbids to install any more
    counting = _instructions(job["counting"])
    flags = SECCOMP_FILTER_FLAG_NEW_LISTENER
    listener = libc.syscall(job["seccomp"], SECCOMP_SET_MODE_FILTER, flags, _description(counting))
    _checked("seccomp", listener)
    socket.send_fds(status, [b" "], [listener])  # the runner answers the requests for threads and files
    os.close(listener)
    allowing = _instructions(job["allowing"])
    _checked("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, _description(allowing), 0, 0))


def _landlock(libc: Any, folder: str) -> None:
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    _checked("Landlock", abi)
    handled = max(bit for version, bit in RIGHTS_OF_ABI.items() if version <= abi) - 1
    ruleset = libc.syscall(LANDLOCK_CREATE, struct.pack("Q", handled), 8, 0)
    _checked("Landlock", ruleset)
    # not all of a prefix: images keep projects in /usr/src and /usr/local
    libraries = {f"{prefix}/{name}" for prefix in PREFIXES for name in ("lib", "lib64", "share/zoneinfo")}
    readable = {*libraries, os.path.realpath(sys.executable), "/dev/urandom", "/dev/zero"}
    writable = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    rules = [*((path, READ_FILE | READ_DIR) for path in readable), (folder, writable), (os.devnull, writable)]
    for path, rights in rules:
        if not os.path.exists(path):
            continue
        allowed = rights & handled & (-1 if os.path.isdir(path) else READ_FILE | WRITE_FILE | TRUNCATE)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _checked("Landlock", libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0))
        os.close(descriptor)
    _checked("Landlock", libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _instructions(steps: str) -> ctypes.Array[ctypes.c_char]:
    """The memory that holds a filter, which is given in hexadecimal."""
    code = bytes.fromhex(steps)
    return ctypes.create_string_buffer(code, len(code))


def _description(instructions: ctypes.Array[ctypes.c_char]) -> bytes:
    """``struct sock_fprog``, which points to the instructions: they must stay in memory until the kernel has read them."""
    return struct.pack("HxxxxxxQ", len(instructions) // 8, ctypes.addressof(instructions))


def _checked(name: str, result: int) -> None:
    if result < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    status = socket.socket(fileno=int(sys.argv[2]))
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = json.load(file)
    if job["channel"] is not None:
        remote = _remote_calls()  # before this process may read nothing of this package
        end = socket.socket(fileno=job["channel"])
    try:
        confine(job, status)
    except (OSError, ValueError) as error:
        status.sendall(str(error).encode())
        sys.exit(1)
    status.sendall(b"ready")
    status.close()
    sys.argv = ["answer.py"]
    if job["channel"] is None:
        _run(job["program"], "__main__")
    elif job["program"] is not None:
        remote.answer_calls(end, _run(job["program"], "answer"))
    else:
        _test(job["tests"], remote.names_of_program(end, "tests"))


def _remote_calls() -> Any:
    spec = importlib.util.spec_from_file_location("remote_calls", Path(__file__).with_name("remote_calls.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _test(tests: str, names: dict[str, Any]) -> None:
    """Write the verdict to standard output, which the tests themselves cannot reach: it goes to /dev/null while they run."""
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answer = sys.modules["answer"] = types.ModuleType("answer")
    vars(answer).update(names)
    visible = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    exec(compile(tests, "tests.py", "exec"), {**visible, "__name__": "tests", "__builtins__": builtins})
    os.write(verdict, PASSED)


def _run(program: str, name: str) -> dict[str, Any]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(program, "answer.py", "exec"), vars(module))
    return vars(module)


if __name__ == "__main__":
    main()
