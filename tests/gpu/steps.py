"""The steps of `./dev gpu smoke`: functions that run on all ranks, over mycoll and as a control
over another backend. A function returns the text to print."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jobs.contexts
import jobs.streams
import torch
import torch.distributed as dist
from faults.harness import kill_one
from jobs import fsdp
from standins import cuda as standin_cuda
from torch.nn.parallel import DistributedDataParallel
from worlds import arith, training
from worlds.device import graph_on
from worlds.device_tensors import NUMEL, full, here, is_all, total
from worlds.threads import on_all
from worlds.worker import Ctx, called

from gpu import results

SOON = 20.0  # seconds until a death must be detected
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
NUMELS = (1, 1000, 1 << 18)


@dataclass(frozen=True)
class Found:
    text: str
    is_tried: bool = True  # False: impossible here, for the reason in the text


def is_cuda(ctx: Ctx) -> bool:
    return ctx.device.type == "cuda"


@contextlib.contextmanager
def rival(ctx: Ctx) -> Iterator[dist.ProcessGroup | None]:
    """A group of torch's own nccl; None for the stand-in device, which that does not support."""
    group = dist.new_group(backend="nccl") if is_cuda(ctx) else None
    yield group
    if group is not None:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


def nccl_files() -> set[str]:
    """The NCCL libraries that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "libnccl.so" in line}


def library(ctx: Ctx) -> Found:
    """mycoll must use the same NCCL as torch."""
    from mycoll import _C, doctor

    if not ctx.setup.path.startswith("nccl"):
        return Found("NCCL is not used here", False)
    before = nccl_files()
    with contextlib.suppress(RuntimeError):  # before 2.19 NCCL has no allocator
        _C._require_nccl_memory()
    files = nccl_files()
    if is_cuda(ctx):
        ctx.equal(files - before, set(), "copies of NCCL besides the one that torch has loaded:")
        files = {torchs} if (torchs := doctor.nccl_file()) else files
    elif asked := os.environ.get("MYCOLL_NCCL_LIBRARY"):
        files = {file for file in files if Path(file).samefile(asked)}
    if not files:
        ctx.fail("this process has loaded no libnccl.so: `mycoll doctor` shows what torch includes")
        return Found("")
    file, number = min(files), ctypes.c_int()
    ctypes.CDLL(file).ncclGetVersion(ctypes.byref(number))
    version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    if number.value < 21801:
        ctx.fail(f"NCCL {version} ({file}) is too old: mycoll needs 2.18.1")
    return Found(f"NCCL {version}, {file}{', as torch' if is_cuda(ctx) else ''}")


def init(ctx: Ctx) -> Found:
    """Connects the default group and another one."""

    def first(group: dist.ProcessGroup | None) -> float:
        x = full(ctx, ctx.rank + 1)
        began = time.monotonic()
        dist.all_reduce(x, group=group)
        is_all(ctx, x, total(ctx))
        return time.monotonic() - began

    world = first(None)
    group = dist.new_group()
    second = first(group)
    dist.destroy_process_group(group)
    text = f"first all_reduce after {1000 * world:.0f} ms, a second group's after"
    return Found(f"{text} {1000 * second:.0f} ms")


def same_results(ctx: Ctx) -> Found:
    """Compares every operation with torch's nccl, or on the stand-in device with CPU tensors."""
    count, off = 0, 0
    with rival(ctx) as other:
        for dtype in DTYPES:
            for numel in NUMELS:
                whole = (torch.arange(numel) % 3 + ctx.rank % 2).to(dtype)  # exact in any order
                for name in results.OPERATIONS:
                    if name.endswith("AVG") and not dtype.is_floating_point:
                        continue
                    mode = ("sync", "async")[count % 2]
                    with ctx.case(f"{name}/{arith.short(dtype)}/{numel}/{mode}"):
                        beside = whole if other is None else whole.to(ctx.device)
                        want = [x.cpu() for x in results.run(name, mode, beside, other)]
                        got = results.run(name, mode, whole.to(ctx.device))
                        for a, b in zip(got, want, strict=True):
                            if text := arith.difference(a.cpu(), b, True):
                                ctx.fail(text)
                    count += 1
        for numel in NUMELS:
            with ctx.case(f"random numbers/{numel}"):
                mine = arith.values(torch.float32, (numel,), ctx.rank)
                beside = mine if other is None else mine.to(ctx.device)
                (want,) = results.run("all_reduce SUM", "sync", beside, other)
                (got,) = results.run("all_reduce SUM", "sync", mine.to(ctx.device))
                off += not torch.equal(got.cpu(), want.cpu())
                ctx.same(got, want.cpu())
    beside_what = "CPU tensors" if not is_cuda(ctx) else "torch's nccl"
    text = f"{count} results equal those of {beside_what}"
    text += "; sums of random numbers differ in the last bits" if off else ", random numbers too"
    return Found(text)


