"""A language model as judge: requests, parsing of scores and verdicts, and failures."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.images import image_part
from alignment_core.errors import DataError, UserError
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.load import parse_recipe
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.rewards.base import Opening, content, kind_of
from alignment_core.rewards.llm_judge import conversation
from alignment_core.rewards.results import Account, numbers
from tests.images import write_images
from tests.rewards.judge_server import completion, question
from tests.rewards.reward_server import Answer, Server

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+2?"},
]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def reward(server: Server, **fields: Any) -> Any:
    url = server.url.removesuffix("/score") + "/v1"
    return CHOICE.validate({"judge": url, "judge_model": "the-judge", **fields})


def judged(server: Server, rows: list[dict[str, Any]], **fields: Any) -> tuple[list[Any], dict[str, int]]:
    config = reward(server, **fields)
    source = kind_of(config).open(config, Opening("rl.rewards.0", ResourcesConfig(reward_timeout_seconds=10)))
    account = Account(kind_of(config).description(config), 0.5, "rl.rewards.0.max_failed")
    scored = numbers(account.settle(rows, source(rows)))
    source.close()
    return scored, {str(reason): count for reason, count in account.failed.items()}


def row(text: str, label: str | None = None, messages: Any = None) -> dict[str, Any]:
    given = json.dumps(messages) if messages else None
    return {
        "source": "p:1",
        "prompt_text": "<user>2+2?",
        "completion_text": text,
        "label": label,
        "messages": given,
    }


def test_the_last_score_of_a_judges_answer_is_scaled(serve: Any) -> None:
    verdicts = {"4": "Score: 1? No. It is right.\nScore: 10", "5": "Wrong. **Score: 1**", "four": "Score: 5.5"}
    server = serve(
        lambda request: completion(
            next(text for answer, text in verdicts.items() if f"\n\n{answer}\n\n" in question(request))
        )
    )
    scored, failed = judged(server, [row("4", messages=CHAT), row("5"), row("four")])
    assert (scored, failed) == ([1.0, 0.0, 0.5], {})
    first = next(request for request in server.requests if "\n\n4\n\n" in question(request))
    assert "user: Hi\n\nassistant: Yes?\n\nuser: 2+2?" in question(first)
    assert {name: first[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "the-judge",
        "temperature": 0,
        "max_tokens": 512,
    }
    plain, _ = judged(server, [row("four")], scale=None)
    assert plain == [5.5]


@pytest.mark.parametrize("answers", [{}, {"verdicts": {"Yes": 1.0, "No": 0.0}}])
def test_requests_to_reasoning_models_have_their_own_form(serve: Any, answers: dict[str, Any]) -> None:
    """OpenAI's reasoning models refuse `max_tokens` and any temperature but the default."""

    def strict(request: dict[str, Any]) -> tuple[int, bytes]:
        wrong = sorted({"max_tokens", "temperature"} & request.keys())
        if wrong:
            return 400, json.dumps({"error": {"message": f"Unsupported parameter: {wrong[0]}"}}).encode()
        return completion("Score: 10", {"Yes": 0.0})

    server = serve(strict)
    fields = {"max_tokens_field": "max_completion_tokens", "temperature": None, **answers}
    assert judged(server, [row("a")], **fields)[0] == [1.0]
    (sent,) = server.requests
    assert sent["max_completion_tokens"] == (1 if answers else 512)
    with pytest.raises(
        DataError, match=r"answered 400 Bad Request at .*: Unsupported parameter: max_tokens, for the prompt"
    ):
        judged(server, [row("a"), row("b")], **answers)
    assert judged(serve(lambda request: completion("Score: 10")), [row("a")], temperature=0.5, scale=None)[0] == [10.0]


