"""Log-probabilities that are computed for a few places at a time: values and gradients are those of the whole logits of plain
``transformers``, and no tensor has logits of more places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alignment_core.models import vocabulary_head
from alignment_core.models.adapters import adapters_off, add_adapters
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.vocabulary_head import _OfLinear
from alignment_core.recipes import LoraConfig
from tests.models.test_attention import TINY, model_of, rows_of

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phi": {},
    "falcon_h1": {"lm_head_multiplier": 0.5, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "modernbert-decoder": {},
}
"""And what their forward pass does after the last layer, with values that matter."""
PLACES = 7
IDS = [np.random.default_rng(0).integers(1, 60, length) for length in (9, 20, 3)]


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_head, "PLACES", PLACES)


def family(name: str) -> Any:
    model = model_of(name, **FAMILIES[name])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)  # logits of magnitude 1 and more, so that a cap or a scale is felt
    return model


def plain(model: Any, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of all tokens after all but the last token of each sequence, one sequence at a time. [K, V]"""
    logits = [model(torch.from_numpy(ids)[None]).logits[0, :-1] for ids in IDS]
    return (torch.cat(logits).float() / temperature).log_softmax(-1)


LABELS = torch.from_numpy(np.concatenate([ids[1:] for ids in IDS]))
WEIGHTS = torch.linspace(-1, 2, len(LABELS))


