"""Simulated hosts: network namespaces that are connected by veth pairs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator

import pytest

CLONE_NEWNET = 0x40000000
# From Linux's headers.
ALL_PROTOCOLS, RECEIVE_BUFFER_FORCE, PACKETS, PACKET_STATISTICS = 3, 33, 263, 6


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(*letters: str) -> Iterator[tuple[str, ...]]:
    """Namespaces named after these letters and this process, with a loopback; removed at the end.
    Skips the test if they cannot be made, or if a command of the block fails."""
    names = tuple(f"mycoll-{each}-{os.getpid()}" for each in letters)
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        text = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"network namespaces cannot be made here: {text.strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def join(names: tuple[str, ...], link: str) -> None:
    """Connects two namespaces by a pair of interfaces with this name."""
    ip("link", "add", link, "netns", names[0], "type", "veth", "peer", "name", link,
       "netns", names[1])  # fmt: skip


def enter(namespace: str) -> None:
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)


class Capture:
    """Captures the packets of an interface of a namespace. Requires root."""

    def __init__(self, namespace: str, link: str) -> None:
        self.seen = bytearray()
        self.is_over = False
        opened = threading.Event()

        def record() -> None:
            enter(namespace)  # this thread only
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as s:
                s.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER_FORCE, 256 << 20)
                s.bind((link, 0))
                s.settimeout(0.1)
                opened.set()
                while True:
                    try:
                        self.seen += s.recv(1 << 18)
                    except TimeoutError:
                        if self.is_over:
                            break
                counts = s.getsockopt(PACKETS, PACKET_STATISTICS, 8)
                self.lost = struct.unpack("II", counts)[1]

        self.thread = threading.Thread(target=record, daemon=True)
        self.thread.start()
        assert opened.wait(10)

    def end(self) -> bytes:
        """Stops, and returns all captured bytes."""
        self.is_over = True
        self.thread.join()
        assert self.lost == 0, "packets were not captured"
        return bytes(self.seen)
