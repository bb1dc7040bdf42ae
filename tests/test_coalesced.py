"""Several tensors in one call, and `_coalescing_manager`."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from jobs.coalesced import (
    after_a_broken_block,
    blocks_of_two_threads,
    coalesced_calls,
    manager,
    nested_blocks,
)
from torch.distributed.distributed_c10d import _coalescing_manager
from worlds.worker import Ctx


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.worlds(1, 2, 3, tcp=(3,))
def test_coalesced_calls(world, mode):
    world.run(coalesced_calls, mode)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.worlds(1, 2, 3, tcp=(3,))
def test_coalescing_manager(world, mode):
    world.run(manager, mode)


def manager_of_mixed_ops(ctx: Ctx) -> None:
    """Different operations in one block, with a device: each is issued in turn."""
    x, y = torch.full((5,), float(ctx.rank)), torch.full((3,), float(ctx.rank))
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(y, 1)
        dist.all_reduce(x)
    ctx.same(y, torch.ones(3))
    ctx.equal(float(x[0]), float(sum(range(ctx.size))))


@pytest.mark.worlds(2)
def test_coalescing_manager_of_mixed_ops(world):
    world.run(manager_of_mixed_ops)


def block_of_others(ctx: Ctx) -> None:
    """Like torch's collectives, a block of a group does nothing on ranks outside the group."""
    group = dist.new_group([0])
    x = torch.ones(3)
    with _coalescing_manager(group=group):
        dist.all_reduce(x, group=group)
    dist.barrier()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.worlds(2)
def test_a_block_of_a_group_of_others(world):
    world.run(block_of_others)


# --- blocks that raise


@pytest.mark.worlds(2, 3, tcp=(3,))
def test_an_exception_in_a_block(world):
    world.run(after_a_broken_block)


@pytest.mark.worlds(2)
def test_nested_blocks(world):
    world.run(nested_blocks)


@pytest.mark.worlds(2)
def test_blocks_of_two_threads(world):
    world.run(blocks_of_two_threads)


def destroyed_in_a_block(ctx: Ctx) -> None:
    """torch drops the operations, and then does not find the block at its end."""
    group = dist.new_group()
    is_destroyed = False
    with pytest.raises(KeyError), _coalescing_manager(group):
        dist.all_reduce(torch.ones(3), group=group)
        with pytest.warns(UserWarning, match="haven't been launched"):
            dist.destroy_process_group(group)
        is_destroyed = True
    assert is_destroyed


@pytest.mark.worlds(2)
def test_a_group_that_is_destroyed_in_a_block(world):
    world.run(destroyed_in_a_block)


def tensors_that_share_memory(ctx: Ctx) -> None:
    """Each tensor is reduced with its values before the call, for any size."""
    total = float(sum(range(1, ctx.size + 1)))
    for count in (4, 100_000):
        x = torch.full((count + 2,), ctx.rank + 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced([x[1:-1], x[1:-1], x[2:], x[:-2]])
        ctx.same(x, torch.full((count + 2,), total), f"of {count}")


@pytest.mark.worlds(2, 3)
def test_tensors_that_share_memory(world):
    world.run(tensors_that_share_memory)


def lazily_conjugated_beside_others(ctx: Ctx) -> None:
    """Several tensors in one call, one of which is lazily conjugated."""
    first = torch.full((5,), 1 + 2j)
    second = torch.full((5,), 3 + 4j).conj()
    third = torch.full((5,), 5 + 0j)
    wanted = [x.resolve_conj() * ctx.size for x in (first, second, third)]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.allreduce_coalesced([first, second, third]).wait()
    for i, got in enumerate((first, second, third)):
        ctx.same(got.resolve_conj(), wanted[i], f"tensor {i}")


@pytest.mark.worlds(1, 2)
def test_a_lazily_conjugated_tensor_beside_others(world, mycoll_only):
    world.run(lazily_conjugated_beside_others)
