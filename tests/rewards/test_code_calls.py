"""Tests that call a completion's program in another process: what tests and program can see of each other."""

from __future__ import annotations

import json
import threading

import pytest

from alignment_core.rewards.sandbox.runner import passes_tests
from alignment_core.rewards.verify import verify
from tests.rewards.programs import row

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


def test_tests_call_a_program_in_another_process_as_if_in_their_own() -> None:
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
def test_common_tests_pass_right_programs_and_fail_wrong_ones(program: str, tests: str) -> None:
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
    """These tests would pass in one process: they fail here to keep expected values from programs."""
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
"""Classes whose operators agree with everything, record their arguments, or return a plain value."""


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
def test_no_object_of_a_program_counts_as_the_expected_number(tests: str) -> None:
    assert not passes_tests(AGREES, tests, threading.Event())


def test_no_comparison_reveals_expected_values_to_a_program() -> None:
    """Objects with every special method that Python's classes have, which record their arguments.

    ``__exit__`` and the names in brackets are left out: they are for the arguments of the tests.
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


def test_a_program_sees_only_the_arguments_of_its_tests() -> None:
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
