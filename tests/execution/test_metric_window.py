"""Key metrics of a stage: means over the first and last tenth of its steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from alignment_core.artifacts.manifest import Manifest
from alignment_core.execution.metric_window import MetricWindow, movement
from alignment_core.models.masters import masters_of, name_masters
from alignment_core.models.saving import changed_weights


def go(window: MetricWindow, step: int, stop: int) -> None:
    """Take steps one by one; each one's loss is its number."""
    while step < stop:
        step += 1
        window.add(step, {"loss": float(step)})


def test_means_of_the_first_and_the_last_tenth(tmp_path):
    window = MetricWindow(tmp_path, 0, 40)
    go(window, 0, 40)
    assert window.metrics() == {"loss": (37 + 38 + 39 + 40) / 4, "loss.first": (1 + 2 + 3 + 4) / 4}


def test_steps_count_by_their_weight_and_a_metric_that_is_missing_does_not(tmp_path):
    window = MetricWindow(tmp_path, 0, 20)
    window.add(1, {"loss": 1.0, "kl": 0.5}, weight=3)
    window.add(2, {"loss": 5.0}, weight=1)
    window.add(19, {})
    window.add(20, {"loss": 0.5, "kl": 0.1})
    assert window.metrics() == {"loss": 0.5, "kl": 0.1, "loss.first": 2.0, "kl.first": 0.5}


def test_final_metrics_of_an_early_stop_are_of_its_last_steps(tmp_path):
    window = MetricWindow(tmp_path, 0, 40)
    go(window, 0, 20)
    assert window.metrics() == {"loss": (17 + 18 + 19 + 20) / 4, "loss.first": (1 + 2 + 3 + 4) / 4}


def test_a_resumed_attempt_keeps_the_first_metrics_of_the_earlier_attempt(tmp_path):
    go(MetricWindow(tmp_path, 0, 40), 0, 10)
    window = MetricWindow(tmp_path, 10, 40)
    go(window, 10, 40)
    assert window.metrics()["loss.first"] == 2.5


def test_a_resumed_attempt_has_the_last_metrics_of_an_uninterrupted_one(tmp_path):
    """Killed after step 39, saved after 38: the mean is over 37 to 40, of which the second attempt sees two."""
    first = MetricWindow(tmp_path, 0, 40)
    go(first, 0, 38)
    first.save()
    go(first, 38, 39)
    second = MetricWindow(tmp_path, 38, 40)
    go(second, 38, 40)
    assert second.metrics() == {"loss": 38.5, "loss.first": 2.5}
    second.save()
    assert MetricWindow(tmp_path, 40, 40).metrics()["loss"] == 38.5, "also of one that was killed after its last step"
    assert MetricWindow(tmp_path, 0, 40).metrics() == {}, "a training that starts again forgets them"


def test_an_attempt_that_saw_a_part_of_the_first_steps_reports_no_first_metrics(tmp_path):
    go(MetricWindow(tmp_path, 0, 40), 0, 2)
    window = MetricWindow(tmp_path, 2, 40)
    go(window, 2, 40)
    assert window.metrics() == {"loss": 38.5}


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_few_steps(tmp_path, steps):
    window = MetricWindow(tmp_path, 0, steps)
    go(window, 0, steps)
    assert window.metrics() == ({"loss": 1.0} if steps == 1 else {"loss": float(steps), "loss.first": 1.0})


