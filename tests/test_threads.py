"""Several Python threads and several groups, also in crossed orders."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds.threads import on_all
from worlds.worker import Ctx


def thread_a_group(ctx: Ctx) -> None:
    groups = [dist.new_group() for _ in range(4)]

    def body(i: int) -> None:
        for step in range(40):
            numel = (1, 1000, 60_001)[step % 3]
            x = torch.full((numel,), float(ctx.rank + i))
            work = dist.all_reduce(x, group=groups[i], async_op=step % 2 == 0)
            if work is not None:
                work.wait()
            want = float(sum(r + i for r in range(ctx.size)))
            if not bool((x == want).all()):
                ctx.fail(f"thread {i} step {step}: {x[0]} instead of {want}")
            if step % 10 == i:
                dist.barrier(group=groups[i])

    on_all(body, len(groups))
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
def test_a_thread_for_each_group(world):
    world.run(thread_a_group)


def p2p_in_threads(ctx: Ctx) -> None:
    """One thread sends, one receives, one does collectives, on the same group."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size

    def body(i: int) -> None:
        for step in range(50):
            numel = (1, 3000, 50_000)[step % 3]
            if i == 0:
                dist.send(torch.full((numel,), float(step)), right)
            elif i == 1:
                out = torch.zeros(numel)
                dist.recv(out, left)
                if not bool((out == step).all()):
                    ctx.fail(f"message {step} is wrong")
            else:
                x = torch.ones(numel)
                dist.all_reduce(x)
                if not bool((x == ctx.size).all()):
                    ctx.fail(f"all_reduce {step} is wrong")

    on_all(body, 3)


@pytest.mark.worlds(2, 3)
def test_p2p_and_collectives_in_threads(world):
    world.run(p2p_in_threads)


def crossed_order(ctx: Ctx) -> None:
    """Even ranks use group a and then b, odd ranks b and then a, which is valid for async work."""
    a, b = dist.new_group(), dist.new_group()
    for numel in (10, 200_000):
        for _ in range(10):
            x, y = torch.ones(numel), torch.full((numel,), 2.0)
            pairs = [(x, a), (y, b)]
            if ctx.rank % 2:
                pairs.reverse()
            works = [dist.all_reduce(t, group=g, async_op=True) for t, g in pairs]
            for work in works:
                work.wait()
            ctx.equal((float(x[0]), float(y[-1])), (float(ctx.size), 2.0 * ctx.size))
    dist.destroy_process_group(a)
    dist.destroy_process_group(b)


@pytest.mark.worlds(2, 3, 4)
def test_crossed_order_over_two_groups(world):
    world.run(crossed_order)


def waits_crossed(ctx: Ctx) -> None:
    """Sync on one group while async work of another is unfinished elsewhere."""
    a, b = dist.new_group(), dist.new_group()
    for _ in range(10):
        x, y = torch.ones(100_000), torch.ones(10)
        work = dist.all_reduce(x, group=a, async_op=True)
        if ctx.rank == 0:
            work.wait()
            dist.all_reduce(y, group=b)
        else:
            dist.all_reduce(y, group=b)
            work.wait()
        ctx.equal((float(x[0]), float(y[0])), (float(ctx.size), float(ctx.size)))
    dist.destroy_process_group(a)
    dist.destroy_process_group(b)


@pytest.mark.worlds(2, 3)
def test_sync_beside_async_of_another_group(world):
    world.run(waits_crossed)


def other_thread_runs(ctx: Ctx, name: str) -> None:
    """While a rank waits inside an operation, its other Python threads run: no GIL held."""
    x = torch.ones(10)
    wait = {
        "all_reduce": lambda: dist.all_reduce(x),
        "async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(x, 1),
    }[name]
    store = ctx.store(f"gil/{name}")
    if ctx.rank == 0:
        ticks = 0

        def count() -> None:
            nonlocal ticks
            while ticks < 200:  # the other rank makes its call only when this loop has ended
                time.sleep(0.001)
                ticks += 1
            store.set("ran", "")

        thread = threading.Thread(target=count)
        thread.start()
        wait()
        ctx.equal(ticks, 200)
        thread.join()
    else:
        store.wait(["ran"])
        if name == "recv":
            dist.send(x, 0)
        elif name == "barrier":
            dist.barrier()
        else:
            dist.all_reduce(x)


@pytest.mark.parametrize("name", ["all_reduce", "async", "barrier", "recv"])
@pytest.mark.worlds(2)
def test_no_gil_held_while_waiting(world, name):
    world.run(other_thread_runs, name)


def interpreter_is_held(ctx: Ctx, name: str) -> None:
    """A thread of rank 0 holds the GIL while another thread waits in an operation, until rank 1 has
    completed its part."""
    x = torch.ones(1 << 20)
    dist.all_reduce(x)
    store = ctx.store(f"held in {name}")
    if ctx.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            fifo = f"{folder}/ended"
            os.mkfifo(fifo)
            reader = os.open(fifo, os.O_RDWR)
            wanted = ctypes.create_string_buffer(struct.pack("ihh", reader, select.POLLIN, 0))
            ready: list[int] = []

            def hold() -> None:
                time.sleep(0.3)  # the other thread starts to wait in the operation meanwhile
                store.set("fifo", fifo)
                ready.append(ctypes.PyDLL(None).poll(wanted, 1, 20_000))  # PyDLL keeps the GIL

            thread = threading.Thread(target=hold)
            thread.start()
            (dist.all_reduce if name == "all_reduce" else lambda y: dist.recv(y, 1))(x)
            thread.join()
            os.close(reader)
        ctx.equal(ready, [1], f"rank 1 waits in {name} for the interpreter of rank 0")
    else:
        fifo = store.get("fifo").decode()
        time.sleep(0.1)  # rank 0's thread takes the GIL meanwhile
        (dist.all_reduce if name == "all_reduce" else lambda y: dist.send(y, 0))(x)
        Path(fifo).write_bytes(b"x")


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
@pytest.mark.worlds(2)
def test_work_proceeds_while_a_thread_holds_the_interpreter(world, name):
    world.run(interpreter_is_held, name)


def many_async(ctx: Ctx) -> None:
    """Hundreds of operations in flight, issued much faster than they complete."""
    tensors = [torch.full((17 + i % 5,), float(i)) for i in range(600)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works:
        work.wait()
    for i, t in enumerate(tensors):
        ctx.same(t, torch.full_like(t, float(i * ctx.size)))


@pytest.mark.worlds(2, 4)
def test_many_in_flight(world):
    world.run(many_async)
