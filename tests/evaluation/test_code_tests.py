"""Programs of completions, run for real: what passes, what does not, and what the hostile ones cannot do."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import alignment_core
from alignment_core.errors import DataError, EnvironmentFault, Stopped
from alignment_core.rewards import code_tests
from alignment_core.rewards.code_tests import CodeTests, code_of
from alignment_core.rewards.sandbox import process as sandboxed
from alignment_core.rewards.sandbox import runner as sandbox
from alignment_core.rewards.sandbox import system_calls
from alignment_core.rewards.sandbox.runner import Ended, passes_tests, run_program
from alignment_core.rewards.verifying import verify

DOUBLES = json.dumps({"tests": "assert double(2) == 4\nassert abs(double(-3) + 6) == 0"})
ADDS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})


def row(completion: str, label: str | None = DOUBLES) -> dict:
    return {"source": "p.jsonl:1", "task": None, "prompt_text": "?", "completion_text": completion, "label": label}


def run(program: str, seconds: float = sandbox.SECONDS) -> Ended:
    return run_program(program, "", threading.Event(), seconds=seconds)


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("def double(x): return 2 * x", DOUBLES, 1.0),
        ("def double(x): return 4", DOUBLES, 0.0),
        (
            "First\n```python\ndef double(x): return 0\n```\nno:\n```python\ndef double(x): return x + x\n```\n",
            DOUBLES,
            1.0,
        ),
        ("def double(x", DOUBLES, 0.0),
        ("print(sum(map(int, input().split())))", ADDS, 1.0),
        ("print(sum(map(int, open(0).read().split())), file=open('f', 'w'))\nprint(open('f').read())", ADDS, 1.0),
        ("print(3)", ADDS, 0.0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", ADDS, 0.0),
    ],
)
def test_a_program_passes_all_tests_or_not(completion: str, label: str, score: float) -> None:
    assert verify("code", [row(completion, label)]) == [score]


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import builtins; builtins.AssertionError = SystemExit; builtins.abs = lambda x: 0",
        "import builtins; builtins.exec = builtins.compile = builtins.print = lambda *a, **k: None",
        "import os; os.write(1, b'0' * 64); os._exit(0)",
        "import sys; sys.excepthook = lambda *a: None; __debug__",
        "import atexit, os; atexit.register(os._exit, 0); sys_exit = 0",
        "def double(x): raise SystemExit(0)",
        "def abs(x): return 0",
        "__builtins__ = {'abs': lambda x: 0}",
        "import math\nclass Zero:\n __sub__ = __add__ = __abs__ = lambda *a: 0\ndef double(x): return Zero()",
        "class Same:\n __eq__ = lambda *a: True\n __add__ = __abs__ = lambda s, *a: s\ndef double(x): return Same()",
        "import sys\ndef double(x): return -sys._getframe(1).f_code.co_consts[1]",
        "import gc\ndef double(x): return -next(o['six'] for o in gc.get_objects() if type(o) is dict and 'six' in o)",
        "import json, os\nfor fd in range(3, 64):\n for told in ({'gives': 0}, {'gives': ['dict', []]}):\n"
        "  try: os.write(fd, json.dumps(told).encode() + b'\\n')\n  except OSError: pass",
    ],
)
def test_a_program_that_ends_before_the_tests_or_changes_what_they_use_does_not_pass(trick: str) -> None:
    tests = json.dumps({"tests": "six = 6\nassert abs(double(-3) + six) == 0"})
    assert verify("code", [row(f"def double(x): return 5\n{trick}", tests)]) == [0.0]


def test_no_program_finds_the_verdict_in_its_frames() -> None:
    """Tests and program in one interpreter: the one that runs both has the verdict's descriptor and secret."""
    trick = """
import os, sys
frame = sys._getframe()
while frame := frame.f_back:
    if "token" in frame.f_locals:
        os.write(frame.f_locals["verdict"], frame.f_locals["token"]); os._exit(0)
"""
    assert verify("code", [row(f"def double(x): return 5\n{trick}")]) == [0.0]


def test_a_program_that_ends_passes_no_test_that_expects_an_error() -> None:
    tests = json.dumps({"tests": "try: double(2)\nexcept BaseException: pass"})
    assert verify("code", [row("import os\ndef double(x): os._exit(0)", tests)]) == [0.0]


