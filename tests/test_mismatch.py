"""Ranks that call different operations: all of them raise promptly, with both calls in the text."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from jobs.mismatches import MISMATCHES, SOON, disagree, f32
from worlds.pool import World
from worlds.worker import Ctx

Call = Callable[[], object]


def check_mismatch(world: World, name: str) -> None:
    for rank, (text, seconds) in enumerate(world.run_in_group(disagree, name)):
        assert text, f"rank {rank}: no DistBackendError"
        assert seconds < SOON, f"rank {rank} took {seconds:.1f} s"
        for wanted in MISMATCHES[name].texts:
            assert wanted.lower() in text.lower(), f"rank {rank}: no {wanted!r} in: {text}"


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(reused, transport, name):
    check_mismatch(reused(3, transport), name)


@pytest.mark.quick
@pytest.mark.transports("shm")
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_of_two(reused, transport, name):
    check_mismatch(reused(2, transport), name)


def message_sizes(ctx: Ctx, sent: int, expected: int) -> tuple[str, float]:
    started = time.monotonic()
    text = ""
    try:
        if ctx.rank == 0:
            dist.send(f32(sent), 1)
        elif ctx.rank == 1:
            dist.recv(f32(expected), 0)
        dist.barrier()
    except dist.DistBackendError as error:
        text = str(error)
    return text, time.monotonic() - started


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (500_000, 8), (8, 500_000)])
def test_sizes_of_send_and_recv(reused, transport, sizes):
    results = reused(2, transport).run_in_group(message_sizes, *sizes)
    text, seconds = results[1]
    assert text, "the receiver got no DistBackendError"
    assert seconds < SOON
    for numel in sizes:
        assert str(numel) in text or str(4 * numel) in text, text


def dtypes_of_messages(ctx: Ctx) -> str:
    try:
        if ctx.rank == 0:
            dist.send(f32(8), 1)
        else:
            dist.recv(f32(8).int(), 0)
        dist.barrier()
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_dtypes_of_send_and_recv(reused, transport):
    text = reused(2, transport).run_in_group(dtypes_of_messages)[1].lower()
    assert "float" in text and "int" in text, text


def again(ctx: Ctx) -> None:
    """After a mismatch the group is dead, the process is not."""
    disagree(ctx, "size")
    with ctx.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    ctx.init("second")
    x = torch.ones(1)
    dist.all_reduce(x)
    ctx.equal(float(x), float(ctx.size))


def test_a_new_group_after_a_mismatch(reused, transport):
    reused(2, transport).run_in_group(again)
