"""Processing of measured rows: statistics, table, files, comparison, plot."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from mycoll import bench, launch
from mycoll._units import show_seconds
from mycoll.bench import main, run
from mycoll.bench.compare import compare
from mycoll.bench.plot import draw, undrawable
from mycoll.bench.report import ratio, read_results, table_header, table_line, unwritable
from mycoll.bench.result import Row, compared, paired_ratio, percentile, unpaired_ratio
from mycoll.bench.run import step


def example_row(**changes: object) -> Row:
    row = Row(
        op="all_reduce",
        size=1024,
        count=256,
        type="float32",
        redop="sum",
        root=-1,
        contender="gloo",
        contender_kind="backend",
        ranks=2,
        time_us=100.0,
        algbw=0.01,
        busbw=0.01,
        wrong=0,
        p50_us=100.0,
        p95_us=101.0,
        p99_us=102.0,
        min_us=99.0,
        max_us=101.0,
        iterations=10,
        rounds_us=[98.0, 99.0, 100.0, 100.0, 101.0, 102.0],
    )
    return replace(row, **changes)  # type: ignore[arg-type]


class TestCompare:
    def write(self, path: Path, rows: list[Row]) -> str:
        records = [{"kind": "header", "machine": {"cpu": "x"}}, *(row.as_json() for row in rows)]
        path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
        return str(path)

    def slowed(self, row: Row, factor: float) -> Row:
        times = [time * factor for time in row.rounds_us]
        return replace(row, time_us=row.time_us * factor, rounds_us=times)

    def test_finds_a_planted_slow_down(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [example_row(), example_row(size=4096), example_row(op="broadcast")]
        before = self.write(tmp_path / "a.jsonl", rows)
        changed = [rows[0], self.slowed(rows[1], 1.3), self.slowed(rows[2], 0.5)]
        after = self.write(tmp_path / "b.jsonl", changed)
        assert main(["compare", before, after]) == 0
        output = capsys.readouterr().out
        assert "slower  all_reduce 4 KiB gloo" in output
        assert "faster  broadcast 1 KiB gloo" in output
        assert "1 faster, 1 slower, 1 the same" in output

    def test_nothing_to_compare_is_no_success(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = self.write(tmp_path / "a.jsonl", [example_row()])
        after = self.write(tmp_path / "b.jsonl", [example_row(size=8)])
        assert main(["compare", before, after]) == 2
        assert "no row in common" in capsys.readouterr().err
        assert main(["compare", before, before, "--relative-to", "glooo"]) == 2
        assert "'glooo'" in capsys.readouterr().err

    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        rows = [example_row(), example_row(size=4096)]
        before = self.write(tmp_path / "a.jsonl", rows)
        after = self.write(tmp_path / "b.jsonl", [rows[0], self.slowed(rows[1], 2.0)])
        assert main(["compare", before, after, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        (change,) = report["changes"]
        assert change["row"] == "all_reduce 4 KiB gloo" and change["verdict"] == "slower"
        assert change["low"] <= change["value"] <= change["high"]
        assert change["value"] == pytest.approx(2.0)
        counts = {key: report[key] for key in ("faster", "slower", "same", "unsure")}
        assert counts == {"faster": 0, "slower": 1, "same": 1, "unsure": 0}

    def test_few_rounds_prove_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        few = example_row(rounds_us=[100.0] * 5)
        before = self.write(tmp_path / "a.jsonl", [few])
        after = self.write(tmp_path / "b.jsonl", [self.slowed(few, 9.0)])
        assert main(["compare", before, after]) == 0
        output = capsys.readouterr().out
        assert "unsure" in output and "too few rounds" in output and "[" not in output

    @pytest.mark.parametrize("threshold", ["-1", "nan", "inf"])
    def test_nonsense_is_refused(self, threshold: str) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["compare", "a", "b", "--threshold", threshold])
        assert stopped.value.code == 2

    def test_noise_is_no_change(self) -> None:
        noisy = example_row(rounds_us=[50.0, 70.0, 100.0, 130.0, 180.0, 240.0])
        (change,) = compare([example_row()], [noisy], 5.0)
        assert change.verdict == "same"

    def test_relative_to_another_backend(self) -> None:
        gloo, mycoll_row = example_row(), example_row(contender="mycoll")
        busier = [self.slowed(gloo, 3.0), self.slowed(mycoll_row, 3.0)]
        assert [c.verdict for c in compare([gloo, mycoll_row], busier, 5.0)] == ["slower"] * 2
        (change,) = compare([gloo, mycoll_row], busier, 5.0, "gloo")
        assert change.after.contender == "mycoll" and change.verdict == "same"

    def test_a_file_that_is_something_else(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = tmp_path / "other"
        other.write_text("{}\n")
        assert main(["compare", str(other), str(other)]) == 2
        assert "is not a row" in capsys.readouterr().err


class TestReport:
    def test_headings_are_aligned_with_columns(self) -> None:
        slow = example_row(contender="openmpi-tcp", time_us=123456.7, ratio=17.25)
        slow = replace(slow, ratio_low=10.01, ratio_high=123.4, busbw=100.0, size=300 << 20)
        heading = table_header(slow, "mycoll").splitlines()[-1]
        line = table_line(slow)
        for name, value in {"size": "300 MiB", "time us": "123457", "bus GB/s": "100.00"}.items():
            assert line[: heading.index(name) + len(name)].endswith(f" {value}")
        assert line.endswith("17.2x slower [10, 123]")
        assert len(line) <= 80
        assert table_line(replace(slow, wrong=7)).endswith("  7 WRONG")

    def test_ratios_name_the_slower(self) -> None:
        row = example_row(ratio=11.42, ratio_low=8.6, ratio_high=17.31)
        assert ratio(row) == "11.4x slower [8.6, 17.3]"
        row = example_row(ratio=0.5, ratio_low=0.4, ratio_high=0.8)
        assert ratio(row) == "2x faster [1.25, 2.5]"
        assert ratio(example_row(ratio=1.0)) == "1x slower" and ratio(example_row()) == ""

    def test_schema(self) -> None:
        record = json.loads(json.dumps(example_row().as_json()))
        assert record.pop("kind") == "result"
        assert Row(**record) == example_row()

    def test_files_of_earlier_versions(self, tmp_path: Path) -> None:
        file = tmp_path / "old.jsonl"
        record = {**example_row().as_json(), "in_place": False}
        file.write_text(
            '{"kind": "header"}\n{"kind": "header", "date": "x"}\n' + json.dumps(record)
        )
        assert read_results(str(file))[1] == [example_row()]

    def test_percentiles(self) -> None:
        assert percentile([1.0], 99) == 1
        assert percentile([0.0, 10.0], 25) == 2.5

    def test_paired_ratios_cancel_common_noise(self) -> None:
        load = [1.0, 5.0, 2.0, 9.0, 3.0, 4.0]
        found = paired_ratio([2 * value for value in load], load)
        assert (found.low, found.value, found.high) == (2, 2, 2)

    def test_no_interval_from_few_rounds(self) -> None:
        times = [1.0, 2.0, 3.0, 4.0, 5.0]
        assert paired_ratio(times, times).low is None
        assert unpaired_ratio(times, [*times, 6.0]).high is None
        few = example_row(rounds_us=times)
        line = table_line(compared([few, replace(few, contender="other")], "gloo")[1])
        assert line.endswith("other        1x slower")

    def test_ratios_are_to_the_first_backend_or_to_none(self) -> None:
        rows = [example_row(contender=name) for name in ("gloo", "other")]
        assert [row.ratio_to for row in compared(rows, "gloo")] == ["", "gloo"]
        assert [row.ratio for row in compared(rows, "absent")] == [None, None]


class TestPlot:
    rows = (example_row(), example_row(size=4096), example_row(contender="fake"))
    header = MappingProxyType(
        {"machine": {"cpu": "x", "usable_cores": 2}, "versions": {"torch": "2", "mycoll": "0"}}
        | {"date": "today"}
    )

    def test_picture(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "out.png"
        assert str(picture) in draw(str(picture), self.header, self.rows)
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_only_the_floor(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        floor = example_row(contender="fake", contender_kind="floor")
        picture = tmp_path / "out.png"
        assert str(picture) in draw(str(picture), self.header, [floor, replace(floor, size=4096)])

    def test_default_plot_is_drawn_if_possible(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        lines = iter(["# plot: mycoll-bench.png", "# no plot: no reason", "# no plot: no reason"])
        drawn: list[str] = []
        monkeypatch.setattr(run, "draw", lambda path, *_: [drawn.append(path), next(lines)][1])
        run.print_plot(None, {}, self.rows)
        run.print_plot(None, {}, self.rows)
        assert capsys.readouterr().out == "# plot: mycoll-bench.png\n"
        run.print_plot("x.png", {}, self.rows)
        assert capsys.readouterr().out == "# no plot: no reason\n"
        assert drawn == [run.DEFAULT_PLOT, run.DEFAULT_PLOT, "x.png"]
        (tmp_path / run.DEFAULT_PLOT).mkdir()
        run.print_plot(None, {}, self.rows)
        assert not capsys.readouterr().out and len(drawn) == 3

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "needs matplotlib" in draw("out.png", {}, self.rows)

    def test_without_matplotlib_nothing_is_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
        monkeypatch.setattr(launch, "run_command", lambda *_: pytest.fail("ranks were started"))
        assert bench.main(["all_reduce", "--nproc", "2", "--plot", "out.png"]) == 2
        assert "pip install matplotlib" in capsys.readouterr().err


def test_time_left() -> None:
    assert step(0, 4, "all_reduce 8 B", 0.0) == "measuring 1 of 4: all_reduce 8 B"
    assert step(1, 4, "x", 10.0) == f"measuring 2 of 4: x, about {show_seconds(30.0)} left"
    assert step(3, 4, "x", 12.0).endswith(f", about {show_seconds(4.0)} left")


def test_checking_files_does_not_change_them(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("a row")
    assert (unwritable(str(old)), unwritable(str(new))) == ("", "")
    assert old.read_text() == "a row" and not new.exists()
    assert "directory" in unwritable(str(tmp_path)).lower()


def test_checking_files_does_not_follow_links(tmp_path: Path) -> None:
    link, circle = tmp_path / "link", tmp_path / "circle"
    link.symlink_to(tmp_path / "target")
    circle.symlink_to(circle)
    assert unwritable(str(link)) == ""
    assert link.is_symlink() and not link.exists()
    assert unwritable(str(circle)) != ""


def test_plots_need_a_known_suffix() -> None:
    pytest.importorskip("matplotlib")
    assert "must end in" in undrawable("out.xyz")
    assert undrawable("out.png") == undrawable("out.PDF") == undrawable("out") == ""


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_files_are_checked_before_ranks_start(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setenv("RANK", "1")  # exported for something else
    monkeypatch.setattr(launch, "run_command", lambda *_: pytest.fail("ranks were started"))
    assert bench.main(["all_reduce", "--nproc", "2", option, "/nonexistent/x.png"]) == 2
    assert f"mycoll bench: {option}: " in capsys.readouterr().err
