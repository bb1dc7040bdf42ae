"""The table, for the terminal and for docs/reliability.md."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field

from faults.harness import Outcome, show

SAMPLE_CHARS = 600

HEAD = """# Reliability

What happens to the other ranks when one is killed, stopped, cut off or wrong. Written by
`./dev faults`, which starts real processes, breaks one, and times the others; the scenarios are in
`tests/faults/`. A scenario passes when every surviving rank does what mycoll promises: it raises
`DistBackendError` within the limit, naming the rank and the operation (or goes on with right
results, where that is the promise), `destroy_process_group` returns within a second, and no
survivor is killed or hangs. **Failures are listed as they are**: where a column says FAIL, the
promise is not kept yet, and the notes say in what.

gloo is held to the same criteria. It never promised them, so its column says what you get today,
not that gloo is broken.

What these runs do not show: each scenario ran once, and several are smaller than a proof would be
(6 points of init, 18 mismatched pairs, 10 s of a slow link without packet loss, 2 restarts under
torchrun, junk connections without forged or replayed frames). In 3, 5, 7, 8 and 13 the survivors
destroy the group when they get the error, which may itself wake others. The cores were shared with
other work.
"""


@dataclass
class Row:
    number: str
    title: str
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)  # by column


def cell(outcomes: list[Outcome]) -> str:
    if not outcomes or outcomes[0].verdict == "skip":
        return "not run"
    good = sum(o.verdict == "pass" for o in outcomes)
    times = [o.seconds for o in outcomes if o.seconds is not None]
    text = "pass" if good == len(outcomes) else "**FAIL**"
    if len(outcomes) > 1 and good < len(outcomes):
        text += f" {len(outcomes) - good} of {len(outcomes)}"
    return text + (f", {show(max(times))}" if times else "")


def notes(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(note for o in outcomes for note in o.notes))


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.outcomes))
    columns.sort(key=lambda column: (column == "gloo", column))
    runs = [len(each) for row in rows for each in row.outcomes.values()]
    today = datetime.date.today().isoformat()
    cores = len(os.sched_getaffinity(0))
    lines = [HEAD]
    lines.append(
        f"Measured on a {cores}-core VM, {today}, {min(runs, default=0)} run(s) of each. The time "
        "is that of the slowest rank, from the fault (or its own call) to the exception.\n"
    )
    lines.append("| | fault | " + " | ".join(columns) + " |")
    lines.append("|---|---|" + "---|" * len(columns))
    for row in rows:
        cells = [cell(row.outcomes.get(column, [])) for column in columns]
        lines.append(f"| {row.number} | {escaped(row.title)} | " + " | ".join(cells) + " |")
    lines.append(
        "\nnot run: for the reason in the notes; without one, it is still to be run\n"
        "(`./dev faults --only N --write` puts a row's results on this page).\n\n## Notes\n"
    )
    for row in rows:
        for column in columns:
            for note in notes(row.outcomes.get(column, [])):
                lines.append(f"- {row.number}, {column}: {escaped(note)}")
    lines.append("\n## What the errors look like\n")
    for row in rows:
        for column in columns:
            sample = next((o.sample for o in row.outcomes.get(column, []) if o.sample), "")
            if sample:
                lines += [f"{row.number}, {column}:", "```", sample[:SAMPLE_CHARS], "```"]
    return "\n".join(lines) + "\n"
