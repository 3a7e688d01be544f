"""`generation.stop`: completions are those of the same seed without it, up to the token that completes one of the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from alignment_core.cluster.group import ActorGroup
from alignment_core.data.completion_text import CompletionText
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.inference.completions import Completion, Request
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import GenerationConfig
from alignment_core.recipes.sections.rl import EnvironmentConfig
from tests.inference.test_engine_parity import POLICY, STOP

PROMPTS = [[72, 101, 108], [1, 2, 3, 4, 5], list(range(40))]
LETTERS = "#%&QZKWXV"
"""In no name of a special token. One of them is sampled about every thirty tokens."""
SAMPLING = {"num_generations": 3, "max_completion_length": 60}
Sample = Callable[..., list[Completion]]


@pytest.fixture(scope="module")
def engine(tiny_model: Any, machines: Any) -> Iterator[ActorGroup[Engine]]:
    with machines(1).engines(EngineRequest(Model(tiny_model(), POLICY["a"]), 128)) as group:
        yield group


@pytest.fixture(params=["generate", "sample", "advance"])
def sample(request: pytest.FixtureRequest, engine: ActorGroup[Engine]) -> Sample:
    """Completions by each of the ways to ask an engine for them."""

    def run(*stop: str) -> list[Completion]:
        config = GenerationConfig.model_validate({**SAMPLING, "stop": stop})
        if request.param == "generate":
            return engine.one(0, Engine.generate, str(POLICY["a"]), PROMPTS, config, [STOP], 7).each()
        requests = [Request(f"{number}", prompt, 60, number) for number, prompt in enumerate(PROMPTS * 3)]
        if request.param == "sample":
            return engine.one(0, Engine.sample, str(POLICY["a"]), requests, config, [STOP]).each()
        done: dict[str, Completion] = {}
        while len(done) < len(requests):
            done |= dict(engine.one(0, Engine.advance, [] if done else requests, config, [STOP], 600.0))
        return [done[request.name] for request in requests]

    return run


@pytest.mark.slow
def test_completions_end_with_the_token_that_completes_the_text(sample: Sample) -> None:
    whole, cut = sample(), sample(*LETTERS)
    lengths = []
    for before, after in zip(whole, cut, strict=True):
        ids = before.token_ids.tolist()
        first = next((place for place, token in enumerate(ids) if chr(token) in LETTERS), None)
        assert after.token_ids.tolist() == (ids if first is None else ids[: first + 1])
        assert after.logps == pytest.approx(before.logps[: len(after.logps)], abs=1e-6), "those of the sampled tokens"
        assert after.finish_reason == (before.finish_reason if first is None else "stop")
        lengths.append(first)
    assert any(first is not None for first in lengths)


@pytest.mark.slow
def test_a_text_may_be_several_tokens(sample: Sample) -> None:
    """Two of ASCII, which the first of the completions that have such a pair has first."""
    whole = sample()
    pairs = [
        (number, place)
        for number, completion in enumerate(whole)
        for place, pair in enumerate(zip(completion.token_ids, completion.token_ids[1:], strict=False))
        if all(32 < token < 127 for token in pair)
    ]
    number, place = pairs[0]
    text = "".join(map(chr, whole[number].token_ids[place : place + 2]))
    assert sample(text)[number].token_ids.tolist() == whole[number].token_ids[: place + 2].tolist()


SOURCE = """
class Talks:
    def reset(self, prompt, label):
        return None
    def step(self, completion):
        return {"observation": completion, "reward": 0.0, "done": False}
"""


def test_an_environment_answers_a_turn_that_a_text_ended_behind_its_end(tmp_path: Path) -> None:
    """The environment gets the text, and its answer follows the end of the turn, which the policy did not sample."""
    (tmp_path / "talks.py").write_text(SOURCE)
    config = EnvironmentConfig.model_validate({"name": f"{tmp_path / 'talks.py'}:Talks"})
    environments = Environments(config, byte_tokenizer(), processes=1, timeout=60)
    try:
        prompt = {
            "prompt": "<user>?<assistant>",
            "label": None,
            "task": None,
            "source": "p:1",
            "prompt_ids": [258, 63, 259],
        }
        episode = Episode(0, 0, 0, prompt, most_tokens=40)
        environments.answer_all([episode])
        ids = np.frombuffer(b"go.", np.uint8).astype(np.int32)
        episode.append_turn(Completion(ids, np.zeros(3, np.float32), np.zeros(3, np.int32), "stop"))
        environments.answer_all([episode])
    finally:
        environments.close()
    assert byte_tokenizer().decode(episode.ids) == "go.<eos><user>go.<assistant>"
    assert episode.mask.tolist() == [True] * 3 + [False] * (len(episode.ids) - 3)
    assert CompletionText(byte_tokenizer())(ids.tolist(), "stop") == "go."


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ValidationError, match="an empty text would end every completion at once"):
        GenerationConfig(stop=("",))


def test_sampling_without_texts_has_the_keys_of_earlier_versions() -> None:
    assert "stop" not in GenerationConfig().model_dump()
