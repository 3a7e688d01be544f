"""The system calls that a sandboxed program may make, as seccomp filters.

All others fail with ENOSYS, so a call that a newer kernel adds is closed until it is listed here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

TABLE = """\
# files, of which Landlock opens none but Python's own and those of the program's folder
open 2 - · openat 257 56 · close 3 57 · read 0 63 · write 1 64 · readv 19 65 · writev 20 66 · pread64 17 67 · pwrite64 18 68
lseek 8 62 · sendfile 40 71 · copy_file_range 326 285 · ftruncate 77 46 · fsync 74 82 · fdatasync 75 83 · stat 4 - · lstat 6 -
fstat 5 80 · newfstatat 262 79 · statx 332 291 · statfs 137 43 · fstatfs 138 44 · access 21 - · faccessat 269 48
faccessat2 439 439 · readlink 89 - · readlinkat 267 78 · getcwd 79 17 · chdir 80 49 · fchdir 81 50 · getdents 78 -
getdents64 217 61 · unlink 87 - · unlinkat 263 35 · umask 95 166 · rename 82 - · renameat 264 38 · renameat2 316 276
fadvise64 221 223 · dup 32 23 · dup2 33 - · dup3 292 24 · fcntl 72 25 · ioctl 16 29
# memory, as much as RLIMIT_AS allows
brk 12 214 · mmap 9 222 · munmap 11 215 · mremap 25 216 · mprotect 10 226 · madvise 28 233 · msync 26 227 · membarrier 324 283
# threads, up to a limit, and the end
clone 56 220 · futex 202 98 · set_robust_list 273 99 · rseq 334 293 · gettid 186 178 · set_tid_address 218 96
sched_yield 24 124 · sched_getaffinity 204 123 · getcpu 309 168 · exit 60 93 · exit_group 231 94
# its own signals and timers
rt_sigaction 13 134 · rt_sigprocmask 14 135 · rt_sigreturn 15 139 · rt_sigsuspend 130 133 · rt_sigpending 127 136
rt_sigtimedwait 128 137 · sigaltstack 131 132 · pause 34 - · alarm 37 - · setitimer 38 103 · getitimer 36 102
restart_syscall 219 128
# time and randomness
clock_gettime 228 113 · clock_getres 229 114 · clock_nanosleep 230 115 · nanosleep 35 101 · gettimeofday 96 169 · time 201 -
times 100 153 · getrandom 318 278
# waiting, and channels inside the process
poll 7 - · ppoll 271 73 · select 23 - · pselect6 270 72 · epoll_create 213 - · epoll_create1 291 20 · epoll_ctl 233 21
epoll_wait 232 - · epoll_pwait 281 22 · pipe 22 - · pipe2 293 59 · eventfd2 290 19 · socketpair 53 199 · sendto 44 206
recvfrom 45 207 · shutdown 48 210 · getsockname 51 204 · getpeername 52 205
# information about the process and the machine
getpid 39 172 · getppid 110 173 · getuid 102 174 · geteuid 107 175 · getgid 104 176 · getegid 108 177 · getresuid 118 148
getresgid 120 150 · getgroups 115 158 · uname 63 160 · sysinfo 99 179 · getrusage 98 165 · getrlimit 97 163
prlimit64 302 261
"""
"""Numbers on x86-64 and, where there is such a call, on aarch64."""

NUMBERS = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for line in TABLE.splitlines()
    if not line.startswith("#")
    for name, *numbers in map(str.split, line.split("·"))
}

CLONE_THREAD, O_CREAT, O_TMPFILE, AF_UNIX, SOCK_STREAM, SOCK_TYPES = 0x10000, 0x40, 0x400000, 1, 1, 0xF
WHOLE = 0xFFFFFFFF
ARGUMENTS: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "clone": [(0, CLONE_THREAD, (CLONE_THREAD,))],  # no process
    "prlimit64": [(0, WHOLE, (0,))],  # its own
    "socketpair": [(0, WHOLE, (AF_UNIX,)), (1, SOCK_TYPES, (SOCK_STREAM,))],  # datagrams could be sent elsewhere
    # duplicates, flags and locks: not the owner, which gets signals
    "fcntl": [(1, WHOLE, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030))],
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": [(1, WHOLE, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
}
"""Restrictions of these calls: (number of the argument, mask of its bits, allowed values)."""

COUNTED = {"clone": None, "open": 1, "openat": 2}
"""Calls that start a thread or, with flags in this argument, may create a file: the runner allows a number of each."""

LOAD, EQUAL, ANY_BIT, KEEP, ANSWER = 0x20, 0x15, 0x45, 0x54, 0x06
ALLOW, ASK, UNKNOWN, KILL = 0x7FFF0000, 0x7FC00000, 0x00050000 | 38, 0x80000000
Step = tuple[int, int, int, int]


@dataclass(frozen=True)
class Machine:
    """An architecture: its column of ``NUMBERS``, the kernel's number of it, and the numbers of two calls of our own."""

    column: int
    audit: int
    capset: int
    seccomp: int


MACHINES = {"x86_64": Machine(0, 0xC000003E, 126, 317), "aarch64": Machine(1, 0xC00000B7, 91, 277)}


def number_of(call: str, machine: Machine) -> int | None:
    return NUMBERS[call][machine.column]


def allowing(machine: Machine) -> bytes:
    """The filter that allows the calls above, and no others."""
    steps: list[Step] = []
    for call in NUMBERS:
        if (number := number_of(call, machine)) is not None:
            checked = _checked(ARGUMENTS.get(call, []))
            steps += [(EQUAL, 0, len(checked), number), *checked]
    return _assembled(machine, [*steps, (ANSWER, 0, 0, UNKNOWN)])


def counting(machine: Machine) -> bytes:
    """The filter that asks the runner for each new thread, and for each file that may be created."""
    steps: list[Step] = []
    for call, flags in COUNTED.items():
        if (number := number_of(call, machine)) is None:
            continue
        ask = [(ANSWER, 0, 0, ASK)]
        if flags is not None:
            ask = [_load(flags), (ANY_BIT, 0, 1, O_CREAT | O_TMPFILE), *ask, (ANSWER, 0, 0, ALLOW)]
        steps += [(EQUAL, 0, len(ask), number), *ask]
    return _assembled(machine, [*steps, (ANSWER, 0, 0, ALLOW)])


def _checked(conditions: list[tuple[int, int, tuple[int, ...]]]) -> list[Step]:
    """Allow the call if all ``conditions`` hold."""
    steps: list[Step] = []
    for argument, bits, values in conditions:
        steps += [_load(argument), (KEEP, 0, 0, bits)]
        steps += [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        steps.append((ANSWER, 0, 0, UNKNOWN))
    return [*steps, (ANSWER, 0, 0, ALLOW)]


def _load(argument: int) -> Step:
    return (LOAD, 0, 0, 16 + 8 * argument)  # its lower half, on little-endian machines


def _assembled(machine: Machine, steps: list[Step]) -> bytes:
    start: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine.audit), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]
    return b"".join(struct.pack("HBBI", *step) for step in (*start, *steps))
