"""A mycoll group whose CPU tensors travel over torch's gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds.smoke import smoke
from worlds.worker import Ctx


def by_environment(ctx: Ctx) -> None:
    smoke(ctx.rank, ctx.size)
    x = torch.full((5,), float(ctx.rank))
    dist.reduce(x, 0)
    if ctx.rank == 0:
        ctx.equal(float(x[0]), float(sum(range(ctx.size))))
    outs = [torch.zeros(2) for _ in range(ctx.size)]
    dist.gather(torch.full((2,), float(ctx.rank)), outs if ctx.rank == 0 else None, dst=0)
    out = torch.zeros(2)
    dist.scatter(out, [torch.full((2,), 3.0)] * ctx.size if ctx.rank == 1 else None, src=1)
    ctx.equal(float(out[0]), 3.0)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(3), (ctx.rank + 1) % ctx.size),
            dist.P2POp(dist.irecv, out.new_zeros(3), (ctx.rank - 1) % ctx.size),
        ]
    ):
        work.wait()
    dist.monitored_barrier()
    smoke(ctx.rank, ctx.size, dist.new_group())


def test_by_environment(fresh):
    world = fresh(3, env=(("MYCOLL_CPU", "gloo"),))
    world.run(by_environment)
    for member in world.members:
        log = member.log.read_text()
        assert "gloo" in log, f"the log does not name gloo: {log!r}"


def by_options(ctx: Ctx) -> None:
    import mycoll

    ctx.init("options", pg_options=mycoll.Options(cpu="gloo"))
    by_environment(ctx)
    dist.destroy_process_group()


def test_by_options(fresh):
    fresh(2, init=False).run(by_options)


def unknown(ctx: Ctx) -> None:
    with ctx.raises((RuntimeError, ValueError), "mycoll group '0': MYCOLL_CPU=nonsense"):
        ctx.init("unknown")


def test_unknown_value_is_refused(fresh):
    fresh(1, init=False, env=(("MYCOLL_CPU", "nonsense"),)).run(unknown)


@pytest.mark.parametrize("size", [1, 2])
def test_engine_group_after_a_fallback_group(fresh, size):
    """A process makes a group with the fallback, and then one with the engine."""
    fresh(size, init=False).run(both)


def both(ctx: Ctx) -> None:
    import mycoll

    ctx.init("fallback", pg_options=mycoll.Options(cpu="gloo"))
    smoke(ctx.rank, ctx.size)
    dist.destroy_process_group()
    ctx.init("engine")
    smoke(ctx.rank, ctx.size)
    dist.destroy_process_group()
