"""Finds the reason why this process leaves its groups. It is sent to the ranks that still need it.

An exception that ends a program can be seen in three places: `sys.last_value`, also with another
sys.excepthook; the end of a child of multiprocessing, whose exception does not get there; and
destroy_process_group() in a `finally`. An exception that ends a thread does not end the program,
and is not reported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_MOST = 120

_reason = ""  # of a child of multiprocessing
_watched = 0  # the process whose end is watched: a child of fork has its parent's variables


def reason_to_destroy() -> str:
    """Why a group is being destroyed: an exception that this thread handles, if any."""
    error = _cause(sys.exc_info()[1])
    return f"it handled an exception, {described(error)}" if error else ""


def reason_to_end() -> str:
    """Why the program ends, if by an exception."""
    return _reason or ended_by(getattr(sys, "last_value", None))


def watch_child() -> None:
    """Before a group is made: in a child of multiprocessing, notices an exception that ends it."""
    global _watched
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or _watched == os.getpid():
        return
    _watched = os.getpid()
    from multiprocessing import util

    # After what the program registers, which may still communicate.
    util.Finalize(None, _end_of_child, exitpriority=-1000)


def close_all(reason: str) -> None:
    """Leaves all groups, as this process ends, for this reason."""
    if "mycoll._C" in sys.modules:
        with contextlib.suppress(ImportError):
            from mycoll import _C  # another thread may still be loading it

            _C._close_all(reason)


def described(error: BaseException) -> str:
    """Returns its type and the first line of its message, in at most _MOST characters."""
    try:
        lines = str(error).split("\n")
    except Exception:  # the program's own code
        lines = []
    first = next((line.strip() for line in lines if line.strip()), "")
    text = f"{type(error).__qualname__}: {first}" if first else type(error).__qualname__
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _MOST else text[: _MOST - 4] + " ..."


def _end_of_child() -> None:
    """multiprocessing calls it while the exception leaves the process's function. Many children end
    without Python's handlers of exit."""
    global _reason
    error = _cause(sys.exc_info()[1])
    _reason = ended_by(error)
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    if error is not None and all(each.daemon for each in others):
        close_all(ended_by(error))


def _cause(error: BaseException | None) -> BaseException | None:
    """The exception itself; for sys.exit(1) in an `except`, the exception that it handles."""
    if isinstance(error, SystemExit):
        return error.__context__ if error.code not in (None, 0) else None
    return error


def ended_by(error: BaseException | None) -> str:
    """Returns the reason of a process that this exception ends; "" if it is none."""
    return f"its program ended with an exception, {described(error)}" if error else ""
