"""DTensor, tensor, sequence, loss and context parallelism, meshes of several dimensions.

Results are compared with those of the same computation in one process.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from worlds import arith
from worlds.training import close
from worlds.worker import Ctx

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(Block(), Block())


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return arith.values(torch.float32, (batch, length, WIDTH), 5).clamp(-3, 3)


def train(net: nn.Module, x: torch.Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()


def compare(ctx: Ctx, net: nn.Module, x: torch.Tensor, what: str) -> None:
    wanted = blocks()
    train(wanted, x)
    for (name, got), want in zip(net.named_parameters(), wanted.parameters(), strict=True):
        close(ctx, got, want, f"{what} {name}", 1e-4)


def mesh_of(ctx: Ctx, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    assert math.prod(shape) == ctx.size
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def tensor_parallel(ctx: Ctx) -> None:
    mesh = mesh_of(ctx, ctx.size)
    with ctx.case("columns and rows"):
        net = blocks()
        for block in net:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        ctx.equal(isinstance(net[0].up.weight, DTensor), True)
        train(net, tokens())
        compare(ctx, net, tokens(), "")
    with ctx.case("sequence"):
        net = blocks()
        for i, block in enumerate(net):
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)
            if i == 0:
                parallelize_module(
                    block,
                    mesh,
                    PrepareModuleInput(
                        input_layouts=Replicate(),
                        desired_input_layouts=Shard(1),
                        use_local_output=True,
                    ),
                )
        # The loss of each rank is that of its part of the sequence.
        part = tokens().shape[1] // ctx.size
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            out = net(tokens())
            ctx.equal(out.shape[1], part)
            ((out - 1).square().mean() / ctx.size).backward()
            for p in net.parameters():  # each norm has only a part of the sequence
                if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial():
                    p.grad = p.grad.redistribute(placements=[Replicate()])
            optimizer.step()
        compare(ctx, net, tokens(), "")


@pytest.mark.worlds(2, 3)
def test_tensor_parallel(world):
    world.run(tensor_parallel)


def losses(ctx: Ctx) -> None:
    """Cross entropy of logits whose classes are sharded over the ranks."""
    mesh = mesh_of(ctx, ctx.size)
    logits = arith.values(torch.float32, (8, 6 * ctx.size), 3).clamp(-5, 5)
    target = torch.arange(8) % logits.shape[1]
    want = logits.clone().requires_grad_()
    F.cross_entropy(want, target).backward()
    got = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(got, target)
        loss.backward()
    close(ctx, loss, F.cross_entropy(logits, target), "loss")
    close(ctx, got.grad, want.grad, "gradient")


@pytest.mark.worlds(2, 3)
def test_loss_parallel(world):
    world.run(losses)


def dtensors(ctx: Ctx) -> None:
    """Each redistribution from one placement to another, and arithmetic across placements."""
    mesh = mesh_of(ctx, ctx.size)
    whole = arith.values(torch.float32, (7, 5), 3)  # uneven on all sizes
    placements = (Replicate(), Shard(0), Shard(1))
    for source in placements:
        for target in placements:
            moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            ctx.same(moved.full_tensor(), whole, f"{source} -> {target}")
    ones = DTensor.from_local(torch.full((4 * ctx.size, 3), float(ctx.rank)), mesh, [Partial()])
    total = torch.full((4 * ctx.size, 3), float(sum(range(ctx.size))))
    ctx.same(ones.full_tensor(), total, "partial")
    ctx.same(ones.redistribute(mesh, [Shard(0)]).full_tensor(), total, "partial -> shard")
    average = DTensor.from_local(torch.full((3,), float(ctx.rank)), mesh, [Partial("avg")])
    close(ctx, average, torch.full((3,), (ctx.size - 1) / 2), "average")
    a = distribute_tensor(whole, mesh, [Shard(1)])
    b = distribute_tensor(whole.T.contiguous(), mesh, [Shard(0)])
    close(ctx, a @ b, whole @ whole.T, "matmul")
    close(ctx, a.sum(), whole.sum(), "sum", 1e-4)
    close(ctx, a.softmax(1), whole.softmax(1), "softmax")
    ctx.same(a.max().full_tensor(), whole.max(), "max")
    ctx.equal(torch.distributed.tensor.ones(6, device_mesh=mesh, placements=[Shard(0)]).sum(), 6.0)
    even = arith.values(torch.float32, (4, 2 * ctx.size), 4)
    double = local_map(lambda x: x * 2, out_placements=[Shard(1)], device_mesh=mesh)
    doubled = double(distribute_tensor(even, mesh, [Shard(1)]))
    ctx.same(doubled.full_tensor(), even * 2, "local_map")


@pytest.mark.worlds(1, 2, 3)
def test_dtensor(world):
    world.run(dtensors)


def replicated(ctx: Ctx) -> None:
    """distribute_module broadcasts the weights of rank 0."""
    mesh = mesh_of(ctx, ctx.size)
    torch.manual_seed(ctx.rank)
    net = distribute_module(nn.Linear(6, 6 * ctx.size), mesh)
    parts = [torch.zeros_like(net.weight.to_local()) for _ in range(ctx.size)]
    dist.all_gather(parts, net.weight.detach().to_local())
    for part in parts[1:]:
        ctx.same(part, parts[0], "a replicated weight")


@pytest.mark.worlds(2)
def test_distribute_module(world):
    world.run(replicated)


def meshes(ctx: Ctx) -> None:
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("data", "shard", "tensor"))
    ctx.equal(cube.ndim, 3)
    ctx.equal(list(cube.get_coordinate()), [ctx.rank // 2, ctx.rank % 2, 0])
    for name, members in (
        ("data", [ctx.rank % 2, ctx.rank % 2 + 2]),
        ("shard", [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1]),
        ("tensor", [ctx.rank]),
    ):
        group = cube.get_group(name)
        ctx.equal(dist.get_process_group_ranks(group), members)
        ctx.equal(dist.get_backend(group), ctx.backend)
        ctx.equal(dist.get_group_rank(group, ctx.rank), members.index(ctx.rank))
        ctx.equal(dist.get_global_rank(group, members.index(ctx.rank)), ctx.rank)
        x = torch.tensor([float(ctx.rank)])
        dist.all_reduce(x, group=group)
        ctx.equal(float(x), float(sum(members)), name)
    flat = cube["data", "shard"]._flatten("both")
    x = torch.ones(1)
    dist.all_reduce(x, group=flat.get_group())
    ctx.equal(float(x), 4.0, "flattened")
    by_hand = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    rows = {3: [3, 1], 1: [3, 1], 2: [2, 0], 0: [2, 0]}
    ctx.equal(sorted(dist.get_process_group_ranks(by_hand.get_group("b"))), sorted(rows[ctx.rank]))
    from_group = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    ctx.equal(from_group.size(), 4)


@pytest.mark.worlds(4)
def test_meshes(world):
    world.run(meshes)


def two_dimensions(ctx: Ctx) -> None:
    """Tensor parallel within a row, FSDP2 or DDP along the columns."""
    mesh = mesh_of(ctx, 2, 2, names=("data", "tensor"))
    x = tokens(batch=4)
    mine = x.chunk(2)[mesh.get_local_rank("data")]

    def layers() -> nn.Module:
        net = blocks()
        for block in net:
            parallelize_module(
                block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        return net

    net = layers()
    for block in net:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    train(net, mine)
    compare(ctx, net, x, "FSDP2")


@pytest.mark.worlds(4)
def test_fsdp2_with_tensor_parallel(world):
    world.run(two_dimensions)


class TwoHalves(nn.Module):
    """A model whose halves are on different devices of one rank; here both are the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to("cpu"))).to("cpu"))


def model_in_ddp(ctx: Ctx) -> None:
    x = tokens(batch=ctx.size)
    wanted, net = TwoHalves(), TwoHalves()
    train(wanted, x)
    train(DistributedDataParallel(net), x[ctx.rank : ctx.rank + 1])
    for (name, got), want in zip(net.named_parameters(), wanted.parameters(), strict=True):
        close(ctx, got, want, name, 1e-4)


@pytest.mark.worlds(2)
def test_model_parallel_in_ddp(world):
    world.run(model_in_ddp)


def attention(ctx: Ctx) -> None:
    """Context parallelism shards buffers and puts them together again. Its attention kernels need
    an accelerator."""
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = mesh_of(ctx, ctx.size)
    whole = arith.values(torch.float32, (1, 2, 8 * ctx.size, 4), 9)
    x = whole.clone()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        ctx.equal(x.shape[2], 8, "of the sequence, on each rank")
        mine = x.clone()
    ctx.same(x, whole, "afterwards")
    (again,) = context_parallel_unshard(mesh, [mine], [2])
    ctx.same(again.contiguous(), whole, "put together")


@pytest.mark.worlds(2)
def test_context_parallel_buffers(world):
    world.run(attention)
