"""Two policies beside each other, by a judge that sees both orders."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from alignment_core.data.messages import user
from alignment_core.errors import DataError, UserError
from alignment_core.execution.scheduling import FIRST
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.pairwise_judge import PairwiseJudgeConfig
from alignment_core.rollout.schemas import rollout_schema, write_table
from alignment_core.stages import judge_pairs
from alignment_core.stages.judge_pairs import JudgePairsConfig, run
from tests.images import write_images
from tests.rewards.judge_server import answers, completion
from tests.rewards.reward_server import Answer, Server

MINE = {0: ["long answer", "a"], 1: ["same"], 2: ["x"], 3: ["first"]}
THEIRS = {0: ["short", "b"], 1: ["same"], 2: ["xxxx"], 3: ["other"]}


def rollouts(
    folder: Path, completions: dict[int, list[str]], condition: str = "", images: list[str] | None = None
) -> Path:
    folder.mkdir()
    rows = [
        {
            "prompt": prompt,
            "sample": sample,
            "prompt_ids": [1],
            "completion_ids": [1],
            "logps": [-1.0],
            "finish_reason": "stop",
            "prompt_text": f"prompt {prompt}{condition}",
            "completion_text": text,
            "source": f"p:{prompt}",
            "images": images,
        }
        for prompt, texts in completions.items()
        for sample, text in enumerate(texts)
    ]
    write_table(rows, rollout_schema(with_images=images is not None), folder / "shard-0.parquet")
    return folder


def test_a_served_judge_is_refused_for_prompts_with_images(tmp_path: Path) -> None:
    shown = rollouts(tmp_path / "shown", MINE, images=["a" * 64])
    context: Any = SimpleNamespace(inputs={"rollouts": shown, "baseline": shown})
    config = JudgePairsConfig(judge=PairwiseJudgeConfig(served_judge=ModelConfig(name="j")))
    with pytest.raises(
        UserError, match=r"^evaluation\.judge\.served_judge: its server reads text, and prompts have images"
    ):
        run(context, config)


def longer(content: dict[str, Any]) -> tuple[int, bytes]:
    """Likes the longer answer; of `first` and `other` always the one in first place; of `a` and `b` neither."""
    first, second = answers(content)
    if {first, second} == {"first", "other"}:
        return completion("[[B]] no, rather [[A]]")
    return completion("[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]")


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def run_stage(
        answer: Answer,
        mine: Any = MINE,
        theirs: Any = THEIRS,
        condition: str = "",
        image: Path | None = None,
        **fields: Any,
    ) -> tuple[Any, Any, Server]:
        servers.append(Server(answer))
        url = servers[-1].url.removesuffix("/score") + "/v1/"
        folder = tmp_path / str(len(servers))
        for name in ("output", "progress"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        inputs = {
            "rollouts": rollouts(folder / "mine", mine, condition, [image.name] if image else None),
            "baseline": rollouts(folder / "theirs", theirs, "", [image.name] if image else None),
        }
        if image:
            (inputs["baseline"] / "images").mkdir()
            (inputs["baseline"] / "images" / image.name).write_bytes(image.read_bytes())
        context: Any = SimpleNamespace(
            inputs=inputs,
            output=folder / "output",
            progress=folder / "progress",
            resources=ResourcesConfig(reward_timeout_seconds=5),
            report=lambda *_, **__: None,
        )
        config = JudgePairsConfig(judge=PairwiseJudgeConfig(judge=url, judge_model="j", **fields))  # type: ignore[arg-type]
        metrics = run(context, config)
        return metrics, json.loads((folder / "output" / "verdicts.json").read_text()), servers[-1]

    yield run_stage
    for server in servers:
        server.end()


def test_a_verdict_that_changes_with_the_position_is_a_tie(judge: Any) -> None:
    metrics, left, server = judge(longer, pairs_per_prompt=2)
    assert left["prompts"] == {"0": (1 + 0.5) / 2, "1": 0.5, "2": 0.0, "3": 0.5}
    assert metrics == {"win_rate": (0.75 + 0.5 + 0 + 0.5) / 4, "position_changed": 1 / 4, "pairs": 5}
    assert len(server.requests) == 8, "each pair in both orders, but for equal answers"
    assert {answers(request) for request in server.requests} >= {("x", "xxxx"), ("xxxx", "x")}
    first, *_ = judge(longer)
    assert first["pairs"] == 4, "one pair of each prompt by default"


def test_equal_answers_are_no_evidence_of_a_consistent_judge(judge: Any) -> None:
    """Consistency is a share of the pairs that were judged in both orders (Zheng et al. 2023, table 2): the judge compared
    one pair, and preferred the first place twice. Without such a pair nothing is known about it."""
    same = {prompt: ["same"] for prompt in range(3)}
    metrics, left, _ = judge(longer, {**same, 3: ["first"]}, {**same, 3: ["other"]})
    assert metrics == {"win_rate": 0.5, "position_changed": 1.0, "pairs": 4}
    assert left["position_changed"] == 1.0
    metrics, left, server = judge(longer, same, same)
    assert (metrics, server.requests) == ({"win_rate": 0.5, "pairs": 3}, [])
    assert "position_changed" not in left


def test_a_judge_sees_the_baselines_prompt_in_both_orders(judge: Any) -> None:
    """A conditional policy is asked for values of attributes, which would tell the judge whose answer is whose."""
    *_, server = judge(longer, condition=" [quality=9]")
    assert len(server.requests) == 6
    assert not any("quality" in json.dumps(request) for request in server.requests)


def test_a_judge_at_an_endpoint_sees_the_images_of_prompts(judge: Any, tmp_path: Path) -> None:
    """In both orders; a real server of text would refuse the request."""
    image = write_images(tmp_path)["red"].rename(tmp_path / ("a" * 64))
    metrics, _, server = judge(lambda content: completion("[[A]]"), image=image)
    assert metrics["position_changed"] == 1.0
    url = f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"
    contents = [request["messages"][0]["content"] for request in server.requests]
    assert len(contents) == 6
    assert all(content[0] == {"type": "image_url", "image_url": {"url": url}} for content in contents)
    assert all("Answer A:" in content[1]["text"] for content in contents)


def test_pairs_without_a_verdict_are_left_out_and_too_many_end_the_stage(judge: Any) -> None:
    def shy(content: dict[str, Any]) -> tuple[int, bytes]:
        return completion("I cannot say.") if "x" in answers(content) else longer(content)

    metrics, left, _ = judge(shy, max_failed=0.5)
    assert (sorted(left["prompts"]), metrics["failed"]) == (["0", "1", "3"], 1)
    with pytest.raises(DataError, match=r"the judge j gave no verdict .* \(evaluation.judge.max_failed 0.1\)"):
        judge(shy)
    with pytest.raises(DataError, match="sampled on different prompts"):
        judge(longer, {0: ["a"]}, {1: ["a"]})


def test_saved_verdicts_are_not_requested_again(judge: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(judge_pairs, "BLOCK", 2)
    metrics, left, server = judge(longer)
    requests = len(server.requests)
    folder = tmp_path / "1"
    sorted((folder / "progress").iterdir())[-1].unlink()  # as if it had been killed in the last block
    context: Any = SimpleNamespace(
        inputs={"rollouts": folder / "mine", "baseline": folder / "theirs"},
        output=folder / "output",
        progress=folder / "progress",
        resources=ResourcesConfig(),
        report=lambda *_, **__: None,
    )
    url = server.url.removesuffix("/score") + "/v1"
    assert run(context, JudgePairsConfig(judge=PairwiseJudgeConfig(judge=url, judge_model="j"))) == metrics  # type: ignore[arg-type]
    assert json.loads((folder / "output" / "verdicts.json").read_text()) == left
    assert len(server.requests) == requests + 2


def test_failures_before_a_restart_count(judge: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four of eight questions may fail: the four before the restart and any after it are too many."""
    monkeypatch.setattr(judge_pairs, "BLOCK", 4)
    with pytest.raises(DataError, match="4 of 8 completions may lack a reward"):
        judge(lambda _: completion("no verdict"), pairs_per_prompt=2, max_failed=0.5)
    folder = tmp_path / "1"
    assert (folder / "progress" / "block-0.json").is_file()
    shutil.rmtree(folder / "output")
    for name in ("mine", "theirs"):
        shutil.rmtree(folder / name)
    (tmp_path / "1").rename(tmp_path / "2")
    with pytest.raises(DataError, match="4 of 8 completions may lack a reward"):
        judge(lambda _: completion("no verdict"), pairs_per_prompt=2, max_failed=0.5)


