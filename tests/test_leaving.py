"""Ranks that leave groups or the job cleanly, or that are late, are not reported as dead."""

from __future__ import annotations

import os
import re
import socket
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults.harness import Seen, Stage, answers, attempt
from worlds import warm
from worlds.worker import Ctx


def broadcasts_and_exits(ctx: Ctx) -> Seen:
    """Rank 0 sends its value to ranks 1 and 2, and rank 2 to rank 3; 0 and 3 never communicate."""
    x = torch.full((10,), 7.0 if ctx.rank == 0 else 0.0)
    if ctx.rank == 2:
        time.sleep(0.7)

    def act() -> float:
        dist.broadcast(x, 0)
        dist.destroy_process_group()
        return float(x[0])

    seen = attempt(act)
    if ctx.rank == 0:
        os._exit(0)
    return seen


def all_but_rank_0(stage: Stage, ranks: int, job: Callable[[Ctx], Seen]) -> list[object]:
    """Runs a job in which rank 0 exits; returns the values of the others, which must not fail."""
    values = []
    with stage.world(ranks) as world:
        world.start(job)
        for rank, seen in answers(world, (0,)).items():
            assert isinstance(seen, Seen) and not seen.kind, (rank, seen)
            assert "has ended" not in world.members[rank].log_tail()
            values.append(seen.value)
    return values


def test_exit_after_the_last_call_is_not_a_death(stage):
    assert all_but_rank_0(stage, 4, broadcasts_and_exits) == [7.0] * 3


def never_meet(ctx: Ctx) -> Seen:
    """A group is made and not used; rank 0 exits long before the others."""
    if ctx.rank > 0:
        time.sleep(0.5)
    seen = attempt(dist.destroy_process_group)
    if ctx.rank == 0:
        os._exit(0)
    return seen


def test_exit_without_a_call_is_not_a_death(stage):
    all_but_rank_0(stage, 3, never_meet)


def missed(ctx: Ctx) -> Seen:
    """Rank 1 has left before the first collective of rank 0, and its process continues."""
    store = ctx.store("missed")
    if ctx.rank == 1:
        dist.destroy_process_group()
        store.set("left", "")
        store.wait(["seen"], timedelta(seconds=30))
        return attempt(lambda: None)
    store.wait(["left"], timedelta(seconds=30))
    seen = attempt(lambda: dist.all_reduce(torch.ones(4)))
    store.set("seen", "")
    return seen


def test_the_error_names_a_rank_that_left_before_the_first_call(reused, transport, mycoll_only):
    seen, other = reused(2, transport).run_in_group(missed, timeout=60.0)
    assert seen.kind == "DistBackendError" and not other.kind, (seen, other)
    assert "rank 1" in seen.text and "has left" in seen.text, seen.text
    assert seen.seconds < 5.0


def member_is_late(ctx: Ctx) -> Seen:
    """Ranks 1 and 2 have no connection yet. One of them needs it for a group that the other has
    left, and for a group that the other makes later."""
    dist.broadcast(torch.ones(1), 0)
    group = dist.new_group([0, 1, 2])
    dist.broadcast(torch.ones(1), 0, group=group)
    if ctx.rank == 2:
        dist.destroy_process_group(group)
        dist.send(torch.ones(1), 0)
    if ctx.rank == 0:
        dist.recv(torch.ones(1), 2)
    dist.broadcast(torch.ones(1), 0)  # after rank 2 has left the group
    if ctx.rank == 1:
        group._get_backend(torch.device("cpu")).abort()
    if ctx.rank == 2:
        time.sleep(1.0)

    def act() -> float:
        x = torch.ones(4)
        if ctx.rank > 0:
            child = dist.group.WORLD.split_group([1, 2], group_name="child")
            dist.all_reduce(x, group=child)
        dist.all_reduce(x)
        return float(x[0])

    return attempt(act)


def leaves_with_a_message(ctx: Ctx) -> Seen | None:
    """Rank 0 leaves without waiting for its send; rank 1 receives after rank 0's shutdown
    timeout."""
    import mycoll

    options = mycoll.Options(shutdown_timeout=timedelta(seconds=0.3))
    group = dist.new_group(pg_options=options)
    dist.barrier(group)
    x = torch.full((10_000_000,), float(ctx.rank))
    if ctx.rank == 0:
        work = dist.isend(x, 1, group=group)
        seen = attempt(lambda: dist.destroy_process_group(group))
        assert not seen.kind
        assert "destroyed on this rank" in attempt(work.wait).text
        dist.barrier()
        return None
    dist.barrier()
    seen = attempt(lambda: dist.recv(x, 0, group=group))
    assert bool((x == 1).all()), "a lost message is not received in part"
    return seen


