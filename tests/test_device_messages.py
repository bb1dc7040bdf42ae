"""Messages of device tensors outside of batches. The first message of two ranks connects them in
the caller; later calls do not wait for the other rank. On the host path, long messages are
divided."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import jobs.gil
import pytest
import torch
import torch.distributed as dist
from mycoll import black_box
from worlds.device import held
from worlds.device_tensors import NUMEL, full, is_all, slow, wait_for_all, warm_up
from worlds.worker import Ctx


def ring(ctx: Ctx) -> None:
    """All ranks call isend first: once two ranks are connected, it does not wait for the other."""
    if ctx.setup.path.startswith("nccl"):  # connect one pair after another, not all in a ring
        x = full(ctx, 0)
        for sender in range(ctx.size):
            receiver = (sender + 1) % ctx.size
            if ctx.rank == sender:
                dist.send(x, receiver)
            elif ctx.rank == receiver:
                dist.recv(x, sender)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for i in range(3):
        xs, outs = [], [full(ctx, 0) for _ in range(4)]
        slow(ctx)
        works = []
        for j in range(4):
            xs.append(full(ctx, 100 * i + 10 * j + ctx.rank))
            works.append(dist.isend(xs[j], right))
        del xs  # kept alive until they are sent
        works += [dist.irecv(out, left) for out in outs]
        for work in reversed(works):
            work.wait()
        for j, out in enumerate(outs):
            is_all(ctx, out, 100 * i + 10 * j + left)
    warm_up(ctx)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_a_ring_of_messages(reused_device_world, path):
    reused_device_world(3, path).run_in_group(ring)


def around_the_first_collective(ctx: Ctx) -> None:
    """Ranks 0 and 1 connect for a message before the group has chosen a path; a collective follows
    immediately."""
    x, out = full(ctx, 7), full(ctx, 0)
    sent = dist.isend(x, 1) if ctx.rank == 0 else None
    if ctx.rank == 1:
        dist.recv(out, 0)
    warm_up(ctx)
    if ctx.rank == 1:
        is_all(ctx, out, 7)
    if sent is not None:
        sent.wait()
    y = full(ctx, ctx.rank)
    if ctx.rank == 0:
        dist.send(y, 1)
    elif ctx.rank == 1:
        dist.recv(y, 0)
        is_all(ctx, y, 0)
    dist.barrier()


@pytest.mark.parametrize("path", ["nccl", "host", "auto"])
def test_a_message_around_the_first_collective(fresh_device_world, path):
    fresh_device_world(3, path).run(around_the_first_collective)


def pairs_in_crossing_orders(ctx: Ctx) -> None:
    """Each pair has its own stream (up to the size of torch's pool, which is four for the
    stand-in), so no message waits for one that the other rank calls later."""
    numel = 70_000  # too large for NCCL to buffer
    groups = [dist.new_group(timeout=timedelta(seconds=10)) for _ in range(4)]
    x = full(ctx, 0, numel)
    for group in groups:
        (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank, group)
    dist.barrier()
    xs = [full(ctx, i if ctx.rank == 0 else -1, numel) for i in range(4)]
    if ctx.rank == 0:
        works = [dist.isend(xs[i], 1, groups[i]) for i in range(4)]
    else:
        works = [dist.irecv(xs[i], 0, groups[i]) for i in reversed(range(4))]
    for work in works:
        work.wait()
    for i, each in enumerate(xs):
        is_all(ctx, each, i)
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_pairs_in_crossing_orders(reused_device_world, path):
    reused_device_world(2, path).run_in_group(pairs_in_crossing_orders)


def beside_a_stream_that_waits(ctx: Ctx) -> None:
    """A message does not wait for one to another rank whose stream is blocked."""
    x, y = full(ctx, 5), full(ctx, 6)
    for receiver in (1, 2):  # connect
        if ctx.rank == 0:
            dist.send(x, receiver)
        elif ctx.rank == receiver:
            dist.recv(full(ctx, 0), 0)
    dist.barrier()
    if ctx.rank == 0:
        before, other = torch.accelerator.current_stream(), torch.Stream(device=ctx.device)
        with held(other):
            torch.accelerator.set_stream(other)
            late = dist.isend(x, 2)
            torch.accelerator.set_stream(before)
            work = dist.isend(y, 1)
            end = time.monotonic() + 20
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.001)
            ctx.equal(work.is_completed(), True, "sent while the other stream is held")
        late.wait()
    else:
        out = full(ctx, 0)
        dist.recv(out, 0)
        is_all(ctx, out, 6 if ctx.rank == 1 else 5)
    torch.accelerator.synchronize()
    dist.barrier()


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_a_message_beside_a_stream_that_waits(reused_device_world, path):
    reused_device_world(3, path).run_in_group(beside_a_stream_that_waits)


def small_collectives(ctx: Ctx) -> None:
    """Small collectives allocate little pinned memory."""
    before = torch.standin.counts()["pinned_bytes"]
    x, out = full(ctx, 1, 16), full(ctx, 0, 16 * ctx.size)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(out, x)
    is_all(ctx, out, ctx.size)
    taken = torch.standin.counts()["pinned_bytes"] - before
    ctx.equal(taken <= 64 << 10, True, f"{taken} pinned bytes were taken:")


def test_pinned_memory_of_small_collectives(reused_device_world, request):
    if request.config.getoption("--device") != "standin":
        pytest.skip("only the stand-in counts pinned memory")
    reused_device_world(2, "host").run_in_group(small_collectives)


# Several pieces of the host path, exactly one, and slightly more than one.
LONG = (3 * (1 << 20) + 5, 1 << 20, (1 << 20) + 1)  # of float32


def long_messages(ctx: Ctx) -> int:
    """Pieces of several messages must not be mixed up: with tags in another order, and with a
    receiver that names the source or does not."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size

    def values(rank: int, tag: int) -> torch.Tensor:
        return torch.arange(LONG[tag], dtype=torch.float32) % 1009 + 2000 * rank + 100_000 * tag

    tags = range(len(LONG))
    works = [dist.isend(values(ctx.rank, t).to(ctx.device), right, tag=t) for t in tags]
    for t in reversed(tags):
        out = full(ctx, 0, LONG[t])
        dist.recv(out, left, tag=t)
        ctx.same(out, values(left, t), f"tag {t}")
    for work in works:
        work.wait()
    # Two messages of the same tag from each rank to rank 0, which receives from any source.
    if ctx.rank == 0:
        outs = [full(ctx, 0, LONG[0]) for _ in range(2 * (ctx.size - 1))]
        receives = [dist.irecv(out, tag=9) for out in outs]
        seen: list[tuple[int, int]] = []
        for work, out in zip(receives, outs, strict=True):
            work.wait()
            source = work._source_rank()
            message = int(out[0]) // 100_000
            ctx.equal(message, sum(s == source for s, _ in seen), f"order from {source}")
            seen.append((source, message))
            want = torch.arange(LONG[0], dtype=torch.float32) % 1009 + 2000 * source
            ctx.same(out, want + 100_000 * message, f"from {source}")
        ctx.equal(sorted(seen), [(r, m) for r in range(1, ctx.size) for m in range(2)])
    else:
        for m in range(2):
            x = torch.arange(LONG[0], dtype=torch.float32) % 1009 + 2000 * ctx.rank + 100_000 * m
            dist.send(x.to(ctx.device), 0, tag=9)
    dist.barrier()
    return longest_piece()


