"""Ways to start a process group: rendezvous, backend strings, options, debug level."""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds.smoke import smoke
from worlds.threads import on_all
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


def check_and_leave(ctx: Ctx) -> None:
    smoke(ctx.rank, ctx.size)
    dist.destroy_process_group()


def by_env(ctx: Ctx, port: int) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.size)}
    with mock.patch.dict(os.environ, place):
        dist.init_process_group(ctx.backend)
        check_and_leave(ctx)


@pytest.mark.quick
def test_env(reused, transport, free_port):
    reused(2, transport).run(by_env, free_port)


def by_url(ctx: Ctx, url: str) -> None:
    dist.init_process_group(
        ctx.backend,
        init_method=url,
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=timedelta(seconds=30),
    )
    check_and_leave(ctx)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_init_method(reused, transport, kind, tmp_path, free_port):
    url = f"tcp://127.0.0.1:{free_port}" if kind == "tcp" else f"file://{tmp_path}/rendezvous"
    reused(3, transport).run(by_url, url)


def by_store(ctx: Ctx, kind: str, where: Any) -> None:
    store: dist.Store
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", where, ctx.size, ctx.rank == 0)
    elif kind == "file":
        store = dist.FileStore(where, ctx.size)
    else:
        store = dist.PrefixStore("a", dist.PrefixStore("b", dist.FileStore(where, ctx.size)))
    dist.init_process_group(ctx.backend, store=store, rank=ctx.rank, world_size=ctx.size)
    check_and_leave(ctx)


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix"])
def test_explicit_store(reused, transport, kind, tmp_path, free_port):
    where = free_port if kind == "tcp" else str(tmp_path / "store")
    reused(2, transport).run(by_store, kind, where)


class StoreInPython(dist.Store):
    """A store that is sufficient for gloo, but not for mycoll."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)


class CompleteStoreInPython(StoreInPython):
    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)


def by_store_in_python(ctx: Ctx, path: str) -> None:
    for kind in (StoreInPython, CompleteStoreInPython):
        store = kind(dist.FileStore(f"{path}-{kind.__name__}", ctx.size))
        start = functools.partial(
            dist.init_process_group, ctx.backend, rank=ctx.rank, world_size=ctx.size
        )
        if kind is CompleteStoreInPython:
            start(store=store)
            check_and_leave(ctx)
        else:
            with ctx.raises(dist.DistStoreError, "must define set, get and check"):
                start(store=store)


def test_store_in_python(reused, transport, tmp_path):
    reused(2, transport).run(by_store_in_python, str(tmp_path / "store"))


def backend_object(name: str, store: dist.Store, rank: int, size: int) -> Any:
    """A backend without torch's global state, so that threads can be its ranks."""
    timeout = timedelta(seconds=30)
    if name == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, "threads"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)


def threads_as_ranks(ctx: Ctx) -> None:
    store, size = dist.HashStore(), 3

    def rank_main(rank: int) -> float:
        backend = backend_object(ctx.backend, dist.PrefixStore("t", store), rank, size)
        x = torch.full((1000,), float(rank))
        backend.allreduce([x]).wait()
        backend.barrier().wait()
        return float(x[5])

    ctx.equal(on_all(rank_main, size), [3.0] * size)


def test_hash_store_with_threads_as_ranks(reused, transport):
    reused(1, transport).run(threads_as_ranks)


def same_name_other_size(ctx: Ctx, path: str) -> None:
    """The store still has the keys of the first group, whose processes are alive."""
    for size in (3, 2):
        if ctx.rank >= size:
            return
        store = dist.PrefixStore("t", dist.FileStore(path, -1))
        if size == 2 and ctx.rank == 1:
            time.sleep(0.3)
        backend = backend_object(ctx.backend, store, ctx.rank, size)
        x = torch.full((3,), float(ctx.rank + 1))
        backend.allreduce([x]).wait()
        ctx.equal(float(x[0]), size * (size + 1) / 2)


def test_a_name_may_be_reused_with_another_size(reused, transport, backend, tmp_path):
    if backend == "gloo":
        pytest.skip("gloo reads addresses of the first group")
    reused(3, transport).run(same_name_other_size, str(tmp_path / "store"))


def other_ranks_each_time(ctx: Ctx, path: str) -> None:
    """Three groups of the same processes over one store, with other ranks each time."""
    for life in range(3):
        rank = (ctx.rank + life) % ctx.size
        store = dist.FileStore(path, -1)
        dist.init_process_group(
            ctx.backend, store=store, rank=rank, world_size=ctx.size, timeout=ctx.timeout
        )
        parts = [torch.zeros(1) for _ in range(ctx.size)]
        dist.all_gather(parts, torch.full((1,), float(ctx.rank)))
        ctx.equal([int(part) for part in parts], [(r - life) % ctx.size for r in range(ctx.size)])
        dist.destroy_process_group()


def test_processes_may_change_ranks(reused, transport, backend, tmp_path):
    if backend == "gloo":
        pytest.skip("gloo reads addresses of the group before")
    reused(3, transport).run(other_ranks_each_time, str(tmp_path / "store"))


