"""`align init`: a recipe from the files of a folder, with and without a terminal, and refused input."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.checks.rows import answers_to
from tests.align import align_here
from tests.conftest import fill
from tests.flows.fake_hub import fake_hub
from tests.init.rows_of_kinds import ROWS, jsonl
from tests.matrix import cases

Align = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "alignment.flows.cli.main"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with one file of rows."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    jsonl(work / "rows.jsonl", ROWS["question and response"][2])
    return work


@pytest.fixture
def align(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Align:
    """``align("init")`` with a separate ALIGN_HOME, reading rows in this process."""
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    monkeypatch.setattr("alignment_core.init.lengths.ask", answers_to)
    return partial(align_here, tmp_path / "home")


def parsed(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_init_in_a_folder_with_a_single_file_asks_no_question(align: Align, folder: Path) -> None:
    done = align("init", "--model", "scratch")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "rows.jsonl: 40 rows"
    shown = [line.split() for line in lines[2:5]]
    assert shown == [["question", "prompt", "q", "0"], ["response", "completion", "a", "0"], ["id", "not", "used", "0"]]
    assert lines[5:] == [
        "method sft: prompts with an answer each to imitate",
        "model scratch: a new tiny model, to try the recipe with",
        "recipe.held-out.jsonl: 4 rows that are held out to measure on",
        "recipe.yaml is written: checked, no problem found. Next:",
        "  align check recipe.yaml",
        "  align run recipe.yaml",
    ]
    assert align("check", "recipe.yaml").returncode == 0


def test_init_without_a_terminal_writes_the_same_recipe(folder: Path, tmp_path: Path, tiny_model: Any) -> None:
    command = [*COMMAND, "init", "--model", str(tiny_model()), "--json"]
    environment = {**os.environ, "ALIGN_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    outcome = parsed(done)
    assert (outcome["status"], outcome["file"], outcome["method"]) == ("written", "recipe.yaml", "sft")
    assert outcome["columns"][0] == {"column": "question", "role": "prompt", "first": "q 0"}
    assert outcome["recipe"] == yaml.safe_load((folder / "recipe.yaml").read_text()) == yaml.safe_load(outcome["text"])
    assert outcome["model"] | {"why": ""} == {"name": str(tiny_model()), "why": "", "parameters": 90624, "context": 256}
    assert [stage["stage"] for stage in outcome["stages"]][:3] == ["model", "sft/data", "sft"]
    assert (outcome["problems"], outcome["warnings"]) == ([], [])
    assert not (tmp_path / "home" / "store").exists(), "checking for a store does not create one"


def in_a_terminal(home: Path, answer: str, *arguments: str, code: int = 0) -> str:
    """The output of `align init` in a terminal, in which ``answer`` is typed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "ALIGN_HOME": str(home), "TERM": "dumb", "COLUMNS": "200"}
    with subprocess.Popen(
        [*COMMAND, "init", "--model", "scratch", *arguments],
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.STDOUT,
    ) as process:
        os.close(theirs)
        os.write(ours, f"{answer}\n".encode())
        printed = b""
        try:
            while piece := os.read(ours, 4096):
                printed += piece
        except OSError:  # a terminal whose other end is gone
            pass
    os.close(ours)
    assert process.returncode == code, printed.decode()
    return printed.decode()


@pytest.mark.parametrize(("answer", "method"), [("", "continued-pretraining"), ("rows.jsonl", "sft")])
def test_in_a_terminal_the_user_chooses_among_several_files(
    answer: str, method: str, folder: Path, tmp_path: Path
) -> None:
    jsonl(folder / "other.jsonl", ROWS["text"][2])
    shown = in_a_terminal(tmp_path / "home", answer)
    assert "which rows? (other.jsonl, rows.jsonl, or . for all) [other.jsonl]:" in shown
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["method"] == method


def test_the_option_yes_suppresses_questions(folder: Path, tmp_path: Path) -> None:
    jsonl(folder / "other.jsonl", ROWS["text"][2])
    assert "there are several files with rows" in in_a_terminal(tmp_path / "home", "", "--yes", code=2)


def test_several_files_are_listed_and_data_chooses_among_them(align: Align, folder: Path) -> None:
    jsonl(folder / "other.jsonl", ROWS["text"][2])
    error = parsed(align("init", "--json"), 2)["error"]
    assert error == (
        "there are several files with rows: other.jsonl, rows.jsonl: choose one with --data, or --data . for all"
    )
    assert parsed(align("init", "--data", "other.jsonl", "--model", "scratch", "--json"))["method"] == (
        "continued-pretraining"
    )


