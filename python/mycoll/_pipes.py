"""What becomes of output that nobody reads any more, as of `mycoll env | head -1`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

UNREAD = 128 + signal.SIGPIPE  # what a shell shows for a program that the signal has ended


def quietly(run: Callable[[], int]) -> int:
    """Runs a command; its exit code, without a traceback where its reader goes away."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        silence()
        return UNREAD


def silence() -> None:
    """From here on standard output leads nowhere, also what Python still holds back for it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def is_unread() -> bool:
    """Whether standard output is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
