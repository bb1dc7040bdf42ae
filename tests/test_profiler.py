"""torch.profiler shows mycoll's operations like those of gloo and nccl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")

CALLED = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier"]


def traced(ctx: Ctx, folder: str) -> None:
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen,
        record_function("step"),
    ):
        dist.all_reduce(torch.ones(10, 20))
        dist.all_reduce(torch.ones(3, dtype=torch.bfloat16), async_op=True).wait()
        dist.broadcast(torch.ones(5), 1)
        dist.all_gather_into_tensor(torch.empty(4 * ctx.size), torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * ctx.size))
        dist.all_to_all_single(torch.empty(ctx.size), torch.ones(ctx.size))
        if ctx.rank == 0:
            dist.send(torch.ones(6), 1)
        if ctx.rank == 1:
            dist.recv(torch.empty(6), 0)
        dist.barrier()
    seen.export_chrome_trace(f"{folder}/{ctx.rank}.json")


def named(ctx: Ctx) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with dist.record_comm("of the first layer"):
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.all_reduce(torch.ones(3))
    return [each.name for each in seen.events()]


def test_names_given_by_the_program(reused, transport) -> None:
    if not hasattr(dist, "record_comm"):
        pytest.skip("this torch has no record_comm")
    for names in reused(2, transport).run_in_group(named):
        assert names.count("of the first layer") == 2, names
        assert names.count("mycoll:all_reduce") == 1, names


def shapes(ctx: Ctx, family: str) -> list[tuple[str, bool, list[list[int]]]]:
    """The name, the mode and the input shapes of the event of each operation."""
    group = dist.new_group(backend=family)
    me, size = ctx.rank, ctx.size
    column = [torch.ones(2, 3) for _ in range(size)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(10, 20), group=group)
        dist.all_reduce(torch.ones(7), group=group, async_op=True).wait()
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(4, 2)], group=group)
        dist.broadcast(torch.ones(5), 1, group=group)
        dist.reduce(torch.ones(6, 2), 0, group=group)
        dist.all_gather(column, torch.ones(2, 3), group=group)
        dist.gather(torch.ones(2, 3), column if me == 0 else None, 0, group=group)
        dist.scatter(torch.ones(2, 3), column if me == 0 else None, 0, group=group)
        dist.all_to_all_single(torch.ones(size, 4), torch.ones(size, 4), group=group)
        if me == 0:
            dist.send(torch.ones(6), 1, group=group)
        if me == 1:
            dist.recv(torch.ones(6), 0, group=group)
        dist.barrier(group=group)
    found = [each for each in seen.events() if each.name.startswith(f"{family}:")]
    return [(each.name.partition(":")[2], each.is_async, each.input_shapes) for each in found]


def both_shapes(ctx: Ctx) -> list[Any]:
    return [shapes(ctx, family) for family in ("gloo", "mycoll")]


def test_events_have_the_shapes_of_gloo(fresh, transport, backend) -> None:
    """torch's own tests compare the shapes."""
    if backend != "mycoll":
        pytest.skip("compares both")
    for theirs, ours in fresh(2, transport).run(both_shapes):
        assert len(theirs) == len(ours), (theirs, ours)
        for their, our in zip(theirs, ours, strict=True):
            assert their[1:] == our[1:], (their, our)


def events(path: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]


def test_names_and_details(reused, transport, tmp_path) -> None:
    reused(2, transport).run_in_group(traced, str(tmp_path))
    for rank in range(2):
        found = events(tmp_path / f"{rank}.json")
        names = [each["name"] for each in found]
        for name in [*CALLED, "send" if rank == 0 else "recv"]:
            assert any(each.startswith(f"mycoll:{name}") for each in names), (name, set(names))
        details = [each["args"] for each in found if each["name"] == "record_param_comms"]
        assert len(details) == 8
        first = details[0]
        assert first["Collective name"].startswith("all_reduce")
        assert first["In msg nelems"] == first["Out msg nelems"] == 200
        assert first["Group size"] == 2
        assert first["dtype"] == "Float"
        assert first["Process Group Description"] == "default_pg"
        assert first["Process Group Ranks"] == "[0, 1]"
        assert details[1]["dtype"] == "BFloat16"
        assert details[2]["In msg nelems"] == details[2]["Out msg nelems"] == 5
        assert details[2]["Rank"] == 1  # the root
        # Each event lasts as long as the operation, not only as long as its call.
        step = next(each for each in found if each["name"] == "step")
        spans = [each for each in found if each["name"].startswith("mycoll:")]
        for span in spans:
            assert step["ts"] <= span["ts"]
            assert span["ts"] + span["dur"] <= step["ts"] + step["dur"] + 1000
