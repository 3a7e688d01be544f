"""Process reward models: the loss of plain transformers for any packs and ranks, and the stage with its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import AutoTokenizer

from alignment_core.composition.graph import composing, submit
from alignment_core.data.turn_end import keep_chat_template
from alignment_core.errors import UserError
from alignment_core.losses.process_reward import step_loss
from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import cut, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.sections.process_reward_model import StepsConfig
from alignment_core.stages.process_reward_model import ProcessRewardModelStageConfig
from alignment_core.training.methods.process_reward_model import ProcessRewardModel
from tests.composed import Runs
from tests.stages.killing import store_with
from tests.training.conftest import random_ids
from tests.training.test_batch_invariance import assert_equal, loss_and_gradient
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, train

GOOD, BAD = ord("+"), ord("-")
METHOD = ProcessRewardModel((GOOD, BAD))
ROWS = 10


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Answers of one to four steps, two of each prompt, with hard and soft labels."""
    random = np.random.default_rng(4)
    prompts = [random_ids(random, 4, 24) for _ in range(ROWS // 2)]
    answers, ends, labels = [], [], []
    for _ in range(ROWS):
        lengths = random.integers(2, 9, random.integers(1, 5))
        answers.append(random.integers(0, 256, lengths.sum()).tolist())
        ends.append((np.cumsum(lengths) - 1).tolist())
        labels.append(random.choice([0.0, 0.25, 1.0], len(lengths)).tolist())
    columns = {"prompt_ids": prompts * 2, "completion_ids": answers, "step_ends": ends, "labels": labels}
    types = {"step_ends": pa.list_(pa.int32()), "labels": pa.list_(pa.float32())}
    return pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})


def test_the_loss_by_hand() -> None:
    # log-odds ln 3: the good verdict has 3/4
    odds = torch.full((3,), 3.0).log()
    loss = step_loss(odds, torch.tensor([1.0, 0.0, 0.5]))
    assert loss.tolist() == pytest.approx([-np.log(0.75), -np.log(0.25), -0.5 * np.log(0.75) - 0.5 * np.log(0.25)])


def written_out(model: Any, table: pa.Table) -> torch.Tensor:
    """Cross-entropy over the two verdicts behind each step, one plain sequence after the other."""
    losses = []
    for row in table.to_pylist():
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        for end, label in zip(row["step_ends"], row["labels"], strict=True):
            logps = log_softmax(logits[len(row["prompt_ids"]) + end, [GOOD, BAD]].float(), -1)
            losses.append(-label * logps[0] - (1 - label) * logps[1])
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("tokens", "share"), [(10_000, True), (100, True), (100, False), (1, True)])
def test_a_cut_batch_has_the_loss_and_gradient_of_plain_transformers(
    tokens: int, share: bool, table: pa.Table, tiny_model: Any
) -> None:
    model = load_model(str(tiny_model()), "lm", torch.float32)

    def packed() -> float:
        module, rows, total = PackedModel(model, "lm", share_prefixes=share), METHOD.rows(table), 0.0
        for part in cut(rows, 1, tokens, share)[0]:
            micro = pack(part, share_prefixes=share)
            loss, metrics = METHOD.loss(run_packed(module, micro), micro, None)
            (loss / METHOD.normaliser(rows)).backward()
            total += float(metrics["loss"]) / METHOD.normaliser(rows)
        return total

    assert_equal(loss_and_gradient(model, packed), loss_and_gradient(model, lambda: written_out(model, table)))


def test_ranks_sharding_and_micro_batches_do_not_change_the_trained_weights(
    table: pa.Table, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job, weights = make_job(METHOD, table=table), []
    for world, tokens, stage in ((1, 10_000, 0), (2, 64, 2), (2, 64, 3)):
        with machines(world).trainers() as group:
            cut = {"zero_stage": stage, "max_tokens_per_microbatch": tokens}
            ranks = open_job(group, machines(world), job, tmp_path / f"{stage}", **cut)
            train(ranks, 3)
            weights.append(load_file(export(ranks, tmp_path / f"{stage}.trained")))
    assert all(greatest_difference(weights[0], other) < 1e-5 for other in weights[1:])
    assert greatest_difference(load_file(job.model.path / "model.safetensors"), weights[0]) > 1e-3, "it did train"


def test_the_stage_saves_the_reading_of_steps_beside_the_weights(
    table: pa.Table, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    store, model, _ = store_with(tmp_path, tiny_model(), table)
    chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    keep_chat_template(chat_template, tmp_path / "data")
    data = store.publish(tmp_path / "data", "dataset")
    run = Runs(store, machines(1))
    with composing(run):
        steps = StepsConfig(separator="\n\n", placeholder="?")
        training = TrainingConfig(batch_size=4, learning_rate=1e-3, max_steps=2)
        config = ProcessRewardModelStageConfig(training=training, steps=steps)
        submit("process_reward_model", "prm", config, {"model": model, "data": data})
        result = run.results["prm"]
        assert result.reference.kind == "process-reward-model"
        folder = store.fetch(result.reference)
        assert StepsConfig.model_validate_json((folder / "process_reward_model.json").read_text()) == steps
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == chat_template, "it judges prompts in the template that it was trained in"
        for tokens, says in (
            (("good", "-"), "verdict_tokens`: 'good' is 4 tokens"),
            (("+", "--"), "verdict_tokens`: '--' is 2 tokens"),
        ):
            wrong = config.model_copy(update={"steps": steps.model_copy(update={"verdict_tokens": tokens})})
            with pytest.raises(UserError, match=says):
                submit("process_reward_model", "wrong", wrong, {"model": model, "data": data})