def test_init_in_an_empty_folder_lists_the_file_types_it_reads(align: Align, folder: Path) -> None:
    (folder / "rows.jsonl").unlink()
    done = align("init")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no JSONL, JSON, CSV, Parquet, Arrow or text file with rows: name yours with --data" in done.stderr


@pytest.mark.parametrize("there", ["recipe.yaml", "recipe.held-out.jsonl"])
def test_a_file_that_is_there_is_replaced_only_by_force(there: str, align: Align, folder: Path) -> None:
    (folder / there).write_text("mine")
    error = parsed(align("init", "--model", "scratch", "--json"), 2)["error"]
    assert error == f"{there} is there already: give another --output, or --force"
    assert (folder / there).read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["rows.jsonl", there])
    assert align("init", "--model", "scratch", "--force").returncode == 0
    assert (folder / there).read_text() != "mine"


def test_a_guess_may_be_corrected(align: Align, folder: Path) -> None:
    corrected = ["--column", "prompt=response", "--column", "completion=question"]
    outcome = parsed(align("init", "--model", "scratch", *corrected, "--json"))
    assert outcome["recipe"]["sft"]["data"]["sources"][0]["columns"] == {"prompt": "response", "completion": "question"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--column", "prompt"], "--column prompt: write it as role=name, such as prompt=question"),
        (["--column", "promt=question"], "there is no role 'promt'; did you mean 'prompt'?"),
        (["--column", "prompt=quest"], "--column prompt=quest: the first row of rows.jsonl has id, question, response"),
        (["--data", "row.jsonl"], "row.jsonl: no such file or folder; did you mean rows.jsonl?"),
        (["--method", "dop"], "did you mean 'dpo'?"),
        (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
        (["-o", "nowhere/recipe.yaml"], "nowhere: no such folder"),
        (["--from", "grp"], "did you mean 'grpo'?"),
        (["--from", "grpo", "--data", "rows.jsonl"], "--from copies a recipe as it is: leave out --data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_refused_in_a_sentence(
    arguments: list[str], sentence: str, align: Align, folder: Path
) -> None:
    assert sentence in parsed(align("init", *arguments, "--json"), 2)["error"]
    assert [path.name for path in folder.iterdir()] == ["rows.jsonl"]


def test_columns_between_semicolons_are_recognised(align: Align, folder: Path) -> None:
    (folder / "rows.csv").write_text("prompt;completion\na;b\nc;d\n")
    error = parsed(align("init", "--data", "rows.csv", "--json"), 2)["error"]
    assert error == "rows.csv: its columns are separated by semicolons ('prompt;completion'); save it with commas"


def test_a_broken_row_is_reported_and_the_recipe_still_written(align: Align, folder: Path) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    done = align("init", "--model", "scratch", "--json")
    outcome = parsed(done, 2)
    assert outcome["status"] == "problems"
    assert "rows.jsonl:41: is not valid JSON" in outcome["problems"][0]
    assert (folder / "recipe.yaml").exists()


def test_an_unreachable_hub_is_reported_once_and_the_recipe_still_written(
    align: Align, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    outcome = parsed(align("init", "--json"), 2)
    assert outcome["model"]["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "--model policy/production" in outcome["model"]["why"]
    assert "HF_HUB_OFFLINE is set" in outcome["problems"][0]
    assert outcome["warnings"] == []
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    error = parsed(align("init", "--data", "someone/unknown", "--force", "--json"), 2)["error"]
    assert error.startswith("someone/unknown: no such file or folder")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data_of_hub", "model_of_hub"), cases([("", ""), ("hf://datasets/", "hf://")], usual=[("hf://datasets/", "hf://")])
)
def test_names_of_the_hub_are_looked_at_there(
    data_of_hub: str, model_of_hub: str, folder: Path, tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        jsonl(data / f"{split}.jsonl", [{"question": f"{split} {n}", "chosen": "a", "rejected": "b"} for n in range(9)])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    command = [
        *COMMAND,
        "init",
        "--data",
        f"{data_of_hub}someone/pairs",
        "--model",
        f"{model_of_hub}someone/tiny",
        "--json",
    ]
    with fake_hub({("models", "someone/tiny"): tiny_model(), ("datasets", "someone/pairs"): data}) as (endpoint, _):
        environment = {**os.environ, "ALIGN_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint}
        outcome = parsed(subprocess.run(command, env=environment, capture_output=True, text=True, check=False))
    assert (outcome["status"], outcome["method"], outcome["model"]["context"]) == ("written", "dpo", 256)
    columns = {"prompt": "question"}
    assert outcome["recipe"]["dpo"]["data"]["sources"] == [
        {"path": "someone/pairs", "columns": columns},
        {"path": "someone/pairs", "split": "test", "columns": columns, "held_out": True},
    ]
    assert not (folder / "recipe.held-out.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_a_problem_of_the_environment(
    align: Align, folder: Path, small_disk: Path
) -> None:
    output = small_disk / "recipe.yaml"
    taken = fill(small_disk)
    done = align("init", "--model", "scratch", "-o", str(output), "--json")
    assert "cannot be written: No space left on device" in parsed(done, 3)["error"]
    for path in taken:
        path.unlink()
    assert list(small_disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = align("init", "--model", "scratch", "-o", str(output), "--json")
    assert "cannot be written: Read-only file system" in parsed(done, 3)["error"]


def test_an_installed_recipe_is_copied_to_be_edited(align: Align, folder: Path) -> None:
    outcome = parsed(align("init", "--from", "iterative-dpo", "-o", "mine.yaml", "--json"))
    assert (folder / "mine.yaml").read_text() == Path(outcome["from"]).read_text()
    assert outcome["next"] == ["align check mine.yaml", "align run mine.yaml"]
    assert parsed(align("init", "--from", "dpo", "-o", "mine.yaml", "--json"), 2)["error"].startswith(
        "mine.yaml is there"
    )
    done = align("init", "--from", "quickstart")
    assert done.stdout.startswith("recipe.yaml is a copy of quickstart: ")
    assert ".. Next:" not in done.stdout


@pytest.mark.parametrize(("data", "output"), [("rows.jsonl", "rows.jsonl"), ("r.held-out.jsonl", "r.yaml")])
def test_force_never_replaces_the_rows_themselves(data: str, output: str, align: Align, folder: Path) -> None:
    before = jsonl(folder / data, ROWS["question and response"][2]).read_bytes()
    done = align("init", "--model", "scratch", "--data", data, "-o", output, "--force")
    assert done.returncode == 2
    assert "holds the rows themselves" in done.stderr
    assert (folder / data).read_bytes() == before


@pytest.mark.parametrize(
    ("option", "value", "code", "why"),
    [
        ("--data", "~no-such-user/rows.jsonl", 2, "a name that no user has"),
        ("--output", "x" * 300 + ".yaml", 3, "File name too long"),
    ],
)
def test_os_errors_of_a_path_are_reported_in_a_sentence(
    option: str, value: str, code: int, why: str, align: Align, folder: Path
) -> None:
    done = align("init", "--model", "scratch", option, value)
    assert done.returncode == code
    assert why in done.stderr


def test_a_lone_surrogate_is_written_unchanged(align: Align, folder: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}", "note": "\ud83d"} for n in range(40)]
    jsonl(folder / "rows.jsonl", content)
    assert align("init", "--model", "scratch").returncode == 0
    first = (folder / "recipe.held-out.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["note"] == "\ud83d"


def test_in_a_folder_of_splits_all_are_taken(align: Align, folder: Path) -> None:
    (folder / "rows.jsonl").rename(folder / "train.jsonl")
    jsonl(folder / "test.jsonl", ROWS["question and response"][2][:5])
    done = parsed(align("init", "--model", "scratch", "--json"))
    assert done["data"]["name"] == "."
    assert done["recipe"]["evaluation"]["prompts"]["sources"][0]["split"] == "test"


@pytest.mark.parametrize("option", ["--data", "--eval-data", "--model"])
@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "ftp://host/rows.jsonl",
            "ftp:// cannot be read; use one of s3://, gs://, https://, http://, hf://, or a path",
        ),
        ("S3://bucket/rows.jsonl", "S3:// cannot be read"),
        ("https://user@host/rows.jsonl", "an address must not contain a user or password"),
        ("https://user:pw@host/rows.jsonl", "holds a secret"),
    ],
)
def test_an_unreadable_address_is_refused_in_a_sentence(
    option: str, address: str, sentence: str, align: Align, folder: Path
) -> None:
    error = parsed(align("init", option, address, "--json"), 2)["error"]
    assert sentence in error
    assert "\n" not in error
    assert not (folder / "recipe.yaml").exists()