def test_the_form_of_a_request_is_part_of_the_key_only_if_configured(serve: Any) -> None:
    server = serve(lambda request: completion("Score: 10"))
    plain, reasoning = reward(server), reward(server, max_tokens_field="max_completion_tokens", temperature=None)
    (plain_key,), (reasoning_key,) = content([plain], "rl.rewards"), content([reasoning], "rl.rewards")
    assert not {"max_tokens_field", "temperature"} & plain_key.keys(), "defaults are not part of the key"
    assert (reasoning_key["max_tokens_field"], reasoning_key["temperature"]) == ("max_completion_tokens", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "was cut off before it wrote an answer: raise max_tokens"),
        (
            '<think>It is short. "Score: 3" would do. Let me check',
            "was cut off before its answer ended: raise max_tokens",
        ),
        ("Score: 1 is too low, because", "was cut off before its answer ended: raise max_tokens"),
    ],
)
def test_a_truncated_answer_is_a_failure_with_the_fix(
    text: str | None, says: str, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM without a reasoning parser leaves the reasoning in the text; with one, the text may be missing."""
    cut = completion(text, finish_reason="length")
    server = serve(lambda request: cut if "\n\na\n\n" in question(request) else completion("Score: 10"))
    assert judged(server, [row("a"), row("b")]) == ([None, 1.0], {"wrong_shape": 1})
    assert says in caplog.text


def test_scores_in_the_reasoning_do_not_count(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    texts = {
        "a": "<think>Score: 1? No.</think>\n\nIt is right.\nScore: 10",
        "b": "It deserves a Score: 9.</think>I cannot say.",  # the template may write the opening mark
    }
    server = serve(
        lambda request: completion(next(text for name, text in texts.items() if f"\n\n{name}\n\n" in question(request)))
    )
    assert judged(server, [row("a"), row("b")]) == ([1.0, None], {"wrong_shape": 1})


def test_verdicts_are_weighed_by_their_probabilities(serve: Any) -> None:
    logps = {"Yes": math.log(0.5), " No": math.log(0.2), "yes": math.log(0.1)}
    server = serve(lambda request: completion("Yes", logps))
    template = "Is {completion} the same as {label}? Braces {like these} stay. Yes or No:"
    scored, failed = judged(server, [row("4", "4"), row("4")], template=template, verdicts={"Yes": 1.0, "No": -1.0})
    assert scored == [pytest.approx((0.5 - 0.2) / 0.7), None], "a prompt without a label cannot be judged"
    assert failed == {"none_given": 1}
    (request,) = server.requests
    assert question(request) == "Is 4 the same as 4? Braces {like these} stay. Yes or No:"
    assert (request["max_tokens"], request["logprobs"], request["top_logprobs"]) == (1, True, 20)


@pytest.mark.parametrize(
    ("text", "first", "likeliest"),
    [
        ("<think>", {"<think>": -1e-6, "Yes": -22.4, "No": -24.9}, "<think>"),
        (None, {"<|channel|>": -1e-6, "Yes": -17.0}, "<|channel|>"),  # gpt-oss, whose text follows its reasoning
        ("The", {"The": math.log(0.8), "Yes": math.log(0.009)}, "The"),
    ],
)
def test_a_judge_that_begins_with_something_else_gives_no_verdict(
    text: str | None, first: dict[str, float], likeliest: str, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """exp(-22.4) + exp(-24.9) = 2e-10: the rest of a distribution that is certain of `<think>`."""
    server = serve(
        lambda request: (
            completion(text, first, "length") if "\n\na\n\n" in question(request) else completion("Yes", {"Yes": -3.0})
        )
    )
    scored, failed = judged(server, [row("a"), row("b")], verdicts={"Yes": 1.0, "No": 0.0})
    assert (scored, failed) == ([None, 1.0], {"wrong_shape": 1}), "a verdict of 5 % counts"
    assert f"most likely {likeliest!r}" in caplog.text
    assert "enable_thinking: false" in caplog.text
    assert "max_tokens" not in caplog.text, "the recipe refuses it beside `verdicts`"


@pytest.mark.parametrize(
    ("answer", "fields", "reason"),
    [
        (completion("I like it."), {}, "wrong_shape"),
        (completion("Score: 11"), {}, "bad_number"),
        (completion("Yes"), {"verdicts": {"Yes": 1.0, "No": 0.0}}, "wrong_shape"),
        (completion("Hm", {"Hm": -0.1}), {"verdicts": {"Yes": 1.0, "No": 0.0}}, "wrong_shape"),
        (completion("Score: good"), {"score": "Score: (.*)"}, "bad_number"),
        ((200, b'{"choices": []}'), {}, "wrong_shape"),
        ((200, b'{"choices": [{"message": {"content": null}}]}'), {}, "wrong_shape"),
        ((200, b"<html>"), {}, "wrong_shape"),
    ],
)
def test_an_answer_without_a_verdict_is_a_failure_without_a_retry(
    answer: tuple[int, bytes], fields: dict[str, Any], reason: str, serve: Any
) -> None:
    good = completion("Score: 10", {"Yes": 0.0})
    server = serve(
        lambda request: answer if "\n\nzzz\n\n" in question(request) or "?zzz" in question(request) else good
    )
    scored, failed = judged(server, [row("zzz"), row("fine")], **fields)
    if "score" in fields:
        assert failed == {reason: 1}, "the other one is a number"
        return
    assert (scored, failed) == ([None, 1.0], {reason: 1})
    assert len(server.requests) == 2


def test_a_busy_judge_is_retried_and_a_wrong_key_ends_the_run(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([(503, b""), (429, b"")])
    server = serve(lambda request: next(busy, None) or completion("Score: 10"))
    assert judged(server, [row("a")])[0] == [1.0]
    refusing = serve(lambda request: (401, b"{}"))
    with pytest.raises(
        UserError, match=r"rl.rewards.0.judge: http://127.*/v1/chat/completions answered 401 Unauthorized"
    ):
        judged(refusing, [row("a")])
    with pytest.raises(UserError, match=r"rl.rewards.0.token_variable: the environment has no variable JUDGE_KEY"):
        judged(server, [row("a")], token_variable="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judged(server, [row("a")], token_variable="JUDGE_KEY")
    assert "Bearer secret" in server.tokens


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"template": "{prompt}"}, "the template needs {completion}"),
        ({"score": "("}, "is no regular expression"),
        ({"score": r"\d+"}, "needs a group, in parentheses, around the number"),
        ({"scale": [10, 1]}, "the lowest and then the highest"),
        ({"verdicts": {"Yes": 1}}, "at least two words"),
        ({"verdicts": {True: 1, False: 0}}, "YAML takes Yes and No without quotes"),
        ({"judge": "ftp://x"}, "is not an http:// or https:// URL"),
        ({"judge": "https://me:secret@host/v1"}, "must not contain a password"),
    ],
)
def test_inconsistent_fields_of_a_judge_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CHOICE.validate({"judge": "http://127.0.0.1:1/v1", "judge_model": "m", **fields})


def test_fields_that_nothing_reads_are_refused_in_a_recipe() -> None:
    reward = {"judge": "http://a/v1", "judge_model": "m", "verdicts": {"Yes": 1, "No": 0}, "max_tokens": 3}
    evaluation = {"prompts": "prompts.jsonl", "rewards": [reward]}
    with pytest.raises(
        UserError, match="`max_tokens` has no effect because `verdicts` are read as the judge's first token"
    ):
        parse_recipe(
            {"method": "sft", "name": "a", "model": "m/m", "sft": {"data": "a.jsonl"}, "evaluation": evaluation},
            refuse_unused=True,
        )


def test_replicas_and_keys_do_not_decide_the_rewards() -> None:
    config = {"judge": "http://a/v1", "judge_model": "m"}
    configs = [
        CHOICE.validate(config),
        CHOICE.validate({**config, "judge": ["http://a/v1", "http://b/v1"], "token_variable": "K"}),
    ]
    assert content(configs[:1], "f") == content(configs[1:], "f")
    busier = [config.model_copy(update={"max_concurrency": 64}) for config in configs]
    assert content(busier, "f") == content(configs, "f")


def test_a_prompt_of_one_message_is_its_text() -> None:
    assert conversation(row("4", messages=CHAT[:1])) == "Hi"
    assert conversation(row("4", messages="plain")) == "plain"
    assert conversation(row("4")) == "<user>2+2?", "as the policy saw it"


def test_a_judge_sees_images_in_their_places(serve: Any, tmp_path: Path) -> None:
    """In OpenAI's form. Before the text where the prompt's messages are not known, because it was truncated."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in write_images(tmp_path).values()][:2]
    for path, digest in zip((tmp_path / "red.png", tmp_path / "green.png"), digests, strict=True):
        path.rename(tmp_path / digest)
    files = tuple(tmp_path / digest for digest in digests)
    images = [image_part(digest) for digest in digests]
    words = [{"type": "text", "text": text} for text in ("before ", " or ", "?")]
    content = [words[0], images[0], words[1], images[1], words[2]]
    server = serve(lambda _: completion("Score: 10"))
    whole = {**row("the first", messages=[{"role": "user", "content": content}]), "images": files}
    truncated = {**row("the first"), "images": files}
    assert judged(server, [whole], template="Q: {prompt} A: {completion}")[0] == [1.0]
    assert judged(server, [truncated], template="Q: {prompt} A: {completion}")[0] == [1.0]
    urls = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = [
        {"type": "text", "text": text}
        for text in ("Q: before ", " or ", "? A: the first", "Q: <user>2+2? A: the first")
    ]
    sent = [request["messages"][0]["content"] for request in server.requests]
    assert sent == [[text[0], shown[0], text[1], shown[1], text[2]], [*shown, text[3]]]


def test_a_judge_sees_no_images_of_observations(serve: Any, tmp_path: Path) -> None:
    """They would stand before the question, as if they were the prompt's."""
    files = []
    for path in [*write_images(tmp_path).values()][:2]:
        files.append(path.rename(tmp_path / hashlib.sha256(path.read_bytes()).hexdigest()))
    prompt = [{"role": "user", "content": [image_part(files[0].name), {"type": "text", "text": "?"}]}]
    server = serve(lambda _: completion("Score: 10"))
    rows = [{**row("4", messages=messages), "images": tuple(files)} for messages in (prompt, CHAT)]
    judged(server, rows, template="Q: {prompt} A: {completion}")
    contents = [request["messages"][0]["content"] for request in server.requests]
    plain, with_image = sorted(contents, key=lambda content: isinstance(content, list))
    assert [part["type"] for part in with_image] == ["text", "image_url", "text"]
    url = f"data:image/png;base64,{base64.b64encode(files[0].read_bytes()).decode()}"
    assert with_image[1]["image_url"]["url"] == url
    assert isinstance(plain, str)
