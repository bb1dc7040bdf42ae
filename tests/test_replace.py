"""MYCOLL_REPLACE=gloo: unchanged programs that use gloo run over mycoll."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import warm

pytestmark = pytest.mark.usefixtures("mycoll_only")

RANKS = 2
# A program can tell the backends apart by a method that only mycoll's has.
OURS = "def ours(pg): return hasattr(pg._get_backend(torch.device('cpu')), 'transport')"
HEAD = f"""
import os, sys, threading, warnings
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
{OURS}
"""


def environment(replace: str | None = "gloo", **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MYCOLL_", "TORCH_DIST"))}
    if replace is not None:
        env["MYCOLL_REPLACE"] = replace
    return {**env, "MYCOLL_TRACE_FILE": "off", **more}


def run(code: str, ranks: int = 1, replace: str | None = "gloo", **more: str) -> list[str]:
    """Runs the program on each rank, which must succeed; returns the output of each."""
    program = HEAD + textwrap.dedent(code)
    ended = warm.ranks(program, ranks, environment=environment(replace, **more))
    assert [code for code, *_ in ended] == [0] * ranks, [error[-3000:] for *_, error in ended]
    return [out for _, out, _ in ended]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_names_in_init_process_group() -> None:
    run(
        """
        from mycoll import black_box
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
        for named in ("gloo", "GLOO", "cpu:gloo,cuda:gloo", None, "cpu:gloo"):
            prefixed = dist.PrefixStore(str(named), store)
            dist.init_process_group(named, store=prefixed, rank=rank, world_size=size)
            assert ours(dist.group.WORLD), named
            assert dist.get_backend_config().startswith("cpu:gloo"), dist.get_backend_config()
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x.tolist() == [size] * 3, named
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert backend.name() == "gloo" and backend._get_backend_name() == "gloo", named
            assert isinstance(backend, dist.ProcessGroupGloo), named
            assert backend.options._timeout == timedelta(minutes=30), named
            assert backend.options.group_name == "0", named
            [process] = black_box.find([os.getpid()])
            [group] = process.groups  # as `mycoll status` shows it
            assert group.description == "default_pg, in the place of gloo", group.description
            dist.destroy_process_group()
        """,
        ranks=RANKS,
    )


@pytest.mark.parametrize("other", ["nccl", "fake"])
def test_gloo_beside_another_backend(other: str) -> None:
    """As in "cpu:gloo,cuda:nccl": mycoll replaces only the part for CPU tensors."""
    if other == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        pytest.skip("torch's nccl needs a build with NCCL and, since 2.15, a GPU")
    code = f"""
        import torch.testing._internal.distributed.fake_pg  # registers "fake"
        dist.init_process_group("cpu:gloo,cuda:{other}")
        again = dist.new_group(backend="cpu:gloo,cuda:{other}")
        for group in (dist.group.WORLD, dist.new_group(), again):
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [size] * 3
            its = group._get_backend(torch.device("cuda"))
            assert not hasattr(its, "transport"), its
            names = [str(device) for device in group._device_types]
            print(ours(group), dist.get_backend_config(group), dist.get_backend(group), *names)
        """
    plain = run(code, ranks=RANKS, replace=None)
    assert run(code, ranks=RANKS) == [out.replace("False", "True") for out in plain]
    assert f"False cpu:gloo,cuda:{other} " in plain[0]


def test_groups_and_meshes() -> None:
    run(
        """
        dist.init_process_group("gloo")
        assert dist.get_backend() == dist.Backend.GLOO == "gloo"
        part = dist.new_group([0, 1], backend="gloo")
        again = dist.new_group([0])
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
        for group in (part, mesh.get_group()):
            assert ours(group) and dist.get_backend(group) == "gloo"
            dist.barrier(group)
        if rank == 0:
            assert ours(again)
        # Functions that torch allows for the backend name gloo.
        dist.monitored_barrier(part, timedelta(seconds=20))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)  # 2.15: it has a successor
            c10d._set_pg_timeout(timedelta(seconds=77), part)
        assert part._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
        got = [None] * size
        dist.all_gather_object(got, {"rank": rank}, group=part)
        assert got == [{"rank": 0}, {"rank": 1}]
        dist.destroy_process_group()
        """,
        ranks=RANKS,
    )


def test_off_by_default_and_undone_by_one_variable() -> None:
    [out] = run(
        """
        from torch._C import _distributed_c10d as c
        dist.init_process_group("gloo")
        print(ours(dist.group.WORLD), "mycoll" in repr(dist.ProcessGroupGloo.__mro__), end="")
        """,
        replace=None,
    )
    assert out == "False False"


@pytest.mark.parametrize("wrong", ["MYCOLL_REPLACE=glooo", "MYCOLL_CPU=glooo"])
def test_another_value_is_an_error_of_each_group(wrong: str) -> None:
    """Groups of gloo, made in any way, and of mycoll raise; other backends are not affected."""
    name, _, value = wrong.partition("=")
    expected = "expected gloo" if name == "MYCOLL_REPLACE" else "expected engine or gloo"
    run(
        f"""
        import torch.testing._internal.distributed.fake_pg  # registers "fake"
        class Derived(dist.ProcessGroupGloo):
            pass
        def init(name):
            dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        made = [lambda kind=kind: kind(dist.HashStore(), 0, 1)
                for kind in (dist.ProcessGroupGloo, Derived)]
        for make in (lambda: init("gloo"), lambda: init(None), lambda: init("mycoll"), *made):
            try:
                make()
            except ValueError as error:
                assert {f"{wrong} is not valid: {expected}"!r} in str(error), error
            else:
                raise AssertionError("no error")
        init("fake")
        try:
            dist.new_group(backend="gloo")
        except ValueError:
            pass
        else:
            raise AssertionError("no error")
        """,
        **{"MYCOLL_REPLACE": "gloo", name: value},
    )


def test_making_a_group_warns_if_gloo_is_not_replaced() -> None:
    """Nothing is printed before, even if warnings are errors."""
    code = """