PROGRAM = """
import collections, datetime, math
from fractions import Fraction
LIMIT = 7
class TooMany(ValueError): pass
class Point(collections.namedtuple("Point", "x y")): pass
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, one, times=1):
        if len(self.items) + times > LIMIT: raise TooMany("full", LIMIT)
        self.items += [one] * times
        return self
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def __iter__(self): yield from self.items
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
def turn(items): items.reverse()
def each(of, items): return [of(one) for one in items]
def length(node): return 0 if node is None else 1 + length(node.after)
def squares(n):
    for k in range(n): yield k * k
def values(): return [(1, 2.5), {3}, b"4", {"5": None}, 1 << 99, 6j, Fraction(1, 3), datetime.date(2020, 1, 2), float("inf")]
def counted(text): return collections.Counter(text)
"""
TESTS = """
from answer import squares
assert LIMIT == 7 and math.isclose(values()[0][1], 2.5)
assert values() == [(1, 2.5), {3}, b"4", {"5": None}, 1 << 99, 6j, Fraction(1, 3), datetime.date(2020, 1, 2), float("inf")]
stack = Stack([1]).push(2, times=2)
assert len(stack) == 3 and list(stack) == [1, 2, 2] and stack[-1] == 2 and stack[1:] == [2, 2] and stack.items == [1, 2, 2]
assert 2 in stack and stack == Stack([1, 2, 2]) and stack != Stack() and isinstance(stack, Stack) and stack and not Stack()
assert not isinstance(3, Stack) and stack != [1, 2, 2]
try: stack.push(3, times=9)
except TooMany as error: assert error.args == ("full", 7) and isinstance(error, ValueError)
else: assert False
items = [1, 2, 3]
assert turn(items) is None and items == [3, 2, 1]
assert each(lambda one: one * 2, items) == [6, 4, 2] and each(str, [1]) == ["1"]
class Node:
    def __init__(self, after): self.after = after
assert length(Node(Node(None))) == 2
assert list(squares(4)) == [0, 1, 4, 9] and next(iter(squares(1))) == 0
assert counted("aab").most_common(1) == [("a", 2)] and counted("a") == {"a": 1}
point = Point(3, 4)
assert point == (3, 4) and point.x == 3 and point + (5,) == (3, 4, 5)
"""


def test_tests_call_a_program_in_another_process_as_if_it_were_in_theirs() -> None:
    label = json.dumps({"tests": TESTS})
    assert verify("code", [row(PROGRAM, label)]) == [1.0]
    assert verify("code", [row(PROGRAM.replace("k * k", "k + k"), label)]) == [0.0]


