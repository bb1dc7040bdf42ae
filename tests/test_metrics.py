"""Counters in Prometheus' text format."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mycoll import black_box, metrics
from worlds.during import during, eventually
from worlds.worker import Ctx

LINE = re.compile(
    r'^(\w+)\{rank="(\d+)",pid="\d+",group="([^"]+)"(?:,description="[^"]+")?'
    r'(?:,operation="(\w+)")?\} (\S+)$'
)


def work(ctx: Ctx) -> int:
    for _ in range(10):
        dist.all_reduce(torch.ones(256))
    if ctx.rank == 0:
        dist.send(torch.ones(3), 1)
    if ctx.rank == 1:
        dist.recv(torch.empty(3), 0)
    return os.getpid()


def stall(ctx: Ctx, mark: str) -> None:
    while ctx.rank == 1 and not Path(mark).exists():
        time.sleep(0.05)
    dist.barrier()


def read(text: str, rank: int) -> dict[tuple[str, str, str], float]:
    """The values by name, group and operation."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.match(r"^# (HELP|TYPE) mycoll_\w+ \S", line), line
            continue
        match = LINE.match(line)
        assert match, line
        if int(match[2]) == rank:
            key = match[1], match[3], match[4] or ""
            assert key not in found, line
            found[key] = float(match[5])
    return found


def look(numbers: list[int], rank: int = 0) -> dict[tuple[str, str, str], float]:
    return read(metrics.as_text(black_box.find(numbers)), rank)


def test_counters(fresh, transport, tmp_path) -> None:
    world = fresh(2, transport)
    numbers = world.run(work)
    for rank, message in ((0, "send"), (1, "recv")):
        values = look(numbers, rank)
        assert values["mycoll_operations_total", "0", "all_reduce"] == 10
        assert values["mycoll_operation_bytes_total", "0", "all_reduce"] == 10 * 1024
        assert 0 < values["mycoll_operation_seconds_total", "0", "all_reduce"] < 60
        assert values["mycoll_operation_failures_total", "0", "all_reduce"] == 0
        assert values["mycoll_operation_bytes_total", "0", message] == 12
        assert values["mycoll_group_failed", "0", ""] == 0
        assert values["mycoll_waiting_seconds", "0", ""] == 0

    # The counters can also be read while a collective waits.
    mark = tmp_path / "go"
    running = during(world, stall, str(mark))
    try:
        eventually(lambda: look(numbers)["mycoll_waiting_seconds", "0", ""] > 1)
    finally:
        mark.touch()
    running.result()


def twins(ctx: Ctx) -> int:
    for description in (None, None, "twin", "twin"):
        group = dist.new_group(group_desc=description)
        dist.all_reduce(torch.ones(4), group=group)
    return os.getpid()


def test_each_series_is_unique(fresh) -> None:
    values = look(fresh(2, "shm").run(twins))
    assert len([name for name, _, _ in values if name == "mycoll_group_failed"]) == 5


def test_a_group_and_its_successor_of_one_name() -> None:
    group = black_box.Group("0", "", "c1", 0, 2, [0, 1], phase="failed")
    group.counts = {"barrier": black_box.Counts(2, 1, 0, 1.0)}
    again = black_box.Group("0", "", "c2", 0, 2, [0, 1])
    again.counts = {"barrier": black_box.Counts(3, 0, 0, 1.0)}
    process = black_box.Process(0, 7, "vm", "j", "1", taken=3.0, groups=[group, again])
    values = read(metrics.as_text([process]), 0)
    assert values["mycoll_operations_total", "0", "barrier"] == 5
    assert values["mycoll_group_failed", "0", ""] == 1


Values = dict[tuple[str, str, str], float]


def fails_and_starts_again(ctx: Ctx) -> tuple[Values, Values]:
    """The values of this process while its group is dead, and in the next group."""
    ctx.init()
    dist.barrier()
    with ctx.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + ctx.rank))
    dead = look([os.getpid()], ctx.rank)
    dist.destroy_process_group()
    ctx.init("again")
    dist.barrier()
    return dead, look([os.getpid()], ctx.rank)


def test_counters_outlive_their_group(fresh) -> None:
    dead, again = fresh(2, "shm", init=False).run(fails_and_starts_again)[0]
    assert dead["mycoll_operation_failures_total", "0", "all_reduce"] == 1
    assert dead["mycoll_group_failed", "0", ""] == 1
    assert again["mycoll_operation_failures_total", metrics.ENDED, "all_reduce"] == 1
    assert again["mycoll_operations_total", metrics.ENDED, "barrier"] == 1
    assert again["mycoll_operations_total", "0", "barrier"] == 1
    assert again["mycoll_group_failed", "0", ""] == 0


def test_command(fresh, tmp_path, monkeypatch, capsys) -> None:
    numbers = fresh(2, "shm").run(work)
    path = tmp_path / "mycoll.prom"
    seen = []

    def pause(seconds: float) -> None:
        seen.append((seconds, path.read_text()))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(metrics.time, "sleep", pause)
    assert metrics.main(["--file", str(path), "--every", "15"]) == 0
    assert [seconds for seconds, _ in seen] == [15, 15]
    assert all(f'rank="1",pid="{numbers[1]}"' in text for _, text in seen)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert metrics.main([]) == 0
    assert f'rank="0",pid="{numbers[0]}"' in capsys.readouterr().out
    assert metrics.main(["--file", f"{tmp_path}/none/x.prom"]) == 2
    for words in (["--every", "1"], ["--file", "."]):
        with pytest.raises(SystemExit):
            metrics.main(words)


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        metrics.write(tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        metrics.write(tmp_path / "x.prom")
    assert not list(tmp_path.iterdir())