def test_a_served_judge_has_the_place_of_the_trainers_as_long_as_its_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is one without a model, which takes no 20 s to start; the verdicts are those of a judge at a URL."""
    events: list[str] = []

    @contextmanager
    def trainers(_: Any) -> Iterator[None]:
        events.append("trainers")
        yield
        events.append("trainers released")

    @contextmanager
    def served(*_: Any, **__: Any) -> Iterator[Any]:
        server = Server(longer)
        events.append("server")
        url = server.url.removesuffix("/score") + "/v1"
        yield SimpleNamespace(url=url, token=None, stop_ids=(), shortened=None)
        server.end()
        events.append("server ended")

    monkeypatch.setattr(judge_pairs, "served", served)
    for name in ("output", "progress"):
        (tmp_path / name).mkdir()
    context: Any = SimpleNamespace(
        inputs={
            "rollouts": rollouts(tmp_path / "mine", MINE),
            "baseline": rollouts(tmp_path / "theirs", THEIRS),
            "judge": tmp_path,
        },
        output=tmp_path / "output",
        progress=tmp_path / "progress",
        resources=ResourcesConfig(reward_timeout_seconds=5),
        report=lambda *_, **__: None,
        machines=SimpleNamespace(trainers=trainers),
        ticket=FIRST,
        trust_remote_code=False,
    )
    judge = PairwiseJudgeConfig.model_validate({"served_judge": "judge/production"})
    assert run(context, JudgePairsConfig(judge=judge))["win_rate"] == (1 + 0.5 + 0 + 0.5) / 4
    assert events == ["trainers", "server", "server ended", "trainers released"]


@pytest.mark.slow
def test_a_judge_that_the_stage_serves_answers_each_pair_in_both_orders(tiny_model: Any, tmp_path: Path) -> None:
    """A model whose layers add nothing, so that each token decides the next: C behind the question, and then EOS."""
    model = tmp_path / "judge"
    shutil.copytree(tiny_model(tied=False), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    last = tokenizer.apply_chat_template(user("?"), add_generation_prompt=True, return_dict=False)[-1]
    verdict, end = ord("C"), tokenizer.eos_token_id
    embeddings = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][verdict], weights["lm_head.weight"][end] = embeddings[last], embeddings[verdict]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    inputs = {"rollouts": rollouts(tmp_path / "mine", MINE), "baseline": rollouts(tmp_path / "theirs", THEIRS)}
    for name in ("output", "progress"):
        (tmp_path / name).mkdir()
    context: Any = SimpleNamespace(
        inputs={**inputs, "judge": model},
        output=tmp_path / "output",
        progress=tmp_path / "progress",
        resources=ResourcesConfig(engine_options={"max_num_batched_tokens": 4096}),
        report=lambda *_, **__: None,
        machines=SimpleNamespace(trainers=lambda ticket: nullcontext()),  # no others wait for them
        ticket=FIRST,
        trust_remote_code=False,
    )
    fields = {
        "served_judge": "judge/production",
        "template": "{completion_a}|{completion_b}",
        "max_tokens": 8,
    }
    config = JudgePairsConfig(judge=PairwiseJudgeConfig.model_validate({**fields, "verdict": r"([ABC])"}))
    assert config.content()["served_judge"] is True
    assert config.packages_used() == ("jinja2", "transformers", "vllm")
    metrics = run(context, config)
    assert metrics == {"win_rate": 0.5, "position_changed": 0.0, "pairs": 4}
    assert not [
        child for child in psutil.Process().children(recursive=True) if "api_server" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "give exactly one of `judge`, the URL of a server, and `served_judge`, a model"),
        ({"judge": "http://a/v1", "judge_model": "m", "served_judge": "x"}, "give exactly one of `judge`"),
        ({"judge": "http://a/v1"}, "`judge_model` is missing: the name of the model on the server at `judge`"),
    ],
)
def test_a_judge_is_in_one_place(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PairwiseJudgeConfig.model_validate(fields)


def test_an_answer_without_a_verdict_is_left_out_and_metrics_count_the_rest(judge: Any) -> None:
    """Four pairs of one prompt each; the judge gives no verdict on x / xxxx in one order, which leaves three. Of the six
    questions (one pair is of equal answers) a share of 0.1 is less than one, and one is always allowed."""

    def shy(content: dict[str, Any]) -> tuple[int, bytes]:
        return completion("I cannot say.") if answers(content) == ("x", "xxxx") else longer(content)

    metrics, left, _ = judge(shy)
    assert (metrics["pairs"], metrics["failed"], left["failed"]) == (3, 1, 1)
    assert metrics["win_rate"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert metrics["warnings"] == [
        "the judge gave no verdict on 1 of 4 pairs, which are left out: the win rate is over 3 pairs of 3 prompts"
    ]
    with pytest.raises(DataError, match=r"0 of 6 completions may lack a reward \(evaluation.judge.max_failed 0\)"):
        judge(shy, max_failed=0)


def test_a_truncated_answer_is_no_verdict(judge: Any) -> None:
    """The judge considers all three verdicts in its reasoning, which `max_tokens` ends."""

    def thinks(content: dict[str, Any]) -> tuple[int, bytes]:
        text = "<think>I must end with [[A]], [[B]], or [[C]] if neither"
        return completion(text, finish_reason="length") if "x" in answers(content) else longer(content)

    metrics, left, _ = judge(thinks, max_failed=0.5)
    assert (sorted(left["prompts"]), metrics["failed"]) == (["0", "1", "3"], 1)


def test_a_judge_that_refuses_is_quoted(judge: Any) -> None:
    refusal = b'{"error": {"message": "use max_completion_tokens"}}'
    with pytest.raises(DataError, match=r"answered 400 Bad Request at http.*: use max_completion_tokens"):
        judge(lambda content: (400, refusal) if "max_tokens" in content else completion("[[A]]"))
    metrics, *_ = judge(
        lambda content: (
            completion("[[A]]") if content.keys() == {"model", "messages", "max_completion_tokens"} else (400, b"")
        ),
        max_tokens_field="max_completion_tokens",
        temperature=None,
    )
    assert metrics["pairs"] == 4
