"""A judge whose server the stage starts: real vLLM on a small model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment_core.artifacts import Reference
from alignment_core.errors import EnvironmentFault
from alignment_core.execution.scheduling import Ticket
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.rewards.base import Opening, content, kind_of
from tests.rewards.judge_server import completion
from tests.rewards.reward_server import Server
from tests.rewards.test_model_reward import row

QUESTION = "{prompt}?{completion}"


def judge(**fields: Any) -> Any:
    return CHOICE.validate({"served_judge": "judge/production", "template": QUESTION, **fields})


def opening(folder: Any) -> Opening:
    return Opening("rl.rewards.0", ResourcesConfig(), model=Model(folder, Reference("model", "a" * 64)))


def test_the_judge_model_is_an_input_and_the_question_is_in_the_key() -> None:
    reward = judge()
    assert reward.model.name == "judge/production"
    (by_default,) = content([reward], "rl.rewards")
    (with_template,) = content([judge(template="{completion}")], "rl.rewards")
    assert by_default["served_judge"] is True
    assert by_default != with_template
    with pytest.raises(ValueError, match="a judge has to see the answer"):
        judge(template="{prompt}")


def test_the_start_of_a_judges_server_is_reported_as_start_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server starts between the two calls that a stage's ticket counts as start-up; requests follow after."""
    events: list[str | None] = []

    @contextmanager
    def served(*_: Any, **__: Any) -> Iterator[Any]:
        events.append("started")
        yield SimpleNamespace(url="http://127.0.0.1:9/v1", token="t", shortened=None, stop_ids=())

    monkeypatch.setattr("alignment_core.inference.http_server.served", served)
    reported = replace(opening(tmp_path), starting=Ticket(starts=events.append).starting)
    with pytest.raises(EnvironmentFault, match="no server answers"):
        kind_of(judge()).open(judge(), reported)
    assert events == ["the judge's server, and loads its model", "started", None]


def test_a_judge_is_served_with_its_code_and_stops_where_engines_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(lambda request: completion("Score: 10"))
    trusted: list[bool] = []

    @contextmanager
    def served(*_: Any, trust_remote_code: bool, **__: Any) -> Iterator[Any]:
        trusted.append(trust_remote_code)
        url = server.url.removesuffix("/score") + "/v1"
        yield SimpleNamespace(url=url, token="t", shortened=None, stop_ids=(5, 7))

    monkeypatch.setattr("alignment_core.inference.http_server.served", served)
    model = replace(opening(tmp_path).model, trust_remote_code=True)  # type: ignore[type-var]
    source: Any = kind_of(judge()).open(judge(), replace(opening(tmp_path), model=model))
    try:
        assert dict(source([{**row("2+2=", "4"), "label": None}])) == {0: 1.0}
    finally:
        source.close()
        server.end()
    assert trusted == [True]
    assert server.requests[0]["stop_token_ids"] == [5, 7]


@pytest.mark.slow
def test_a_served_judge_has_the_models_verdicts_and_ends_its_server(tiny_model: Any) -> None:
    rows = [{**row("<user>2+2=<assistant>", text, "2+2="), "label": None} for text in ("4", "five")]
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model()), AutoModelForCausalLM.from_pretrained(tiny_model())
    chances = []
    for judged in rows:
        messages = [{"role": "user", "content": f"2+2=?{judged['completion_text']}"}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        chances.append(torch.softmax(model(ids).logits[0, -1].detach(), -1))
    letters = [number for number in range(97, 123) if all(number in chance.topk(20).indices for chance in chances)]
    assert len(letters) >= 2, "else there would be nothing to compare"
    worth = {chr(number): place / len(letters) for place, number in enumerate(letters)}
    reward = judge(verdicts=worth)
    source: Any = kind_of(reward).open(reward, opening(tiny_model()))
    try:
        rewards = dict(source(rows))
        url = source._endpoint.replicas[0].url
        assert psutil.Process().children(recursive=True)
    finally:
        source.close()
    source.close()  # as when a run that is stopped ends
    for place, distribution in enumerate(chances):
        total = sum(float(distribution[ord(letter)]) for letter in worth)
        expected = sum(float(distribution[ord(letter)]) * value for letter, value in worth.items()) / total
        assert rewards[place] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.slow
def test_a_judge_that_vllm_cannot_serve_is_an_error(tiny_model: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(EnvironmentFault, match="judge: vLLM's server did not start"):
        kind_of(judge()).open(judge(), opening(tmp_path))
