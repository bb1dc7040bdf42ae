"""How a command ends: after Ctrl-C, when the reader of its output goes away (as of `mycoll env |
head -1`), or when the output cannot be written."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Callable

# The exit code that a shell shows for a program that the signal has ended.
UNREAD = 128 + signal.SIGPIPE
INTERRUPTED = 128 + signal.SIGINT
FAILED = 2


def quietly(run: Callable[[], int]) -> int:
    """Runs a command, and returns its exit code: without a traceback when its reader goes away, the
    disk is full, mycoll does not load here, or the user interrupts it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are in any language
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        silence()
        return UNREAD
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ImportError) as error:
        print(f"mycoll: {error}", file=sys.stderr)
        silence()
        return FAILED


def silence() -> None:
    """From here on standard output leads nowhere, also what Python still holds back for it."""
    try:
        held = sys.stdout.fileno() if sys.stdout is not None else None
    except OSError:  # a notebook's, or a test's
        held = None
    if held is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, held)
    os.close(nowhere)


def is_unread() -> bool:
    """Whether standard output is a pipe whose reader is gone."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
