"""`mycoll bench compare A.jsonl B.jsonl`: finds times that differ by more than the noise."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mycoll._terminal import FAILED, Parser, columns, note, paint
from mycoll._units import at_least, show_microseconds, show_size
from mycoll.bench.report import read_results
from mycoll.bench.result import Interval, Row, unpaired_ratio

_Key = tuple[str, int, str, str, int, str, int]
_COLOURS = {"faster": "green", "slower": "red", "same": "dim", "unsure": "yellow"}  # by verdict


@dataclass(frozen=True)
class Change:
    """ratio is new time over old: 2 means twice as slow."""

    before: Row
    after: Row
    ratio: Interval
    verdict: str


def _relative(rows: Sequence[Row], reference: str) -> dict[_Key, tuple[Row, list[float]]]:
    """Round times; with a reference, in units of the reference's time in the same round.

    That takes out a machine that was busier in one of the two runs.
    """
    by_key = {
        (row.op, row.size, row.type, row.redop, row.root, row.contender, row.ranks): row
        for row in rows
    }
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


def compare(
    before: Sequence[Row], after: Sequence[Row], threshold_percent: float, reference: str = ""
) -> list[Change]:
    """Compares the rows that both runs have.

    Args:
        before: The rows of one run.
        after: The rows of the other.
        threshold_percent: Smaller changes are none.
        reference: A backend in whose times the others are measured; "": none.
    """
    old, new = _relative(before, reference), _relative(after, reference)
    factor = 1 + threshold_percent / 100
    changes: list[Change] = []
    for key in [key for key in new if key in old]:
        (old_row, old_times), (row, times) = old[key], new[key]
        ratio = unpaired_ratio(times, old_times)
        verdict = "unsure"
        # A change counts if the whole confidence interval lies beyond the threshold.
        if ratio.low is not None and ratio.high is not None:
            verdict = "faster" if ratio.high < 1 / factor else "same"
            verdict = "slower" if ratio.low > factor else verdict
        changes.append(Change(old_row, row, ratio, verdict))
    return changes


def compare_main(argv: Sequence[str]) -> int:
    """Runs `mycoll bench compare` with these words; returns the exit code."""
    parser = Parser(
        prog="mycoll bench compare",
        description="Compares two files of --json: which rows differ by more than the noise.",
    )
    parser.add_argument("before", metavar="BEFORE.jsonl")
    parser.add_argument("after", metavar="AFTER.jsonl")
    parser.add_argument("--threshold", type=at_least(0.0), default=5.0, help="percent (5)")
    text = "compare times in units of a backend that is in both runs: two runs on a busy machine "
    text += "differ by more than two backends in one run"
    parser.add_argument("--relative-to", default="", metavar="BACKEND", help=text)
    parser.add_argument("--json", action="store_true", help="for programs")
    found = parser.parse_args(list(argv))
    try:
        (old_header, old_rows) = read_results(found.before)
        (new_header, new_rows) = read_results(found.after)
        changes = compare(old_rows, new_rows, found.threshold, found.relative_to)
        if not changes and found.relative_to:
            raise ValueError(f"no row of both runs has '{found.relative_to}' beside it")
        if not changes:
            raise ValueError("the runs have no row in common")
    except (OSError, ValueError) as cause:
        print(f"mycoll bench compare: {cause}", file=sys.stderr)
        return FAILED
    count = {verdict: sum(each.verdict == verdict for each in changes) for verdict in _COLOURS}
    shown = [each for each in changes if each.verdict != "same"]
    if found.json:
        rows = [{"row": _name(c.after), "verdict": c.verdict, **asdict(c.ratio)} for c in shown]
        print(json.dumps({"changes": rows, **count}, indent=2))
    else:
        for name in ("machine", "versions", "device", "hot"):
            _warn_of_difference(name, old_header.get(name), new_header.get(name))
        for change in shown:
            print(_line(change))
        unmatched = len(old_rows) + len(new_rows) - 2 * len(changes)
        print(
            f"# {count['faster']} faster, {count['slower']} slower, {count['same']} the same "
            f"within {found.threshold:g} % and the noise; {unmatched} rows not in both"
            + (f" or {found.relative_to} itself" if found.relative_to else "")
        )
        if count["unsure"]:
            print(f"# {count['unsure']} with too few rounds to say")
    return 0


def _warn_of_difference(name: str, old: object, new: object) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - {"load_average_at_start"}):
            _warn_of_difference(f"{name}.{key}", old.get(key), new.get(key))
    elif old != new:
        note(f"the runs differ in {name}: {old} and {new}")


def _line(change: Change) -> str:
    row, ratio = change.after, change.ratio
    times = " -> ".join(show_microseconds(each.time_us) for each in (change.before, row)) + " us"
    percent = f"{100 * (ratio.value - 1):+.1f} %"
    if ratio.low is not None and ratio.high is not None:
        percent += f" [{100 * (ratio.low - 1):+.1f}, {100 * (ratio.high - 1):+.1f}]"
    line = columns((change.verdict, _name(row), times, percent), (7, 28, 22, 0))
    return paint(line, _COLOURS[change.verdict])


def _name(row: Row) -> str:
    """The name of a row, without the default values."""
    kind = [row.type] if row.type != "float32" else []
    kind += [row.redop] if row.redop not in ("none", "sum") else []
    return " ".join([row.op, show_size(row.size), *kind, row.contender])