import torch, torch.distributed as dist
def init():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    init()
except UserWarning as warning:
    print(warning)
import warnings
warnings.simplefilter("default")
init()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env=environment("gloo", MYCOLL_CPU="gloo"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    warning = "MYCOLL_REPLACE=gloo has no effect: MYCOLL_CPU=gloo asks for torch's gloo\n"
    assert done.stdout == warning
    assert done.stderr.count(warning) == 1


def test_import_without_autoload() -> None:
    run(
        """
        from torch.distributed import ProcessGroupGloo as before
        import mycoll
        dist.init_process_group("gloo")
        assert ours(dist.group.WORLD)
        from torch._C._distributed_c10d import ProcessGroupGloo as after
        assert after is dist.ProcessGroupGloo is c10d.ProcessGroupGloo is not before
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


# --- the class ------------------------------------------------------------------------------------

# For programs whose two ranks are threads of one process, as in some of torch's own tests.
THREADS = """
from torch.distributed import ProcessGroupGloo
from worlds.threads import on_all
"""


def test_constructors_options_and_devices() -> None:
    run(
        THREADS
        + """
assert ProcessGroupGloo is torch._C._distributed_c10d.ProcessGroupGloo
assert ProcessGroupGloo is c10d.ProcessGroupGloo
assert ProcessGroupGloo.__name__ == "ProcessGroupGloo"
device = ProcessGroupGloo.create_device(interface="lo")
assert isinstance(device, ProcessGroupGloo.Device)
ProcessGroupGloo.create_device(hostname="127.0.0.1")
ProcessGroupGloo.create_default_device()
try: ProcessGroupGloo.create_device(interface="no-such-interface")
except RuntimeError: pass
else: raise AssertionError("an interface that does not exist")

def options():
    made = ProcessGroupGloo._Options()
    made._timeout, made._threads, made._devices = timedelta(seconds=50), 3, [device, device]
    made.group_name, made.global_ranks_in_group = "named", [4, 7]
    return made

for number, make in enumerate((
    lambda store, rank: ProcessGroupGloo(store, rank, 2),
    lambda store, rank: ProcessGroupGloo(store, rank, 2, timedelta(seconds=50)),
    lambda store, rank: ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=50)),
    lambda store, rank: ProcessGroupGloo(store=store, rank=rank, size=2, options=options()),
    lambda store, rank: ProcessGroupGloo(store, rank, 2, options()),
)):
    store = dist.HashStore()
    def body(rank):
        pg = make(store, rank)
        assert type(pg) is ProcessGroupGloo and (pg.rank(), pg.size()) == (rank, 2)
        assert pg.options._timeout == timedelta(seconds=50) or number == 0
        if number > 2:
            assert pg.options._threads == 3 and len(pg.options._devices) == 2
            assert pg._name == "named"
        pg._set_sequence_number_for_group()
        x = torch.full((2,), float(rank + 1))
        pg.allreduce([x]).wait()
        assert x.tolist() == [3.0, 3.0]
    on_all(body, 2)