def weights(folder: Path, dtype: str, **tensors: torch.Tensor) -> Path:
    """A folder of a model with these weights, in one file for each."""
    folder.mkdir()
    names = {name: f"{name}.safetensors" for name in tensors}
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / names[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
    return folder


def test_the_share_of_changed_weights_is_measured_as_they_are_saved(tmp_path: Path) -> None:
    """Beside 1 the next numbers of bf16 are 1 + 2⁻⁷ and 1 - 2⁻⁸: 1 + 2⁻⁹ is saved as 1, and 1 + 2⁻⁷ as itself."""
    bf16 = torch.bfloat16
    start = weights(tmp_path / "start", "float32", a=torch.full((2, 2), 1 + 2**-9), b=torch.ones(4))
    moved = torch.tensor([[1, 1], [1, 1 + 2**-7]])
    of = partial(weights, b=torch.ones(4, dtype=bf16), head=torch.ones(3, dtype=bf16))
    assert changed_weights(start, of(tmp_path / "bf16", "bfloat16", a=moved.to(bf16))) == 1 / 8
    assert changed_weights(start, weights(tmp_path / "fp32", "float32", a=moved, b=torch.ones(4))) == 4 / 8
    assert changed_weights(start, weights(tmp_path / "other", "float32", c=moved)) is None


def test_weights_are_compared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment_core.models.saving._AT_ONCE", 3)
    changed = torch.zeros(10)
    changed[[2, 3, 9]] = 1
    start = weights(tmp_path / "start", "float32", a=torch.zeros(10))
    assert changed_weights(start, weights(tmp_path / "result", "float32", a=changed)) == 0.3


def test_few_changes_are_not_lost_where_the_master_weights_are_kept(tmp_path: Path) -> None:
    ones = torch.ones(200, dtype=torch.bfloat16)
    start = weights(tmp_path / "start", "bfloat16", a=ones)
    (tmp_path / "masters").mkdir()
    save_file({"weights.model.a": torch.full((200,), 1 + 2**-10)}, tmp_path / "masters" / "a.safetensors")
    for name, changed, warned in (("none", 0, 1), ("one", 1, 0)):
        moved = ones.clone()
        moved[:changed] = 2
        result = weights(tmp_path / name, "bfloat16", a=moved)
        name_masters(result, tmp_path / "masters")
        metrics, warnings = movement(start, result)
        assert metrics == {"changed_weights": changed / 200}
        assert len(warnings) == warned
        reference = masters_of(result)
        assert reference is not None
        assert reference == Manifest.of_directory(tmp_path / "masters", "masters").reference


def test_equal_policies_in_bf16_with_other_master_weights_are_other_artifacts(tmp_path: Path) -> None:
    policy = weights(tmp_path / "policy", "bfloat16", a=torch.ones(3, dtype=torch.bfloat16))
    digests = [Manifest.of_directory(policy, "model").digest]
    for number, weight in enumerate((1 + 2**-12, 1 + 2**-11, 1 + 2**-12)):
        (tmp_path / f"masters-{number}").mkdir()
        save_file({"weights.model.a": torch.full((3,), weight)}, tmp_path / f"masters-{number}" / "a.safetensors")
        name_masters(policy, tmp_path / f"masters-{number}")
        digests.append(Manifest.of_directory(policy, "model").digest)
    assert digests[1] == digests[3]
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("dtype", "changed", "sentences"),
    [
        (torch.bfloat16, 0, ["the policy is identical to the initial one: no step changed any weight"]),
        (torch.bfloat16, 1, ["0.50% of the weights differ from the initial ones"]),
        (torch.bfloat16, 2, []),
        (torch.float32, 1, []),
    ],
)
def test_a_policy_that_hardly_moved_is_warned_about(
    tmp_path: Path, dtype: torch.dtype, changed: int, sentences: list[str]
) -> None:
    start, result = torch.ones(200, dtype=dtype), torch.ones(200, dtype=dtype)
    result[:changed] = 2
    name = str(dtype).removeprefix("torch.")
    before, after = weights(tmp_path / "start", name, a=start), weights(tmp_path / "result", name, a=result)
    metrics, warnings = movement(before, after)
    assert metrics == {"changed_weights": changed / 200}
    assert [warning.split(": changes")[0] for warning in warnings] == sentences
    assert movement(before, after, "average") == (
        {"changed_weights/average": changed / 200},
        [f"average: {warning}" for warning in warnings],
    )
