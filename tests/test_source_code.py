"""What of Python source counts: what it computes, and not how it is written."""

from __future__ import annotations

import pytest

from alignment_core.source_code import digest_of_source

PLAIN = "def f(x, y=1):\n    return x + y\n\nclass A:\n    size = 2\n"


@pytest.mark.parametrize(
    "same",
    [
        "# says nothing\ndef f(x, y=1):  # nor this\n    return x + y\n\nclass A:\n    size = 2\n",
        "def f(\n    x,\n    y=1,\n):\n    return (x\n            + y)\nclass A: size = 2",
        '"""Module."""\ndef f(x, y=1):\n    """Function."""\n    return x + y\n\nclass A:\n    size = 2\n    """Field."""\n',
    ],
    ids=["comments", "formatting", "docstrings"],
)
def test_comments_formatting_and_docstrings_do_not_count(same):
    assert digest_of_source(same.encode()) == digest_of_source(PLAIN.encode())


@pytest.mark.parametrize(
    "other",
    [
        PLAIN.replace("y=1", "y=2"),
        PLAIN.replace("y=1", "y=1.0"),
        PLAIN.replace("y=1", "y='1'"),
        PLAIN.replace("x + y", "x - y"),
        PLAIN.replace("x + y", "y + x"),
        PLAIN.replace("(x, y=1)", "(x, *, y=1)"),
        PLAIN.replace("def f", "async def f"),
        PLAIN.replace("size = 2", "size = 2\n    again = size"),
        PLAIN.replace("return x + y", "return x + y\n\n'text'.upper()"),
        PLAIN.replace("return x + y", "return 'text'"),
    ],
)
def test_what_is_computed_counts(other):
    assert digest_of_source(other.encode()) != digest_of_source(PLAIN.encode())


def test_docstrings_count_where_a_policy_may_read_them():
    one, other = (f'def tool():\n    """{text}"""\n'.encode() for text in ("Adds.", "Multiplies."))
    assert digest_of_source(one) == digest_of_source(other)
    assert digest_of_source(one, docstrings=True) != digest_of_source(other, docstrings=True)


def test_what_is_no_python_counts_by_its_bytes():
    assert digest_of_source(b"{{ name }} (") != digest_of_source(b"{{ name }}  (")
