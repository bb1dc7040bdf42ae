"""Machines that lack a resource: mycoll works, or falls back with a warning, or raises.

It never crashes or hangs, and the process can continue when the resource is available again."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.harness import Seen, answers, attempt
from faults.lifecycle import tiny_shm
from worlds.pool import World
from worlds.worker import Ctx

MIB = 1 << 20
WARN = ("MYCOLL_LOG", "warn")
AUTO = ("MYCOLL_TRANSPORT", "auto")


pytestmark = pytest.mark.usefixtures("mycoll_only")


def works(ctx: Ctx) -> None:
    """Uses the group, also with tensors that do not fit into a ring or an arena."""
    for numel in (10, 100_000, 3_000_000):
        x = torch.full((numel,), float(ctx.rank))
        dist.all_reduce(x)
        ctx.equal(float(x[-1]), float(sum(range(ctx.size))))
        y = torch.full((numel,), float(ctx.rank))
        work = dist.isend(y, (ctx.rank + 1) % ctx.size)
        dist.recv(x, (ctx.rank - 1) % ctx.size)
        work.wait()
        ctx.equal(float(x[-1]), float((ctx.rank - 1) % ctx.size))


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of one's own needs root")
@pytest.mark.parametrize("size", ["1m", "4k"])
def test_small_dev_shm(fresh, size):
    """/dev/shm is not used, because memory has no name."""
    world = fresh(4, init=False, env=(AUTO, WARN))
    world.start(tiny_shm, size)
    for member, seen in zip(world.members, answers(world).values(), strict=True):
        assert isinstance(seen, Seen) and not seen.kind and seen.value == 0, seen
        assert "no shared memory" not in member.log.read_text()


def without_shared_memory(ctx: Ctx) -> None:
    # memfd_create works, but the memory cannot be large.
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))
    ctx.init("without")
    works(ctx)
    works(ctx)
    dist.destroy_process_group()


def test_without_shared_memory(fresh):
    """mycoll uses TCP instead, and the rank that connects logs that once for each peer."""
    world = fresh(3, init=False, env=(AUTO, WARN))
    world.run(without_shared_memory)
    every = []
    for member in world.members:
        lines = [x for x in member.log.read_text().splitlines() if "no shared memory with" in x]
        assert len(set(lines)) == len(lines)
        every += lines
    assert 3 <= len(every) <= 6, every  # three pairs, in which both may try


@dataclass(frozen=True)
class Limit:
    """The remaining amount of a resource on one of two ranks."""

    what: int
    left: int  # descriptors, or bytes of address space


def used(what: int) -> int:
    if what == resource.RLIMIT_NOFILE:
        return 1 + max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@contextlib.contextmanager
def limits(what: int, left: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    top, gaps = used(what), []
    # The limit is on numbers, so free numbers between the descriptors in use must be taken, too.
    while what == resource.RLIMIT_NOFILE and (fd := os.dup(0)) < top:
        gaps.append(fd)
    if what == resource.RLIMIT_NOFILE:
        os.close(fd)
    resource.setrlimit(what, (top + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
        for fd in gaps:
            os.close(fd)


def limited(ctx: Ctx, limit: Limit) -> Seen:
    stores = {name: ctx.store(name) for name in ("before", "limited", "afterwards")}

    def init(name: str) -> None:
        dist.init_process_group(
            ctx.backend,
            store=stores[name],
            rank=ctx.rank,
            world_size=ctx.size,
            timeout=ctx.timeout if name == "limited" else timedelta(seconds=40),
        )

    def action() -> None:
        init("limited")
        works(ctx)

    init("before")  # importing modules also needs descriptors and memory
    dist.destroy_process_group()
    with limits(limit.what, limit.left) if ctx.rank == 1 else contextlib.nullcontext():
        seen = attempt(action)
    # Destroy the group if it was made.
    if dist.is_initialized():
        dist.destroy_process_group()
    init("afterwards")
    works(ctx)
    dist.destroy_process_group()
    return seen


def run_limited(world: World, limit: Limit) -> list[Seen]:
    seen = world.run(limited, limit, deadline=60)
    assert all(one.kind in ("", *KINDS) for one in seen), seen
    return seen


def short_of_descriptors_for_one_group(ctx: Ctx) -> Seen:
    """Rank 1 has no descriptor for a new group's memory; the old group continues to work."""
    works(ctx)
    peer = 1 - ctx.rank
    for sender in (0, 1):
        (dist.send if ctx.rank == sender else dist.recv)(torch.ones(1), peer)
    group = dist.new_group()
    dist.barrier()
    held = []
    with contextlib.suppress(OSError):
        while ctx.rank == 1:
            held.append(os.dup(0))
    seen = attempt(lambda: dist.all_reduce(torch.ones(10), group=group))
    for fd in held:
        os.close(fd)
    time.sleep(0.5)
    works(ctx)
    return seen


def test_no_descriptor_for_a_new_groups_memory(fresh):
    for seen in fresh(2, "shm", timeout=8.0).run(short_of_descriptors_for_one_group):
        assert not seen.kind, seen


KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError", "MemoryError", "RuntimeError")


@pytest.mark.parametrize("left", [0, 4, 8, 12, 64])
def test_descriptors_used_up(reused, transport, left):
    world = reused(2, transport, timeout=8.0)
    seen = run_limited(world, Limit(resource.RLIMIT_NOFILE, left))
    if left == 64:
        assert not any(one.kind for one in seen), seen
    if left == 0:
        for one in seen:
            assert "open files" in one.text, one.text
            assert one.seconds < 8.0, one  # the timeout


@pytest.mark.parametrize("mib", [1, 9, 32, 512])
def test_memory_used_up(fresh, transport, mib):
    """With no memory at all, the C library would abort, because it cannot allocate thread-local
    data."""
    world = fresh(2, transport, init=False, timeout=8.0)  # no memory remains from earlier jobs
    seen = run_limited(world, Limit(resource.RLIMIT_AS, mib * MIB))
    if mib == 512:
        assert not any(one.kind for one in seen), seen


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started in this scope, because its stack would be too large."""
    libc = ctypes.CDLL(None)
    before, large = (ctypes.create_string_buffer(64) for _ in range(2))  # pthread_attr_t
    libc.pthread_getattr_default_np(before)
    libc.pthread_attr_init(large)
    libc.pthread_attr_setstacksize(large, ctypes.c_size_t(1 << 50))
    libc.pthread_setattr_default_np(large)
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        libc.pthread_setattr_default_np(before)


def without_threads(ctx: Ctx) -> None:
    stores = [ctx.store(name) for name in ("before", "none", "afterwards")]

    def init() -> None:
        dist.init_process_group(
            ctx.backend, store=stores.pop(0), rank=ctx.rank, world_size=ctx.size
        )

    init()
    dist.destroy_process_group()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with no_threads(), ctx.raises(RuntimeError, "cannot start a thread"):
        init()
    ctx.equal(signal.pthread_sigmask(signal.SIG_BLOCK, []), blocked)
    init()
    works(ctx)
    x = torch.ones(3)
    with no_threads():
        work = dist.all_reduce(x, async_op=True)
        sums = work.get_future().then(lambda future: future.value()[0] * 2)
        ctx.same(sums.wait(), torch.full((3,), 2.0 * ctx.size))
    work = dist.all_reduce(x, async_op=True)
    work.get_future().then(lambda future: future.value()[0]).wait()
    dist.destroy_process_group()


def test_without_threads(fresh, transport):
    """Without threads, making a group raises, and callbacks run on other threads."""
    fresh(2, transport, init=False).run(without_threads)
