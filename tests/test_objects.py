"""Collectives of Python objects."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import enum
import gc
import inspect
import pickle
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs.objects import objects, thing
from torch.distributed import distributed_c10d
from worlds import warm
from worlds.threads import on_all
from worlds.worker import Ctx

LARGE = 1 << 18  # the size of a buffer that is sent separately


@pytest.mark.worlds(1, 2, 3, 5)
def test_objects(world):
    world.run(objects)


def sent_objects(ctx: Ctx) -> None:
    if ctx.rank == 0:
        for peer in range(1, ctx.size):
            dist.send_object_list([thing(peer), "x" * 100_000], dst=peer)
    else:
        items = [None, None]
        dist.recv_object_list(items, src=0)
        ctx.equal(items, [thing(ctx.rank), "x" * 100_000])
    if ctx.rank == 0:
        items = [None]
        source = dist.recv_object_list(items, src=1)
        ctx.equal((source, items), (1, ["back"]))
    elif ctx.rank == 1:
        dist.send_object_list(["back"], dst=0)


@pytest.mark.worlds(2, 3)
def test_send_and_recv_object_list(world):
    world.run(sent_objects)


def other_sequences(ctx: Ctx) -> None:
    """Any sequence with assignable elements is accepted."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for make in (collections.deque, lambda objects: np.array(objects, dtype=object)):
        objects = make([{"rank": ctx.rank}, None])
        dist.broadcast_object_list(objects, 1)
        ctx.equal(list(objects), [{"rank": 1}, None])
        objects = make([{"rank": ctx.rank}, None])
        if ctx.rank == 0:
            dist.send_object_list(objects, right)
        dist.recv_object_list(objects, left)
        if ctx.rank:
            dist.send_object_list(make([{"rank": ctx.rank}, None]), right)
        ctx.equal(list(objects), [{"rank": left}, None])


@pytest.mark.worlds(2)
def test_sequences_that_are_not_lists(world):
    world.run(other_sequences)


# --- the results are those of torch's own functions
# -------------------------------------------------------


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Plan:
    name: str
    parts: list[torch.Tensor]
    color: Color = Color.RED


class Tagged(torch.Tensor):
    """A subclass with additional state."""


def tagged(tensor: torch.Tensor) -> Tagged:
    result = tensor.as_subclass(Tagged)
    result.note = "kept"  # type: ignore[attr-defined]
    return result


