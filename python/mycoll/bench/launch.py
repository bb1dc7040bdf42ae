"""Starts ranks on this host, as torchrun would, and ends them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from torch.distributed import TCPStore

from mycoll._parent import end_with, signal_name
from mycoll._pipes import INTERRUPTED, is_unread

_POLL_SECONDS = 0.2  # seldom: a process that wakes up is in the way of ranks that are timed
_GRACE_SECONDS = 5.0
_PARENT = "_MYCOLL_BENCH_PARENT"


def under_launcher() -> bool:
    """Whether torchrun, or we ourselves, started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_here() -> bool:
    """Whether run_ranks() has: RANK and WORLD_SIZE may have been exported for something else."""
    return os.environ.get(_PARENT) == str(os.getppid())


def under_torchrun() -> bool:
    """Whether torchrun started this process: no variable of its own is exported for others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and _PARENT not in os.environ


def end_with_parent() -> None:
    """In a rank: it does not outlive who started it, however that ended."""
    if _PARENT not in os.environ:
        return
    end_with(int(os.environ[_PARENT]))


@contextlib.contextmanager
def ended_when_unread() -> Iterator[None]:
    """In a rank: where nobody reads what the block prints, run_ranks() ends all ranks at once. This
    one waits for that, as the others would fail, and say so, when they saw it leave."""
    try:
        yield
    except BrokenPipeError:
        if started_here():
            time.sleep(_GRACE_SECONDS)
        raise


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Runs the command on every rank; the first exit code that is not 0, or 0.

    The store lives here, in the parent: its port is chosen by the kernel and free for sure, and it
    outlives every rank.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            processes.append(_start(command, rank, ranks, store.port))
        return _wait(processes)
    except KeyboardInterrupt:
        for process in processes:
            process.send_signal(signal.SIGINT)
        return INTERRUPTED
    except BrokenPipeError:
        for process in processes:
            process.kill()
        raise
    finally:
        _end(processes)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Being terminated ends the ranks too, as Ctrl-C does."""
    raise KeyboardInterrupt


def _start(command: Sequence[str], rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _PARENT: str(os.getpid()),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.Popen([sys.executable, *command], env=environment)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, one has failed, or nobody reads the results (BrokenPipeError)."""
    while True:
        if is_unread():
            raise BrokenPipeError
        codes = [process.poll() for process in processes]
        # A rank that a signal ended is the cause, others that failed meanwhile are not.
        if failed := min((code for code in codes if code), default=0):
            return failed if failed > 0 else _ended_by(-failed, codes.index(failed))
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)


def _ended_by(number: int, rank: int) -> int:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    print(f"mycoll bench: rank {rank} was ended by {signal_name(number)}{hint}", file=sys.stderr)
    return 128 + number


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Gives those that are left a moment: ranks that agree to fail exit within milliseconds. To be
    interrupted again ends it."""
    deadline = time.monotonic() + _GRACE_SECONDS
    with contextlib.suppress(KeyboardInterrupt):
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
