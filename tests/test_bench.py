"""`mycoll bench` as a user runs it, with its own ranks or torchrun's. No timing is asserted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mycoll.bench.options import OPERATIONS
from mycoll.bench.report import read_results
from standins import accelerator
from worlds import warm

pytestmark = pytest.mark.tools
_QUICK = ["-n", "2", "-w", "1", "--rounds", "2"]
_TIMEOUT_SECONDS = 120


def on_ranks(
    ranks: int, *arguments: str, code: str | Path = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs it as a launcher does, on processes that have already imported torch."""
    ended = warm.ranks(
        code or warm.module("mycoll"),
        ranks,
        *(() if code else ("bench",)),
        *arguments,
        environment={**os.environ, **environment},
    )
    return subprocess.CompletedProcess(
        arguments,
        max(code for code, *_ in ended),
        "".join(out for _, out, _ in ended),
        "".join(error for *_, error in ended),
    )


def run_bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, *(launcher or ("-m", "mycoll", "bench")), *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)


# Scripts that run `mycoll bench` with a planted mistake.
_LOSES_MESSAGES = """
import sys, torch, torch.distributed as dist
real, count = dist.isend, 0
def isend(tensor, *arguments, **named):
    global count
    count += 1
    return real(tensor if count % 16 == 1 else torch.zeros_like(tensor), *arguments, **named)
dist.isend = isend
from mycoll.bench import main
sys.exit(main(sys.argv[1:]))
"""
_FAILS = """
import sys, torch.distributed as dist
kind, count = sys.argv.pop(1), int(sys.argv.pop(1))
real = dist.all_reduce
def all_reduce(tensor, op=None, group=None):
    if dist.get_backend(group) == "mycoll" and tensor.numel() == count:
        raise (dist.DistBackendError if kind == "dead" else RuntimeError)("planted")
    return real(tensor, op=op, group=group)
dist.all_reduce = all_reduce
from mycoll.bench import main
sys.exit(main(sys.argv[1:]))
"""
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def test_a_launcher_that_renames_gloo() -> None:
    """With the variable set, ranks that import torch do not get torch's own gloo."""
    done = on_ranks(2, "all_reduce", *_QUICK, MYCOLL_REPLACE="gloo")
    assert done.returncode == 2, done.stderr
    assert done.stderr == "mycoll bench: compares backends by name: unset MYCOLL_REPLACE=gloo\n"


