"""The harness itself: options, columns, verification, comparison. No timing is asserted."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mycoll
import pytest
import torch
from mycoll.bench import main
from mycoll.bench.machine import native_module
from mycoll.bench.options import DTYPES, REDOPS, parse_options, parse_size, sweep
from mycoll.bench.patterns import Pattern, spoil
from mycoll.bench.peer_build import PeerAbsent, build
from mycoll.bench.report import read_results
from standins import accelerator

_QUICK = ["-n", "2", "-w", "1", "--rounds", "2"]
_TIMEOUT_SECONDS = 120


def run_bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(mycoll.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    program = [sys.executable, *(launcher or ("-m", "mycoll.bench")), *arguments]
    return subprocess.run(
        program, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment
    )


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("8", 8), ("64K", 65536), ("1.5M", 3 << 19), ("1G", 1 << 30), ("4kib", 4096)],
    )
    def test_sizes(self, text: str, size: int) -> None:
        assert parse_size(text) == size

    def test_sweep_by_factor_and_by_step(self) -> None:
        assert sweep(8, 600, 8, 0) == (8, 64, 512)
        assert sweep(8, 32, 8, 10) == (8, 18, 28)

    def test_names_known_from_nccl_tests(self) -> None:
        line = "all_reduce,barrier -b 8 -e 1K -f 2 -n 5 -w 1 -d float,bf16 -o sum,max -z 1 -r 1"
        options = parse_options([*line.split(), "--backend", "mycoll,gloo,gloo"])
        assert options.operations == ("all_reduce", "barrier")
        assert options.backends == ("mycoll", "gloo", "gloo#2")
        assert options.sizes == (8, 16, 32, 64, 128, 256, 512, 1024)
        assert (options.iterations, options.warmups, options.root) == (5, 1, 1)
        assert options.dtypes == ("float32", "bfloat16")
        assert options.redops == ("sum", "max")
        assert options.blocking

    @pytest.mark.parametrize(
        "options",
        ["-b 9 -e 8", "-e 1T -i 1", f"-e {'9' * 400}", "-f nan", "-f inf", "-f 1", "-d float3"]
        + ["-c 0", "--timeout nan", "--timeout -1", "--round-ms inf", "--worlds 0", "--worlds 2,x"]
        + ["--device cuda:0"],
    )
    def test_nonsense_is_refused(self, options: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            parse_options(["all_reduce", *options.split()])
        assert stopped.value.code == 2
        assert "error" in capsys.readouterr().err

    def test_without_a_launcher(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("RANK", raising=False)
        assert main(["all_reduce"]) == 2
        assert "--nproc" in capsys.readouterr().err


class TestPatterns:
    @pytest.mark.parametrize("name", DTYPES)
    def test_copies(self, name: str) -> None:
        pattern = Pattern(getattr(torch, name), "none", ranks=4, seed=1)
        tensor = torch.empty(1000, dtype=pattern.dtype)
        pattern.fill(tensor, rank=2)
        assert pattern.wrong_copy(tensor, rank=2) == 0
        assert pattern.wrong_copy(tensor[256:], rank=2, offset=256) == 0
        # A neighbour's data, the same rank's data moved, and the last round's.
        assert pattern.wrong_copy(tensor, rank=1) > 0
        assert pattern.wrong_copy(tensor[256:], rank=2) > 0
        assert replace(pattern, seed=2).wrong_copy(tensor, rank=2) > 0
        spoil(tensor)
        assert pattern.wrong_copy(tensor, rank=2) == 1

    @pytest.mark.parametrize("redop", REDOPS)
    @pytest.mark.parametrize("name", DTYPES)
    def test_reductions(self, name: str, redop: str) -> None:
        dtype = getattr(torch, name)
        pattern = Pattern(dtype, redop, ranks=3, seed=1)
        period = pattern.reduced(0).to(dtype)
        result = period.repeat(1000 // period.numel() + 1)[:1000]
        assert pattern.wrong_reduced(result, 0) == 0
        assert pattern.wrong_reduced(result[128:], 128) == 0
        result[500] = result[500] == 0  # another value in every dtype
        assert pattern.wrong_reduced(result, 0) == 1

    def test_any_byte_but_0_is_true(self) -> None:
        pattern = Pattern(torch.bool, "sum", ranks=2, seed=1)
        added = (pattern.values(0, 0) + pattern.values(1, 0)).to(torch.uint8)
        assert added.max() == 2
        assert pattern.wrong_reduced(added.view(torch.bool), 0) == 0

    def test_a_contribution_that_is_missing(self) -> None:
        pattern = Pattern(torch.float32, "sum", ranks=3, seed=1)
        partial_sum = pattern.values(0, 0) + pattern.values(1, 0)
        assert pattern.wrong_reduced(partial_sum.to(torch.float32), 0) == partial_sum.numel() - 1


class TestRuns:
    def test_columns_and_files(self, tmp_path: Path) -> None:
        json_path, csv_path = tmp_path / "out.jsonl", tmp_path / "out.csv"
        operations = ("all_reduce", "all_gather", "reduce", "sendrecv", "bandwidth", "barrier")
        done = run_bench(
            ",".join(operations),
            *("--nproc", "2", "--backend", "gloo,gloo", "--floor", "--limit"),
            *("-b", "8", "-e", "64K", "-f", "8192"),
            *(*_QUICK, "--json", str(json_path), "--csv", str(csv_path)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        heading = next(line for line in done.stdout.splitlines() if "algbw" in line)
        names = "# size count type redop root time algbw busbw #wrong p50 p95 p99 min max"
        assert heading.split("contender")[0].split() == names.split()
        header, rows = read_results(str(json_path))
        assert {"machine", "versions", "environment", "arguments", "date"} <= header.keys()
        kinds = {row.contender: row.contender_kind for row in rows}
        assert kinds["gloo"] == kinds["gloo#2"] == "backend"
        assert kinds["fake"] == "floor" and kinds["copy"] == "limit"
        assert {row.op for row in rows} == set(operations)
        for row in rows:
            assert row.wrong == 0 if row.contender_kind == "backend" else row.wrong is None
            assert len(row.rounds_us) == 2 and row.iterations == 2
            assert 0 < row.min_us <= row.max_us
            assert row.p50_us <= row.p95_us <= row.p99_us
            if row.contender != "gloo":
                assert row.ratio_to == "gloo" and row.ratio is not None
                assert row.ratio_low is row.ratio_high is None  # 2 rounds are too few
        with csv_path.open() as file:
            assert len(list(csv.DictReader(file))) == len(rows)

    def test_every_other_operation_finds_a_planted_error(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        names = "all_reduce broadcast reduce_scatter all_to_all gather scatter barrier pingpong ddp"
        done = run_bench(
            names.replace(" ", ","),
            *("--nproc", "2", "--backend", "gloo", "-b", "1K", "-e", "1K", *_QUICK),
            *("--plant-error", "1", "--root", "1", "--json", str(path)),
        )
        assert done.returncode == 1, done.stdout + done.stderr
        _, rows = read_results(str(path))
        assert {row.op for row in rows} == set(names.split())
        assert [row.op for row in rows if not row.wrong] == []

    def test_a_backend_that_is_not_there(self) -> None:
        done = run_bench("barrier", "--nproc", "1", "--backend", "gloo,no_such_backend", *_QUICK)
        assert done.returncode == 1
        assert "left out: no_such_backend" in done.stdout
        assert "wrong elements: 0" in done.stdout

    def test_a_peer_takes_its_turn(self, tmp_path: Path) -> None:
        try:
            build("openmpi", tmp_path)
        except PeerAbsent as reason:
            pytest.skip(f"openmpi: {reason}")
        path = tmp_path / "out.jsonl"
        done = run_bench(
            *("all_reduce,pingpong", "--nproc", "2", "--backend", "gloo", "--peers", "openmpi"),
            *("-b", "1K", "-e", "1K", *_QUICK, "--json", str(path)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        _, rows = read_results(str(path))
        assert [(row.contender, row.wrong) for row in rows] == [("gloo", 0), ("openmpi", 0)] * 2
        assert "no torch dispatch" in done.stdout

    def test_nproc_beside_variables_of_another_launcher(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Kubernetes exports them to every pod of a job."""
        for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        done = run_bench("barrier", "--nproc", "2", "--backend", "gloo", *_QUICK)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "barrier, 2 ranks" in done.stdout, done.stdout

    def test_a_reader_that_goes_away(self) -> None:
        """As in `mycoll bench ... | head -1`: both ranks end at once, and without a word."""
        paths = [str(Path(mycoll.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mycoll.bench",
                "all_reduce",
                "--nproc",
                "2",
                "--round-ms",
                "100",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"# mycoll bench")
        process.stdout.close()
        with process.stderr as errors:
            assert errors.read() == b""
        assert process.wait(_TIMEOUT_SECONDS) == 128 + signal.SIGPIPE

    def test_under_torchrun_in_place(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        done = run_bench(
            *("all_gather,overlap,init", "--backend", "gloo", "--in-place", "--hot"),
            *("-b", "1K", "-e", "1K", "-z", "1", *_QUICK, "--rounds", "1", "--json", str(path)),
            launcher=("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "mycoll.bench"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        _, rows = read_results(str(path))
        assert [(row.op, row.in_place) for row in rows] == [
            ("all_gather", True),
            ("overlap", True),
            ("init", False),
        ]
        assert 0 <= rows[1].extra["hidden_percent"] <= 100


def test_a_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["all_reduce", "--nproc", "abc"])
    assert "'abc' is not a whole number" in capsys.readouterr().err


def test_absent_peer_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerAbsent, match="apt install mpich"):
        build("mpich", tmp_path)


def test_a_build_for_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_module() is not None
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    assert native_module() is None


class TestDevice:
    def test_events_and_cpu_time(self, tmp_path: Path) -> None:
        """On the stand-in accelerator, as `--device cuda` on a GPU."""
        if accelerator.folder() is None:
            pytest.skip("the stand-ins are not built; ./dev builds them")
        file = tmp_path / "rows.jsonl"
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        program = ("-m", "worlds.program", "standin", "host", "mycoll.bench")
        operations = "all_reduce,all_gather,sendrecv,barrier,ddp"
        run = run_bench(
            *program,
            *(operations, "--device", "standin", "-b", "1K", "-e", "1K", *_QUICK),
            *("--json", str(file)),
            launcher=launcher,
        )
        assert run.returncode == 0, run.stderr + run.stdout
        header, rows = read_results(str(file))
        assert header["device"] == "standin"
        assert {row.op for row in rows} == set(operations.split(","))
        for row in rows:
            assert row.wrong == 0
            assert row.extra["cpu_us"] > 0
            assert row.time_us > 0

    def test_without_one(self) -> None:
        run = run_bench("all_reduce", "--nproc", "1", "--device", "nonsense")
        assert run.returncode != 0
        assert "knows no 'nonsense'" in run.stderr
