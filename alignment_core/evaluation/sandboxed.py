"""A program that nobody has read, run within limits: the process that gives up its rights and then runs it.

Landlock (files) and seccomp (processes, network, and what else reaches out of the process) need no privilege, hold for
root, and cannot be taken back. Started as a script, and so imports nothing of this package. Arguments: the file
descriptors of the job and of the pipe that is told ``ready``, or why not.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
import resource
import struct
import sys
import types
from typing import Any

CPU_SECONDS = 10
MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20
OPEN_FILES = 64

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CAPSET, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 126, 444, 445, 446  # x86-64
READ_FILE, READ_DIR, WRITE_FILE, REMOVE_FILE, MAKE_REG, TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 5, 1 << 8, 1 << 14
RIGHTS_OF_ABI = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 5: 1 << 16}
"""From this version of Landlock on, every right is a bit below this one."""

# System calls of x86-64 that reach out of the process, or past a limit.
CLONE, CLONE3, PRLIMIT, SOCKETPAIR = 56, 435, 302, 53
CLONE_THREAD, SOCK_STREAM, SOCK_TYPES = 0x10000, 1, 0xF
FORBIDDEN = (
    *(57, 58, 59, 322),  # fork, vfork, execve, execveat
    *(41, 42, 49, 425, 426, 427),  # socket, connect, bind, io_uring_*
    *(62, 200, 234, 129, 297, 424, 434, 438),  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_*
    *(101, 310, 311, 312, 440),  # ptrace, process_vm_readv, process_vm_writev, kcmp, process_madvise
    *(141, 142, 144, 203, 251, 314),  # priorities and cores, of other processes too
    *(256, 279),  # migrate_pages, move_pages
    *(
        319,
        447,
        29,
        30,
        31,
        64,
        66,
        68,
        71,
        240,
    ),  # memory that RLIMIT_AS does not count: memfd_*, shm*, sem*, msg*, mq_open
    *(248, 249, 250, 298, 321, 323),  # keys, perf_event_open, bpf, userfaultfd
    *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),  # mounts and namespaces
    *(76, 90, 91, 92, 93, 94, 260, 268, 452),  # truncate, chmod, chown: Landlock does not see them
    *(132, 235, 261, 280, 188, 189, 190, 197, 198, 199),  # times and attributes of files
    *(253, 254, 294, 300, 301),  # inotify_*, fanotify_*: what others do with files
)

FORBIDDEN_COMMANDS = {
    72: (8, 10, 15),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX send a signal to any process
    16: (0x8901, 0x8902),  # ioctl: FIOSETOWN, SIOCSPGRP do, too
}


def confine(folder: str) -> None:
    """Give up, for good, every right but to compute, read Python's own files and write to ``folder``. Raises OSError."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        raise OSError("this needs Linux on x86-64")
    limits = {"CPU": CPU_SECONDS, "AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "CORE": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _landlock(libc, folder)
    # root could raise its limits again
    _checked("capset", libc.syscall(CAPSET, struct.pack("II", 0x20080522, 0), bytes(24)))
    _seccomp(libc)


def _landlock(libc: Any, folder: str) -> None:
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    _checked("Landlock", abi)
    handled = max(bit for version, bit in RIGHTS_OF_ABI.items() if version <= abi) - 1
    ruleset = libc.syscall(LANDLOCK_CREATE, struct.pack("Q", handled), 8, 0)
    _checked("Landlock", ruleset)
    readable = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/dev/urandom", "/dev/zero"}
    writable = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    rules = [*((path, READ_FILE | READ_DIR) for path in readable), (folder, writable), (os.devnull, writable)]
    for path, rights in rules:
        if not os.path.exists(path):
            continue
        allowed = rights & handled & (-1 if os.path.isdir(path) else READ_FILE | WRITE_FILE | TRUNCATE)
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _checked("Landlock", libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, place), 0))
        os.close(place)
    _checked("Landlock", libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _seccomp(libc: Any) -> None:
    """A BPF program over the number and the arguments of each system call."""
    load, equal, above, bits, keep, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000  # EPERM, ENOSYS
    number, architecture, first, second, x86_64 = 0, 4, 16, 24, 0xC000003E
    steps = [
        (load, 0, 0, architecture),
        (equal, 1, 0, x86_64),
        (answer, 0, 0, kill),
        (load, 0, 0, number),
        (above, 0, 1, 0x40000000),  # the numbers of the x32 ABI
        (answer, 0, 0, kill),
        (equal, 0, 1, CLONE3),  # its flags lie in memory; without it clone is taken
        (answer, 0, 0, unknown),
        (equal, 0, 4, CLONE),
        (load, 0, 0, first),
        (bits, 0, 1, CLONE_THREAD),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
        (equal, 0, 4, PRLIMIT),
        (load, 0, 0, first),
        (equal, 0, 1, 0),  # its own
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
        (equal, 0, 5, SOCKETPAIR),
        (load, 0, 0, second),
        (keep, 0, 0, SOCK_TYPES),
        (equal, 0, 1, SOCK_STREAM),  # a datagram may be sent elsewhere than to the other end
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    for call, commands in FORBIDDEN_COMMANDS.items():
        refused = [step for command in commands for step in ((equal, 0, 1, command), (answer, 0, 0, refuse))]
        steps += [(equal, 0, len(refused) + 2, call), (load, 0, 0, second), *refused, (answer, 0, 0, allow)]
    for call in FORBIDDEN:
        steps += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    steps.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    _checked("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0))


def _checked(what: str, answer: int) -> None:
    if answer < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    job_file, told = map(int, sys.argv[1:])
    with os.fdopen(job_file, "rb") as file:
        job = json.load(file)
    try:
        confine(job["folder"])
    except (OSError, ValueError) as error:
        os.write(told, str(error).encode())
        sys.exit(1)
    os.write(told, b"ready")
    os.close(told)
    sys.argv = ["answer.py"]
    if job["tests"] is None:
        _run(job["program"], "__main__")
    else:
        _run_and_test(job["program"], job["tests"], job["token"].encode())


def _run_and_test(program: str, tests: str, token: bytes) -> None:
    """Say ``token`` where only the tests' end says it: what the program prints, and how it ends, count for nothing."""
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    ours = dict(vars(builtins))  # the program may replace them
    execute, translate, write, leave = exec, compile, os.write, os._exit
    names = _run(program, "answer")
    execute(translate(tests, "tests.py", "exec"), {**names, "__builtins__": ours})
    write(verdict, token)
    leave(0)


def _run(program: str, name: str) -> dict[str, Any]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(program, "answer.py", "exec"), vars(module))
    return vars(module)


if __name__ == "__main__":
    main()
