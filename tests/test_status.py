"""`mycoll status`: the state of running processes, read by another process while they hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mycoll import black_box, status
from worlds import warm
from worlds.during import PATIENCE, during, eventually
from worlds.worker import Ctx


def pids(ctx: Ctx) -> int:
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    return os.getpid()


def stuck(ctx: Ctx, culprit: int, mark: str) -> None:
    """One rank does not call all_reduce and holds the GIL, as a busy C extension would."""
    if ctx.rank == culprit:
        deadline = time.monotonic() + PATIENCE
        while not Path(mark).exists() and time.monotonic() < deadline:
            sum(range(10_000_000))
    dist.all_reduce(torch.ones(25))


def test_waiting_ranks_and_missing_ranks(fresh, transport, tmp_path) -> None:
    world = fresh(3, transport)
    numbers = world.run(pids)
    mark = tmp_path / "go"
    running = during(world, stuck, 1, str(mark))

    def look() -> list[black_box.Process]:
        found = black_box.find(numbers)
        waiting = [each for each in found if each.groups[0].current()]
        return (
            found if len(waiting) == 2 and all(w.groups[0].current().site for w in waiting) else []
        )

    try:
        found = eventually(look)
        assert [each.rank for each in found] == [0, 1, 2]
        assert [each.pid for each in found] == numbers
        assert len({each.job for each in found}) == 1
        for process in found:
            (group,) = process.groups
            assert (group.ranks, group.description) == (3, "default_pg")
            assert group.global_ranks == [0, 1, 2]
            assert status.waits_for(group, found) == ([1] if process.rank != 1 else [])
        operation = found[0].groups[0].current()
        assert operation.describe() == "all_reduce SUM float32 numel=25"
        assert operation.site.startswith("test_status.py:")
        assert operation.site.endswith("in stuck")
        assert operation.state == "started"
        table = status.as_text(found)
        assert "all_reduce #2 SUM float32 numel=25" in table
        assert "idle, last barrier #1" in table

        time.sleep(status.LONG_SECONDS)
        findings = "\n".join(status.findings(black_box.find(numbers)))
        assert "all_reduce #2" in findings
        assert "on rank 0, 2" in findings
        assert f"rank 1 (pid {numbers[1]}) has not called it" in findings

        os.kill(numbers[1], signal.SIGSTOP)
        stopped = eventually(lambda: black_box.find(numbers)[1].state == "T")
        assert stopped
        assert "it is stopped" in "\n".join(status.findings(black_box.find(numbers)))
        assert "stopped" in status.as_text(black_box.find(numbers))
    finally:
        os.kill(numbers[1], signal.SIGCONT)
        mark.touch()
    running.result()
    assert all(each.groups[0].current() is None for each in black_box.find(numbers))


def receive(ctx: Ctx, mark: str) -> None:
    if ctx.rank == 1:
        deadline = time.monotonic() + PATIENCE
        while not Path(mark).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.send(torch.ones(5), 0, tag=7)
    if ctx.rank == 0:
        dist.recv(torch.empty(5), 1, tag=7)


def test_messages(fresh, transport, tmp_path) -> None:
    world = fresh(2, transport)
    numbers = world.run(pids)
    mark = tmp_path / "go"
    running = during(world, receive, str(mark))
    try:
        found = eventually(
            lambda: [each for each in black_box.find(numbers) if each.groups[0].busy_with()]
        )
    finally:
        mark.touch()
    operation = found[0].groups[0].busy_with()
    assert operation.describe() == "recv from rank 1 float32 numel=5 tag=7"
    assert "recv" in status.as_text(found)
    running.result()


def groups(ctx: Ctx) -> int:
    dist.barrier()
    pair = dist.new_group([0, 1], group_desc="a pair")
    for _ in range(3):
        other = dist.new_group([0, 1])
        if ctx.rank < 2:
            dist.all_reduce(torch.ones(1), group=other)
        dist.destroy_process_group(other)
    if ctx.rank < 2:
        dist.all_reduce(torch.ones(1), group=pair)
    return os.getpid()


def test_groups_that_were_destroyed_are_not_shown(fresh) -> None:
    found = black_box.find(fresh(3, "shm").run(groups))
    assert [[group.description for group in each.groups] for each in found] == [
        ["default_pg", "a pair"],
        ["default_pg", "a pair"],
        ["default_pg"],
    ]
    assert found[0].groups[1].context == found[1].groups[1].context
    assert found[0].groups[1].submitted == 1


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.run_module("mycoll", *words)


def test_command(fresh, capsys) -> None:
    numbers = fresh(2, "shm").run(pids)
    words = [str(each) for each in numbers]
    shown = command("status", *words)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("default_pg") == 2
    assert status.main(["--json", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["processes"]
    assert [row["pid"] for row in rows] == numbers
    assert rows[0]["groups"][0]["submitted"] == 2
    # Finds all processes of this user.
    assert status.main(["--json", "--job", rows[0]["job"]]) == 0
    everything = json.loads(capsys.readouterr().out)["processes"]
    assert [row["pid"] for row in everything] == numbers


def fork(ctx: Ctx) -> int:
    """Forks a child that lives until this rank ends."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    return child


