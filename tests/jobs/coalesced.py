"""Several operations in one call."""

from __future__ import annotations

import gc
import threading
import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from worlds import arith
from worlds.worker import Ctx, called

SHAPES = ((3,), (0,), (17, 2), (4099,), (1,))


def mine(ctx: Ctx) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """This rank's tensors, and those of all ranks for each of them."""
    parts = [ctx.inputs(torch.float32, shape, i) for i, shape in enumerate(SHAPES)]
    return [p[ctx.rank].clone() for p in parts], parts


def coalesced_calls(ctx: Ctx, mode: str) -> None:
    tensors, parts = mine(ctx)
    with ctx.case("all_reduce_coalesced"):
        called(mode, dist.all_reduce_coalesced, tensors)
        for t, p in zip(tensors, parts, strict=True):
            ctx.same(t, arith.reduced("SUM", p))
    tensors, parts = mine(ctx)
    with ctx.case("all_gather_coalesced"):
        outs = [[torch.zeros_like(t) for t in tensors] for _ in range(ctx.size)]
        called(mode, dist.all_gather_coalesced, outs, tensors)
        for r in range(ctx.size):
            for i, out in enumerate(outs[r]):
                ctx.same(out, parts[i][r], f"tensor {i} of rank {r}")


def manager(ctx: Ctx, mode: str) -> None:
    cpu = torch.device("cpu")
    for device in (None, cpu):
        if device and ctx.skips("_coalescing_manager/device"):
            continue

        def run(body, device=device) -> None:
            with _coalescing_manager(device=device, async_ops=mode == "async") as cm:
                body()
            if mode == "async":
                cm.wait()

        with ctx.case(f"all_reduce, device={device}"):
            tensors, parts = mine(ctx)
            run(lambda t=tensors: [dist.all_reduce(x) for x in t])
            for t, p in zip(tensors, parts, strict=True):
                ctx.same(t, arith.reduced("SUM", p))
        with ctx.case(f"all_gather_into_tensor, device={device}"):
            tensors, parts = mine(ctx)
            outs = [torch.zeros((ctx.size * t.shape[0], *t.shape[1:])) for t in tensors]
            run(
                lambda t=tensors, o=outs: [
                    dist.all_gather_into_tensor(a, b) for a, b in zip(o, t, strict=True)
                ]
            )
            for out, p in zip(outs, parts, strict=True):
                ctx.same(out, torch.cat(p))
        with ctx.case(f"reduce_scatter_tensor, device={device}"):
            wide = [ctx.inputs(torch.float32, (ctx.size * n,), 50 + n) for n in (1, 5, 1000)]
            outs = [torch.zeros(n) for n in (1, 5, 1000)]
            run(
                lambda o=outs, w=wide: [
                    dist.reduce_scatter_tensor(a, b[ctx.rank]) for a, b in zip(o, w, strict=True)
                ]
            )
            for out, parts_ in zip(outs, wide, strict=True):
                mine_ = [p.chunk(ctx.size)[ctx.rank] for p in parts_]
                ctx.same(out, arith.reduced("SUM", mine_))


def broken_batch(ctx: Ctx, group: dist.ProcessGroup | None, values: list[torch.Tensor]) -> None:
    """The first message of the batch is valid, and the second one is refused."""
    ops = [
        dist.P2POp(dist.isend, values[0], (ctx.rank + 1) % ctx.size, group),
        dist.P2POp(dist.irecv, values[1], (ctx.rank - 1) % ctx.size, group),
    ]
    ops[1].tensor = None  # type: ignore[assignment]
    dist.batch_isend_irecv(ops)


def broken_body(ctx: Ctx, group: dist.ProcessGroup | None, values: list[torch.Tensor]) -> None:
    with _coalescing_manager(group):
        dist.all_reduce(values[0], group=group)
        raise KeyError("in the middle")


def broken_body_on_device(
    ctx: Ctx, group: dist.ProcessGroup | None, values: list[torch.Tensor]
) -> None:
    with _coalescing_manager(group, ctx.device):
        dist.all_reduce(values[0], group=group)
        dist.isend(values[1], (ctx.rank + 1) % ctx.size, group=group)
        raise KeyboardInterrupt