def kinds(rank: int) -> dict[str, Any]:
    """Objects of many kinds, small and large, that differ between ranks."""
    large = torch.arange(LARGE // 4, dtype=torch.float32) + rank
    cube = large[: 64 * 32 * 16].reshape(64, 32, 16)
    shared = torch.arange(LARGE // 8) * rank
    frozen = np.arange(LARGE // 8) + rank
    frozen.flags.writeable = False
    itself: list[Any] = [rank]
    itself.append(itself)
    return {
        "nothing": None,
        "a dict": thing(rank),
        "long text": "é" * (LARGE + rank),
        "long bytes": bytes(LARGE + rank),
        "a bytearray": bytearray(LARGE + rank),
        "an array": array.array("d", range(LARGE // 8)),
        "a list that holds itself": itself,
        "a dataclass": Plan(f"rank {rank}", [large, torch.ones(rank)]),
        "a large tensor": large,
        "a small tensor": torch.arange(10) + rank,
        "an empty tensor": torch.empty(0, 3),
        "a scalar": torch.tensor(1.5 + rank),
        "a view": large[1000:1010],
        "a transposed one": cube.transpose(0, 2),
        "an expanded one": torch.ones(1, 3).expand(LARGE, 3),
        "a strided one": large[::3],
        "two views of one memory": [shared[:100], shared[50:]],
        "one tensor twice": [shared, shared],
        "with a gradient": (large * 1).requires_grad_(),
        "a parameter": torch.nn.Parameter(large),
        "a module": torch.nn.Linear(300, 300).requires_grad_(rank % 2 == 0),
        "sparse": torch.eye(300).to_sparse(),
        "sparse rows": torch.eye(300).to_sparse_csr(),
        "large sparse": torch.eye(300, 300)[:, :].expand(300, 300).to_sparse(),
        "conjugate": torch.full((LARGE,), 1 + 2j).conj(),
        "negative view": torch.full((LARGE,), 1 + 2j).conj().imag,
        "meta": torch.empty(5, device="meta"),
        "a subclass": tagged(large),
        "bool": large > 100,
        "bfloat16": large.to(torch.bfloat16),
        "a storage": large.storage(),
        "numpy": np.arange(LARGE) + rank,
        "numpy, small": np.arange(10) + rank,
        "numpy, in Fortran's order": np.asfortranarray(np.ones((300, 400)) * rank),
        "numpy, strided": np.arange(LARGE)[::2],
        "numpy, read-only": frozen,
        "numpy of objects": np.array([{"rank": rank}, None], dtype=object),
        "numpy records": np.zeros(LARGE, dtype=[("a", "<i4"), ("b", "<f8")]),
        "a dtype and a size": (torch.float16, torch.Size([rank, 2]), torch.device("cpu")),
        "many": {f"layer{i}": torch.full((i * 40, 40), rank) for i in range(60)},
    }


def differs(got: Any, want: Any, seen: frozenset[int] = frozenset()) -> str:
    """The difference between two objects that a program could observe; empty if there is none."""
    if id(want) in seen:
        return ""
    seen |= {id(want)}
    if type(got) is not type(want):
        return f"a {type(got)}, not a {type(want)}"
    if isinstance(want, torch.Tensor):
        for name in ("dtype", "shape", "layout", "requires_grad", "device", "is_leaf"):
            if getattr(got, name) != getattr(want, name):
                return f"{name} is {getattr(got, name)}, not {getattr(want, name)}"
        if vars(got) != vars(want):
            return f"state {vars(got)}, not {vars(want)}"
        if want.is_meta:
            return ""
        if want.layout != torch.strided:
            return differs(got.detach().to_dense(), want.detach().to_dense(), seen)
        if got.stride() != want.stride() or got.storage_offset() != want.storage_offset():
            return "another layout"
        if got.is_conj() != want.is_conj() or got.is_neg() != want.is_neg():
            return "conjugate or negative"
        storages = got.untyped_storage(), want.untyped_storage()
        if storages[0].nbytes() != storages[1].nbytes() or not storages[0].resizable():
            return f"storages {[(s.nbytes(), s.resizable()) for s in storages]}"
        return "" if torch.equal(got, want) else "other values"
    if isinstance(want, np.ndarray):
        if got.dtype != want.dtype or got.strides != want.strides or got.shape != want.shape:
            return f"{got.dtype} {got.strides}, not {want.dtype} {want.strides}"
        if got.flags.writeable != want.flags.writeable:
            return "writeable"
        return "" if np.array_equal(got, want) else "other values"
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return "another length"
        found = [differs(g, w, seen) for g, w in zip(got, want, strict=True)]
        return next(filter(None, found), "")
    if isinstance(want, dict):
        return differs(list(got.items()), list(want.items()), seen)
    if isinstance(want, torch.storage.TypedStorage):
        found = [torch.empty(0, dtype=want.dtype).set_(each.untyped()) for each in (got, want)]
        return "" if got.dtype == want.dtype and torch.equal(*found) else "other values"
    if isinstance(want, (Plan, torch.nn.Module)):
        return differs(vars(got), vars(want), seen)
    return "" if got == want else f"got {got!r:.100}, want {want!r:.100}"


def all_ways(ctx: Ctx, mine: Any, group: dist.ProcessGroup) -> dict[str, list[Any]]:
    """The results of each function on this rank when each rank contributes such an object."""
    size, rank = group.size(), group.rank()
    root, last = size - 1, 0
    got: dict[str, list[Any]] = {}
    got["all_gather_object"] = [None] * size
    dist.all_gather_object(got["all_gather_object"], mine, group=group)
    gathered = [None] * size if rank == root else None
    dist.gather_object(mine, gathered, group=group, group_dst=root)
    got["gather_object"] = gathered or []
    items = [mine, "between", mine] if rank == root else [None] * 3
    dist.broadcast_object_list(items, group=group, group_src=root)
    got["broadcast_object_list"] = items
    parts = [mine, *[(mine, i) for i in range(1, size)]] if rank == last else None
    got["scatter_object_list"] = [None]
    dist.scatter_object_list(got["scatter_object_list"], parts, group=group, group_src=last)
    if size > 1 and rank == 0:
        dist.send_object_list([mine, mine], group=group, group_dst=size - 1)
    elif size > 1 and rank == size - 1:
        got["recv_object_list"] = [None, None]
        dist.recv_object_list(got["recv_object_list"], group=group, group_src=0)
    return got


def as_torch_gives(ctx: Ctx) -> None:
    warnings.simplefilter("ignore")  # about sparse tensors and storages
    gloo = dist.new_group(backend="gloo")
    for kind, mine in kinds(ctx.rank).items():
        with ctx.case(kind):
            want = all_ways(ctx, mine, gloo)
            got = all_ways(ctx, mine, dist.group.WORLD)
            ctx.equal(list(got), list(want))
            for function, values in want.items():
                if found := differs(got[function], values):
                    ctx.fail(f"{function}: {found}")
    dist.destroy_process_group(gloo)


@pytest.mark.worlds(1, 2, 3)
def test_objects_of_many_kinds(world):
    world.run(as_torch_gives)


def newer_dtypes(ctx: Ctx) -> None:
    for dtype in (torch.float8_e4m3fn, torch.uint16):  # torch cannot unpickle these
        for numel in (5, LARGE):
            with ctx.case(f"{numel} of {dtype}"):
                out: list[Any] = [None] * ctx.size
                dist.all_gather_object(out, torch.full((numel,), ctx.rank).to(dtype))
                for rank, tensor in enumerate(out):
                    ctx.equal(tensor.dtype, dtype)
                    ctx.same(tensor.float(), torch.full((numel,), float(rank)))


@pytest.mark.usefixtures("mycoll_only")
@pytest.mark.worlds(2)
def test_dtypes_that_torch_does_not_unpickle(world):
    world.run(newer_dtypes)


# --- sizes ----------------------------------------------------------------------------------------


def sizes(ctx: Ctx) -> None:
    limits = (0, 512, 4096, 1 << 17)
    lengths = [max(0, limit + more) for limit in limits for more in range(-80, 30, 5)]
    for length in sorted(set(lengths)):
        with ctx.case(f"{length} bytes on all ranks"):
            mine = bytes([ctx.rank]) * length
            got = all_ways(ctx, mine, dist.group.WORLD)
            ctx.equal(got["all_gather_object"], [bytes([r]) * length for r in range(ctx.size)])
            ctx.equal(got["broadcast_object_list"][0], bytes([ctx.size - 1]) * length)
            whole = bytes(length)
            part = got["scatter_object_list"][0]
            ctx.equal(part, whole if ctx.rank == 0 else (whole, ctx.rank))
    for large in range(ctx.size):
        with ctx.case(f"rank {large} has more than the others"):
            mine = torch.ones(LARGE) if ctx.rank == large else ctx.rank
            got = all_ways(ctx, mine, dist.group.WORLD)
            found = [getattr(value, "shape", value) for value in got["all_gather_object"]]
            ctx.equal(found, [(LARGE,) if rank == large else rank for rank in range(ctx.size)])
        with ctx.case(f"rank {large} has a long list"):
            mine = list(range(10_000)) if ctx.rank == large else ctx.rank
            want = [list(range(10_000)) if r == large else r for r in range(ctx.size)]
            got = all_ways(ctx, mine, dist.group.WORLD)
            ctx.equal(got["all_gather_object"], want)
            ctx.equal(got["gather_object"], want if ctx.rank == ctx.size - 1 else [])


@pytest.mark.worlds(1, 2, 3, 5)
def test_sizes_around_the_limits(world):
    world.run(sizes)


class Pickler(pickle.Pickler):
    """A program's own pickler, which supports functions."""

    def reducer_override(self, item: Any) -> Any:
        is_lambda = getattr(item, "__name__", "") == "<lambda>"
        return (str, ("a lambda",)) if is_lambda else NotImplemented


def own_pickler(ctx: Ctx) -> None:
    before = distributed_c10d._pickler
    distributed_c10d._pickler = Pickler
    try:
        got: list[Any] = [None] * ctx.size
        dist.all_gather_object(got, lambda: 0)
    finally:
        distributed_c10d._pickler = before
    ctx.equal(got, ["a lambda"] * ctx.size)


@pytest.mark.worlds(2)
def test_a_pickler_of_the_program(world):
    world.run(own_pickler)


# --- memory ---------------------------------------------------------------------------------------


def memory(ctx: Ctx) -> None:
    mine = {"tensor": torch.zeros(LARGE), "array": np.zeros(LARGE), "small": torch.zeros(4)}
    for function, values in all_ways(ctx, mine, dist.group.WORLD).items():
        with ctx.case(function):
            own = function == "broadcast_object_list" and ctx.rank == ctx.size - 1
            for value in values:
                value = value[0] if isinstance(value, tuple) else value
                if isinstance(value, str) or own:
                    continue
                for part in value.values():
                    part += 1
                value["tensor"].resize_(2 * LARGE)
                ctx.equal(value["array"].max(), 1.0)
    dist.barrier()
    for name, part in mine.items():
        ctx.equal(part.max(), 0, f"{name} of the sender")


@pytest.mark.worlds(1, 2, 3)
def test_received_memory_belongs_to_the_receiver(world):
    world.run(memory)


# --- groups ---------------------------------------------------------------------------------------


def in_subgroups(ctx: Ctx) -> None:
    group = dist.new_group([0, 2])
    mine = {"rank": ctx.rank, "tensor": torch.full((LARGE,), float(ctx.rank))}
    if ctx.rank == 1:
        out: list[Any] = [7, 7]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.all_gather_object(out, mine, group=group)
        ctx.equal((out, len(caught)), ([7, 7], 1))
    else:
        out = [None, None]
        dist.all_gather_object(out, thing(ctx.rank), group=group)
        ctx.equal(out, [thing(0), thing(2)])
        for root in (0, 2):
            with ctx.case(f"global rank {root}"):
                out = [None, None] if ctx.rank == root else None
                dist.gather_object(mine, out, dst=root, group=group)
                if out is not None:
                    ctx.equal([value["rank"] for value in out], [0, 2])
                items = [mine] if ctx.rank == root else [None]
                dist.broadcast_object_list(items, src=root, group=group, device=torch.device("cpu"))
                ctx.equal(items[0]["tensor"].max(), float(root))
                part: list[Any] = [None]
                parts = ["a", mine] if ctx.rank == root else None
                dist.scatter_object_list(part, parts, src=root, group=group)
                got = part[0] if ctx.rank == 0 else part[0]["rank"]
                ctx.equal(got, "a" if ctx.rank == 0 else root)
        with ctx.case("send and recv"):
            if ctx.rank == 0:
                dist.send_object_list([mine, 1], dst=2, group=group, use_batch=True)
            else:
                items = [None, None]
                source = dist.recv_object_list(items, src=0, group=group, use_batch=True)
                ctx.equal((source, items[0]["tensor"].max(), items[1]), (0, 0.0, 1))
    dist.barrier()
    if ctx.rank != 1:
        dist.destroy_process_group(group)


@pytest.mark.worlds(3)
def test_objects_in_groups(world):
    world.run(in_subgroups)


def beside_messages(ctx: Ctx) -> None:
    """Pending messages of the program are not mistaken for parts of objects."""
    mine = torch.full((LARGE,), float(ctx.rank))
    message = torch.zeros(LARGE * 4, dtype=torch.uint8)
    if ctx.rank == 1:
        work = dist.irecv(message, src=0)
    out: list[Any] = [None] * ctx.size
    dist.gather_object(mine, out if ctx.rank == 1 else None, dst=1)
    dist.scatter_object_list(out, [mine] * ctx.size if ctx.rank == 0 else None, src=0)
    if ctx.rank == 0:
        dist.send(message + 5, dst=1)
    elif ctx.rank == 1:
        work.wait()
        ctx.equal(message.float().mean(), 5.0)
    ctx.equal(out[0].max(), 0.0)


@pytest.mark.worlds(2)
def test_objects_beside_messages(world):
    world.run(beside_messages)


def in_threads(ctx: Ctx, sizes: tuple[int, ...]) -> None:
    import mycoll

    store = ctx.store()

    def member(rank: int, size: int) -> None:
        group = mycoll.process_group(store, rank, size, name=f"of {size}")
        mine = (rank, torch.full((LARGE,), float(rank)))
        for values in all_ways(ctx, mine, group).values():
            assert not [value for value in values if value is None]
        group.shutdown()

    for size in sizes:
        on_all(lambda rank, size=size: member(rank, size), size)


@pytest.mark.usefixtures("mycoll_only")
def test_objects_in_groups_of_threads(reused):
    reused(1).run(in_threads, (1, 2, 3))


# --- how many messages ----------------------------------------------------------------------------


def counted(ctx: Ctx, calls: list[str], function: Any, *args: Any) -> list[str]:
    calls.clear()
    function(*args)
    return list(calls)


@contextlib.contextmanager
def spying(calls: list[str]):
    from mycoll import _C

    names = ("_allgather_base", "allgather", "gather", "scatter", "broadcast", "send", "recv")
    real = {name: getattr(_C.MycollBackend, name) for name in names}

    def spy(name: str):
        def called(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return real[name](*args, **more)

        return called

    for name in names:
        setattr(_C.MycollBackend, name, spy(name))
    try:
        yield
    finally:
        for name in names:
            delattr(_C.MycollBackend, name)


def messages(ctx: Ctx) -> None:
    calls: list[str] = []
    first, root = ctx.rank == 0, 0
    small, long = "x" * 1024, "x" * 10_000
    large = [torch.zeros(LARGE), np.zeros(LARGE)]

    def gather_all(mine: Any) -> list[str]:
        return counted(ctx, calls, dist.all_gather_object, [None] * ctx.size, mine)

    def gather(mine: Any) -> list[str]:
        out = [None] * ctx.size if first else None
        return counted(ctx, calls, dist.gather_object, mine, out, root)

    def broadcast(mine: Any) -> list[str]:
        items = [mine, mine] if first else [None, None]
        return counted(ctx, calls, dist.broadcast_object_list, items, root)

    def scatter(mine: Any) -> list[str]:
        parts = [mine] * ctx.size if first else None
        return counted(ctx, calls, dist.scatter_object_list, [None], parts, root)

    others = ctx.size - 1
    with spying(calls):
        ctx.equal(gather_all(small), ["_allgather_base"])
        ctx.equal(gather_all(long), ["_allgather_base", "allgather"])
        ctx.equal(gather_all(small if first else long), ["_allgather_base", "allgather"])
        ctx.equal(gather_all(large), ["_allgather_base"] + ["broadcast"] * 2 * ctx.size)
        ctx.equal(gather(small), ["gather"])
        ctx.equal(gather(long), ["gather"] + (["recv"] * others if first else ["send"]))
        ctx.equal(gather(large), ["gather"] + (["recv"] * 2 * others if first else ["send"] * 2))
        ctx.equal(broadcast(small), ["broadcast"])
        ctx.equal(broadcast(long), ["broadcast"] * 2)
        ctx.equal(broadcast(large), ["broadcast"] * 5)
        ctx.equal(scatter(small), ["scatter"])
        ctx.equal(scatter(long), ["scatter"] + (["send"] * others if first else ["recv"]))
        for mine, count in ((small, 1), (long, 2), (large, 3)):
            if first:
                sent = counted(ctx, calls, dist.send_object_list, [mine, 1], 1)
                ctx.equal(sent, ["send"] * count)
            elif ctx.rank == 1:
                came = counted(ctx, calls, dist.recv_object_list, [None, None], 0)
                ctx.equal(came, ["recv"] * count)


@pytest.mark.usefixtures("mycoll_only")
@pytest.mark.worlds(2, 3)
def test_number_of_messages(world):
    world.run(messages)


# --- calls that torch's own functions handle
# ---------------------------------------------------------------------------


def test_groups_that_are_not_mycolls(mycoll_only: None) -> None:
    """Torch's own functions are called with the same arguments."""
    program = warm.start("""if True:
        import inspect, torch, torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        calls = []

        def recording(function):
            signature = inspect.signature(function)

            def call(*args, **more):
                # A later torch has more parameters.
                known = {key: value for key, value in more.items() if key in signature.parameters}
                given = signature.bind(*args, **known).arguments | more
                calls.append({k: v for k, v in given.items() if v is not None and v is not False})

            return call

        names = [
            *("all_gather_object", "gather_object", "broadcast_object_list"),
            *("scatter_object_list", "send_object_list", "recv_object_list"),
        ]
        for name in names:
            torchs = recording(getattr(c10d, name))
            setattr(c10d, name, torchs)
            setattr(dist, name, torchs)
        store = dist.HashStore()
        dist.init_process_group("mycoll", store=store, rank=0, world_size=1)
        gloo = dist.new_group(backend="gloo")
        ours, cpu, cuda = dist.group.WORLD, torch.device("cpu"), torch.device("cuda")

        def runs_torchs(name, *args, **more):
            getattr(dist, name)(*args, **more)
            [given] = calls
            assert list(given.values())[: len(args)] == list(args), (name, given)
            assert more.items() <= given.items() and not len(given) - len(args) - len(more), given
            calls.clear()

        out = [None]
        for more in ({}, {"weights_only": True}):
            for group in (gloo, ours) if more else (gloo,):
                runs_torchs("all_gather_object", out, 1, group, **more)
                runs_torchs("gather_object", 1, out, 0, group, **more)
                runs_torchs("scatter_object_list", out, [1], 0, group, **more)
                runs_torchs("broadcast_object_list", [1], 0, group, **more)
        for group, device in ((gloo, cpu), (gloo, cuda), (ours, cuda)):
            runs_torchs("broadcast_object_list", [1], 0, group, device=device)
            runs_torchs("broadcast_object_list", [1], group=group, device=device, group_src=0)
            runs_torchs("send_object_list", [1], group=group, device=device, group_dst=0)
            runs_torchs("recv_object_list", [1], group=group, device=device, group_src=0)
        dist.all_gather_object(out, 7)
        assert out == [7] and calls == []
        """)
    _, error = program.communicate(120)
    assert program.returncode == 0, error


# --- errors ---------------------------------------------------------------------------------------


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def mistakes(ctx: Ctx) -> None:
    first = ctx.rank == 0
    with ctx.case("lists of different lengths"):
        items = [1, 2, 3] if first else [None, None]
        refused = contextlib.nullcontext() if first else ctx.raises(ValueError, "3 objects", "2 pl")
        with refused:
            dist.broadcast_object_list(items)
    with ctx.case("an empty list"), ctx.raises(ValueError, "empty"):
        dist.broadcast_object_list([])
    with ctx.case("an object that cannot be pickled"), ctx.raises((TypeError, AttributeError)):
        dist.all_gather_object([None] * ctx.size, threading.Lock())
    with ctx.case("an object that cannot be unpickled"), ctx.raises(ValueError, "not a number"):
        dist.all_gather_object([None] * ctx.size, Unloadable())
    with ctx.case("a long one that cannot be unpickled"), ctx.raises(ValueError, "not a number"):
        dist.all_gather_object([None] * ctx.size, ["x" * LARGE, Unloadable()])
    ctx.equal(gc.isenabled(), True)
    with ctx.case("too few places"), ctx.raises(IndexError):
        dist.all_gather_object([], 1)
    if first:
        with ctx.case("gather's list is missing"), ctx.raises(ValueError, "gather_list"):
            dist.gather_object(1, None, dst=0)
        with ctx.case("too few objects"), ctx.raises(ValueError, "1 objects", f"{ctx.size} ranks"):
            dist.scatter_object_list([None], [1])
        with ctx.case("nothing to scatter"), ctx.raises(ValueError, "non-None"):
            dist.scatter_object_list([None], None)
        with ctx.case("to itself"), ctx.raises(ValueError, "same as the rank"):
            dist.send_object_list([1], dst=0)
        with ctx.case("two ranks"), ctx.raises(ValueError, "both"):
            dist.send_object_list([1], dst=1, group_dst=1)
        with ctx.case("no rank"), ctx.raises(ValueError, "Must specify"):
            dist.recv_object_list([1])
    with ctx.case("nowhere to put it"), ctx.raises(ValueError, "scatter_object_output_list"):
        dist.scatter_object_list([], [1] * ctx.size)
    with ctx.case("afterwards"):
        out: list[Any] = [None] * ctx.size
        dist.all_gather_object(out, ctx.rank)
        ctx.equal(out, list(range(ctx.size)))


@pytest.mark.usefixtures("mycoll_only")
@pytest.mark.worlds(2, 3)
def test_mistakes_with_objects(world):
    world.run(mistakes)


def weights_only(ctx: Ctx) -> None:
    out: list[Any] = [None] * ctx.size
    dist.all_gather_object(out, torch.ones(LARGE), weights_only=True)  # type: ignore[call-arg]
    ctx.equal([tensor.numel() for tensor in out], [LARGE] * ctx.size)
    with ctx.raises(Exception, "weights"):
        dist.all_gather_object(out, Unloadable(), weights_only=True)  # type: ignore[call-arg]


@pytest.mark.worlds(2)
def test_weights_only(world):
    if "weights_only" not in inspect.signature(dist.all_gather_object).parameters:
        pytest.skip("this torch has no weights_only here")
    world.run(weights_only)
