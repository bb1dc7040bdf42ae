"""benchmarks/peers: MPI libraries measured beside the backends of `mycoll bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mycoll.bench.options import parse_options
from mycoll.bench.report import read_results
from worlds.alone import alone

PEERS = Path(__file__).resolve().parent.parent / "benchmarks" / "peers"
QUICK = ("-n", "2", "-w", "1", "--rounds", "2")


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules importable by name, as in a program."""
    monkeypatch.syspath_prepend(str(PEERS))
    for name in ("mpi", "build"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PEERS), *words], capture_output=True, text=True, timeout=120
    )


@pytest.mark.tools
@pytest.mark.parametrize("peer", ["openmpi", "mpich"])
def test_a_peer_is_measured(peer: str, tmp_path: Path) -> None:
    from mpi_build import PeerAbsent, build

    try:
        build(peer, tmp_path)
    except PeerAbsent as reason:
        pytest.skip(f"{peer}: {reason}")
    path = tmp_path / "out.jsonl"
    done = run(
        *(peer, "all_reduce,pingpong,bandwidth,barrier", "--nproc", "2", "--backend", "gloo"),
        *("-b", "1K", "-e", "1K", "-d", "complex64", *QUICK, "--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows = read_results(str(path))
    wrong = {(row.op, row.contender): row.wrong for row in rows}
    assert len(wrong) == 8 and wrong.pop(("barrier", peer)) is None
    assert set(wrong.values()) == {0}
    assert f"{peer}: in C, without torch" in done.stdout


@pytest.mark.tools
def test_an_unknown_peer() -> None:
    done = run("nompi", "all_reduce", "--nproc", "2")
    assert done.returncode == 2 and "intelmpi" in done.stderr


def test_absent_peer_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    from mpi_build import PeerAbsent, build

    with pytest.raises(PeerAbsent, match="apt install mpich"):
        build("mpich", tmp_path)


@pytest.mark.parametrize(
    "trouble", [OSError("AF_UNIX path too long"), subprocess.TimeoutExpired("mpicc", 1)]
)
def test_a_peer_that_cannot_start_is_left_out(
    trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mpi

    def start(*_: object) -> None:
        raise trouble

    monkeypatch.setattr(mpi.MpiContender, "start", start)
    monkeypatch.setattr(mpi, "gather_contenders", lambda *_: ([], []))
    found, (absent,) = mpi.gather(["mpich"], parse_options(["barrier"]), alone())
    assert found == [] and absent.startswith("mpich: ") and str(trouble) in absent


def test_a_peer_that_died_is_reported_on_all_ranks() -> None:
    import socket

    import mpi
    from mycoll.bench.workload import Unsupported

    contender = mpi.MpiContender("mpich", alone(), parse_options(["barrier"]))
    ours, theirs = socket.socketpair()
    contender._channels = [ours.makefile("rw")]
    ours.close()
    theirs.close()
    with pytest.raises(Unsupported, match="died or hung"):
        contender.run(1, 1)
