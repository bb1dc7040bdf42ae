"""Between a rank and who started it: neither ends without the other, nor without a word."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """In a child, as early as can be: it does not outlive its parent, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        raise SystemExit(128 + signal.SIGTERM)


def signal_name(number: int) -> str:
    """Of what ended a process."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