"""
    )


def test_a_class_that_derives_from_it() -> None:
    run(
        THREADS
        + """
class Counting(ProcessGroupGloo):
    def __init__(self, store, rank, size):
        super().__init__(store, rank, size, timedelta(seconds=20))
        self.calls = 0
    def allreduce(self, *args):
        self.calls += 1
        return super().allreduce(*args)
pg = Counting(dist.HashStore(), 0, 1)
pg.allreduce([torch.ones(1)]).wait()
assert pg.calls == 1 and isinstance(pg, ProcessGroupGloo) and not isinstance(pg, str)
assert not isinstance(ProcessGroupGloo(dist.HashStore(), 0, 1), Counting)
"""
    )


def test_one_tensor_of_each_rank_in_a_call() -> None:
    """torch.distributed passes one tensor; gloo's class also accepts several."""
    run(
        THREADS
        + """
from torch._C._distributed_c10d import BroadcastOptions
store = dist.HashStore()
sparse = torch.sparse_coo_tensor([[0]], [1.0], (1,))
def body(rank):
    pg = ProcessGroupGloo(store, rank, 2, timedelta(seconds=50))
    opts = BroadcastOptions()
    opts.rootRank = 0
    one, pair = [torch.ones(1)], [torch.ones(1), torch.ones(1)]
    lists = [one * 2]
    for wrong in (
        lambda: pg.broadcast(pair, opts),
        lambda: pg.broadcast([], opts),
        lambda: pg.allreduce([]),
        lambda: pg.allreduce(pair),
        lambda: pg.allreduce([sparse, sparse.clone()]),
        lambda: pg.allgather(lists * 2, pair),
        lambda: pg.allgather(lists, []),
        lambda: pg.allgather([], one),
        lambda: pg.reduce(pair),
        lambda: pg.send(pair, 0, 0),
    ):
        try:
            wrong()
        except RuntimeError as error:
            assert isinstance(error, ValueError) and str(error).startswith("mycoll group '")
            assert "requires a single-element" in str(error), error
        else:
            raise AssertionError("accepted")
on_all(body, 2)
"""
    )


# The behaviour that torch's own tests of gloo check; also run over gloo itself.
BOTH = pytest.mark.parametrize("replace", ["", "gloo"])


