"""Measures collectives of objects, beside those of tensors and beside gloo's.

    ./dev python benchmarks/objects.py                          all cases
    ./dev python benchmarks/objects.py planning --shards 8000

    all_reduce   of a [2, 2] int32 tensor, which programs use to agree; 2 ranks
    gather       all_gather_object of 1 KiB, beside all_gather of 1 KiB; 2 ranks
    broadcast    tensors of 256 MiB in broadcast_object_list, beside broadcast; 2 ranks
    planning     torch.distributed.checkpoint.save() to a storage that writes nothing; 4 ranks

All contenders run in each round, in alternating order. The time of a round is that of one call on
the slowest rank. A ratio is the time of a contender over that of the first one in the same round.
Both are shown as median [lower quartile, upper quartile].
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import mycoll
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mycoll._gloo import keep_names_honest
from torch.futures import Future

Times = dict[str, list[float]]


def alternate(calls: dict[str, Callable[[], object]], rounds: int, repeat: int = 1) -> Times:
    """Returns the seconds of a call in each round."""
    times: Times = {name: [] for name in calls}
    for index in range(-2, rounds):  # two to warm up
        for name in list(calls) if index % 2 else list(calls)[::-1]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                calls[name]()
            took = torch.tensor((time.perf_counter() - began) / repeat, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if index >= 0:
                times[name].append(float(took))
    return times


def all_reduce(options: argparse.Namespace) -> Times:
    gloo = dist.new_group(backend="gloo")
    x = torch.ones(2, 2, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "mycoll": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        "gloo": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=gloo),
    }
    return alternate(calls, options.rounds or 30, repeat=100)


def gather(options: argparse.Namespace) -> Times:
    gloo = dist.new_group(backend="gloo")
    text, objects = "x" * 1024, [None] * dist.get_world_size()
    x = torch.zeros(1024, dtype=torch.uint8)
    outs = [torch.empty_like(x) for _ in objects]
    calls: dict[str, Callable[[], object]] = {
        "all_gather_object": lambda: dist.all_gather_object(objects, text),
        "all_gather": lambda: dist.all_gather(outs, x),
        "gloo's all_gather_object": lambda: dist.all_gather_object(objects, text, group=gloo),
    }
    return alternate(calls, options.rounds or 30, repeat=100)


def broadcast(options: argparse.Namespace) -> Times:
    tensors = [torch.ones(16 << 20) for _ in range(4)]  # 64 MiB each

    def of_objects() -> None:
        dist.broadcast_object_list(list(tensors) if dist.get_rank() == 0 else [None] * 4, src=0)

    def of_tensors() -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    calls = {"broadcast_object_list": of_objects, "broadcast": of_tensors}
    return alternate(calls, options.rounds or 20)


class NullWriter(dcp.StorageWriter):
    """Writes nothing, so that only the planning is measured."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **more: Any) -> None:
        pass

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[Any]]:
        written: Future[list[Any]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def planning(options: argparse.Namespace) -> Times:
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    state = {f"rank{rank}.{i}": torch.zeros(1) for i in range(options.shards // size)}

    def save(group: dist.ProcessGroup | None) -> None:
        dcp.save(state, storage_writer=NullWriter(), process_group=group)

    calls = {"mycoll": lambda: save(None), "gloo": lambda: save(gloo)}
    return alternate(calls, options.rounds or 7)


CASES = {all_reduce: 2, gather: 2, broadcast: 2, planning: 4}  # the number of ranks


def middle(values: list[float], unit: float = 1.0) -> str:
    low, median, high = (value / unit for value in quantiles(values, n=4, method="inclusive"))
    return f"{median:.3g} [{low:.3g}, {high:.3g}]"


def main() -> None:
    names = [case.__name__ for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(names))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--shards", type=int, default=100_000, help="of all ranks together")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(names):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    keep_names_honest("objects")
    for case, ranks in CASES.items():
        if options.cases and case.__name__ not in options.cases:
            continue
        times = mycoll.spawn(case, ranks, (options,))[0]
        first, *others = times
        print(f"{case.__name__}, {ranks} ranks, {len(times[first])} rounds")
        for name, taken in times.items():
            print(f"    {name:26} {middle(taken, 1e-6)} us")
        for name in others:
            ratios = [b / a for a, b in zip(times[first], times[name], strict=True)]
            print(f"    {f'{name} / {first}':45} {middle(ratios)}")


if __name__ == "__main__":
    main()