def receives_while_it_leaves(ctx: Ctx) -> Seen:
    """Both ranks leave after one has called isend and the other irecv."""
    x = torch.full((3_000_000,), float(ctx.rank))
    dist.barrier()
    work = dist.isend(x, 1) if ctx.rank == 0 else dist.irecv(x, 0)
    assert work is not None
    store = ctx.store("sent")
    if ctx.rank == 0:
        store.set("sent", "")
    store.wait(["sent"], timedelta(seconds=30))
    dist.destroy_process_group()
    seen = attempt(work.wait)
    assert bool((x == 0).all())
    return seen


def receives_from_any(ctx: Ctx) -> Seen:
    """Ranks 1 and 2 have no connection, so rank 2's notice that it leaves does not reach rank 1."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    store = ctx.store("any")
    if ctx.rank != 1:
        dist.destroy_process_group(group)
        store.set(f"left {ctx.rank}", "")
        store.wait(["seen"], timedelta(seconds=30))
        return attempt(lambda: None)
    store.wait(["left 0", "left 2"], timedelta(seconds=30))
    seen = attempt(lambda: dist.recv(torch.zeros(4), group=group))
    store.set("seen", "")
    return seen


def test_a_receive_from_any_rank_ends_when_all_have_left(reused, transport, mycoll_only):
    _, seen, _ = reused(3, transport).run_in_group(receives_from_any, timeout=60.0)
    assert seen.kind == "DistBackendError" and "has left the group" in seen.text, seen


def test_leaving_completes_matched_messages(reused, transport, mycoll_only):
    world = reused(2, transport)
    for rank, seen in enumerate(world.run_in_group(receives_while_it_leaves, timeout=60.0)):
        assert not seen.kind, (rank, seen)


def run_ranks(text: str, ranks: int) -> str:
    """The output of all ranks of a program, including Python's exit."""
    ended = warm.ranks(text, ranks, to_the_end=True)
    assert [code for code, *_ in ended] == [0] * ranks, ended
    return "".join(out for _, out, _ in ended)


SERVER = """
import threading
import torch
import torch.distributed as dist

dist.init_process_group("mycoll")
requests = dist.new_group()

def serve():
    while True:
        dist.recv(torch.zeros(3), group=requests)

threading.Thread(target=serve, daemon=True).start()
for _ in range(100):
    dist.all_reduce(torch.ones(10))
dist.barrier()
dist.destroy_process_group()
print("finished", flush=True)
"""


def test_exit_beside_a_daemon_thread_in_a_call():
    assert run_ranks(SERVER, 2).count("finished") == 2


JOINS_ALONE = """
import threading
import time
from datetime import timedelta
import mycoll

def join():
    mycoll.ElasticGroup(min_ranks=2, timeout=timedelta(seconds=60))

threading.Thread(target=join, daemon=True).start()
time.sleep(0.3)
print("finished", flush=True)
"""


def test_exit_beside_a_daemon_thread_that_makes_an_elastic_group(mycoll_only):
    for _ in range(3):
        assert run_ranks(JOINS_ALONE, 1).count("finished") == 1


LOADS_AT_THE_END = """
import threading, time
import torch
from mycoll import _load

begun, load = threading.Event(), _load.load

def slowly():
    begun.set()
    time.sleep(0.3)
    return load()

def use() -> None:
    from mycoll import _C

_load.load = slowly
threading.Thread(target=use, daemon=True).start()
begun.wait()
"""


def test_the_exit_waits_for_a_thread_that_loads_mycoll():
    [(code, _, err)] = warm.ranks(LOADS_AT_THE_END, 1, to_the_end=True)
    assert code == 0
    assert "Exception" not in err, err


CALLS_AT_EXIT = """
import atexit
import os
import torch
import torch.distributed as dist

def last() -> None:
    x = torch.ones(2)
    dist.all_reduce(x)
    os.write(1, f"sum {x.tolist()}.".encode())

atexit.register(last)
dist.init_process_group("mycoll")
"""


