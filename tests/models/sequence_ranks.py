"""Ranks that compute micro-batches together, each a slice of the tokens; started by test_sequence_parallel.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor

from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.models import vocabulary_head
from alignment_core.models.activations import recompute
from alignment_core.models.adapters import add_adapters
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence, pack
from alignment_core.models.neftune import embedding_noise
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.rank_groups import RankGroup
from alignment_core.models.sequence import SequenceGroup, sequence_group
from alignment_core.recipes import LoraConfig

SHAPE = {
    "vocab_size": 307,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LONGROPE = {
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.5, 2.0, 4.0],
        "original_max_position_embeddings": 40,
    },
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, scores": {"head": "score"},
    "llama, values": {"head": "value"},
    "as many key heads": {"keys": 8},
    "one key head": {"keys": 1, "head": "value"},
    "6 query and 3 key heads": {"heads": 12, "keys": 3},
    "qwen3": {"architecture": "qwen3", "more": {"head_dim": 8}, "keys": 4},
    "gemma, tied": {"architecture": "gemma", "more": {"head_dim": 8}},
    "gpt_neox": {"architecture": "gpt_neox"},
    "phi3, longrope": {"architecture": "phi3", "more": LONGROPE, "context": 120},
    "mixture": {"architecture": "mixtral", "more": {**EXPERTS, "sliding_window": None}},
    "no common prefixes": {"apart": True},
    "noise": {"apart": True, "noise": True},
    "entropies": {"loss": "entropies"},
    "candidates": {"loss": "candidates"},
    "sum": {"loss": "sum"},
    "adapters on the head": {"adapted": ["lm_head", "q_proj"]},
    "entropies, adapters on the head": {"adapted": ["lm_head"], "loss": "entropies"},
    "all recomputed": {"recomputed": "all"},
    "all recomputed, scores": {"recomputed": "all", "head": "score"},
    "cheap ones recomputed": {"recomputed": "selective"},
    "one sequence": {"rows": "one"},
    "targets of the end": {"rows": "end"},
    "two tokens": {"rows": "short"},
}
"""Variants of a small model and of what is computed with it."""
PLACES = 7
"""Places whose logits a rank of several computes at a time; one rank computes all of them at once."""


def run(world: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(rank, *arguments)`` of all ranks."""
    torch.multiprocessing.spawn(_work, (world, folder, function, arguments), nprocs=world)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _work(rank: int, world: int, folder: Path, function: Callable[..., Any], arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    (folder / f"{rank}.json").write_text(json.dumps(function(rank, *arguments)))
    torch.distributed.destroy_process_group()


def model_of(head: str, architecture: str = "llama", heads: int = 8, keys: int = 2, **more: Any) -> Any:
    shape = {**SHAPE, "num_attention_heads": heads, "num_key_value_heads": keys, **more}
    config = transformers.AutoConfig.for_model(architecture, **shape)
    torch.manual_seed(3)
    if head == "lm":
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    config.num_labels = 1
    return transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def rows_of(kind: str = "") -> list[Row]:
    """Nine completions of three prompts; or a few others."""
    random = np.random.default_rng(5)

    def sequence(prompt: Any, tokens: int) -> TokenSequence:
        return TokenSequence.of_prompt_and_completion(prompt, random.integers(1, 300, tokens))

    if kind == "short":
        return [Row(0, (sequence(random.integers(1, 300, 1), 1),))]
    if kind in ("one", "end"):
        return [Row(0, (sequence(random.integers(1, 300, 70), 31 if kind == "one" else 3),))]
    prompts = [random.integers(1, 300, 40 + 7 * number) for number in range(3)]
    lengths = [(prompt, 21 + 5 * number) for prompt in prompts for number in range(3)]
    return [Row(number, (sequence(*length),)) for number, length in enumerate(lengths)]


def micro_batch(case: dict[str, Any], share_prefixes: bool = True) -> MicroBatch:
    rows = rows_of(case.get("rows", ""))
    if case.get("loss") == "candidates":
        random = np.random.default_rng(6)
        targets = [int(row.sequences[0].targets.sum()) for row in rows]
        candidates = [random.integers(1, 300, (count, 3)) for count in targets]
        rows = [
            Row(row.number, (TokenSequence(row.sequences[0].ids, row.sequences[0].targets, of_row),))
            for row, of_row in zip(rows, candidates, strict=True)
        ]
    return pack(rows, share_prefixes=share_prefixes, apart=case.get("apart", False))


def packed_of(case: dict[str, Any], group: SequenceGroup | None) -> PackedModel:
    head = case.get("head", "lm")
    keys = {name: case[name] for name in ("architecture", "heads", "keys") if name in case}
    model = model_of(head, **keys, **case.get("more", {}))
    if what := case.get("recomputed"):
        recompute(model, what)
    if layers := case.get("adapted"):
        _add_adapters(model, layers)
    with_entropy = case.get("loss") == "entropies"
    packed = PackedModel(model, head, with_entropy, context=case.get("context"), sequence_group=group).train()
    assert packed.shares_prefixes
    if packed.router_aux_loss_coef:
        packed.balance_routers()
    if case.get("noise"):
        packed.accept_noise()
    if case.get("loss") == "sum":
        packed.vocabulary.of_sum = True
    return packed


def _add_adapters(model: Any, layers: list[str]) -> None:
    """Add adapters that have an effect: their B is not zero. The head may have one, too, which every recipe leaves out."""
    add_adapters(model, torch.nn.Identity(), LoraConfig(target_modules=layers), seed=0, train_head=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter)


@contextmanager
def parts_of_logits(group: RankGroup | None) -> Iterator[list[int]]:
    """Has ranks of a group compute the logits of ``PLACES`` places at a time, and one rank without a group those of all places.
    Yields the number of parts of each call of a head so far."""
    counts: list[int] = []
    slices = vocabulary_head._slices

    def counted(count: int, size: int) -> list[slice]:
        parts = slices(count, size)
        counts.append(len(parts))
        return parts

    with (
        mock.patch.object(vocabulary_head, "PLACES", 10_000 if group is None else PLACES),
        mock.patch.object(vocabulary_head, "_slices", counted),
    ):
        yield counts


def check_parts(case: dict[str, Any], group: RankGroup | None, counts: list[int]) -> None:
    """Assert that one rank computed all logits at once, and each of several in more than one part, unless it has few."""
    if case.get("head", "lm") != "lm":
        assert not counts
    elif group is None:
        assert {*counts} == {1}
    elif "rows" not in case:
        assert max(counts) > 1


def loss_of(output: Tensor, micro: MicroBatch, packed: PackedModel, kind: str) -> Tensor:
    """A loss in which tokens and sequences depend on each other, as in DPO and GSPO; of ``sum``, that of SFT."""
    if kind == "sum":
        return -2.5 * output.sum()
    per_token = output.flatten(1).sum(1) if kind == "candidates" else output.sum(0) if output.dim() > 1 else output
    if packed.head == "score":
        loss = (per_token**2).sum() + torch.nn.functional.softplus(per_token[0] - per_token[-1])
    else:
        sums = sum_by_sequence(per_token, micro.sequence_K, micro.sequences)
        loss = -torch.nn.functional.logsigmoid(0.05 * (sums[:1] - sums[-1:])).sum() + (per_token**2).mean()
    return loss if packed.router_loss is None else loss + 3 * packed.router_loss


def computed(case: dict[str, Any], group: SequenceGroup | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, loss, and this rank's gradients."""
    packed, micro = packed_of(case, group), micro_batch(case)
    if case.get("noise"):
        packed.noise = embedding_noise(micro, 30.0, SHAPE["hidden_size"], seed=1)
    with parts_of_logits(group) as counts:
        output = run_packed(packed, micro)
        loss = loss_of(output, micro, packed, case.get("loss", ""))
        loss.backward()
    check_parts(case, group, counts)
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in packed.named_parameters()
    }
    return output.detach(), loss.detach(), gradients


def differences(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Of each case: how much the results of all ranks together differ from those of one."""
    group = sequence_group(world, 60.0)
    result = {}
    for name, case in CASES.items():
        output, loss, gradients = computed(case, None)
        ours, our_loss, parts = computed(case, group)
        for part in parts.values():
            torch.distributed.all_reduce(part)
        squares = [float((parts[at] - whole).square().sum()) for at, whole in gradients.items()]
        norm = float(torch.cat([whole.flatten() for whole in gradients.values()]).norm())
        result[name] = {
            "output": float((ours - output).abs().max() / output.abs().max()),
            "loss": abs(float(our_loss) - float(loss)) / abs(float(loss)),
            "gradient": sum(squares) ** 0.5 / norm,
            "norm": norm,
        }
    return result


def likeliest(rank: int, world: int) -> list[float]:
    """How much the likeliest tokens differ, and their log-probabilities."""
    outputs = []
    for group in (None, sequence_group(world, 60.0)):
        packed, micro = packed_of({}, group).eval(), micro_batch({})
        packed.top = 5
        with torch.no_grad(), parts_of_logits(group) as counts:
            outputs.append(run_packed(packed, micro))
        check_parts({}, group, counts)
    return (outputs[0] - outputs[1]).abs().amax((1, 2)).tolist()


def saved_bytes(rank: int) -> dict[int, int]:
    """Bytes that the forward pass keeps for the backward pass on this rank of four, by the size of its group."""
    return {size: _saved_bytes(sequence_group(size, 60.0)) for size in (1, 2, 4)}


def _saved_bytes(group: SequenceGroup) -> int:
    packed = PackedModel(model_of("lm", hidden_size=64, num_hidden_layers=4), "lm", sequence_group=group).train()
    random = np.random.default_rng(0)
    ids = random.integers(1, 300, 1024)
    micro = pack([Row(0, (TokenSequence(ids, np.arange(len(ids)) > 0),))])
    weights = {parameter.untyped_storage().data_ptr() for parameter in packed.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = -run_packed(packed, micro).sum()
    loss.backward()
    return sum(kept.values())
