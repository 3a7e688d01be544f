"""`python -m tests.benchmarks figures`: results are kept, shown in the page with their origin, and not measured twice."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.benchmarks import figures, page, results
from tests.benchmarks.results import Figure, Run, Stamp
from tests.benchmarks.tables import durations, learning, sampling, stores, training
from tests.benchmarks.tables.markdown import lines, number, span, table

STAMP = Stamp("2026-11-05", "a processor, 2 cores", "c0ffee00")
EMPTY = "# Title\n\nBefore.\n\n<!-- figures: fake -->\n<!-- /figures -->\n\nAfter.\n"
TABLE = "| speed |\n|---|\n| {} |"


def speeds(runs: Sequence[Run]) -> str:
    return table(["speed"], [[span(line["speed"] for line in lines(runs))]])


def prints(*objects: object, code: int = 0, count: Path | None = None) -> str:
    """A command that prints these objects as JSON, between other output, and adds a letter to the file ``count``."""
    program = [f"print('log', {json.dumps(each)!r}, sep='\\n')" for each in objects]
    program += [f"open({str(count)!r}, 'a').write('x')"] if count else []
    return shlex.join(["python", "-c", "\n".join([*program, f"raise SystemExit({code})"])])


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """Makes a page and results of their own, with one figure."""
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "page.json")
    monkeypatch.setattr(results, "commit", lambda: STAMP.commit)
    monkeypatch.setattr(results, "is_same_code", lambda commit: commit == STAMP.commit)
    page.PAGE.write_text(EMPTY)

    def show(*commands: str, table: Callable[[Sequence[Run]], str] = speeds, **options: object) -> Figure:
        figure = Figure("fake", "a fake", commands, 1, table, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(figures, "FIGURES", {"fake": figure})
        return figure

    return show


def kept() -> list[Run]:
    return results.load().get("fake", [])


def test_the_page_has_every_table_between_comments_as_its_result_renders_it() -> None:
    """`--check`, on the page of the project; and a reader of Markdown sees the tables."""
    assert page.problems(page.PAGE.read_text(), figures.FIGURES, results.load()) == []
    html = MarkdownIt("commonmark").enable("table").render(page.PAGE.read_text())
    assert html.count("<table>") == len(figures.FIGURES)
    assert "|---" not in html


def test_every_command_is_a_module_of_the_project() -> None:
    for figure in figures.FIGURES.values():
        for command in figure.commands:
            python, option, module, *rest = shlex.split(command)
            assert (python, option) == ("python", "-m")
            assert module in ("tests.benchmarks", "tests.crash", "tests.learning")
            if module == "tests.benchmarks":
                assert (Path(__file__).parent / f"{rest[0]}.py").is_file()


def test_a_measured_figure_is_shown_with_its_origin_and_the_rest_of_the_page_is_unchanged(
    shown: Callable[..., Figure],
) -> None:
    command = shown(prints({"speed": 1234.5})).commands[0]
    assert figures.main([]) == 0
    text = page.PAGE.read_text()
    start, end = "# Title\n\nBefore.\n\n<!-- figures: fake -->\n", "<!-- /figures -->\n\nAfter.\n"
    assert text.startswith(start + TABLE.format("1,234.5"))
    assert text.endswith(end)
    (run,) = kept()
    assert (run.command, run.lines, run.stamp.machine) == (command, [{"speed": 1234.5}], results.machine())
    assert run.seconds is not None
    assert figures.main(["--check"]) == 0


def test_a_killed_command_goes_on_where_it_was(shown: Callable[..., Figure], tmp_path: Path) -> None:
    count = tmp_path / "count"
    commands = [prints({"speed": speed}, count=count) for speed in (1, 2)]
    shown(*commands, runs=2)
    with pytest.MonkeyPatch.context() as patch:
        measure = results.measure

        def killed(command: str, exit_codes: Sequence[int]) -> Run:
            if len(kept()) == 3:
                raise KeyboardInterrupt
            return measure(command, exit_codes)

        patch.setattr(results, "measure", killed)
        with pytest.raises(KeyboardInterrupt):
            figures.main([])
    assert count.read_text() == "xxx"
    assert figures.main(["--check"]) == 0
    assert figures.main([]) == 0
    assert count.read_text() == "xxxx"
    assert [run.command for run in kept()] == [commands[0]] * 2 + [commands[1]] * 2
    assert figures.main([]) == 0
    assert count.read_text() == "xxxx", "nothing is measured twice"
    assert figures.main(["--again", "fake"]) == 0
    assert count.read_text() == "x" * 8
    assert len(kept()) == 4


def test_results_of_other_code_or_another_machine_are_replaced(
    shown: Callable[..., Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = shown(prints({"speed": 1}), runs=2).commands[0]
    old = [Run(command, Stamp("2026-11-01", results.machine(), "deadbeef"), 1.0, [{"speed": 9}])] * 3
    results.save({"fake": [*old, Run("python -c gone", STAMP, 1.0, [{"speed": 9}])]})
    assert figures.main([]) == 0
    assert TABLE.format("1") in page.PAGE.read_text()
    assert [run.stamp.commit for run in kept()] == [STAMP.commit] * 2
    monkeypatch.setattr(results, "machine", lambda: "a faster one, 64 cores")
    assert figures.main([]) == 0
    assert {run.stamp.machine for run in kept()} == {"a faster one, 64 cores"}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (prints({"speed": 2}, code=3), "exit code 3"),
        (prints(), "no JSON object"),
        (prints({"other": 2}), "KeyError('speed')"),
        (prints({"speed": "fast"}), "cannot show"),
    ],
)
def test_a_failed_command_leaves_the_figure_as_it_is_and_the_next_one_is_measured(
    shown: Callable[..., Figure], capfd: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    figure = shown(prints({"speed": 1}))
    assert figures.main([]) == 0
    before = (page.PAGE.read_text(), results.RESULTS.read_text())
    shown(command, *figure.commands)
    assert figures.main(["fake"]) == 1
    assert reason in capfd.readouterr().err
    assert (page.PAGE.read_text(), results.RESULTS.read_text()) == before


def test_a_campaign_that_misses_its_bounds_is_shown_all_the_same(shown: Callable[..., Figure]) -> None:
    shown(prints({"speed": 5}, code=1), exit_codes=(0, 1))
    assert figures.main([]) == 0
    assert TABLE.format("5") in page.PAGE.read_text()


def test_results_of_another_file_are_rendered_without_measuring(
    shown: Callable[..., Figure], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shown(prints({"speed": 1})).commands[0]
    results.save({"fake": [Run(command, STAMP, None, [{"speed": 7}])]})
    other = results.RESULTS.rename(tmp_path / "other.json")
    assert figures.main(["--from", str(other)]) == 0
    assert TABLE.format("7") in page.PAGE.read_text()
    assert "5 November 2026, a processor, 2 cores, commit c0ffee00.*" in " ".join(page.PAGE.read_text().split())
    assert kept()[0].stamp == STAMP
    for content, reason in (
        ("{}", "no result of fake"),
        ('{"fake": [{"x": 1}]}', "form"),
        ("[]", "form"),
        ("{", "line 1"),
    ):
        other.write_text(content)
        assert figures.main(["--from", str(other)]) == 1
        assert reason in capsys.readouterr().err
    assert figures.main(["--from", str(tmp_path / "none.json")]) == 1
    assert TABLE.format("7") in page.PAGE.read_text()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{EMPTY}\n| a |\n|---|\n| 1 |\n", "a table without a figure: | a |"),
        (EMPTY.replace("fake", "gone"), "gone: the page has this table, but no command measures it"),
        ("# Title\n", "fake: the page has no table of this figure"),
        (EMPTY * 2, "fake: the page has this figure 2 times"),
        (EMPTY.replace("<!-- /figures -->\n", ""), "a comment without its counterpart: <!-- figures: fake -->"),
        (EMPTY, "fake: its table is not the one of its kept result; render it with --from"),
    ],
)
def test_every_fault_of_a_page_is_a_sentence(shown: Callable[..., Figure], text: str, sentence: str) -> None:
    figure = shown(prints({"speed": 1}))
    assert sentence in page.problems(text, {"fake": figure}, {})


def test_code_blocks_and_figures_that_were_never_measured_are_no_fault(shown: Callable[..., Figure]) -> None:
    figure = shown("python -m tests.benchmarks store")
    text = page.rendered(f"{EMPTY}\n```\n| a | b |\n```\n", [figure], {})
    assert "*Not measured yet: `python -m tests.benchmarks store`.*" in text
    assert page.problems(text, {"fake": figure}, {}) == []
    other = {"fake": [Run("python -m gone", STAMP, None, [{"speed": 1}])]}
    assert "fake: a kept result is of another command: python -m gone" in page.problems(text, {"fake": figure}, other)


def test_code_is_the_same_while_only_documents_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "docs").mkdir()
    for name in ("code.py", "README.md", "docs/performance.json"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "First")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    commit = results.commit()
    assert len(commit) == 8
    for name in ("README.md", "docs/performance.json"):
        (tmp_path / name).write_text("2")
    git("commit", "-am", "Documents")
    assert results.is_same_code(commit)
    (tmp_path / "code.py").write_text("2")
    assert not results.is_same_code(commit)
    assert results.commit().endswith("+")
    assert not results.is_same_code(results.commit())


def test_names_and_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in ((["nothing"], "no figure nothing"), (["--check", "store"], "leave out the names")):
        with pytest.raises(SystemExit) as error:
            figures.main(arguments)
        assert error.value.code == 2
        assert reason in capsys.readouterr().err
    assert figures.main(["--list", "store"]) == 0
    assert "    python -m tests.benchmarks store, 3 times" in capsys.readouterr().out


def test_a_benchmark_is_measured_and_shown(shown: Callable[..., Figure]) -> None:
    """The store's, with one megabyte."""
    program = "from tests.benchmarks import store; store.MIB = store.TIMES = 1; store.main()"
    shown(shlex.join(["python", "-c", program]), table=stores.store)
    assert figures.main([]) == 0
    (run,) = kept()
    assert run.lines[0]["mib"] == 1
    assert "| publish the file | 0" in page.PAGE.read_text()


