"""DistributedDataParallel with its options."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from jobs.ddp import accumulated, ddp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from worlds.training import (
    batch,
    beside_gloo,
    compare,
    model,
    sgd,
    train,
)
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


@pytest.mark.worlds(1, 2, 3)
def test_ddp(world):
    digests = world.run(ddp)
    assert len(set(digests)) == 1, "the weights of the ranks differ"


class Branching(nn.Module):
    """Each rank uses one of two arms, depending on the step; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.arms = nn.ModuleList(nn.Linear(20, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, arm: int) -> torch.Tensor:
        return self.arms[arm](x)


def unused(ctx: Ctx) -> str:
    wanted = Branching()
    optimizer = sgd(wanted)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(ctx.size):
            x, y = batch(step, rank)
            (nn.functional.mse_loss(wanted(x, (step + rank) % 2), y) / ctx.size).backward()
        optimizer.step()
    for view in (False, True):
        net = Branching()
        wrapped = DistributedDataParallel(
            net, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        optimizer = sgd(net)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step, ctx.rank)
            nn.functional.mse_loss(wrapped(x, (step + ctx.rank) % 2), y).backward()
            optimizer.step()
        ctx.equal(net.arms[2].weight.grad, None, "gradient of an unused parameter")
        compare(ctx, net, wanted)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_unused_parameters(world):
    assert len(set(world.run(unused))) == 1


@pytest.mark.worlds(2, 3)
def test_no_sync(world):
    world.run(accumulated)


class Mixed(nn.Module):
    """Parameters of three dtypes: DDP makes buckets for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(20, 30, dtype=torch.float64)
        self.second = nn.Linear(30, 10, dtype=torch.bfloat16)
        self.third = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x.double()))
        return self.third(self.second(x.bfloat16()).float())


def mixed_dtypes(ctx: Ctx) -> None:
    def job(group: dist.ProcessGroup) -> list[torch.Tensor]:
        net = Mixed()
        train(DistributedDataParallel(net, process_group=group), [ctx.rank])
        ctx.equal({p.grad.dtype for p in net.parameters()}, {p.dtype for p in net.parameters()})
        return list(net.parameters())

    beside_gloo(ctx, job, 2e-2)  # bfloat16


@pytest.mark.worlds(2)
def test_mixed_dtypes(world):
    world.run(mixed_dtypes)


def uneven(ctx: Ctx) -> str:
    """join(): ranks with different numbers of steps. Those that have finished contribute zeros."""
    for by_size in (True, False):
        wanted = model()
        optimizer = sgd(wanted)
        for step in range(1 + ctx.size):
            active = [r for r in range(ctx.size) if step < 2 + r]
            share = ctx.size if by_size else len(active)
            optimizer.zero_grad()
            for rank in active:
                x, y = batch(step, rank)
                (nn.functional.mse_loss(wanted(x), y) / share).backward()
            optimizer.step()
        net = model()
        wrapped = DistributedDataParallel(net)
        optimizer = sgd(net)
        with wrapped.join(divide_by_initial_world_size=by_size):
            for step in range(2 + ctx.rank):
                optimizer.zero_grad()
                x, y = batch(step, ctx.rank)
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
        dist.barrier()
        compare(ctx, net, wanted)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_join(world):
    assert len(set(world.run(uneven))) == 1


def joined_with_zero(ctx: Ctx) -> str:
    """Join with both DDP and ZeRO."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.01)
    with Join([wrapped, optimizer]):
        for step in range(2 + ctx.rank):
            optimizer.zero_grad()
            x, y = batch(step, ctx.rank)
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()
    for p in net.parameters():
        ctx.digest(p.detach())
    return ctx.digests()


@pytest.mark.worlds(2)
def test_join_of_several(world):
    assert len(set(world.run(joined_with_zero))) == 1


def thrown(ctx: Ctx) -> None:
    """With throw_on_early_termination, all ranks raise as soon as one has run out of data."""
    wrapped = DistributedDataParallel(model())
    with ctx.raises(RuntimeError, "exhausted"), wrapped.join(throw_on_early_termination=True):
        for step in range(2 + ctx.rank):
            x, y = batch(step, ctx.rank)
            nn.functional.mse_loss(wrapped(x), y).backward()


def test_join_that_throws(reused, transport):
    reused(2, transport).run_in_group(thrown)


def buffers(ctx: Ctx) -> str:
    """The running statistics of BatchNorm are those of rank 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    wrapped = DistributedDataParallel(net)
    for step in range(3):
        x, y = batch(step, ctx.rank)
        nn.functional.mse_loss(wrapped(x), y).backward()
    wrapped.eval()
    wrapped(batch(0, 0)[0])
    wrapped.train()
    wrapped(batch(9, 0)[0])  # starts with a broadcast of the buffers
    ctx.digest(net[1].running_mean)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_buffers(world):
    assert len(set(world.run(buffers))) == 1


def sync_batch_norm(ctx: Ctx) -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(20))
    with ctx.raises(ValueError, "GPU"):
        net(batch(0, ctx.rank)[0])


@pytest.mark.worlds(2)
def test_sync_batch_norm_is_for_accelerators(world):
    """See docs/compatibility.md. If torch accepts CPU tensors some day, test the result here."""
    world.run(sync_batch_norm)


def logging_data(ctx: Ctx) -> None:
    wrapped = DistributedDataParallel(model())
    train(wrapped, [ctx.rank])
    data = wrapped._get_ddp_logging_data()
    ctx.equal(data["world_size"], ctx.size)
    ctx.equal(data["backend_name"] in (ctx.backend, "custom"), True, str(data["backend_name"]))


@pytest.mark.worlds(2)
def test_logging_data(world):
    world.run(logging_data)


def shared_parameters(ctx: Ctx) -> str:
    def net() -> nn.Module:
        torch.manual_seed(1)
        shared = nn.Linear(20, 20)
        return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(20, 1))

    wanted = net()
    train(wanted, list(range(ctx.size)))
    mine = net()
    train(DistributedDataParallel(mine, bucket_cap_mb=0.0001), [ctx.rank])
    compare(ctx, mine, wanted)
    return ctx.digests()


@pytest.mark.worlds(2)
def test_shared_parameters(world):
    assert len(set(world.run(shared_parameters))) == 1


def several_at_once(ctx: Ctx) -> str:
    """Two DDP models in one backward pass, each with its own group."""
    groups = [dist.new_group() for _ in range(2)]
    first, second = (
        DistributedDataParallel(nn.Linear(20, 20), process_group=groups[0]),
        DistributedDataParallel(nn.Linear(20, 1), process_group=groups[1]),
    )
    for step in range(3):
        x, y = batch(step, ctx.rank)
        nn.functional.mse_loss(second(torch.tanh(first(x))), y).backward()
    for net in (first, second):
        for p in net.parameters():
            ctx.digest(p.grad)
    for group in groups:
        dist.destroy_process_group(group)
    return ctx.digests()


@pytest.mark.worlds(2, 3)
def test_two_models(world):
    assert len(set(world.run(several_at_once))) == 1


def early_stop(ctx: Ctx) -> list[float]:
    """A program that also averages metrics, and stops when rank 0 decides to."""
    net = DistributedDataParallel(model())
    means = []
    for step in range(10):
        x, y = batch(step, ctx.rank)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        means.append(float(mean))
        stop = torch.tensor([int(step == 4 and ctx.rank == 0)])
        dist.broadcast(stop, 0)
        if stop:
            break
    return means


@pytest.mark.worlds(2)
def test_early_stop(world):
    means = world.run(early_stop)
    assert len(means[0]) == 5
    assert means[0] == means[1]
