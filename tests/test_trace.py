"""`mycoll trace`: finds the rank that is missing or differs, from traces of real failures."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mycoll import black_box, timeline, trace
from mycoll.black_box import Group, Operation, Process
from torch.distributed import distributed_c10d
from worlds import warm
from worlds.worker import Ctx

SHORT = 1.5  # seconds; the group's timeout after init


def failing(ctx: Ctx, how: str, late: int) -> None:
    ctx.init()
    pair = dist.new_group([0, 1], group_desc="pair")
    for _ in range(20):
        dist.all_reduce(torch.ones(100))
    if ctx.rank < 2:
        dist.all_reduce(torch.ones(3), group=pair)
    dist.barrier()
    time.sleep(0.3)  # a failure may precede the end of earlier operations on other ranks
    if how in ("missing", "message"):
        distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), dist.group.WORLD)
    try:
        if how == "mismatch":
            if ctx.rank == late:
                time.sleep(1.0)
            if ctx.rank == 1:
                dist.broadcast(torch.ones(7), 0)
            else:
                dist.all_reduce(torch.ones(7))
        elif how == "missing" and ctx.rank == 1:
            time.sleep(SHORT + 1.5)
        elif how == "dead" and ctx.rank == 1:
            os._exit(3)
        elif how == "message":
            if ctx.rank == 2:
                dist.recv(torch.empty(9), 0, tag=5)
            else:
                time.sleep(SHORT + 1.5)
        else:
            dist.all_reduce(torch.ones(7))
    except dist.DistBackendError:
        pass


@pytest.fixture
def failed(fresh, tmp_path):
    def fail(how: str, transport: str, late: int = -1) -> list[Any]:
        env = {"MYCOLL_TRACE_FILE": f"{tmp_path}/rank_%r"}
        world = fresh(3, transport, init=False, env=env)
        try:
            world.run(failing, how, late)
        except AssertionError:
            assert how == "dead"
        return black_box.load_all([tmp_path])[0]

    return fail


def test_mismatch(failed, transport) -> None:
    processes = failed("mismatch", transport)
    assert [each.rank for each in processes] == [0, 1, 2]
    first, *others = trace.analyse(processes)
    assert (first.kind, first.group, first.sequence, first.ranks) == (
        "differs",
        "0 (default_pg)",
        21,
        [1],
    )
    usual, odd = first.text.splitlines()[1:]
    assert "rank 0, 2: all_reduce SUM float32 numel=7, at test_trace.py:" in usual
    assert "rank 1: broadcast float32 numel=7 root=0, at test_trace.py:" in odd
    assert {each.kind for each in others} == {"failed"}


def test_a_late_call_is_included(failed, transport) -> None:
    """The process was notified of the failure, and wrote a trace, before its late call."""
    first, *_ = trace.analyse(failed("mismatch", transport, late=2))
    assert (first.kind, first.sequence, first.ranks) == ("differs", 21, [1])
    assert "rank 0, 2: all_reduce SUM float32 numel=7, at test_trace.py:" in first.text


def test_missing(failed, transport) -> None:
    first, *_ = trace.analyse(failed("missing", transport))
    assert (first.kind, first.sequence, first.ranks) == ("absent", 21, [1])
    assert first.waited >= SHORT - 0.1
    usual, odd = first.text.splitlines()
    assert "all_reduce #21 SUM float32 numel=7 has waited" in usual
    assert " on rank 0, 2, at test_trace.py:" in usual
    assert re.search(r"rank 1 \(pid \d+\) has not called it; its last was barrier #20", odd)


def test_dead(failed, transport) -> None:
    processes = failed("dead", transport)
    assert [each.rank for each in processes] == [0, 2]
    found = {each.kind: each for each in trace.analyse(processes)}
    assert found["unfinished"].sequence == 21
    assert "rank 1 is not among these processes" in found["unfinished"].text
    assert found["no trace"].ranks == [1]
    assert "rank 1" in found["failed"].text


def test_message(failed, transport) -> None:
    first, *_ = trace.analyse(failed("message", transport))
    assert (first.kind, first.ranks) == ("message", [0])
    waited = re.search(r"rank 2 has waited ([\d.]+) s", first.text)
    assert waited and float(waited[1]) >= SHORT - 0.1, first.text
    assert "in recv from rank 0 with tag 5" in first.text


def healthy(ctx: Ctx, folder: str) -> None:
    import mycoll

    for _ in range(3 + ctx.rank):
        dist.all_reduce(torch.ones(4)) if _ < 3 else None
    mycoll.dump_trace(f"{folder}/earlier_{ctx.rank}")


def test_no_differences(fresh, tmp_path) -> None:
    fresh(2, "shm").run(healthy, str(tmp_path))
    assert list(trace.analyse(black_box.load_all([tmp_path])[0])) == []


def command(*words: Any) -> subprocess.CompletedProcess[str]:
    return warm.run_module("mycoll", "trace", *map(str, words))


def test_command_and_export(failed, tmp_path, capsys) -> None:
    failed("missing", "shm")
    exported = tmp_path / "lanes.json"
    shown = command(tmp_path, "--export", exported)
    assert shown.returncode == 1, shown.stderr
    assert "on rank 0, 2," in " ".join(shown.stdout.split())
    events = json.loads(exported.read_text())["traceEvents"]
    rows = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(rank, "group 0 (default_pg)") for rank in range(3)} <= rows
    assert any(re.fullmatch(r"group \w+ \(pair\)", name) for rank, name in rows if rank == 1)
    last = [each for each in events if each["ph"] == "X" and each["args"].get("number") == 21]
    assert {each["pid"] for each in last} == {0, 2}
    for each in last:
        assert each["args"]["call"] == "all_reduce SUM float32 numel=7"
        assert each["args"]["at"].startswith("test_trace.py:")
        assert each["args"]["state"] in ("started", "failed")
        assert each["dur"] >= (SHORT - 0.1) * 1e6
    (arrow,) = [each for each in events if each["ph"] == "i"]
    assert (arrow["pid"], arrow["name"]) == (1, "absent")
    files = [tmp_path / f"rank_{rank}" for rank in range(3)]
    assert trace.main([*map(str, files), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found[0]["kind"] == "absent"
    assert found[0]["ranks"] == [1]


def test_bad_options(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        trace.main([str(tmp_path), "--live"])
    complaint, *_ = capsys.readouterr().err.splitlines()
    assert complaint.startswith("mycoll trace: --live")


def test_a_trace_is_data(tmp_path, capsys) -> None:
    """Loading a trace does not execute code."""

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "was_run"),))

    (tmp_path / "rank_0").write_bytes(pickle.dumps(Evil()))
    assert trace.main([str(tmp_path / "rank_0")]) == 2
    assert "is not a trace" in capsys.readouterr().err
    assert not (tmp_path / "was_run").exists()
    assert trace.main([str(tmp_path / "nowhere_1")]) == 2


def test_files_that_are_not_traces(fresh, tmp_path) -> None:
    fresh(2, "shm").run(healthy, str(tmp_path))
    good = (tmp_path / "earlier_0").read_bytes()
    assert black_box.load(tmp_path / "earlier_0").rank == 0
    length = int.from_bytes(good[12:16], "little")
    no_layout = good[:16] + b"[" * length + good[16 + length :]
    no_fields = good[:16] + b'{"box":{"at":0}}'.ljust(length) + good[16 + length :]
    for content in [b"", b"\x80\xff", b"[]", good[:12], good[:5000], no_layout, no_fields]:
        path = tmp_path / "rank_0"
        path.write_bytes(content)
        found, (problem,) = black_box.load_all([path])
        assert not found
        assert "is not a trace" in problem


def test_other_files_in_the_folder(fresh, failed, tmp_path, capsys) -> None:
    """Other files are ignored; traces of an earlier job are shown separately."""
    fresh(2, "shm").run(healthy, str(tmp_path))
    failed("missing", "shm")
    (tmp_path / "rank_7").touch()
    (tmp_path / "rank_8").mkdir()
    assert trace.main([str(tmp_path)]) == 1
    out, error = capsys.readouterr()
    assert "rank_7 is not a trace" in error
    assert "rank_8" not in error
    latest, earlier = out.split("\n\njob ")
    assert re.match(r"job [0-9a-f]{8}: 3 ranks: 0 \(", latest), latest
    assert "on rank 0, 2," in " ".join(latest.split())
    assert re.match(r"[0-9a-f]{8}, .* earlier: 2 ranks: 0 \(", earlier), earlier
    assert "no difference" in earlier


def test_a_folder_without_traces(tmp_path, capsys) -> None:
    """The error is one sentence, whatever files exist."""
    for number in range(3):
        (tmp_path / f"rank_{number}").write_bytes(b"something else")
    assert trace.main([str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"mycoll trace: no traces in {tmp_path}\n")


def test_the_latest_job(fresh, tmp_path, monkeypatch, capsys) -> None:
    for number, job in enumerate(("5124", "5125", "5126")):
        (tmp_path / job).mkdir()
        if job != "5126":
            fresh(number + 1, "shm").run(healthy, str(tmp_path / job))
    (tmp_path / "5126" / "rank_0").touch()
    monkeypatch.setattr(trace, "default_folder", lambda: tmp_path)
    assert trace.main([]) == 0
    assert "2 ranks: 0 (" in capsys.readouterr().out
    monkeypatch.setattr(trace, "default_folder", lambda: tmp_path / "none")
    assert trace.main([]) == 2
    assert "no traces in" in capsys.readouterr().err


def member(rank: int, context: str, members: list[int]) -> Process:
    group = Group("4", "mesh_tp", context, members.index(rank), 2, members, submitted=1)
    group.operations = [Operation("all_reduce", 0, "failed", 1.0, 1.0, 2.0)]
    return Process(rank, 100 + rank, "vm", "j", "1", taken=3.0, groups=[group])


def exported(processes: list[Process], path: Path) -> list[dict[str, Any]]:
    timeline.write(trace.by_title(processes), [], path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_export_of_groups_with_one_description(tmp_path) -> None:
    """Submeshes of a device mesh have one description."""
    processes = [
        member(rank, "ab"[rank // 2], [rank // 2 * 2, rank // 2 * 2 + 1]) for rank in range(4)
    ]
    assert list(trace.by_title(processes)) == ["4 (mesh_tp)", "4 (mesh_tp) (2)"]
    events = exported(processes, tmp_path / "lanes.json")
    rows = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert rows == {
        0: "group 4 (mesh_tp)",
        1: "group 4 (mesh_tp)",
        2: "group 4 (mesh_tp) (2)",
        3: "group 4 (mesh_tp) (2)",
    }


def test_calls_that_overlap_are_in_separate_rows(tmp_path) -> None:
    process = member(0, "a", [0, 1])
    process.groups[0].operations = [
        Operation("all_reduce", 0, "done", 10.0, 10.0, 12.0),
        Operation("all_reduce", 1, "done", 11.0, 12.0, 13.0),
        Operation("all_reduce", 2, "queued", 12.5, None, None),
    ]
    process.taken = 14.0
    events = exported([process], tmp_path / "lanes.json")
    slices = [each for each in events if each["ph"] == "X"]
    assert [each["ts"] for each in slices] == [0, 1e6, 2.5e6]
    assert [each["dur"] for each in slices] == [2e6, 2e6, 1.5e6]
    assert [each["tid"] % 2 for each in slices] == [0, 1, 0]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["rank 0 (vm:100)", "rank 1 (no trace)"]