def streams(ctx: Ctx) -> Found:
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return Found("with CUDA_LAUNCH_BLOCKING every call blocks the CPU", False)
    jobs.streams.after_the_current_stream(ctx)
    jobs.streams.host_does_not_wait(ctx)
    return Found("operations are ordered on their stream, and the CPU does not wait")


def ddp(ctx: Ctx) -> Found:
    """Compares training with that of one process with all batches, and with torch's nccl."""

    def trained(group: dist.ProcessGroup | None) -> torch.nn.Module:
        net = training.model()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.01, process_group=group)
        training.train(wrapped, [ctx.rank])
        return net

    with ctx.device, rival(ctx) as other:
        net = trained(None)
        training.compare(ctx, net, training.reference(ctx), 1e-4)
        if other is None:
            return Found(f"{training.STEPS} steps, the weights equal those of one process")
        is_same = all(
            torch.equal(a, b)
            for a, b in zip(net.parameters(), trained(other).parameters(), strict=True)
        )
    bits = "bitwise" if is_same else "not bitwise"
    text = f"{training.STEPS} steps, the weights equal those of one process and ({bits})"
    return Found(f"{text} those of torch's nccl")


def fsdp2(ctx: Ctx) -> Found:
    with ctx.device:
        fsdp.fsdp2(ctx)
    return Found(f"{training.STEPS} steps, the weights equal those of one process")


