"""Writes traces in the format of torch's flight recorder (version 2.10), for torchfrtrace."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from mycoll.black_box import Group, Operation, Process

# torch's analyser knows the backends of its own release only, and before 2.15 it stops at others;
# what it knows of NCCL's collectives holds for these. (It knows gloo only since 2.13.)
KNOWN_BACKEND = "nccl"
# Where its names differ from the engine's.
NAMES = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "barrier": "all_reduce_barrier",
    "monitored_barrier": "all_reduce_barrier",
    "window": "all_reduce_barrier",
}
STATES = {"queued": "scheduled", "started": "started", "done": "completed", "failed": "started"}


def write(processes: list[Process], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for process in processes:
        content = pickle.dumps(to_flight_record(process), protocol=2)
        (folder / f"rank_{process.rank}").write_bytes(content)


def to_flight_record(process: Process) -> dict[str, Any]:
    groups = process.groups
    return {
        "version": "2.10",
        "comm_lib_version": f"mycoll {process.version}",
        "pg_config": {
            each.name: {
                "name": each.name,
                "desc": each.description or "undefined",
                "ranks": str(each.global_ranks),
            }
            for each in groups
        },
        "pg_status": {
            str(index): {
                "last_enqueued_collective": each.submitted - 1,
                "last_started_collective": min(each.submitted, each.finished + 1) - 1,
                "last_completed_collective": each.finished - 1,
            }
            for index, each in enumerate(groups)
        },
        "entries": comparable(groups),
    }


def comparable(groups: list[Group]) -> list[dict[str, Any]]:
    """Collectives that all ranks remember; the analyser takes messages for collectives that most
    ranks have missed.

    It compares ranks from the largest first record_id of any of them on. So these must mean the
    same on all ranks: they are the numbers of the busiest group's collectives. What is older than
    the first of these that is remembered is left out.
    """
    if not groups:
        return []
    anchor = max(groups, key=lambda each: each.submitted)
    calls = [(index, op) for index, group in enumerate(groups) for op in group.collectives()]
    calls.sort(key=lambda each: each[1].id)
    entries = []
    first = next((op.sequence for index, op in calls if groups[index] is anchor), 0)
    number = 0 if first == 0 else None
    for index, operation in calls:
        if groups[index] is anchor:
            number = operation.sequence
        if number is not None:
            entries.append(to_entry(operation, groups[index], index, number))
    return entries


def to_entry(operation: Operation, group: Group, index: int, number: int) -> dict[str, Any]:
    def nanos(moment: float | None) -> int | None:
        return None if moment is None else round(moment * 1e9)

    is_done = operation.state == "done"
    sizes = comparable_elements(operation, max(1, group.ranks))
    name = NAMES.get(operation.kind, operation.kind)
    has_data = "barrier" not in name
    entry: dict[str, Any] = {
        "record_id": number,
        "pg_id": index,
        "process_group": [group.name, group.description or "undefined"],
        "collective_seq_id": operation.sequence,
        "p2p_seq_id": 0,
        "op_id": operation.id,
        "profiling_name": f"{KNOWN_BACKEND}:{name}",
        "time_created_ns": nanos(operation.enqueued),
        "state": STATES[operation.state],
        "time_discovered_started_ns": nanos(operation.started),
        "time_discovered_completed_ns": nanos(operation.ended) if is_done else None,
        "retired": operation.is_over,
        "is_p2p": False,
        "frames": [],
    }
    for side, elements in zip(("input", "output"), sizes):
        entry[f"{side}_sizes"] = [[elements]] if has_data else []
        entry[f"{side}_dtypes"] = [operation.dtype] if has_data else []
    if is_done and operation.ended and operation.started:
        entry["duration_ms"] = (operation.ended - operation.started) * 1e3
    if operation.file:
        where = {"name": operation.function, "filename": operation.file, "line": operation.line}
        entry["frames"] = [where]
    return entry


def comparable_elements(operation: Operation, ranks: int) -> tuple[int, int]:
    """The sizes that have to agree are written as equal even on ranks that have no part in them
    (the output of a reduce away from its root)."""
    size = max(1, operation.element_bytes)
    agreed = operation.bytes // size
    if operation.kind in ("all_reduce", "reduce", "broadcast"):
        return agreed, agreed
    # Each rank may have a size of its own; what all know alike is the sum.
    if operation.kind == "all_gather":
        return agreed // ranks, agreed // ranks * ranks
    if operation.kind == "reduce_scatter":
        return agreed // ranks * ranks, agreed // ranks
    return operation.in_bytes // size, operation.out_bytes // size
