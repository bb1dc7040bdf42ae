"""Counters in Prometheus' text format."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
import torch.distributed as dist
from worlds.worker import Ctx

LINE = re.compile(
    r'^(\w+)\{rank="(\d+)",group="([^"]*)",name="[^"]+"(?:,operation="(\w+)")?\} (\S+)$'
)


def work(ctx: Ctx) -> None:
    for _ in range(10):
        dist.all_reduce(torch.ones(256))
    if ctx.rank == 0:
        dist.send(torch.ones(3), 1)
    if ctx.rank == 1:
        dist.recv(torch.empty(3), 0)
    time.sleep(2.5)


def stall(ctx: Ctx) -> None:
    if ctx.rank == 1:
        time.sleep(4)
    dist.barrier()


def read(path: Path) -> dict[tuple[str, str], float]:
    found = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            assert re.match(r"^# (HELP|TYPE) mycoll_\w+ \S", line), line
            continue
        if line.startswith("mycoll_written_timestamp_seconds{rank="):
            found["mycoll_written_timestamp_seconds", ""] = float(line.split()[1])
            continue
        match = LINE.match(line)
        assert match, line
        found[match[1], match[4] or ""] = float(match[5])
        assert match[3] == "default_pg"
    return found


def test_counters(fresh, transport, tmp_path) -> None:
    env = {"MYCOLL_METRICS_FILE": f"{tmp_path}/mycoll_%r.prom", "MYCOLL_METRICS_SECONDS": "1"}
    world = fresh(2, transport, env=env)
    world.run(work)
    for rank, message in ((0, "send"), (1, "recv")):
        values = read(tmp_path / f"mycoll_{rank}.prom")
        assert values["mycoll_operations_total", "all_reduce"] == 10
        assert values["mycoll_operation_bytes_total", "all_reduce"] == 10 * 1024
        assert 0 < values["mycoll_operation_seconds_total", "all_reduce"] < 60
        assert values["mycoll_operation_failures_total", "all_reduce"] == 0
        assert values["mycoll_operation_bytes_total", message] == 12
        assert values["mycoll_group_failed", ""] == 0
        assert values["mycoll_waiting_seconds", ""] == 0
        assert abs(time.time() - values["mycoll_written_timestamp_seconds", ""]) < 60
    assert not list(tmp_path.glob("*.prom.*"))

    # Also while nothing moves: that is when somebody looks.
    from test_status import during, eventually

    running = during(world, stall)
    path = tmp_path / "mycoll_0.prom"
    eventually(lambda: read(path)["mycoll_waiting_seconds", ""] > 1)
    running.result()


def twins(ctx: Ctx) -> None:
    for description in (None, None, "twin", "twin"):
        group = dist.new_group(group_desc=description)
        dist.all_reduce(torch.ones(4), group=group)
    time.sleep(2.5)


def test_no_series_is_there_twice(fresh, tmp_path) -> None:
    env = {"MYCOLL_METRICS_FILE": f"{tmp_path}/%r.prom", "MYCOLL_METRICS_SECONDS": "1"}
    fresh(2, "shm", env=env).run(twins)
    lines = (tmp_path / "0.prom").read_text().splitlines()
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len([s for s in series if s.startswith("mycoll_group_failed")]) == 5
    assert len([s for s in series if 'group="twin"' in s and "group_failed" in s]) == 2
    assert len(series) == len(set(series))


def failing(ctx: Ctx) -> None:
    ctx.init()
    dist.barrier()
    with ctx.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + ctx.rank))
    dist.destroy_process_group()


def test_failures_are_counted_to_the_end(fresh, tmp_path) -> None:
    env = {"MYCOLL_METRICS_FILE": f"{tmp_path}/%r.prom", "MYCOLL_METRICS_SECONDS": "3600"}
    fresh(2, "shm", init=False, env=env).run(failing)
    values = read(tmp_path / "0.prom")
    assert values["mycoll_operation_failures_total", "all_reduce"] == 1
    assert values["mycoll_group_failed", ""] == 1
