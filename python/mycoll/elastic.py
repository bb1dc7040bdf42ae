"""Groups that continue when ranks are lost, and that others can join: `mycoll.ElasticGroup`.

The processes agree on the next group by texts between their endpoints:

    join   to the leader: this process takes part, and knows these newcomers
    call   from the leader to the ranks of its last group and to newcomers, which answer with a join
    list   from the leader to those that have joined: the handles of the next group, by rank, and
           the newcomers that it has called in vain

Then they form the group (Endpoint.form). If that fails, they begin again.

The leader is the lowest rank of the last group that is not lost. It waits until each other rank has
answered or is lost. A process that is in no group yet takes those that it knows for the last group,
and sends its join to the first one. A rank that is not recovering remembers it as a newcomer. A
newcomer that does not answer in time is called again for each group, but not waited for until it
sends something.

A process of another version of mycoll, or with other settings, cannot take part. What it sends is
ignored, and answered with "refused". A process in no group that is refused raises an error.

Groups have numbers. A process that is called by the leader of a later group than its own has missed
groups, and follows. If the connection between the two lowest ranks breaks, both lead. The others
follow the lower one, and the other one fails at its deadline.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, DistNetworkError, PrefixStore, ProcessGroup, Store
from torch.distributed.constants import default_pg_timeout

from mycoll._log import log
from mycoll._native import native
from mycoll.groups import Endpoint

if TYPE_CHECKING:
    from mycoll._C import Options

_TICK = timedelta(milliseconds=20)
_RECOVERY = timedelta(seconds=60)
# The leader waits so long for newcomers when all ranks are there.
_NEWCOMERS = 1.0
# The longest wait for the processes on the list, which are all waiting for it.
_FORM = timedelta(seconds=10)
# The longest wait for a process that has its number in the store, and not yet published its handle.
_TO_PUBLISH = timedelta(seconds=5)
# Parts of the timeout: after which another process leads, as the leader does not answer, and after
# which the leader continues without ranks that are not lost and have not joined.
_SILENT, _LATE = 0.25, 0.75


@dataclass
class _Attempt:
    """What this process has sent and received since it began to agree."""

    number: int = 0  # of the group that it makes if it leads
    called: dict[str, float] = field(default_factory=dict)  # when
    present: set[str] = field(default_factory=set)  # have answered its call
    silent: set[str] = field(default_factory=set)  # it has followed them in vain
    # Its latest join: the leader, the number of the call that it answers, how many newcomers it has
    joined: tuple[str, int, int] = ("", 0, 0)
    following_since: float = 0.0


class ElasticGroup:
    """A group that continues when ranks are lost, and that other processes can join.

    No process and no store is needed in every group: any rank may be lost, rank 0 among them. Each
    time the ranks change, `group` is another ProcessGroup, with new ranks: those that stay keep
    their order, and newcomers follow them. Objects that hold the group before, such as
    DistributedDataParallel, are made again.

    Its methods are called by one thread at a time.

    Args:
        store: Where processes find each other. It is used only while this object is made, and may
            end afterwards.
        min_ranks: A group has at least so many ranks. More than half of the ranks: two parts of a
            divided network cannot both continue.
        ranks: How many processes the first group waits for; min_ranks by default.
        handles: Instead of a store, or beside it: handles of one or more members.
        name: The same on all processes; it appears in messages.
        timeout: For the first group, and for each operation.
        pg_options: As for init_process_group.

    Attributes:
        handle: What another process needs to join through this one. It is secret: see Endpoint.

    Example::

        members = mycoll.ElasticGroup(store, min_ranks=2, ranks=4)
        generation = 0
        while step < steps:
            try:
                if generation != members.generation:
                    step = share_state(model, step, members.group)
                    generation = members.generation
                train(model, members.group)
                step += 1
                members.admit()
            except dist.DistBackendError:
                members.recover()
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        min_ranks: int = 1,
        ranks: int | None = None,
        handles: Sequence[str] = (),
        name: str = "elastic",
        timeout: timedelta = default_pg_timeout,
        pg_options: Options | None = None,
    ) -> None:
        if min_ranks < 1 or (ranks is not None and ranks < min_ranks):
            raise ValueError(f"min_ranks is at least 1, and ranks at least min_ranks ({min_ranks})")
        self._min_ranks = min_ranks
        self._pg_options = pg_options
        self._endpoint = Endpoint(name=name, timeout=timeout, store=store)
        self._native = self._endpoint._native
        self.handle: str = self._endpoint.handle
        self._group: ProcessGroup | None = None
        self._generation = 0
        self._used = 0  # the highest number of a group that this process was asked to form
        self._newcomers: list[str] = []
        self._absent: set[str] = set()  # newcomers that were called in vain
        self._unfit: set[str] = set()  # what was ignored, with a warning
        self._refused: list[str] = []
        self._joined: set[str] = set()  # have sent this process a join since it formed a group
        self._calls: dict[str, dict[str, Any]] = {}  # the latest of each process that leads
        self._why: list[str] = []
        known = [*handles, *(_publish(store, name, self.handle) if store is not None else ())]
        # The processes that this one knows. In a group: its ranks, in order.
        self._members = [*dict.fromkeys(each for each in known if each != self.handle), self.handle]
        for each in known:
            self._is_fit(each)  # warns now: with other settings it may not even be reachable
        self._meet(ranks or min_ranks, timeout)

    @property
    def group(self) -> ProcessGroup:
        """The group as it is now, for the functions of torch.distributed."""
        if self._group is None:
            raise DistBackendError("the group has failed and was not recovered, or was closed")
        return self._group

    @property
    def rank(self) -> int:
        """This process's rank in `group`."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks of `group`."""
        return self.group.size()

    @property
    def generation(self) -> int:
        """The number of `group`: the same on all its ranks, and higher with each group."""
        return self._generation

    def recover(self, timeout: timedelta = _RECOVERY) -> None:
        """Makes a group of the ranks that are left, and of newcomers.

        All ranks call it when an operation has failed on any of them: it ends the group before, so
        that operations of the other ranks fail, too. Data that an operation was to change when it
        failed may be changed in part, and differently on each rank.

        Args:
            timeout: For the whole call. Ranks that are alive but do not call it are left out.

        Raises:
            torch.distributed.DistBackendError: Fewer than `min_ranks` have called it. It may be
                called again: a rank that was cut off from the others then finds those that continue
                without it, if the network is back.
        """
        if self._group is not None:
            _discard(self._group)
            self._group = None
        self._meet(self._min_ranks, timeout)

    def admit(self, timeout: timedelta = _RECOVERY) -> bool:
        """Includes the processes that wait to join, if there are any.

        A collective: all ranks call it at the same point of their programs, for instance after each
        step. Without newcomers it is an all_reduce of one number. Newcomers continue after the call
        that made their ElasticGroup, when the others continue after this one.

        Args:
            timeout: For the whole call if there are newcomers; otherwise that of an operation
                counts. Ranks that are alive but do not come are left out.

        Returns:
            Whether the group is another one now.

        Raises:
            torch.distributed.DistBackendError: A rank was lost; call `recover()`.
        """
        before = self.group
        self._read(timedelta(0))
        count = torch.tensor([len(self._awaited())])
        dist.all_reduce(count, dist.ReduceOp.MAX, group=before)
        if count.item() == 0:
            return False
        self._group = None
        try:
            self._meet(self._min_ranks, timeout)
        finally:
            _discard(before)
        return True

    def close(self) -> None:
        """Leaves the group. The next operation of the other ranks fails, and they can `recover()`
        without this process."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None
        self._endpoint = self._native = None  # type: ignore[assignment]
        self._members = []

    # ---- agreement

    def _meet(self, needed: int, timeout: timedelta) -> None:
        began = time.monotonic()
        if not self._members:
            raise DistBackendError("elastic group: it was closed; make another ElasticGroup")
        try:
            while not self._attempt(needed, began, timeout.total_seconds()):
                pass
        except BaseException:
            # A process stays lost as long as it is watched. The next call connects to it again: the
            # network between them may have come back.
            self._native.watch([])
            raise

    def _attempt(self, needed: int, began: float, seconds: float) -> bool:
        """Returns False if the processes on a list could not form the group."""
        self._watch()
        state = _Attempt()
        while True:
            alive = [each for each in self._members if not self._is_lost(each)]
            state.silent -= self._calls.keys()
            leader = self._leader([each for each in alive if each not in state.silent])
            waited = time.monotonic() - began
            if leader == self.handle:
                if chosen := self._lead(state, alive, needed, is_late=waited > _LATE * seconds):
                    return self._form(state.number, chosen)
            elif self._follow(state, leader) > _SILENT * seconds:
                state.silent.add(leader)
            if waited > seconds:
                raise DistBackendError(self._explain(needed, seconds, leader, len(state.present)))
            for text in self._read(_TICK):
                if text["kind"] == "join":
                    self._used = max(self._used, text["used"])
                    if text["answers"] == state.number:
                        state.present.add(text["from"])
                elif text["from"] == leader and text["number"] > self._used:
                    for newcomer in text["absent"]:
                        self._note(newcomer)
                    self._absent.update(text["absent"])
                    return self._form(text["number"], text["handles"])

    def _lead(self, state: _Attempt, alive: list[str], needed: int, is_late: bool) -> list[str]:
        """Calls the others. Returns the ranks of the next group once it has sent them the list."""
        if state.number <= self._used:
            state.number = self._used + 1
            state.called.clear()
            state.present = {self.handle}
        now = time.monotonic()
        candidates = [*alive, *self._newcomers]
        for each in candidates:
            if each != self.handle and each not in state.called:
                state.called[each] = now
                self._send(each, "call", number=state.number)
        chosen = [each for each in candidates if each in state.present]
        if len(chosen) < (self._min_ranks if is_late else needed):
            return []
        missing = [each for each in candidates if each not in state.present]
        awaited = {each for each in self._awaited() if now - state.called[each] < _NEWCOMERS}
        if any(not is_late if each in alive else each in awaited for each in missing):
            return []
        self._absent.update(each for each in self._newcomers if each not in state.present)
        text = {"number": state.number, "handles": chosen, "absent": [*self._absent]}
        for each in chosen:
            if each != self.handle:
                self._send(each, "list", **text)
        return chosen

    def _awaited(self) -> list[str]:
        return [each for each in self._newcomers if each not in self._absent]

    def _follow(self, state: _Attempt, leader: str) -> float:
        """Joins the leader, also without a call: if it is lost, that is known once the join is
        sent. Returns for how many seconds it has not called."""
        call = self._calls.get(leader)
        join = (leader, call["number"] if call else 0, len(self._newcomers))
        if join[0] != state.joined[0]:
            state.following_since = time.monotonic()
        if join != state.joined:
            state.joined = join
            self._send(leader, "join", answers=join[1])
        return 0.0 if call else time.monotonic() - state.following_since

    def _leader(self, alive: list[str]) -> str:
        """The process to follow. One that knows more groups comes before the ranks known here."""
        is_new = self._generation == 0
        ahead = {
            call["generation"]: each
            for each, call in self._calls.items()
            if (call["generation"] > self._generation or (is_new and each not in self._members))
            and not self._is_lost(each)
        }
        return ahead[max(ahead)] if ahead else alive[0]

    def _form(self, number: int, handles: list[str]) -> bool:
        self._used = number
        self._calls = {each: call for each, call in self._calls.items() if call["number"] > number}
        try:
            group = self._endpoint.form(number, handles, timeout=_FORM, pg_options=self._pg_options)
        except (DistBackendError, DistNetworkError) as error:
            self._why = [f"the latest attempt: {error}"]
            return False
        self._group = group
        self._generation = number
        self._members = handles
        # A rank of the last group that followed this process, which has followed another one, is in
        # no group, and may not know a rank of this one.
        known = dict.fromkeys([*self._newcomers, *self._joined])
        self._newcomers = [each for each in known if each not in handles and each != self.handle]
        self._absent.intersection_update(self._newcomers)
        self._joined.clear()
        self._watch()
        self._why = []
        log.info("elastic group %d: rank %d of %d", number, self.rank, self.size)
        return True

    def _is_lost(self, handle: str) -> bool:
        return handle != self.handle and self._native.loss_of(handle) != ""

    def _send(self, to: str, kind: str, **more: Any) -> None:
        text = {"kind": kind, "from": self.handle, "generation": self._generation, **more}
        if kind == "join":
            text |= {"used": self._used, "newcomers": self._newcomers}
        self._native.send(to, json.dumps(text))

    def _read(self, timeout: timedelta) -> list[dict[str, Any]]:
        """Notes calls and newcomers; returns the other texts."""
        others = []
        for each in self._native.receive(timeout):
            try:
                text = json.loads(each)
                source, kind = str(text["from"]), str(text["kind"])
            except (ValueError, LookupError, TypeError):
                self._warn(each, f"a text that this version of mycoll cannot read: {each[:40]!r}")
                continue
            if kind == "refused" and self._generation == 0:
                why = self._native.mismatch(source)
                raise native().ArgumentError(f"elastic group: refused by a member: {why}")
            if not self._is_fit(source):
                if kind != "refused":
                    with contextlib.suppress(ValueError):  # its handle cannot be read
                        self._send(source, "refused")
                        self._refused.append(source)
                continue
            self._absent.discard(source)
            if kind == "call" and text["number"] > self._used:
                self._calls[source] = text
            elif kind == "call":
                self._note(source)  # it has missed the latest group
            else:
                others.append(text)
            if kind == "join":
                self._joined.add(source)
                for newcomer in (source, *text["newcomers"]):
                    self._note(newcomer)
        living = [each for each in self._newcomers if not self._is_lost(each)]
        refused = [each for each in self._refused if not self._is_lost(each)]
        if living != self._newcomers or refused != self._refused:
            self._newcomers, self._refused = living, refused
            self._absent.intersection_update(living)
            self._watch()  # a lost one may connect again
        return others

    def _is_fit(self, handle: str) -> bool:
        """Whether nothing prevents a group with this process; else a warning says what, once."""
        if why := self._native.mismatch(handle):
            self._warn(handle, f"a process that cannot take part: {why}")
        return not why

    def _warn(self, key: str, what: str) -> None:
        if key not in self._unfit:
            self._unfit.add(key)
            log.warning("elastic group: ignored %s", what)

    def _note(self, newcomer: str) -> None:
        is_known = newcomer in self._newcomers or newcomer in self._members
        if not is_known and self._is_fit(newcomer):
            self._newcomers.append(newcomer)
            self._watch()

    def _watch(self) -> None:
        self._native.watch([*self._members, *self._newcomers, *self._refused])

    def _explain(self, needed: int, seconds: float, leader: str, present: int) -> str:
        if leader == self.handle:
            what = f"{present} of at least {needed} processes are there"
        else:
            what = f"the leader has not made a group, which needs at least {needed} processes"
        whys = (
            f(each) for f in (self._native.loss_of, self._native.mismatch) for each in self._members
        )
        return "; ".join(
            [f"elastic group: timeout after {seconds:g} s: {what}", *filter(None, whys), *self._why]
        )


def _discard(group: ProcessGroup) -> None:
    """Ends a group that the caller may still refer to: in a model, or in the error's traceback."""
    group._get_backend(torch.device("cpu"))._discard()  # type: ignore[attr-defined]


def _publish(store: Store, name: str, handle: str) -> list[str]:
    """Publishes the handle; returns those of the group's processes that have done so before."""
    store = PrefixStore(f"mycoll/members of {name}", store)
    number = store.add("number", 1)
    store.set(str(number), handle)
    found = []
    for other in range(1, number):
        try:
            store.wait([str(other)], _TO_PUBLISH)
        except RuntimeError:  # that of a FileStore is no DistStoreError
            continue  # it has ended before it could
        found.append(store.get(str(other)).decode())
    return found
