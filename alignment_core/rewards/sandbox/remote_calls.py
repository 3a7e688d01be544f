"""Calls between two processes of which neither may look into the other: a program's, and that of the tests of it.

Plain values cross as they are; everything else stays where it was made and is called from there by its number. What the
tests expect never leaves their process: a result crosses to them, and they compare. **No value that the tests compare may
depend on what the program learnt of the value that it is compared with.** So no operator of an object of the program sends a
plain value of the tests there, as the other side of `==`, `<`, `-` or `in` is what they expect, or made of it; what they
send are arguments: of calls, in brackets, of assignments. What remains is the program's to say: whether two of its objects
are equal, and what its functions and methods answer. Loaded by a script in a sandbox, and so imports nothing of this
package.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import importlib
import json
import numbers
import operator
import os
import socket
import types
from collections.abc import Callable
from typing import Any

SERIES: dict[str, type] = {one.__name__: one for one in (list, tuple, set, frozenset, collections.deque)}
TABLES: dict[str, Callable[[Any], Any]] = {
    **{one.__name__: one for one in (dict, collections.OrderedDict, collections.Counter)},
    "defaultdict": lambda pairs: collections.defaultdict(None, pairs),
}
TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (hex, lambda text: int(text, 16)),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (repr, complex),
    fractions.Fraction: (str, fractions.Fraction),
    decimal.Decimal: (str, decimal.Decimal),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda d: f"{d // datetime.timedelta.resolution}",
        lambda text: datetime.timedelta(0, 0, int(text)),
    ),
}
OF_TEXT = {of.__name__: read for of, (_, read) in TEXTS.items()}
PLAIN: tuple[Any, ...] = (str, bytes, bytearray, int, float, complex, dict, list, tuple, set, frozenset)
CHANGEABLE = (list, dict, set, bytearray, collections.deque)

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
)
UNARY = ("neg", "invert", "index", "getitem", "setitem", "delitem")
OPERATORS: dict[str, Callable[..., Any]] = {
    f"__{name.rstrip('_')}__": getattr(operator, name) for name in (*COMPARISONS, *ARITHMETIC)
}
OPERATORS |= {
    f"__r{name.rstrip('_')}__": functools.partial(lambda of, a, b: of(b, a), getattr(operator, name))
    for name in ARITHMETIC
}
OPERATORS |= {f"__i{name.rstrip('_')}__": getattr(operator, f"i{name.rstrip('_')}") for name in ARITHMETIC}
OTHERS: dict[str, Callable[..., Any]] = {f"__{name}__": getattr(operator, name) for name in UNARY}
OTHERS |= {
    f"__{of.__name__}__": of
    for of in (bool, len, iter, next, reversed, hash, int, float, abs, round, str, repr, format)
}
OTHERS |= {
    "__enter__": lambda one: type(one).__enter__(one),
    "__exit__": lambda one, *error: type(one).__exit__(one, *error),
}


class Remote:
    """An object of the other process.

    It never learns what it is compared with, and cannot claim to equal it: with a plain value its operators work here, on its
    own plain value (of a class that derives from one of Python's), or not at all. ``in`` looks at what it iterates over.
    """

    _channel: Channel
    _number: int

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    @property  # type: ignore[misc]  # as the documentation of Python has it for what stands for another object
    def __class__(self) -> Any:
        try:
            return self._channel.class_named(*self._channel.ask("class", self))
        except AttributeError:  # closed
            return Remote

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):
            raise AttributeError(name)  # NumPy would read memory where the other side says that an array is
        return self._channel.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("set", self, name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._channel.ask("call", self, named, *given)

    def __enter__(self) -> Any:
        return self._channel.ask("special", self, "__enter__")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # whatever it answers: what went wrong in the tests is not for the program to suppress
        self._channel.ask("special", self, "__exit__", kind, error, None)

    def __instancecheck__(self, one: Any) -> bool:
        return type(one) is Remote and bool(self._channel.ask("isinstance", one, self))

    def __subclasscheck__(self, one: Any) -> bool:
        return type(one) is Remote and bool(self._channel.ask("issubclass", one, self))


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        return self._channel.ask("special", self, name, *operands)

    return method


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if type(other) is Remote:
            return self._channel.ask("special", self, name, other)
        value = _own_value(self)
        return NotImplemented if value is None else OPERATORS[name](value, other)

    return method


def _own_value(one: Remote) -> Any:
    """Plain value of an object, None without one. What cannot change is asked once: nothing is first above, then below."""
    if "_value" in one.__dict__:
        return one.__dict__["_value"]
    value = one._channel.ask("plain", one)
    if type(value) not in PLAIN:
        return None
    with contextlib.suppress(TypeError):
        hash(value)
        one.__dict__["_value"] = value
    return value


for _name in OTHERS.keys() - vars(Remote).keys():
    setattr(Remote, _name, _forward(_name))
for _name in OPERATORS:
    setattr(Remote, _name, _operator(_name))


class Channel:
    """One end. ``open_to`` says of an object of this side, and a name, whether the other may read and set that of it."""

    def __init__(self, end: socket.socket, open_to: Callable[[Any, str], bool]) -> None:
        self._file = end.makefile("rwb")
        self._open_to = open_to
        self._ours: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self._numbers: dict[type, int] = {}
        """Of exceptions that stand here for classes of the other side."""
        self._classes: dict[tuple[int, str], type] = {}

    def ask(self, action: str, *operands: Any) -> Any:
        """Have the other side do it. Raises what that raised; ends this process if it is gone."""
        self._write({"do": action, "with": [self._encoded(one) for one in operands]})
        while True:
            message = self._read()
            if "do" in message:
                self._serve(message)
                continue
            for index, now in message.get("left", []):
                _replace(operands[index], self._decoded(now))
            if "raised" in message:
                raise self._exception(*message["raised"])
            return self._decoded(message["gives"])

    def class_named(self, number: int, name: str, base: str) -> type:
        """What stands here for a class of the other side: of its name, and of Python's class that it derives from."""
        if (number, base) not in self._classes:
            try:
                self._classes[number, base] = type(name, (_type_named(base, object),), {})
            except TypeError:  # nothing can derive from it
                self._classes[number, base] = type(name, (), {})
        return self._classes[number, base]

    def keep(self, number: int, one: Any) -> None:
        """Let the other side call it by its number."""
        self._ours[number] = one

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while True:
            self._serve(self._read())

    def _serve(self, asked: dict[str, Any]) -> None:
        kind, number = asked["with"][0]
        if kind != "yours" or number not in self._ours:
            raise ValueError("the other side asks for what it was not given")
        operands = [self._decoded(one) for one in asked["with"]]
        try:
            answer = {"gives": self._encoded(self._done(asked["do"], *operands))}
        except Exception as error:
            answer = {"raised": self._told(error)}
        changed = [
            [place, now]
            for place, one in enumerate(operands)
            if type(one) in CHANGEABLE and (now := self._encoded(one)) != asked["with"][place]
        ]
        self._write({**answer, "left": changed} if changed else answer)

    def _done(self, action: str, target: Any, *operands: Any) -> Any:
        if action in ("get", "set") and not self._open_to(target, operands[0]):
            raise AttributeError(f"{operands[0]} is closed to the other side")
        if action == "get":
            return getattr(target, operands[0])
        if action == "set":
            return setattr(target, *operands)
        if action == "call":
            return target(*operands[1:], **operands[0])
        if action == "special":
            return {**OTHERS, **OPERATORS}[operands[0]](target, *operands[1:])
        if action == "class":
            if not self._open_to(target, "__class__"):
                raise AttributeError("closed to the other side")
            base = next(one for one in type(target).__mro__ if getattr(builtins, one.__name__, None) is one)
            return id(type(target)), type(target).__name__, base.__name__
        if action == "isinstance":
            return isinstance(operands[0], type) and isinstance(target, operands[0])
        if action == "issubclass":
            return issubclass(target, operands[0])
        return _plain(target)

    def _encoded(self, one: Any) -> Any:
        kind: Any = type(one)
        if one is None or kind in (bool, float, str) or (kind is int and abs(one) < 1 << 60):
            return one
        if kind in TEXTS:
            return [kind.__name__, TEXTS[kind][0](one)]
        if kind in SERIES.values():
            return [kind.__name__, [self._encoded(part) for part in one]]
        if kind.__name__ in TABLES and kind.__module__ in ("builtins", "collections"):
            return [kind.__name__, [[self._encoded(name), self._encoded(value)] for name, value in one.items()]]
        if kind in (range, slice):
            return [kind.__name__, [one.start, one.stop, one.step]]
        if kind is types.ModuleType:
            return ["module", one.__name__]
        if kind is Remote:
            return ["yours", one._number]
        if isinstance(one, type) and one in self._numbers:
            return ["yours", self._numbers[one]]
        if isinstance(one, Exception):
            return ["error", self._told(one)]
        name = one.__name__ if isinstance(one, type) else ""  # of no function: `exec` is one
        if getattr(builtins, name, ...) is one:
            return ["type", name]
        self.keep(id(one), one)
        if isinstance(one, type) and issubclass(one, Exception):
            bases = [each for each in one.__bases__ if issubclass(each, Exception)]
            return ["exception", [id(one), name, [self._encoded(each) for each in bases]]]
        return ["mine", id(one)]

    def _decoded(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, held = value
        if kind in OF_TEXT:
            return OF_TEXT[kind](held)
        if kind in SERIES:
            return SERIES[kind](self._decoded(part) for part in held)
        if kind in TABLES:
            return TABLES[kind]({self._decoded(name): self._decoded(value) for name, value in held})
        if kind in ("range", "slice"):
            return {"range": range, "slice": slice}[kind](*held)
        if kind == "module":
            return importlib.import_module(held)
        if kind == "type":
            return _type_named(held, object)
        if kind == "yours":
            return self._ours[held]
        if kind == "exception":
            return self._exception_class(*held)
        if kind == "error":
            return self._exception(*held)
        return self._theirs.setdefault(held, Remote(self, held))

    def _told(self, error: Exception) -> list[Any]:
        """Class, arguments, public fields and text of an exception."""
        if isinstance(error, AssertionError) and not self._open_to(error, "args"):
            error = AssertionError()  # those of the tests say what they expect
        fields = {name: self._encoded(value) for name, value in vars(error).items() if not name.startswith("_")}
        text = None if getattr(builtins, type(error).__name__, None) is type(error) else str(error)
        return [self._encoded(type(error)), [self._encoded(one) for one in error.args], fields, text]

    def _exception_class(self, number: int, name: str, bases: list[Any]) -> type:
        if number not in self._theirs:
            kinds = tuple(self._decoded(one) for one in bases)
            if not all(isinstance(one, type) and issubclass(one, Exception) for one in kinds):
                raise ValueError("what the other side raises is no exception")
            made = type(name, kinds, {"__str__": lambda self: vars(self).get("_text") or kinds[0].__str__(self)})
            self._theirs[number], self._numbers[made] = made, number
        return self._theirs[number]

    def _exception(self, kind: Any, given: list[Any], fields: dict[str, Any], text: str | None) -> Exception:
        of = self._decoded(kind)
        if not (isinstance(of, type) and issubclass(of, Exception)):
            raise ValueError("what the other side raised is no exception")
        arguments = [self._decoded(one) for one in given]
        found: Exception = (
            of.__new__(of, *arguments) if any(of is one for one in self._ours.values()) else of(*arguments)
        )
        vars(found).update({name: self._decoded(value) for name, value in fields.items()}, _text=text)
        return found

    def _write(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            os._exit(1)  # past every `except` of the tests
        return dict(json.loads(line))


def _type_named(name: str, kind: type) -> Any:
    found = getattr(builtins, name)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{name} is no {kind.__name__}")
    return found


def _plain(one: Any) -> Any:
    for of in PLAIN:
        if isinstance(one, of):
            return of(one)
    if isinstance(one, numbers.Integral):
        return int(one)
    return float(one) if isinstance(one, numbers.Real) else None


def _replace(one: Any, now: Any) -> None:
    """Give ``one`` the contents of ``now``, as the other side left its copy of it."""
    if type(one) not in CHANGEABLE or type(now) is not type(one):
        raise ValueError("the other side changed what cannot change")
    one.clear()
    (one.update if isinstance(one, dict | set) else one.extend)(now)


def answer_calls(end: socket.socket, names: dict[str, Any]) -> None:
    """Serve the program's ``names`` until the tests' process ends."""
    channel = Channel(end, lambda one, name: True)
    channel.keep(0, lambda: {name: one for name, one in names.items() if not name.startswith("__")})
    channel.serve()


def names_of_program(end: socket.socket, tests: str) -> dict[str, Any]:
    """What the program defined. It may see public fields of instances of classes of the module ``tests``, and no more."""
    channel = Channel(end, lambda one, name: type(one).__module__ == tests and not name.startswith("_"))
    return dict(Remote(channel, 0)())