def longest_piece() -> int:
    """The size in bytes of the longest message that the engine has recorded."""
    groups = black_box.read(os.getpid()).groups
    sent = [op for group in groups for op in group.operations if op.kind in ("send", "recv")]
    return max(max(op.in_bytes, op.out_bytes) for op in sent)


@pytest.mark.worlds(3, paths=["host"])
def test_long_messages_travel_in_pieces(device_world):
    for longest in device_world.run(long_messages):
        assert 0 < longest <= (4 << 20) + 8


def sizes_differ(ctx: Ctx, numels: tuple[int, int]) -> str:
    text = ""
    try:
        x = full(ctx, 1, numels[ctx.rank])
        (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
        torch.accelerator.synchronize()
        dist.all_reduce(full(ctx, 1))
    except RuntimeError as error:
        text = str(error)
    wait_for_all(ctx)
    return text


@pytest.mark.parametrize("numels", [(LONG[0], LONG[2]), (LONG[2], 7), (7, LONG[0])])
def test_sizes_of_long_messages(reused_device_world, numels):
    """Errors name the sizes of the messages, not of their pieces."""
    for text in reused_device_world(2, "host").run_in_group(sizes_differ, numels):
        assert "MISMATCH" in text, text
        for numel in numels:
            assert f"numel={numel}" in text, text


def timed_message(ctx: Ctx) -> None:
    """The duration of a message is known, also of one that waited for the connection."""
    dist.distributed_c10d._get_default_group()._enable_collectives_timing()
    x = full(ctx, ctx.rank)
    for _ in range(2):
        work = dist.isend(x, 1) if ctx.rank == 0 else dist.irecv(x, 0)
        work.wait(timedelta(seconds=30))
        ctx.equal(work.is_completed(), True)
        ctx.equal(work._get_duration() >= 0, True, "duration")
    is_all(ctx, x, 0)


@pytest.mark.parametrize("path", ["nccl", "host"])
def test_duration_of_a_message(reused_device_world, path):
    reused_device_world(2, path).run_in_group(timed_message)


def recorded(ctx: Ctx) -> list[tuple]:
    """The records of this job's messages in the black box."""
    peer = 1 - ctx.rank
    x, y = full(ctx, 1), full(ctx, 1, 7)
    (dist.send if ctx.rank == 0 else dist.recv)(x, peer)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    if ctx.rank == 1:
        ops = [dist.P2POp(dist.irecv, x, peer), dist.P2POp(dist.isend, y, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    torch.accelerator.synchronize()
    found, ended = [], time.monotonic() + 20
    while time.monotonic() < ended and (len(found) < 3 or {f[-1] for f in found} != {"done"}):
        groups = black_box.read(os.getpid()).groups
        messages = [o for g in groups for o in g.operations if o.is_message and o.on_device]
        found = [(o.kind, o.peer, o.in_bytes, o.out_bytes, o.dtype, o.state) for o in messages]
    return found


def test_messages_are_recorded(fresh_device_world):
    long, short = 4 * NUMEL, 4 * 7
    zero, one = fresh_device_world(2, "nccl").run(recorded)
    assert zero == [
        ("send", 1, long, 0, "float32", "done"),
        ("send", 1, long, 0, "float32", "done"),
        ("recv", 1, 0, short, "float32", "done"),
    ]
    assert one == [
        ("recv", 0, 0, long, "float32", "done"),
        ("recv", 0, 0, long, "float32", "done"),
        ("send", 0, short, 0, "float32", "done"),
    ]


def late_messages(ctx: Ctx, how: str) -> str:
    """After two messages, the third has no counterpart, or one in a batch. It is too large for NCCL
    to buffer; a small one would complete on the sender."""
    warm_up(ctx)
    call = dist.isend if ctx.rank == 0 else dist.irecv
    for _ in range(2):
        call(full(ctx, 1), 1 - ctx.rank).wait()
    large = full(ctx, 1, 16 << 20)
    op = dist.P2POp(call, large, 1 - ctx.rank)
    dist.batch_isend_irecv([op])[0].wait()
    torch.accelerator.synchronize()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    store = ctx.store("late messages")
    try:
        if ctx.rank == 0:
            dist.send(large, 1)
        elif how == "batch":
            dist.batch_isend_irecv([op])[0].wait()
        else:
            store.wait(["has failed"], timedelta(seconds=30))
        torch.accelerator.synchronize()
        dist.all_reduce(full(ctx, 1))
    except dist.DistBackendError as error:
        store.set("has failed", "")
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["alone", "batch"])
def test_messages_without_a_counterpart(fresh_device_world, how):
    env = (("MYCOLL_CALL_SITES", "always"),)
    for found in fresh_device_world(2, "nccl", env=env).run(late_messages, how):
        assert "timed out after 1000 ms" in found, found
        assert "(test_device_messages.py:" in found, found
        if how == "alone":
            assert "send to rank 1" in found, found
        assert "the other side never came, or the device is busy" in found, found


def place_of_a_batch(ctx: Ctx) -> str:
    op = dist.isend if ctx.rank == 0 else dist.irecv
    dist.batch_isend_irecv([dist.P2POp(op, full(ctx, 1), 1 - ctx.rank)])[0].wait()
    torch.accelerator.synchronize()
    groups = black_box.read(os.getpid()).groups
    return next(o.site for g in groups for o in g.operations if o.is_message and o.on_device)


def test_the_place_of_a_batch(fresh_device_world):
    """The call site of a batch is the user's line, not the context manager in torch."""
    env = (("MYCOLL_CALL_SITES", "always"),)
    for site in fresh_device_world(2, "nccl", env=env).run(place_of_a_batch):
        assert site.startswith("test_device_messages.py:"), site
        assert site.endswith(" in place_of_a_batch"), site


def beside_a_held_gil(ctx: Ctx) -> None:
    numel = 1 << 18

    def strided() -> torch.Tensor:
        return torch.ones(numel, 2, device=ctx.device)[:, 0]

    def start() -> list:
        whole = full(ctx, 1, numel * ctx.size)
        return [
            dist.all_reduce(strided(), async_op=True),
            dist.reduce_scatter_tensor(full(ctx, 0, numel), whole, async_op=True),
            dist.isend(strided(), 1) if ctx.rank == 0 else dist.irecv(strided(), 0),
            dist.all_reduce(strided(), async_op=True),
            dist.all_reduce(strided(), async_op=True),
        ]

    jobs.gil.proceeds(ctx, start, keeps=False)


def test_operations_beside_a_held_gil(reused_device_world):
    reused_device_world(2, "host").run_in_group(beside_a_held_gil)
