"""How `mycoll bench` starts its ranks, and that they end together and with a message."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mycoll import bench, launch
from mycoll._terminal import INTERRUPTED
from worlds import warm

_TIMEOUT_SECONDS = 120


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restores Ctrl-C, which a shell disables in background jobs and their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_rank(pid: str) -> bool:
    """Whether it is a rank, not multiprocessing's resource tracker."""
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.contextmanager
def measuring() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A long run of two ranks that has started, and the process ids of its ranks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mycoll", "bench", "all_reduce,barrier", "--nproc", "2"]
        + ["--backend", "gloo", "-b", "8", "-e", "64", "-n", "2", "--rounds", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks: list[int] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("# mycoll bench")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        ranks = [int(child) for child in children.split() if is_rank(child)]
        assert len(ranks) == 2
        yield process, ranks
    finally:
        for pid in [process.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def has_ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], _TIMEOUT_SECONDS)[0])
    finally:
        os.close(descriptor)


@pytest.mark.tools
def test_a_rank_that_is_killed() -> None:
    with measuring() as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert process.returncode == 1
        assert "mycoll bench: rank 1 of 2 failed:\n\n" in errors, errors  # gloo may complain before
        assert "ended by SIGKILL (killed: perhaps the machine ran out of memory)" in errors


@pytest.mark.tools
def test_ranks_end_with_their_launcher() -> None:
    with measuring() as (process, ranks):
        process.kill()
        assert all(map(has_ended, ranks))


@pytest.mark.tools
def test_interrupted() -> None:
    """Ctrl-C ends the ranks, also stopped ones."""
    with measuring() as (process, ranks):
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert (process.returncode, errors) == (INTERRUPTED, "")
        assert all(map(has_ended, ranks))


@pytest.mark.tools
def test_interrupted_together() -> None:
    """A terminal sends the signal to all processes of the group."""
    with measuring() as (process, ranks):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert (process.returncode, errors) == (INTERRUPTED, "")
        assert all(map(has_ended, ranks))


def exit_code(factor: int) -> int:
    return factor * int(os.environ["RANK"])


@pytest.mark.tools
def test_exit_codes() -> None:
    assert launch.run_command("test", exit_code, 2, (7,), "gloo") == 7
    assert launch.run_command("test", exit_code, 1, (7,), "gloo") == 0


def test_ranks_of_torchrun_start_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(launch, "run_command", lambda *_: pytest.fail("ranks were started"))
    assert bench.main(["all_reduce", "--nproc", "2"]) == 2
    assert "leave --nproc out" in capsys.readouterr().err


@pytest.mark.tools
def test_an_unwritable_file_of_rank_0_ends_all_ranks() -> None:
    """Under a launcher that does not end the others, such as srun."""
    words = ("bench", "barrier", "--json", "/nonexistent/x")
    ended = warm.ranks(warm.module("mycoll"), 2, *words, timeout=_TIMEOUT_SECONDS)
    assert [code for code, *_ in ended] == [2, 2]
    errors = [error for *_, error in ended]
    assert "--json: " in errors[0] and errors[1] == ""


@pytest.mark.tools
def test_a_disk_that_is_full() -> None:
    words = ["bench", "barrier", "--nproc", "2", "--backend", "gloo", "--rounds", "1"]
    done = warm.run_module("mycoll", *words, "--json", "/dev/full", timeout=_TIMEOUT_SECONDS)
    assert done.returncode == 1
    assert "rank 0 of 2 failed:\n\nOSError: [Errno 28] No space left" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
