"""mycoll.process_group: groups that are independent of torch.distributed's global state."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import mycoll
import pytest
import torch
import torch.distributed as dist
from worlds import warm
from worlds.threads import on_all

pytestmark = pytest.mark.usefixtures("mycoll_only")

PATIENCE = timedelta(seconds=50)


def make(store: dist.Store, rank: int, size: int, **more: Any) -> dist.ProcessGroup:
    return mycoll.process_group(store, rank, size, **{"timeout": PATIENCE, **more})


def total(group: dist.ProcessGroup) -> float:
    x = torch.full((1000,), float(group.rank() + 1))
    group.allreduce([x]).wait()
    assert bool((x == x[0]).all())
    return float(x[0])


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads_as_ranks(size: int) -> None:
    store = dist.HashStore()

    def body(rank: int) -> str:
        group = make(store, rank, size)
        assert (group.rank(), group.size(), group.group_name) == (rank, size, "group")
        assert total(group) == size * (size + 1) / 2
        transport = str(group._get_backend(torch.device("cpu")).transport())
        group.shutdown()
        return transport

    assert not dist.is_initialized()
    transports = on_all(body, size)
    assert set(transports) == {"self" if size == 1 else "shm"}
    assert not dist.is_initialized()


FIRST_GROUPS = """
import threading, time
import mycoll, torch, torch.distributed as dist
from mycoll import _compat

replace = _compat.replace
def slow(*arguments):
    time.sleep(0.02)
    replace(*arguments)
_compat.replace = slow

store, together, sums = dist.HashStore(), threading.Barrier(3), []
def rank(number):
    together.wait()
    group = mycoll.process_group(store, number, 3)
    x = torch.ones(4)
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(x, group=group)
    sums.append(x.tolist())
    group.shutdown()
threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
[each.start() for each in threads]
[each.join() for each in threads]
print(sums == [[3.0] * 4] * 3)
"""


def test_the_first_groups_of_a_process_in_threads() -> None:
    """torch's functions are wrapped once, before the first group exists."""
    program = warm.start(FIRST_GROUPS)
    try:
        out, errors = program.communicate(60)
    finally:
        program.kill()
    assert out.strip() == "True", errors


def test_every_collective() -> None:
    """torch's functions accept the group unless they need the ranks of the job."""
    store = dist.HashStore()

    def body(rank: int) -> None:
        group = make(store, rank, 3)
        x = torch.full((4,), float(rank))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3.0] * 4
        outs = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(outs, torch.tensor([float(rank)]), group=group)
        assert [float(out) for out in outs] == [0, 1, 2]
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, torch.arange(6.0), group=group)
        assert out.tolist() == [6.0 * rank, 6.0 * rank + 3]
        got = torch.zeros(3)
        dist.all_to_all_single(got, torch.full((3,), float(rank)), group=group)
        assert got.tolist() == [0, 1, 2]
        y = torch.full((2,), float(rank))
        group.broadcast(y, 1).wait()
        assert y.tolist() == [1.0, 1.0]
        right, left = (rank + 1) % 3, (rank - 1) % 3
        z = torch.zeros(1)
        works = [group.send([torch.tensor([float(rank)])], right, 7), group.recv([z], left, 7)]
        for work in works:
            work.wait()
        assert float(z) == left
        group.barrier().wait()
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert [each["rank"] for each in objects] == [0, 1, 2]
        group.shutdown()

    on_all(body, 3)


class PythonStore(dist.Store):
    """The methods that a program's own store needs."""

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self.values = values

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix", "python"])
def test_stores(kind: str, tmp_path: Path) -> None:
    shared = dist.HashStore()
    values: dict[str, bytes] = {}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def store(rank: int) -> dist.Store:
        if kind == "file":
            return dist.FileStore(str(tmp_path / "store"), 2)
        if kind == "tcp":
            return dist.TCPStore("127.0.0.1", server.port, is_master=False)
        if kind == "prefix":
            return dist.PrefixStore("a", dist.PrefixStore("b", shared))
        return PythonStore(values) if kind == "python" else shared

    stores = [store(rank) for rank in range(2)]

    def body(rank: int) -> float:
        group = make(stores[rank], rank, 2)
        result = total(group)
        group.shutdown()
        return result

    assert on_all(body, 2) == [3.0, 3.0]
    gc.collect()
    stores.clear()  # sequentially, because torch may miss the last of two concurrent destructors
    assert not (tmp_path / "store").exists()  # no group holds it: its last user removes the file


def test_the_store_ends_with_its_last_user(free_port: int) -> None:
    """The port of a server becomes free again."""
    for _ in range(3):
        server = dist.TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
        groups = on_all(lambda rank, server=server: make(server, rank, 2), 2)
        for group in groups:
            group.shutdown()
        del server, groups, group
        gc.collect()


def test_many_in_any_order() -> None:
    """Groups of different members exist at the same time. Each rank drops them in a different
    order, some after shutdown()."""
    store = dist.HashStore()

    def body(rank: int) -> None:
        groups = [make(store, rank, 3, name=f"g{i}") for i in range(4)]
        if rank > 0:
            groups.append(make(store, rank - 1, 2, name="pair"))
        for group in groups:
            assert total(group) == group.size() * (group.size() + 1) / 2
        groups[0].barrier().wait()
        random.Random(rank).shuffle(groups)
        while groups:
            group = groups.pop()
            if len(groups) % 2:
                group.shutdown()
            del group
            gc.collect()
        # The name can be reused.
        group = make(store, rank, 3, name="g0")
        assert total(group) == 6
        group.shutdown()

    on_all(body, 3)