def test_exit_handlers_may_communicate():
    assert run_ranks(CALLS_AT_EXIT, 2).count("sum [2.0, 2.0]") == 2


# --- an exception ends a rank's program: the error of the others names it


JOB = """
import multiprocessing, os, sys, torch, torch.distributed as dist

def job(rank, path):
    store = dist.FileStore(path, 2)
    dist.init_process_group("mycoll", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("of rank 1\\nand more")
    try:
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(0)

def all_jobs():
    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=job, args=(rank, sys.argv[1])) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()

def finally_leaves(rank, path):
    try:
        job(rank, path)
    finally:
        dist.destroy_process_group()
"""
ENDED = "left the group: its program ended with an exception, ValueError: of rank 1 (see its log)"
HANDLED = "left the group: it handled an exception, ValueError: of rank 1 (see its log)"
# torch would end the other ranks when one has failed.
TORCH_SPAWN = """
api = sys.modules["torch.multiprocessing.spawn"]
api.ProcessContext.join = lambda self, timeout=None: [each.join() for each in self.processes]
torch.multiprocessing.spawn(job, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("job(int(sys.argv[2]), sys.argv[1])", ENDED),
        ("finally_leaves(int(sys.argv[2]), sys.argv[1])", HANDLED),
        ("all_jobs()", ENDED),
        (TORCH_SPAWN, ENDED),
    ],
    ids=["script", "finally", "fork", "torch's spawn"],
)
def test_an_exception_on_one_rank_is_named_on_the_other(tmp_path, mycoll_only, code, text) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"{JOB}\nif __name__ == '__main__':\n{textwrap.indent(code, '    ')}\n")
    ranks = (0, 1) if "argv[2]" in code else (0,)
    is_script = code.startswith("job")  # also runs Python's exit
    programs = [
        warm.start(file, str(tmp_path / "store"), str(rank), to_the_end=is_script) for rank in ranks
    ]
    errors = "".join(program.communicate(timeout=60)[1] for program in programs)
    assert f"rank 1 ({socket.gethostname()}:" in errors and text in errors, errors


HELD = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("mycoll")
first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
first.then(lambda _: time.sleep(0.3))
last = dist.all_reduce(torch.ones(3), async_op=True)
last.get_future().then(lambda done: print("sum", done.value()[0].tolist(), flush=True))
"""


def test_an_exit_waits_for_calls_that_are_held() -> None:
    assert run_ranks(HELD, 2).count("sum [2.0, 2.0, 2.0]") == 2


def throws_beside(ctx: Ctx) -> Seen | None:
    """The exception's text is long and has unprintable characters; the other rank receives."""
    x = torch.ones(4)
    dist.all_reduce(x)
    if ctx.rank == 1:
        try:
            raise RuntimeError("\x1b[31mred\udc80 " + "long " * 100)
        except RuntimeError:
            dist.destroy_process_group()
        return None
    return attempt(lambda: dist.recv(x, 1))


def test_the_reason_is_short_and_printable(reused, transport, mycoll_only) -> None:
    seen, _ = reused(2, transport).run_in_group(throws_beside)
    assert seen is not None and seen.kind == "DistBackendError", seen
    found = re.search(r"it handled an exception, (RuntimeError: .*) \(see its log\)", seen.text)
    assert found and len(found[1]) <= 120 and found[1].endswith(" ..."), seen.text
    assert found[1].isascii() and found[1].isprintable(), found[1]


def test_a_late_member_is_waited_for(fresh, mycoll_only):
    # The C++ leaving_test runs over both transports.
    for rank, seen in enumerate(fresh(3, "tcp", timeout=60.0).run(member_is_late)):
        assert not seen.kind, (rank, seen)
        assert seen.value == 5.0


def test_unreceived_sends_are_lost_when_the_sender_leaves(fresh, mycoll_only):
    world = fresh(2, "tcp", timeout=60.0)
    _, seen = world.run(leaves_with_a_message)
    assert seen.kind == "DistBackendError", seen
    assert "has left the group" in seen.text and "recv from rank 0" in seen.text
    assert seen.seconds < 2.0
    assert "(collectives: 0, sends: 1). They are lost" in world.members[0].log_tail()
