"""How `mycoll bench` starts its ranks, and how they end: together, and never without a word."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mycoll
import pytest
from mycoll.bench import cli, launch
from worlds import warm

_TIMEOUT_SECONDS = 120
_SIGINT_MASK = 1 << (signal.SIGINT - 1)


def environment(**changes: str) -> dict[str, str]:
    paths = [str(Path(mycoll.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell has what it runs in the background ignore Ctrl-C, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def measuring() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two ranks that goes on for long, and has begun; its ranks' process ids."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mycoll.bench", "all_reduce,barrier", "--nproc", "2"]
        + ["--backend", "gloo", "-b", "8", "-e", "64", "-n", "2", "--rounds", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    ranks: list[int] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("# mycoll bench")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        ranks = [int(child) for child in children.split()]
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


def is_stopped(pid: int) -> bool:
    """With all threads: none takes a signal any more."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def is_interrupted(pid: int) -> bool:
    """Whether a stopped process has a SIGINT to come."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(line.split()[1] for line in lines if line.startswith("ShdPnd"))
    return bool(int(pending, 16) & _SIGINT_MASK)


def test_a_rank_that_is_killed() -> None:
    with measuring() as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert process.returncode == 128 + signal.SIGKILL
        assert "rank 1 was ended by SIGKILL (out of memory?)" in errors


def test_no_rank_outlives_who_started_it() -> None:
    with measuring() as (process, ranks):
        process.kill()
        assert all(map(has_ended, ranks))


def test_a_parent_that_ended_before() -> None:
    command = [sys.executable, "-m", "mycoll", "bench", "all_reduce", "--nproc", "2"]
    env = environment(**{launch._PARENT: "-1"})
    done = subprocess.run(command, env=env, capture_output=True, timeout=_TIMEOUT_SECONDS)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"")


def test_interrupted_twice() -> None:
    """Ranks that do not end at the first Ctrl-C are ended by the second."""
    with measuring() as (process, ranks):
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        while not all(map(is_stopped, ranks)):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        while not all(map(is_interrupted, ranks)):
            time.sleep(0.01)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert (process.returncode, errors) == (launch.INTERRUPTED, "")
        assert all(map(has_ended, ranks))


class TestRunRanks:
    """In this process, with ranks that are something else."""

    @pytest.fixture(autouse=True)
    def no_handler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch.signal, "signal", lambda *_: None)

    def test_terminated_while_it_starts_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[subprocess.Popen[bytes]] = []

        def start(*_: object) -> subprocess.Popen[bytes]:
            if started:
                raise KeyboardInterrupt
            started.append(subprocess.Popen(["sleep", "1000"]))
            return started[0]

        monkeypatch.setattr(launch, "_start", start)
        assert launch.run_ranks([], 2) == launch.INTERRUPTED
        assert started[0].returncode == -signal.SIGINT

    def test_exit_codes(self) -> None:
        script = "import os, sys; sys.exit(7 * int(os.environ['RANK']))"
        assert launch.run_ranks(["-c", script], 2) == 7
        assert launch.run_ranks(["-c", script], 1) == 0


def test_ranks_of_torchrun_start_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(cli, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    assert cli.main(["all_reduce", "--nproc", "2"]) == 2
    assert "leave --nproc out" in capsys.readouterr().err


def test_a_file_of_rank_0_that_cannot_be_written_ends_all() -> None:
    """Under a launcher that does not end the others, such as srun."""
    bench = warm.module("mycoll.bench")
    ended = warm.ranks(bench, 2, "barrier", "--json", "/nonexistent/x", timeout=_TIMEOUT_SECONDS)
    assert [code for code, *_ in ended] == [2, 2]
    errors = [error for *_, error in ended]
    assert "--json: " in errors[0] and errors[1] == ""
