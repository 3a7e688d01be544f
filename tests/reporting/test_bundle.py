"""The folder of ``align report``: its files for each kind of run, and redactions."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from alignment_core import journal
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.journal import Journal, RunRecord, new_record
from alignment_core.recipes import load_recipe
from alignment_core.reporting import bundle
from alignment_core.reporting.bundle import write_bundle
from alignment_core.reporting.run_report import fenced
from tests.align import align_here

RUN = "0c0ffee0-0000-4000-8000-000000000001"
RECIPE: dict[str, Any] = {
    "method": "sft",
    "name": "small",
    "model": {"name": "org/model"},
    "sft": {"data": {"sources": [{"path": "/home/jane/rows.jsonl"}]}},
    "tracking": {"wandb": {"project": "p"}},
}
TOKEN = "hf_abcdefghijklmnopqrstuvwx"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    monkeypatch.setattr(bundle, "examine", lambda store: [])
    monkeypatch.setattr(bundle.getpass, "getuser", lambda: "jane")
    return tmp_path / "home"


def run_of(home: Path, status: str = "failed", error: str = "sft: out of memory", **more: Any) -> RunRecord:
    record = new_record(RUN, "small", RECIPE, str(home / "store"), **more)
    with Journal(record).open() as written:
        written.stage(
            "model", "run", stage="base_model", key="1" * 64, key_parts={"stage": "base_model"}, at=journal.now()
        )
        written.stage(
            "sft", "failed", stage="sft", key="2" * 64, key_parts={"stage": "sft"}, reason=error, at=journal.now()
        )
        written.end(status, RuntimeError(error))
    (home / "logs").mkdir(parents=True, exist_ok=True)
    (home / "logs" / f"{RUN}.log").write_text(
        f"Traceback: in {home}/store and /home/jane/work\nHF_TOKEN={TOKEN}\nsent correct-horse-battery to the host\n"
        "postgresql+asyncpg://me:hunter22@db.example/runs\n"
    )
    return journal.read(RUN)


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_has_the_listed_files_and_no_others(home: Path, tmp_path: Path) -> None:
    done = write_bundle(run_of(home), tmp_path / "out")
    files = texts(tmp_path / "out")
    of_all = {"README.md", "recipe.yaml", "journal/run.json", "journal/stages.jsonl", "versions.json", "doctor.json"}
    assert of_all <= set(files)
    assert {Path(name).parts[0] for name in files} <= {
        *re.findall("^``(.+?)/?``  ", bundle.__doc__ or "", re.MULTILINE)
    }
    assert f"logs/{RUN}.log" in files
    assert set(files) == set(done.files)
    assert "* status: `failed`" in files["README.md"]
    assert "## Where it failed: sft\n\n```text\nsft: out of memory" in files["README.md"]
    packages = {package.partition("==")[0] for package in json.loads(files["versions.json"])["packages"]}
    assert {"alignment", "torch", "prefect", "tiktoken"} <= packages
    assert "<removed>" not in files["versions.json"]
    assert load_recipe(tmp_path / "out" / "recipe.yaml").name == "small"


def test_secrets_homes_and_names_are_in_no_file(home: Path, tmp_path: Path) -> None:
    record = run_of(home, error=f"no access with {TOKEN} for jane in {home}: s3rv1ce-key")
    done = write_bundle(record, tmp_path / "out", secrets=("s3rv1ce-key",))
    everything = "\n".join(texts(tmp_path / "out").values())
    for secret in (TOKEN, "correct-horse-battery", "hunter22", "s3rv1ce-key", str(home), "/home/jane", "jane"):
        assert secret not in everything, secret
    assert "$ALIGN_HOME/store" in everything
    assert "db.example" in everything, "other values stay"
    assert done.cut["secrets"] >= 4


def test_rows_are_left_out_of_the_report_unless_requested(home: Path, tmp_path: Path) -> None:
    record = run_of(home)
    text = "## Held-out prompts, and what each policy answered\n\n```text\nmy secret prompt\n```\n\n"
    shown = f"# Run\n\n{text}## Stages\n\nrows\n"
    (journal.folder_of(RUN) / "report.md").write_text(shown)
    write_bundle(record, tmp_path / "out")
    report = (tmp_path / "out/report/report.md").read_text()
    assert "my secret prompt" not in report
    assert "## Stages\n\nrows" in report
    write_bundle(record, tmp_path / "with", samples=True)
    assert "my secret prompt" in (tmp_path / "with/report/report.md").read_text()


def test_a_row_that_looks_like_a_title_ends_no_section() -> None:
    row: dict[str, str | float] = {"prompt": "my\n## Stages\nsecret\n```\n## More\nsecret"}
    shown = ["# Run", "", "## Completions of generate", "", *fenced(row), "", "## Stages", "", "| sft |", ""]
    assert bundle.without_samples("\n".join(shown)) == "# Run\n\n## Stages\n\n| sft |\n"


def test_missing_files_of_a_run_are_listed(home: Path, tmp_path: Path) -> None:
    record = run_of(home)
    (home / "logs" / f"{RUN}.log").unlink()
    (journal.folder_of(RUN) / "stages.jsonl").unlink()
    done = write_bundle(record, tmp_path / "out")
    assert {"logs", "report.md", "stages.jsonl"} <= set(done.missing)
    assert "* logs: it has none any more" in (tmp_path / "out/README.md").read_text()


def test_a_missing_store_does_not_fail_the_bundle(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run_of(home).model_copy(update={"store": "/proc/no/such/store"})
    done = write_bundle(record, tmp_path / "out")
    assert (tmp_path / "out/README.md").is_file()
    assert "why.json" in set(done.missing) | set(done.files)


def test_a_long_log_is_reduced_to_its_beginning_and_end(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "LONGEST", 1000)
    record = run_of(home)
    (home / "logs" / f"{RUN}.log").write_text("\n".join(f"line {number}" for number in range(1000)))
    write_bundle(record, tmp_path / "out")
    text = (tmp_path / "out" / "logs" / f"{RUN}.log").read_text()
    assert text.startswith("line 0\n")
    assert text.endswith("line 999")
    assert re.search(r"\[… \d+ bytes are left out here …\]", text)
    assert len(text) < 1200


def test_a_folder_with_files_is_refused_and_an_empty_folder_is_filled(home: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already; choose another folder with --output"):
        write_bundle(run_of(home), tmp_path / "out")
    assert texts(tmp_path / "out") == {"mine.txt": "mine"}
    (tmp_path / "empty").mkdir()
    write_bundle(journal.read(RUN), tmp_path / "empty")
    assert (tmp_path / "empty" / "README.md").is_file()


def test_a_full_disk_leaves_no_partial_bundle(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, writes = run_of(home), []

    def write_text(path: Path, text: str) -> int:
        writes.append(path)
        if len(writes) > 2:
            raise OSError(28, "No space left on device")
        return original(path, text)

    original = Path.write_text
    (tmp_path / "there").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(EnvironmentFault, match=r"cannot be written: No space left on device; nothing was left"):
            write_bundle(record, tmp_path / "there" / "out")
    assert list((tmp_path / "there").iterdir()) == []


def test_a_live_run_is_running_and_a_dead_run_died(home: Path, tmp_path: Path) -> None:
    record = new_record(RUN, "small", RECIPE, str(home / "store"))
    with Journal(record).open():
        write_bundle(journal.read(RUN), tmp_path / "lives")
    assert "* status: `running`" in (tmp_path / "lives/README.md").read_text()
    kept = record.model_copy(update={"status": "running"})
    (journal.folder_of(RUN) / "run.json").write_text(kept.model_dump_json())
    write_bundle(journal.read(RUN), tmp_path / "died")
    assert "* status: `died`" in (tmp_path / "died/README.md").read_text()


def test_the_command_writes_the_bundle_into_the_working_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(home)
    monkeypatch.chdir(tmp_path)
    done = align_here(home, "report", "small", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["folder"] == str(tmp_path / f"align-report-{RUN[:8]}")
    assert outcome["files"]["README.md"] == os.path.getsize(tmp_path / f"align-report-{RUN[:8]}" / "README.md")
    again = align_here(home, "report", "last")
    assert again.returncode == 2
    assert "is there already" in again.stderr
