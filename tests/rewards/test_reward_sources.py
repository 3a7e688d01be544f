"""All rewards of a run: callable from any thread, with lasting processes, and their part of a key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from alignment_core.artifacts import Reference
from alignment_core.errors import DataError, EnvironmentFault, Stopped
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rewards import CHOICE, RewardConfig
from alignment_core.rewards.aggregation import RunningMean, total_rewards
from alignment_core.rewards.base import Opening, Rows, content
from alignment_core.rewards.kept_answers import KeptAnswers
from alignment_core.rewards.results import Answers, reasons
from alignment_core.rewards.sources import RewardSources
from alignment_core.user_code.errors import Failed
from tests.processes import role_of
from tests.rewards.reward_server import Server, lengths

SOURCE = """
import os

def one(prompt, completion, label):
    return os.getpid() / 2**32

def group(rows):
    return [None if row["completion"] == "b" else float(os.getpid()) for row in rows]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path / "rewards.py"


def rewards(*configs: dict[str, Any]) -> list[RewardConfig]:
    return [CHOICE.validate(config) for config in configs]


def opened(configs: list[RewardConfig]) -> RewardSources:
    resources = ResourcesConfig(reward_timeout_seconds=20, reward_processes=1)
    return RewardSources(configs, Opening("rl.rewards", resources, tokenizer=byte_tokenizer()))


def rows(*completions: str) -> list[dict[str, Any]]:
    tokenizer = byte_tokenizer()
    return [
        {
            "source": f"p.jsonl:{number}",
            "group": number // 2,
            "task": None,
            "prompt_text": "?",
            "completion_text": completion,
            "label": "1",
            "prompt_ids": tokenizer("?")["input_ids"],
            "completion_ids": [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id],
            "finish_reason": "stop",
        }
        for number, completion in enumerate(completions)
    ]


def test_numbers_of_a_killed_call_are_kept_and_everything_else_is_asked_again(tmp_path: Path) -> None:
    requests: list[list[str]] = []
    answers = {"a": 0.1, "b": Failed("timeout", "is late"), "c": None, "d": -3, "e": float("nan"), "f": 1e-30}

    def source(given: Rows) -> Answers:
        requests.append([row["completion_text"] for row in given])
        return ((number, answers[row["completion_text"]]) for number, row in reversed([*enumerate(given)]))

    kept, all_rows = KeptAnswers(source, tmp_path / "answers.jsonl"), rows(*answers)  # type: ignore[arg-type]
    assert dict(islice(kept(all_rows), 4)).keys() == {2, 3, 4, 5}
    text = (tmp_path / "answers.jsonl").read_text()
    (tmp_path / "answers.jsonl").write_text(text[: text.rindex("[3, -3]") + 4])  # killed within the line
    assert dict(kept(all_rows))[3] == -3
    given = dict(kept(all_rows))
    assert {number: given[number] for number in (0, 3, 5)} == {0: 0.1, 3: -3, 5: 1e-30}
    assert requests == [list("abcdef"), list("abcde"), list("bce")]


def test_sources_answer_concurrently_in_any_thread_and_keep_their_processes_until_closed(file: Path) -> None:
    server = Server(lengths)
    configs = rewards(
        {"verifier": f"{file}:one"},
        {"function": f"{file}:group", "max_failed": 0.5},
        {"urls": server.url, "batch_size": 2},
        {"verifier": "math"},
    )
    with opened(configs) as sources, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(sources, [rows("a", "b", "ccc"), rows("d", "1")])
        assert [len(column) for column in first] == [3] * 4
        assert (reasons(first[1]), first[2], second[3]) == ([None, "none_given", None], [1, 1, 3], [0.0, 1.0])
        assert sources.failed == {"none_given": 1}
        used = {int(first[0][0] * 2**32), int(first[1][0])}  # type: ignore[arg-type, operator]
        assert used == {int(second[0][0] * 2**32), int(second[1][0])}, "no process for each call"  # type: ignore[arg-type, operator]
        assert all(psutil.pid_exists(pid) for pid in used)
    server.end()
    assert not any(psutil.pid_exists(pid) for pid in used)
    assert not [child for child in psutil.Process().children() if role_of(" ".join(child.cmdline())) == "verifier"]
    assert sorted(query for content in server.requests for query in content["query"])[:2] == ["?1<eos>", "?a<eos>"]
    with pytest.raises(Stopped):
        sources(rows("a"))


def test_the_bound_applies_to_each_source(file: Path) -> None:
    configs = rewards({"verifier": f"{file}:one"}, {"function": f"{file}:group", "max_failed": 0})
    says = r"^p\.jsonl:1: the function .*:group gave no reward, .* \(rl\.rewards\.1\.max_failed 0\)$"
    with opened(configs) as sources, pytest.raises(DataError, match=says):
        sources(rows("a", "b"))


