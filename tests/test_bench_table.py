"""benchmarks/table.py: the table of goals, and the series of measurements behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERIES = ROOT / "benchmarks" / "results" / "2026-11-22b-2core-vm-"


def table(*arguments: str, exit_code: int = 0) -> str:
    program = [sys.executable, str(ROOT / "benchmarks" / "table.py"), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout + done.stderr


def row(name: str, contender: str, kind: str, time: float, ratio: float, spread: float) -> str:
    bounds = {"ratio": ratio, "ratio_low": ratio / spread, "ratio_high": ratio * spread}
    return json.dumps(
        {
            "kind": "result",
            "op": name,
            "size": 64 << 20,
            "contender": contender,
            "contender_kind": kind,
            "time_us": time,
            **(bounds if contender != "mycoll" else dict.fromkeys(bounds)),
        }
    )


def test_shows_what_was_recorded() -> None:
    shown = table("show", str(SERIES))
    assert "not measured" not in shown
    lines = {line.split(" | ")[0].strip("| "): line for line in shown.splitlines()}
    assert "| 39 [28 72], goal 50 |" in lines["all_reduce 4 B"]
    assert "1.21 [1.14 1.47], goal 0.85 **short** (intelmpi)" in lines["all_reduce 1 MiB"]


def test_marks_missed_goals(tmp_path: Path) -> None:
    """A goal is missed if the whole interval misses it; of several MPIs the fastest counts."""
    rows = [
        row("broadcast", "mycoll", "backend", 100, 1, 1),
        row("broadcast", "gloo", "backend", 320, 3.2, 1.05),  # the goal is 3.5
        row("broadcast", "copy-nt", "limit", 60, 0.6, 1.2),  # the goal is 0.65
        row("broadcast", "openmpi", "peer", 120, 1.2, 1.01),  # the goal is 0.8 of its time
        row("broadcast", "mpich", "peer", 220, 2.2, 1.01),
    ]
    (tmp_path / "64M.jsonl").write_text("\n".join(rows))
    [line] = [x for x in table("show", str(tmp_path)).splitlines() if "| broadcast 64 MiB" in x]
    _, title, time, gloo, peer, limit, floor, _ = (cell.strip() for cell in line.split("|"))
    assert (title, time, floor) == ("broadcast 64 MiB", "100", "")
    assert gloo == "3.2 [3.0 3.4], goal 3.5 **short**"
    assert peer == "0.83 [0.83 0.84], goal 0.80 **short** (openmpi)"
    assert limit == "0.60 [0.50 0.72], goal 0.65"


def test_no_results(tmp_path: Path) -> None:
    assert "no results there" in table("show", str(tmp_path), exit_code=2)


@pytest.mark.tools
def test_measures_a_series(tmp_path: Path, backend: str) -> None:
    if backend != "mycoll":
        pytest.skip("mycoll's own table")
    table("measure", str(tmp_path), "--only", "4ranks-small", "--times", "1")
    [line] = [
        x for x in table("show", str(tmp_path)).splitlines() if "4 ranks: all_reduce 4 B" in x
    ]
    assert "goal 30" in line
