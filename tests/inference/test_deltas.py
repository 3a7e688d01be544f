"""Updates as deltas: receivers end with the bits that were sent, whatever changed, and change no other weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.errors import PeerFailed
from alignment_core.inference.channels.deltas import (
    GREATEST_GAP,
    DeltaDecoder,
    DeltaEncoder,
    apply_delta,
    checksum,
    make_delta,
)
from tests.inference.sides import Weights, weights_of

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def of_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """As it comes out of buckets."""
    return tensor.clone(memory_format=torch.contiguous_format)


def update(encoder: DeltaEncoder, weights: Weights, *decoders: DeltaDecoder) -> tuple[list[str], int]:
    """Send weights; the kind of each item, and the bytes of all. Every receiver must get the bits that were sent."""
    versions = [decoder.begin() for decoder in decoders]
    items = list(encoder.encode(weights, versions))
    for decoder in decoders:
        received = list(decoder.decode([(item, copied(tensor)) for item, tensor in items]))
        assert [name for name, _ in received] == [name for name, _ in weights]
        for (_, tensor), (_, sent) in zip(received, weights, strict=True):
            assert (tensor.dtype, tensor.shape) == (sent.dtype, sent.shape)
            assert bits(tensor) == bits(sent)
            tensor.view(-1).view(torch.uint8).zero_()  # it is the engine's own
        assert decoder.version == encoder.version
    return [item.partition(":")[0] for item, _ in items], sum(tensor.nbytes for _, tensor in items)


def checked_delta(base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A delta, after a look whether both sides end with the bits of ``tensor``."""
    there = base.clone()
    delta = make_delta(base, tensor)
    assert delta is not None
    apply_delta("w", there, delta)
    assert bits(there) == bits(base) == bits(tensor)
    return delta


