"""GPUs by kind, from their datasheets, and the fractions of these figures that programs reach."""

from __future__ import annotations

from dataclasses import dataclass

from alignment_core.errors import UserError

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """A kind of device. All rates are those of one device; a CPU core counts as a device without memory of its own."""

    name: str
    memory: int
    """Bytes; 0 for a processor, whose memory all models of a run share."""
    flops: float
    """Dense bf16 operations per second on a GPU; fp32 operations on a CPU."""
    bandwidth: float
    """Bytes of memory read per second."""
    link: float
    """Bytes per second from one GPU to others of its node, one way."""
    network: float = 50 * GB
    """Bytes per second from one GPU to those of other nodes: 400 Gbit/s each."""
    per_node: int = 8
    """GPUs of a node."""


KINDS = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100", 80 * GB, 312e12, 2.039e12, 300 * GB, network=25 * GB),
        Hardware("a800", 80 * GB, 312e12, 2.039e12, 200 * GB, network=25 * GB),
        Hardware("h100", 80 * GB, 989e12, 3.35e12, 450 * GB),
        Hardware("h200", 141 * GB, 989e12, 4.8e12, 450 * GB),
        Hardware("b200", 180 * GB, 2250e12, 7.7e12, 900 * GB),
        Hardware("l40s", 48 * GB, 362e12, 0.864e12, 32 * GB, network=12.5 * GB),
        Hardware("rtx4090", 24 * GB, 165e12, 1.008e12, 32 * GB, network=3 * GB),
    )
}
"""From NVIDIA's datasheets: SXM modules with NVLink, cards with PCIe 4."""


@dataclass(frozen=True)
class Coefficients:
    """How much of the hardware's figures is reached. The defaults, for GPUs, reproduce table 5 of OpenRLHF's paper (Hu et al.
    2024, arXiv:2405.11143), see tests/capacity/test_paper.py; :mod:`alignment_core.capacity.measured` has those of a run."""

    training: float = 0.5
    """Fraction of ``flops`` in forward and backward passes, with recomputed activations counted as work."""
    forward: float = 0.5
    """Fraction of ``flops`` in forward passes without gradients."""
    prefill: float = 0.5
    """Fraction of ``flops`` in which engines read prompts."""
    decoding: float = 0.8
    """Fraction of ``bandwidth`` at which an engine reads weights and cache for each token, or of ``flops`` if they limit it."""
    seconds_per_layer: float = 120e-6
    """Further seconds of each layer for each token: starts of kernels and, with tensor parallelism, exchanges."""
    transfer: float = 2.5 * GB
    """Bytes of weights per second from trainers to engines."""
    host: float = 20 * GB
    """Bytes per second and rank of an optimiser in CPU memory."""
    pcie: float = 20 * GB
    """Bytes per second between a GPU and CPU memory."""


def hardware_of(kind: str) -> Hardware:
    """The GPU of this name. Raises UserError for another one."""
    if kind not in KINDS:
        raise UserError(f"--kind {kind}: no such GPU is known here; use one of {', '.join(KINDS)}")
    return KINDS[kind]
