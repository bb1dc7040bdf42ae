"""Tensors that ranks of a host read in place: shared tensors, and all tensors with single copy."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import io
import itertools
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import mycoll
import pytest
import torch
import torch.distributed as dist
from faults.harness import Seen, answers, attempt, kill_one
from mycoll._native import native
from torch.nn import Conv2d, Linear, Sequential
from torch.nn.parallel import DistributedDataParallel
from worlds import arith
from worlds.worker import Ctx

MIB = 1 << 20
# Below the smallest size that is offered to other ranks, slightly above it, and many rounds.
NUMELS = (1000, 50_001, 700_003)


def is_shared(tensor: torch.Tensor) -> bool:
    return native()._is_shared_memory(tensor.data_ptr(), tensor.nbytes)


def bytes_in_use() -> int:
    gc.collect()
    return native()._shared_memory_usage()[1]


def shared_copy(tensor: torch.Tensor) -> torch.Tensor:
    return mycoll.empty_like(tensor).copy_(tensor)


# --- one process


def test_shared_tensors_are_ordinary_tensors():
    before = bytes_in_use()
    a = mycoll.empty(100, 50, dtype=torch.bfloat16)
    b = mycoll.zeros(3, 4)
    c = mycoll.empty_like(b, dtype=torch.int32)
    assert is_shared(a) and is_shared(b) and is_shared(c)
    assert a.shape == (100, 50) and a.dtype == torch.bfloat16 and c.dtype == torch.int32
    assert b.eq(0).all() and b.is_contiguous() and not b.requires_grad
    assert is_shared(b[1:]) and is_shared(b.t()) and is_shared(b.view(-1)[5:7])
    assert not is_shared(b.clone()) and not is_shared(torch.empty(3))
    w = mycoll.zeros(10, requires_grad=True)
    (w * torch.arange(10.0)).sum().backward()
    assert w.grad is not None and w.grad.eq(torch.arange(10.0)).all()
    file = io.BytesIO()
    torch.save(a.fill_(3), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.eq(3).all() and not is_shared(loaded)
    assert not is_shared(copy.deepcopy(b))
    b.resize_(1000).fill_(7)
    b.share_memory_()
    assert b.is_shared() and b.eq(7).all()
    view = mycoll.zeros(5000)[10:]
    del a, b, c, w, loaded
    assert view.eq(0).all()
    del view
    assert bytes_in_use() == before


def test_the_scope_belongs_to_its_thread():
    elsewhere = []
    with mycoll.shared_tensors():
        with mycoll.shared_tensors():
            made = [torch.ones(10), torch.arange(5), torch.randn(3, 3) @ torch.randn(3, 3)]
        made += Sequential(Linear(4, 4)).parameters()
        thread = threading.Thread(target=lambda: elsewhere.append(torch.ones(10)))
        thread.start()
        thread.join()
        made.append(torch.tensor([1, 2, 3]))
    assert all(map(is_shared, made))
    assert not is_shared(elsewhere[0]) and not is_shared(torch.ones(10))
    with pytest.raises(KeyError), mycoll.shared_tensors():
        raise KeyError
    assert not is_shared(torch.ones(10))
    with pytest.raises(RuntimeError, match="thread that entered"):
        native()._close_shared_tensors()


def test_memory_of_onednn_is_not_shared():
    """oneDNN allocates from torch, and frees the memory with a packed weight."""
    inputs = torch.randn(4, 8, 32, 32)
    kept = []
    with mycoll.shared_tensors():
        for dtype in (torch.float32, torch.bfloat16):
            convolution = Conv2d(8, 8, 3).to(dtype)
            kept.append((convolution, convolution(inputs.to(dtype))))
        elsewhere = threading.Thread(target=lambda: Conv2d(8, 8, 3)(inputs))
        elsewhere.start()
        elsewhere.join()
    for convolution, outputs in kept:
        again = convolution(inputs.to(outputs.dtype))
        assert torch.equal(again, outputs) and not is_shared(again)


@pytest.mark.parametrize(
    "options",
    [{"device": "meta"}, {"device": 0}, {"pin_memory": True}, {"out": torch.empty(3)}],
    ids=lambda options: next(iter(options)),
)
def test_other_memory_is_refused(options):
    with pytest.raises(ValueError, match="leave out"):
        mycoll.empty(3, **options)


def test_children_of_a_fork_write_to_copies():
    x = mycoll.zeros(1000)  # small, so that torch does not use its threads, which a child lacks
    x.fill_(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        right = bool(x.eq(1).all()) and not is_shared(x)
        x.fill_(2)
        right &= is_shared(mycoll.empty(10))
        os.write(writer, b"right" if right else b"wrong")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 5) == b"right"
    assert x.eq(1).all()
    os.close(reader)
    os.close(writer)


# --- collectives


class Giver:
    """Makes a rank's tensors. mine: "shared", "ordinary", or "mixed", where every other tensor is
    shared, alternating between ranks."""

    def __init__(self, ctx: Ctx, mine: str) -> None:
        self._turn = itertools.count(ctx.rank)
        self._mine = mine

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        shares = self._mine == "shared" or (self._mine == "mixed" and next(self._turn) % 2)
        if not shares:
            return tensor.clone()
        # A view in the middle of a larger tensor.
        whole = mycoll.empty(tensor.numel() + 77, dtype=tensor.dtype)
        return whole[33 : 33 + tensor.numel()].view(tensor.shape).copy_(tensor)


def all_operations(ctx: Ctx, dtype: torch.dtype, numel: int, mine: str) -> None:
    reductions(ctx, dtype, numel, mine)
    moves(ctx, dtype, numel, mine)


def reductions(ctx: Ctx, dtype: torch.dtype, numel: int, mine: str) -> None:
    size, rank, give = ctx.size, ctx.rank, Giver(ctx, mine)
    inputs = ctx.inputs(dtype, numel)
    wide = ctx.inputs(dtype, (size, numel))
    op = arith.reduce_op("SUM")
    want = arith.reduced("SUM", inputs)
    with ctx.case(f"all_reduce {numel} {mine}"):
        x = give(inputs[rank])
        dist.all_reduce(x, op)
        ctx.same(x, want)
        dist.all_reduce(give(inputs[rank]), op, async_op=True).wait()
    with ctx.case(f"reduce {numel} {mine}"):
        for root in range(size):
            x = give(inputs[rank])
            dist.reduce(x, root, op)
            ctx.same(x, want if rank == root else inputs[rank])
    with ctx.case(f"reduce_scatter {numel} {mine}"):
        got = give(torch.zeros_like(inputs[0]))
        dist.reduce_scatter_tensor(got, give(wide[rank]).view(-1), op)
        ctx.same(got, arith.reduced("SUM", [one[rank] for one in wide]))
        x = give(wide[rank])
        dist.reduce_scatter_tensor(x[rank], x.view(-1), op)
        ctx.same(x[rank], arith.reduced("SUM", [one[rank] for one in wide]), "in place")


def moves(ctx: Ctx, dtype: torch.dtype, numel: int, mine: str) -> None:
    size, rank, give = ctx.size, ctx.rank, Giver(ctx, mine)
    inputs = ctx.inputs(dtype, numel)
    wide = ctx.inputs(dtype, (size, numel))
    with ctx.case(f"broadcast {numel} {mine}"):
        for root in range(size):
            x = give(inputs[rank])
            dist.broadcast(x, root)
            ctx.same(x, inputs[root])
    with ctx.case(f"all_gather {numel} {mine}"):
        got = give(torch.zeros_like(wide[0]))
        dist.all_gather_into_tensor(got.view(-1), give(inputs[rank]))
        ctx.same(got, torch.stack(inputs))
        got = give(torch.zeros_like(wide[0]))
        got[rank] = inputs[rank]
        dist.all_gather_into_tensor(got.view(-1), got[rank])
        ctx.same(got, torch.stack(inputs), "in place")
        parts = [give(torch.zeros_like(one)) for one in inputs]
        dist.all_gather(parts, give(inputs[rank]))
        ctx.same(torch.stack(parts), torch.stack(inputs), "list")
    with ctx.case(f"gather and scatter {numel} {mine}"):
        parts = [give(torch.zeros_like(one)) for one in inputs]
        dist.gather(give(inputs[rank]), parts if rank == 0 else None, 0)
        if rank == 0:
            ctx.same(torch.stack(parts), torch.stack(inputs))
        got = give(torch.zeros_like(inputs[0]))
        given = [give(one) for one in wide[1]]
        dist.scatter(got, given if rank == 1 else None, 1)
        ctx.same(got, wide[1][rank])
    with ctx.case(f"all_to_all {numel} {mine}"):
        got = give(torch.zeros_like(wide[0]))
        dist.all_to_all_single(got.view(-1), give(wide[rank]).view(-1))
        ctx.same(got, torch.stack([one[rank] for one in wide]))
        parts = [give(torch.zeros_like(one)) for one in inputs]
        dist.all_to_all(parts, [give(one) for one in wide[rank]])
        ctx.same(torch.stack(parts), torch.stack([one[rank] for one in wide]), "list")
    with ctx.case(f"send and recv {numel} {mine}"):
        got = give(torch.zeros_like(inputs[0]))
        works = [
            dist.isend(give(inputs[rank]), (rank + 1) % size),
            dist.irecv(got, (rank - 1) % size),
        ]
        for work in works:
            assert work is not None
            work.wait()
        ctx.same(got, inputs[(rank - 1) % size])


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("mine", ["shared", "mixed"])
def test_all_operations(world, mycoll_only, mine):
    for numel in NUMELS:
        world.run(all_operations, torch.float32, numel, mine)


SINGLE_COPY = (("MYCOLL_SINGLE_COPY", "on"),)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_operations_by_single_copy(pool, mycoll_only, size):
    """Ordinary tensors, which the ranks read through the kernel."""
    world = pool.get(pool.spec(size, "shm", env=SINGLE_COPY))
    for mine in ("ordinary", "mixed"):
        for numel in NUMELS:
            world.run(all_operations, torch.float32, numel, mine)
    if size == 3:
        for dtype in arith.REDUCIBLE:
            world.run(reductions, dtype, 2**18 // dtype.itemsize + 3, "ordinary")


def messages(ctx: Ctx, numel: int) -> None:
    """Messages of a ring, with each function that sends messages."""
    after, before = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    inputs = ctx.inputs(torch.float32, (3, numel))
    mine, want = inputs[ctx.rank], inputs[before]
    got = torch.zeros_like(want)
    with ctx.case(f"send and recv {numel}"):
        for sender in range(ctx.size):
            if ctx.rank == sender:
                dist.send(mine[0], after)
            elif before == sender:
                dist.recv(got[0], sender)
        ctx.same(got[0], want[0])
    with ctx.case(f"any source {numel}"):
        work = dist.isend(mine[1], after, tag=3)
        assert work is not None
        ctx.equal(dist.recv(got[1], tag=3), before)
        work.wait()
        ctx.same(got[1], want[1])
    with ctx.case(f"batch {numel}"):
        got.zero_()
        parts = [
            operation
            for i in range(3)
            for operation in (
                dist.P2POp(dist.irecv, got[i], before),
                dist.P2POp(dist.isend, mine[i], after),
            )
        ]
        for work in dist.batch_isend_irecv(parts):
            work.wait()
        ctx.same(got, want)
    with ctx.case(f"strided {numel}"):
        work = dist.isend(mine.t()[1:].contiguous(), after)
        turned = torch.zeros(numel - 1, 3)
        dist.recv(turned, before)
        assert work is not None
        work.wait()
        ctx.same(turned, want.t()[1:])


@pytest.mark.parametrize(("size", "use"), [(2, "on"), (2, "auto"), (3, "on")])
def test_messages_by_single_copy(pool, mycoll_only, size, use):
    world = pool.get(pool.spec(size, "shm", env=(("MYCOLL_SINGLE_COPY", use),)))
    for numel in (*NUMELS, 2_000_003):
        world.run(messages, numel)


def measures_messages(ctx: Ctx, numel: int) -> None:
    x = torch.full((numel,), float(ctx.rank))
    for _ in range(14):
        if ctx.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    sizes = [size for kind, _, size, *_ in native()._single_copies() if kind == "send"]
    ctx.equal(sizes, [MIB] if ctx.rank == 1 else [])


def test_the_receiver_measures_messages(fresh, mycoll_only):
    fresh(2, "shm", env=(("MYCOLL_SINGLE_COPY", "auto"),)).run(measures_messages, MIB // 4)


@pytest.mark.worlds(2, 3)
def test_all_dtypes(world, mycoll_only):
    for dtype in arith.REDUCIBLE[:: world.size - 1]:  # all with two ranks
        world.run(reductions, dtype, 2**20 // dtype.itemsize + 3, "shared")
    for dtype in (torch.uint8, torch.complex128):
        world.run(moves, dtype, 2**20 // dtype.itemsize + 3, "shared")


def bits(ctx: Ctx, numel: int) -> None:
    x = ctx.inputs(torch.bfloat16, numel)[ctx.rank]
    staged, direct, apart = x.clone(), shared_copy(x), mycoll.empty_like(x)
    dist.all_reduce(staged)
    dist.all_reduce(direct)
    ctx.same(direct, staged)
    gathered = mycoll.empty(ctx.size, numel, dtype=x.dtype)
    dist.all_gather_into_tensor(gathered.view(-1), direct)
    for one in gathered:
        ctx.same(one, staged)
    dist.all_to_all_single(apart, direct, *(2 * [uneven(numel, ctx.size)]))


def uneven(numel: int, size: int) -> list[int]:
    return [numel // size] * (size - 1) + [numel - numel // size * (size - 1)]


@pytest.mark.worlds(4)
def test_bits_equal_those_of_ordinary_tensors(world, mycoll_only):
    world.run(bits, 400_000)


def digest_of_sums(ctx: Ctx) -> str:
    digest = hashlib.sha256()
    for numel in (40_000, 400_000):
        x = ctx.inputs(torch.bfloat16, numel)[ctx.rank]
        dist.all_reduce(x)
        digest.update(x.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def test_bits_are_equal_with_single_copy(pool, mycoll_only):
    found = set()
    for use in ("on", "off"):
        world = pool.get(pool.spec(3, "shm", env=(("MYCOLL_SINGLE_COPY", use),)))
        found.update(world.run(digest_of_sums))
    assert len(found) == 1


def allocate_and_free(ctx: Ctx) -> int:
    """Tensors of changing sizes, so that regions are made, reused and freed."""
    random = ctx.random("allocate and free")
    kept: list[torch.Tensor] = []
    for step in range(150):
        numel = random.choice([40_000, 300_000, 2_000_000, 9_000_000])
        x = mycoll.empty(numel).fill_(ctx.rank + step)
        dist.all_reduce(x)
        ctx.equal(float(x[step]), float(sum(range(ctx.size)) + ctx.size * step))
        ctx.equal(float(x[-1]), float(x[0]))
        if random.random() < 0.2:
            kept.append(x)
        while len(kept) > 3:
            kept.pop(random.randrange(len(kept)))
    del x
    kept.clear()
    gc.collect()
    regions, blocks = native()._shared_memory_usage()
    ctx.equal(blocks, 0)
    assert regions <= 256 * MIB, regions
    return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.worlds(3)
def test_regions_are_reused_and_freed(world, mycoll_only):
    for mappings in world.run(allocate_and_free):
        assert mappings < 60


def inode_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, _, _, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in ends.split("-"))
        if begin <= address < end:
            return inode
    raise AssertionError(f"nothing is mapped at {address:#x}")


def rights(inode: str) -> set[str]:
    """The permissions with which this process has mapped the file."""
    lines = map(str.split, Path("/proc/self/maps").read_text().splitlines())
    return {line[1] for line in lines if line[4] == inode}


def only_read(ctx: Ctx) -> None:
    x = mycoll.zeros(300_000)
    dist.all_reduce(x)
    regions: list[str] = [""] * ctx.size
    dist.all_gather_object(regions, inode_at(x.data_ptr()))
    ctx.equal(len(set(regions)), ctx.size)

    def seen() -> list[set[str]]:
        return [rights(region) for rank, region in enumerate(regions) if rank != ctx.rank]

    ctx.equal(seen(), [{"r--s"}] * (ctx.size - 1))
    window = mycoll.new_window(x)
    ctx.equal(seen(), [{"r--s", "rw-s"}] * (ctx.size - 1), "with a window")
    window.tensor_deregister()
    ctx.equal(seen(), [{"r--s"}] * (ctx.size - 1), "after the window")


@pytest.mark.worlds(3)
def test_other_ranks_map_tensors_read_only(world, mycoll_only):
    """Except for the pages of a window, while it is open."""
    world.run(only_read)


def outlive_the_group(ctx: Ctx) -> None:
    x = mycoll.empty(500_000).fill_(ctx.rank)
    for index in range(3):
        ctx.init(f"group{index}")
        dist.all_reduce(x, dist.ReduceOp.MAX)
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        dist.destroy_process_group()
        x.div_(ctx.size)
    ctx.equal(x.unique().tolist(), [ctx.size - 1])
    del x
    ctx.equal(bytes_in_use(), 0)


def test_tensors_outlive_their_groups(fresh, mycoll_only):
    fresh(2, "shm", init=False).run(outlive_the_group)


def leaves_a_late_rank(ctx: Ctx) -> Seen | None:
    """Rank 0's call times out while other ranks may read its tensor, and it then writes to it."""
    x = torch.zeros(1_000_000)
    dist.all_reduce(x)
    store = ctx.store("late")
    if ctx.rank == 2:
        store.wait(["0", "1"], timedelta(seconds=30))
    seen = attempt(lambda: dist.all_reduce(x))
    store.set(str(ctx.rank), "")
    x.fill_(5)
    ctx.equal(x.unique().tolist(), [5])
    return seen


