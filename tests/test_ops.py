"""torch.ops.mycoll: the collectives as operators, which take the name of the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from faults.harness import Seen, answers, attempt, kill_one
from worlds import arith, warm
from worlds.worker import Ctx

# Inductor compiles C++, which is slow; the graph is the same.
BACKEND = "aot_eager"
HALVES_AND_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, 1, 2, 7, 64, 1000, 4096, 65_536, 65_537, 400_001)


def name_of(group: dist.ProcessGroup | None = None) -> str:
    return (group or dist.group.WORLD).group_name


def plain(ctx: Ctx) -> None:
    """The results have the same bits as those of torch.distributed."""
    ops, group = torch.ops.mycoll, name_of()
    for dtype in arith.REDUCIBLE:
        for numel in SIZES if dtype in HALVES_AND_FLOAT else (1, 1000):
            with ctx.case(f"{arith.short(dtype)} {numel}"):
                x = ctx.inputs(dtype, numel, numel)[ctx.rank]
                want = x.clone()
                dist.all_reduce(want)
                got = x.clone()
                ctx.equal(ops.all_reduce_(got, group), None)
                ctx.same(got, want, "all_reduce_")
                kept = x.clone()
                ctx.same(ops.all_reduce(x, group), want, "all_reduce")
                ctx.same(x, kept, "the input of all_reduce")

                rows = ctx.inputs(dtype, (2 * ctx.size, numel // 8 + 1), numel)[ctx.rank]
                every = torch.empty(2 * ctx.size**2, numel // 8 + 1, dtype=dtype)
                dist.all_gather_into_tensor(every, rows)
                ctx.same(ops.all_gather(rows, group), every, "all_gather")
                part = torch.empty(2, numel // 8 + 1, dtype=dtype)
                dist.reduce_scatter_tensor(part, rows)
                ctx.same(ops.reduce_scatter(rows, group), part, "reduce_scatter")
    with ctx.case("a type that is only moved"):
        x = torch.full((3,), ctx.rank, dtype=torch.int16).view(torch.uint16)
        ctx.equal(ops.all_gather(x, group).shape, (3 * ctx.size,))


@pytest.mark.worlds(1, 2, 3, tcp=[3])
def test_bits_equal_those_of_torch_distributed(world, mycoll_only):
    world.run(plain)


def in_any_layout(ctx: Ctx) -> None:
    ops, group = torch.ops.mycoll, name_of()
    parts = ctx.inputs(torch.float32, (6, 4))
    mine, total = parts[ctx.rank], arith.reduced("SUM", parts)
    with ctx.case("transposed"):
        got = ops.all_reduce(mine.t(), group)
        ctx.same(got, total.t().contiguous())
        ctx.equal(got.is_contiguous(), True)
        x = mine.clone().t()
        ops.all_reduce_(x, group)
        ctx.same(x, total.t())
        ctx.same(ops.all_gather(mine.t(), group), torch.cat([p.t() for p in parts]))
    with ctx.case("every other column"):
        x = mine.clone()
        ops.all_reduce_(x[:, ::2], group)
        want = mine.clone()
        want[:, ::2] = total[:, ::2]
        ctx.same(x, want)
    with ctx.case("expanded"):
        row = mine[:1].expand(6, 4)
        ctx.same(ops.all_reduce(row, group), total[:1].expand(6, 4).contiguous())
    with ctx.case("inference tensors"), torch.inference_mode():
        x = mine.clone()
        ops.all_reduce_(x, group)
        ctx.same(x, total)
        ctx.equal(ops.all_reduce(mine, group).is_inference(), True)
    with ctx.case("a gradient that is not needed"), torch.no_grad():
        x = mine.clone().requires_grad_()
        ctx.same(ops.all_reduce(x, group), total)
        version = x._version
        ops.all_reduce_(x, group)
        ctx.equal(x._version, version + 1)


@pytest.mark.worlds(2, 3)
def test_any_layout(world, mycoll_only):
    world.run(in_any_layout)


def layer(x: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    """All operators in one graph."""
    ops = torch.ops.mycoll
    y = torch.sin(x)
    ops.all_reduce_(y, group)
    z = ops.all_reduce(y * 2, group)
    every = ops.all_gather(z, group)
    return y, z, ops.reduce_scatter(every + 1, group)


def layer_arguments(ctx: Ctx, rows: int = 6) -> tuple:
    x = ctx.inputs(torch.bfloat16, (rows, 32))[ctx.rank].clamp(-3, 3)
    return x, name_of()


def compiled(ctx: Ctx, compiler: str) -> None:
    for dynamic in (False, True):
        with ctx.case(f"dynamic={dynamic}"):
            torch._dynamo.reset()
            run = torch.compile(layer, backend=compiler, fullgraph=True, dynamic=dynamic)
            for rows in (6, 10):
                arguments = layer_arguments(ctx, rows)
                for got, want in zip(run(*arguments), layer(*arguments), strict=True):
                    torch.testing.assert_close(got, want)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("compiler", [BACKEND, "inductor"])
def test_in_one_graph(world, mycoll_only, compiler):
    world.run(compiled, compiler, deadline=180)  # it compiles C++


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group = name_of()

    def forward(self, x: torch.Tensor) -> tuple:
        return layer(x, self.group)


def exported(ctx: Ctx) -> None:
    arguments = layer_arguments(ctx)[:1]
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(Layer(), arguments, dynamic_shapes=(rows,))
    for one in (program, program.run_decompositions()):
        for count in (6, 10):
            arguments = layer_arguments(ctx, count)[:1]
            for got, want in zip(one.module()(*arguments), Layer()(*arguments), strict=True):
                ctx.same(got, want)


@pytest.mark.worlds(2)
def test_export(world, mycoll_only):
    world.run(exported)


def without_memory(ctx: Ctx) -> None:
    """The meta kernels return the shapes, dtypes and strides of the real results."""
    arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in layer_arguments(ctx)]
    for fake, real in zip(layer(*arguments), layer(*layer_arguments(ctx)), strict=True):
        ctx.equal((fake.shape, fake.dtype, fake.stride()), (real.shape, real.dtype, real.stride()))
        ctx.equal(fake.is_meta, True)


@pytest.mark.worlds(1, 3)
def test_meta_kernels(world, mycoll_only):
    world.run(without_memory)


def checked_by_torch(ctx: Ctx) -> None:
    x, group = layer_arguments(ctx)
    ops = torch.ops.mycoll
    for op in (ops.all_reduce_, ops.all_reduce, ops.all_gather, ops.reduce_scatter):
        with ctx.case(str(op)):
            torch.library.opcheck(op.default, (x.clone(), group))


@pytest.mark.worlds(1, 2)
def test_opcheck(world, mycoll_only):
    world.run(checked_by_torch)


def beside_asynchronous_calls(ctx: Ctx) -> None:
    """An operator runs after the calls before it."""
    group = name_of()
    first, second = torch.ones(300_000), torch.ones(8)
    work = dist.all_reduce(first, async_op=True)
    torch.ops.mycoll.all_reduce_(second, group)
    third = torch.ones(8)
    last = dist.all_reduce(third, async_op=True)
    again = torch.ops.mycoll.all_reduce(torch.ones(8), group)
    work.wait()
    last.wait()
    for got in (first, second, third, again):
        ctx.same(got, torch.full_like(got, ctx.size))
    with ctx.case("in the order of a future's callback"):
        order = []
        x = torch.ones(4)
        future = dist.all_reduce(x, async_op=True).get_future()
        future.then(lambda _: order.append("callback"))
        torch.ops.mycoll.all_reduce_(x, group)
        order.append("operator")
        ctx.equal(order, ["callback", "operator"])
        ctx.same(x, torch.full((4,), float(ctx.size**2)))


@pytest.mark.worlds(2, tcp=[2])
def test_order(world, mycoll_only):
    world.run(beside_asynchronous_calls)


def refusals(ctx: Ctx) -> None:
    import mycoll

    # Since 2.15 torch converts an operator's exception to one of its own.
    refused = mycoll.ArgumentError if torch.__version__ < "2.15" else ValueError
    ops, group = torch.ops.mycoll, name_of()
    x = torch.ones(4, 8)
    with ctx.case("no such group"), ctx.raises(RuntimeError, "absent"):
        ops.all_reduce_(x, "absent")
    gloo = dist.new_group(backend="gloo")
    with ctx.case("another backend"), ctx.raises(refused, "all_reduce_", "'gloo'"):
        ops.all_reduce_(x, gloo.group_name)
    with ctx.case("a scalar"), ctx.raises(refused, "all_gather", "scalar"):
        ops.all_gather(torch.tensor(1.0), group)
    if ctx.size > 1:
        with ctx.case("rows"), ctx.raises(refused, "reduce_scatter", "multiple"):
            ops.reduce_scatter(torch.ones(ctx.size + 1), group)
    with ctx.case("overlapping"), ctx.raises(refused, "must not share memory"):
        ops.all_reduce_(torch.ones(8).as_strided((4, 4), (1, 1)), group)
    with ctx.case("another device"), ctx.raises(NotImplementedError, "mycoll::all_reduce"):
        ops.all_reduce(torch.ones(4).to_sparse(), group)
    with ctx.case("a gradient"), ctx.raises(refused, "no_grad", "all_reduce"):
        ops.all_reduce(x.clone().requires_grad_(), group)

    with ctx.case("the group remains usable"):
        ctx.same(ops.all_reduce(x, group), x * ctx.size)


@pytest.mark.worlds(1, 2)
def test_refusals(world, mycoll_only):
    world.run(refusals)


def in_a_group_of_some(ctx: Ctx) -> None:
    pair = dist.new_group([0, 2])
    if ctx.rank != 1:
        got = torch.ops.mycoll.all_reduce(torch.full((3,), float(ctx.rank)), name_of(pair))
        ctx.same(got, torch.full((3,), 2.0))
    # torch's own functional collectives use the same name.
    got = torch.ops.mycoll.all_reduce(torch.ones(2), name_of())
    ctx.same(got, funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0)


@pytest.mark.worlds(3)
def test_groups(world, mycoll_only):
    world.run(in_a_group_of_some)


def disagree(ctx: Ctx) -> Seen:
    group = name_of()
    torch.ops.mycoll.all_reduce(torch.ones(4), group)
    return attempt(lambda: torch.ops.mycoll.all_reduce(torch.ones(1000 + ctx.rank), group))


def test_different_shapes(reused, transport, mycoll_only):
    for seen in reused(2, transport).run_in_group(disagree):
        assert seen.kind == "DistBackendError", seen
        assert "1000" in seen.text and "1001" in seen.text, seen.text


def late(ctx: Ctx) -> Seen | None:
    group = name_of()
    x = torch.ones(2, 8)
    torch.ops.mycoll.all_reduce_(x, group)
    if ctx.rank == 1:
        return None
    return attempt(lambda: torch.ops.mycoll.all_reduce(x, group))


def test_a_rank_that_makes_no_call(reused, transport, mycoll_only):
    seen = reused(2, transport).run_in_group(late, timeout=2.0)[0]
    assert seen.kind == "DistBackendError", seen
    assert "rank 1" in seen.text, seen.text


def dies(ctx: Ctx) -> Seen:
    group = name_of()
    x = torch.ones(4096)
    torch.ops.mycoll.all_reduce_(x, group)
    kill_one(ctx, 1)
    return attempt(lambda: torch.ops.mycoll.all_reduce_(x, group))


def test_a_dead_rank(stage):
    with stage.world(3) as world:
        world.start(dies)
        for seen in answers(world, (1,)).values():
            assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
            assert "rank 1 (" in seen.text and "has ended (killed" in seen.text, seen.text


PROGRAM = """
import sys
import torch
import torch.distributed as dist
ops = torch.ops.mycoll
assert "mycoll._C" not in sys.modules and not hasattr(ops, "all_reduce_")
dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
print(ops.all_reduce_.default._schema)
assert not hasattr(ops, "no_such_operator")
dist.destroy_process_group()
"""


def test_operators_exist_since_the_first_group(mycoll_only):
    """Importing torch does not define them, and an earlier lookup does not hide them."""
    program = warm.start(PROGRAM)
    out, error = program.communicate(60)
    assert program.returncode == 0, error
    assert out.strip() == "mycoll::all_reduce_(Tensor(a!) x, str group) -> ()"