def test_children_are_not_ranks(fresh) -> None:
    world = fresh(2, "shm")
    world.run(pids)
    child = world.run(fork)[0]
    assert black_box.read(child) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_have_no_access(fresh) -> None:
    (number, *_) = fresh(2, "shm").run(pids)
    assert black_box.read(number) is not None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        os.write(writer, b"hidden" if black_box.read(number) is None else b"shown")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"hidden"
    os.close(reader)
    os.close(writer)


def seen(rank: int, job: str, context: str, **more: Any) -> black_box.Process:
    group = black_box.Group("0", "default_pg", context, rank, 2, [0, 1], **more)
    return black_box.Process(rank, 100 + rank, "vm", job, "1", "S", taken=100.0, groups=[group])


def waiting() -> black_box.Operation:
    return black_box.Operation("all_reduce", 4, "started", 10.0, 10.0, None, "float32", "SUM")


def test_a_world_of_two_jobs() -> None:
    """One rank was restarted and the other was not: they are shown as one world."""
    survivor = seen(0, "aaaa", "c2", submitted=5, finished=4)
    survivor.groups[0].operations = [waiting()]
    table = status.as_text([survivor, seen(1, "bbbb", "c2", submitted=4, finished=4)])
    assert table.count("job ") == 1
    assert "rank 1 (pid 101) has not called it" in table


def test_a_rank_that_has_left() -> None:
    stuck = seen(0, "aaaa", "c1", submitted=5, finished=4, waits_for=[1], waits_for_more=3)
    stuck.groups[0].operations = [waiting()]
    left = seen(1, "aaaa", "c1")
    left.groups.clear()
    table = status.as_text([stuck, left])
    assert "rank 1 (pid 101) has left the group, or has not made it yet" in table
    assert "1 and 3 more" in table


def test_no_processes(capsys) -> None:
    assert status.main(["--job", "nosuch"]) == 1
    assert "no such mycoll process" in capsys.readouterr().out


def test_the_table_fits_80_columns(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stuck = seen(0, "aaaa", "c1", submitted=5, finished=4, waits_for=[1], waits_for_more=3)
    stuck.groups[0].operations = [waiting()]
    stuck.groups[0].operations[0].site = "a_program_with_a_long_name.py:4711 in a_step_of_training"
    failed = seen(1, "aaaa", "c1", phase="failed", failure="[Rank 1]: " + "something " * 40)
    failed.state = "t"
    unused = [black_box.Group(str(n), "", f"d{n}", 1, 2, [0, 1]) for n in range(40)]
    failed.groups += unused
    table = status.as_text([stuck, failed])
    assert max(map(len, table.splitlines())) <= 80, table
    assert "in a debugger" in table
    assert table.count("groups without calls: 0, 1, 2, ") == 1
    assert "at a_program_with_a_long_name.py:4711" in table


def test_bad_arguments_come_before_the_usage(capsys) -> None:
    for words in (["--job"], ["--nonsense"], ["notapid"]):
        with pytest.raises(SystemExit):
            status.main(words)
        assert capsys.readouterr().err.startswith("mycoll status: ")