@pytest.mark.transports("shm")
def test_a_timeout_with_single_copy(stage, mycoll_only):
    with stage.world(3, timeout=1.0, env=SINGLE_COPY) as world:
        world.start(leaves_a_late_rank)
        for seen in answers(world).values():
            assert seen.kind == "DistBackendError" and "timed out after" in seen.text, seen


def sends_to_a_late_rank(ctx: Ctx) -> Seen:
    """Rank 0's send times out, and it writes to its tensor. Rank 1 must not receive the new
    values."""
    x = torch.zeros(1_000_000)
    dist.barrier()
    for _ in range(2):
        if ctx.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    if ctx.rank == 0:
        seen = attempt(lambda: dist.send(x, 1))
        x.fill_(5)
    else:
        time.sleep(1.0)
        seen = attempt(lambda: dist.recv(x, 0))
        ctx.equal(x.unique().tolist(), [0])
    return seen


@pytest.mark.transports("shm")
def test_a_timeout_of_a_message_by_single_copy(stage, mycoll_only):
    with stage.world(2, timeout=0.5, env=SINGLE_COPY) as world:
        world.start(sends_to_a_late_rank)
        for seen in answers(world).values():
            assert seen.kind == "DistBackendError" and "timed out after" in seen.text, seen


def trains(ctx: Ctx) -> list[float]:
    torch.manual_seed(0)
    with mycoll.shared_tensors():
        model = DistributedDataParallel(Sequential(Linear(300, 700), Linear(700, 300)))
        assert all(map(is_shared, model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(4):
            batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(ctx.rank))
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert all(is_shared(parameter.grad) for parameter in model.parameters())
    total = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    ctx.digest(total)
    return [*losses, float(total.sum())]


@pytest.mark.worlds(2)
def test_ddp(world, mycoll_only):
    first, second = world.run(trains)
    assert first[-1] == second[-1] and first[3] < first[0]


def gradients(ctx: Ctx, scope: contextlib.AbstractContextManager[None]) -> list[torch.Tensor]:
    """The gradients of the last step, and the parameters after it."""
    torch.manual_seed(0)
    with scope:
        net = Sequential(Linear(300, 700), Linear(700, 300))
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            batch = torch.randn(8, 300, generator=torch.Generator().manual_seed(ctx.rank))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    grads = [parameter.grad for parameter in net.parameters()]
    return [*(grad for grad in grads if grad is not None), *net.parameters()]


def gradients_in_buckets(ctx: Ctx) -> None:
    """Since the second step, gradients are views of the buckets, which DDP then makes anew."""
    shared = gradients(ctx, mycoll.shared_tensors())
    plain = gradients(ctx, contextlib.nullcontext())
    assert all(map(is_shared, shared)) and not any(map(is_shared, plain))
    ctx.equal(len(shared), 8)
    assert shared[0].untyped_storage().nbytes() > shared[0].nbytes  # a bucket
    for got, want in zip(shared, plain, strict=True):
        ctx.same(got.detach(), want.detach())


@pytest.mark.worlds(2)
def test_gradients_in_buckets_of_ddp(world, mycoll_only):
    world.run(gradients_in_buckets)


# --- failures


def dies(ctx: Ctx, victim: int, what: str) -> Seen:
    x, got = mycoll.zeros(4_000_000), torch.zeros(4_000_000)
    if "single copy" in what:
        x = torch.zeros(4_000_000)

    def step() -> None:
        if what.startswith("messages"):
            works = [
                dist.irecv(got, (ctx.rank - 1) % ctx.size),
                dist.isend(x, (ctx.rank + 1) % ctx.size),
            ]
            for work in works:
                assert work is not None
                work.wait()
        else:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(mycoll.empty(ctx.size * x.numel()), x)

    for _ in range(3):
        step()
    kill_one(ctx, victim, after=0.05)

    def repeat() -> None:
        while True:
            step()

    seen = attempt(repeat)
    x.fill_(5)  # no other rank writes to it
    time.sleep(0.2)
    ctx.equal(x.unique().tolist(), [5])
    return seen


@pytest.mark.transports("shm")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "what", ["collectives", "messages", "single copy", "messages by single copy"]
)
def test_a_death_in_the_middle_is_named(stage, mycoll_only, what, victim):
    with stage.world(3, env=SINGLE_COPY if "single copy" in what else ()) as world:
        world.start(dies, victim, what)
        for seen in answers(world, (victim,)).values():
            assert seen.kind == "DistBackendError", seen
            assert f"rank {victim} (" in seen.text and "has ended (killed" in seen.text, seen.text


def differ(ctx: Ctx) -> Seen:
    return attempt(lambda: dist.all_reduce(mycoll.zeros(1_000_000 + ctx.rank)))


def test_different_calls_are_an_error(reused, mycoll_only):
    for seen in reused(2, "shm").run_in_group(differ):
        assert "MISMATCH" in seen.text, seen.text


def without_descriptors(ctx: Ctx) -> None:
    """Rank 1 cannot map rank 0's tensor, which is then copied."""
    dist.barrier()
    x = mycoll.empty(300_000).fill_(ctx.rank + 1)
    taken = []
    if ctx.rank == 1:
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(0))
    dist.all_reduce(x)
    for fd in taken:
        os.close(fd)
    ctx.equal(x.unique().tolist(), [3])
    dist.all_reduce(x)
    ctx.equal(x.unique().tolist(), [6])


def test_tensors_that_cannot_be_mapped_are_copied(reused, mycoll_only):
    reused(2, "shm").run_in_group(without_descriptors)
