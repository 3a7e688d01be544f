"""A private network whose gateway leads nowhere, and a record of all outgoing traffic, of any process or library.

For a process under ``unshare -rn``: it has only this network, and every TCP connection and UDP datagram that would leave
the machine appears as a packet on one interface.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import threading
import time
from pathlib import Path

INTERFACE, ALL, OUTGOING = "out", 0x0003, 4
TCP, UDP, DNS = 6, 17, 53
SETTLE_SECONDS = 1.0
SET_UP = f"""
ip link set lo up
ip link add {INTERFACE} type veth peer name far
ip link set {INTERFACE} arp off
ip addr add 10.99.0.1/24 dev {INTERFACE}
ip link set {INTERFACE} up
ip link set far up
ip route add default dev {INTERFACE}
"""
WITH_IPV6 = f"ip -6 addr add fd99::1/64 dev {INTERFACE} nodad && ip -6 route add default dev {INTERFACE}"


class Outside:
    """``taken()`` returns the addresses, and the names requested from a name server, since its last call."""

    def __init__(self) -> None:
        subprocess.run(["sh", "-ec", SET_UP], check=True)
        subprocess.run(["sh", "-c", WITH_IPV6], check=False, capture_output=True)
        self._found: set[str] = set()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL))
        self._socket.bind((INTERFACE, ALL))
        threading.Thread(target=self._read, daemon=True).start()

    def taken(self) -> list[str]:
        """``udp 8.8.8.8:53``, ``tcp [2001:db8::1]:443``, ``name example.com``."""
        time.sleep(SETTLE_SECONDS)
        with self._lock:
            packets, self._found = sorted(self._found), set()
        return packets

    def _read(self) -> None:
        while True:
            packet, (_, _, kind, *_) = self._socket.recvfrom(65535)
            if kind == OUTGOING and (description := described(packet)):
                with self._lock:
                    self._found |= description


def described(packet: bytes) -> set[str]:
    """The destination of a packet, and the name that it asks for; None for the kernel's own packets."""
    if packet[0] >> 4 == 4:
        protocol, rest, target = packet[9], packet[(packet[0] & 15) * 4 :], packet[16:20]
        place = str(ipaddress.IPv4Address(target))
    else:
        protocol, rest, target = packet[6], packet[40:], packet[24:40]
        place = f"[{ipaddress.IPv6Address(target)}]"
    if protocol not in (TCP, UDP):
        return set()
    port = int.from_bytes(rest[2:4], "big")
    if protocol == UDP and port == DNS:
        return {f"name {_name(rest[8:])}"}
    return {f"{'tcp' if protocol == TCP else 'udp'} {place}:{port}"}


def _name(query: bytes) -> str:
    """The name in a DNS query."""
    labels, at = [], 12
    while at < len(query) and query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode(errors="replace"))
        at += 1 + query[at]
    return ".".join(labels)


def is_possible() -> bool:
    """Whether this machine lets users create network namespaces."""
    command = ["unshare", "-rn", "sh", "-ec", SET_UP]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False


def resolver() -> str:
    """The name server of this machine: one on loopback would hide the names."""
    lines = Path("/etc/resolv.conf").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith("nameserver")), "")
