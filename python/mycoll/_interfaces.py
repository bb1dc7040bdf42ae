"""This host's network interfaces, and which of them mycoll will use: for `mycoll doctor`.

The rules are those of csrc/transport/tcp/address.cpp, retold so that the reason can be told, too.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

# linux/sockios.h and linux/if.h
SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915
IFF_UP, IFF_LOOPBACK = 0x1, 0x8

BRIDGES = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali")
ELSEWHERE = "192.0.2.1"  # reserved for examples; only the route to it is looked up


@dataclass(frozen=True)
class Interface:
    """One address of an interface that is up."""

    name: str
    address: str
    is_loopback: bool

    @property
    def is_bridge(self) -> bool:
        return self.name.startswith(BRIDGES)


def interfaces() -> list[Interface]:
    """IPv4 first, as in the engine."""
    found: list[Interface] = []
    flags: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, SIOCGIFFLAGS, request)
                flags[name] = struct.unpack_from("H", answer, 16)[0]
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:  # has no IPv4 address
                continue
            if flags[name] & IFF_UP:
                address = socket.inet_ntoa(answer[20:24])
                found.append(Interface(name, address, bool(flags[name] & IFF_LOOPBACK)))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, _, _, _, _, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        # Link-local addresses mean nothing on another host.
        if flags.get(name, 0) & IFF_UP and not address.startswith("fe80"):
            found.append(Interface(name, address, bool(flags[name] & IFF_LOOPBACK)))
    return found


def admits(filter_text: str, name: str) -> bool:
    """MYCOLL_SOCKET_IFNAME's language."""
    words = filter_text.removeprefix("^").removeprefix("=").split(",")
    is_exact = filter_text.removeprefix("^").startswith("=")
    is_listed = name in words if is_exact else name.startswith(tuple(words))
    return is_listed != filter_text.startswith("^")


def route_source(host: str) -> str:
    """The own address that packets to `host` would leave from; "" when there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def choose(found: list[Interface], filter_text: str, host: str) -> tuple[Interface | None, str]:
    """The interface that a group whose store is at `host` uses, and why."""
    if filter_text:
        is_exclusion = filter_text.startswith("^")
        admitted = [each for each in found if admits(filter_text, each.name)]
        if is_exclusion:
            admitted = [each for each in admitted if not each.is_loopback]
            admitted.sort(key=lambda each: each.is_bridge)
        why = f"MYCOLL_SOCKET_IFNAME={filter_text}"
        return (admitted[0], why) if admitted else (None, why)
    source = route_source(host)
    for each in found:
        if each.address == source:
            return each, "it leads to " + ("other hosts" if host == ELSEWHERE else host)
    for each in found:
        if not each.is_loopback and not each.is_bridge:
            return each, "the first that is no loopback or bridge"
    for each in found:
        if each.is_loopback:
            return each, "nothing leads to other hosts"
    return None, "none is up that serves"