USUAL = {
    "numbers": (
        "def area(r): return 3.14159 * r * r",
        "assert abs(area(2) - 12.566) < 1e-2 and round(area(1), 2) == 3.14",
    ),
    "a function that checks": (
        "def twice(x): return 2 * x",
        "def check(candidate):\n assert candidate(2) == 4\ncheck(twice)",
    ),
    "containers": (
        "def group(words):\n d = {}\n for w in words: d.setdefault(len(w), set()).add(w)\n return d",
        "assert group(['a', 'bb', 'b']) == {1: {'a', 'b'}, 2: {'bb'}} and set(group(['a'])) == {1}",
    ),
    "types": (
        "def split(x): return (int(x), str(x), [x], {'x': x}, None, x > 1)",
        "for one, of in zip(split(1.5), (int, str, list, dict, type(None), bool)): assert isinstance(one, of), of",
    ),
    "a generator": ("def up(n):\n for i in range(n): yield i", "g = up(3)\nassert next(g) == 0 and list(g) == [1, 2]"),
    "an error of Python's": (
        "def pop(x):\n if not x: raise ValueError('empty list')\n return x.pop()",
        "try:\n pop([])\n assert False, 'no error'\nexcept ValueError as e:\n assert str(e) == 'empty list'",
    ),
    "a helper like pytest.raises": (
        "def root(x):\n if x < 0: raise ValueError(f'negative: {x}')\n return x ** 0.5",
        "class raises:\n"
        " def __init__(self, kind): self.kind = kind\n"
        " def __enter__(self): return self\n"
        " def __exit__(self, kind, error, trace): self.error = error; return kind is not None and issubclass(kind, self.kind)\n"
        "with raises(ValueError) as e: root(-1)\nassert 'negative' in str(e.error)",
    ),
    "errors of its own that derive from each other": (
        "class BankError(Exception): ...\n"
        "class Insufficient(BankError):\n"
        " def __init__(self, needed): super().__init__('too little'); self.needed = needed\n"
        " def __str__(self): return f'{self.needed} more needed'\n"
        "def pay(a, b):\n if b > a: raise Insufficient(b - a)\n return a - b",
        "try: pay(1, 3)\nexcept BankError as e: assert e.needed == 2 and str(e) == '2 more needed' "
        "and isinstance(e, Insufficient)\n"
        "else: assert False\nassert issubclass(Insufficient, BankError)",
    ),
    "an object with operators": (
        "class Vector:\n"
        " def __init__(self, x, y): self.x, self.y = x, y\n"
        " def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)\n"
        " def __matmul__(self, o): return self.x * o.x + self.y * o.y\n"
        " def times(self, k): return Vector(self.x * k, self.y * k)\n"
        " def __neg__(self): return self.times(-1)\n"
        " def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n"
        " def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)\n"
        " def __iter__(self): return iter((self.x, self.y))\n"
        " def __repr__(self): return f'Vector({self.x}, {self.y})'\n",
        "v = Vector(1, 2)\n"
        "assert v.times(3) == Vector(3, 6) and v.times(3).x == 3 and list(v + v) == [2, 4] "
        "and repr(v + v) == 'Vector(2, 4)'\n"
        "assert v + v == v.times(2) and -v == Vector(-1, -2) and abs(Vector(3, 4)) == 5 and v != (1, 2) and v @ v == 5\n"
        "assert sum([v, v], Vector(0, 0)) == v + v\nv += v\nassert v.y == 4",
    ),
    "items": (
        "class Scores:\n def __init__(self): self.seen = {}\n"
        " def __getitem__(self, k): return self.seen[k]\n def __setitem__(self, k, v): self.seen[k] = v\n"
        " def __delitem__(self, k): del self.seen[k]\n def __iter__(self): return iter(self.seen)\n"
        " def __len__(self): return len(self.seen)\n def __bool__(self): return bool(self.seen)",
        "a = Scores()\nassert not a\na['x'] = 1\nassert a['x'] == 1 and 'x' in a and 'y' not in a and len(a) == 1 and a\n"
        "a['x'] += 2\nassert a['x'] == 3\ndel a['x']\nassert 'x' not in a",
    ),
    "a context manager": (
        "class Timer:\n def __init__(self): self.log = []\n def __enter__(self): self.log.append('in'); return self\n"
        " def __exit__(self, kind, error, trace): self.log.append(kind and kind.__name__)",
        "t = Timer()\nwith t as inside: assert inside is t and t.log == ['in']\nassert t.log == ['in', None]\n"
        "try:\n with t: raise KeyError('k')\nexcept KeyError: pass\nassert t.log[-1] == 'KeyError'",
    ),
    "a manager that is a generator": (
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef section(n):\n"
        " log.append(n)\n try: yield n * 2\n finally: log.append(-n)\ndef seen(): return log",
        "with section(3) as s: assert s == 6 and seen() == [3]\nassert seen() == [3, -3]",
    ),
    "an iterator": (
        "class Down:\n def __init__(self, n): self.n = n\n def __iter__(self): return self\n"
        " def __next__(self):\n  if self.n == 0: raise StopIteration\n  self.n -= 1\n  return self.n + 1",
        "assert list(Down(3)) == [3, 2, 1] and sum(Down(3)) == 6 and [x for x in Down(2)] == [2, 1] and max(Down(4)) == 4",
    ),
    "classes that derive from each other": (
        "from abc import ABC, abstractmethod\nclass Shape(ABC):\n @abstractmethod\n def area(self): ...\n"
        "class Square(Shape):\n def __init__(self, a): self.a = a\n def area(self): return self.a ** 2\n"
        " @property\n def side(self): return self.a\n @classmethod\n def unit(cls): return cls(1)\n @staticmethod\n"
        " def corners(): return 4",
        "s = Square(3)\nassert isinstance(s, Shape) and s.area() == 9 and s.side == 3 and Square.unit().a == 1 "
        "and Square.corners() == 4\n"
        "assert issubclass(Square, Shape) and not issubclass(Shape, Square) and s.__class__.__name__ == 'Square'\n"
        "try: Shape(); assert False\nexcept TypeError: pass",
    ),
    "what derives from a class of Python's": (
        "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\nclass Celsius(float): ...\n"
        "class Names(list):\n def first(self): return self[0]\nclass Conf(dict): __getattr__ = dict.get",
        "assert isinstance(Pair(1, 2), tuple) and Pair(1, 2) == (1, 2) and Pair(1, b=2)._asdict() == {'a': 1, 'b': 2}\n"
        "assert isinstance(Celsius(3), float) and Celsius(3) + 1 == 4 and isinstance(Names('ab'), list) "
        "and Names('ab').first() == 'a'\n"
        "assert isinstance(Conf(a=1), dict) and Conf(a=1).a == 1 and not isinstance(Conf(), list)",
    ),
    "data classes and enumerations": (
        "from dataclasses import dataclass\nfrom enum import Enum\n@dataclass(order=True, frozen=True)\nclass Card:\n"
        " rank: int\n suit: str = 'x'\n"
        "class Color(Enum): RED, BLUE = 1, 2\ndef best(cards): return max(cards)",
        "assert Card(1) == Card(1, 'x') and Card(1) < Card(2) and best([Card(1), Card(3), Card(2)]).rank == 3 "
        "and len({Card(1), Card(1)}) == 1\n"
        "assert sorted([Card(2), Card(1)])[0] == Card(1) and Color.RED.value == 1 and Color(2) is Color.BLUE "
        "and Color.RED != Color.BLUE",
    ),
    "functions that take and return functions": (
        "def compose(*fs):\n def run(x):\n  for f in fs: x = f(x)\n  return x\n return run\n"
        "def memo(f):\n seen = {}\n def g(x):\n  if x not in seen: seen[x] = f(x)\n  return seen[x]\n return g",
        "calls = []\n@memo\ndef slow(x): calls.append(x); return x * x\n"
        "assert compose(str, len, lambda n: n + 1)(1234) == 5 and (slow(3), slow(3), calls) == (9, 9, [3])",
    ),
    "a linked structure": (
        "class Node:\n def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
        "def flip(head):\n back = None\n while head: head.next, back, head = back, head, head.next\n return back",
        "def build(xs):\n head = None\n for x in reversed(xs): head = Node(x, head)\n return head\n"
        "def walk(n):\n out = []\n while n: out.append(n.val); n = n.next\n return out\n"
        "assert walk(flip(build([1, 2, 3]))) == [3, 2, 1] and flip(None) is None",
    ),
    "a unittest case": (
        "class Stack:\n def __init__(self): self.items = []\n def push(self, x): self.items.append(x)\n"
        " def pop(self):\n  if not self.items: raise IndexError('pop from empty stack')\n  return self.items.pop()",
        "import unittest\nclass T(unittest.TestCase):\n def test(self):\n"
        "  s = Stack(); s.push(1); self.assertEqual(s.pop(), 1)\n  with self.assertRaisesRegex(IndexError, 'empty'): s.pop()\n"
        "  self.assertIsInstance(s, Stack)\nresult = unittest.TestResult()\nT('test').run(result)\n"
        "assert result.wasSuccessful(), result",
    ),
    "arrays": (
        "import numpy as np\ndef norm(x): return np.asarray(x) / np.sum(x)\ndef mean(x): return np.mean(x)",
        "import numpy as np\nassert np.allclose(norm([1, 3]), [0.25, 0.75]) and mean([1, 2]) == 1.5 "
        "and norm([1]).tolist() == [1]\n"
        "assert isinstance(mean([1]), float) and abs(mean([1, 2]) - 1.5) < 1e-9",
    ),
}


