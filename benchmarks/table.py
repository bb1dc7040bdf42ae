"""The goals of mycoll on two cores beside gloo, MPI and the machine, and its measurements.

    python benchmarks/table.py measure FOLDER   # every series of `mycoll bench`: 6 minutes or more
    python benchmarks/table.py show FOLDER      # the table, in Markdown

`show` also accepts a prefix of the files' names: benchmarks/results/2026-11-22b-2core-vm-
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_Row = dict[str, Any]
_KiB, _MiB = 1 << 10, 1 << 20
_MPIS = "openmpi,mpich,intelmpi"


@dataclass(frozen=True)
class Series:
    """One call of `mycoll bench`; rounds are those of `--times 1`."""

    arguments: str
    rounds: int
    variables: dict[str, str] = field(default_factory=dict)
    is_busy: bool = False  # another program computes on each core
    peers: str = ""  # MPIs, measured by benchmarks/peers


_TCP = {"MYCOLL_TRANSPORT": "tcp"}
SERIES = {
    "latency": Series(
        "all_reduce,broadcast,barrier,all_gather,reduce_scatter,all_to_all,pingpong"
        " --nproc 2 -b 4 -e 1K -f 256 --floor",
        8,
    ),
    "large": Series("all_reduce --nproc 2 -b 64K -e 16M -f 16 --limit", 8, peers=_MPIS),
    "64M": Series(
        "all_reduce,reduce_scatter,broadcast,sendrecv --nproc 2 -b 64M -e 64M --limit",
        6,
        peers=_MPIS,
    ),
    "32M": Series("all_gather,all_to_all --nproc 2 -b 32M -e 32M --limit", 6, peers=_MPIS),
    "4ranks-small": Series("all_reduce,barrier --nproc 4 -b 4 -e 4", 6, peers="openmpi"),
    "4ranks-large": Series("all_reduce --nproc 4 -b 64K -e 16M -f 256", 6, peers="openmpi"),
    "8ranks-small": Series("all_reduce,barrier --nproc 8 -b 4 -e 4", 6, peers="openmpi"),
    "8ranks-large": Series("all_reduce --nproc 8 -b 64K -e 16M -f 256", 6, peers="openmpi"),
    "sockets-small": Series(
        "all_reduce,pingpong --nproc 2 -b 4 -e 64K -f 16384", 6, _TCP, peers="openmpi-tcp"
    ),
    "sockets-16M": Series(
        "all_reduce,bandwidth,sendrecv --nproc 2 -b 16M -e 16M", 6, _TCP, peers="openmpi-tcp"
    ),
    "busy": Series("all_reduce,broadcast --nproc 2 -b 4 -e 16M -f 2048", 6, is_busy=True),
    "dtypes": Series(
        "all_reduce --nproc 2 -b 1M -e 16M -f 16 -d float32,bfloat16,float16,int8,bool", 6
    ),
}


@dataclass(frozen=True)
class Goal:
    """The goals of an operation. None: no goal."""

    title: str
    series: str
    op: str
    size: int
    gloo: float | None = None  # at least so many times as fast
    peer: float | None = None  # at most this part of the best MPI's time
    limit: float | None = None  # at least this part of the rate of copies that bypass the caches
    floor: float | None = None  # at most so many times torch's own floor


GOALS = (
    Goal("all_reduce 4 B", "latency", "all_reduce", 4, gloo=50, floor=1.7),
    Goal("all_reduce 1 KiB", "latency", "all_reduce", _KiB, gloo=50, floor=1.7),
    Goal("broadcast 1 KiB", "latency", "broadcast", _KiB, gloo=30, floor=2),
    Goal("barrier", "latency", "barrier", 0, gloo=30, floor=2),
    Goal("all_gather 1 KiB", "latency", "all_gather", _KiB, gloo=30, floor=2),
    Goal("reduce_scatter 1 KiB", "latency", "reduce_scatter", _KiB, gloo=30, floor=2),
    Goal("all_to_all 1 KiB", "latency", "all_to_all", _KiB, gloo=30, floor=2),
    Goal("ping-pong 4 B, one way", "latency", "pingpong", 4, gloo=20, floor=2),
    Goal("all_reduce 64 KiB", "large", "all_reduce", 64 * _KiB, gloo=35, peer=0.9),
    Goal("all_reduce 1 MiB", "large", "all_reduce", _MiB, gloo=10, peer=0.85),
    Goal("all_reduce 16 MiB", "large", "all_reduce", 16 * _MiB, gloo=6, peer=0.8, limit=0.75),
    Goal("all_reduce 64 MiB", "64M", "all_reduce", 64 * _MiB, gloo=5, peer=0.5, limit=0.6),
    Goal("reduce_scatter 64 MiB", "64M", "reduce_scatter", 64 * _MiB, gloo=6, peer=0.7, limit=0.65),
    Goal("all_gather 32 MiB", "32M", "all_gather", 32 * _MiB, gloo=7, peer=0.7, limit=0.65),
    Goal("all_to_all 32 MiB", "32M", "all_to_all", 32 * _MiB, gloo=6, peer=0.7, limit=0.65),
    Goal("broadcast 64 MiB", "64M", "broadcast", 64 * _MiB, gloo=3.5, peer=0.8, limit=0.65),
    Goal("send + recv 64 MiB", "64M", "sendrecv", 64 * _MiB, gloo=3, peer=1),
    Goal("4 ranks: all_reduce 4 B", "4ranks-small", "all_reduce", 4, gloo=30, peer=0.5),
    Goal("4 ranks: 64 KiB", "4ranks-large", "all_reduce", 64 * _KiB, gloo=20, peer=0.5),
    Goal("4 ranks: 16 MiB", "4ranks-large", "all_reduce", 16 * _MiB, gloo=2.5, peer=0.5),
    Goal("8 ranks: all_reduce 4 B", "8ranks-small", "all_reduce", 4, gloo=30, peer=0.5),
    Goal("8 ranks: 64 KiB", "8ranks-large", "all_reduce", 64 * _KiB, gloo=20, peer=0.5),
    Goal("8 ranks: 16 MiB", "8ranks-large", "all_reduce", 16 * _MiB, gloo=2.5, peer=0.5),
    Goal("sockets: all_reduce 4 B", "sockets-small", "all_reduce", 4, gloo=12, peer=0.8),
    Goal("sockets: 64 KiB", "sockets-small", "all_reduce", 64 * _KiB, gloo=8, peer=0.8),
    Goal("sockets: 16 MiB", "sockets-16M", "all_reduce", 16 * _MiB, gloo=2, peer=0.8),
    Goal("busy cores: all_reduce 4 B", "busy", "all_reduce", 4, gloo=1),
    Goal("busy cores: all_reduce 8 KiB", "busy", "all_reduce", 8 * _KiB, gloo=1),
    Goal("busy cores: all_reduce 16 MiB", "busy", "all_reduce", 16 * _MiB, gloo=1),
    Goal("busy cores: broadcast 4 B", "busy", "broadcast", 4, gloo=1),
    Goal("busy cores: broadcast 8 KiB", "busy", "broadcast", 8 * _KiB, gloo=1),
    Goal("busy cores: broadcast 16 MiB", "busy", "broadcast", 16 * _MiB, gloo=1),
)
_DTYPE_GOAL = 1.3  # at most so many times the time of float32


@contextlib.contextmanager
def _busy_cores(is_wanted: bool) -> Iterator[None]:
    cores = sorted(os.sched_getaffinity(0)) if is_wanted else []
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile 1: pass"]
        )
        for core in cores
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(folder: Path, only: list[str], times: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in only or SERIES:
        series = SERIES[name]
        program = ["-m", "mycoll", "bench"]
        if series.peers:
            program = [str(Path(__file__).parent / "peers"), series.peers]
        command = [sys.executable, *program, *series.arguments.split()]
        command += ["--backend", "mycoll,gloo", "--rounds", str(series.rounds * times)]
        command += ["--json", str(folder / f"{name}.jsonl")]
        print(f"== {name}", flush=True)
        with _busy_cores(series.is_busy):
            code = subprocess.run(command, env=os.environ | series.variables).returncode
        worst = max(worst, code if code >= 0 else 128 - code)  # a signal ended it
    return worst


def _read(prefix: str, series: str) -> list[_Row]:
    path = (
        Path(prefix) / f"{series}.jsonl"
        if Path(prefix).is_dir()
        else Path(f"{prefix}{series}.jsonl")
    )
    if not path.is_file():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [row for row in rows if row["kind"] == "result"]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _cell(row: _Row | None, goal: float | None, is_ours_over_theirs: bool = False) -> str:
    """`value [low high]`, and a mark if the whole range misses the goal.

    A row has their time over ours, which should be large. Ours over theirs should be small.
    """
    if row is None or row["ratio"] is None:
        return "" if goal is None else "not measured"
    value, low, high = row["ratio"], row["ratio_low"], row["ratio_high"]
    if is_ours_over_theirs:
        value = 1 / value
        low, high = (None if x is None else 1 / x for x in (high, low))
    text = _number(value)
    if low is not None and high is not None:
        text += f" [{_number(low)} {_number(high)}]"
    if goal is None:
        return text
    if is_ours_over_theirs:
        missed = (value if low is None else low) > goal
    else:
        missed = (value if high is None else high) < goal
    return f"{text}, goal {_number(goal)}" + (" **short**" if missed else "")


def _line(goal: Goal, rows: list[_Row]) -> str:
    rows = [row for row in rows if row["op"] == goal.op and row["size"] == goal.size]

    def find(matches: Callable[[_Row], bool]) -> _Row | None:
        return min(filter(matches, rows), key=lambda row: float(row["time_us"]), default=None)

    ours = find(lambda row: row["contender"] == "mycoll")
    peer = find(lambda row: row["contender_kind"] == "peer")
    beside_peer = _cell(peer, goal.peer, is_ours_over_theirs=True)
    if peer is not None and peer["ratio"] is not None:
        beside_peer += f" ({peer['contender']})"
    cells = (
        goal.title,
        _number(ours["time_us"]) if ours else "not measured",
        _cell(find(lambda row: row["contender"] == "gloo"), goal.gloo),
        beside_peer,
        _cell(find(lambda row: row["contender"] == "copy-nt"), goal.limit),
        _cell(find(lambda row: row["contender_kind"] == "floor"), goal.floor, True),
    )
    return "| " + " | ".join(cells) + " |"


def _dtypes(rows: list[_Row]) -> Iterator[str]:
    ours = [row for row in rows if row["contender"] == "mycoll"]
    for size in sorted({row["size"] for row in ours}):
        time = {row["type"]: row["time_us"] for row in ours if row["size"] == size}
        if "float32" not in time:
            continue
        ratios = {dtype: value / time["float32"] for dtype, value in time.items()}
        shown = ", ".join(
            f"{dtype} {ratio:.2f}" + (" **short**" if ratio > _DTYPE_GOAL else "")
            for dtype, ratio in ratios.items()
            if dtype != "float32"
        )
        yield f"all_reduce of {size >> 20} MiB, time over float32's (goal {_DTYPE_GOAL}): {shown}"


def show(prefix: str) -> int:
    known = {name: _read(prefix, name) for name in SERIES}
    if not any(known.values()):
        print(f"{prefix}: no results there", file=sys.stderr)
        return 2
    print(
        "| | us | x gloo | time to the best MPI's | of the copy limit | times torch's floor |\n"
        "|---|---|---|---|---|---|"
    )
    for goal in GOALS:
        print(_line(goal, known[goal.series]))
    for line in _dtypes(known["dtypes"]):
        print("\n" + line)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="run the series, one file each")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--only", action="append", default=[], choices=SERIES, help="a series")
    measuring.add_argument("--times", type=int, default=2, help="multiplies the number of rounds")
    showing = verbs.add_parser("show", help="print goals and measurements, in Markdown")
    showing.add_argument("prefix", help="a folder, or a prefix of the files' names")
    options = parser.parse_args()
    if options.verb == "measure":
        return measure(options.folder, options.only, options.times)
    return show(options.prefix)


if __name__ == "__main__":
    sys.exit(main())
