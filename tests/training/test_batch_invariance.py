"""Layout and micro-batches of a batch change neither its loss nor its gradient.

The reference is written with plain ``transformers``: right-padded sequences, an attention mask, and the losses of the
papers term by term. The trainer's results from packed lines must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax, logsigmoid

from alignment_core.models.activations import Recomputed, recompute
from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Row, cut, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes import DpoLossConfig, ResourcesConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft

RELATIVE = 1e-5
METHODS = {
    "sft": Sft(),
    "reward model": RewardModel(),
    "reward model, log-exp": RewardModel("logexp"),
    "dpo": Dpo(DpoLossConfig(beta=0.3)),
    "conservative dpo with nll": Dpo(DpoLossConfig(beta=0.3, label_smoothing=0.1, nll_weight=0.5)),
    "ipo": Dpo(DpoLossConfig(loss_type="ipo", beta=0.3)),
    "three losses, of sums and means, with a reference and without": Dpo(
        DpoLossConfig(loss_weights={"hinge": 0.5, "sigmoid_norm": 2.0, "simpo": 1.0}, beta=0.3)
    ),
    "orpo": Dpo(DpoLossConfig(loss_type="orpo", beta=0.3, nll_weight=1.0)),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both_architectures = pytest.mark.parametrize("architecture", ["llama", "qwen2"])


@pytest.fixture
def alike() -> bool:
    """Whether rows share their prompts."""
    return False


@pytest.fixture
def rows(tables: Any, method: Any, alike: bool) -> list[Row]:
    name = "sft" if isinstance(method, Sft) else "preference"
    return method.rows(tables[f"{name}, alike" if alike else name])


@pytest.fixture
def model(tiny_model: Any, method: Any, architecture: str) -> Any:
    return load_model(str(tiny_model(architecture)), method.head, torch.float32, head_seed=7)


@pytest.fixture
def reference(tiny_model: Any, method: Any, rows: list[Row], architecture: str) -> torch.Tensor | None:
    """Summed log-probabilities [2 rows] under another model."""
    if not method.needs_reference:
        return None
    with torch.no_grad():
        other = load_model(str(tiny_model(architecture, seed=2)), "lm", torch.float32)
        return torch.stack([logps.sum() for logps in padded_logps(other, rows)])


def padded_forward(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Logits of all sequences, right-padded to the longest."""
    sequences = [sequence for row in rows for sequence in row.sequences]
    width = max(len(sequence.ids) for sequence in sequences)
    ids = torch.full((len(sequences), width), model.config.pad_token_id)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for line, sequence in enumerate(sequences):
        ids[line, : len(sequence.ids)] = torch.tensor(sequence.ids)
        mask[line, : len(sequence.ids)] = 1
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def padded_logps(model: Any, rows: Sequence[Row]) -> list[torch.Tensor]:
    """For each sequence the log-probabilities of its targets."""
    logps = log_softmax(padded_forward(model, rows).float(), dim=-1)
    sequences = [sequence for row in rows for sequence in row.sequences]
    places = [torch.tensor(sequence.targets.nonzero()[0]) for sequence in sequences]
    return [
        logps[line, at - 1, torch.tensor(sequence.ids)[at]]
        for line, (sequence, at) in enumerate(zip(sequences, places, strict=True))
    ]


def padded_loss(method: Any, model: Any, rows: Sequence[Row], reference: torch.Tensor | None) -> torch.Tensor:
    """The mean loss of ``rows``, written out."""
    if isinstance(method, RewardModel):
        scores = padded_forward(model, rows)[:, 0]
        margins = torch.tensor([row.margin for row in rows])
        return -logsigmoid(scores[0::2] - scores[1::2] - margins).mean()
    logps = padded_logps(model, rows)
    if isinstance(method, Sft):
        return -torch.cat(logps).mean()
    before = torch.zeros(len(logps)) if reference is None else reference
    ratios = [logp.sum() - minus for logp, minus in zip(logps, before, strict=True)]
    config, losses = method.config, []
    for w in range(0, len(logps), 2):
        terms = {
            name: pair_loss(name, config, [logps[w], logps[w + 1]], [ratios[w], ratios[w + 1]])
            for name in config.weights
        }
        losses.append(sum(weight * terms[name] for name, weight in config.weights.items()))
        losses[-1] = losses[-1] - config.nll_weight * logps[w].mean()
    return torch.stack(losses).mean()


def pair_loss(name: str, config: DpoLossConfig, logps: list[torch.Tensor], ratios: list[torch.Tensor]) -> torch.Tensor:
    """The loss of one pair, from its log-probabilities by token and its summed log-ratios, chosen first."""
    gap = ratios[0] - ratios[1]
    mean_gap = ratios[0] / len(logps[0]) - ratios[1] / len(logps[1])
    means = [logps_of_row.mean() for logps_of_row in logps]
    if name == "ipo":
        return (mean_gap - 1 / (2 * config.beta)) ** 2
    if name == "hinge":
        return (1 - config.beta * gap).clamp(min=0)
    if name == "sigmoid_norm":
        return -logsigmoid(config.beta * mean_gap)
    if name == "simpo":
        return -logsigmoid(config.beta * (means[0] - means[1]) - config.target_margin)
    if name == "orpo":
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        return -config.beta * logsigmoid((odds[0] / odds[1]).log())
    assert name == "sigmoid"
    smoothing = config.label_smoothing
    return -(1 - smoothing) * logsigmoid(config.beta * gap) - smoothing * logsigmoid(-config.beta * gap)