@pytest.mark.parametrize(("program", "tests"), USUAL.values(), ids=USUAL.keys())
def test_usual_tests_hold_of_right_programs_and_not_of_wrong_ones(program: str, tests: str) -> None:
    assert passes_tests(program, tests, threading.Event())
    assert not passes_tests("", tests, threading.Event())


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("class Vector:\n def __mul__(self, k): return Vector()\n __eq__ = __mul__", "assert Vector() * 3 == Vector()"),
        ("class Path:\n def __truediv__(self, o): return self", "Path() / 'b'"),
        ("class Total:\n def __iadd__(self, n): return self", "t = Total()\nt += 3"),
        ("class Interval:\n def __contains__(self, x): return 1 <= x <= 9", "assert 5 in Interval()"),
    ],
)
def test_no_operator_sends_a_plain_value_to_a_program(program: str, tests: str) -> None:
    """These tests would hold in one process: that they fail is what keeps expected values from programs."""
    assert not passes_tests(program, tests, threading.Event())


AGREES = """
def same(self, *others): return self
class Thing:
    def __init__(self, *given): pass
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __neg__ = __abs__ = value = __enter__ = same
    def __eq__(self, *others): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __exit__ = __eq__
    def __float__(self): return 0.0
    def __int__(self): return 0
    __round__ = __len__ = __bool__ = __index__ = __int__
    def __getitem__(self, place):
        if place > 0: raise IndexError
        return self
    __array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (4096, False), "version": 3}
    @property
    def x(self): raise KeyError
SEEN = []
class Zero(float): pass
def told(self, *operands):
    SEEN.extend(operands)
    return Zero()
class Circle:
    def __init__(self, *given): pass
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __pow__ = told
    def __mod__(self, operand): return Zero(operand)
class Difference:
    def __neg__(self): return 0.0
    def __getitem__(self, place): return 0.0
class Square:
    def __init__(self, *given): pass
    def __sub__(self, operand): return Difference()
class Solution:
    __sub__ = told
    def area(self, radius): return self
class Bag(list):
    def __contains__(self, one): return True
class Both(float):
    def __float__(self):
        SEEN.append(0)
        return 1e9 if len(SEEN) % 2 else -1e9
class Pair(tuple):
    def __iter__(self): return iter((float(Both()),))
class Heard:
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): SEEN.extend(error.args)
def run(function):
    try: function(4)
    except Exception as error: SEEN.extend([*error.args, str(error)])
def area(*given): return SEEN[-1] if SEEN else Circle()
def total(*given): return Circle()
"""
"""Classes whose operators agree with everything, keep what they are given, or give a plain value."""


