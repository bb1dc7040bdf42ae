"""`mycoll bench compare A.jsonl B.jsonl`: finds times that differ by more than the noise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mycoll._terminal import Parser, paint, wrapped
from mycoll._units import between, show_microseconds, show_size
from mycoll.bench.report import read_results
from mycoll.bench.result import Row
from mycoll.bench.stats import Interval, unpaired_ratio

_Key = tuple[str, int, str, str, int, str, int]
_SLOWER = 1
_BAD_USE = 2


@dataclass(frozen=True)
class Change:
    """ratio is new time over old: 2 means twice as slow."""

    before: Row
    after: Row
    ratio: Interval
    verdict: str


def _key(row: Row) -> _Key:
    return row.op, row.size, row.type, row.redop, row.root, row.contender, row.ranks


def _relative(rows: Sequence[Row], reference: str) -> dict[_Key, tuple[Row, list[float]]]:
    """Round times; with a reference, in units of the reference's time in the same round.

    That takes out a machine that was busier in one of the two runs.
    """
    by_key = {_key(row): row for row in rows}
    found: dict[_Key, tuple[Row, list[float]]] = {}
    for key, row in by_key.items():
        times = row.rounds_us
        if reference:
            other = by_key.get((*key[:5], reference, key[6]))
            if other is None or other is row:
                continue
            times = [a / b for a, b in zip(times, other.rounds_us, strict=True)]
        found[key] = (row, times)
    return found


def _verdict(ratio: Interval, threshold_percent: float) -> str:
    """A change counts if the whole confidence interval lies beyond the threshold."""
    if ratio.low is None or ratio.high is None:
        return "unsure"
    factor = 1 + threshold_percent / 100
    return "slower" if ratio.low > factor else "faster" if ratio.high < 1 / factor else "same"


def compare(
    before: Sequence[Row], after: Sequence[Row], threshold_percent: float, reference: str = ""
) -> list[Change]:
    old = _relative(before, reference)
    changes: list[Change] = []
    for key, (row, times) in _relative(after, reference).items():
        if key not in old:
            continue
        old_row, old_times = old[key]
        ratio = unpaired_ratio(times, old_times)
        changes.append(Change(old_row, row, ratio, _verdict(ratio, threshold_percent)))
    return changes


def _broken(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Rows that are worse than slow: wrong results, and those that the subject no longer has."""
    backends = (row.contender for row in before if row.contender_kind == "backend")
    subject = next(backends, "")
    measured = {_key(row) for row in after}
    gone = [row for row in before if row.contender == subject and _key(row) not in measured]
    return [
        *(f"wrong   {_name(row)}  {row.wrong} elements" for row in after if row.wrong),
        *(f"missing {_name(row)}" for row in gone),
    ]


def compare_main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="mycoll bench compare",
        description="Compares two files of --json: which rows differ by more than the noise.",
    )
    parser.add_argument("before", metavar="BEFORE.jsonl")
    parser.add_argument("after", metavar="AFTER.jsonl")
    parser.add_argument("--threshold", type=between(0, 1e6), default=5.0, help="percent (5)")
    parser.add_argument(
        "--relative-to",
        default="",
        metavar="BACKEND",
        help="compare times in units of a backend that is in both runs: "
        "two runs on a busy machine differ by more than two backends in one run",
    )
    parser.add_argument("--all", action="store_true", help="also show what stayed the same")
    parser.add_argument(
        "--fail",
        action="store_true",
        help="exit with 1 if anything is slower, wrong, or missing of the first backend",
    )
    found = parser.parse_args(list(argv))
    try:
        (old_header, old_rows) = read_results(found.before)
        (new_header, new_rows) = read_results(found.after)
    except (OSError, ValueError) as cause:
        print(f"mycoll bench compare: {cause}", file=sys.stderr)
        return _BAD_USE
    for name in ("machine", "versions", "device", "hot"):
        _warn_of_difference(name, old_header.get(name), new_header.get(name))
    changes = compare(old_rows, new_rows, found.threshold, found.relative_to)
    if not changes:
        print(f"mycoll bench compare: {_why_nothing(found.relative_to)}", file=sys.stderr)
        return _BAD_USE
    for change in changes:
        if change.verdict != "same" or found.all:
            print(_line(change))
    broken = _broken(old_rows, new_rows)
    for line in broken:
        print(paint(line, "red"))
    count = {verdict: sum(c.verdict == verdict for c in changes) for verdict in _VERDICTS}
    unmatched = len(old_rows) + len(new_rows) - 2 * len(changes)
    print(
        f"# {count['faster']} faster, {count['slower']} slower, {count['same']} the same within "
        f"{found.threshold:g} % and the noise; {unmatched} rows not in both"
        + (f" or {found.relative_to} itself" if found.relative_to else "")
    )
    if count["unsure"]:
        print(f"# {count['unsure']} with too few rounds to say")
    if not found.fail:
        return 0
    if count["slower"] or broken:
        return _SLOWER
    return _BAD_USE if count["unsure"] == len(changes) else 0


def _why_nothing(reference: str) -> str:
    """Why no row was compared."""
    if reference:
        return f"no row of both runs has one of '{reference}' beside it to compare with"
    return "the runs have no row in common"


_VERDICTS = ("faster", "slower", "same", "unsure")
_VOLATILE = ("load_average_at_start",)


def _warn_of_difference(name: str, old: object, new: object) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - {*_VOLATILE}):
            _warn_of_difference(f"{name}.{key}", old.get(key), new.get(key))
    elif old != new:
        for line in wrapped(f"the runs differ in {name}: {old} and {new}", 2):
            print(paint(f"# {line}", "yellow"))


_COLOURS = {"slower": "red", "faster": "green", "same": "dim", "unsure": "yellow"}


def _line(change: Change) -> str:
    row, ratio = change.after, change.ratio
    times = " -> ".join(show_microseconds(each.time_us) for each in (change.before, row)) + " us"
    line = f"{change.verdict:6}  {_name(row):28} {times:22} {100 * (ratio.value - 1):+.1f} %"
    if ratio.low is not None and ratio.high is not None:
        line += f" [{100 * (ratio.low - 1):+.1f}, {100 * (ratio.high - 1):+.1f}]"
    return paint(line, _COLOURS[change.verdict])


def _name(row: Row) -> str:
    """The name of a row, without the default values."""
    kind = [row.type] if row.type != "float32" else []
    kind += [row.redop] if row.redop not in ("none", "sum") else []
    return " ".join([row.op, show_size(row.size), *kind, row.contender])
