"""Hosts for real: network namespaces joined by veth pairs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

import pytest

CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(*letters: str) -> Iterator[tuple[str, ...]]:
    """Named after these letters and this process, with a loopback; removed at the end. Skips the
    test where they, or what its body does with them, cannot be made."""
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
    """By a pair of interfaces of this name."""
    ip("link", "add", link, "netns", names[0], "type", "veth", "peer", "name", link,
       "netns", names[1])  # fmt: skip


def enter(namespace: str) -> None:
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)