def runs_of(*objects: Mapping[str, object], command: str = "python -m tests.benchmarks x") -> list[Run]:
    return [Run(command, STAMP, 1.0, list(objects))]


def test_numbers_and_ranges() -> None:
    assert [number(value) for value in (None, 0.25, 3.0, 1400)] == ["—", "0.25", "3", "1,400"]
    assert span([3, None, 1.25], 1) == "1.2 to 3.0"
    assert (span([2, 2.0]), span([]), span([1.04, 1.01], 1)) == ("2", "—", "1.0")


def test_trl_is_shown_with_its_fastest_setting_first() -> None:
    line = {"method": "sft", "parameters": 25.8e6, "rows": 32, "tokens": 3680, "seconds": [5.0, 6.0], "ratio": 1.1}
    line |= {"spread": [1.0, 1.2], "cpu_ratio": 1.05, "trl_fastest": "packed"}
    line |= {"trl_seconds": {"padded, 16": [15.0, 16.0], "packed": [5.5, 6.0]}}
    assert training.peers(runs_of(line)).splitlines()[2:] == [
        "| SFT, 32 rows of about 115 tokens, 25.8M | packed (`packing`), its fastest | 5.0, 5.5 "
        "| 1.00, **1.10**, 1.20 | 1.05 |",
        "|  | padded, all 16 at once (its default) | 5.0, 15.0 | 3.00 |  |",
    ]


