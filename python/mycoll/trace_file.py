"""Reads traces: what processes wrote about their last operations (csrc/observe/trace_file.h).

The format is torch's flight recorder's, with more under "mycoll"; traces of torch's own backends
are read as well, as far as they go.
"""

from __future__ import annotations

import ast
import io
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

from mycoll.black_box import MESSAGES, Group, Operation, Process, site_text


class TraceError(ValueError):
    """A file that is no trace; the message says which, and why."""


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists and maps: a trace is data, whoever wrote it."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a trace holds plain data only")


def load(paths: list[Path]) -> tuple[list[Process], list[str]]:
    """Files, or folders with a file for each rank; by rank. And what could not be read: that one
    rank's file is bad is no reason to say nothing about the others."""
    problems: list[str] = []
    files: list[Path] = []
    for path in paths:
        try:
            found = _files_in(path) if path.is_dir() else [path]
        except OSError as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        files += found
        if not found:
            problems.append(f"no traces in {path}: {_advice(path)}")
    processes = []
    for file in files:
        try:
            processes.append(_load_file(file))
        except TraceError as error:
            problems.append(str(error))
    return sorted(processes, key=lambda each: each.rank), problems


def _files_in(folder: Path) -> list[Path]:
    names = sorted(each for each in folder.iterdir() if re.search(r"\d(\.json)?$", each.name))
    return [each for each in names if each.is_file()]


def _advice(folder: Path) -> str:
    jobs = sorted((each for each in folder.iterdir() if each.is_dir()), key=_age)
    newest = f"; the newest folder in it is {jobs[-1]}" if jobs else ""
    return f"their names end with the rank{newest}"


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _load_file(path: Path) -> Process:
    try:
        content = path.read_bytes()
        is_pickle = content[:1] == b"\x80"
        dump = _PlainUnpickler(io.BytesIO(content)).load() if is_pickle else json.loads(content)
        return _to_process(dump, path)
    except OSError as error:
        raise TraceError(f"{path} is not a trace: {error}") from error
    except Exception as error:  # whatever a file can be that somebody else wrote
        raise TraceError(f"{path} is not a trace: {error!r:.200}") from error


def _to_process(dump: dict[str, Any], path: Path) -> Process:
    own = dump.get("mycoll", {})
    number = re.search(r"(\d+)(\.json)?$", path.name)
    entries = [*dump.get("mycoll_earlier", []), *dump["entries"], *dump.get("mycoll_messages", [])]
    newest = max((_nanos(each) for each in entries), default=0)
    process = Process(
        rank=int(own.get("rank", number[1] if number else 0)),
        pid=int(own.get("pid", 0)),
        host=own.get("host", ""),
        job=own.get("job", ""),
        version=own.get("version", ""),
        taken=own.get("time_ns", newest) / 1e9,
    )
    details = {each["name"]: each for each in own.get("groups", [])}
    for name, config in dump["pg_config"].items():
        members = ast.literal_eval(config["ranks"]) if config.get("ranks") else []
        more = details.get(name, {})
        description = more.get("description", config.get("desc", ""))
        group = Group(
            name=name,
            description="" if description == "undefined" else description,
            context=more.get("context", name),
            rank=more.get("rank", members.index(process.rank) if process.rank in members else 0),
            ranks=more.get("ranks", len(members)),
            global_ranks=members,
            phase="failed" if more.get("failure") else "open",
            transport=more.get("transport", ""),
            failure=more.get("failure", ""),
            submitted=more.get("submitted", 0),
            finished=more.get("finished", 0),
            waits_for=more.get("waits_for", []),
        )
        mine = [each for each in entries if each["process_group"][0] == name]
        mine.sort(key=lambda each: (each["op_id"], each["record_id"]))
        group.operations = [_to_operation(each) for each in mine]
        if not more:
            collectives = group.collectives()
            group.submitted = max((each.sequence + 1 for each in collectives), default=0)
        process.groups.append(group)
    return process


def _nanos(entry: dict[str, Any]) -> int:
    return int(entry.get("time_discovered_completed_ns") or entry["time_created_ns"])


def _to_operation(entry: dict[str, Any]) -> Operation:
    def moment(nanos: int | None) -> float | None:
        return nanos / 1e9 if nanos else None

    own = entry.get("mycoll", {})
    words = entry["profiling_name"].rpartition(":")[2].split(" ")
    kind = own.get("operation", words[0])
    frames = entry.get("frames") or []
    site = site_text(frames[0]["name"], frames[0]["filename"], frames[0]["line"]) if frames else ""
    dtypes = [*entry.get("input_dtypes", []), *entry.get("output_dtypes", [])]
    sizes = [
        sum(math.prod(size) for size in entry.get(f"{side}_sizes", []))
        for side in ("input", "output")
    ]
    state = {"scheduled": "queued", "completed": "done"}.get(entry["state"], "started")
    # What torch's own backends leave out are bytes: their elements count as one byte each.
    in_bytes, out_bytes = own.get("in_bytes", sizes[0]), own.get("out_bytes", sizes[1])
    elements = max(sizes)
    whole = max(in_bytes, out_bytes)
    return Operation(
        kind=kind,
        sequence=own.get(
            "sequence", entry["p2p_seq_id" if kind in MESSAGES else "collective_seq_id"]
        ),
        state="failed" if own.get("failed") else state,
        enqueued=moment(entry["time_created_ns"]) or 0.0,
        started=moment(entry.get("time_discovered_started_ns")),
        ended=moment(own.get("ended_ns") or entry.get("time_discovered_completed_ns")),
        dtype=dtypes[0] if dtypes else "",
        reduce_op=own.get("reduce_op", ""),
        peer=own.get("peer", -1),
        tag=own.get("tag", 0),
        in_bytes=in_bytes,
        out_bytes=out_bytes,
        element_bytes=own.get("element_bytes", max(1, whole // elements if elements else 1)),
        site=site,
        on_device=own.get("on_device", False),
        composite=own.get("composite", False),
    )
