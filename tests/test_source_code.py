"""Digests of Python source depend on its computation, and not on its form."""

from __future__ import annotations

import ast
import gc
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from alignment_core import source_code
from alignment_core.source_code import digest_of_source, read

PLAIN = "def f(x, y=1):\n    return x + y\n\nclass A:\n    size = 2\n"


def digest_of_ours(source: bytes) -> str:
    """The digest of a module of ours, with whose texts nothing computes."""
    return read(source, "alignment_core.training.x", Path("x.py")).digest


@pytest.mark.parametrize(
    "same",
    [
        "# says nothing\ndef f(x, y=1):  # nor this\n    return x + y\n\nclass A:\n    size = 2\n",
        "def f(\n    x,\n    y=1,\n):\n    return (x\n            + y)\nclass A: size = 2",
    ],
    ids=["comments", "formatting"],
)
def test_comments_and_formatting_do_not_count(same):
    assert digest_of_source(same.encode()) == digest_of_source(PLAIN.encode())


def test_docstrings_count_only_if_texts_are_computed_with():
    source = b'"""A."""\ndef f(x, y=1):\n    """B."""\n    return x + y\n\nclass A:\n    size = 2\n    """C."""\n'
    assert digest_of_ours(source) == digest_of_ours(PLAIN.encode())
    assert digest_of_source(source) != digest_of_source(PLAIN.encode())


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
def test_changes_of_the_computation_count(other):
    assert digest_of_source(other.encode()) != digest_of_source(PLAIN.encode())


def test_files_that_are_not_python_count_by_their_bytes():
    assert digest_of_source(b"{{ name }} (") != digest_of_source(b"{{ name }}  (")


@pytest.mark.parametrize("way", ["f.__doc__", "inspect.getdoc(f)", "inspect.getsource(f)"])
def test_a_source_that_may_read_itself_counts_whole(way):
    first, second = (
        f'import inspect\ndef f():\n    """{text}"""\nPROMPT = {way}\n'.encode() for text in ("Good?", "Bad?")
    )
    assert digest_of_ours(first) != digest_of_ours(second)


def test_a_long_chain_of_elif_has_a_digest():
    chain = "def f(x):\n    if x == 0:\n        return 0\n" + "".join(
        f"    elif x == {number}:\n        return {number}\n" for number in range(1, 700)
    )
    assert digest_of_source(chain.encode()) != digest_of_source(chain.replace("return 698", "return 0").encode())


def test_garbage_collection_lets_no_other_thread_into_the_middle_of_parsing():
    """Python 3.11 has a single counter of parsing depth for all threads."""
    source = Path(source_code.__file__).read_bytes()
    stop = threading.Event()

    def parse_all_the_time() -> None:
        while not stop.is_set():
            with suppress(SystemError):  # parsing within libraries is outside our control
                ast.parse("x = [1, (2, [3])]")

    def give_way(*_: object) -> None:
        time.sleep(0.0005)

    other = threading.Thread(target=parse_all_the_time)
    other.start()
    gc.callbacks.append(give_way)
    try:
        for _ in range(20):
            source_code.parse(source)
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(give_way)
        stop.set()
        other.join()


RAISES = 'def f(x):\n    if x:\n        raise ValueError(f"{x} is wrong")\n    log.info("fine")\n    return x\n'


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (('f"{x} is wrong"', '"not " + f"{x!r}"'), True),
        (('log.info("fine")', 'log.warning("%s", x)'), True),
        (("raise ValueError", "raise TypeError"), False),
        (('f"{x} is wrong"', "x"), False),
        (('f"{x} is wrong"', '"timeout"'), False),  # a word may be an attribute's name
        (('f"{x} is wrong"', 'f"{(y := x)} is wrong"'), False),
        (('log.info("fine")', 'x.info("fine")'), False),
    ],
)
def test_texts_of_errors_and_logs_do_not_count_unless_computed_with(edit: tuple[str, str], same: bool) -> None:
    before, after = RAISES.encode(), RAISES.replace(*edit).encode()
    assert (digest_of_ours(before) == digest_of_ours(after)) is same
    assert digest_of_source(before) != digest_of_source(after)


@pytest.mark.parametrize(
    "edit", [("wrong", "right"), ("def f(x):", 'def f(x):\n    """Adds."""')], ids=["error", "docstring"]
)
def test_texts_of_built_in_modules_count_only_in_environments(edit: tuple[str, str]) -> None:
    path = Path("x.py")
    before = RAISES.encode()
    after = RAISES.replace(*edit).encode()
    counts = {
        place: source_code.read(before, f"{place}.x", path) != source_code.read(after, f"{place}.x", path)
        for place in ("alignment_core.environments", "alignment_core.training", "my_package")
    }
    assert counts == {"alignment_core.environments": True, "alignment_core.training": False, "my_package": True}


def test_concurrent_reads_of_plug_ins_do_not_disturb_the_check_for_edits(tmp_path: Path, monkeypatch) -> None:
    files = [tmp_path / f"{number}.py" for number in range(3)]
    for file in files:
        file.touch()
    monkeypatch.setattr(source_code, "_READ", {files[0]: source_code.stamp_of(files[0])})
    look = source_code.stamp_of

    def others_read(path: Path) -> tuple[int, int] | None:
        source_code._READ.update(
            {file: stamp for file in files if (stamp := look(file)) and file not in source_code._READ}
        )
        return look(path)

    monkeypatch.setattr(source_code, "stamp_of", others_read)
    assert source_code.edited_plugins() == []
    files[2].write_text("edited = True")
    assert source_code.edited_plugins() == [str(files[2])]


@pytest.mark.parametrize(
    "code",
    ["from alignment import Sft, run", "import alignment\nalignment.Sft", "import alignment as al\nal.Sft()"],
)
def test_a_name_of_the_facade_counts_as_its_defining_module(code: str) -> None:
    imports = read(code.encode(), "plugin.stage", Path("stage.py")).imports
    assert "alignment_core.training.methods.sft" in imports
    assert (
        "alignment_core.training.methods.sft"
        not in read(b"from other import Sft", "plugin.stage", Path("stage.py")).imports
    )
