"""The table, for the terminal and for docs/reliability.md."""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from faults.harness import Outcome, show

HEAD = Path(__file__).with_name("page.md").read_text()  # the promises, and how to read the table


@dataclass
class Row:
    number: str
    title: str
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)  # by column


def cell(outcomes: list[Outcome], usual: int) -> str:
    outcomes = [each for each in outcomes if each.verdict != "skip"]
    if not outcomes:
        return "not run"
    good = sum(o.verdict == "pass" for o in outcomes)
    times = [o.seconds for o in outcomes if o.seconds is not None]
    text = "pass" if good == len(outcomes) else "**FAIL**"
    if len(outcomes) > 1 and good < len(outcomes):
        text += f" {len(outcomes) - good} of {len(outcomes)}"
    text += f", {show(max(times))}" if times else ""
    return text if len(outcomes) == usual else f"{text} ({len(outcomes)} run(s))"


def notes(outcomes: list[Outcome]) -> list[str]:
    """One note of each kind. Notes that differ only in their numbers are of one kind."""
    kinds: dict[str, str] = {}
    for outcome in outcomes:
        for note in outcome.notes:
            kinds.setdefault(re.sub(r"\d[\d.]*( ms| s\b)?", "#", note), note)
    return list(kinds.values())


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.outcomes))
    columns.sort(key=lambda column: (column == "gloo", column))
    usual = max((len(each) for row in rows for each in row.outcomes.values()), default=0)
    today = datetime.date.today().isoformat()
    cores = len(os.sched_getaffinity(0))
    lines = [HEAD]
    lines.append(
        f"Measured on a {cores}-core VM, {today}, {usual} run(s) of each where nothing else is "
        "said. The time is that of the slowest rank of all runs, from the fault (or its own call) "
        "to the exception.\n"
    )
    lines.append("| | fault | " + " | ".join(columns) + " |")
    lines.append("|---|---|" + "---|" * len(columns))
    for row in rows:
        cells = [cell(row.outcomes.get(column, []), usual) for column in columns]
        lines.append(f"| {row.number} | {escaped(row.title)} | " + " | ".join(cells) + " |")
    lines.append(
        "\nnot run: for the reason in the notes; without one, it is still to be run\n"
        "(`./dev faults --only N --write` puts a row's results on this page).\n\n"
        "## Notes\n\n| | run | |\n|---|---|---|"
    )
    for row in rows:
        for column in columns:
            if found := notes(row.outcomes.get(column, [])):
                lines.append(f"| {row.number} | {column} | {escaped('; '.join(found))} |")
    return "\n".join(lines) + "\n"
