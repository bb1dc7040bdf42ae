"""send, recv, isend, irecv, tags, any source, batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from jobs.messages import (
    SIZES,
    any_source,
    batch,
    batch_one_sided,
    beside_collectives,
    neighbours,
    order_kept,
    ping_pong,
    ring,
    tags_out_of_order,
    to_oneself,
)
from worlds.worker import Ctx

ERRORS = (ValueError, RuntimeError, TypeError)


@pytest.mark.worlds(2, 3, 5, tcp=(3,))
def test_ring(world):
    world.run(ring)


@pytest.mark.worlds(2, tcp=(2,))
def test_ping_pong(world):
    world.run(ping_pong)


@pytest.mark.worlds(2, tcp=(2,))
def test_order_is_kept(world):
    world.run(order_kept)


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_tags_out_of_order(world):
    world.run(tags_out_of_order)


def tags_posted_first(ctx: Ctx) -> None:
    if ctx.rank == 1:
        outs = {t: torch.zeros(100, dtype=torch.int64) for t in (9, 2, 1 << 20)}
        works = [dist.irecv(out, 0, tag=t) for t, out in outs.items()]
        dist.barrier()
        for work in works:
            work.wait()
        for t, out in outs.items():
            ctx.same(out, torch.full((100,), t), f"tag {t}")
    else:
        dist.barrier()
        if ctx.rank == 0:
            for t in (1 << 20, 2, 9):
                dist.send(torch.full((100,), t), 1, tag=t)


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_tags_of_posted_receives(world):
    world.run(tags_posted_first)


@pytest.mark.worlds(2, 3, 5, tcp=(3,))
def test_recv_from_any_source(world):
    world.run(any_source)


def any_source_in_a_group(ctx: Ctx) -> None:
    """recv returns the global rank of the sender, also in a group with other ranks."""
    group = dist.new_group([1, 2])
    if ctx.rank == 1:
        out = torch.zeros(3)
        ctx.equal(dist.recv(out, group=group), 2)
        ctx.same(out, torch.ones(3) * 5)
    elif ctx.rank == 2:
        dist.send(torch.ones(3) * 5, 1, group=group)
    dist.barrier()
    if ctx.rank:
        dist.destroy_process_group(group)


@pytest.mark.worlds(3, tcp=(3,))
def test_recv_from_any_source_in_a_group(world):
    world.run(any_source_in_a_group)


def irecv_any_source(ctx: Ctx) -> None:
    if ctx.rank == 0:
        out = torch.zeros(5)
        work = dist.irecv(out, tag=4)
        dist.barrier()
        work.wait()
        ctx.equal(int(out[0]), work.source_rank() if hasattr(work, "source_rank") else 1)
    else:
        dist.barrier()
        if ctx.rank == 1:
            dist.send(torch.ones(5), 0, tag=4)


@pytest.mark.worlds(2, tcp=(2,))
def test_irecv_from_any_source(world):
    world.run(irecv_any_source)


@pytest.mark.worlds(1, 2, tcp=(2,))
def test_to_oneself(world):
    world.run(to_oneself)


def to_oneself_buffered(ctx: Ctx) -> None:
    """A rank sends itself more than a receiver buffers, among messages of others. Messages that are
    not received end with the group."""
    group = dist.new_group()
    right, left = neighbours(ctx)
    sent = [torch.full((15_000,), float(i)) for i in range(400)]
    works = [dist.isend(x, peer, group=group) for x in sent for peer in {ctx.rank, right}]
    for source in {ctx.rank, left}:
        for x in sent:
            out = torch.zeros_like(x)
            dist.irecv(out, None if ctx.size == 1 else source, group).wait()
            ctx.same(out, x)
    for work in works:
        work.wait()
    senders = {ctx.rank, left}
    works = [dist.isend(torch.full((5,), float(ctx.rank)), peer) for peer in {ctx.rank, right}]
    received = torch.zeros(len(senders), 5)
    works += [dist.irecv(row) for row in received]  # from any source
    for work in works:
        work.wait()
    ctx.equal(sorted(received[:, 0].tolist()), sorted(map(float, senders)))
    out = torch.zeros(1_000_000)
    pending = dist.irecv(out, ctx.rank, group=group), dist.isend(out, ctx.rank, group=group, tag=1)
    dist.destroy_process_group(group)
    for work in pending:
        with ctx.raises(ERRORS):
            work.wait()


@pytest.mark.worlds(1, 2, tcp=(2,))
def test_to_oneself_buffered(world):
    world.run(to_oneself_buffered)


def to_oneself_mismatched(ctx: Ctx) -> None:
    for numel in SIZES[1:]:
        for is_sent_first in (True, False):
            group = dist.new_group()
            other = dist.irecv(torch.zeros(3), ctx.rank, group, tag=7)
            calls = [
                lambda n=numel, g=group: dist.isend(torch.ones(n), ctx.rank, g),
                lambda n=numel, g=group: dist.irecv(torch.ones(n + 1), ctx.rank, g),
            ]
            works = [call() for call in (calls if is_sent_first else calls[::-1])]
            name = f"{numel} elements, {'sent' if is_sent_first else 'received'} first"
            # A small message is sent before the mismatch is detected.
            for work in [works[1], other]:
                with ctx.case(name), ctx.raises(dist.DistBackendError, "MISMATCH"):
                    work.wait()
            dist.destroy_process_group(group)


@pytest.mark.worlds(1, 2, tcp=(2,))
def test_to_oneself_mismatched(world):
    world.run(to_oneself_mismatched)


@pytest.mark.worlds(2, 3, 4, tcp=(3,))
def test_batch_isend_irecv(world):
    world.run(batch)


@pytest.mark.worlds(2, 4, tcp=(4,))
def test_batch_of_a_pipeline(world):
    world.run(batch_one_sided)


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_beside_collectives(world):
    world.run(beside_collectives)
