"""Between two ranks: latency by ping-pong, rate by windows of messages, as OSU measures them.

Ranks 0 and 1 communicate; the others, if any, wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mycoll.bench.arena import Arena, aligned
from mycoll.bench.patterns import Pattern, poison
from mycoll.bench.workload import PAIR, Call, Case, Group, Unsupported, Workload
from mycoll.bench.world import World

_WINDOW = 16


class _Pairwise(Workload):
    """`length` windows of the arena are used in a call, each for a message."""

    pairwise = True
    length = 1
    is_one_way = False  # only rank 1 receives messages to verify

    def __init__(self, case: Case, world: World, hot: bool) -> None:
        super().__init__(case, world, hot)
        if world.size < 2:
            raise Unsupported(f"{case.op} needs two ranks")
        self.count: int = max(1, case.size // case.dtype.itemsize)
        self.size: int = self.count * case.dtype.itemsize
        self.talks: bool = world.rank in PAIR
        self.peer: int = 1 - world.rank
        self._offset = aligned(self.size)
        self.touched_bytes: int = 2 * self._offset
        self.copied_bytes: float = self.size / world.size
        is_hot = self.hot or not self.talks
        self.arena: Arena = Arena(self.touched_bytes, world, is_hot, self.busy_ranks)

    def outgoing(self, index: int) -> torch.Tensor:
        return self.arena.window(index % self.arena.windows, 0, self.count, self.case.dtype)

    def incoming(self, index: int) -> torch.Tensor:
        window = index % self.arena.windows
        return self.arena.window(window, self._offset, self.count, self.case.dtype)

    def calls(self, group: Group) -> Sequence[Call]:
        if not self.talks:
            return []
        # A call begins where the one before has ended: no window is warm from that.
        beginnings = range(0, math.lcm(self.arena.windows, self.length), self.length)
        return [self.call(index, group) for index in beginnings]

    def call(self, index: int, group: Group) -> Call:
        """The call whose first message is in this window."""
        raise NotImplementedError

    def verify(self, group: Group, seed: int) -> int:
        if not self.talks:
            return 0
        used = range(seed, seed + min(self.length, self.arena.windows))
        # Every message has a pattern of its own, so that exchanged ones show.
        patterns = {
            at: Pattern(self.case.dtype, "none", self.world.size, self.length * seed + at - seed)
            for at in used
        }
        for at, pattern in patterns.items():
            pattern.fill(self.outgoing(at), self.world.rank)
            poison(self.incoming(at))
        self.call(seed, group)()
        self.world.synchronize()
        if self.is_one_way and self.world.rank != 1:
            return 0
        return sum(each.wrong_copy(self.incoming(at), self.peer) for at, each in patterns.items())


class PingPongWorkload(_Pairwise):
    """The time is one way: half of there and back."""

    messages = 2

    def call(self, index: int, group: Group) -> Call:
        outgoing, incoming, peer = self.outgoing(index), self.incoming(index), self.peer

        def ping() -> None:
            dist.send(outgoing, peer, group=group)
            dist.recv(incoming, peer, group=group)

        def pong() -> None:
            dist.recv(incoming, peer, group=group)
            dist.send(outgoing, peer, group=group)

        return ping if self.world.rank == 0 else pong


class BandwidthWorkload(_Pairwise):
    """Sixteen concurrent messages, then an answer. The time is that of one message."""

    messages = length = _WINDOW
    is_one_way = True

    def call(self, index: int, group: Group) -> Call:
        peer = self.peer
        acknowledgement = torch.zeros(1, dtype=torch.uint8, device=self.world.device)
        first = self.world.rank == 0
        window = range(index, index + _WINDOW)
        move = dist.isend if first else dist.irecv
        tensors = [self.outgoing(at) if first else self.incoming(at) for at in window]
        answer = dist.recv if first else dist.send

        def transfer() -> None:
            for work in [move(tensor, peer, group=group) for tensor in tensors]:
                assert work is not None
                work.wait()
            answer(acknowledgement, peer, group=group)

        return transfer


PAIRWISE: dict[str, type[_Pairwise]] = {
    "pingpong": PingPongWorkload,
    "bandwidth": BandwidthWorkload,
}
