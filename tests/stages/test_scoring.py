"""The score stage with real trainer ranks: the right numbers of each reward, duplicates included, and their weighted sum."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Reference
from alignment_core.data.messages import user
from alignment_core.errors import DataError, Stopped
from alignment_core.execution.base import StageContext
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig, SelectionConfig
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.rewards.base import Opening, Rows
from alignment_core.rewards.model_reward import Judge
from alignment_core.rewards.results import Answers
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.schemas import read_rollouts, read_scores, rollout_schema, write_table
from alignment_core.stages import score, select_pairs
from alignment_core.stages.score import ScoreConfig
from tests.rewards.other_tokenizer import rendered, reward_model_with_another_tokenizer, score_of
from tests.rewards.reward_server import Server, lengths

COMPLETIONS = [("2+2=", "4"), ("2+2=", "5"), ("2+2=", "4"), ("1+1=", "4"), ("1+1=", "two")]


@pytest.fixture
def reward_models(tiny_model: Any, tmp_path: Path) -> tuple[Path, Path]:
    import torch
    import transformers

    folders = (tmp_path / "reward-model", tmp_path / "another-reward-model")
    for seed, folder in enumerate(folders):
        shutil.copytree(tiny_model(), folder)
        torch.manual_seed(seed)
        transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return folders


@pytest.fixture
def reward_model(reward_models: tuple[Path, Path]) -> Path:
    return reward_models[0]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    tokenizer = byte_tokenizer()
    rows = [
        {
            "prompt": number // 2,
            "sample": number % 2,
            "prompt_ids": tokenizer(prompt)["input_ids"],
            "completion_ids": [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id],
            "logps": [-1.0] * (len(completion) + 1),
            "finish_reason": "stop",
            "prompt_text": prompt,
            "completion_text": completion,
            "label": None,
            "task": None,
            "source": "test",
            "policy": "model@sha256:" + "a" * 64,
        }
        for number, (prompt, completion) in enumerate(COMPLETIONS)
    ]
    write_table(rows, rollout_schema(), folder / "shard-00000.parquet")
    return folder


def rewards(*listed: dict[str, Any]) -> ScoreConfig:
    return ScoreConfig(rewards=tuple(CHOICE.validate(reward) for reward in listed))


OURS = rewards({"reward_model": "ours"})


def context_of(machines: Any, tmp_path: Path, rollouts: Path, *reward_models: Path) -> StageContext:
    output = tmp_path / "scores"
    output.mkdir()
    inputs = {f"reward-{number}": folder for number, folder in enumerate(reward_models)}
    inputs |= {"rollouts": rollouts, "tokenizer": tmp_path / "reward-model"}
    return StageContext(
        inputs=inputs,
        references={name: Reference(kind="model", digest="a" * 64) for name in inputs},
        outputs={"scores": output},
        progress=tmp_path,
        seed=0,
        resources=ResourcesConfig(),
        machines=machines(1),
        reporter=lambda *_: None,
    )


def scores_by_hand(reward_model: Path) -> list[float]:
    """The model's own score of each completion, one after the other."""
    import torch
    import transformers

    judge, scores = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model).eval(), []
    tokenizer = byte_tokenizer()
    for prompt, completion in COMPLETIONS:
        ids = [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            scores.append(float(judge(torch.tensor([ids])).logits[0, 0]))
    return scores


def test_each_completion_gets_the_score_of_its_own_forward_pass(
    machines: Any, reward_model: Path, rollouts: Path, tmp_path: Path
) -> None:
    context = context_of(machines, tmp_path, rollouts, reward_model)
    metrics = score.run(context, OURS)
    scored = [row["reward"] for row in read_scores(context.output)]
    assert scored == pytest.approx(scores_by_hand(reward_model), abs=1e-5)
    assert scored[0] == scored[2]
    assert len({np.float32(value) for value in scored}) == 4
    assert metrics["mean_reward"] == pytest.approx(np.mean(scored))


def test_two_reward_models_a_verifier_a_function_and_an_endpoint_make_one_weighted_sum(
    machines: Any, reward_models: tuple[Path, Path], rollouts: Path, tmp_path: Path
) -> None:
    (tmp_path / "judging.py").write_text(
        "def right(prompt, completion, label):\n    return float(completion == '4')\n"
        "def length(rows):\n    return [None if row['completion'] == 'two' else 3.0 for row in rows]\n"
    )
    server = Server(lengths)
    config = rewards(
        {"reward_model": "a/judge"},
        {"verifier": f"{tmp_path / 'judging.py'}:right", "weight": 2.0},
        {"reward_model": "another/judge", "weight": -0.5},
        {"function": f"{tmp_path / 'judging.py'}:length", "clip": (0.0, 1.0), "max_failed": 0.2},
        {"urls": server.url, "weight": 0.25},
    )
    context = context_of(machines, tmp_path, rollouts, reward_models[0])
    context.inputs["reward-2"], context.references["reward-2"] = reward_models[1], context.references["reward-0"]
    metrics = score.run(context, config)
    server.end()

    first, second = (scores_by_hand(model) for model in reward_models)
    right = [1.0, 0.0, 1.0, 1.0, 0.0]
    rows = read_scores(context.output)
    letters = [1.0, 1.0, 1.0, 1.0, 3.0]
    for row, *given in zip(rows, first, right, second, [3.0, 3.0, 3.0, 3.0, None], letters, strict=True):
        assert row["rewards"] == pytest.approx(given, abs=1e-5)
    total = [a + 2 * b - 0.5 * c + 1 + 0.25 * d for a, b, c, d in zip(first, right, second, letters, strict=True)]
    assert [row["reward"] for row in rows] == pytest.approx([*total[:4], None], abs=1e-5)
    assert metrics["reward_1"] == 0.75
    assert (metrics["mean_reward"], metrics["failed_rewards"]) == (pytest.approx(np.mean(total[:4]), abs=1e-5), 1)
    assert (context.cost["failed_rewards"], context.cost["failed_rewards_none_given"]) == (1, 1)

    for name in ("pairs", "origins"):
        (tmp_path / name).mkdir()
    folders = {"rollouts": rollouts, "scores": context.output}
    outputs = {"dataset": tmp_path / "pairs", "origins": tmp_path / "origins"}
    of_pairs: Any = SimpleNamespace(inputs=folders, output=outputs["dataset"], outputs=outputs, derive=lambda *_: 0)
    select_pairs.run(of_pairs, select_pairs.SelectPairsConfig(selection=SelectionConfig()))
    (pair,) = pq.read_table(tmp_path / "pairs" / "train.parquet").to_pylist()
    assert (pair["chosen"], pair["rejected"]) == (("4", "5") if total[0] > total[1] else ("5", "4"))


def test_the_reference_is_computed_at_the_sampling_temperature(
    machines: Any, tiny_model: Any, rollouts: Path, tmp_path: Path
) -> None:
    """By plain ``transformers``: the sum of the log-softmax of the logits over the temperature, at the completion's tokens."""
    import torch
    import transformers

    shutil.copytree(tiny_model(), tmp_path / "reward-model")
    context = context_of(machines, tmp_path, rollouts)
    context.inputs["reference"], context.references["reference"] = tiny_model(), context.references["tokenizer"]
    model, by_temperature = transformers.AutoModelForCausalLM.from_pretrained(tiny_model()).eval(), {}
    for temperature in (1.0, 0.5):
        score.run(context, ScoreConfig(temperature=temperature))
        by_temperature[temperature] = [row["reference_logp"] for row in read_scores(context.output)]
        for row, logp in zip(read_rollouts(rollouts), by_temperature[temperature], strict=True):
            ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]], dtype=torch.long)
            with torch.no_grad():
                logps = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
            by_hand = logps.gather(-1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :].sum()
            assert logp == pytest.approx(float(by_hand), abs=1e-4)
    assert by_temperature[1.0] != pytest.approx(by_temperature[0.5], abs=1e-3)


