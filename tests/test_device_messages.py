"""Single messages between device tensors, outside of batches: nobody waits for the other's call,
and on the host road long ones travel in pieces."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mycoll import black_box
from worlds import device
from worlds.device_tensors import NUMEL, full, is_all, slow, warm_up
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


# --- what NCCL does not look at

SENT_AS, TAKEN_AS = (
    "send float32 numel=5000 tag=0",
    {
        "dtype": "recv int32 numel=5000 tag=0",
        "size": "recv float32 numel=4999 tag=0",
        "tag": "recv float32 numel=5000 tag=1",
    },
)


def messages_that_differ(ctx: Ctx, how: str, is_batch: bool) -> str:
    """The second of three. Of another size it does not end, of another dtype it does."""
    if is_batch:
        warm_up(ctx)
    try:
        for i in range(3):
            x, tag = full(ctx, i), 0
            if ctx.rank == 1 and i == 1:
                x = x.to(torch.int32) if how == "dtype" else x[1:] if how == "size" else x
                tag = 1 if how == "tag" else 0
            call = dist.isend if ctx.rank == 0 else dist.irecv
            if is_batch:
                for work in dist.batch_isend_irecv([dist.P2POp(call, x, 1 - ctx.rank, tag=tag)]):
                    work.wait()
            else:
                call(x, 1 - ctx.rank, tag=tag).wait()
        torch.accelerator.synchronize()
        time.sleep(1)
        dist.all_reduce(full(ctx, 1))
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("how", ["dtype", "size", "tag"])
def test_messages_that_differ(fresh_device_world, how, is_batch):
    world = fresh_device_world(2, "nccl")
    for text in world.run(messages_that_differ, how, is_batch):
        assert "MISMATCH at message #1 from rank 0 to rank 1" in text, text
        assert SENT_AS in text, text
        assert TAKEN_AS[how] in text, text


def one_side_replays(ctx: Ctx) -> None:
    """Rank 0 has recorded its sends, rank 1 calls every receive; sizes change in between. What
    nobody can count is not compared."""
    x = full(ctx, 7)
    call = dist.isend if ctx.rank == 0 else dist.irecv
    call(x, 1 - ctx.rank).wait()
    torch.accelerator.synchronize()
    time.sleep(0.3)  # nobody looks any more: CUDA lets no other thread in beside a capture
    y = full(ctx, 8, 3)
    if ctx.rank == 0:
        graph = device.graph_on(ctx.device)
        with graph.capture():
            dist.isend(y, 1).wait()
        for _ in range(5):
            graph.replay()
    else:
        for _ in range(5):
            dist.recv(y.zero_(), 0)
            is_all(ctx, y, 8)
    for numel in (11, 5000):
        z = full(ctx, ctx.rank, numel)
        call(z, 1 - ctx.rank).wait()
        is_all(ctx, z, 0)
    time.sleep(0.5)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    dist.barrier()
    if ctx.rank == 0:
        graph.reset()


@pytest.mark.usefixtures("graphs")
def test_messages_of_a_graph_are_not_held_against_anybody(fresh_device_world):
    fresh_device_world(2, "nccl").run(one_side_replays)


def remembered(ctx: Ctx) -> list[tuple]:
    """Of the messages of this test, what the black box knows."""
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


def test_messages_are_remembered(fresh_device_world):
    long, short = 4 * NUMEL, 4 * 7
    zero, one = fresh_device_world(2, "nccl").run(remembered)
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
    """After two good ones, the third has no partner, or one that takes another way."""
    warm_up(ctx)
    call = dist.isend if ctx.rank == 0 else dist.irecv
    for _ in range(2):
        call(full(ctx, 1), 1 - ctx.rank).wait()
    op = dist.P2POp(call, full(ctx, 1), 1 - ctx.rank)
    dist.batch_isend_irecv([op])[0].wait()
    torch.accelerator.synchronize()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    try:
        if ctx.rank == 0:
            dist.send(full(ctx, 1), 1)
        elif how == "batch":
            dist.batch_isend_irecv([op])[0].wait()
        else:
            time.sleep(5)
        torch.accelerator.synchronize()
        dist.all_reduce(full(ctx, 1))
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["alone", "batch"])
def test_messages_without_a_partner(fresh_device_world, how):
    env = (("MYCOLL_CALL_SITES", "always"),)
    for found in fresh_device_world(2, "nccl", env=env).run(late_messages, how):
        assert "TIMED OUT after 2000 ms" in found, found
        assert "(test_device_messages.py:" in found, found
        if how == "alone":
            assert "send to rank 1" in found, found
            assert "has called 2 of these outside of batches, this rank 3." in found, found
        else:  # whoever was first to see it tells the story for both
            ours, theirs = "outside of batches", "in batches"
            if "send to" not in found:
                ours, theirs = theirs, ours
            assert f"more of these {theirs} than this rank, and fewer {ours}" in found, found


def place_of_a_batch(ctx: Ctx) -> str:
    op = dist.isend if ctx.rank == 0 else dist.irecv
    dist.batch_isend_irecv([dist.P2POp(op, full(ctx, 1), 1 - ctx.rank)])[0].wait()
    torch.accelerator.synchronize()
    groups = black_box.read(os.getpid()).groups
    return next(o.site for g in groups for o in g.operations if o.is_message and o.on_device)


def test_the_place_of_a_batch(fresh_device_world):
    """It ends in a context manager of torch's, which is the library's affair."""
    env = (("MYCOLL_CALL_SITES", "always"),)
    for site in fresh_device_world(2, "nccl", env=env).run(place_of_a_batch):
        assert site.startswith("test_device_messages.py:"), site
        assert site.endswith(" in place_of_a_batch"), site