def messages(ctx: Ctx) -> Found:
    """A ring in a batch, and a message before a collective: the kernel of its send waits for the
    receiver."""
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    got = full(ctx, -1)
    ops = [dist.P2POp(dist.isend, full(ctx, ctx.rank), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    is_all(ctx, got, left, "the ring:")
    x, y = full(ctx, 7), full(ctx, ctx.rank + 1)
    sent = dist.isend(x, 1) if ctx.rank == 0 else None
    if ctx.rank == 1:
        dist.recv(got, 0)
    dist.all_reduce(y)
    if ctx.rank == 1:
        is_all(ctx, got, 7, "the message before a collective:")
    is_all(ctx, y, total(ctx))
    if sent is not None:
        sent.wait()
    torch.accelerator.synchronize()
    return Found("a ring in a batch, and isend right before all_reduce")


def capture(ctx: Ctx) -> Found:
    if not is_cuda(ctx) and torch.__version__ < "2.12":
        return Found("before torch 2.12 only CUDA has a query for captures", False)
    if not ctx.setup.path.startswith("nccl"):
        return Found("only operations over NCCL can be captured", False)
    x, gathered = full(ctx, 0), full(ctx, 0, NUMEL * ctx.size)
    for mode in ("sync", "async"):
        with ctx.case(mode):
            called(mode, dist.all_reduce, x)  # connects
            called(mode, dist.all_gather_into_tensor, gathered, x)
            x.fill_(ctx.rank)
            here(ctx).synchronize()
            graph = graph_on(ctx.device)
            with graph.capture():
                x.add_(1)
                called(mode, dist.all_reduce, x)
                called(mode, dist.all_gather_into_tensor, gathered, x)
            want = total(ctx)
            for replay in range(3):
                graph.replay()
                is_all(ctx, x, want, f"replay {replay}:")
                is_all(ctx, gathered, want, f"replay {replay}:")
                want = (want + 1) * ctx.size
            graph.reset()
    return Found("two graphs, three replays each")


def contexts(ctx: Ctx) -> Found:
    """No call creates a context on another GPU, also not in a thread that never chose a GPU."""

    def work(_: int) -> None:
        x = full(ctx, 1)
        for each in [dist.all_reduce(x, async_op=True) for _ in range(3)]:
            each.wait()
        dist.barrier()

    on_all(work, 1)
    found = jobs.contexts.contexts(ctx)
    ctx.equal(found, [ctx.device.index], "the GPUs on which this process has a context:")
    if torch.accelerator.device_count() == 1:
        return Found("there is only one GPU", False)
    return Found("each rank has one on its own GPU only")


def speed(ctx: Ctx) -> Found:
    """Measures the CPU time of a call and the bandwidth of a large all_reduce, as medians."""
    small = full(ctx, 1, 1024)
    is_real = is_cuda(ctx) and not standin_cuda.is_here()
    is_large = is_real and ctx.size <= torch.cuda.device_count()  # ranks that share one alternate
    large = full(ctx, 1, (64 if is_large else 1) << 18)
    calls, rounds = (100, 5) if is_cuda(ctx) else (20, 3)

    def once(group: dist.ProcessGroup | None) -> tuple[float, float]:
        torch.accelerator.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(small, group=group, async_op=True).wait()
        call = (time.perf_counter() - began) / calls
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(large, group=group)
        torch.accelerator.synchronize()
        return call, (time.perf_counter() - began) / 5

    with rival(ctx) as other:
        groups = [None] if other is None else [None, other]
        times: list[list[tuple[float, float]]] = [[] for _ in groups]
        for turn in range(rounds + 1):
            for i, group in enumerate(groups):
                found = once(group)
                if turn:
                    times[i].append(found)

    def line(kind: int, scale: Callable[[float], float], unit: str) -> str:
        each = [scale(median(t[kind] for t in mine)) for mine in times]
        beside = f" (torch's nccl {each[1]:.1f})" if len(each) > 1 else ""
        return f"{each[0]:.1f} {unit}{beside}"

    carried = large.nbytes * 2 * (ctx.size - 1) / ctx.size
    text = f"a call takes {line(0, lambda s: 1e6 * s, 'us')}, {large.nbytes >> 20} MiB "
    if ctx.size == 1:
        return Found(text + f"{line(1, lambda s: 1e6 * s, 'us')}; one rank launches no kernel")
    text += line(1, lambda s: carried / s / 1e9, "GB/s")
    return Found(text if is_real else f"{text}; the stand-in's times are not those of a GPU")


def killed(ctx: Ctx) -> Found:
    """The last rank is killed. The others get an error that names it, and continue in a new
    group."""
    last = ctx.size - 1
    x = full(ctx, 1)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    kill_one(ctx, last)
    began, text = time.monotonic(), ""
    try:
        while time.monotonic() - began < SOON and not text:
            dist.all_reduce(x)
            torch.accelerator.synchronize()
            time.sleep(0.01)
    except RuntimeError as error:
        text = str(error)
    took = time.monotonic() - began
    if f"rank {last}" not in text:
        ctx.fail(f"no error named rank {last} within {took:.1f} s: {text or 'there was no error'}")
        return Found("")
    dist.destroy_process_group()
    dist.init_process_group(
        ctx.backend, store=ctx.store("again"), rank=ctx.rank, world_size=last, timeout=ctx.timeout
    )
    y = full(ctx, ctx.rank + 1)
    dist.all_reduce(y)
    is_all(ctx, y, sum(range(1, last + 1)), "in the new group:")
    survivors = "the survivor creates" if last == 1 else "the survivors create"
    return Found(f"an error names rank {last} after {took:.1f} s, and {survivors} a new group")
