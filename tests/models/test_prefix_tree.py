"""Layout of sequences with common prefixes, and which tokens attend to which."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.models.prefix_tree import LEAST_SHARED, Layout, lay_out, shared_tokens


@st.composite
def sequences(draw: st.DrawFn) -> list[np.ndarray]:
    """Some of which continue a part of another."""
    drawn: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        begin = drawn[draw(st.integers(0, len(drawn) - 1))] if drawn else []
        begin = begin[: draw(st.integers(0, 60))]
        drawn.append(begin + draw(st.lists(st.integers(0, 2), min_size=0 if begin else 1, max_size=40)))
    return [np.array(sequence, np.int64) for sequence in drawn]


def seen(layout: Layout, place: int) -> list[int]:
    """The tokens that the one at ``place`` sees."""
    return [at for start, end, last in layout.nodes for at in range(start, end) if at <= place and (place < last)]


@given(sequences())
def test_each_token_attends_to_the_earlier_tokens_of_its_sequences(sequences: list[np.ndarray]) -> None:
    layout = lay_out(sequences)
    uses = np.zeros(len(layout.ids), int)
    for sequence, places in zip(sequences, layout.places, strict=True):
        assert layout.ids[places].tolist() == sequence.tolist()
        assert layout.positions[places].tolist() == list(range(len(sequence)))
        assert seen(layout, places[-1]) == places.tolist()
        uses[places] += 1
    assert layout.multiplicity.tolist() == uses.tolist()
    assert [node.start for node in layout.nodes] == [0, *(node.end for node in layout.nodes[:-1])]


@given(sequences())
def test_two_sequences_share_a_long_enough_common_prefix(
    sequences: list[np.ndarray],
) -> None:
    layout = lay_out(sequences)
    for first, here in zip(sequences, layout.places, strict=True):
        for second, there in zip(sequences, layout.places, strict=True):
            common = shared_tokens(first, second)
            same = shared_tokens(here, there)
            assert common - LEAST_SHARED < same <= common
            assert not set(here[same:]) & set(there[same:])


def test_turns_of_a_conversation_are_a_chain() -> None:
    whole = np.arange(90)
    layout = lay_out([whole[:30], whole, whole[:60]])
    assert layout.ids.tolist() == whole.tolist()
    assert [tuple(node) for node in layout.nodes] == [(0, 30, 90), (30, 60, 90), (60, 90, 90)]
    assert layout.multiplicity.tolist() == [3] * 30 + [2] * 30 + [1] * 30
