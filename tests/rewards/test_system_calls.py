"""The filters of system calls, worked out by hand as the kernel does: also for an architecture that is not here."""

from __future__ import annotations

import struct

import pytest

from alignment_core.rewards.sandbox import system_calls
from alignment_core.rewards.sandbox.system_calls import ALLOW, ASK, KILL, MACHINES, NUMBERS, UNKNOWN, Machine

BIT_32 = 0xFFFFFFFF
READ, CREATE, TMPFILE, THREAD, PROCESS = 0, 0o100 | 1, 0o20200000 | 2, 0x3D0F00, 0x1200011
AF_UNIX, AF_INET, STREAM, DATAGRAM, F_SETFL, F_SETOWN, NONBLOCK = 1, 2, 0x80001, 2, 4, 8, 0x5421


def decision(steps: bytes, machine: Machine, number: int, *arguments: int) -> int:
    """The answer of a filter to a call."""
    data = struct.pack("<iIQ6Q", number, machine.audit, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator = place = 0
    while True:
        code, if_true, otherwise, value = struct.unpack_from("HBBI", steps, 8 * place)
        place += 1
        if code == system_calls.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == system_calls.KEEP:
            accumulator &= value
        elif code == system_calls.ANSWER:
            return int(value)
        else:
            holds = accumulator == value if code == system_calls.EQUAL else accumulator & value
            place += if_true if holds else otherwise


def number(call: str, machine: Machine) -> int:
    known = system_calls.number_of(call, machine)
    assert known is not None
    return known


@pytest.fixture(params=list(MACHINES.values()), ids=list(MACHINES))
def machine(request: pytest.FixtureRequest) -> Machine:
    given: Machine = request.param
    return given


def test_only_listed_calls_with_harmless_arguments_are_allowed(machine: Machine) -> None:
    steps = system_calls.allowing(machine)
    listed = {system_calls.number_of(call, machine) for call in NUMBERS} - {None}
    conditional = {number(call, machine) for call in system_calls.ARGUMENTS}
    for candidate in range(600):
        if candidate not in conditional:
            assert decision(steps, machine, candidate) == (ALLOW if candidate in listed else UNKNOWN), candidate
    for call, arguments, passes in (
        ("clone", [THREAD], True),
        ("clone", [PROCESS], False),
        ("prlimit64", [0, 7], True),
        ("prlimit64", [4711, 7], False),
        ("socketpair", [AF_UNIX, STREAM], True),
        ("socketpair", [AF_UNIX, DATAGRAM], False),
        ("socketpair", [AF_INET, STREAM], False),
        ("fcntl", [3, F_SETFL], True),
        ("fcntl", [3, F_SETOWN], False),
        ("ioctl", [3, NONBLOCK], True),
        ("ioctl", [3, 0x5412], False),  # TIOCSTI types into a terminal
    ):
        assert decision(steps, machine, number(call, machine), *arguments) == (ALLOW if passes else UNKNOWN), call


def test_new_threads_and_files_need_a_decision_of_the_supervisor(machine: Machine) -> None:
    steps = system_calls.counting(machine)
    for call, arguments, supervised in (
        ("clone", [THREAD], True),
        ("openat", [BIT_32, 0, READ], False),
        ("openat", [BIT_32, 0, CREATE], True),
        ("openat", [BIT_32, 0, TMPFILE], True),
        ("read", [0], False),
    ):
        assert decision(steps, machine, number(call, machine), *arguments) == (ASK if supervised else ALLOW), (
            call,
            arguments,
        )


def test_calls_of_another_architecture_kill() -> None:
    ours, theirs = MACHINES.values()
    for steps in (system_calls.allowing(ours), system_calls.counting(ours)):
        assert decision(steps, theirs, 0) == KILL


def test_the_numbers_are_those_of_the_kernel() -> None:
    """Some of each part of the table, as `asm/unistd_64.h` and `asm-generic/unistd.h` have them."""
    known = {"openat": (257, 56), "mmap": (9, 222), "clone": (56, 220), "futex": (202, 98), "ppoll": (271, 73)}
    assert {call: tuple(NUMBERS[call]) for call in known} == known
    for column in (0, 1):
        numbers = [pair[column] for pair in NUMBERS.values() if pair[column] is not None]
        assert len(set(numbers)) == len(numbers)