@BOTH
def test_refusals_have_the_text_of_gloo(replace: str) -> None:
    run(
        THREADS
        + """
from torch._C import _distributed_c10d as c10d_native
t, wide, long = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
sparse = torch.sparse_coo_tensor([[0]], [1.0], (1,))
store = dist.HashStore()
def options(kind, **more):
    made = getattr(c10d_native, kind + "Options")()
    for name, value in more.items():
        setattr(made, name, value)
    return made
def body(rank):
    pg = ProcessGroupGloo(store, rank, 2, timedelta(seconds=50))
    pg.barrier().wait()
    other = 1 - rank
    def rooted(call, kind, root, *tensors, **more):
        return lambda: call(*tensors, options(kind, rootRank=root, **more))
    def broadcast(tensors, root=rank):
        return rooted(pg.broadcast, "Broadcast", root, tensors)
    def reduce(tensors, root=rank):
        return rooted(pg.reduce, "Reduce", root, tensors)
    def scatter(outputs, inputs, root=rank):
        return rooted(pg.scatter, "Scatter", root, outputs, inputs)
    def gather(outputs, inputs, root=rank):
        return rooted(pg.gather, "Gather", root, outputs, inputs)
    def allgather(outputs, inputs):
        return lambda: pg.allgather(outputs, inputs)
    def coalesced(tensors):
        return lambda: pg.allreduce_coalesced(tensors, options("AllreduceCoalesced"))
    def columns(outputs):
        return lambda: dist.all_gather_coalesced(outputs, [t], pg)
    def allreduce(tensors, op=dist.ReduceOp.SUM):
        return lambda: pg.allreduce(tensors, options("Allreduce", reduceOp=op))
    for call, words in (
        (broadcast([t], -1), "invalid root rank"),
        (broadcast([t], 2), "invalid root rank"),
        (reduce([t], 2), "invalid root rank"),
        (reduce([t, t]), "requires a single-element tensor list"),
        (allreduce([sparse], dist.ReduceOp.MAX), "unsupported reduction operation"),
        (coalesced([]), "requires non-empty tensor list"),
        (coalesced([t, wide]), "tensors must all have the same type"),
        (coalesced([t, sparse]), "invalid tensor layout at index"),
        (coalesced([sparse, sparse.clone()]), "unsupported layout"),
        (scatter([t], [], -1), "invalid root rank"),
        (scatter([], [], 0), "requires a single-element output tensor list"),
        (scatter([t, t], [], 0), "requires a single-element output tensor list"),
        (scatter([t], []), "requires a single-element input list"),
        (scatter([t], [[t, t]] * 2), "requires a single-element input list"),
        (scatter([t], [[t]]), "Incorrect input list size"),
        (scatter([t], [[wide, wide]]), "invalid tensor type"),
        (scatter([t], [[long, long]]), "invalid tensor size"),
        (scatter([t], [[t, t]], other), "requires empty input on non-root"),
        (gather([], [t], 2), "invalid root rank"),
        (gather([], [], 0), "requires a single-element input tensor list"),
        (gather([], [t]), "requires a single-element output list"),
        (gather([[t] * 3], [t]), "Incorrect output list size"),
        (gather([[wide, wide]], [t]), "invalid tensor type"),
        (gather([[long, long]], [t]), "invalid tensor size"),
        (gather([[t, t]], [t], other), "requires empty output on non-root"),
        (allgather([[t]], [t]), "invalid output tensor list"),
        (allgather([[t, wide]], [t]), "invalid tensor type"),
        (columns([[wide], [t]]), "invalid tensor type"),
        (columns([[t]] * 3), "output lists should be equal to world size"),
    ):
        try:
            call()
        except RuntimeError as error:
            assert words in str(error), (words, str(error))
        else:
            raise AssertionError("accepted: " + words)
    pg.barrier().wait()
on_all(body, 2)
""",
        replace=replace,
    )


def test_ranks_gather_uneven_shapes() -> None:
    """mycoll accepts tensors of unequal shapes, which gloo refuses. all_gather_object needs them
    for pickles that are longer than the first message and differ in length."""
    run(
        """
        dist.init_process_group("gloo")
        assert ours(dist.group.WORLD)
        objects = [bytes(range(256)) * 40 * (1 + each) for each in range(size)]
        found = [None] * size
        for mine in (objects[rank], objects[size - 1 - rank]):
            dist.all_gather_object(found, mine)
            assert found == (objects if mine is objects[rank] else objects[::-1])
        outputs = [torch.zeros(1 + each, 2) for each in range(size)]
        dist.all_gather(outputs, torch.full((1 + rank, 2), float(rank)))
        for each, output in enumerate(outputs):
            assert output.tolist() == [[each] * 2] * (1 + each), output
        rows = [[torch.zeros(1 + each), torch.zeros(2)] for each in range(size)]
        dist.all_gather_coalesced(rows, [torch.full((1 + rank,), float(rank)), torch.ones(2)])
        for each, row in enumerate(rows):
            assert [x.tolist() for x in row] == [[each] * (1 + each), [1, 1]], row
        dist.destroy_process_group()
        """,
        ranks=RANKS,
    )


@BOTH
def test_futures_of_several_tensors(replace: str) -> None:
    run(
        THREADS
        + """
store = dist.HashStore()
def body(rank):
    pg = ProcessGroupGloo(store, rank, 2, timedelta(seconds=50))
    ys = [torch.full((2,), 2.0 * rank + i) for i in range(2)]
    rows = [[torch.zeros(2) for _ in range(2)] for _ in range(2)]
    found = dist.all_gather_coalesced(rows, ys, pg, async_op=True).wait()
    assert [[x[0].item() for x in xs] for xs in found] == [[0, 1], [2, 3]], found
on_all(body, 2)
""",
        replace=replace,
    )


