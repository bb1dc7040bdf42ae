"""What a person and what a program reads: the table, JSON lines, comma separated values."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mycoll.bench.result import Row

_KINDS = {
    "floor": " (torch's floor)",
    "limit": " (memory limit)",
    "peer": " (no torch dispatch)",
}
_HEADER = (
    ("size", "(B)", 12),
    ("count", "(elements)", 11),
    ("type", "", 13),
    ("redop", "", 6),
    ("root", "", 5),
    ("time", "(us)", 10),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("p50", "(us)", 10),
    ("p95", "(us)", 10),
    ("p99", "(us)", 10),
    ("min", "(us)", 10),
    ("max", "(us)", 10),
)


def duration(microseconds: float) -> str:
    digits = 2 if microseconds < 100 else 1 if microseconds < 10000 else 0
    return f"{microseconds:.{digits}f}"


def _line(cells: list[str]) -> str:
    return " ".join(cell.rjust(width) for cell, (_, _, width) in zip(cells, _HEADER, strict=True))


def table_header(op: str, ranks: int) -> str:
    return "\n".join(
        (
            f"#\n# {op}, {ranks} ranks; min and max over ranks",
            "#"
            + _line([name for name, _, _ in _HEADER])[1:]
            + "  contender, its time to the first's",
            "#" + _line([unit for _, unit, _ in _HEADER])[1:] + "  [95 % confidence]",
        )
    )


def table_line(row: Row) -> str:
    cells = [
        str(row.size),
        str(row.count),
        row.type,
        row.redop,
        str(row.root),
        duration(row.time_us),
        f"{row.algbw:.2f}",
        f"{row.busbw:.2f}",
        "N/A" if row.wrong is None else str(row.wrong),
        *map(duration, (row.p50_us, row.p95_us, row.p99_us, row.min_us, row.max_us)),
    ]
    name = row.contender + _KINDS.get(row.contender_kind, "")
    if row.ratio is not None:
        name += f" {ratio(row)}"
    if row.extra:
        name += " " + " ".join(f"{key}={value:.1f}" for key, value in row.extra.items())
    return _line(cells) + "  " + name


def ratio(row: Row) -> str:
    """With its interval, if there were rounds enough for one."""
    value = f"{row.ratio:.3g}x"
    return value if row.ratio_low is None else f"{value} [{row.ratio_low:.3g} {row.ratio_high:.3g}]"


def _writer(path: str) -> IO[str] | None:
    return Path(path).open("w", newline="") if path else None


def unwritable(path: str) -> str:
    """Why no file can be written there; '' where one can. Leaves what there is as it is."""
    try:
        file = Path(path).resolve()  # what a link points to, which need not be there
        was_there = file.exists()
        file.open("ab").close()
    except (OSError, RuntimeError) as error:  # the latter: links in a circle, before Python 3.13
        return str(error)
    if not was_there:
        file.unlink()
    return ""


class Recorder:
    """Writes each row as it is measured, so that an interrupted run keeps what it has."""

    def __init__(self, header: Mapping[str, object], json_path: str, csv_path: str) -> None:
        self.rows: list[Row] = []
        self._json = _writer(json_path)
        self._csv = _writer(csv_path)
        self.write(header)

    def write(self, record: Mapping[str, object]) -> None:
        if self._json is not None:
            self._json.write(json.dumps(record) + "\n")
            self._json.flush()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        record = row.as_json()
        self.write(record)
        if self._csv is not None:
            flat = {name: value for name, value in record.items() if name not in _NOT_IN_CSV}
            writer = csv.DictWriter(self._csv, list(flat))
            if len(self.rows) == 1:
                writer.writeheader()
            writer.writerow(flat)
            self._csv.flush()

    def close(self) -> None:
        for file in (self._json, self._csv):
            if file is not None:
                file.close()


_NOT_IN_CSV = ("kind", "rounds_us", "extra")


def read_results(path: str) -> tuple[dict[str, object], list[Row]]:
    """The header and the rows of a JSON lines file; ValueError says what is wrong with it."""
    header: dict[str, object] = {}
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "header":
                header = record
            elif kind == "result":
                rows.append(Row(**record))
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ValueError(f"{path}:{number} is not a row of `mycoll bench`: {cause}") from cause
    if not header:
        raise ValueError(f"{path} has no header row: not written by `mycoll bench --json`")
    return header, rows
