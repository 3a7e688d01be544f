"""Destinations of packets, by the layouts of RFC 791, 8200, 768 and 1035."""

from __future__ import annotations

import pytest

from tests.servers.outside import described

V4 = bytes.fromhex("4500003c000040004006000" + "0" + "0a630001" + "08080808")
V6 = bytes.fromhex("60000000002806" + "40" + "fd990000000000000000000000000001" + "20010db8000000000000000000000001")
QUERY = bytes.fromhex("123401000001000000000000") + b"\x07example\x03com\x00\x00\x01\x00\x01"


def ports(target: int, length: int = 8) -> bytes:
    return (40000).to_bytes(2, "big") + target.to_bytes(2, "big") + bytes(length - 4)


@pytest.mark.parametrize(
    ("packet", "place"),
    [
        (V4 + ports(443, 20), {"tcp 8.8.8.8:443"}),
        (V4[:9] + b"\x11" + V4[10:] + ports(4500), {"udp 8.8.8.8:4500"}),
        (V4[:9] + b"\x11" + V4[10:] + ports(53) + QUERY, {"name example.com"}),
        (V6 + ports(80, 20), {"tcp [2001:db8::1]:80"}),
        (V4[:9] + b"\x01" + V4[10:] + ports(0), set()),  # ICMP
    ],
)
def test_packets_are_described(packet: bytes, place: set[str]) -> None:
    assert described(packet) == place
