"""A network with a rate and a delay, for kernels without netem: see hosts.py --delay.

    ip netns exec SWITCH python router.py --delay 0.025 --rate 125e6 HOST_0 HOST_1 ...

Creates a device veth0 (a TUN device) in each of these namespaces, and forwards its packets to the
host of their address after the delay, with each host's link limited to the rate in both directions.
Packets that do not fit in a link's queue (twice the delay) are dropped. Prints "ready" when the
devices exist, and ends at the end of its standard input.

The kernel passes bundles of up to 64 KiB, as for network cards that segment them (TSO). 1 Gbit/s
are a few thousand bundles per second, for which Python needs a fraction of a core. A bundle counts
as the packets that it would be on the line.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN = 0x01, 0x02, 0x08
VNET_HEADER = struct.Struct("<BBHHHH")  # flags, gso_type, header, segment, checksum: start, offset
PR_SET_TIMERSLACK = 29
LEAST_QUEUE = 0.05  # seconds


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def open_device(number: int, namespace: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"tun{number}"
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO_ECN)
    run("ip", "link", "set", name, "netns", namespace, "name", "veth0")
    run("ip", "-n", namespace, "addr", "add", f"10.214.0.{number + 1}/24", "dev", "veth0")
    run("ip", "-n", namespace, "link", "set", "veth0", "txqueuelen", "10000", "up")
    return device


def bytes_on_the_line(packet: bytes) -> int:
    """The bytes of all segments of a bundle with their headers."""
    _, gso_type, header, segment, _, _ = VNET_HEADER.unpack_from(packet)
    whole = len(packet) - VNET_HEADER.size
    if not gso_type or not segment:
        return whole
    segments = -(-(whole - header) // segment)
    return whole + (segments - 1) * header


class Router:
    def __init__(self, namespaces: list[str], delay: float, rate: float) -> None:
        self.delay = delay
        self.rate = rate  # bytes per second; 0: unlimited
        self.queue = max(2 * delay, LEAST_QUEUE)
        self.devices = [open_device(i, name) for i, name in enumerate(namespaces)]
        self.out_free = [0.0] * len(namespaces)  # when the link of the host is free
        self.in_free = [0.0] * len(namespaces)
        self.in_flight: list[tuple[float, int, int, bytes]] = []  # due, number, to, packet
        self.count = 0
        self.dropped = 0

    def take(self, source: int, packet: bytes, now: float) -> None:
        at = VNET_HEADER.size
        if packet[at] >> 4 != 4 or packet[at + 16 : at + 19] != bytes((10, 214, 0)):
            return
        to = packet[at + 19] - 1
        if not 0 <= to < len(self.devices) or to == source:
            return
        due = now
        if self.rate:
            seconds = bytes_on_the_line(packet) / self.rate
            sent = max(now, self.out_free[source]) + seconds
            # Its first bytes arrive while the last ones are still being sent.
            due = max(sent, self.in_free[to] + seconds)
            if due - now > self.queue:
                self.dropped += 1
                return
            self.out_free[source], self.in_free[to] = sent, due
        self.count += 1
        heapq.heappush(self.in_flight, (due + self.delay, self.count, to, packet))

    def forward(self) -> None:
        sources = {device: i for i, device in enumerate(self.devices)}
        while True:
            timeout = None
            if self.in_flight:
                timeout = max(0.0, self.in_flight[0][0] - time.monotonic())
            # select(), because poll() has only milliseconds.
            for device in select.select([*self.devices, 0], [], [], timeout)[0]:
                if device == 0:
                    if not os.read(0, 4096):
                        return
                    continue
                try:
                    for _ in range(64):
                        packet = os.read(device, 65536 + VNET_HEADER.size)
                        self.take(sources[device], packet, time.monotonic())
                except BlockingIOError:
                    pass
            now = time.monotonic()
            while self.in_flight and self.in_flight[0][0] <= now:
                _, _, to, packet = heapq.heappop(self.in_flight)
                os.write(self.devices[to], packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, required=True, help="one way, in seconds")
    parser.add_argument("--rate", type=float, default=0, help="bytes per second")
    parser.add_argument("namespaces", nargs="+")
    arguments = parser.parse_args()
    # Otherwise sleeps may take up to 50 us longer.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    router = Router(arguments.namespaces, arguments.delay, arguments.rate)
    print("ready", flush=True)
    router.forward()
    print(f"router: {router.count} bundles forwarded, {router.dropped} dropped", file=sys.stderr)


if __name__ == "__main__":
    main()