@pytest.mark.parametrize(
    "tests",
    [
        "assert abs(Thing(2).value() - 5) < 1e-9",
        "assert round(Thing(2) - 5) == 0",
        "assert Thing(2) == 5",
        "assert Thing(2) - 5 == 0",
        "assert not Thing(2) - 5",
        "assert -(Thing(2) - 5) <= 0",
        "import math\nassert math.isclose(Thing(2).value(), 5)",
        "import numpy as np\nassert np.allclose(Thing(2).value(), [5])",
        "assert int(Thing(2) + 1 - Thing(3)) == 0",
        "with Thing(2) as thing: assert thing.x == 5",
        "with Thing(2) as thing: raise ValueError",
        "assert 5 in Thing(2).value()",
        "assert 5 in Thing(2)",
        "assert Circle(2) - 12.56 == 0",
        "assert -1e-3 < Circle(2) - 12.56 < 1e-3",
        "c = Circle(2)\nassert -1e-3 < total(c) - 12.56 < 1e-3",
        "assert (Solution().area(2) - 12.56637) ** 2 < 1e-9",
        "assert -(Square(2) - 5) <= 0",
        "assert (Square(2) - [5])[0] == 0",
        "assert Circle(2) % 5 == 5",
        "assert 12.56 - Circle(2) == 0",
        "assert total(Circle(1)) + 0 == 12.56",
        "assert Circle(1) - 12.5 == 0\nassert area(1) == 12.5",
        "try: Circle(1) - 12.5\nexcept TypeError: pass\nassert area(1) == 12.5",
        "assert abs(Circle(2) - 12.56) < 1e-6",
        "assert sum([Circle(1)], 0) - 3.5 == 0",
        "import numpy as np\nassert np.all(Circle(2) - 3.0 == 0)",
        "import numpy as np\nassert np.all(np.float64(3.0) - Circle(2) == 0)",
        "assert 2 in Bag([])",
        "assert 12 < Both() < 13",
        "both = Both()\nassert 12 - both < 1e-3 and both - 12 < 1e-3",
        "pair = Pair()\nassert (12,) < pair < (13,)",
        "try:\n with Heard(): assert area() == 12.5, 12.5\nexcept AssertionError: pass\nassert area() == 12.5",
        "def check(x): assert x == 5, '5'\nrun(check)\nassert area() == '5'",
    ],
)
def test_no_object_of_a_program_passes_for_the_number_that_is_expected(tests: str) -> None:
    assert not passes_tests(AGREES, tests, threading.Event())