def with_backend(ctx: Ctx, backend: str | None, kwargs: dict[str, Any]) -> None:
    ctx.init("first", backend=backend, **kwargs)
    smoke(ctx.rank, ctx.size)
    group = dist.new_group()
    smoke(ctx.rank, ctx.size, group)
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["cpu:{}", "cpu:{},cuda:nccl", "cpu:{},cuda:{}"])
def test_backend_strings(reused, transport, backend, form):
    if "nccl" in form and not (dist.is_nccl_available() and torch.cuda.is_available()):
        pytest.skip("torch's nccl needs a build with NCCL and, since 2.15, a GPU")
    reused(2, transport).run(with_backend, form.format(backend, backend), {})


def test_timeout(reused, transport, backend):
    kwargs = {"timeout": timedelta(seconds=17)}
    reused(2, transport).run(with_backend, backend, kwargs)


def gloo_for_cpu(ctx: Ctx) -> None:
    ctx.init("first", backend="cpu:gloo,cuda:mycoll")
    smoke(ctx.rank, ctx.size)
    dist.destroy_process_group()


def test_only_for_cuda(reused, transport):
    """CPU tensors use gloo, and mycoll is only for CUDA tensors."""
    reused(2, transport).run(gloo_for_cpu)


def mixed_world(ctx: Ctx, outer: str, inner: str) -> None:
    ctx.init("first", backend=outer)
    group = dist.new_group(backend=inner)
    smoke(ctx.rank, ctx.size, group)
    smoke(ctx.rank, ctx.size)
    if ctx.rank == 0:
        part = dist.new_group([0], backend=inner)
        smoke(0, 1, part)
    else:
        dist.new_group([0], backend=inner)
    dist.destroy_process_group()


@pytest.mark.parametrize("outer", ["gloo", "mycoll"])
def test_groups_of_two_backends(reused, transport, outer):
    inner = "mycoll" if outer == "gloo" else "gloo"
    reused(2, transport).run(mixed_world, outer, inner)


def with_options(ctx: Ctx) -> None:
    import mycoll

    ctx.init("first", pg_options=mycoll.Options())
    smoke(ctx.rank, ctx.size)
    group = dist.new_group(pg_options=mycoll.Options())
    smoke(ctx.rank, ctx.size, group)
    dist.destroy_process_group()


def test_options(reused, transport):
    reused(2, transport).run(with_options)


def timeout_of_options(ctx: Ctx) -> None:
    """An explicit timeout= overrides the options; torch's default, which it passes, does not."""
    import mycoll

    def in_force(group: dist.ProcessGroup | None = None) -> timedelta:
        members = group or dist.group.WORLD
        return members._get_backend(torch.device("cpu")).options.timeout

    minute = timedelta(minutes=1)
    mine = mycoll.Options(timeout=minute)
    dist.init_process_group(
        "mycoll", store=ctx.store("o"), rank=ctx.rank, world_size=ctx.size, pg_options=mine
    )
    ctx.equal(in_force(), minute, "init_process_group")
    ctx.equal(in_force(dist.new_group(pg_options=mine)), minute, "new_group")
    both = dist.new_group(pg_options=mine, timeout=2 * minute)
    ctx.equal(in_force(both), 2 * minute, "new_group with both")
    plain = dist.new_group(pg_options=mycoll.Options())
    ctx.equal(in_force(plain), timedelta(minutes=30), "new_group with neither")
    ctx.equal(mine.timeout, minute, "the user's object")
    dist.destroy_process_group()


def test_timeout_of_options(reused, transport):
    reused(2, transport).run(timeout_of_options)


def meaningless_timeouts(ctx: Ctx) -> None:
    for timeout in (timedelta(0), timedelta(seconds=-1), timedelta.max):
        with ctx.raises(ValueError, "timeout must be positive"):
            ctx.init(f"{timeout}", timeout=timeout)
    ctx.init("good")
    for timeout in (timedelta(0), timedelta.max):
        with ctx.raises(ValueError, "timeout must be positive"):
            dist.new_group(timeout=timeout)
    smoke(ctx.rank, ctx.size)
    dist.destroy_process_group()


def test_meaningless_timeouts(reused, transport):
    reused(2, transport).run(meaningless_timeouts)


def with_device_id(ctx: Ctx) -> None:
    try:
        ctx.init("first", device_id=torch.device("cpu"))
    except (ValueError, RuntimeError) as error:
        if not ctx.gloo and "device_id" not in str(error):
            raise
        ctx.init("second")  # torch itself has refused, because it needs an accelerator's index
    smoke(ctx.rank, ctx.size)
    dist.destroy_process_group()


def test_device_id(reused, transport):
    reused(2, transport).run(with_device_id)


def detail_mismatch(ctx: Ctx) -> None:
    with ctx.raises(RuntimeError):
        if ctx.rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.broadcast(torch.ones(4), 0)


def test_detail_debug_level_finds_mismatches(reused, transport):
    reused(2, transport, env=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)).run_in_group(detail_mismatch)


def store_keys(ctx: Ctx) -> int:
    """The number of keys that operations have added to the store."""
    store = dist.HashStore() if ctx.size == 1 else ctx.store("counted")
    dist.init_process_group(ctx.backend, store=store, rank=ctx.rank, world_size=ctx.size)
    before = store.num_keys()
    for i in range(50):
        dist.all_reduce(torch.ones(10 * i))
    after = store.num_keys()
    dist.destroy_process_group()
    return after - before


def test_operations_add_few_store_keys(reused, transport):
    """Connections may add keys when they are made; operations do not."""
    assert max(reused(3, transport).run(store_keys)) <= 12
