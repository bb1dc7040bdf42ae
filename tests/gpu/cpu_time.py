"""Measures the CPU time of operations on CUDA tensors, beside torch's own nccl in the same
processes.

    torchrun --nproc-per-node 2 -m worlds.program cuda nccl gpu.cpu_time [seconds]

The backends alternate for many rounds. A row has medians over the rounds, and the median of their
ratios with its quartiles. `call` is the time until the call returns, and `cpu` the CPU time of the
process including helper threads, both in microseconds per operation. Rank 0 prints the table. On an
idle device (STANDIN_IDLE, see standins/device/standin_device.h) no call waits for the device, so
that mostly torch and the two backends are measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist

BACKENDS = ("mycoll", "nccl")
NUMEL = 1024
IN_A_ROW = 100  # operations of a round, after which the device is synchronized

Operation = Callable[[dist.ProcessGroup], None]


def operations(device: torch.device, rank: int, size: int) -> dict[str, Operation]:
    x = torch.empty(NUMEL, device=device)
    wide = torch.empty(NUMEL * size, device=device)
    right, left = (rank + 1) % size, (rank - 1) % size

    def async_all_reduce(group: dist.ProcessGroup) -> None:
        dist.all_reduce(x, group=group, async_op=True).wait()

    def ten_at_once(group: dist.ProcessGroup) -> None:
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(10)]
        for work in works:
            work.wait()

    def ring(group: dist.ProcessGroup) -> None:
        ops = [
            dist.P2POp(dist.isend, x, right, group),
            dist.P2POp(dist.irecv, wide[:NUMEL], left, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    found: dict[str, Operation] = {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "all_reduce, async and wait": async_all_reduce,
        "10 all_reduces, async, then 10 waits": ten_at_once,
        "broadcast": lambda group: dist.broadcast(x, 0, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(wide, x, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(x, wide, group=group),
    }
    if size > 1:
        found["batch_isend_irecv, both sides"] = ring
    return found


def new_group(backend: str) -> None:
    """Creates a group, connects it, and destroys it."""
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.empty(NUMEL, device="cuda"), group=group)
    torch.cuda.synchronize()
    dist.destroy_process_group(group)


def idle() -> str:
    costs = os.environ.get("STANDIN_IDLE")
    if costs is None:
        return "on a GPU"
    runtime, nccl = costs.split(",")
    return f"idle stand-ins; a call of CUDA's runtime takes {runtime} ns, one of NCCL {nccl} ns"


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """The microseconds that passed, and those of CPU time of the process."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - wall) / 1e3, (time.process_time_ns() - cpu) / 1e3


def alternate(run: Callable[[str], None], count: int, rounds: int, align: dist.ProcessGroup) -> str:
    """Returns the cells of a row. Their times are those of one of `count` operations."""
    times: dict[str, list[tuple[float, float]]] = {backend: [] for backend in BACKENDS}
    for turn in range(rounds + 1):
        for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
            dist.barrier(group=align)
            found = timed(lambda backend=backend: run(backend))
            torch.cuda.synchronize()
            if turn != 0:
                times[backend].append(found)
    cells = []
    for kind in (0, 1):
        ours, theirs = ([t[kind] for t in times[backend]] for backend in BACKENDS)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        cells += [f"{median(each) / count:.1f}" for each in (ours, theirs)]
        cells += [f"{middle:.2f} [{low:.2f} {high:.2f}]"]
    return " | ".join(cells)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    align = dist.group.WORLD
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows: list[tuple[str, Callable[[str], None], int]] = []
    for name, operation in operations(device, rank, size).items():

        def run(backend: str, operation: Operation = operation) -> None:
            for _ in range(IN_A_ROW):
                operation(groups[backend])

        rows.append((name, run, IN_A_ROW))
    rows.append(("new_group, all_reduce, destroy_process_group", new_group, 1))
    if rank == 0:
        print("| operation | mycoll, call us | nccl | ratio | mycoll, cpu us | nccl | ratio |")
        print("|---|---|---|---|---|---|---|")
    for name, run, count in rows:
        once = torch.tensor([0.0])
        for backend in (*BACKENDS, *BACKENDS):  # the first call connects
            once[0] = timed(lambda run=run, backend=backend: run(backend))[0]
        dist.all_reduce(once, op=dist.ReduceOp.MAX, group=align)
        rounds = max(6, min(400, int(seconds / len(rows) / (2e-6 * once.item()))))
        cells = alternate(run, count, rounds, align)
        if rank == 0:
            print(f"| {name} | {cells} |", flush=True)
    if rank == 0:
        print(f"\n{IN_A_ROW} in a row; {NUMEL} float32 each; {idle()}")
    for group in groups.values():
        dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
