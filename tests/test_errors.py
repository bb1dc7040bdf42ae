"""Wrong arguments raise before anything is sent, and the group remains usable.

Only rank 0 makes the mistake, and the others do nothing. If it had sent anything or used a sequence
number, the following all_reduce would fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from worlds.worker import Ctx

ERRORS = (ValueError, RuntimeError, TypeError, IndexError, AssertionError)
META = torch.device("meta")


def f32(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def i64(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def meta(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=META)


Mistake = tuple[Callable[[], object], tuple[str, ...]]


def ranks(n: int) -> dict[str, Mistake]:
    """Ranks that do not exist; the text contains the rank."""
    x = f32(3)
    lists = [f32(3) for _ in range(n)]
    return {
        "broadcast": (lambda: dist.broadcast(x, 77), ("77",)),
        "broadcast negative": (lambda: dist.broadcast(x, -5), ("-5",)),
        "reduce": (lambda: dist.reduce(x, 77), ("77",)),
        "gather": (lambda: dist.gather(x, None, dst=77), ("77",)),
        "scatter": (lambda: dist.scatter(x, None, src=77), ("77",)),
        "scatter own": (lambda: dist.scatter(x, lists, src=77), ()),
        "send": (lambda: dist.send(x, 77), ("77",)),
        "isend": (lambda: dist.isend(x, n), (str(n),)),
        "recv": (lambda: dist.recv(x, 77), ("77",)),
        "irecv": (lambda: dist.irecv(x, 77), ("77",)),
    }


def lists(n: int) -> dict[str, Mistake]:
    """Lists of the wrong length."""
    x = f32(3)
    many = [f32(3) for _ in range(n + 1)]
    return {
        "all_gather short": (lambda: dist.all_gather(many[: n - 1], x), ()),
        "all_gather long": (lambda: dist.all_gather(many, x), ()),
        "gather short": (lambda: dist.gather(x, many[: n - 1], dst=0), ()),
        "gather long": (lambda: dist.gather(x, many, dst=0), ()),
        "gather none": (lambda: dist.gather(x, [], dst=0), ()),
        "scatter short": (lambda: dist.scatter(x, many[: n - 1], src=0), ()),
        "scatter long": (lambda: dist.scatter(x, many, src=0), ()),
        "reduce_scatter short": (lambda: dist.reduce_scatter(x, many[: n - 1]), ()),
        "reduce_scatter long": (lambda: dist.reduce_scatter(x, many), ()),
        "all_to_all short": (lambda: dist.all_to_all(many[: n - 1], many[:n]), ()),
        "all_to_all long": (lambda: dist.all_to_all(many[:n], many), ()),
        "all_to_all_single splits": (
            lambda: dist.all_to_all_single(f32(2 * n), f32(2 * n), [2] * (n + 1), [2] * n),
            (),
        ),
    }


def shapes(n: int) -> dict[str, Mistake]:
    x = f32(3)

    def some(shape: int) -> list[torch.Tensor]:
        return [f32(3) for _ in range(n - 1)] + [f32(shape)]

    return {
        "all_gather own": (lambda: dist.all_gather([f32(4), *some(3)[1:]], x), ()),
        "gather": (lambda: dist.gather(x, [f32(4), *some(3)[1:]], dst=0), ()),
        "scatter": (lambda: dist.scatter(x, [f32(4), *some(3)[1:]], src=0), ()),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(f32(3 * n + 1), x), ()),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(x, f32(3 * n + 1)), ()),
        "reduce_scatter own": (lambda: dist.reduce_scatter(x, [f32(4), *some(3)[1:]]), ()),
        "all_to_all_single": (lambda: dist.all_to_all_single(f32(n), f32(2 * n)), ()),
        "all_to_all_single rest": (lambda: dist.all_to_all_single(f32(n + 1), f32(n + 1)), ()),
        "splits too long": (
            lambda: dist.all_to_all_single(f32(2 * n), f32(2 * n), [2] * n, [3] * n),
            (),
        ),
        "splits too short": (
            lambda: dist.all_to_all_single(f32(2 * n), f32(2 * n), [1] * n, [2] * n),
            (),
        ),
        "splits beyond all numbers": (
            lambda: dist.all_to_all_single(
                f32(n, 2), f32(n, 2), [2**63 - 1, 2**63 - 1, n + 2, *[0] * (n - 3)], [1] * n
            ),
            (),
        ),
        "splits negative": (
            lambda: dist.all_to_all_single(f32(n), f32(n), [-1, 3] + [1] * (n - 2), [1] * n),
            (),
        ),
    }


def dtypes(n: int) -> dict[str, Mistake]:
    x = f32(3)

    def wrong() -> list[torch.Tensor]:
        return [f32(3) for _ in range(n - 1)] + [i64(3)]

    return {
        "all_gather": (lambda: dist.all_gather(wrong(), x), ()),
        "gather": (lambda: dist.gather(x, wrong(), dst=0), ()),
        "scatter": (lambda: dist.scatter(x, wrong(), src=0), ()),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(i64(3 * n), x), ()),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(x, i64(3 * n)), ()),
        "reduce_scatter": (lambda: dist.reduce_scatter(x, wrong()), ()),
        "all_to_all": (lambda: dist.all_to_all(wrong(), [f32(3) for _ in range(n)]), ()),
        "all_to_all_single": (lambda: dist.all_to_all_single(i64(n), f32(n)), ()),
    }


def devices(n: int) -> dict[str, Mistake]:
    x = f32(3)

    def mixed() -> list[torch.Tensor]:
        return [f32(3) for _ in range(n - 1)] + [meta(3)]

    # torch dispatches a call whose tensors are all on another device to another backend.
    return {
        "all_gather": (lambda: dist.all_gather(mixed(), x), ()),
        "gather": (lambda: dist.gather(x, mixed(), dst=0), ()),
        "scatter": (lambda: dist.scatter(x, mixed(), src=0), ()),
        "reduce_scatter": (lambda: dist.reduce_scatter(x, mixed()), ()),
    }


def meaningless(n: int) -> dict[str, Mistake]:
    """Reduce ops that are undefined for a dtype; the text names both."""
    red = dist.ReduceOp
    found: dict[str, Mistake] = {}
    for op, dtype in (
        ("BAND", torch.float32),
        ("BOR", torch.float64),
        ("BXOR", torch.bfloat16),
        ("BAND", torch.float16),
        ("MAX", torch.complex64),
        ("MIN", torch.complex128),
        ("BAND", torch.complex64),
        ("BXOR", torch.float8_e5m2),
    ):
        name = f"{op} {str(dtype).removeprefix('torch.')}"
        x, rows = torch.ones(3, dtype=dtype), torch.ones(3 * n, dtype=dtype)
        texts = (op,)
        kind = getattr(red, op)
        found[f"all_reduce {name}"] = (lambda x=x, k=kind: dist.all_reduce(x, op=k), texts)
        found[f"reduce {name}"] = (lambda x=x, k=kind: dist.reduce(x, 0, op=k), texts)
        found[f"reduce_scatter_tensor {name}"] = (
            lambda x=x, r=rows, k=kind: dist.reduce_scatter_tensor(x, r, op=k),
            texts,
        )
    return found


def outputs(n: int) -> dict[str, Mistake]:
    """Outputs that cannot be written to, because their elements share memory."""
    shared = torch.zeros(1).expand(6)
    found: dict[str, Mistake] = {
        "recv": (lambda: dist.recv(shared, 1), ()),
        "all_gather": (lambda: dist.all_gather([shared] + [f32(6)] * (n - 1), f32(6)), ()),
    }
    return found


def freed(n: int) -> dict[str, Mistake]:
    """Tensors whose storage is too small: FSDP frees parameters in this way."""
    x, strided = f32(1000), f32(1000, 2)[:, 1]
    x.untyped_storage().resize_(0)
    strided.untyped_storage().resize_(4000)
    rows, texts = [f32(1000) for _ in range(n)], ("0 of the 4000 bytes",)
    return {
        "all_reduce": (lambda: dist.all_reduce(x), texts),
        "broadcast": (lambda: dist.broadcast(x, 0), texts),
        "all_gather": (lambda: dist.all_gather(rows, x), texts),
        "reduce_scatter": (lambda: dist.reduce_scatter(x, rows), texts),
        "all_to_all": (lambda: dist.all_to_all([x] * n, rows), texts),
        "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([f32(3), x]), texts),
        "isend": (lambda: dist.isend(x, 1), texts),
        "strided": (lambda: dist.all_reduce(strided), ("4000 of the 8000 bytes",)),
    }


KINDS = (ranks, lists, shapes, dtypes, devices, meaningless, outputs, freed)


def mistakes(ctx: Ctx, kind: str) -> None:
    for name, (call, texts) in globals()[kind](ctx.size).items():
        full = f"errors/{kind}/{name}"
        if ctx.skips(full):
            continue
        with ctx.case(full):
            if ctx.rank == 0:
                with ctx.raises(ERRORS, *texts):
                    call()
            x = torch.full((5,), float(ctx.rank))
            dist.all_reduce(x)
            ctx.equal(float(x[0]), float(sum(range(ctx.size))), "the all_reduce after it")


@pytest.mark.parametrize("kind", [k.__name__ for k in KINDS])
@pytest.mark.worlds(2, 3)
def test_wrong_arguments(world, kind):
    world.run(mistakes, kind)


def destroyed(ctx: Ctx) -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    pg_backend = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(group)
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1), group=group),
        "send": lambda: dist.send(torch.ones(1), 1 - ctx.rank, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }.items():
        with ctx.case(name), ctx.raises(ERRORS):
            call()
    if not ctx.skips("errors/destroyed/backend"):
        with ctx.case("the backend object itself"), ctx.raises(ERRORS):
            pg_backend.allreduce([torch.ones(1)]).wait()
    x = torch.ones(1)
    dist.all_reduce(x)
    ctx.equal(float(x), float(ctx.size))


@pytest.mark.worlds(2)
def test_destroyed_group(world):
    world.run(destroyed)


def not_a_member(ctx: Ctx) -> None:
    """Calls on a group without this rank only warn, as torch documents."""
    group = dist.new_group([0, 1])
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    ctx.same(x, torch.ones(2) * (2 if ctx.rank < 2 else 1))
    if ctx.rank < 2:
        dist.destroy_process_group(group)


@pytest.mark.worlds(3)
def test_not_a_member(world):
    world.run(not_a_member)
