"""The error of a failure: every rank raises its first cause, not a consequence."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from faults.harness import SUITE_PATIENCE, Seen, Stage, answers, attempt, is_last, kill_one
from faults.misuse import join, twice
from torch.distributed import distributed_c10d
from worlds.worker import Ctx


def dies(ctx: Ctx) -> Seen:
    x = torch.ones(10)
    dist.all_reduce(x)
    kill_one(ctx, 1)
    return attempt(lambda: dist.all_reduce(x))


@pytest.mark.quick
def test_the_error_says_that_a_rank_was_killed(stage):
    """The error is not "closed its connection", and it is also logged in one line."""
    with stage.world(3) as world:
        world.start(dies)
        for rank, seen in answers(world, (1,)).items():
            assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
            assert "rank 1 (" in seen.text and "has ended (killed" in seen.text, seen.text
            lines = [x for x in world.members[rank].log_tail().splitlines() if "[mycoll " in x]
            assert len(lines) == 1 and "has ended (killed" in lines[0], lines
            assert len(lines[0]) < 200, lines


def dies_at_once(ctx: Ctx, dies_after: float, others_call_after: float) -> Seen:
    if ctx.rank == 1:
        time.sleep(dies_after)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(others_call_after)
    return attempt(lambda: dist.all_reduce(torch.ones(10)))


@pytest.mark.parametrize(("dies_after", "others_call_after"), [(0.0, 0.5), (0.5, 0.0)])
def test_a_rank_that_dies_before_its_first_call(stage, dies_after, others_call_after):
    with stage.world(3) as world:
        world.start(dies_at_once, dies_after, others_call_after)
        for seen in answers(world, (1,)).values():
            assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
            assert "rank 1 (" in seen.text and "ended before its first call" in seen.text, seen.text


def dies_after_it_received(ctx: Ctx) -> Seen:
    x = torch.ones(4)
    if ctx.rank == 1:
        dist.recv(x, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(x, 1)
    return attempt(lambda: dist.recv(x, 1))


def test_a_rank_that_dies_when_it_has_only_received(stage):
    """It has made a call, although nothing of it came here."""
    with stage.world(2) as world:
        world.start(dies_after_it_received)
        (seen,) = answers(world, (1,)).values()
        assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
        assert "rank 1 (" in seen.text and "or before it sent this rank any data" in seen.text


def leaves(ctx: Ctx) -> Seen | None:
    x = torch.ones(10)
    dist.all_reduce(x)
    # The next call of any rank fails the group, so rank 1 leaves last.
    if is_last(ctx, 1):  # as at the end of a program
        return attempt(dist.destroy_process_group)
    return attempt(lambda: dist.all_reduce(x))


def test_a_rank_that_leaves_is_not_waited_for(reused, transport, mycoll_only):
    first, leaver, last = reused(3, transport).run_in_group(leaves, timeout=60.0)
    assert not leaver.kind, leaver
    for seen in (first, last):
        assert seen.kind == "DistBackendError", seen
        assert "rank 1 (" in seen.text and "left" in seen.text, seen.text


def calls_too_late(ctx: Ctx) -> Seen | None:
    x = torch.ones(900_000)
    seen = None
    if ctx.rank != 1:
        seen = attempt(lambda: dist.all_to_all_single(torch.empty_like(x), x))
    is_last(ctx, 1)
    return seen


def test_a_late_rank_is_named_once(reused, transport, mycoll_only):
    """Also if several messages to and from it are open."""
    first, _, last = reused(3, transport).run_in_group(calls_too_late, timeout=2.0)
    for seen in (first, last):
        assert seen.kind == "DistBackendError" and "timed out after" in seen.text, seen
        assert seen.text.count("rank 1 (") == 1, seen.text


def dies_before_a_new_group(ctx: Ctx) -> tuple[Seen, float]:
    x = torch.ones(10)
    dist.all_reduce(x)
    kill_one(ctx, 1)
    began = time.monotonic()
    seen = attempt(lambda: dist.new_group())
    took = time.monotonic() - began
    survivors = dist.new_group([0, 2], use_local_synchronization=True)
    dist.all_reduce(x, group=survivors)
    ctx.equal(float(x[0]), 6.0)
    return seen, took


def test_new_group_with_a_dead_rank_fails_promptly(stage):
    """The survivors can make a group without it."""
    with stage.world(3) as world:
        world.start(dies_before_a_new_group)
        found = answers(world, (1,))
        assert all(isinstance(one, tuple) for one in found.values()), found
        for seen, took in found.values():
            assert seen.kind == "DistBackendError", seen
            assert "cannot be made with rank 1" in seen.text, seen.text
            assert "has ended (killed" in seen.text, seen.text
            assert took < SUITE_PATIENCE / 2, f"{took:.1f} s"


def shrinks_after_a_death(ctx: Ctx, victim: int) -> Seen | None:
    x = torch.ones(10)
    dist.all_reduce(x)
    kill_one(ctx, victim)
    seen = attempt(lambda: dist.all_reduce(x))
    for flags in (distributed_c10d.SHRINK_ABORT, distributed_c10d.SHRINK_DEFAULT):
        last = dist.get_world_size() - 1
        if flags == distributed_c10d.SHRINK_DEFAULT:  # again, without a death
            if dist.get_rank() == last:
                return seen
            dist.shrink_group([last])
        else:
            dist.shrink_group([victim], shrink_flags=flags)
        y = torch.full((1000,), float(ctx.rank))
        dist.all_reduce(y)
        members = [r for r in range(ctx.size) if r != victim][: dist.get_world_size()]
        ctx.equal(float(y[7]), float(sum(members)))
    return seen


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_shrink_and_continue(stage, victim):
    with stage.world(4) as world:
        world.start(shrinks_after_a_death, victim)
        for seen in answers(world, (victim,)).values():
            assert seen.kind == "DistBackendError", seen
            assert f"rank {victim} (" in seen.text, seen.text


def test_duplicate_rank_fails_on_all_ranks(reused, transport, mycoll_only):
    for seen in reused(3, transport).run(twice, 60.0):
        assert seen.kind == "DistStoreError", seen
        assert "rank 1 is taken by" in seen.text, seen.text
        assert seen.seconds < 30


def late_leader(ctx: Ctx) -> Seen:
    """Ranks 1 and 2 are both started as rank 1, and wait for rank 0, which starts late."""
    if ctx.rank == 0:
        time.sleep(1.0)
    return join(ctx, "", min(ctx.rank, 1), 3, 60.0)


def test_duplicate_rank_fails_on_a_late_rank(reused, transport, mycoll_only):
    for seen in reused(3, transport).run(late_leader):
        assert seen.kind == "DistStoreError", seen
        assert "rank 1 is taken by" in seen.text, seen.text


def wrong_here(ctx: Ctx, culprit: int, variable: str, value: str) -> Seen:
    if ctx.rank == culprit:
        os.environ[variable] = value
    return attempt(lambda: ctx.init("wrong"))


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    "variable, value",
    [("MYCOLL_SOCKET_IFNAME", "nosuch0"), ("MYCOLL_SECRET_FILE", "/no/such/file")],
)
def test_failed_init_names_its_cause_on_all_ranks(pool, mycoll_only, culprit, variable, value):
    """The rank fails before it has connected; the others get its error and do not wait for it."""
    with Stage(pool, "tcp", SUITE_PATIENCE).world(3, timeout=60.0, init=False) as world:
        world.start(wrong_here, culprit, variable, value)
        for rank, seen in answers(world, limit=40).items():
            assert isinstance(seen, Seen) and seen.kind, seen
            assert variable in seen.text, seen.text
            if rank != culprit:
                assert f"rank {culprit} (" in seen.text and "has given up" in seen.text, seen.text


def uses_all_descriptors(ctx: Ctx) -> None:
    """A long wait on a rank without free descriptors, which it would need to watch the others."""
    x = torch.ones(10)
    dist.all_reduce(x)
    taken = []
    if ctx.rank == 0:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(1.0)
    try:
        dist.all_reduce(x)
    finally:
        for fd in taken:
            os.close(fd)


def test_running_out_of_descriptors_is_not_a_death(reused, transport, mycoll_only):
    reused(2, transport).run_in_group(uses_all_descriptors)
