"""Text of models and data never controls a terminal or Markdown, wherever it is shown.

The characters are those of ECMA-48 (C0 and C1 controls), and the Unicode marks of writing direction of "Trojan Source" (Boucher
and Anderson 2021).
"""

from __future__ import annotations

import io
import json
import unicodedata
from typing import Any

import pytest
from rich.table import Table

from alignment.flows import console
from alignment.flows.cli import chat
from alignment.flows.cli.samples import as_text
from alignment_core.host.logs import LogTail
from alignment_core.printable import escaped_json, markdown_line, printable, without_colours
from alignment_core.reporting.run_report import RunReport, fenced, table
from alignment_core.tracking.tensorboard import _table as tensorboard_table

HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\u2066e\x07f\rg\u2028h\ud800i\x7fj\u200fk"
SHOWN = "a�[31mb�2Jc�d�e�f�g�h�i�j�k"


def test_every_control_character_and_every_mark_of_direction_is_shown_as_such() -> None:
    """By Unicode's categories: Cc except tab and end of line, Zl, Zp, Cs, and characters of a bidirectional control class."""
    controls = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    marks = {"\u061c", "\u200e", "\u200f"}
    for code in range(0x11000):
        character = chr(code)
        unsafe = unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") and character not in "\n\t"
        unsafe |= unicodedata.bidirectional(character) in controls or character in marks
        unsafe |= code in (0xFFFE, 0xFFFF)  # no characters of XML
        assert (printable(character) == "�") == (unsafe or character == "�"), hex(code)


def test_printable_text_is_unchanged() -> None:
    text = "Grüße, 你好 שלום 👩‍👩‍👧\tend\nline"
    assert printable(text) == escaped_json(text) == without_colours(text) == text
    assert printable("one\r\ntwo") == "one\ntwo"


def test_console_shows_strings_and_tables_safely(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    shown = console.SafeConsole(file=written, soft_wrap=True)
    shown.print(HOSTILE, markup=False)
    rows = Table(HOSTILE)
    rows.add_row(HOSTILE)
    shown.print(rows)
    assert written.getvalue().count("�[31mb�2Jc�d") == 3
    assert not set(written.getvalue()) & set("\x1b\x9b\u202e\u2066\x07\r\u2028\x7f\u200f")


def test_lines_of_a_run_and_json_are_safe_and_json_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console.print_line(HOSTILE)
    console.say(HOSTILE)
    console.print_json({"error": HOSTILE})
    line, text, as_json = capsys.readouterr().out.splitlines()
    assert line == SHOWN
    assert text.endswith(SHOWN)
    assert as_json.isprintable()
    assert json.loads(as_json) == {"error": HOSTILE}


def test_samples_and_chat_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_text(HOSTILE) == SHOWN
    assert chat._print_answer(iter([HOSTILE]), quiet=False) == HOSTILE, "the history has the model's text"
    assert capsys.readouterr().out == f"{SHOWN}\n"


def test_the_report_of_a_run_is_safe_and_its_tables_stay_tables() -> None:
    report = RunReport()
    report.say(*fenced({"completion": HOSTILE}))
    report.say(*table(("stage", "key metrics"), [("sft", "a | b\n# c [x](http://a) <img src=x>")]))
    assert SHOWN in report.markdown
    assert "\x1b" not in report.html
    assert "\x9b" not in report.html
    assert "| sft | a \\| b # c \\[x\\](http://a) \\<img src=x> |" in report.markdown
    assert report.html.count("<td>") == 2
    assert "<a " not in report.html
    assert "<img" not in report.html
    assert markdown_line("**a**  \n b") == "**a** b"


def test_output_of_the_host_is_escaped_and_without_colours_in_the_log(tmp_path: Any) -> None:
    (tmp_path / "log").write_bytes("\x1b[36m(engines[0] pid=1)\x1b[0m \x1b[1;31mred\x1b[0m \x9b2J\u202e\n".encode())
    lines: list[str] = []
    tail = LogTail(tmp_path / "log", 0, lambda _stage, _origin, text: lines.append(text))
    tail.close()
    assert "".join(lines).endswith("red �2J�")


def test_texts_for_tensorboard_are_safe() -> None:
    assert SHOWN.replace("\n", "<br>") in tensorboard_table([{"completion": HOSTILE}])
