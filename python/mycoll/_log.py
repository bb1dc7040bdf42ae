"""mycoll's lines in Python's logging: the logger "mycoll".

The Python half always logs there. The engine has no Python: it writes to stderr or MYCOLL_LOG_FILE,
until log_to_python() brings its lines here as well.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import traceback

from mycoll._native import native

log = logging.getLogger("mycoll")

_LINE = re.compile(r"\[mycoll \S+ ([a-z]+) rank (\S+) pid \d+\] (.*)")
# As the engine names its levels, in its order: "off" is the first.
_LEVELS = {
    "off": logging.CRITICAL + 1,
    "failure": logging.CRITICAL,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_END = b"\0\n"
_pipe: tuple[int, int] | None = None


def log_to_python(level: int = logging.INFO) -> None:
    """Sends mycoll's log lines to Python's logger `mycoll` instead of stderr or MYCOLL_LOG_FILE.

    The record's `rank` is the rank that wrote the line. The first failure of a process, which
    mycoll reports in any case, is CRITICAL.

    Args:
        level: Lines below it are not formatted at all.

    Example:
        mycoll.log_to_python(logging.WARNING)
        logging.getLogger("mycoll").addHandler(logging.StreamHandler())
    """
    global _pipe
    if _pipe is None:
        _pipe = os.pipe()
        thread = threading.Thread(target=_forward, args=(_pipe[0],), name="mycoll log", daemon=True)
        thread.start()
        atexit.register(_stop, _pipe[1], thread, os.getpid())
    number = max(n for n, each in enumerate(_LEVELS.values()) if each >= min(level, _LEVELS["off"]))
    native()._log_to(f"/proc/self/fd/{_pipe[1]}", number)


def _forward(descriptor: int) -> None:
    with open(descriptor, "rb") as lines:  # a pipe
        for line in lines:
            if line == _END:
                return
            text = line.decode(errors="replace").rstrip("\n")
            found = _LINE.match(text)  # not a further line of a message
            level, rank, text = found.groups() if found else ("info", "?", text)
            try:
                log.log(_LEVELS.get(level, logging.INFO), "%s", text, extra={"rank": rank})
            except Exception:  # of a filter or a handler of the program's
                traceback.print_exc()  # without this thread the engine would block at its full pipe


def _stop(descriptor: int, thread: threading.Thread, process: int) -> None:
    """At exit: what was written so far still arrives, and the rest goes to stderr. The pipe of a
    forked child is its parent's."""
    if os.getpid() != process:
        return
    native()._log_to("", list(_LEVELS).index("failure"))
    os.write(descriptor, _END)
    thread.join(1)