def test_encryption_needs_its_files() -> None:
    """test_encryption.py tests the case with files."""
    run(
        """
        from mycoll import _gloo
        assert _gloo.is_replaced()
        try:
            dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        except (RuntimeError, ValueError) as error:
            assert "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT: '' cannot be used" in str(error), error
        else:
            raise AssertionError("the group was made without a certificate")
        """,
        GLOO_DEVICE_TRANSPORT="TCP_TLS",
    )


def test_a_group_that_is_assembled_by_the_program() -> None:
    """Inference servers make groups for control messages this way. torch's functions accept them,
    without init_process_group."""
    run(
        THREADS
        + """
from torch.distributed import PrefixStore, ProcessGroup
def stateless(store, rank):
    store = PrefixStore("control", store)
    group = ProcessGroup(store, rank, 2)
    backend = ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=50))
    backend._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group

store = dist.HashStore()
def body(rank):
    group = stateless(store, rank)
    assert ours(group) and (group.rank(), group.size(), group.name()) == (rank, 2, "gloo")
    counts = torch.full((2, 2), rank, dtype=torch.int32)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    assert counts.tolist() == [[1, 1], [1, 1]]
    x = torch.full((3,), float(rank))
    dist.broadcast(x, group=group, group_src=1)
    assert x.tolist() == [1.0] * 3
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": 0}, {"rank": 1}]
    requests = ["a", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(requests, group=group, group_src=0)
    assert requests == ["a", 1]
    dist.barrier(group=group)
    group.shutdown()
on_all(body, 2)
assert not dist.is_initialized()
"""
    )


# --- groups that torch makes itself
# ----------------------------------------------------------------------


def test_groups_of_dist2() -> None:
    """An experimental API of torch: groups without names and without global state."""
    pytest.importorskip("torch.distributed._dist2")
    run(
        """
        from torch.distributed import _dist2
        group = _dist2.new_group("gloo", timedelta(seconds=50), "cpu")
        assert ours(group) and not dist.is_initialized()
        x = torch.ones(3)
        with _dist2.process_group(group):
            _dist2.current_process_group().allreduce([x]).wait()
        assert x.tolist() == [2.0] * 3
        """,
        ranks=RANKS,
    )


def test_detail_wraps_mycoll() -> None:
    run(
        """
        dist.init_process_group("gloo")
        wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert isinstance(wrapper.wrapped_pg, dist.ProcessGroupGloo)
        assert hasattr(wrapper.wrapped_pg, "transport")
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]
        try:
            dist.all_reduce(x) if rank else dist.broadcast(x, 0)
        except RuntimeError as error:
            assert "mismatch" in str(error).lower(), error
        else:
            raise AssertionError("ranks called different operations")
        """,
        ranks=RANKS,
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )


def test_rpc() -> None:
    pytest.importorskip("torch.distributed.rpc")
    run(
        """
        import torch.distributed.rpc as rpc
        if not rpc.is_available():
            sys.exit()
        made = []
        real = dist.ProcessGroupGloo.__init__
        def noted(self, *args, **more):
            made.append(self)
            real(self, *args, **more)
        dist.ProcessGroupGloo.__init__ = noted
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
        assert made and hasattr(made[0], "transport")
        if rank == 0:
            assert rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
        rpc.shutdown()
        """,
        ranks=RANKS,
    )


def test_an_exception_in_a_block() -> None:
    """An exception in `_coalescing_manager` does not leave the block open."""
    run(
        """
        dist.init_process_group("gloo")
        other = dist.new_group()
        for group in (None, other):
            try:
                with c10d._coalescing_manager(group):
                    dist.all_reduce(torch.ones(3), group=group)
                    raise KeyError
            except KeyError:
                pass
            ops = [dist.P2POp(dist.isend, torch.ones(3), 1 - rank, group) for _ in range(2)]
            ops[1].tensor = None
            try:
                dist.batch_isend_irecv(ops)
            except TypeError:
                pass
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2, 2, 2], x
        """,
        ranks=RANKS,
    )


def test_a_data_loader_and_a_fork(tmp_path: Path) -> None:
    """A DataLoader forks, and torch makes a gloo group for it; the process continues to work."""
    run(
        """
        from torch.utils.data import DataLoader
        from torch.utils.data.datapipes.iter import IterableWrapper
        dist.init_process_group("gloo")
        warnings.simplefilter("ignore")
        loader = DataLoader(IterableWrapper(range(8)).shuffle().sharding_filter(), num_workers=1)
        assert len(list(loader)) == 4
        [its] = [group for group in c10d._world.pg_map if group is not dist.group.WORLD]
        assert ours(its) and dist.get_backend(its) == "gloo"
        dist.barrier()
        """,
        ranks=RANKS,
    )


