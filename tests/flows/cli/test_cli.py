"""The ``align`` command on a real store: output and exit codes. No flow runs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli import main as cli
from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from tests.align import align_here
from tests.matrix import cases

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "alignment.flows.cli.main"]
RECIPE = "method: sft\nname: demo\nmodel: some/model\nsft: {data: rows.jsonl}\n"
Align = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def align(tmp_path: Path) -> Align:
    """``align("tags", "ls")`` is the command with a separate ALIGN_HOME."""
    return partial(align_here, tmp_path)


@pytest.fixture
def references(store: Store, tmp_path: Path) -> dict[str, Reference]:
    """data → sft; the tag policy/production moved from the imported base to sft."""
    references: dict[str, Reference] = {}
    for number, (name, kind, inputs) in enumerate(
        [("base", "model", None), ("data", "dataset", {}), ("sft", "model", {"model": "base", "data": "data"})]
    ):
        folder = tmp_path / "inputs" / name
        folder.mkdir(parents=True)
        (folder / "content.txt").write_text(f"this is {name}")
        draft = ProvenanceDraft(
            key=digest_of(name),
            stage=name,
            label=f"run/{name}",
            inputs={role: references[other] for role, other in (inputs or {}).items()},
            finished_at=f"2026-01-01T00:00:0{number}Z",
        )
        references[name] = store.publish(folder, kind, None if inputs is None else draft)
    store.tags.move("policy/production", references["base"], None, "imported")
    store.tags.move("policy/production", references["sft"], references["base"], "accuracy rose [see report]")
    return references


def parsed(done: subprocess.CompletedProcess[str], code: int = 0) -> dict:
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        (RECIPE, ["--set", "sft.trainin.batch_size=1"], "sft.trainin: unknown field; did you mean 'training'?"),
        (RECIPE, ["--set", "seed"], "--set seed: write it as path=value"),
        (RECIPE, ["--set", "tracking.wandb.mode=online"], "tracking.wandb.project: is missing and has no default"),
        ("method: [", [], "recipe.yaml:1:10: not valid YAML"),
        (RECIPE, ["--store", "ftp://bucket"], "there are no ftp:// stores; name a folder, or a URI that begins with"),
    ],
    ids=["unknown field", "override", "tracking", "yaml", "store"],
)
def test_an_invalid_recipe_exits_2_with_the_fix(align, tmp_path, text, overrides, sentence):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    done = align("run", str(recipe), *overrides, "--json")
    failure = parsed(done, 2)
    assert sentence in failure["error"]
    assert (failure["status"], failure["exit_code"]) == ("failed", 2)
    assert sentence in done.stderr
    assert done.stderr.startswith("invalid input: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "model", "sentence"),
    [
        ("check", "model=TAG", "model: TAG names a dataset; the required kind is model"),
        ("check", "model={name: policy/production, chat_template: '{{ messages }}'}", "leave the field out"),
        (
            "check",
            "model=model@sha256:0123456789ab",
            "has no artifact 'model@sha256:0123456789ab'; `align artifacts ls`",
        ),
    ],
    ids=["kind", "template", "absent"],
)
def test_a_model_from_the_store_must_be_there_be_one_and_keep_its_chat_template(
    align, tmp_path, references, command, model, sentence
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("rows.jsonl", "{task: reverse}"))
    data = str(references["data"])
    failure = parsed(align(command, str(recipe), "--set", model.replace("TAG", data), "--json"), 2)
    assert sentence.replace("TAG", data) in failure["error"]


def test_without_json_the_sentence_is_on_stderr_alone(align, tmp_path):
    done = align("run", str(tmp_path / "absent.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"invalid input: {tmp_path}/absent.yaml: no such recipe file\n"


def test_an_unknown_command_and_a_missing_argument_exit_2(align):
    for arguments in (("artefacts",), ("lineage",)):
        assert align(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["artifacts", "show", "policy/prodution"], "did you mean 'policy/production'?"),
        (["artifacts", "show", "nonsense"], "or a tag (there are: policy/production)"),
        (["lineage", "0123456"], "has no artifact '0123456'; `align artifacts ls` lists what there is"),
        (["promote", "polcy/production", "--tag", "policy/other"], "did you mean 'policy/production'?"),
        (["promote", "policy/production", "--if-current", "0123456"], "has no artifact '0123456'"),
        (["rollback", "policy/prodution"], "there is no tag policy/prodution"),
        (["diff", "policy/production", "0123456"], "has no artifact '0123456'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_exits_2_with_similar_names(align, references, command, sentence):
    assert sentence in parsed(align(*command, "--json"), 2)["error"]


def test_a_name_that_can_be_no_tag_exits_2(align, store):
    assert "is not a tag name" in parsed(align("tags", "history", "No Tag", "--json"), 2)["error"]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_and_sigterm_exit_as_in_a_shell_and_show_how_to_resume(tmp_path, number, code, word):
    fifo = tmp_path / "recipe.yaml"
    os.mkfifo(fifo)  # reading it blocks for ever, as nothing writes to it
    process = subprocess.Popen(
        [*COMMAND, "run", str(fifo)], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(100):  # opening for writing succeeds as soon as the command waits for it
        try:
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            time.sleep(0.1)
    time.sleep(0.2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    os.close(writer)
    assert process.returncode == code
    assert stderr.strip().startswith(f"{word}: finished stages are kept; `align resume last`, or the same command")


# ---------------------------------------------------------------- artifacts


def test_ls_lists_artifacts_with_maker_size_and_tags(align, references):
    rows = {row["reference"]: row for row in parsed(align("artifacts", "ls", "--json"))["artifacts"]}
    assert set(rows) == set(map(str, references.values()))
    sft = rows[str(references["sft"])]
    assert (sft["kind"], sft["made_by"], sft["files"], sft["bytes"]) == ("model", "run/sft", 1, len("this is sft"))
    assert sft["tags"] == ["policy/production"]
    assert rows[str(references["base"])]["made_by"] == ""


def test_ls_as_text_shows_names_that_the_other_commands_accept(align, store, references):
    text = align("artifacts", "ls", "--kind", "model").stdout
    assert all(references[name].short in text for name in ("base", "sft"))
    assert references["data"].short not in text
    assert store.resolve(references["sft"].short) == references["sft"]


def test_ls_shows_whole_labels_and_tags_at_80_columns(align, store, tmp_path):
    labels = ["round-12/evaluation/generate", "reward-model/data"]
    for label in labels:
        folder = tmp_path / label
        folder.mkdir(parents=True)
        (folder / "content.txt").write_text(label * 100)
        key = digest_of(label)
        draft = ProvenanceDraft(key=key, stage="generate", label=label, finished_at="2026-01-01T00:00:00Z")
        store.tags.move(f"inbox/{label}", store.publish(folder, "reward-model", draft), None, "test")
    lines = align("artifacts", "ls").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for label in labels:
        assert any(f" {label} " in line for line in lines)
        assert any(line.strip() == f"tag inbox/{label}" for line in lines)


def test_an_empty_store_is_no_error(align):
    assert parsed(align("artifacts", "ls", "--json")) == {"artifacts": []}
    assert align("tags", "ls").stdout == "no tags yet\n"


def test_show_gives_files_provenance_and_a_readable_path(align, references):
    shown = parsed(align("artifacts", "show", "policy/production", "--json"))
    assert shown["reference"] == str(references["sft"])
    assert [entry["path"] for entry in shown["files"]] == ["content.txt"]
    assert shown["provenance"][0]["inputs"]["data"] == str(references["data"])
    assert Path(shown["path"], "content.txt").read_text() == "this is sft"


def test_verify_reads_all_artifacts_or_a_named_one(align, references):
    assert parsed(align("artifacts", "verify", "--json")) == {"verified": 3, "problems": {}, "pruned": []}
    assert align("artifacts", "verify", references["sft"].short).stdout == "1 verified, 0 damaged\n"


def test_verify_names_a_corrupt_blob_and_exits_1(align, store, references):
    blob = store.manifest(references["sft"]).files[0].sha256
    path = next(path for path in Path(store.workspace.cache).parent.rglob(blob) if "blobs" in path.parts)
    path.chmod(0o644)
    path.write_text("THIS IS SFT")
    problems = parsed(align("artifacts", "verify", "--json"), 1)["problems"]
    assert list(problems) == [str(references["sft"])]
    assert blob in problems[str(references["sft"])][0]
    done = align("artifacts", "verify")
    assert done.returncode == 1
    assert blob in done.stdout
    assert done.stdout.endswith("3 verified, 1 damaged\n")


def test_gc_only_lists_garbage_without_delete(align, store, references, tmp_path):
    folder = tmp_path / "unused"
    folder.mkdir()
    (folder / "file").write_text("nothing needs this")
    unused = store.publish(folder, "model")
    outcome = parsed(align("artifacts", "gc", "--older-than", "0", "--json"))
    assert outcome["deleted"] is False
    assert {"blob", "manifest"} <= {garbage["what"] for garbage in outcome["garbage"]}
    assert unused in {manifest.reference for manifest in store.artifacts()}
    assert align("artifacts", "gc", "--older-than", "0", "--delete").stdout.startswith("deleted ")
    assert {manifest.reference for manifest in store.artifacts()} == set(references.values())


def test_gc_prunes_on_request_and_pruned_artifacts_do_not_count_as_damaged(align, store, references, tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "rows").write_text("many completions")
    draft = ProvenanceDraft(key=digest_of("samples"), stage="generate", label="run/generate")
    samples = store.publish(folder, "rollouts", draft)
    prune = ("artifacts", "gc", "--rollouts-days", "0")
    assert [garbage["path"] for garbage in parsed(align(*prune, "--json"))["garbage"]] == [str(samples)]
    assert store.records.find(digest_of("samples")) is not None  # so far it was only listed
    assert align(*prune, "--delete").stdout.startswith("deleted 1 objects")

    assert parsed(align("artifacts", "verify", "--json")) == {"verified": 3, "problems": {}, "pruned": [str(samples)]}
    assert align("artifacts", "verify").stdout == "3 verified, 0 damaged, 1 pruned\n"
    assert "pruned" in align("artifacts", "ls", "--kind", "rollouts").stdout
    shown = parsed(align("artifacts", "show", samples.short, "--json"))
    assert (shown["pruned"], shown["path"], shown["provenance"][0]["stage"]) == (True, None, "generate")


# ---------------------------------------------------------------- tags and lineage


def test_tags_name_their_artifact(align, references):
    assert parsed(align("tags", "ls", "--json")) == {"tags": {"policy/production": str(references["sft"])}}
    assert align("tags", "ls").stdout == f"policy/production  {references['sft']}\n"


def test_the_history_of_a_tag_has_reasons_word_for_word(align, references):
    history = parsed(align("tags", "history", "policy/production", "--json"))["history"]
    assert [(move["number"], move["to"]) for move in history] == [
        (1, str(references["base"])),
        (2, str(references["sft"])),
    ]
    lines = align("tags", "history", "policy/production").stdout.splitlines()
    assert f"{references['sft']}  accuracy rose [see report]  by " in lines[1]


def test_lineage_goes_up_by_default_and_down_on_request(align, references):
    up = parsed(align("lineage", "policy/production", "--json"))
    assert list(up) == ["up"]
    assert {used["role"]: used["reference"] for used in up["up"]["artifacts"][0]["inputs"]} == {
        "model": str(references["base"]),
        "data": str(references["data"]),
    }
    both = parsed(align("lineage", references["data"].short, "--up", "--down", "--json"))
    assert both["up"]["artifacts"][0]["inputs"] == []
    assert [user["reference"] for user in both["down"]["artifacts"][0]["used_by"]] == [str(references["sft"])]
    text = align("lineage", "policy/production").stdout
    assert "by run/sft (sft)" in text
    assert "made outside: no record" in text


def test_lineage_in_formats_of_other_programs(align, references, monkeypatch):
    reference = references["sft"].short
    assert align("lineage", reference, "--format", "tree").stdout == align("lineage", reference).stdout
    assert align("lineage", reference, "--format", "json").stdout == align("lineage", reference, "--json").stdout
    for direction, edges in (("--up", 2), ("--down", 0)):
        dot = align("lineage", reference, direction, "--format", "dot").stdout
        assert dot.startswith("digraph lineage {\n")
        assert dot.endswith("}\n")
        assert dot.count("->") == edges
    svg = ElementTree.fromstring(align("lineage", reference, "--up", "--down", "--format", "svg").stdout)
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    events = [json.loads(line) for line in align("lineage", reference, "--format", "openlineage").stdout.splitlines()]
    assert [event["job"]["name"] for event in events] == ["run/data", "run/sft"]
    assert "are two formats" in parsed(align("lineage", reference, "--json", "--format", "dot"), 2)["error"]
    assert align("lineage", reference, "--format", "png").returncode == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = align("lineage", reference, "--format", "openlineage")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "install this project's extra `tracking`, or use --format json" in " ".join(missing.stderr.split())


def test_promote_moves_a_tag_only_if_it_still_points_to_the_expected_artifact(align, store, references):
    base, sft = str(references["base"]), str(references["sft"])
    done = parsed(align("promote", base, "--if-current", references["sft"].short, "--reason", "sft is rude", "--json"))
    assert (done["state"], done["to"], done["previous"], done["number"]) == ("promoted", base, sft, 3)
    assert store.tags.history("policy/production")[-1].reason == "sft is rude"
    late = align("promote", sft, "--if-current", sft, "--json")
    assert f"points to {references['base'].short}" in parsed(late, 1)["error"]
    again = align("promote", base, "--if-current", base)
    assert again.stdout == f"policy/production: unchanged, points to {base}\n"
    assert len(store.tags.history("policy/production")) == 3


def test_promote_requires_if_current_unless_the_tag_is_new(align, store, references):
    unsaid = parsed(align("promote", "policy/production", "--json"), 2)["error"]
    assert unsaid.startswith("--if-current is missing: the tag policy/production points to " + str(references["sft"]))
    assert parsed(align("promote", references["sft"].short, "--if-current", "none", "--json"), 1)  # it is not new
    assert align("promote", references["data"].short, "--tag", "data/now").returncode == 0
    assert align("promote", references["data"].short, "--tag", "data/then", "--if-current", "none").returncode == 0
    assert store.tags.get("data/now") == store.tags.get("data/then") == references["data"]


def test_promote_refuses_another_kind(align, store, references):
    refused = align("promote", references["data"].short, "--if-current", "policy/production", "--json")
    assert "points to a model, but " + references["data"].short + " is a dataset" in parsed(refused, 2)["error"]
    assert store.tags.get("policy/production") == references["sft"]


def test_rollback_restores_the_previous_artifact_with_a_reason(align, store, references):
    done = align("rollback", "policy/production", "--reason", "complaints")
    assert (
        done.stdout
        == f"policy/production: rolled back, points to {references['base']} (before: {references['sft'].short})\n"
    )
    assert store.tags.history("policy/production")[-1].reason == "rolled back to move 1: complaints"
    assert "pointed to nothing before" in parsed(align("rollback", "policy/production", "--json"), 2)["error"]
    forward = parsed(align("rollback", "policy/production", "--to", "2", "--json"))
    assert (forward["to"], forward["number"], forward["back_to"]) == (str(references["sft"]), 4, 2)
    assert "there is no tag policy/prod" in parsed(align("rollback", "policy/prod", "--json"), 2)["error"]


def test_diff_shows_differences_as_text_and_as_json(align, references):
    text = align("diff", references["base"].short, "policy/production").stdout
    assert f"b  {references['sft'].short}  by run/sft (sft)" in text
    assert "content.txt" in text
    difference = parsed(align("diff", references["base"].short, "policy/production", "--json"))
    assert (difference["identical"], difference["a"]["stage"], difference["b"]["stage"]) == (False, "", "sft")
    assert "identical" in align("diff", "policy/production", references["sft"].short).stdout
    assert parsed(align("diff", "policy/production", "0123456", "--json"), 2)


def test_prefects_background_threads_print_nothing_on_the_terminal():
    """Their loggers have separate names, which Prefect's logging level does not affect."""
    code = (
        "import logging\nfrom alignment.flows.service import environment\nenvironment.quiet_console()\n"
        "from prefect.events.worker import EventsWorker\nfrom prefect.logging.handlers import APILogWorker\n"
        "for worker in (EventsWorker, APILogWorker):\n"
        "    logging.getLogger(worker.__name__).warning('Still processing items: 2 items remaining...')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- closed output


REFUSED = """
import sys
from types import SimpleNamespace
from alignment.flows import preflight
from alignment.flows.cli import main as cli
from alignment.flows.cli import run
from alignment.flows.service import prefect_api
from alignment.flows.outcome import Outcome

promotion = {"state": "refused", "reasons": ["too low"], "tag": "policy/production"}
outcome = Outcome(status="completed", run_id="1", store=sys.argv[1], promotion=promotion).model_dump(mode="json")
run._displayed = lambda *_: outcome
preflight.check_recipe, preflight.early_host = (lambda *_: SimpleNamespace(warnings=[])), (lambda *_: None)
prefect_api.start_prefect_api = lambda: None
sys.argv = ["align", "run", *sys.argv[2:]]
cli.main()
"""


def ending(stream: str, command: list[str], home: Path) -> int:
    """The exit code of a command whose output and errors go to a closed pipe."""
    if stream == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    try:
        environment = os.environ | {"ALIGN_HOME": str(home)}
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=60).returncode
    finally:
        os.close(output)


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "more"), cases([("full", []), ("gone", ["--json"])], usual=[("gone", ["--json"])]))
def test_the_exit_code_of_a_run_is_kept_if_its_output_is_not_read(tmp_path, stream, more):
    assert ending(stream, [*COMMAND, "run", str(tmp_path / "missing.yaml"), *more], tmp_path) == 2
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = [sys.executable, "-c", REFUSED, str(tmp_path / "store"), str(tmp_path / "recipe.yaml"), *more]
    assert ending(stream, run, tmp_path) == 4


@pytest.mark.parametrize(("stream", "code"), [("full", 3), ("gone", 0)])
def test_a_command_that_only_prints_fails_on_a_full_disk_and_not_for_a_reader_that_has_gone(tmp_path, stream, code):
    assert ending(stream, [*COMMAND, "fields"], tmp_path) == code


def test_every_command_takes_json() -> None:
    def commands(group: Any, path: str) -> Iterator[tuple[str, bool]]:
        for command in group.registered_commands:
            yield (
                f"{path} {command.name or command.callback.__name__}",
                "as_json" in inspect.signature(command.callback).parameters,
            )
        for inner in group.registered_groups:
            yield from commands(inner.typer_instance, f"{path} {inner.name}")

    callbacks = dict(commands(cli.app, "align"))
    assert {"align env", "align tags history"} <= callbacks.keys()
    assert [name for name, takes in callbacks.items() if not takes] == []