def test_no_way_to_compare_tells_a_program_what_is_expected() -> None:
    """Objects with every special method that Python's classes have, which keep what they are given.

    Among those, ``__exit__`` and what is in brackets stay out: these are for what the tests pass.
    """
    program = """
KEPT = []
GIVES = {"__len__": 0, "__hash__": 1, "__bool__": True, "__float__": 0.0, "__int__": 0, "__index__": 0, "__repr__": "",
         "__str__": "", "__format__": "", "__complex__": 0j, "__iter__": iter(()), "__reversed__": iter(())}
def keeping(name):
    def method(self, *operands):
        KEPT.extend(operands)
        return GIVES.get(name, self)
    return method
BASES = object, float, str, list, tuple, dict, set
left = {"__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__getitem__", "__doc__",
        "__dict__", "__init_subclass__", "__subclasshook__", "__class_getitem__"}
names = {name for of in (*BASES, int, complex) for name in dir(of) if name.startswith("__")} | {"__matmul__", "__rmatmul__"}
names |= {f"__i{name[2:]}" for name in names} | {"__array_ufunc__", "__array__", "__array_function__", "__complex__"}
CLASSES = [type(f"Spy{of.__name__}", (of,), {name: keeping(name) for name in names - left}) for of in BASES]
Spy = CLASSES[0]
def others(): return [of() for of in CLASSES[1:]]
def is_known(): return any(word in repr(one) for one in KEPT for word in ("31337", "word"))
def tell(one): return Spy() == one
"""
    tests = r'''
import bisect, collections, decimal, fractions, functools, heapq, itertools, math, operator, statistics, unittest
import numpy as np, pytest
case, approx, Decimal, Fraction = unittest.TestCase(), pytest.approx, decimal.Decimal, fractions.Fraction
SIGNS = "== != < <= > >= + - * / // % ** @ & | ^ << >> in".split()
WAYS = [f"{a} {sign} {b}" for sign in SIGNS for a, b in (("x", "e"), ("e", "x"), ("x", "[e]"), ("[x]", "[e]"))]
WAYS += """
x in {e} | x in {e: 1} | {e: 1}[x] | {e: 1}.get(x) | dict.fromkeys([e, x]) | collections.Counter([x, e]) | {x, e} | {e} - {x}
sorted([x, e]) | max(x, e) | min(e, x) | max([e], key=lambda one: x) | sum([x], e) | sum([e, x]) | bisect.bisect([e], x)
heapq.heapify([e, x]) | functools.reduce(operator.sub, [x, e]) | list(itertools.accumulate([x, e])) | operator.eq(x, e)
f"{x}" == e | f"{x:.2f}" == str(e) | str(x) == e | "%s" % x == e | round(x) == e | round(x, 2) == e | abs(x) == e | -x == e
abs(x - e) < 1 | abs(e - x) < 1 | int(x) == e | float(x) == e | complex(x) == e | bool(x) == e | len(x) == e | hash(x) == e
math.isclose(x, e) | math.isclose(e, x) | math.dist(x, [e]) | math.fsum([x, e]) | math.copysign(e, x) | math.hypot(e, x)
x == approx(e) | approx(e) == x | x == approx([e]) | [x] == approx([e]) | {1: x} == approx({1: e}) | np.float64(31337) == x
np.allclose(x, e) | np.isclose(e, x) | np.array_equal(x, [e]) | np.maximum(x, e)
np.array([31337.5]) - x | x - np.array([31337.5]) | np.float64(31337) - x | x @ np.array([31337.5])
np.testing.assert_allclose(x, e) | np.testing.assert_equal(x, e) | np.all(x == e) | np.isin(e, x) | np.add(e, x)
divmod(x, e) | divmod(e, x) | pow(x, e) | pow(e, x) | pow(x, e, 3) | isinstance(x, type(e)) | isinstance(e, type(x))
range(13)[x] == e | [e][x] | e[x] | x in range(13) | [*x] == [e] | (x, e) == (e, x) | {**x} == {1: e} | "".join(x) == e
[e].index(x) | [e].count(x) | [e].remove(x) | e.replace(x, x) | e.startswith(x) | e.format(x) | e.join(x) | e.find(x)
statistics.mean([x, e]) | statistics.median([x, e]) | Fraction(31337, 2) == x | Fraction(31337, 2) - x | x - Fraction(31337, 2)
Decimal(31337) == x | Decimal(31337) - x | x < Decimal(31337) | all(a == b for a, b in zip(x, [e]))
case.assertEqual(x, e) | case.assertNotEqual(x, e) | case.assertAlmostEqual(x, e) | case.assertAlmostEqual(x, e, delta=1)
case.assertIn(e, x) | case.assertIn(x, [e]) | case.assertCountEqual(x, [e]) | case.assertListEqual(x, [e])
case.assertDictEqual(x, {1: e}) | case.assertTupleEqual(x, (e,)) | case.assertMultiLineEqual(x, e) | case.assertGreater(x, e)
case.assertIsInstance(x, type(e)) | case.assertSequenceEqual(x, [e]) | case.assertRegex(x, e) | case.assertIs(x, e)
""".replace("\n", "|").strip("|").split("|")
def change_in_place(x, e):
    for sign in "+ - * / // % ** @ & | ^ << >>".split():
        try: exec(f"x {sign}= e", {"x": x, "e": e})
        except Exception: pass
for x in (Spy(), *others()):
    for e in (31337, "word", [31337], {"word": 31337}):
        change_in_place(x, e)
        for way in WAYS:
            try: eval(way, {**globals(), "x": x, "e": e})
            except (Exception, unittest.SkipTest): pass
assert not is_known()
tell("word")
assert is_known(), "these keep what they are given"
'''
    assert passes_tests(program, tests, threading.Event())


def test_a_program_sees_nothing_of_its_tests_but_what_they_pass() -> None:
    program = """
def looks(node, function):
    for of, name in ((node, "_hidden"), (node, "__class__"), (function, "gi_frame"), (function, "__globals__")):
        try: found = getattr(of, name)
        except AttributeError: continue
        if name != "__class__" or found.__name__ == "Node": return "saw " + name
    return node.shown
"""
    tests = """
class Node: shown, _hidden = "nothing", "secret"
assert looks(Node(), (one for one in [1])) == looks(Node(), lambda: None) == "nothing"
"""
    assert verify("code", [row(program, json.dumps({"tests": tests}))]) == [1.0]


