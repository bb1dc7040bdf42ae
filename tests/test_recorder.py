"""The record of a process's last operations, which is written to a file after a failure."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mycoll import black_box, trace
from mycoll.black_box import Operation
from torch.distributed import distributed_c10d
from worlds import warm
from worlds.worker import Ctx

SHORT = 1.5  # seconds; the group's timeout after init


def everything(ctx: Ctx) -> None:
    """Calls each collective, and messages between neighbours."""
    x, n = torch.ones(6), ctx.size
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, n - 1)
    dist.all_gather([torch.empty(6) for _ in range(n)], x)
    dist.all_gather_into_tensor(torch.empty(6 * n), x)
    dist.all_gather([torch.empty(i + 1) for i in range(n)], torch.ones(ctx.rank + 1))
    dist.reduce_scatter_tensor(torch.empty(6), torch.ones(6 * n))
    dist.gather(x, [torch.empty(6) for _ in range(n)] if ctx.rank == 0 else None, dst=0)
    dist.scatter(torch.empty(6), [x] * n if ctx.rank == 0 else None, src=0)
    dist.all_to_all_single(torch.empty(2 * n), torch.ones(2 * n))
    work = dist.isend(x, (ctx.rank + 1) % n)
    dist.recv(torch.empty(6), (ctx.rank - 1) % n)
    work.wait()
    dist.barrier()
    dist.all_reduce(x, async_op=True).wait()


def hooks_of_torch(ctx: Ctx) -> int:
    group = dist.new_group()
    dist.barrier(group=group)
    return len(distributed_c10d._world.pg_flight_recorder_hooks)


def test_torch_keeps_no_second_record(reused, mycoll_only):
    if not hasattr(distributed_c10d._world, "pg_flight_recorder_hooks"):
        pytest.skip("torch records calls of other backends since 2.15")
    assert reused(2, "shm").run_in_group(hooks_of_torch) == [0, 0]


def failing(ctx: Ctx, how: str) -> None:
    ctx.init()
    everything(ctx)
    time.sleep(0.3)  # a failure may precede the end of earlier operations on other ranks
    if how == "missing":
        distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), dist.group.WORLD)
    try:
        if how == "mismatch":
            dist.all_reduce(torch.ones(500 if ctx.rank == 1 else 1000))
        elif how == "missing" and ctx.rank == 1:
            time.sleep(SHORT + 1.5)
        elif how == "dead" and ctx.rank == 1:
            os._exit(3)
        else:
            dist.all_reduce(torch.ones(1000))
    except dist.DistBackendError as error:
        assert "\n  Trace: mycoll trace /" in str(error), error


def recorded(path: Path) -> list[Operation]:
    """The collectives in a trace of one group."""
    (group,) = black_box.load(path).groups
    return group.collectives()


def differences(folder: Path) -> list[trace.Finding]:
    return list(trace.analyse(black_box.load_all([folder])[0]))


def fail(fresh, transport: str, how: str, tmp_path: Path) -> Path:
    env = {"MYCOLL_TRACE_FILE": f"{tmp_path}/trace_%r"}
    world = fresh(3, transport, init=False, env=env)
    if how == "dead":
        with pytest.raises(AssertionError, match="code 3"):
            world.run(failing, how)
    else:
        world.run(failing, how)
    return tmp_path


def healthy(ctx: Ctx, folder: str) -> str:
    import mycoll

    everything(ctx)
    dist.barrier()
    return mycoll.dump_trace(Path(folder) / f"trace_{ctx.rank}")


def test_dump_on_request(fresh, transport, tmp_path) -> None:
    for path in map(Path, fresh(3, transport).run(healthy, str(tmp_path))):
        (group,) = black_box.load(path).groups
        assert (group.name, group.global_ranks) == ("0", [0, 1, 2])
        calls = group.collectives()
        assert [each.sequence for each in calls] == list(range(len(calls)))
        for each in calls:
            assert each.state == "done"
            assert each.started is not None and each.ended is not None
            assert each.enqueued <= each.started <= each.ended <= time.time()
            assert each.ended > time.time() - 600
        names = [each.kind for each in calls]
        assert names.count("all_gather") == 3
        assert names[-1] == "barrier"
        assert names[-2] == "all_reduce"
        assert len(group.operations) == len(names) + 2  # messages
    assert not differences(tmp_path)


def test_the_call_that_differs(fresh, transport, tmp_path) -> None:
    first, *_ = differences(fail(fresh, transport, "mismatch", tmp_path))
    assert (first.kind, first.ranks) == ("differs", [1])
    assert "rank 1: all_reduce SUM float32 numel=500, at test_recorder.py:" in first.text


def test_the_rank_that_did_not_call(fresh, transport, tmp_path) -> None:
    first, *_ = differences(fail(fresh, transport, "missing", tmp_path))
    assert (first.kind, first.ranks) == ("absent", [1])


def test_survivors_of_a_death(fresh, transport, tmp_path) -> None:
    fail(fresh, transport, "dead", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_0", "trace_2"]
    for rank in (0, 2):
        (group,) = black_box.load(tmp_path / f"trace_{rank}").groups
        assert "rank 1" in group.failure
        assert group.operations[-1].state == "failed"


def test_only_operations_that_all_ranks_have_are_compared(fresh, tmp_path) -> None:
    """Operations that a rank has overwritten in its ring do not count as missing."""
    env = {"MYCOLL_TRACE_ENTRIES": "32"}
    fresh(3, "shm", env=env).run(busy_and_uneven, str(tmp_path))
    assert not differences(tmp_path)


def busy_and_uneven(ctx: Ctx, folder: str) -> None:
    import mycoll

    pair = dist.new_group([0, 1])
    if ctx.rank < 2:
        dist.all_reduce(torch.ones(3), group=pair)  # early, and still in the record
    for _ in range(60):
        dist.all_reduce(torch.ones(2))
    if ctx.rank == 2:
        time.sleep(0.5)
    mycoll.dump_trace(f"{folder}/trace_{ctx.rank}")
    dist.all_reduce(torch.ones(2))


def sites(ctx: Ctx, folder: str) -> None:
    import mycoll

    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    mycoll.dump_trace(f"{folder}/trace_{ctx.rank}")


@pytest.mark.parametrize("wanted", ["never", "waiting", "always"])
def test_call_sites(fresh, tmp_path, wanted) -> None:
    # One rank, because "waiting" records the site of an operation that waits long for others.
    fresh(1, "shm", env={"MYCOLL_CALL_SITES": wanted}).run(sites, str(tmp_path))
    for each in recorded(tmp_path / "trace_0")[-2:]:
        if wanted == "always":
            name, number, function = re.fullmatch(r"(\S+):(\d+) in (\w+)", each.site).groups()
            assert (name, function) == ("test_recorder.py", "sites")
            line = Path(__file__).read_text().splitlines()[int(number) - 1]
            assert "dist.all_reduce(torch.ones(2)" in line
        else:
            assert not each.site


def quiet(ctx: Ctx) -> bool:
    ctx.init()
    with ctx.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + ctx.rank))
    return True


def test_variables_for_the_file(fresh, tmp_path) -> None:
    """torch's variables apply if mycoll's is not set; `off` disables the file."""
    env = {"MYCOLL_TRACE_FILE": "", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/torch_"}
    fresh(2, "shm", init=False, env=env).run(quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torch_0", "torch_1"]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
    for off in ({"MYCOLL_TRACE_FILE": "off"}, {"MYCOLL_TRACE_ENTRIES": "0"}):
        file = {"MYCOLL_TRACE_FILE": f"{tmp_path}/x%r"}
        fresh(2, "shm", init=False, env={**file, **off}).run(quiet)
    assert not list(tmp_path.iterdir())


def failing_twice(ctx: Ctx) -> tuple[str, str]:
    """A program that makes a new group after a failure, and fails again."""
    ctx.init("first")
    with ctx.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + ctx.rank))
    dist.destroy_process_group()
    ctx.init("second")
    first = black_box.read(os.getpid()).job
    with ctx.raises(dist.DistBackendError, "Trace: "):
        dist.broadcast(torch.ones(2 + ctx.rank), 0)
    return first, black_box.read(os.getpid()).job


def test_each_failure_is_recorded(fresh, tmp_path) -> None:
    env = {"MYCOLL_TRACE_FILE": f"{tmp_path}/rank_%r"}
    jobs = fresh(2, "shm", init=False, env=env).run(failing_twice)
    assert len({*jobs[0], *jobs[1]}) == 1
    for rank in range(2):
        process = black_box.load(tmp_path / f"rank_{rank}")
        last = process.groups[0].operations[-1]
        assert (last.kind, last.state) == ("broadcast", "failed")
        assert process.job == jobs[rank][1]


def uneven(ctx: Ctx, folder: str) -> list[tuple[str, str]]:
    """The recorded operations, in memory and in the file."""
    import mycoll

    dist.all_gather([torch.empty(1), torch.empty(2)], torch.ones(1 + ctx.rank))
    sparse = torch.sparse_coo_tensor(
        torch.arange(1 + ctx.rank)[None], torch.ones(1 + ctx.rank), (8,)
    )
    dist.all_reduce(sparse)
    parts = [torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)]
    dist.reduce_scatter(torch.empty(1 + ctx.rank, dtype=torch.float64), parts)
    path = mycoll.dump_trace(f"{folder}/rank_{ctx.rank}")
    in_memory = black_box.read(os.getpid()).groups[0].operations
    in_file = black_box.load(Path(path)).groups[0].operations
    return [(a.describe(), b.describe()) for a, b in zip(in_memory, in_file)]


def test_sizes_are_those_in_memory(fresh, tmp_path) -> None:
    for rows in fresh(2, "shm").run(uneven, str(tmp_path)):
        assert len(rows) >= 3
        for in_memory, in_file in rows:
            assert in_file == in_memory
        assert "numel=3" in rows[0][1], rows


PROGRAM = """
import os, sys
import torch, torch.distributed as dist, mycoll
def step():
    dist.all_reduce(torch.ones(3))
