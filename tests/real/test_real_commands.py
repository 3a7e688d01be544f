"""`align serve`, `align chat` and `align generate` with a pretrained model: greedy answers are those of
``transformers``."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.align import Align, align_here
from tests.processes import free_port
from tests.real.conftest import HUB_NAME

pytestmark = [pytest.mark.real, pytest.mark.slow]

LONGEST = 24
QUESTIONS = ("What is the capital of France?", "Name three colours.")


@pytest.fixture(scope="module")
def answer(real_model: Path) -> Any:
    """The greedy answer to a conversation, in at most ``LONGEST`` tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_model)

    def generate(*turns: str) -> str:
        messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(turns)]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=LONGEST)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return generate


@pytest.fixture(scope="module")
def server(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `align serve` says of itself."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "alignment.flows.cli.main", "serve", str(real_model), "--port", str(port), "--json"],
        env={**os.environ, "ALIGN_HOME": str(tmp_path_factory.mktemp("home"))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.exhaustive
def test_a_chat_with_a_served_model_has_the_answers_of_transformers(
    server: dict[str, Any], answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context fits into the key-value cache: with 46,080 bytes a token, 256 MiB hold 5,825 of its 8,192."""
    assert 1024 <= server["context"] <= 8192
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{question}\n" for question in QUESTIONS)))
    done = align_here(tmp_path, "chat", server["url"], "--temperature", "0", "--max-tokens", str(LONGEST), "--json")
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line)["answers"][server["url"]] for line in done.stdout.splitlines()]
    assert first == answer(QUESTIONS[0]) == "The capital of France is Paris."
    assert second == answer(QUESTIONS[0], first, QUESTIONS[1])


def test_generated_answers_are_those_of_transformers(
    align: Align, hub_cache: dict[str, str], answer: Any, folder: Path
) -> None:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    out = folder / "answers.jsonl"
    options = ("-o", str(out), "--max-tokens", str(LONGEST), "--temperature", "0")
    align(folder / "home", "generate", HUB_NAME, str(prompts), *options, **hub_cache)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["completion"] for row in rows] == [answer(question) for question in QUESTIONS]
    assert rows[0]["finish_reason"] == "stop"