def test_rewards_may_call_models_row_by_row_and_share_a_name(
    machines: Any,
    reward_models: tuple[Path, Path],
    rollouts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InPieces:
        def __init__(self, opening: Opening, normalised: bool) -> None:
            assert not normalised
            assert opening.scores is not None
            assert opening.model is not None
            self.stack = ExitStack()
            self.scores = self.stack.enter_context(opening.scores(opening.model, "judge"))

        def __call__(self, rows: Rows) -> Answers:
            for number, row in enumerate(rows):
                yield number, self.scores([(tuple(row["prompt_ids"]), tuple(row["completion_ids"]))])[0]

        def close(self) -> None:
            self.stack.close()

    monkeypatch.setattr(Judge, "open", InPieces)
    context = context_of(machines, tmp_path, rollouts, *reward_models)
    context.references["reward-1"] = Reference(kind="model", digest="b" * 64)
    score.run(context, rewards({"reward_model": "a/judge"}, {"reward_model": "another/judge"}))
    first, second = (scores_by_hand(model) for model in reward_models)
    for row, *given in zip(read_scores(context.output), first, second, strict=True):
        assert row["rewards"] == pytest.approx(given, abs=1e-5)


def test_a_failing_reward_ends_the_stage_before_a_reward_model_finishes(
    machines: Any, reward_model: Path, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "BLOCK", 1)  # four different completions
    (tmp_path / "judging.py").write_text("def fails(rows): return [None for row in rows]\n")
    stopped, reports, stop = threading.Event(), list[float](), RewardSources.stop

    def stops(sources: RewardSources) -> None:
        stop(sources)
        stopped.set()

    def tell(done: float, *_: Any, **__: Any) -> None:
        reports.append(done)
        stopped.wait(60)

    monkeypatch.setattr(RewardSources, "stop", stops)
    context = dataclasses.replace(context_of(machines, tmp_path, rollouts, reward_model), reporter=tell)
    with pytest.raises(DataError, match="gave no reward"):
        score.run(context, rewards({"reward_model": "a/judge"}, {"function": f"{tmp_path / 'judging.py'}:fails"}))
    assert reports == [0]
    assert len(list(tmp_path.glob("reward-0-*.npy"))) == 1, "the block that was under way is kept"


def test_a_stage_without_models_takes_no_machine(rollouts: Path, tiny_model: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_model(), tmp_path / "reward-model")
    (tmp_path / "judging.py").write_text("def length(rows): return [float(len(row['completion'])) for row in rows]\n")
    alone = SimpleNamespace(actors=SimpleNamespace(elsewhere=None))
    context = context_of(lambda _: alone, tmp_path, rollouts)
    score.run(context, rewards({"function": f"{tmp_path / 'judging.py'}:length", "normalise": "group"}))
    totals = [row["reward"] for row in read_scores(context.output)]
    assert totals == [0, 0, 0, 0, 0], "each prompt's completions are equally long, but for the last, which is alone"


def test_a_resumed_stage_asks_a_server_only_for_answers_that_are_missing(
    rollouts: Path, tiny_model: Any, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model(), tmp_path / "reward-model")
    alone = SimpleNamespace(actors=SimpleNamespace(elsewhere=None))
    server = Server(lambda content: lengths(content) if len(server.requests) <= 2 else (400, b"too long"))
    config = rewards({"urls": server.url, "batch_size": 1, "max_concurrency": 1})
    with pytest.raises(DataError, match="too long"):
        score.run(context_of(lambda _: alone, tmp_path, rollouts), config)

    server.requests.clear()
    server.answer = lengths
    shutil.rmtree(tmp_path / "scores")
    context = context_of(lambda _: alone, tmp_path, rollouts)
    score.run(context, config)
    server.end()
    assert [request["completions"] for request in server.requests] == [["4"], ["4"], ["two"]], "the last three"
    assert [row["reward"] for row in read_scores(context.output)] == [1, 1, 1, 1, 3]


def test_a_resumed_stage_scores_no_block_of_either_reward_model_again(
    machines: Any, reward_models: tuple[Path, Path], rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "BLOCK", 1)  # four different completions
    reports: list[float] = []
    config = rewards({"reward_model": "a/judge"}, {"reward_model": "another/judge"})

    def ends_within_the_second(done: float, *_: Any) -> None:
        reports.append(done)
        if reports.count(done) == 2 and done == 2:
            raise Stopped("ended")

    def scored(reporter: Any) -> list[list[float]]:
        shutil.rmtree(tmp_path / "scores", ignore_errors=True)
        context = context_of(machines, tmp_path, rollouts, *reward_models)
        score.run(dataclasses.replace(context, reporter=reporter), config)
        return [row["rewards"] for row in read_scores(context.output)]

    with pytest.raises(Stopped):
        scored(ends_within_the_second)
    assert reports == [0, 1, 2, 3, 4, 0, 1, 2], "one model after the other has the trainers"
    reports.clear()
    in_pieces = scored(lambda done, *_: reports.append(done))
    assert sorted(reports) == [2, 3, 4, 4]

    for block in tmp_path.glob("reward-*.npy"):
        block.unlink()
    assert scored(lambda *_: None) == in_pieces


def test_a_reward_model_with_another_tokenizer_scores_the_text_with_a_warning(
    machines: Any, reward_model: Path, rollouts: Path, tiny_model: Any, tmp_path: Path
) -> None:
    judge = reward_model_with_another_tokenizer(tmp_path / "judge", tiny_model())
    context = context_of(machines, tmp_path, rollouts, judge)
    metrics = score.run(context, OURS)
    scored = [row["reward"] for row in read_scores(context.output)]
    by_hand = [score_of(judge, rendered(judge, user(prompt), completion)) for prompt, completion in COMPLETIONS]
    assert scored == pytest.approx(by_hand, abs=1e-5)
    (warning,) = metrics["warnings"]
    assert warning.startswith("evaluation.rewards.0.reward_model: model@sha256:aaaa")
