"""Environments of verifiers: its tasks are prompts, its own code runs the episodes and gives the reward."""

# mypy: disable-error-code="call-arg, attr-defined"
# The fields of a source are those of its origin, a plug-in.

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.data import kinds
from alignment_core.data.pin import pin
from alignment_core.environments.environments import Environments, environment_content
from alignment_core.environments.episode import Episode
from alignment_core.errors import UserError
from alignment_core.inference.completions import Completion
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.recipes.sections.rl import EnvironmentConfig

NEEDED = "the extra `environments` is not in `.venv`: `make peers` runs this"
ROLLOUT = "alignment_core.environments.verifiers_environments:rollout"
TASKSETS = Path(__file__).parent / "tasksets"
SUMS, AGAIN = "sums_taskset", "asked_again"
TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The byte tokenizer's own has no tools."""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a taskset that verifiers finds, as it would find an installed one."""
    pytest.importorskip("verifiers", reason=NEEDED)
    for name in (SUMS, AGAIN):
        shutil.copy(TASKSETS / f"{name}.py", tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"{SUMS}.py"


@pytest.fixture
def environments(sums: Path) -> Iterator[Callable[..., Environments]]:
    """``environments(taskset=…)`` runs episodes with these options."""
    opened: list[Environments] = []

    def make(**options: Any) -> Environments:
        options = {"taskset": {"id": SUMS}, **options}
        config = EnvironmentConfig(agent=ROLLOUT, options=options)
        opened.append(Environments(config, byte_tokenizer(), processes=1, timeout=60, chat_template=TEMPLATE))
        return opened[-1]

    yield make
    for environment in opened:
        environment.close()


def episode(label: str | None, sample: int = 0) -> Episode:
    row = {"prompt": "1+1", "label": label, "prompt_ids": list(b"1+1")}
    return Episode(0, sample, 0, row, most_tokens=2000)


def say(episode: Episode, text: str, reason: str = "stop") -> None:
    ids = [*text.encode(), byte_tokenizer().eos_token_id]
    episode.append_turn(Completion(np.array(ids, np.int32), np.zeros(len(ids)), np.zeros(len(ids)), reason))


def text_of(episode: Episode) -> str:
    return byte_tokenizer().decode([*episode.prompt_ids, *episode.ids.tolist()])


def test_a_task_is_prompted_and_rewarded_by_its_own_code(environments: Any) -> None:
    right, wrong = episodes = [episode("2", 0), episode("2", 1)]
    places = environments()
    places.answer_all(episodes)
    assert text_of(right) == "<system>Say it.<user>2+2<assistant>"
    say(right, "4")
    say(wrong, "5")
    places.answer_all(episodes)
    assert [(episode.over, episode.reward, episode.failure) for episode in episodes] == [
        (True, 2.25, None),
        (True, 0.25, None),
    ]


def test_an_environment_speaks_between_the_policys_turns(environments: Any) -> None:
    ongoing, places = episode("1"), environments(id=AGAIN, times=2)
    for answer in ("three", "4", "2"):
        places.answer_all([ongoing])
        say(ongoing, answer)
    places.answer_all([ongoing])
    transcript = "<system>Say it.<user>1+1<assistant>three<eos><user>no: 5<assistant>4<eos><user>no: 1<assistant>2<eos>"
    assert (text_of(ongoing), ongoing.reward, ongoing.failure) == (transcript, 2.0 + 0.25 * 7, None)
    trained = ongoing.ids[ongoing.mask].tolist()
    assert byte_tokenizer().decode(trained) == "three<eos>4<eos>2<eos>"


def test_a_tool_of_a_task_is_called(environments: Any) -> None:
    ongoing, places = episode("3"), environments(taskset={"id": SUMS, "task": {"tools": {}}})
    places.answer_all([ongoing])
    say(ongoing, '<tool_call>{"name": "sums_add", "arguments": {"a": 3, "b": 3}}</tool_call>')
    places.answer_all([ongoing])
    assert text_of(ongoing).endswith("<eos><tool>6<assistant>"), ongoing.failure
    say(ongoing, '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>')
    places.answer_all([ongoing])
    assert text_of(ongoing).endswith("<eos><tool>Error: there is no tool 'subtract'; there are sums_add<assistant>")
    say(ongoing, "6")
    places.answer_all([ongoing])
    assert (ongoing.over, ongoing.reward, ongoing.failure) == (True, 2.25, None)


def test_the_limits_of_a_seat_hold(environments: Any) -> None:
    ongoing = episode("1")
    places = environments(id=AGAIN, times=5, agent={"max_turns": 1, "sampling": {"max_tokens": 3}})
    places.answer_all([ongoing])
    assert ongoing.most == 3
    say(ongoing, "2")
    places.answer_all([ongoing])
    assert (ongoing.over, ongoing.reward, ongoing.failure) == (True, 2.25, None), "the answers so far are rewarded"


def test_a_failed_episode_has_its_reason_and_other_episodes_continue(environments: Any) -> None:
    places = environments()
    unknown = [episode("4", 0), episode("two", 1), episode(None, 2)]
    raising, right = episode("1", 3), episode("1", 4)
    places.answer_all([*unknown, raising, right])
    for ongoing in unknown:
        assert f"the label {ongoing.prompt['label']!r} is not the number of a task of '{SUMS}'" in str(ongoing.failure)
    say(raising, "raise")
    say(right, "2")
    places.answer_all([raising, right])
    assert "TaskError" in str(raising.failure)
    assert "the scorer is lost" in str(raising.failure)
    assert (right.reward, right.failure) == (2.25, None)


def test_an_environment_of_many_conversations_is_no_episode_to_learn_from(environments: Any) -> None:
    ongoing, places = episode("1"), environments(id="best-of-n", n=2)
    places.answer_all([ongoing])
    say(ongoing, "2")
    places.answer_all([ongoing])
    assert "changed earlier messages" in str(ongoing.failure)


def test_prompts_are_those_of_the_tasks_and_labels_their_numbers(sums: Path) -> None:
    pinned = pin(DataSource(verifiers=SUMS, options={"largest": 5}))
    located = list(pinned.read(0, 7, kinds.load("prompts")))
    assert [row for _, row in located] == [
        {"prompt": f"{number}+{number}", "label": str(number)} for number in range(6)
    ]
    assert located[0][0] == f"verifiers:{SUMS}:1"
    fewer = pin(DataSource(verifiers=SUMS, rows=2))
    assert len(list(fewer.read(0, 7, kinds.load("prompts")))) == 2
    with pytest.raises(UserError, match="`verifiers` provides only prompts"):
        list(pinned.read(0, 7, kinds.load("demonstrations")))


def test_the_source_of_a_taskset_decides_a_result(sums: Path) -> None:
    options = {"taskset": {"id": SUMS, "task": {"judges": [{"id": "reference"}]}}, "id": AGAIN}
    config = EnvironmentConfig(agent=ROLLOUT, options=copy.deepcopy(options))
    more = {"task": options["taskset"]["task"]}  # type: ignore[index]
    source = pin(DataSource(verifiers=SUMS, options=copy.deepcopy(more)))
    before = environment_content(config), source.content()
    assert environment_content(config)["options"]["verifiers"] == source.content()["verifiers"]
    sums.write_text(sums.read_text().replace("weight=2.0", "weight=3.0"))
    assert environment_content(config) != before[0]
    assert source.content() != before[1]
    assert (config.options, source.source.options) == (options, more), "verifiers fills in copies"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            {"verifiers": "no_such_taskset"},
            "'no_such_taskset': ModuleNotFoundError: taskset 'no_such_taskset' not found",
        ),
        ({"verifiers": SUMS, "options": {"smallest": 1}}, "smallest"),
        ({"verifiers": SUMS, "options": {"largest": -1}}, "has no tasks"),
        ({"verifiers": SUMS, "split": "test"}, "has no splits"),
    ],
)
def test_an_invalid_source_is_refused_when_pinned(source: dict, problem: str, sums: Path) -> None:
    with pytest.raises(UserError, match=rf"^verifiers: .*{problem}"):
        pin(DataSource.model_validate(source))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, r"taskset: an object with the `id` of a taskset"),
        ({"taskset": {"id": "no_such_taskset"}}, "taskset: 'no_such_taskset': ModuleNotFoundError: taskset 'no_such_t"),
        ({"taskset": {"id": SUMS}, "id": "no_such"}, "environment 'no_such' not found"),
        ({"taskset": {"id": SUMS}, "agents": {}}, "agents"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_runs(options: dict, problem: str, sums: Path) -> None:
    with pytest.raises(UserError, match=rf"^rl\.environment\.options.*{problem}"):
        environment_content(EnvironmentConfig(agent=ROLLOUT, options=options))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    config = EnvironmentConfig(agent=ROLLOUT, options={"taskset": {"id": "sums"}})
    for use in (lambda: pin(DataSource(verifiers="sums")), lambda: environment_content(config)):
        with pytest.raises(UserError, match=r"install the extra: pip install 'alignment\[environments\]'"):
            use()


def test_a_source_has_exactly_one_origin() -> None:
    (source,) = DataConfig.model_validate({"verifiers": "sums", "options": {"largest": 2}}).sources
    assert source.verifiers == "sums"
    assert "verifiers" not in DataSource(task="reverse").model_dump(), "seeds of other sources are unchanged"
    with pytest.raises(ValueError, match="give exactly one"):
        DataSource(verifiers="sums", reasoning_gym="leg_counting")