def test_made_in_one_thread_and_dropped_in_another() -> None:
    store = dist.HashStore()
    groups = on_all(lambda rank: make(store, rank, 2), 2)
    # One thread calls asynchronous operations of all ranks.
    xs = [torch.full((5,), float(rank)) for rank in range(2)]
    works = [group.allreduce([x]) for group, x in zip(groups, xs)]
    for work in works:
        work.wait()
    assert [x.tolist() for x in xs] == [[1.0] * 5] * 2
    for group in reversed(groups):
        group.shutdown()
    assert on_all(lambda rank: total(make(store, rank, 2)), 2) == [3.0, 3.0]


def test_beside_the_job() -> None:
    """The group and the default group of a process do not affect each other."""
    dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = dist.HashStore()
        assert on_all(lambda rank: total(make(store, rank, 2)), 2) == [3.0, 3.0]
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
        assert len(dist.distributed_c10d._world.pg_map) == 1
    finally:
        dist.destroy_process_group()


def test_a_lost_rank_does_not_affect_other_groups() -> None:
    """Each group numbers its ranks; the loss of a rank number of one group has no effect on
    another."""
    store = dist.HashStore()
    ended = threading.Event()

    def body(rank: int) -> None:
        first = make(store, rank, 2, name="first")
        total(first)
        if rank == 1:
            first.abort()
            ended.set()
            return
        with pytest.raises(RuntimeError, match="mycoll group 'first'"):
            ended.wait(50)
            while True:
                first.barrier().wait()
        second = on_all(lambda each: total(make(store, each, 3, name="second")), 3)
        assert second == [6.0] * 3

    on_all(body, 2)


def test_missing_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"'alone': timeout after 10ms.*missing: 1"):
        make(dist.HashStore(), 0, 2, name="alone", timeout=timedelta(milliseconds=10))


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [(2, 2, "rank must be"), (-1, 2, "rank must be"), (0, 0, "size must be at least 1")],
)
def test_refused(rank: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        make(dist.HashStore(), rank, size, name="wrong")
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, mycoll.ArgumentError)
    assert str(caught.value).startswith("mycoll group 'wrong': ")


FAILING = """
class Failing(dist.Store):
    def set(self, *arguments): raise RuntimeError("out of order")
    get = check = set
store = Failing()
"""
NO_DESCRIPTORS = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
"""


@pytest.mark.parametrize(
    ("before", "variables", "words"),
    [
        (FAILING, {}, "the rendezvous store failed to .* out of order"),
        (NO_DESCRIPTORS, {}, ".*: Too many open files"),
        ("", {"MYCOLL_TRANSPORT": "tpc"}, "MYCOLL_TRANSPORT=tpc is not valid"),
        ("", {"MYCOLL_SOCKET_IFNAME": "=none"}, "MYCOLL_SOCKET_IFNAME admits none"),
        ("", {"MYCOLL_SECRET_FILE": "/no/such/file"}, "MYCOLL_SECRET_FILE: '/no/such/file' cannot"),
    ],
    ids=["store", "descriptors", "value", "interface", "secret"],
)
def test_errors_name_the_group(before: str, variables: dict[str, str], words: str) -> None:
    """This includes errors of code that does not have the group's name."""
    code = f"""
import mycoll, torch.distributed as dist
mycoll.Options()  # loads the compiled module
store = dist.HashStore()
{before}
try:
    mycoll.process_group(store, 0, 1, name="unmade")
except (RuntimeError, ValueError) as error:
    print(error)
"""
    program = warm.start(code, environment={**os.environ, **variables})
    out, error = program.communicate(120)
    assert re.match(f"mycoll group 'unmade': {words}", out), out + error


def test_options() -> None:
    store = dist.HashStore()
    options = mycoll.Options(timeout=timedelta(seconds=33))
    group = mycoll.process_group(store, 0, 1, pg_options=options)
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options.timeout == timedelta(seconds=33) and backend.name() == "mycoll"
    group.shutdown()


def two_of_four(port: int, first: int) -> list[float]:
    """Runs two of four ranks."""

    def body(index: int) -> float:
        group = make(dist.TCPStore("127.0.0.1", port, is_master=False), first + index, 4)
        result = total(group)
        group.barrier().wait()
        group.shutdown()
        return result

    return on_all(body, 2)


def test_processes() -> None:
    """Two processes with two ranks each."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = f"import test_process_group as t; assert t.two_of_four({server.port}, 2) == [10, 10]"
    other = warm.start(code)
    try:
        assert two_of_four(server.port, 0) == [10.0, 10.0]
        _, error = other.communicate(60)
        assert other.returncode == 0, error
    finally:
        other.kill()


def test_a_monitored_barrier() -> None:
    store = dist.HashStore()
    on_all(lambda rank: dist.monitored_barrier(make(store, rank, 2)), 2)


BESIDE_A_DEFAULT_GROUP = """
import mycoll, torch, torch.distributed as dist

group = mycoll.process_group(dist.HashStore(), 0, 1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for call in (
    lambda: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND, group=group),
    lambda: dist.all_gather_object([None], lambda: 1, group=group),  # no pickle
    lambda: group.shutdown() or dist.barrier(group=group),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
"""


def test_errors_beside_a_default_group() -> None:
    """torch describes the group of an error for its log, where it lists no such group."""
    program = warm.start(BESIDE_A_DEFAULT_GROUP)
    out, errors = program.communicate(timeout=60)
    assert out.split() == ["ArgumentError", "AttributeError", "DistBackendError"], errors