def other():
    dist.all_reduce(torch.ones(4))
def begin():
    dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
begin()
step()
if os.fork() == 0:
    dist.destroy_process_group()
    begin()
    other()
    step()
    mycoll.dump_trace(sys.argv[1] + "_of_child")
    os._exit(0)
os.wait()
mycoll.dump_trace(sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("folder", [b"\xe9t\xe9", "\u6570\u636e".encode() * 10, b"n" * 200])
def test_call_sites_in_odd_places(tmp_path, folder) -> None:
    """Paths may be long and need not be UTF-8. A forked child has its own table of call sites."""
    program = tmp_path / os.fsdecode(folder) / ("m" * 100) / "train.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    out = tmp_path / "trace"
    env = {**os.environ, "MYCOLL_CALL_SITES": "always"}
    run = warm.start(program, str(out), environment=env)
    _, error = run.communicate(timeout=120)
    assert run.returncode == 0, error
    for suffix, names in (("", ["step"]), ("_of_child", ["other", "step"])):
        calls = recorded(Path(f"{out}{suffix}"))
        sites = [f"train.py:{5 if name == 'step' else 7} in {name}" for name in names]
        assert [each.site for each in calls] == sites


TWO_THREADS = """
import builtins, threading
import torch, torch.distributed as dist
dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(2)]
plain, both = builtins.__import__, threading.Barrier(2, timeout=0.5)
def imports(name, *args, **options):
    if name == "torch":
        try:
            both.wait()
        except threading.BrokenBarrierError:
            pass
    return plain(name, *args, **options)
builtins.__import__ = imports
threads = [
    threading.Thread(target=dist.all_reduce, args=(torch.ones(3),), kwargs={"group": group})
    for group in groups
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_two_threads_ask_for_the_first_call_site(tmp_path) -> None:
    """Another library has replaced the function that imports by one in Python."""
    program = tmp_path / "train.py"
    program.write_text(TWO_THREADS)
    run = warm.start(program, environment={**os.environ, "MYCOLL_CALL_SITES": "always"})
    _, error = run.communicate(timeout=60)
    assert run.returncode == 0, error


def failing_often(ctx: Ctx, times: int) -> None:
    for number in range(times):
        ctx.init(f"attempt {number}")
        with ctx.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(2 + ctx.rank))
        dist.destroy_process_group()


def test_old_folders_are_removed(fresh) -> None:
    """Folders of the last day are kept, however many jobs fail later."""
    parent = black_box.default_folder()
    parent.mkdir(mode=0o700, exist_ok=True)
    recent, old = parent / ("0" * 15 + "a"), parent / ("0" * 15 + "b")
    # An hour old, or less if many jobs have failed here since, because only a hundred are kept.
    ages = sorted(time.time() - each.stat().st_mtime for each in parent.iterdir())
    hour = min(3600, ages[50]) if len(ages) > 50 else 3600
    for folder, age in ((recent, hour), (old, 25 * 3600)):
        folder.mkdir(exist_ok=True)
        (folder / "rank_0").touch()
        os.utime(folder, (time.time() - age, time.time() - age))
    fresh(2, "shm", init=False, env={"MYCOLL_TRACE_FILE": ""}).run(failing_often, 11)
    assert recent.exists()
    assert not old.exists()
    (recent / "rank_0").unlink()
    recent.rmdir()
