"""torch.compile, AOT autograd and make_fx of programs with collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import arith
from worlds.training import close, compare, model, reference, train
from worlds.worker import Ctx

# Inductor compiles C++, which is slow; the collectives are lowered before it.
BACKEND = "aot_eager"


def step(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    y = funcol.all_reduce(x @ weight, "sum", group)
    z = funcol.all_gather_tensor(y, 0, group)
    return funcol.reduce_scatter_tensor(z * 2, "sum", 0, group).sum(1)


def compiled(ctx: Ctx) -> None:
    group = dist.group.WORLD
    weight = arith.values(torch.float32, (6, 3), 1)
    inputs = ctx.inputs(torch.float32, (4, 6))
    x = inputs[ctx.rank].clamp(-3, 3)
    want = step(x, weight, group)
    torch._dynamo.reset()
    got = torch.compile(step, backend=BACKEND, fullgraph=True)(x, weight, group)
    close(ctx, got, want)


@pytest.mark.worlds(2, 3)
def test_functional_collectives_in_one_graph(world):
    world.run(compiled)


def traceable(ctx: Ctx) -> None:
    """Dynamo itself makes the in-place collectives of torch.distributed functional."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(ctx.size * y.shape[0], y.shape[1])
        dist.all_gather_into_tensor(out, y)
        piece = torch.empty_like(y)
        dist.reduce_scatter_tensor(piece, out)
        return piece + 1

    x = torch.full((3, 2), float(ctx.rank + 1))
    torch._dynamo.reset()
    got = torch.compile(body, backend=BACKEND, fullgraph=True)(x.clone())
    ctx.same(got, body(x))


@pytest.mark.worlds(2)
def test_collectives_in_place(world):
    world.run(traceable)


def graph_of_aot(ctx: Ctx) -> None:
    """make_fx and aot_function record the collectives as operators, and the graph runs."""
    from functorch.compile import aot_function, make_boxed_func
    from torch.fx.experimental.proxy_tensor import make_fx

    group = dist.group.WORLD
    weight = arith.values(torch.float32, (6, 3), 1)
    x = ctx.inputs(torch.float32, (4, 6))[ctx.rank].clamp(-3, 3)
    graph = make_fx(lambda a, b: step(a, b, group))(x, weight)
    names = [str(node.target) for node in graph.graph.nodes]
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        ctx.equal(any(name in each for each in names), True, f"{name} in {names}")
    close(ctx, graph(x, weight), step(x, weight, group))

    seen: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    with ctx.case("aot_function"):
        got = aot_function(lambda a, b: step(a, b, group), compiler)(x, weight)
        close(ctx, got, step(x, weight, group))
        ctx.equal(any("all_reduce" in each for each in seen), True, str(seen))
    with ctx.case("gradients"):
        w = weight.clone().requires_grad_()
        dist_nn.all_reduce((x @ w).square().sum()).backward()
        want = weight.clone().requires_grad_()
        # Every rank's loss is the sum of all ranks' losses, hence the factor.
        ((x @ want).square().sum() * ctx.size).backward()
        close(ctx, w.grad, want.grad, "gradient", 1e-4)


@pytest.mark.worlds(2)
def test_aot(world):
    world.run(graph_of_aot)


def training(ctx: Ctx) -> None:
    wanted = reference(ctx)
    with ctx.case("DDP, compiled inside"):
        torch._dynamo.reset()
        net = model()
        train(torch.compile(DistributedDataParallel(net), backend=BACKEND), [ctx.rank])
        compare(ctx, net, wanted)
    with ctx.case("DDP, compiled outside"):
        torch._dynamo.reset()
        net = model()
        wrapped = DistributedDataParallel(torch.compile(net, backend=BACKEND))
        train(wrapped, [ctx.rank])
        compare(ctx, net, wanted)
    with ctx.case("FSDP2"):
        torch._dynamo.reset()
        net = model()
        for layer in net:
            if isinstance(layer, nn.Linear):
                layer.compile(backend=BACKEND)
                fully_shard(layer)
        fully_shard(net)
        train(net, [ctx.rank])
        compare(ctx, net, wanted)


@pytest.mark.worlds(2)
def test_compiled_training(world):
    world.run(training)


def inductor(ctx: Ctx) -> None:
    group = dist.group.WORLD
    weight = arith.values(torch.float32, (6, 3), 1)
    x = ctx.inputs(torch.float32, (4, 6))[ctx.rank].clamp(-3, 3)
    torch._dynamo.reset()
    got = torch.compile(step)(x, weight, group)
    close(ctx, got, step(x, weight, group), "inductor", 1e-4)


@pytest.mark.worlds(2, transports=["shm"])
def test_inductor(world):
    world.run(inductor, deadline=180)  # it compiles C++
