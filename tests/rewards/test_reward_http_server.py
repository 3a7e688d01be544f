"""A reward model behind HTTP: batching of concurrent requests, a token, and a clean shutdown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection
from typing import Any

import httpx
import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.data.context import context_length
from alignment_core.data.template import Renderer
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.endpoint import Endpoint, asks_for, read_rewards
from alignment_core.rewards.model_reward import Judge
from alignment_core.rewards.server import Rewards, RewardServer, scores_of_texts
from alignment_core.training.forward import ForwardJob


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    servers: list[RewardServer] = []

    def start(compute: Callable[[list[str]], Rewards], token: str | None = None) -> str:
        servers.append(RewardServer(compute, "the-model", "127.0.0.1", 0, token))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.stop()


def lengths(texts: list[str]) -> Rewards:
    return [float(len(text)) if text else None for text in texts]


def test_the_endpoint_reward_can_use_the_reward_server(serve: Any) -> None:
    rows = [{"prompt_text": "p", "completion_text": "x" * n, "label": None, "source": "a:1"} for n in range(5)]
    endpoint = Endpoint(
        [serve(lengths)], 2, None, 10.0, "f.urls", asks_for(lambda row: row["completion_text"]), read_rewards
    )
    assert dict(endpoint(rows)) == {0: None, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_requests_that_wait_are_computed_together(serve: Any) -> None:
    sizes, first = [], threading.Event()

    def slow(texts: list[str]) -> Rewards:
        sizes.append(len(texts))
        first.wait(30)
        return lengths(texts)

    url = serve(slow)
    with ThreadPoolExecutor(6) as threads:
        futures, deadline = list[Future[httpx.Response]](), time.monotonic() + 30
        for n in range(1, 7):
            futures.append(threads.submit(httpx.post, url, json={"query": ["x" * n] * 2}, timeout=60))
            while not sizes and time.monotonic() < deadline:
                time.sleep(0.02)  # the first one is being computed, alone, before the others come
        while "requests_waiting 5" not in httpx.get(f"{url}metrics").text and time.monotonic() < deadline:
            time.sleep(0.02)
        first.set()
        answers = [future.result().json()["rewards"] for future in futures]
    assert answers == [[float(n)] * 2 for n in range(1, 7)]
    assert sizes == [2, 10]
    metrics = httpx.get(f"{url}metrics").text
    assert "align_reward_texts_total 12\n" in metrics
    assert "align_reward_batches_total 2\n" in metrics


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"not JSON", 400, "is not JSON"),
        (b"[]", 400, 'needs "query"'),
        (b'{"query": [1]}', 400, 'needs "query"'),
        (b'{"query": "one"}', 400, 'needs "query"'),
    ],
)
def test_an_invalid_request_is_refused_and_the_next_request_answered(
    body: bytes, status: int, says: str, serve: Any
) -> None:
    url = serve(lengths)
    answer = httpx.post(url, content=body)
    assert (answer.status_code, says in answer.json()["error"]) == (status, True)
    assert httpx.post(url, json={"query": ["abc"], "prompts": ["a"], "labels": [None]}).json() == {
        "rewards": [3.0],
        "scores": [3.0],
        "extra_logs": {},
    }
    assert httpx.post(url, json={"query": []}).json()["rewards"] == []


def test_a_model_that_fails_fails_the_requests_of_its_batch_alone(serve: Any) -> None:
    def picky(texts: list[str]) -> Rewards:
        if "bad" in texts:
            raise RuntimeError("out of luck")
        return lengths(texts)

    url = serve(picky)
    answer = httpx.post(url, json={"query": ["bad"]})
    assert (answer.status_code, answer.json()["error"]) == (500, "RuntimeError: out of luck")
    assert httpx.post(url, json={"query": ["good"]}).json()["rewards"] == [4.0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 100_000, "the JSON of the body is nested too deeply"),
        (b'{"query": ' + b'[{"a": ' * 50_000, "the JSON of the body is nested too deeply"),
        (b'{"query": [' + b"9" * 10_000 + b"]}", "the body is not JSON"),  # Python converts 4,300 digits at most
        (b'{"query": ["\\ud800"]}', "a text holds half of a surrogate pair, which is no character"),
        (b"\xff", "the body is not JSON"),
    ],
)
def test_an_unparsable_body_is_the_clients_error(serve: Any, body: bytes, says: str) -> None:
    url = serve(lengths)
    answer = httpx.post(url, content=body)
    assert (answer.status_code, answer.json()["error"]) == (400, says)
    assert httpx.post(url, json={"query": ["good"]}).json()["rewards"] == [4.0]


@pytest.mark.parametrize(("length", "status"), [("9" * 5000, 413), ("²", 411), ("-1", 411), ("1e3", 411)])
def test_a_length_that_is_none_is_refused(serve: Any, length: str, status: int) -> None:
    host, port = serve(lengths).removeprefix("http://").rstrip("/").split(":")
    with create_connection((host, int(port)), 30) as connection:
        connection.sendall(f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
        assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_requests_for_rewards_need_the_token(serve: Any) -> None:
    url = serve(lengths, "secret")
    assert httpx.get(f"{url}health").json() == {"status": "ok", "model": "the-model"}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.post(url, json={"query": ["a"]}, headers=headers).status_code == 401
    assert httpx.post(url, json={"query": ["a"]}, headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.fixture
def reward_model(tiny_model: Any, tmp_path: Path) -> Path:
    import torch
    import transformers

    folder = tmp_path / "reward-model"
    shutil.copytree(tiny_model(), folder)
    torch.manual_seed(1)
    transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return folder


def test_a_text_has_the_score_of_its_tokens_with_eos(reward_model: Path) -> None:
    model = Model(reward_model, Reference("reward-model", "0" * 64))
    forward = ForwardJob(model, "score").open(ResourcesConfig(), Device("cpu", 1))
    tokenizer = model.tokenizer()
    scores = scores_of_texts(forward, 40)(["<user>2+2=<assistant>4<eos>", "<user>2+2=<assistant>4", "x" * 40])
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<user>2+2=<assistant>", "4"))
    (expected,) = forward.run([(prompt, [*answer, tokenizer.eos_token_id])])
    assert scores == [pytest.approx(float(expected), abs=1e-6)] * 2 + [None]


def test_a_text_beyond_the_positions_of_a_gpt2_has_no_score(tmp_path: Path) -> None:
    """Its context is `n_positions` in the config.json; the embedding of a later position would be an IndexError."""
    import torch
    import transformers

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40, "vocab_size": len(tokenizer), "num_labels": 1}
    torch.manual_seed(1)
    transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**shape, **tokens)).save_pretrained(tmp_path)
    forward = ForwardJob(Model(tmp_path, Reference("reward-model", "0" * 64)), "score").open(
        ResourcesConfig(), Device("cpu", 1)
    )
    scores = scores_of_texts(forward, context_length(tmp_path))(["x" * 39, "x" * 40])  # and the token that ends them
    expected = hugging_face_score(tmp_path, [*b"x" * 39, tokenizer.eos_token_id])
    assert scores == [pytest.approx(expected, abs=1e-5), None]


@pytest.mark.parametrize("trained_here", [False, True])
def test_a_text_has_the_score_that_the_reward_model_gives_its_tokens_whatever_token_ended_it(
    reward_model: Path, trained_here: bool
) -> None:
    """As Qwen's: turns end with <|im_end|> and a line break, and base policies stop at <|endoftext|>, here <unused0> and EOS. A
    reward model from elsewhere reads ``apply_chat_template``, one that was trained here ends with the turn."""
    kind = "reward-model" if trained_here else "model"
    byte_tokenizer(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<unused0>{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ).save_pretrained(reward_model)
    (reward_model / "generation_config.json").write_text('{"eos_token_id": [257, 261]}')
    model = Model(reward_model, Reference(kind, "0" * 64))
    forward = ForwardJob(model, "score").open(ResourcesConfig(), Device("cpu", 1))
    prompt = "<user>2+2=<unused0>\n<assistant>"
    ended = [f"{prompt}4{end}" for end in ("", "<eos>", "<unused0>", "<unused0>\n", "<eos>\n", "<unused1>", "<pad>")]
    tokenizer = model.tokenizer()
    messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    expected = hugging_face_score(reward_model, ids[:-1] if trained_here else ids)
    assert scores_of_texts(forward, None)(ended) == [pytest.approx(expected, abs=1e-5)] * len(ended)

    @contextmanager
    def scores(model: Model, name: str, verdicts: tuple[int, int] | None = None) -> Iterator[Any]:
        yield lambda pairs: forward.run(pairs).tolist()

    opening = Opening(
        "rl.rewards.0",
        ResourcesConfig(),
        tokenizer,
        turn_end=Renderer(tokenizer, None, [257, 261]).turn_end,
        model=model,
        scores=scores,
    )
    prompt_ids = tokenizer(prompt)["input_ids"]
    answers = ([52, 257], [52, 261])
    rows = [{"prompt_ids": prompt_ids, "completion_ids": ids, "finish_reason": "stop"} for ids in answers]
    in_process = dict(Judge.open(opening)(rows))
    assert [in_process[0], in_process[1]] == pytest.approx([expected] * 2, abs=1e-5)


def test_a_reward_model_whose_end_of_turn_is_its_padding_is_read_where_transformers_reads_it(
    reward_model: Path,
) -> None:
    """TRL pads with EOS where a tokenizer has no padding token, as Llama 3's, and so trains the token before it."""
    config = reward_model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": 257}))
    model = Model(reward_model, Reference("model", "0" * 64))
    forward = ForwardJob(model, "score").open(ResourcesConfig(), Device("cpu", 1))
    answers = ([*b"ok", 257], [*b"ok", 257, 257], [*b"ok"], [257, 65])
    scores = forward.run([([*b"hi"], answer) for answer in answers]).tolist()
    expected = [hugging_face_score(reward_model, [*b"hi", *answer]) for answer in answers]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert forward.run([([257], [257])]).tolist() == pytest.approx(
        [hugging_face_score(reward_model, [257, 257])], abs=1e-5
    )


def hugging_face_score(folder: Path, ids: list[int]) -> float:
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.mark.slow
def test_the_command_serves_until_ended(reward_model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "ALIGN_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "alignment.flows.cli.main", "serve-reward", str(reward_model), "--port", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        announcement = next(line for line in server.stderr if " at http://" in line)
        url = announcement.rpartition(" at ")[2].partition(";")[0]
        answer = httpx.post(url, json={"query": ["a", "x" * 1000]}, timeout=60).json()
        assert isinstance(answer["rewards"][0], float)
        assert answer["rewards"][1] is None
        server.send_signal(signal.SIGTERM)
        assert "ended after 2 texts" in server.stderr.read()
    assert server.returncode == 0
    outside = subprocess.run(
        [*command, "--host", "0.0.0.0"], env=environment, capture_output=True, text=True, check=False
    )
    assert (outside.returncode, "set a token with ALIGN_SERVE_TOKEN or --token" in outside.stderr) == (2, True)