def test_indices_of_a_delta_that_does_not_pay_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take 8 bytes for each changed element: four times the memory of a tensor in bfloat16."""

    def refused(_: torch.Tensor) -> None:
        raise AssertionError("indices")

    monkeypatch.setattr(torch.Tensor, "nonzero", refused)
    assert make_delta(torch.zeros(1000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)) is None


def test_a_delta_is_a_checksum_values_and_gaps() -> None:
    base = torch.zeros(100, dtype=torch.int16)
    base[3] = 7
    new = base.clone()
    new[4], new[9] = 2, -1
    # Of 200 bytes as 25 numbers of eight: the third two-byte element of the first number is bits 48 to 63, 7 · 2^48.
    assert checksum(base) == 7 << 48
    assert bits(checked_delta(base.clone(), new)) == struct.pack("<q2h2h", 7 << 48, 2, -1, 5, 5)


def test_an_element_far_from_the_one_before_needs_one_in_between() -> None:
    base = torch.zeros(2 * GREATEST_GAP + 2, dtype=torch.bfloat16)
    new = base.clone()
    new[-1] = 1.0
    assert len(checked_delta(base, new)) == 8 + 3 * 4  # elements 32766 and 65533, which are as before, and 65535


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_type_of_weights_is_patched_by_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 2, (13, 77), generator=generator, dtype=torch.uint8).to(dtype)
    new = base.clone()
    new.view(-1)[[0, 5, 1000]] = torch.tensor([1, 0, 1], dtype=torch.uint8).to(dtype)
    checked_delta(base, new)


def test_nan_and_negative_zero_are_told_apart_by_bits() -> None:
    """As numbers, NaN differs from itself, and -0.0 equals 0.0."""
    quiet, other = struct.pack("<2I", 0x7FC00000, 0x7FC00001)[:4], struct.pack("<I", 0x7FC00001)
    base = of_bytes(quiet * 2 + struct.pack("<2f", 0.0, -0.0) + bytes(80), torch.float32)
    new = of_bytes(quiet + other + struct.pack("<2f", -0.0, -0.0) + bytes(80), torch.float32)
    assert math.isnan(base[0])
    assert len(checked_delta(base, new)) == 8 + 2 * 6, "the second and the third"


def test_weights_that_did_not_change_are_checksums() -> None:
    weights: Weights = [("a", torch.randn(40, 40)), ("b", torch.randn(50).to(torch.bfloat16))]
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    assert update(encoder, weights, decoder) == (["whole", "whole", "version"], 6500)
    assert update(encoder, weights, decoder) == (["delta", "delta", "version"], 16)


def test_weights_that_all_changed_are_whole() -> None:
    weights = weights_of(1)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    update(encoder, weights, decoder)
    changed = [(name, tensor + 1) for name, tensor in weights]
    kinds, size = update(encoder, changed, decoder)
    assert kinds == ["whole"] * 7 + ["version"]
    assert size == sum(tensor.nbytes for _, tensor in weights)


def test_other_names_types_and_shapes_are_whole() -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    update(encoder, [("a", torch.zeros(90)), ("b", torch.zeros(90)), ("gone", torch.zeros(90))], decoder)
    other: Weights = [("b", torch.zeros(9, 10)), ("new", torch.zeros(90)), ("a", torch.zeros(90, dtype=torch.int32))]
    assert update(encoder, other, decoder)[0] == ["whole"] * 3 + ["version"]
    back: Weights = [("a", torch.zeros(90, dtype=torch.int32)), ("gone", torch.zeros(90))]
    assert update(encoder, back, decoder)[0] == ["delta", "whole", "version"]


def test_a_receiver_without_the_last_update_gets_all_weights_and_so_do_the_others() -> None:
    encoder, one, other = DeltaEncoder(), DeltaDecoder(), DeltaDecoder()
    weights: Weights = [("a", torch.randn(90))]
    update(encoder, weights, one)
    assert update(encoder, weights, one, other)[0] == ["whole", "version"]
    assert update(encoder, weights, one, other)[0] == ["delta", "version"]
    assert update(DeltaEncoder(), weights, one, other)[0] == ["whole", "version"], "a sender of a later attempt"


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_all_weights_follow_an_update_that_broke_off(side: str) -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    weights: Weights = [(name, torch.randn(90)) for name in "abc"]
    update(encoder, weights, decoder)
    weights[1][1][7] = 3.0
    items = encoder.encode(weights, [decoder.begin()])
    broken = [next(items), next(items)]
    list(decoder.decode(broken))
    if side == "receiver":
        list(items)
    weights[1][1][7] = 4.0
    assert update(encoder, weights, decoder)[0] == ["whole"] * 3 + ["version"]


def test_other_weights_than_those_that_were_sent_are_refused() -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    weights: Weights = [("a", torch.randn(90)), ("head", torch.randn(90))]
    update(encoder, weights, decoder)
    decoder._base["head"][3] += 1
    items = list(encoder.encode(weights, [decoder.begin()]))
    with pytest.raises(PeerFailed, match=r"^the engine's copy of head .*\(resources\.weight_update_mode: full"):
        list(decoder.decode(items))
    assert update(encoder, weights, decoder)[0] == ["whole", "whole", "version"]


def test_items_may_come_in_several_calls() -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    weights = weights_of(1)
    for _ in range(2):
        items = list(encoder.encode(weights, [decoder.begin()]))
        received = [weight for item in items for weight in decoder.decode([item])]
        assert [bits(tensor) for _, tensor in received] == [bits(tensor) for _, tensor in weights]
    assert items[0][0] == "delta:embed"


Change = tuple[int, bytes]


@st.composite
def histories(draw: st.DrawFn) -> tuple[torch.dtype, list[list[bytes]]]:
    """The bytes of some tensors in each of some updates, of which any number differ from those before."""
    dtype = draw(st.sampled_from(DTYPES))
    size = dtype.itemsize
    lengths = draw(st.lists(st.integers(0, 120), min_size=1, max_size=3))
    element = st.binary(min_size=size, max_size=size)
    states = [[draw(st.binary(min_size=length * size, max_size=length * size)) for length in lengths]]
    for _ in range(draw(st.integers(1, 3))):
        tensors = []
        for data, length in zip(states[-1], lengths, strict=True):
            changed = bytearray(data)
            for place in draw(st.sets(st.integers(0, length - 1))) if length else ():
                changed[place * size : (place + 1) * size] = draw(element)
            tensors.append(bytes(changed))
        states.append(tensors)
    return dtype, states


def of_state(dtype: torch.dtype, state: Iterable[bytes]) -> Weights:
    plain: Any = torch.uint8 if dtype == torch.bool else dtype  # a bool of another byte than 0 and 1 is undefined
    return [
        (str(number), of_bytes(data, plain) if data else torch.empty(0, dtype=plain))
        for number, data in enumerate(state)
    ]


@given(histories())
def test_receivers_always_end_with_the_bits_that_were_sent(history: tuple[torch.dtype, list[list[bytes]]]) -> None:
    dtype, states = history
    encoder, decoders = DeltaEncoder(), [DeltaDecoder(), DeltaDecoder()]
    full = sum(map(len, states[0]))
    for state in states:
        _, size = update(encoder, of_state(dtype, state), *decoders)
        assert size <= full, "a delta is sent where it is smaller"