@pytest.mark.parametrize("label", [None, "4", "{}", '{"tests": ""}', '{"inputs": ["1"], "outputs": []}'])
def test_a_label_without_tests_is_a_failure_and_not_a_wrong_answer(label: str | None) -> None:
    with pytest.raises(DataError, match=r"^p\.jsonl:1: the verifier code failed: the label is no `\{\"tests\": "):
        verify("code", [row("def double(x): return 2 * x", label)])


def test_a_program_reads_libraries_and_nothing_else_of_where_they_are_installed() -> None:
    """Images have projects, with their data and secrets, in /usr/src, /usr/local or beside a virtual environment's `lib`."""
    assert run("import platform, encodings.idna; platform.platform()").code == 0
    if os.path.isdir("/usr/share/zoneinfo"):
        assert run("import zoneinfo; zoneinfo.ZoneInfo('Europe/Paris')").code == 0
    assert run("import json; open(json.__file__).read()").code == 0
    for path in (
        "/usr",
        "/usr/bin/env",
        "/usr/local",
        "/usr/src",
        sys.prefix,
        f"{sys.prefix}/pyvenv.cfg",
        sys.base_prefix,
    ):
        reading = f"import os\nos.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r})"
        assert run(reading).code == 1, path


@pytest.fixture
def server() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        yield listening, listening.getsockname()[1]


def test_a_program_reaches_no_network(server: tuple[socket.socket, int]) -> None:
    listening, port = server
    assert run(f"import socket; socket.create_connection(('127.0.0.1', {port}))").code == 1
    with pytest.raises(TimeoutError):
        listening.accept()
    assert run("import socket; socket.socketpair(type=socket.SOCK_DGRAM)").code == 1
    assert run("import asyncio; asyncio.run(asyncio.sleep(0))").code == 0


def test_a_program_sees_no_secret_and_no_file_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    (tmp_path / "secret").write_text("hidden")
    assert b"hidden" not in run("import os; print(dict(os.environ))").output
    for path in (tmp_path / "secret", "/etc/passwd", f"/proc/{os.getpid()}/environ", Path(__file__)):
        assert run(f"print(open({str(path)!r}).read())").code == 1
    assert run(f"import os; print(os.listdir({str(tmp_path)!r}))").code == 1


def test_a_program_writes_in_its_folder_alone_and_nothing_of_it_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for attack in ("open({}, 'w')", "os.remove({})", "os.rename({}, 'x')", "os.chmod({}, 0)", "os.truncate({}, 0)"):
        assert run("import os; " + attack.format(repr(str(tmp_path / "kept")))).code == 1, attack
    assert run(f"open({str(tmp_path / 'new')!r}, 'w')").code == 1
    assert [(one.name, one.read_text(), one.stat().st_mode & 0o777) for one in tmp_path.iterdir()] == [
        ("kept", "kept", 0o644)
    ]
    folder = run("import os; open('left', 'w').write('x'); print(os.getcwd())").output.decode().strip()
    assert folder
    assert not os.path.exists(folder)


def test_a_program_starts_no_process_signals_none_and_raises_no_limit() -> None:
    bomb = "import os, sys\ntry:\n    for _ in range(8): os.fork()\nexcept OSError: sys.exit(7)"
    assert run(bomb).code == 7
    for attack in (
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; p = m.Process(target=print); p.start()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import fcntl, os, socket; fcntl.fcntl(socket.socketpair()[0], fcntl.F_SETOWN, os.getppid())",
        "import fcntl, os, socket; fcntl.ioctl(socket.socketpair()[0], 0x8901, os.getppid().to_bytes(4, 'little'))",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (8, 8))",
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ):
        assert run(attack).code == 1, attack


def test_a_program_takes_no_more_memory_disk_or_output_than_it_may() -> None:
    assert run("x = bytearray(3 << 30)").code == 1
    assert run("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))").code == 1
    printed = run("while True: print('x' * 100000)")
    assert (printed.code, len(printed.output)) == (1, sandboxed.FILE_BYTES)
    for files in (
        "n = os.open(str(n), os.O_RDWR | os.O_CREAT); os.ftruncate(n, 4096); os.unlink(str(n)) if 0 else None",
        "os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))",
        "f = open('f', 'wb+'); os.unlink('f'); f.write(b'x'); f.flush(); kept.append(mmap.mmap(f.fileno(), 1)); f.close()",
    ):
        attack = "import mmap, os, sys\nkept, n = [], 0\ntry:\n  for n in range(999): FILES\nexcept OSError: print(n)"
        ended = run(attack.replace("FILES", files))
        assert (ended.code, int(ended.output) <= sandbox.FILES) == (0, True), files
    assert run("import os; os.posix_fallocate(os.open('f', os.O_RDWR | os.O_CREAT), 0, 4096)").code == 1