class TestRuns:
    def test_shared_tensors_take_turns_with_others(self, tmp_path: Path) -> None:
        results = tmp_path / "results.jsonl"
        done = on_ranks(
            *(2, "all_reduce,pingpong", "--memory", "both"),
            *("-b", "1M", "-e", "1M", "--json", str(results), *_QUICK),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "wrong elements: 0" in done.stdout
        _, rows = read_results(str(results))
        names = {(row.op, row.contender) for row in rows}
        assert {("all_reduce", "mycoll"), ("all_reduce", "mycoll-shared")} <= names, names
        refused = run_bench("all_reduce", "--nproc", "1", "--device", "cuda", "--memory", "shared")
        assert refused.returncode == 2 and "--memory" in refused.stderr, refused.stderr

    def test_operators(self, tmp_path: Path) -> None:
        results = tmp_path / "results.jsonl"
        operations = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        done = on_ranks(
            *(3, ",".join(operations), "--ops", "--memory", "both", "--backend", "mycoll,gloo"),
            *("-b", "64", "-e", "256K", "-f", "4096", "--json", str(results), *_QUICK),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "wrong elements: 0" in done.stdout
        _, rows = read_results(str(results))
        names: dict[str, set[str]] = {op: set() for op in operations}
        for row in rows:
            names[row.op].add(row.contender)
            assert row.wrong == 0
        contenders = {"mycoll", "mycoll-shared", "mycoll-ops", "gloo"}
        for op in operations[:3]:
            assert names[op] == contenders, names
        assert names["broadcast"] == contenders - {"mycoll-ops"}
        planted = on_ranks(
            *(2, ",".join(operations[:3]), "--ops"),
            *("-b", "64", "-e", "64", "--json", str(results), *_QUICK),
            code=warm.module("worlds.spoiled_bench"),
        )
        assert planted.returncode == 1, planted.stdout + planted.stderr
        _, rows = read_results(str(results))
        assert len(rows) == 6 and all(row.wrong for row in rows)
        assert run_bench("all_reduce", "--ops", "--backend", "gloo").returncode == 2

    def test_columns_and_files(self, tmp_path: Path) -> None:
        json_path = tmp_path / "out.jsonl"
        operations = ("all_reduce", "all_gather", "reduce", "sendrecv", "bandwidth", "barrier")
        done = on_ranks(
            *(2, ",".join(operations), "--backend", "gloo,gloo", "--floor", "--limit"),
            *("-b", "8", "-e", "64K", "-f", "8192"),
            *(*_QUICK, "--json", str(json_path)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        heading = next(line for line in lines if "time us" in line)
        assert heading.endswith("time beside gloo's")
        assert all(len(line) <= 80 for line in lines), done.stdout
        assert done.stderr == "", "progress belongs on a terminal"
        header, rows = read_results(str(json_path))
        assert {"machine", "versions", "environment", "arguments", "date"} <= header.keys()
        kinds = {row.contender: row.contender_kind for row in rows}
        assert kinds["gloo"] == kinds["gloo#2"] == "backend"
        assert kinds["fake"] == "floor" and kinds["copy"] == kinds["copy-peer"] == "limit"
        assert {row.op for row in rows} == set(operations)
        for row in rows:
            assert row.wrong == 0 if row.contender_kind == "backend" else row.wrong is None
            assert len(row.rounds_us) == 2 and row.iterations == 2
            assert 0 < row.min_us <= row.max_us
            assert row.p50_us <= row.p95_us <= row.p99_us
            if row.contender != "gloo":
                assert row.ratio_to == "gloo" and row.ratio is not None
                assert row.ratio_low is row.ratio_high is None  # 2 rounds are too few
        assert {row.size for row in rows if row.op == "all_reduce"} == {8, 65536}

    def test_every_other_operation_finds_a_planted_error(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        done = on_ranks(
            *(2, ",".join(OPERATIONS), "--backend", "gloo", "-b", "1K", "-e", "1K", *_QUICK),
            *("--json", str(path)),
            code=warm.module("worlds.spoiled_bench"),
        )
        assert done.returncode == 1, done.stdout + done.stderr
        _, rows = read_results(str(path))
        assert {row.op for row in rows} == set(OPERATIONS)
        assert [row.op for row in rows if not row.wrong] == []

    def test_every_message_under_way_is_verified(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        done = on_ranks(
            *(2, "bandwidth", "--backend", "gloo", "-b", "1K", "-e", "1K", *_QUICK),
            *("--json", str(path)),
            code=_LOSES_MESSAGES,
        )
        assert done.returncode != 0, done.stdout + done.stderr
        _, rows = read_results(str(path))
        # Zeros are right in places: 250 or 251 of 256 elements in each of 15 messages, 2 calls.
        assert all(row.wrong is not None and row.wrong > 15 * 2 * 240 for row in rows), rows

    @pytest.mark.parametrize(
        ("kind", "count", "code"), [("dead", 2, 1), ("broken", 16, 1), ("broken", 2, 0)]
    )
    def test_a_backend_that_fails_on_the_way(
        self, kind: str, count: int, code: int, tmp_path: Path
    ) -> None:
        """It fails if the group is dead, or if it could run this size before; else it is
        skipped."""
        path = tmp_path / "out.jsonl"
        done = on_ranks(
            *(1, kind, str(count), "all_reduce", "--backend", "mycoll,gloo", "-b", "8"),
            *("-e", "64", *_QUICK, "--json", str(path)),
            code=_FAILS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert ("# failed: mycoll" in done.stdout) == (code == 1)
        _, rows = read_results(str(path))
        ratios = {(row.contender, row.count): row.ratio_to for row in rows}
        other = 18 - count
        assert ratios == {("mycoll", other): "", ("gloo", other): "mycoll", ("gloo", count): ""}

    def test_a_backend_that_does_not_exist(self) -> None:
        done = on_ranks(1, "barrier", "--backend", "gloo,no_such_backend", *_QUICK)
        assert done.returncode == 1
        assert "left out: no_such_backend" in done.stdout
        assert "wrong elements: 0" in done.stdout

    def test_nproc_beside_variables_of_another_launcher(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kubernetes exports such variables to every pod of a job."""
        for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        done = run_bench("barrier", "--nproc", "2", "--backend", "gloo", *_QUICK)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "barrier, 2 ranks" in done.stdout, done.stdout

    def test_a_reader_that_goes_away(self) -> None:
        """As in `mycoll bench ... | head -1`: both ranks end promptly and print nothing."""
        words = ["-m", "mycoll", "bench", "all_reduce", "--nproc", "2", "--rounds", "100"]
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # torch warns if a name server does not answer.
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"# mycoll bench")
        process.stdout.close()
        with process.stderr as errors:
            assert errors.read() == b""
        assert process.wait(_TIMEOUT_SECONDS) == 128 + signal.SIGPIPE

    def test_under_torchrun(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        done = run_bench(
            *("all_gather", "--backend", "gloo", "--hot", "-b", "1K", "-e", "1K"),
            *(*_QUICK, "--rounds", "1", "--json", str(path)),
            launcher=(*_TORCHRUN, "-m", "mycoll", "bench"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        _, rows = read_results(str(path))
        assert [row.op for row in rows] == ["all_gather"]


class TestDevice:
    def test_events_and_cpu_time(self, tmp_path: Path) -> None:
        """On the stand-in accelerator, like `--device cuda` on a GPU."""
        if accelerator.folder() is None:
            pytest.skip("the stand-ins are not built; ./dev builds them")
        file = tmp_path / "rows.jsonl"
        operations = "all_reduce,all_gather,sendrecv,barrier"
        run = on_ranks(
            *(2, "standin", "host", "mycoll", "bench"),
            *(operations, "--device", "standin", "-b", "1K", "-e", "1K", *_QUICK),
            *("--json", str(file)),
            code=warm.module("worlds.program"),
        )
        assert run.returncode == 0, run.stderr + run.stdout
        header, rows = read_results(str(file))
        assert header["device"] == "standin"
        assert {row.op for row in rows} == set(operations.split(","))
        for row in rows:
            assert row.wrong == 0
            assert row.extra["cpu_us"] > 0
            assert row.time_us > 0

    def test_unknown_device(self) -> None:
        run = on_ranks(1, "all_reduce", "--device", "nonsense")
        assert run.returncode != 0
        assert "knows no 'nonsense'" in run.stderr
