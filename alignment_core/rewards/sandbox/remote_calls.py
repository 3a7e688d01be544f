"""Calls between two processes of which neither may look into the other: a program's, and that of its tests.

Plain values cross as they are; any other object stays in its process, and the other one calls it by its number. The values that
tests expect never leave the tests' process: a result crosses to them, and they compare. **No value that the tests compare may
depend on anything that the program learnt of the value that it is compared with.** So no operator of an object of the program
sends a plain value of the tests there: the other side of `==`, `<`, `-` or `in` is the expected value, or made of it. The
tests send only arguments: of calls, in brackets, of assignments. The program itself decides only whether two of its objects are
equal, and what its functions and methods return. A script in a sandbox loads this module, so it imports nothing of ours.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import importlib
import json
import numbers
import operator
import os
import socket
import types
from collections.abc import Callable, Iterable
from typing import Any

CONTAINERS: dict[Any, tuple[Callable[[Any], Iterable[Any]], Callable[[list[Any]], Any]]] = {
    **{kind: (list, kind) for kind in (list, tuple, set, frozenset, collections.deque)},
    **{kind: (kind.items, kind) for kind in (dict, collections.OrderedDict)},
    collections.Counter: (collections.Counter.items, lambda pairs: collections.Counter(dict(pairs))),
    collections.defaultdict: (collections.defaultdict.items, lambda pairs: collections.defaultdict(None, pairs)),
}
"""Containers that cross as lists of their parts: how they are taken apart, and put together again."""
MICROSECOND = datetime.timedelta.resolution
TEXTS: dict[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (hex, lambda text: int(text, 16)),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    datetime.timedelta: (lambda span: str(span // MICROSECOND), lambda text: int(text) * MICROSECOND),
    **{kind: (str, kind) for kind in (complex, fractions.Fraction, decimal.Decimal)},
    **{kind: (str, kind.fromisoformat) for kind in (datetime.date, datetime.datetime, datetime.time)},
}
"""Plain values that cross as texts: their writers, and readers that check them."""
CONTAINER_READERS = {kind.__name__: reader for kind, (_, reader) in CONTAINERS.items()}
TEXT_READERS = {kind.__name__: reader for kind, (_, reader) in TEXTS.items()}
PLAIN: tuple[Any, ...] = (str, bytes, bytearray, int, float, complex, dict, list, tuple, set, frozenset)
CHANGEABLE = (list, dict, set, bytearray, collections.deque)

ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
CONVERSIONS = (bool, len, iter, next, reversed, hash, int, float, abs, round, str, repr, format)
_of_operator = {name: getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in ARITHMETIC}
OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__{name}__": of for name, of in _of_operator.items()},
    **{f"__r{name}__": lambda a, b, *, of=of: of(b, a) for name, of in _of_operator.items()},
    **{f"__i{name}__": getattr(operator, f"i{name}") for name in ARITHMETIC},
}
"""Special methods whose other operand may be an expected value."""
SPECIAL: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("neg", "invert", "index", "getitem", "setitem", "delitem")},
    **{f"__{of.__name__}__": of for of in CONVERSIONS},
    "__call__": lambda target, named, *given: target(*given, **named),
    "__enter__": lambda target: type(target).__enter__(target),
    "__exit__": lambda target, *error: type(target).__exit__(target, *error),
}
"""Special methods that the other side may call with any argument."""


class Remote:
    """An object of the other process.

    It never learns the values that it is compared with, and cannot claim to equal them: with a plain value its operators work
    here, on its own plain value (of a class that derives from one of Python's), or not at all. ``in`` iterates over it.
    """

    _channel: Channel
    _number: int

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    @property  # type: ignore[misc]  # as Python's documentation has it for objects that represent others
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
        return self._channel.ask("__call__", self, named, *given)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # without its answer: the program must not suppress errors of the tests
        self._channel.ask("__exit__", self, kind, error, None)

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and bool(self._channel.ask("isinstance", instance, self))

    def __subclasscheck__(self, kind: Any) -> bool:
        return type(kind) is Remote and bool(self._channel.ask("issubclass", kind, self))


def _special(name: str) -> Callable[..., Any]:
    def method(self: Remote, *operands: Any) -> Any:
        return self._channel.ask(name, self, *operands)

    return method


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if type(other) is Remote:
            return self._channel.ask(name, self, other)
        value = _own_value(self)
        return NotImplemented if value is None else OPERATORS[name](value, other)

    return method


def _own_value(remote: Remote) -> Any:
    """Plain value of an object, None without one. An immutable one is asked for once: no object is first above, then below."""
    if "_value" in remote.__dict__:
        return remote.__dict__["_value"]
    value = remote._channel.ask("plain", remote)
    if type(value) not in PLAIN:
        return None
    with contextlib.suppress(TypeError):
        hash(value)
        remote.__dict__["_value"] = value
    return value


for _name in SPECIAL.keys() - vars(Remote).keys():
    setattr(Remote, _name, _special(_name))
for _name in OPERATORS:
    setattr(Remote, _name, _operator(_name))


class Channel:
    """One end. ``open_to`` tells whether the other side may read and set an attribute of an object of this side."""

    def __init__(self, end: socket.socket, open_to: Callable[[Any, str], bool]) -> None:
        self._file = end.makefile("rwb")
        self._open_to = open_to
        self._ours: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self._numbers: dict[type, int] = {}
        """Numbers of the other side's classes, by the exceptions that represent them here."""
        self._classes: dict[tuple[int, str], type] = {}

    def ask(self, action: str, *operands: Any) -> Any:
        """Have the other side do it. Raises the error that this raised there; ends this process if the other one is gone."""
        self._write({"do": action, "with": [self._encoded(operand) for operand in operands]})
        while "do" in (message := self._read()):
            self._serve(message)
        for index, now in message.get("left", []):
            _replace(operands[index], self._decoded(now))
        if "raised" in message:
            raise self._exception(*message["raised"])
        return self._decoded(message["gives"])

    def class_named(self, number: int, name: str, base: str) -> type:
        """A class that represents one of the other side: of its name, and of Python's class that it derives from."""
        if (number, base) not in self._classes:
            try:
                self._classes[number, base] = type(name, (_type_named(base),), {})
            except TypeError:  # nothing can derive from it
                self._classes[number, base] = type(name, (), {})
        return self._classes[number, base]

    def keep(self, number: int, value: Any) -> None:
        """Let the other side call an object by its number."""
        self._ours[number] = value

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while True:
            self._serve(self._read())

    def _serve(self, request: dict[str, Any]) -> None:
        kind, number = request["with"][0]
        if kind != "yours" or number not in self._ours:
            raise ValueError("the other side names an object that it was not given")
        operands = [self._decoded(operand) for operand in request["with"]]
        try:
            answer = {"gives": self._encoded(self._done(request["do"], *operands))}
        except Exception as error:
            answer = {"raised": self._described(error)}
        changed = [
            [place, now]
            for place, operand in enumerate(operands)
            if type(operand) in CHANGEABLE and (now := self._encoded(operand)) != request["with"][place]
        ]
        self._write({**answer, "left": changed} if changed else answer)

    def _done(self, action: str, target: Any, *operands: Any) -> Any:
        attribute = {"get": operands[:1], "set": operands[:1], "class": ("__class__",)}.get(action)
        if attribute and not self._open_to(target, attribute[0]):
            raise AttributeError(f"{attribute[0]} is closed to the other side")
        return ACTIONS[action](target, *operands)

    def _encoded(self, value: Any) -> Any:
        kind: Any = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 1 << 60):
            return value
        if kind in TEXTS:
            return [kind.__name__, TEXTS[kind][0](value)]
        if kind in CONTAINERS:
            return [kind.__name__, [self._encoded(part) for part in CONTAINERS[kind][0](value)]]
        if kind in (range, slice):
            return [kind.__name__, [value.start, value.stop, value.step]]
        if kind is types.ModuleType:
            return ["module", value.__name__]
        if kind is Remote:
            return ["yours", value._number]
        if isinstance(value, type) and value in self._numbers:
            return ["yours", self._numbers[value]]
        if isinstance(value, Exception):
            return ["error", self._described(value)]
        name = value.__name__ if isinstance(value, type) else ""  # of no function: `exec` is one
        if getattr(builtins, name, ...) is value:
            return ["type", name]
        self.keep(id(value), value)
        if isinstance(value, type) and issubclass(value, Exception):
            bases = [base for base in value.__bases__ if issubclass(base, Exception)]
            return ["exception", [id(value), name, [self._encoded(base) for base in bases]]]
        return ["mine", id(value)]

    def _decoded(self, encoded: Any) -> Any:
        if not isinstance(encoded, list):
            return encoded
        kind, content = encoded
        if kind in TEXT_READERS:  # of what JSON holds: an object that the other side made up is no text
            return TEXT_READERS[kind](content)
        if kind in CONTAINER_READERS:
            return CONTAINER_READERS[kind]([self._decoded(part) for part in content])
        if kind in ("range", "slice"):
            return {"range": range, "slice": slice}[kind](*content)
        if kind == "module":
            return importlib.import_module(content)
        if kind == "type":
            return _type_named(content)
        if kind == "yours":
            return self._ours[content]
        if kind == "exception":
            return self._exception_class(*content)
        if kind == "error":
            return self._exception(*content)
        return self._theirs.setdefault(content, Remote(self, content))

    def _described(self, error: Exception) -> list[Any]:
        """Class, arguments, public fields and text of an exception."""
        if isinstance(error, AssertionError) and not self._open_to(error, "args"):
            error = AssertionError()  # those of the tests have expected values
        fields = {name: self._encoded(value) for name, value in vars(error).items() if not name.startswith("_")}
        text = None if getattr(builtins, type(error).__name__, None) is type(error) else str(error)
        return [self._encoded(type(error)), [self._encoded(value) for value in error.args], fields, text]

    def _exception_class(self, number: int, name: str, bases: list[Any]) -> type:
        if number not in self._theirs:
            kinds = tuple(_exceptions(self._decoded(base)) for base in bases)
            kind = type(name, kinds, {"__str__": lambda self: vars(self).get("_text") or kinds[0].__str__(self)})
            self._theirs[number] = kind
            self._numbers[kind] = number
        return self._theirs[number]

    def _exception(self, kind: Any, given: list[Any], fields: dict[str, Any], text: str | None) -> Exception:
        of = _exceptions(self._decoded(kind))
        arguments = [self._decoded(value) for value in given]
        is_ours = any(of is value for value in self._ours.values())
        error: Exception = of.__new__(of, *arguments) if is_ours else of(*arguments)
        vars(error).update({name: self._decoded(value) for name, value in fields.items()}, _text=text)
        return error

    def _write(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            os._exit(1)  # past every `except` of the tests
        return dict(json.loads(line))


def _exceptions(kind: Any) -> Any:
    """The class, if it is one of exceptions. Raises ValueError."""
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise ValueError("the other side raised something that is not an exception")
    return kind


def _type_named(name: str) -> Any:
    value = getattr(builtins, name)
    if not isinstance(value, type):
        raise ValueError(f"{name} is not a class")
    return value


def _plain(value: Any) -> Any:
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


def _class_of(value: Any) -> tuple[int, str, str]:
    base = next(kind for kind in type(value).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    return id(type(value)), type(value).__name__, base.__name__


ACTIONS: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    **SPECIAL,
    "get": lambda target, name: getattr(target, name),
    "set": setattr,
    "class": _class_of,
    "plain": _plain,
    "isinstance": lambda value, kind: isinstance(kind, type) and isinstance(value, kind),
    "issubclass": issubclass,
}
"""All that one side may have the other do with an object of the latter."""


def _replace(value: Any, now: Any) -> None:
    """Give ``value`` the contents of ``now``, its copy as the other side left it."""
    if type(value) not in CHANGEABLE or type(now) is not type(value):
        raise ValueError("the other side changed an immutable value")
    value.clear()
    (value.update if isinstance(value, dict | set) else value.extend)(now)


def answer_calls(end: socket.socket, names: dict[str, Any]) -> None:
    """Serve the program's ``names`` until the tests' process ends."""
    channel = Channel(end, lambda value, name: True)
    channel.keep(0, lambda: {name: value for name, value in names.items() if not name.startswith("__")})
    channel.serve()


def names_of_program(end: socket.socket, tests: str) -> dict[str, Any]:
    """The program's names. It may see public fields of instances of classes of the module ``tests``, and no more."""
    channel = Channel(end, lambda value, name: type(value).__module__ == tests and not name.startswith("_"))
    return dict(Remote(channel, 0)())
