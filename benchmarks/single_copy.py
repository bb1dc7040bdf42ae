"""Measures calls within a host with staging, with single copy, and with the automatic choice.

    ./dev python benchmarks/single_copy.py                       two ranks, 64 KiB to 16 MiB
    ./dev python benchmarks/single_copy.py --ranks 4 --sizes 1M --huge-pages
    ./dev python benchmarks/single_copy.py --operations send_recv,exchange --sizes 64K,1M,64M

send_recv: each rank with an even number sends to the next one. exchange: they send to each other.

Three jobs of the same ranks alternate: MYCOLL_SINGLE_COPY=off, on and auto. Each rank writes to its
tensors before each call. The time of a turn is the median of its calls on the slowest rank. The
table shows the median over the turns, and the ratio to "off" in the same turn with its quartiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from statistics import median, quantiles

import torch
import torch.distributed as dist
from mycoll._units import parse_size, show_size

USES = ("off", "on", "auto")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
MESSAGES = ("send_recv", "exchange")
SIZES = "64K,128K,256K,512K,1M,2M,4M,16M"
BYTES_OF_TURN = 32 << 20
CALLS_OF_FIRST_TURN = 16  # enough for the automatic choice


def call(
    operation: str, tensor: torch.Tensor, parts: list[torch.Tensor], wholes: list[torch.Tensor]
) -> None:
    """Makes one call. A rank sends `tensor`. `parts` together have its size, and so has each of
    `wholes`."""
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    elif operation == "reduce_scatter":
        dist.reduce_scatter(parts[dist.get_rank()], list(tensor.chunk(len(parts))))
    elif operation == "all_gather":
        dist.all_gather(wholes, tensor)
    elif operation == "broadcast":
        dist.broadcast(tensor, 0)
    elif operation == "send_recv":
        if dist.get_rank() % 2:
            dist.recv(wholes[0], dist.get_rank() - 1)
        else:
            dist.send(tensor, dist.get_rank() + 1)
    elif operation == "exchange":
        other = dist.get_rank() ^ 1
        both = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, wholes[0], other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    else:
        dist.all_to_all(parts, list(tensor.chunk(len(parts))))


def serve(pipe: Connection, rank: int, ranks: int, port: int, use: str, huge_pages: bool) -> None:
    """Runs the turns of one rank until the pipe is closed."""
    os.environ["MYCOLL_SINGLE_COPY"] = use
    if huge_pages:
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    mine = dist.PrefixStore(use, store)
    dist.init_process_group("mycoll", store=mine, rank=rank, world_size=ranks)
    while True:
        try:
            operation, nbytes, least_calls = pipe.recv()
        except EOFError:
            return
        tensor = torch.ones(nbytes // 4 // ranks * ranks)
        parts = list(torch.empty_like(tensor).chunk(ranks))
        wholes = [torch.zeros_like(tensor) for _ in parts]
        times = []
        for index in range(max(least_calls, min(100, BYTES_OF_TURN // nbytes))):
            tensor.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            call(operation, tensor, parts, wholes)
            if index:
                times.append(time.perf_counter() - began)
        pipe.send(median(times) * 1e6)


def main() -> None:
    """Starts the jobs, runs their turns and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES)
    known = ", ".join(OPERATIONS + MESSAGES)
    parser.add_argument("--operations", default=",".join(OPERATIONS), help=f"of {known}")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--huge-pages", action="store_true", help="tensors on huge pages")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    jobs: dict[str, list[Connection]] = {use: [] for use in USES}
    for use, pipes in jobs.items():
        for rank in range(options.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, options.ranks, store.port, use, options.huge_pages)
            context.Process(target=serve, args=arguments, daemon=True).start()
            pipes.append(ours)
    print("| | " + " | ".join(f"{use}, us" for use in USES) + " | on/off | auto/off |")
    print("|---|" + "---|" * (len(USES) + 2))
    for operation in options.operations.split(","):
        for size in map(parse_size, options.sizes.split(",")):
            taken: dict[str, list[float]] = {use: [] for use in USES}
            for turn in range(-1, options.turns):
                for use in USES if turn % 2 else USES[::-1]:
                    for pipe in jobs[use]:
                        pipe.send((operation, size, CALLS_OF_FIRST_TURN if turn < 0 else 4))
                    slowest = max(pipe.recv() for pipe in jobs[use])
                    if turn >= 0:  # the first turn connects the ranks, and makes the choice
                        taken[use].append(slowest)
            row = [f"{median(taken[use]):.1f}" for use in USES]
            for use in USES[1:]:
                pairs = zip(taken[use], taken["off"], strict=True)
                low, middle, high = quantiles((mine / off for mine, off in pairs), n=4)
                row.append(f"{middle:.2f} [{low:.2f} {high:.2f}]")
            print(f"| {operation} {show_size(size)} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