def test_a_failed_run_has_a_dash_among_the_estimators() -> None:
    good = {
        "run": "GRPO",
        "seed": 1,
        "before": [0.4, 0.3, 0.5],
        "after": [0.9, 0.8, 1.0],
        "seconds": 51.2,
        "good": True,
    }
    failed = {"run": "GRPO", "seed": 2, "exit_code": 1}
    assert learning.estimators(runs_of(good, failed)).endswith("| GRPO | 0.400 → 0.900 | — | 51 |")


def test_unequal_scores_are_not_shown() -> None:
    line = {"warm_1": 8.0, "warm_8": 1.0, "first_8": 2.0, "warm_ratio": 8.0, "first_ratio": 4.0, "same": True}
    assert sampling.rewards(runs_of(line)).endswith("| 8, including their start | 2 | 4.0 |")
    with pytest.raises(AssertionError):
        sampling.rewards(runs_of(line | {"same": False}))


def test_kills_are_shown_by_the_options_of_their_command() -> None:
    line = {
        "roles": {"flow": {"kills": 2, "resumed": 0}},
        "lost": {"steps": {"kills": 1, "seconds": 0.8}},
        "differences": [],
    }
    command = "python -m tests.crash --begins-at rl --recipe rl --kills 2"
    assert durations.kills_of_rl(runs_of(line, command=command)).endswith(
        "| `--recipe rl --kills 2` | flow 2 (0) | 0.8 s | 0 |"
    )
    bad = {**line, "lost": {}, "differences": ["another sft model"]}
    assert durations.kills_of_rl(runs_of(bad, command=command)).endswith("| flow 2 (0) | — | 1 |")
    assert durations.kills(runs_of(bad)).endswith("| flow | 2 | 0 |\n| differences from the undisturbed run | 1 |  |")