@pytest.mark.tools
def test_the_background_process_of_a_checkpoint(tmp_path: Path) -> None:
    """torch starts a process and makes a gloo group there, which inherits the variable."""
    file = tmp_path / "program.py"
    file.write_text(
        HEAD
        + textwrap.dedent(f"""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        from torch.distributed.checkpoint import _async_process_executor as executor

        class Seen(dcp.FileSystemWriter):
            def set_up_storage_writer(self, *args, **more):
                found = dist.get_backend() == "gloo" and ours(dist.group.WORLD)
                (self.path / f"seen{{os.getpid()}}").write_text(str(found))
                return super().set_up_storage_writer(*args, **more)

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            state = {{"x": torch.arange(4.0) + rank}}
            path = {str(tmp_path / "saved")!r}
            os.makedirs(path, exist_ok=True)
            dcp.async_save(
                state,
                storage_writer=Seen(path),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result()
            dist.barrier()
            loaded = {{"x": torch.zeros(4)}}
            dcp.load(loaded, checkpoint_id=path)
            assert loaded["x"].tolist() == [0, 1, 2, 3], loaded
            dist.destroy_process_group()
        """)
    )
    ended = warm.ranks(file, 2, environment=environment())
    assert [code for code, *_ in ended] == [0, 0], ended
    seen = [file.read_text() for file in (tmp_path / "saved").glob("seen*")]
    assert seen == ["True", "True"], (seen, ended)


# --- errors ---------------------------------------------------------------------------------------


def test_texts_that_programs_search_for() -> None:
    run(
        THREADS
        + r"""
import re
def text(action, *expected):
    try:
        action()
    except RuntimeError as error:
        for each in expected:
            assert re.search(each, str(error)), (each, str(error))
        assert str(error).startswith("mycoll group '"), str(error)
    else:
        raise AssertionError("nothing was raised")

# The other rank is missing.
text(lambda: ProcessGroupGloo(dist.HashStore(), 0, 2, timedelta(milliseconds=10)),
     "(timeout after 10ms|Socket Timeout)")

store = dist.HashStore()
left = threading.Event()
def body(rank):
    pg = ProcessGroupGloo(store, rank, 2, timedelta(milliseconds=2000))
    pg.allreduce([torch.ones(1)]).wait()
    if rank == 0:
        text(lambda: pg.recv([torch.ones(1)], 1, 0).wait(),
             "Timed out", "timed out after", " (Timed out|closed|timeout) ")
    else:
        left.wait(20)
    if rank == 0: left.set()
on_all(body, 2)

store = dist.HashStore()
def body(rank):
    pg = ProcessGroupGloo(store, rank, 2, timedelta(milliseconds=2000))
    pg.allreduce([torch.ones(1)]).wait()
    if rank == 0:
        text(lambda: pg.allreduce([torch.ones(1)]).wait(),
             "Timed out waiting 2000ms", "timed out after")
        left.set()
    else:
        left.wait(20)
left.clear()
on_all(body, 2)

store = dist.HashStore()
def body(rank):
    pg = ProcessGroupGloo(store, rank, 2, timedelta(seconds=50))
    pg.allreduce([torch.ones(1)]).wait()
    if rank == 1:
        pg.shutdown()
        return
    text(lambda: pg.allreduce([torch.ones(1)]).wait(), "Connection closed by peer")
on_all(body, 2)
"""
    )


def test_a_peer_that_dies() -> None:
    outs = run(
        """
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            sys.stdout.flush()
            if os.fork() == 0:  # so that the test's rank itself exits normally
                os._exit(0)
            os.execv(sys.executable, [sys.executable, "-c", ""])
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            print("Connection closed by peer" in str(error), end="")
        """,
        ranks=RANKS,
    )
    assert outs[0] == "True"


# --- torch's own gloo ---------------------------------------------------------------------------


