"""``align generate``: a file of prompts, a file of answers."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli.generate import NO_LIMIT, left_out_sentence, limits_of
from alignment.flows.console import write_file
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.recipes import ModelConfig
from alignment_core.recipes.load import parse_recipe
from tests.align import Align, align_here

MODEL = (
    "{scratch: {hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
    "max_position_embeddings: 2048}}"
)
PROMPTS = ("aaa", "b" * 1500, "c" * 2040, "d")
"""The template puts 2 tokens around the bytes of a prompt, so that the third does not leave 16 of 2,048 for an answer."""


@pytest.fixture(scope="module")
def generated(align: Align, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """The files of two equal runs, and their outcomes."""
    folder = tmp_path_factory.mktemp("generated")
    rows = [{"prompt": prompt, "label": str(number)} for number, prompt in enumerate(PROMPTS)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-n", "2", "--max-tokens", "16", "--set", f"model={MODEL}", "--set", "resources.engines=1")
    files = (folder / "first.jsonl", folder / "second.jsonl")
    return [
        (file, align(folder / "home", "generate", "replaced", str(prompts), "-o", str(file), *options))
        for file in files
    ]


@pytest.mark.slow
def test_answers_have_the_order_of_their_prompts_and_are_equal_in_a_second_run(
    generated: list[tuple[Path, dict[str, Any]]],
) -> None:
    (first, outcome), (second, again) = generated
    assert [(result["rows"], result["file"]) for result in (outcome, again)] == [(6, str(first)), (6, str(second))]
    assert first.read_bytes() == second.read_bytes()
    assert [stage["state"] for stage in again["stages"] if stage["label"] == "generate"] == ["cached"]
    answers = [json.loads(line) for line in first.read_text().splitlines()]
    assert [(answer["prompt"], answer["label"], answer["sample"]) for answer in answers] == [
        (PROMPTS[number], str(number), sample) for number in (0, 1, 3) for sample in range(2)
    ]
    assert [answer["source"] for answer in answers[::2]] == [f"prompts.jsonl:{line}" for line in (1, 2, 4)]
    assert all(isinstance(answer["completion"], str) for answer in answers)
    assert {answer["finish_reason"] for answer in answers} <= {"stop", "length"}


@pytest.mark.slow
def test_prompts_too_long_for_the_model_are_left_out_and_counted(
    generated: list[tuple[Path, dict[str, Any]]],
) -> None:
    assert [outcome["prompts_left_out"] for _, outcome in generated] == [{"prompt_too_long": 1}] * 2


def recipe(**prompts: Any) -> Any:
    content: dict[str, Any] = {
        "method": "generate",
        "name": "a",
        "model": {"scratch": {"max_position_embeddings": 2048}},
        "generate": {"prompts": {"path": "p.jsonl", **prompts}, "generation": {"max_completion_length": 100}},
    }
    return parse_recipe(content)


def test_prompts_may_fill_the_context_except_for_the_longest_answer(tmp_path: Path) -> None:
    assert limits_of(recipe()) == {"max_length": 2048, "max_prompt_length": 1948}
    assert limits_of(recipe(max_length=512)) == limits_of(recipe(max_prompt_length=512)) == {}
    (tmp_path / "config.json").write_text("{}")
    unknown = recipe().model_copy(update={"model": ModelConfig(name=str(tmp_path))})
    assert limits_of(unknown) == {"max_length": NO_LIMIT}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    assert limits_of(unknown) == {"max_length": 64, "max_prompt_length": 1}


def test_prompts_without_answers_are_described() -> None:
    sentence = left_out_sentence(
        {"prompt_too_long": 2, "malformed": 1}, recipe(max_length=2048, max_prompt_length=1948)
    )
    assert sentence == (
        "3 prompts left out, without an answer: 1 could not be read as an example (malformed); 2 have a prompt longer than "
        "max_prompt_length (prompt_too_long); max_length is 2048, max_prompt_length is 1948"
    )


@pytest.mark.parametrize(
    ("output", "says"),
    [("there.jsonl", "is there already: give another --output, or --overwrite"), ("no/such/a.jsonl", "no such folder")],
)
def test_an_output_that_exists_or_has_no_folder_is_refused(output: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    done = align_here(tmp_path / "home", "generate", "a/model", "prompts.jsonl", "-o", str(tmp_path / output))
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "there.jsonl").read_text() == "mine"


def test_a_file_that_exceeds_the_space_leaves_nothing_and_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"out\.jsonl cannot be written: File too large"):
            write_file(tmp_path / "out.jsonl", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []
    write_file(tmp_path / "out.jsonl", "x" * 5000)
    assert (tmp_path / "out.jsonl").stat().st_size == 5000


def test_a_generate_recipe_only_samples() -> None:
    content: dict[str, Any] = {"method": "generate", "name": "a", "model": "m/m", "generate": {"prompts": "p.jsonl"}}
    assert parse_recipe(content).generate.generation.num_generations == 1  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="`evaluation` has no effect, as this recipe only samples"):
        parse_recipe({**content, "evaluation": {"prompts": "p.jsonl"}})