def broken_start(ctx: Ctx, group: dist.ProcessGroup | None, values: list[torch.Tensor]) -> None:
    with _coalescing_manager(group, torch.device("meta")):  # no backend supports it
        dist.all_reduce(values[0], group=group)


def broken_end(ctx: Ctx, group: dist.ProcessGroup | None, values: list[torch.Tensor]) -> None:
    with _coalescing_manager(group, ctx.device):
        dist.all_reduce(values[0], group=group)
        dist.all_reduce(values[1].to(torch.int64), group=group)  # another dtype


def broken_nested(ctx: Ctx, group: dist.ProcessGroup | None, values: list[torch.Tensor]) -> None:
    with _coalescing_manager(group, ctx.device):
        broken_batch(ctx, group, values)


BROKEN = (
    broken_batch,
    broken_body,
    broken_body_on_device,
    broken_start,
    broken_end,
    broken_nested,
)


def after_a_broken_block(ctx: Ctx, group: dist.ProcessGroup | None = None) -> None:
    """The group works as before; operations of the block are neither run nor kept."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    backend = (group or dist.group.WORLD)._get_backend(ctx.device)
    for broken in BROKEN:
        with ctx.case(broken.__name__):
            values = [torch.full((3,), -1.0, device=ctx.device) for _ in range(2)]
            dropped = [weakref.ref(value) for value in values]
            try:
                broken(ctx, group, values)
            except (KeyError, KeyboardInterrupt, RuntimeError, TypeError, ValueError):
                pass
            else:
                ctx.fail("raised nothing")
            del values
            gc.collect()
            ctx.equal([ref() for ref in dropped], [None, None], "kept")

            x = torch.full((3,), float(ctx.rank), device=ctx.device)
            dist.all_reduce(x, group=group)
            ctx.same(x.cpu(), torch.full((3,), float(sum(range(ctx.size)))))
            x, y = torch.full((3,), float(ctx.rank), device=ctx.device), torch.zeros_like(x)
            ring = [dist.P2POp(dist.isend, x, right, group), dist.P2POp(dist.irecv, y, left, group)]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
            ctx.same(y.cpu(), torch.full((3,), float(left)))
            with _coalescing_manager(group):
                dist.all_reduce(x, group=group)
            ctx.same(x.cpu(), torch.full((3,), float(sum(range(ctx.size)))))
            if backend.supports_coalescing:
                with ctx.raises(RuntimeError, "nothing was started"):
                    backend._end_coalescing()


def nested_blocks(ctx: Ctx) -> None:
    """The inner block is refused, and the outer one continues."""
    x, y = (torch.full((3,), float(ctx.rank), device=ctx.device) for _ in range(2))
    with _coalescing_manager(device=ctx.device):
        dist.all_reduce(x)
        with ctx.raises(ValueError, "cannot be nested"), _coalescing_manager():
            pass
        dist.all_reduce(y)
    ctx.equal((float(x[0]), float(y[0])), (float(sum(range(ctx.size))),) * 2)


def blocks_of_two_threads(ctx: Ctx) -> None:
    """A block belongs to the thread that opened it."""
    mine, theirs, blocks = (torch.full((3,), float(ctx.rank), device=ctx.device) for _ in range(3))
    got = torch.zeros(3, device=ctx.device)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    total = float(sum(range(ctx.size)))
    problems: list[object] = []

    def other_thread() -> None:
        try:
            dist.all_reduce(theirs)
            problems.extend((float(theirs[0]) != total and ["not reduced at once"]) or [])
            with _coalescing_manager():
                dist.all_reduce(blocks)
            ring = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, got, left)]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
        except Exception as error:
            problems.append(error)

    with _coalescing_manager(device=ctx.device):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        dist.all_reduce(mine)
    ctx.equal(problems, [])
    ctx.equal([float(x[0]) for x in (mine, theirs, blocks)], [total] * 3)
    ctx.equal(float(got[0]), float(left))