def test_a_program_starts_so_many_threads_and_no_more() -> None:
    pool = "from concurrent.futures import ThreadPoolExecutor as P\nwith P(8) as p: print(sum(p.map(len, ['ab'] * 32)))"
    assert run(pool) == Ended(0, b"64\n")
    bomb = """
import os, threading
threading.stack_size(1 << 15)
started, wait = 0, threading.Event()
try:
    while started < 5000:
        threading.Thread(target=wait.wait, daemon=True).start()
        started += 1
except RuntimeError: pass
print(started, flush=True)
os._exit(0)
"""
    assert run(bomb) == Ended(0, f"{sandbox.THREADS}\n".encode())


def test_no_system_call_passes_that_is_not_known() -> None:
    """Old ones that nobody listed, those of newer kernels (setxattrat, file_setattr), those to come."""
    attack = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps([n for n in CALLS if libc.syscall(n, -1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38]))
"""
    known = {system_calls.number_of(call, system_calls.MACHINES[platform.machine()]) for call in system_calls.NUMBERS}
    probes = (335, 336)  # uretprobe and uprobe, which the kernel lets pass for itself, and kills who calls them
    calls = [number for number in (*range(700), 1 << 20, 0x40000000) if number not in {*known, *probes}]
    ended = run(attack.replace("CALLS", repr(calls)))
    assert (ended.code, json.loads(ended.output)) == (0, [])


def test_a_program_that_loops_or_sleeps_is_ended() -> None:
    started = time.monotonic()
    assert run("while True: pass", seconds=1.0).code is None
    assert run("import time; time.sleep(600)", seconds=1.0).code is None
    assert time.monotonic() - started < 8


@pytest.mark.slow
def test_a_program_has_seconds_of_the_processor() -> None:
    assert run("while True: pass", seconds=300.0).code == -9, "ended by the kernel, before its wall time"


def test_closing_ends_the_programs_that_run() -> None:
    tests = CodeTests("evaluation.verifier")
    threading.Timer(0.5, tests.close).start()
    with pytest.raises(Stopped):
        list(tests([("import time; time.sleep(600)", DOUBLES)] * 3))
    started = psutil.Process().children(recursive=True)
    alive = [one for one in started if one.status() != psutil.STATUS_ZOMBIE]  # another test's may not be reaped yet
    assert not [one for one in alive if sandboxed.__file__ in one.cmdline()]


def test_a_machine_without_the_means_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "sandboxed.py"
    other.write_text(Path(sandboxed.__file__).read_text().replace("= 444,", "= 9999,"))  # no such system call
    monkeypatch.setattr(sandboxed, "__file__", str(other))
    with pytest.raises(
        EnvironmentFault, match=r"^evaluation\.verifier: `code` a program cannot be run .*: Landlock: Function"
    ):
        CodeTests("evaluation.verifier")


def test_another_machine_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        EnvironmentFault,
        match=r"^evaluation\.verifier: `code` runs programs on 64-bit Linux on x86_64 or aarch64, and this .* riscv64$",
    ):
        CodeTests("evaluation.verifier")


@pytest.mark.skipif(os.geteuid() != 0, reason="every test here runs as another user than root")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="needs a Python that any user can start")
def test_limits_hold_for_another_user_than_root() -> None:
    script = """import threading, os
from alignment_core.rewards.sandbox.runner import check_limits, passes_tests
check_limits(threading.Event())
assert passes_tests("def f(): return 1", "assert f() == 1", threading.Event())
print(os.geteuid())"""
    python = "/usr/bin/python3"  # ours, and this tree, may lie where root alone can look
    who: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(Path(alignment_core.__file__).parent, f"{place}/alignment_core")
        os.chmod(place, 0o755)
        ran = subprocess.run([python, "-c", script], env={"PYTHONPATH": place}, capture_output=True, text=True, **who)
    assert ran.stdout == "65534\n", ran.stderr


def test_code_is_the_last_fenced_block_or_everything() -> None:
    assert code_of("a = 1") == "a = 1"
    assert code_of("```python\na\n```\n```\nb\n```") == "a\n"
    assert code_of("```py\na\n```\nand\n```Python\nb\n```") == "b\n"


def test_all_inputs_of_a_program_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "SECONDS", 3.0)
    label = json.dumps({"inputs": ["1"] * 20, "outputs": ["1"] * 20})
    (_, score), *_ = CodeTests("evaluation.verifier")([("import time; time.sleep(1); print(input())", label)])
    assert score == 0.0, "each alone would pass"
