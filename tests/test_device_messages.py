"""Single messages between device tensors, outside of batches: nobody waits for the other's call,
and on the host road long ones travel in pieces."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds.device_tensors import full, is_all, slow, warm_up
from worlds.worker import Ctx


def ring(ctx: Ctx, is_connected: bool) -> None:
    """Everybody calls isend first: it must not wait for the other rank to come, although two ranks
    connect with their first message."""
    if is_connected:
        warm_up(ctx)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for i in range(3):
        xs, outs = [], [full(ctx, 0) for _ in range(4)]
        slow(ctx)
        works = []
        for j in range(4):
            xs.append(full(ctx, 100 * i + 10 * j + ctx.rank))
            works.append(dist.isend(xs[j], right))
        del xs  # kept until they are sent
        works += [dist.irecv(out, left) for out in outs]
        for work in reversed(works):
            work.wait()
        for j, out in enumerate(outs):
            is_all(ctx, out, 100 * i + 10 * j + left)
    warm_up(ctx)


@pytest.mark.parametrize("is_connected", [False, True], ids=["first", "connected"])
@pytest.mark.parametrize("road", ["nccl", "host"])
def test_a_ring_of_messages(fresh_device_world, road, is_connected):
    fresh_device_world(3, road).run(ring, is_connected)


def around_the_first_collective(ctx: Ctx) -> None:
    """Rank 0 sends before the group has chosen a road, and rank 1 receives when it has."""
    x, out = full(ctx, 7), full(ctx, 0)
    sent = dist.isend(x, 1) if ctx.rank == 0 else None
    warm_up(ctx)
    if ctx.rank == 1:
        dist.irecv(out, 0).wait()
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


@pytest.mark.parametrize("road", ["nccl", "host", "auto"])
def test_a_message_around_the_first_collective(fresh_device_world, road):
    fresh_device_world(3, road).run(around_the_first_collective)


# More than the host road copies and sends at a time, just that, and just more.
LONG = (3 * (1 << 20) + 5, 1 << 20, (1 << 20) + 1)  # of float32


def long_messages(ctx: Ctx) -> int:
    """In pieces on the host road, which must not get mixed up: several at once, by tags in another
    order, to a receiver that names the source and to one that does not."""
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
    # All to rank 0, which does not ask from whom; two of the same tag from each.
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
    """Of the messages that the engine remembers, in bytes."""
    from mycoll import black_box

    groups = black_box.read(os.getpid()).groups
    sent = [op for group in groups for op in group.operations if op.kind in ("send", "recv")]
    return max(max(op.in_bytes, op.out_bytes) for op in sent)


@pytest.mark.worlds(3, roads=["host"])
def test_long_messages_travel_in_pieces(device_world):
    for longest in device_world.run(long_messages):
        assert 0 < longest <= (4 << 20) + 8


def sizes_differ(ctx: Ctx, numels: tuple[int, int]) -> str:
    try:
        x = full(ctx, 1, numels[ctx.rank])
        (dist.send if ctx.rank == 0 else dist.recv)(x, 1 - ctx.rank)
        torch.accelerator.synchronize()
        dist.all_reduce(full(ctx, 1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("numels", [(LONG[0], LONG[2]), (LONG[2], 7), (7, LONG[0])])
def test_sizes_of_long_messages(fresh_device_world, numels):
    """Of the messages, not of the pieces that they travel in."""
    for text in fresh_device_world(2, "host").run(sizes_differ, numels):
        assert "MISMATCH" in text, text
        for numel in numels:
            assert f"numel={numel}" in text, text


def timed_message(ctx: Ctx) -> None:
    """What a message took is known, also where it had to wait for its pair."""
    dist.distributed_c10d._get_default_group()._enable_collectives_timing()
    x = full(ctx, ctx.rank)
    for _ in range(2):
        work = dist.isend(x, 1) if ctx.rank == 0 else dist.irecv(x, 0)
        work.wait(timedelta(seconds=30))
        ctx.equal(work.is_completed(), True)
        ctx.equal(work._get_duration() >= 0, True, "duration")
    is_all(ctx, x, 0)


@pytest.mark.parametrize("road", ["nccl", "host"])
def test_what_a_message_took(fresh_device_world, road):
    fresh_device_world(2, road).run(timed_message)
