"""mycoll.spawn: results by rank, and the first failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mycoll
import pytest
import torch
import torch.distributed as dist
from mycoll import launch
from worlds import servers


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, backend):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def quick_start(monkeypatch):
    """Forks ranks from a process that has imported torch, for tests that do not test how ranks
    start. The ranks have the environment of that process."""
    start = servers.context()
    server = servers.pid()
    process = start.Process

    def child_of_server(args, **more):  # ranks end with their parent
        call, _, sender = args
        return process(args=(call, server, sender), **more)

    monkeypatch.setattr(launch.multiprocessing, "get_context", lambda _: start)
    monkeypatch.setattr(start, "Process", child_of_server)


def add_ranks(start):
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.environ["LOCAL_RANK"], dist.get_backend()


def rank_one_raises():
    if dist.get_rank() == 1:
        raise ValueError("the loss is nan")
    dist.barrier()


def rank_one_raises_beside(folder):
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the loss is nan")
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        Path(folder, "error").write_text(str(error))
        raise


def rank_one_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_one_dies_and_leaves_a_child():
    if dist.get_rank() == 1:
        if os.fork() == 0:
            os.closerange(0, 3)  # do not keep the test's streams open
            time.sleep(90)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(90)


def rank_one_raises_late():
    """Rank 0 fails first, as a consequence of rank 1."""
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.4)
        raise ValueError("the cause")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    try:
        work.wait()
    except dist.DistBackendError as error:
        raise RuntimeError("cannot continue") from error


def rank_one_raises_its_own_cause():
    if dist.get_rank() == 1:
        error = ValueError("the loss is nan")
        raise error from error
    dist.barrier()


def return_generator():
    return (number for number in range(3))


def sleep_long():
    time.sleep(600 if dist.get_rank() else 0)


def test_results_by_rank(backend):
    results = mycoll.spawn(add_ranks, 2, (10,), backend=backend)
    assert results == [(0, 21, "0", backend), (1, 21, "1", backend)]


def test_traceback_of_the_first(backend, quick_start):
    with pytest.raises(mycoll.SpawnError, match="rank 1 of 2 failed") as caught:
        mycoll.spawn(rank_one_raises, backend=backend)
    text = str(caught.value)
    assert (caught.value.rank, caught.value.cause) == (1, "ValueError: the loss is nan")
    assert "in rank_one_raises" in text and "ValueError: the loss is nan" in text
    assert "launch.py" not in text


@pytest.fixture
def long_grace(monkeypatch):
    """Gives ranks time to report after the first failure, also on a busy machine."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 10.0)


def test_the_exception_is_in_the_error_of_the_others(
    mycoll_only, quick_start, long_grace, tmp_path
):
    with pytest.raises(mycoll.SpawnError, match="rank 1 of 2 failed"):
        mycoll.spawn(rank_one_raises_beside, args=(str(tmp_path),))
    text = (tmp_path / "error").read_text()
    assert "its program ended with an exception, ValueError: the loss is nan" in text, text


def test_pytest_hides_frames_of_spawn():
    def generators():
        yield  # cannot be pickled, and neither can this function

    with pytest.raises(RuntimeError) as caught:
        mycoll.spawn(generators)
    assert [entry.name for entry in caught.traceback.filter(caught)] == [
        "test_pytest_hides_frames_of_spawn"
    ]


def test_killed_rank(backend, quick_start):
    with pytest.raises(mycoll.SpawnError, match="rank 1 of 2 failed") as caught:
        mycoll.spawn(rank_one_dies, backend=backend)
    assert "SIGKILL" in str(caught.value)


def test_consequence_before_the_cause(backend, quick_start, long_grace):
    with pytest.raises(mycoll.SpawnError, match="ValueError: the cause"):
        mycoll.spawn(rank_one_raises_late, backend=backend)


def test_an_exception_that_is_its_own_cause(backend, quick_start):
    with pytest.raises(mycoll.SpawnError, match="ValueError: the loss is nan"):
        mycoll.spawn(rank_one_raises_its_own_cause, backend=backend, timeout=30)


def test_result_that_cannot_be_pickled(backend, quick_start):
    with pytest.raises(mycoll.SpawnError, match="cannot pickle 'generator' object"):
        mycoll.spawn(return_generator, backend=backend)


def test_timeout_stops_all_ranks(backend, quick_start):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="from rank 1; stopped"):
        mycoll.spawn(sleep_long, backend=backend, timeout=10)
    assert time.monotonic() - start < 60


def test_bad_count():
    with pytest.raises(ValueError, match="nprocs"):
        mycoll.spawn(add_ranks, 0)


CELL = """
import torch, torch.distributed as dist, mycoll
def cell():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
print(mycoll.spawn(cell))
"""


def run(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], input=stdin, capture_output=True, text=True, timeout=120
    )


@pytest.mark.tools
def test_cell_with_cloudpickle():
    pytest.importorskip("cloudpickle")
    done = run("-", stdin=CELL)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr


@pytest.mark.tools
def test_cell_without_cloudpickle():
    hidden = "import sys; sys.modules['cloudpickle'] = None\n"
    done = run("-", stdin=hidden + CELL)
    assert done.returncode == 1
    assert "pip install cloudpickle" in done.stderr, done.stderr


def test_a_child_of_a_dead_rank_does_not_block_spawn(backend, quick_start):
    with pytest.raises(mycoll.SpawnError, match="ended by SIGKILL"):
        mycoll.spawn(rank_one_dies_and_leaves_a_child, 2, backend=backend, timeout=60)


@pytest.mark.tools
def test_environment_is_set_before_imports(tmp_path: Path, monkeypatch, backend):
    """torch reads some variables when it is imported, which the script does at its top."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    script = tmp_path / "script.py"
    script.write_text(
        "import mycoll, torch\n"
        "if __name__ == '__main__':\n"
        f"    print(mycoll.spawn(torch.get_num_threads, 1, backend={backend!r},\n"
        "                       env={'OMP_NUM_THREADS': '1'}))\n"
        "    import os\n"
        "    print(os.environ.get('OMP_NUM_THREADS'))\n"
    )
    assert run(str(script)).stdout.split() == ["[1]", "None"]


@pytest.mark.tools
@pytest.mark.parametrize("guard", ["if __name__ == '__main__':", "if True:"])
def test_script(tmp_path: Path, guard: str):
    script = tmp_path / "script.py"
    script.write_text(CELL.replace("print(", f"{guard}\n    print("))
    done = run(str(script))
    if "main" in guard:
        assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
    else:
        assert done.returncode == 1
        assert "if __name__ ==" in done.stderr, done.stderr