def test_an_endpoint_that_is_not_there_is_missed_before_anything_is_opened() -> None:
    with pytest.raises(EnvironmentFault, match=r"^rl\.rewards\.1\.urls: no server answers"):
        opened(rewards({"verifier": "math"}, {"urls": "http://127.0.0.1:9/"}))


def test_the_key_of_a_reward_has_function_source_and_first_url_and_no_token(file: Path) -> None:
    def key(**fields: Any) -> Any:
        return content(rewards(fields), "rl.rewards")

    plain = key(urls=["http://a/", "http://b/"], batch_size=4, token_variable="TOKEN")
    assert plain == key(urls="http://a/")
    assert "TOKEN" not in str(plain)
    assert plain != key(urls=["http://b/", "http://a/"])
    before = key(function=f"{file}:group")
    file.write_text(SOURCE + "# a comment computes nothing")
    assert key(function=f"{file}:group") == before
    file.write_text(SOURCE + "FACTOR = 2")
    assert key(function=f"{file}:group") != before
    assert str(file) not in str(before)


def test_the_sources_of_a_step_run_concurrently(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "def one(rows): return meet('one', 'other', rows)\n"
        "def other(rows): return meet('other', 'one', rows)\n"
        "def meet(me, you, rows):\n"
        "    Path(__file__).with_name(me).touch()\n"
        "    while not Path(__file__).with_name(you).exists(): time.sleep(0.01)\n"
        "    return [1.0] * len(rows)\n"
    )
    names = ("one", "other")
    with opened(rewards(*({"function": f"{tmp_path / 'meet.py'}:{name}"} for name in names))) as sources:
        assert sources(rows("a", "b")) == [[1.0, 1.0], [1.0, 1.0]]


def test_a_source_that_fails_too_often_ends_the_other_sources(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def never(rows): return [None] * len(rows)\n"
        "def hangs(rows): time.sleep(600)\n"
    )
    configs = rewards({"function": f"{tmp_path / 'two.py'}:hangs"}, {"function": f"{tmp_path / 'two.py'}:never"})
    resources = ResourcesConfig(reward_timeout_seconds=600)
    with (
        RewardSources(configs, Opening("rl.rewards", resources, tokenizer=byte_tokenizer())) as sources,
        pytest.raises(DataError, match=r"the function .*two\.py:never gave no reward"),
    ):
        sources(rows("a", "b"))


def test_an_interrupt_ends_the_calls_that_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def hangs(rows):\n"
        "    Path(__file__).with_name('hangs').touch()\n"
        "    time.sleep(600)\n"
    )
    configs = rewards(*[{"function": f"{tmp_path / 'two.py'}:hangs"}] * 2)

    def interrupted(*_: Any, **__: Any) -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("alignment_core.rewards.sources.wait", interrupted)
    with opened(configs) as sources:
        with pytest.raises(KeyboardInterrupt):
            sources(rows("a", "b"))
        assert not sources.failed, "no call waited for its timeout"


def test_two_reward_models_answer_concurrently_in_separate_actors(tmp_path: Path) -> None:
    """The computations of actors have their own tests; these are about the calls and their arguments."""
    open_models: list[str] = []

    @contextmanager
    def scores(model: Model, name: str, verdicts: tuple[int, int] | None = None) -> Iterator[Any]:
        open_models.append(name)
        yield lambda pairs: [len(completion) * float(model.path.name) for _, completion in pairs]
        open_models.remove(name)

    tokenizer, reference = byte_tokenizer(), Reference.parse(f"reward-model@sha256:{'1' * 64}")
    for name in ("2", "3"):
        tokenizer.save_pretrained(tmp_path / name)
    models = {number: Model(tmp_path / name, reference) for number, name in enumerate(("2", "3"))}
    configs = rewards({"reward_model": "a/judge"}, {"reward_model": "another/judge", "weight": 0.5})
    opening = Opening("rl.rewards", ResourcesConfig(), tokenizer=tokenizer, scores=scores)
    with RewardSources(configs, opening, models) as sources:
        assert sorted(open_models) == ["reward-0", "reward-1"]
        given = sources(rows("a", "bb", "a"))
    assert (given, open_models) == ([[4.0, 6.0, 4.0], [6.0, 9.0, 6.0]], [])
    totals = total_rewards(np.array(given).T, np.zeros(3, int), configs, [RunningMean() for _ in configs])
    assert totals.tolist() == [7.0, 10.5, 7.0]
