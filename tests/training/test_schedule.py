"""Warm-up, stable, decay: by hand, and as `transformers` has it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from alignment_core.recipes import TrainingConfig
from alignment_core.training.schedule import learning_rate, whole_steps


def rates(steps: int, **fields: Any) -> list[float]:
    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type="wsd", **fields)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warm_up_stable_and_linear_decay_by_hand() -> None:
    # 10 steps: 2 of warm-up (1/3, 2/3), 4 at the peak, 4 of decay to 0.2: 1, 0.8, 0.6, 0.4
    learning_rates = rates(10, warmup_ratio=0.2, decay_ratio=0.4, min_lr_ratio=0.2)
    assert learning_rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_decay_with_one_minus_the_root_by_hand() -> None:
    # 4 of 8 steps decay: 1 − √0, 1 − √¼, 1 − √½, 1 − √¾
    learning_rates = rates(8, decay_ratio=0.5, decay_type="1-sqrt")
    assert learning_rates == pytest.approx([1, 1, 1, 1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)])


def test_wsd_without_a_stable_phase_is_linear_and_constant_for_a_single_step() -> None:
    linear = TrainingConfig(learning_rate=1.0, lr_scheduler_type="linear", warmup_ratio=0.3)
    assert rates(10, warmup_ratio=0.3, decay_ratio=0.7) == [learning_rate(linear, step, 10) for step in range(10)]
    assert rates(1) == [1.0]


@pytest.mark.parametrize(("kind", "floor"), itertools.product(["linear", "1-sqrt"], [0.0, 0.1]))
def test_the_schedule_equals_transformers_after_the_warm_up(kind: str, floor: float) -> None:
    """Their warm-up begins at zero, ours with the first step above it."""
    import torch
    from transformers.optimization import get_wsd_schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_wsd_schedule(optimizer, 5, 20, num_training_steps=50, decay_type=kind, min_lr_ratio=floor)
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    learning_rates = rates(50, warmup_ratio=0.1, decay_ratio=0.4, decay_type=kind, min_lr_ratio=floor)
    assert learning_rates[5:] == pytest.approx(expected[5:])


def test_a_policy_that_starts_after_its_critic_warms_up_from_its_first_step_by_hand() -> None:
    """100 steps, warm-up over a tenth of them, the critic alone trained for 20: the policy's first update is the first of 10
    warm-up steps, 1/11 of the peak; the peak is step 30, and the cosine to the end has 70 steps, so step 65 is half-way."""
    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type="cosine", warmup_ratio=0.1)
    learning_rates = [learning_rate(config, step, 100, first_step=20) for step in range(20, 100)]
    assert learning_rates[:3] == pytest.approx([1 / 11, 2 / 11, 3 / 11])
    assert learning_rates[10] == 1.0
    assert learning_rates[45] == pytest.approx(0.5)
    assert learning_rates[-1] == pytest.approx((1 + math.cos(math.pi * 69 / 70)) / 2)
    assert learning_rates[10:] == sorted(learning_rates[10:], reverse=True)


def test_a_wait_that_leaves_no_room_for_the_stable_phase_leaves_the_decay_after_the_warm_up() -> None:
    """10 steps, the first is 5, warm-up 2 (1/3, 2/3), decay of 4 begins after it, at step 7, and not at step 6: 1, 2/3, 1/3."""
    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type="wsd", warmup_ratio=0.2, decay_ratio=0.4)
    learning_rates = [learning_rate(config, step, 10, first_step=5) for step in range(5, 10)]
    assert learning_rates == pytest.approx([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3])


def test_unset_fields_of_the_schedule_are_not_in_keys() -> None:
    assert not {"decay_ratio", "decay_type"} & TrainingConfig().model_dump(mode="json").keys()
    chosen = TrainingConfig(lr_scheduler_type="wsd", decay_ratio=0.2, decay_type="1-sqrt").model_dump(mode="json")
    assert (chosen["decay_ratio"], chosen["decay_type"]) == (0.2, "1-sqrt")
    assert TrainingConfig.model_validate(chosen).decay_ratio == 0.2


def test_a_warm_up_in_steps_by_hand() -> None:
    """3 steps of warm-up reach the peak in the fourth: 1/4, 2/4, 3/4; then 7 steps of linear decay."""
    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=3)
    learning_rates = [learning_rate(config, step, 10) for step in range(10)]
    assert learning_rates == pytest.approx([1 / 4, 2 / 4, 3 / 4, *(1 - done / 7 for done in range(7))])


@pytest.mark.parametrize("epochs", [0.01, 0.5, 1, 1.5, 2, 2.75])
def test_fractional_epochs_have_the_steps_of_transformers(epochs: float) -> None:
    """101 rows in batches of 4: 26 steps per epoch."""
    import torch
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(num_train_epochs=epochs, per_device_train_batch_size=4, use_cpu=True)
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=[{"x": 0}] * 101)
    *_, steps = trainer.set_initial_training_values(arguments, trainer.get_train_dataloader())
    assert whole_steps(epochs, 26) == steps


def test_whole_steps_do_not_depend_on_rounding() -> None:
    """1.1 × 10 is 11.000000000000002 in floating point."""
    assert whole_steps(1.1, 10) == 11


@pytest.mark.parametrize(("ratio", "steps"), [(0.1, 5), (0.03, 15), (0.1, 25), (0.07, 100), (0.0, 9)])
def test_a_warm_up_by_ratio_has_the_steps_of_transformers(ratio: float, steps: int) -> None:
    """Of a fraction of a step the next whole one: 0.1 of 5 steps are 1, so that the first step has half of the peak."""
    from transformers import TrainingArguments

    config = TrainingConfig(learning_rate=1.0, lr_scheduler_type="constant", warmup_ratio=ratio)
    warm = sum(learning_rate(config, step, steps) < 1 for step in range(steps))
    # 0.07 × 100 is 7.000000000000001 in floating point, of which theirs are 8
    assert warm == TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(steps) - (ratio == 0.07)
    if (ratio, steps) == (0.1, 5):
        assert learning_rate(config, 0, steps) == 0.5


def test_whole_epochs_are_integers_in_keys_and_warm_up_steps_are_in_none() -> None:
    for epochs in (1, 1.0):
        dump = TrainingConfig(num_train_epochs=epochs).model_dump(mode="json")
        assert repr(dump["num_train_epochs"]) == "1"
        assert "warmup_steps" not in dump
    fraction = TrainingConfig(num_train_epochs=0.5, warmup_steps=3).model_dump(mode="json")
    assert (fraction["num_train_epochs"], fraction["warmup_steps"]) == (0.5, 3)
    assert TrainingConfig.model_validate(fraction).num_train_epochs == 0.5