def gradients(model: Any, objective: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    objective.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed_and_micro(model: Any, **options: Any) -> tuple[PackedModel, Any]:
    packed = PackedModel(model, "lm", **options)
    return packed, pack(rows_of(IDS), share_prefixes=packed.shares_prefixes)


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-6 * max(1.0, float(gradient.norm())), name


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_the_whole_logits(name: str) -> None:
    model = family(name)
    logps = plain(model, temperature=0.7)
    chosen = logps.gather(1, LABELS[:, None])[:, 0]
    entropy = -(logps.exp() * logps).sum(-1)
    theirs = gradients(model, (WEIGHTS * chosen).sum() + (WEIGHTS.flip(0) * entropy).sum())
    packed, micro = packed_and_micro(model, with_entropy=True)
    assert packed.vocabulary.after is not None, "its logits are computed for all places at once"
    ours_K, entropy_K = run_packed(packed, micro, temperature=0.7)
    ours = gradients(model, (WEIGHTS * ours_K).sum() + (WEIGHTS.flip(0) * entropy_K).sum())
    torch.testing.assert_close(ours_K, chosen, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy_K, entropy, atol=2e-6, rtol=1e-6)
    check_equal(ours, theirs)


def test_a_model_whose_logits_depend_on_other_places_computes_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("llama")
    forward = type(model).forward

    def centred(self: Any, *arguments: Any, **options: Any) -> Any:
        output = forward(self, *arguments, **options)
        output.logits = output.logits * output.logits.shape[1]
        return output

    packed, _ = packed_and_micro(model)
    assert packed.vocabulary.after is not None
    monkeypatch.setattr(type(model), "forward", centred)
    packed, micro = packed_and_micro(model)
    assert packed.vocabulary.after is None
    with torch.no_grad():
        # Packed, the model sees 29 places at once, those that predict a target.
        logits = torch.cat([forward(model, torch.from_numpy(ids)[None]).logits[0, :-1] for ids in IDS])
        expected = (logits * len(logits)).log_softmax(-1).gather(1, LABELS[:, None])[:, 0]
        torch.testing.assert_close(run_packed(packed, micro), expected, atol=1e-4, rtol=1e-5)


def test_candidates_and_the_likeliest_tokens_are_those_of_the_whole_logits() -> None:
    model = family("gemma2")
    logps = plain(model)
    candidates_KC = (LABELS[:, None] + torch.arange(1, 4)) % 60
    wanted = torch.cat([LABELS[:, None], candidates_KC], 1)
    theirs = gradients(model, (WEIGHTS[:, None] * logps.gather(1, wanted)).sum())
    packed = PackedModel(model, "lm")
    ends = np.cumsum([len(ids) - 1 for ids in IDS])[:-1]
    pieces = np.split(candidates_KC.numpy(), ends)
    rows = [
        Row(number, (TokenSequence(ids, np.arange(len(ids)) > 0, candidates=of_row),))
        for number, (ids, of_row) in enumerate(zip(IDS, pieces, strict=True))
    ]
    output = run_packed(packed, pack(rows, share_prefixes=packed.shares_prefixes))
    torch.testing.assert_close(output, logps.gather(1, wanted), atol=2e-6, rtol=1e-6)
    check_equal(gradients(model, (WEIGHTS[:, None] * output).sum()), theirs)
    packed.top = 5
    packed.vocabulary.tokens = 50
    with torch.no_grad():
        ids_KC, logps_KC = run_packed(packed, pack(rows_of(IDS), share_prefixes=packed.shares_prefixes))
        logits = torch.cat([model(torch.from_numpy(ids)[None]).logits[0, :-1, :50] for ids in IDS])
    expected_KC, expected_ids = logits.log_softmax(-1).topk(5)
    torch.testing.assert_close(logps_KC, expected_KC, atol=2e-6, rtol=1e-6)
    assert torch.equal(ids_KC.long(), expected_ids)


@pytest.mark.parametrize("adapted", ["lora", "trained whole", "frozen"])
def test_a_head_with_adapters_has_the_gradients_of_the_whole_logits(adapted: str) -> None:
    """The layer is adapted, a copy that is trained, or frozen beside adapted layers."""
    model = family("llama")
    targets = {"lora": ["lm_head", "q_proj"], "trained whole": ["q_proj"], "frozen": ["q_proj"]}[adapted]
    config = LoraConfig(target_modules=targets, modules_to_save=["lm_head"] if adapted == "trained whole" else [])
    other = torch.nn.Identity()  # the head is not left out of the targets
    add_adapters(model, other, config, seed=0, train_head=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    logps = plain(model)
    theirs = gradients(model, (WEIGHTS * logps.gather(1, LABELS[:, None])[:, 0]).sum())
    packed, micro = packed_and_micro(model)
    assert packed.vocabulary.after is not None
    check_equal(gradients(model, (WEIGHTS * run_packed(packed, micro)).sum()), theirs)
    assert any("lm_head" in name for name in theirs) == (adapted != "frozen")
    with torch.no_grad(), adapters_off(packed):
        expected = plain(model).gather(1, LABELS[:, None])[:, 0]
        torch.testing.assert_close(run_packed(packed, micro), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_gradient_of_a_sum_is_computed_in_the_forward_pass(name: str) -> None:
    model = family(name)
    theirs = gradients(model, -0.25 * plain(model).gather(1, LABELS[:, None]).sum())
    packed, micro = packed_and_micro(model)
    packed.vocabulary.of_sum = True
    check_equal(gradients(model, -0.25 * run_packed(packed, micro).sum()), theirs)
    with pytest.raises(RuntimeError, match="declared to be a sum"):
        (WEIGHTS * run_packed(packed, micro)).sum().backward()


class Largest(TorchDispatchMode):
    """Counts the places of the largest tensor of logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.places = vocabulary, 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        weights = (
            isinstance(result, Tensor) and result.numel() == self.vocabulary * TINY["hidden_size"]
        )  # or transposed
        if isinstance(result, Tensor) and not weights and result.dim() and result.shape[-1] == self.vocabulary:
            self.places = max(self.places, result.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("of_sum", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_no_tensor_has_the_logits_of_more_places(name: str, of_sum: bool) -> None:
    model = model_of(name, **FAMILIES[name], vocab_size=97)
    packed, micro = packed_and_micro(model)
    packed.vocabulary.of_sum = of_sum
    with Largest(97) as whole:
        plain(model)
    assert whole.places >= max(map(len, IDS)), "the mode does not see logits"
    with Largest(97) as parts:
        run_packed(packed, micro).sum().backward()
    assert 0 < parts.places <= PLACES


def test_bf16_rounds_a_gradient_hardly_more_than_the_whole_logits_do() -> None:
    """A gradient in bf16 of the head's weights, added up in parts, beside one of all places at once: both are compared with
    fp32 of the same weights."""
    model = model_of("llama", vocab_size=TINY["vocab_size"]).to(torch.bfloat16)
    exact = model_of("llama").float()
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    errors = []
    packed, micro = packed_and_micro(model)
    for objective in (
        lambda of: (WEIGHTS * plain(of).gather(1, LABELS[:, None])[:, 0]).sum(),
        lambda of: (WEIGHTS * run_packed(packed, micro)).sum(),
    ):
        ours = gradients(model, objective(model))["lm_head.weight"].float()
        reference = gradients(exact, (WEIGHTS * plain(exact).gather(1, LABELS[:, None])[:, 0]).sum())["lm_head.weight"]
        errors.append(float((ours - reference).norm() / reference.norm()))
    assert errors[1] < 1.5 * errors[0] < 0.03


@pytest.mark.parametrize(("places", "most"), [(PLACES, 1.1), (2048, 1.1), (8192, 2.0)])
def test_bf16_rounds_the_gradients_of_a_head_once_for_many_places(places: int, most: float) -> None:
    """Beside those of one product over all places, both compared with fp32. Each further product rounds sums of about half of
    the size again, so that four have an error of √(1 + ¼ (1 + 2 + 3)) ≈ 1.6 times that of one."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(32, 97).to(torch.bfloat16)
    states_KH = torch.randn(places, 32, generator=generator).to(torch.bfloat16)
    labels_K1 = torch.randint(97, (places, 1), generator=generator)
    weights_K = torch.randn(places, generator=generator)

    def logps(logits_kV: Tensor, part: slice) -> Tensor:
        return logits_kV.float().log_softmax(-1).gather(1, labels_K1[part])[:, 0]

    def at_once(layer: torch.nn.Linear) -> Tensor:
        return (weights_K * logps(layer(states_KH.to(layer.weight.dtype)), slice(None))).sum()

    exact = torch.nn.Linear(32, 97)
    exact.load_state_dict({name: tensor.float() for name, tensor in layer.state_dict().items()})
    reference = torch.autograd.grad(at_once(exact), [*exact.parameters()])
    whole = torch.autograd.grad(at_once(layer), [*layer.parameters()])
    ours_K = _OfLinear.apply(states_KH, layer.weight, layer.bias, logps, False)
    parts = torch.autograd.grad((weights_K * ours_K).sum(), [*layer.parameters()])
    for ours, theirs, right in zip(parts, whole, reference, strict=True):
        errors = [float((rounded.float() - right).norm() / right.norm()) for rounded in (ours, theirs)]
        assert errors[0] < most * errors[1] < 0.01 * most, errors
