"""Which groups of a process are gloo's own although MYCOLL_REPLACE=gloo was to make them mycoll's.

mycoll keeps no record of such groups, so the process notes them in a memfd of its own, which
`mycoll status` and `mycoll doctor` find as they find the black boxes (black_box.py). The process
needs no compiled module for it: that it cannot be loaded is one of the reasons.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mycoll import black_box

_NAME = "mycoll.own_gloo"
_LINK = f"/memfd:{_NAME}"
_MOST_BYTES = 1 << 20


@dataclass
class OwnGloo:
    """One process, as another one sees it."""

    pid: int
    rank: int  # in the job
    reason: str  # why gloo's class stays in its place; empty: it does not
    groups: list[str]  # torch's names of the groups

    def sentence(self) -> str:
        names = ", ".join(self.groups)
        these = f"group {names} is" if len(self.groups) == 1 else f"groups {names} are"
        why = self.reason or "made by Options(cpu=), or by a reference to torch's class"
        return f"rank {self.rank} (pid {self.pid}): {these} gloo's own: {why}"


class Notes:
    """Of this process. Torch makes and destroys groups in the thread that asks for them."""

    def __init__(self) -> None:
        self.reason = ""
        self._pid = 0  # that has the file: a child of fork has its parent's descriptor
        self._file = -1
        self._groups: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def add(self, group: Any, name: str, rank: int) -> None:
        self._groups[group] = name
        weakref.finalize(group, self._write, rank).atexit = False
        self._write(rank)

    def _write(self, rank: int) -> None:
        if self._pid != os.getpid():
            if not self._groups:
                return
            self._file, self._pid = os.memfd_create(_NAME, os.MFD_CLOEXEC), os.getpid()
        names = sorted(set(self._groups.values()))
        text = {"pid": self._pid, "rank": rank, "reason": self.reason, "groups": names}
        data = json.dumps(text).encode()
        # A reader sees the old text or one that it cannot read, for a moment.
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


notes = Notes()


def noting(original: Callable[..., Any], is_gloo: Callable[[Any], bool]) -> Callable[..., Any]:
    """torch's function that makes a group, with a note where what it makes is gloo's own."""

    def make(*args: Any, **more: Any) -> Any:
        made = original(*args, **more)
        with contextlib.suppress(Exception):  # a note is worth no group
            _note(made[0] if isinstance(made, tuple) else made, is_gloo)
        return made

    return make


def _note(group: Any, is_gloo: Callable[[Any], bool]) -> None:
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):  # this rank is not in it
        return
    backends = (group._get_backend(device) for device in group._device_types)
    if any(is_gloo(getattr(each, "wrapped_pg", each)) for each in backends):
        rank = dist.get_rank() if dist.is_initialized() else group.rank()
        notes.add(group, group.group_name, rank)


def find(pids: list[int] | None = None) -> list[OwnGloo]:
    """The processes of this user on this host that have such groups, or those of these pids."""
    found = []
    for pid in pids or black_box.own_pids():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            seen = _read(pid)
            if seen is not None and seen.groups:
                found.append(seen)
    return sorted(found, key=lambda each: (each.rank, each.pid))


def _read(pid: int) -> OwnGloo | None:
    for path in black_box.memfds(pid, _LINK):
        with path.open("rb", buffering=0) as file:
            text = json.loads(file.read(_MOST_BYTES))
        if text["pid"] in black_box.numbers_of(pid):  # not its parent's
            groups = [str(name) for name in text["groups"]]
            return OwnGloo(pid, int(text["rank"]), str(text["reason"]), groups)
    return None