def test_a_group_can_be_reconfigured() -> None:
    if "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters:
        pytest.skip("torch has that since 2.14")
    run(
        """
        dist.init_process_group("gloo", enable_reconfigure=True)
        assert ours(dist.group.WORLD) and dist.get_backend() == "gloo"
        c10d = dist.distributed_c10d
        assert c10d._supports_reconfigure()
        store, rank = c10d._get_default_store(), dist.get_rank()
        store.set(str(rank), c10d._get_reconfigure_handle())
        handles = [store.get(str(1 - i)).decode() for i in range(2)]
        c10d._reconfigure(uuid=1, handles=handles).wait()
        assert dist.get_rank() == 1 - rank
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        """,
        ranks=2,
    )


def test_torchs_gloo_remains_available() -> None:
    run(
        """
        import mycoll
        dist.init_process_group("mycoll", pg_options=mycoll.Options(cpu="gloo"))
        assert not ours(dist.group.WORLD)
        dist.barrier()
        named = dist.new_group(backend="gloo")
        assert ours(named)
        dist.barrier(named)
        dist.destroy_process_group()
        """
    )


def test_mycoll_cpu_gloo_does_not_replace_gloo() -> None:
    run(
        """
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            dist.init_process_group("gloo")
            assert not ours(dist.new_group([0]))
        assert not ours(dist.group.WORLD)
        [text] = [str(each.message) for each in seen]
        assert "MYCOLL_CPU=gloo asks for torch's gloo" in text, text
        """,
        MYCOLL_CPU="gloo",
    )


# A sitecustomize that records the actual backend of each group that torch makes.
NOTING = """
import functools, os, torch, torch.distributed as dist
def noting(function):
    @functools.wraps(function)
    def make(*args, **more):
        made = function(*args, **more)
        named = more.get("backend") or (args[0] if args else None)
        backend = (made or dist.group.WORLD)._get_backend(torch.device("cpu"))
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(f"{named} {'mycoll' if hasattr(backend, 'transport') else 'gloo'}\\n")
        return made
    return make
dist.init_process_group, dist.new_group = noting(dist.init_process_group), noting(dist.new_group)
"""
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.tools
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("MYCOLL_REPLACE", "-m mycoll demo --steps 1 --rounds 1"),
        ("MYCOLL_REPLACE", "-m mycoll bench all_reduce --nproc 2 -b 4 -e 4 -n 2 -w 1 --rounds 2"),
        ("MYCOLL_CPU", "-m mycoll bench all_reduce --nproc 2 -b 4 -e 4 -n 2 -w 1 --rounds 2"),
        ("MYCOLL_REPLACE", "benchmarks/objects.py gather --rounds 2"),
        ("MYCOLL_REPLACE", "-m faults --only 19a --transport shm --json build/faults-test"),
    ],
)
def test_comparisons_ignore_the_variables(tmp_path: Path, variable: str, words: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *words.replace("build/", f"{tmp_path}/").split()],
        cwd=ROOT,
        env=environment(
            None,
            NOTES=str(tmp_path / "notes"),
            PYTHONPATH=os.pathsep.join(paths),
            **{variable: "gloo"},
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"ignores {variable}=gloo: it compares backends by name" in done.stderr
    notes = set((tmp_path / "notes").read_text().splitlines())
    assert notes == {"mycoll mycoll", "gloo gloo"}, (notes, done.stdout)


def snapshot(replace: str | None, autoload: str) -> str:
    """The names in torch.distributed's modules after `import torch`, and where they come from."""
    code = """
import sys
import torch, torch.distributed
for name in sorted(sys.modules):
    if name == "torch.distributed" or name.startswith(("torch.distributed.", "torch._C._dist")):
        for key, value in sorted(vars(sys.modules[name]).items()):
            where = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
            kind = type(value).__name__
            code = getattr(getattr(value, "__code__", None), "co_filename", "")
            print(name, key, kind, *where, code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(replace, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.tools
def test_importing_torch_changes_nothing() -> None:
    """If the variable is not set, the modules of torch.distributed are those without mycoll."""
    without = snapshot(None, autoload="0")
    assert snapshot(None, autoload="1") == without
    assert "ProcessGroupGloo" in without
    assert "mycoll" in snapshot("gloo", autoload="1")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_torch_without_gloo() -> None:
    """mycoll works; torch itself raises when a gloo group is made."""
    run(
        """
        from torch._C import _distributed_c10d as c
        del c.ProcessGroupGloo
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            import mycoll
            dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
        assert seen == [], seen
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