def packed_loss(
    method: Any, model: Any, parts: Sequence[Sequence[Row]], reference: torch.Tensor | None, share: bool = True
) -> Callable[[], float]:
    """As the trainer does it: each part is a packed micro-batch, its gradient is added to those before."""

    def run() -> float:
        module = PackedModel(model, method.head, share_prefixes=share)
        normaliser = method.normaliser([row for part in parts for row in part])
        total = 0.0
        for part in parts:
            batch = pack(part, share_prefixes=share)
            numbers = [2 * row.number + side for row in part for side in (0, 1)]
            reference_S = None if reference is None else reference[numbers]
            loss, metrics = method.loss(run_packed(module, batch), batch, reference_S)
            (loss / normaliser).backward()
            total += float(metrics["loss"]) / normaliser
        return total

    return run


def loss_and_gradient(model: Any, run: Callable[[], Any]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    result = run()
    if isinstance(result, torch.Tensor):
        result.backward()
        result = result.item()
    return result, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def assert_equal(left: tuple[float, torch.Tensor], right: tuple[float, torch.Tensor]) -> None:
    assert left[0] == pytest.approx(right[0], rel=RELATIVE)
    assert right[1].norm() > 0.01  # there is something to compare
    assert (left[1] - right[1]).norm() <= RELATIVE * right[1].norm()


@both_architectures
@every_method
@pytest.mark.parametrize(
    ("alike", "share"), [(True, True), (False, True), (True, False)], ids=["trees", "a forest", "lines"]
)
def test_a_packed_batch_has_the_loss_and_gradient_of_plain_padded_transformers(
    share: bool, alike: bool, method: Any, model: Any, rows: list[Row], reference: torch.Tensor | None
) -> None:
    tokens = sum(row.tokens for row in rows)
    if share:
        computed = pack(rows).input_ids.numel()
        assert computed < 0.8 * tokens if alike else computed <= tokens
    else:
        lines = len(pack(rows, share_prefixes=False).input_ids)
        assert lines < sum(len(row.sequences) for row in rows) / 2, "several sequences share a line"
    packed = loss_and_gradient(model, packed_loss(method, model, [rows], reference, share))
    padded = loss_and_gradient(model, lambda: padded_loss(method, model, rows, reference))
    assert_equal(packed, padded)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("architecture", ["llama"])
@every_method
def test_a_packed_batch_has_the_loss_and_gradient_of_one_row_at_a_time(
    alike: bool, method: Any, model: Any, rows: list[Row], reference: torch.Tensor | None
) -> None:
    packed = loss_and_gradient(model, packed_loss(method, model, [rows], reference))
    single = loss_and_gradient(model, packed_loss(method, model, [[row] for row in rows], reference))
    assert_equal(packed, single)


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("architecture", ["llama"])
@every_method
def test_accumulating_over_micro_batches_changes_nothing(
    method: Any, model: Any, rows: list[Row], reference: torch.Tensor | None, micro_batches: int
) -> None:
    [parts] = cut(rows, 1, token_budget=-(-sum(row.tokens for row in rows) // micro_batches) + 20)
    assert len(parts) == micro_batches
    whole = loss_and_gradient(model, packed_loss(method, model, [rows], reference))
    accumulated = loss_and_gradient(model, packed_loss(method, model, parts, reference))
    assert_equal(accumulated, whole)


@pytest.mark.parametrize("architecture", ["llama"])
@every_method
def test_a_rank_without_rows_adds_a_gradient_of_zero(
    method: Any, model: Any, rows: list[Row], reference: torch.Tensor | None
) -> None:
    whole = loss_and_gradient(model, packed_loss(method, model, [rows], reference))
    with_empty = loss_and_gradient(model, packed_loss(method, model, [rows, []], reference))
    assert_equal(with_empty, whole)


@pytest.mark.parametrize("architecture", ["llama"])
@pytest.mark.parametrize("method", [Sft()], ids=["sft"])
@pytest.mark.parametrize("what", ["all", "selective"])
def test_recomputed_activations_change_no_bit(
    what: Recomputed, method: Any, model: Any, rows: list[Row], architecture: str
) -> None:
    plain = loss_and_gradient(model, packed_loss(method, model, [rows], None))
    recompute(model, what)
    model.train()
    loss, gradient = loss_and_gradient(model, packed_loss(method, model, [rows], None))
    assert loss == plain[0]
    assert torch.equal(gradient, plain[1])


@pytest.mark.parametrize("architecture", ["llama"])
@pytest.mark.parametrize("method", [Sft()], ids=["sft"])
def test_forward_passes_give_the_summed_log_probabilities_of_completions(
    tiny_model: Any, architecture: str, method: Any
) -> None:
    from alignment_core.artifacts import Reference
    from alignment_core.cluster.device import Device
    from alignment_core.training.forward import ForwardJob

    path: Path = tiny_model(architecture)
    resources = ResourcesConfig(max_tokens_per_microbatch=16)
    pairs = [([1, 2, 3], [4, 5]), ([], [6, 7, 8]), ([9], [10] * 40), ([11, 12], [])]
    job = ForwardJob(Model(path, Reference("model", "0" * 64)), "lm")
    values = job.open(resources, Device("cpu", 1)).run(pairs)
    model = load_model(str(path), "lm", torch.float32)
    for value, (prompt, completion) in zip(values, pairs, strict=True):
        with torch.no_grad():
            logps = log_softmax(model(torch.tensor([[*prompt, *completion]])).logits[0], dim=-1)
        first = max(len(prompt), 1)  # nothing predicts the first token of all
        ids = [*prompt, *completion]
        expected = sum(float(logps[place - 1, ids[place]]) for place in range(first, len(ids)))
        assert value == pytest.approx(expected, rel=RELATIVE, abs=1e-6)
