"""mycoll.ElasticGroup: processes that are killed, stopped, started and closed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import mycoll
import pytest
import torch
import torch.distributed as dist
from mycoll import elastic
from worlds.crew import Crew
from worlds.elastic_walk import WARM, ElasticCrew, walk
from worlds.threads import on_all

pytestmark = pytest.mark.usefixtures("mycoll_only")

TIMEOUT = timedelta(seconds=60)


def total(members: mycoll.ElasticGroup, value: float) -> float:
    x = torch.full((1000,), value)
    dist.all_reduce(x, group=members.group)
    return float(x[0])


def test_any_walk() -> None:
    """ELASTIC_STEPS: a long walk, in which processes are also stopped (./dev soak)."""
    seed = int(os.environ.get("SEED", str(random.randrange(1 << 30))))
    print("seed", seed)
    if steps := os.environ.get("ELASTIC_STEPS"):
        walk(seed, int(steps), 5, timeout=TIMEOUT, patience=1.0, recovery=8.0)
    else:
        walk(seed, 8, 4, timeout=TIMEOUT)


def test_former_groups_are_freed() -> None:
    """Two processes repeatedly lose a third one and admit another. A group that is not freed keeps
    20 KiB of the heap, and shared memory."""
    with ElasticCrew(timeout=TIMEOUT) as crew:
        crew.enlist(1)
        crew.settle()
        crew.enlist(1, through=[0])
        crew.settle()
        survivors = crew.living
        for _ in range(2 * WARM + 3):
            (newest,) = crew.enlist(1, through=[0])
            crew.settle()
            crew.kill([newest])
            crew.settle()
        for number in survivors:
            for size in (2, 3):
                life = [each.memory for each in crew.lives[number] if each.size == size]
                early, late = life[:WARM], life[WARM:]
                assert len(late) > WARM
                assert late[-1].heap <= max(each.heap for each in early) + (64 << 10), life
                assert late[-1].shared <= max(each.shared for each in early), life


def test_the_store_and_rank_zero_may_be_killed(free_port: int) -> None:
    """The store's process is killed, then rank 0, then two ranks. New processes use handles."""
    command = (
        "import torch.distributed as dist, time;"
        f"store = dist.TCPStore('127.0.0.1', {free_port}, is_master=True, wait_for_workers=False);"
        "print('there', flush=True); time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    crew = ElasticCrew(store=("127.0.0.1", free_port), min_ranks=4, ranks=5, timeout=TIMEOUT)
    try:
        with crew:
            assert server.stdout.readline() == "there\n"
            crew.enlist(5)
            crew.settle()
            server.kill()
            server.wait()
            crew.kill([0])
            crew.settle()
            del crew.options["store"]
            crew.enlist(2, through=[3])
            crew.settle()
            crew.kill([1, 4])
            crew.settle()
    finally:
        server.kill()
        server.stdout.close()


def test_stopped_ranks_are_left_out_and_join_again() -> None:
    with ElasticCrew(timeout=TIMEOUT, patience=1.0, recovery=4.0) as crew:
        crew.enlist(1)
        crew.settle()
        crew.enlist(2, through=[0])
        crew.settle()
        # This includes the rank that leads a recovery, finally together with another rank.
        for stopped in ([2], [0], [1, 2]):
            for number in stopped:
                crew.signal(number, signal.SIGSTOP)
            crew.settle(without=stopped)
            for number in stopped:
                crew.signal(number, signal.SIGCONT)
            crew.settle()


def test_another_secret_is_not_admitted(tmp_path: Path) -> None:
    secrets = [tmp_path / name for name in ("right", "wrong")]
    for path in secrets:
        path.write_text(path.name * 8)
    right, wrong = ({"MYCOLL_SECRET_FILE": str(path)} for path in secrets)
    with ElasticCrew(min_ranks=1, timeout=TIMEOUT) as crew:
        crew.enlist(1, **right)
        crew.settle()
        crew.options.update(min_ranks=2, timeout=timedelta(seconds=2))
        (stranger,) = crew.enlist(1, through=[0], **wrong)
        error = crew.error(stranger)
        assert "1 of at least 2 processes are there" in error
        assert "could not prove" in error
        crew.kill([stranger])
        crew.options.update(timeout=TIMEOUT)
        crew.enlist(1, through=[0], **right)
        crew.settle()


def join(pipe: Connection, handles: list[str]) -> None:
    """A process that tries to join, and else may be alone in a group."""
    pipe.send(os.getpid())
    try:
        mycoll.ElasticGroup(handles=handles, timeout=TIMEOUT)
    except mycoll.ArgumentError as error:
        pipe.send(str(error))


def test_other_settings_are_not_admitted(caplog: pytest.LogCaptureFixture) -> None:
    """The members continue, with one warning; the error of the new process names the difference."""
    store = dist.HashStore()
    members = on_all(lambda _: mycoll.ElasticGroup(store, min_ranks=2, timeout=TIMEOUT), 2)
    found: list[str] = []
    with Crew() as crew:
        for variable in ("MYCOLL_SUM_BLOCK=3", "MYCOLL_PARTIALS=rounded"):
            caplog.clear()
            number = crew.start(join, [members[0].handle], **dict([variable.split("=")]))
            pid = crew.receive(number)
            answer = threading.Thread(target=lambda n=number: found.append(crew.receive(n)))
            answer.start()
            while answer.is_alive():
                assert on_all(lambda i: members[i].admit(), 2) == [False] * 2
            assert "refused by a member" in found[-1]
            assert f":{os.getpid()} has 'mycoll" in found[-1]
            assert variable in found[-1]
            (warning,) = caplog.messages
            assert f":{pid} has 'mycoll" in warning
            assert variable in warning
            on_all(lambda i: members[i].recover(), 2)
            assert {each.size for each in members} == {2}


def test_texts_that_cannot_be_read_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    members = mycoll.ElasticGroup(timeout=TIMEOUT)
    stranger = mycoll.Endpoint()._native
    for text in ("join me", "[]", '{"kind": "join"}', '{"kind": "join", "from": "gloo:0"}'):
        stranger.send(members.handle, text)
    while len(caplog.messages) < 4:
        assert not members.admit()
    assert total(members, 1.0) == 1.0
    assert "not a handle of this version of mycoll: gloo:0" in caplog.messages[3]
    assert all("cannot read" in message for message in caplog.messages[:3])


def test_other_settings_are_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """By the handle: processes that encrypt cannot connect to others."""
    stranger = mycoll.Endpoint()
    handle = stranger.handle.replace(" mycoll ", " mycoll 9.", 1)
    members = mycoll.ElasticGroup(handles=[handle], timeout=timedelta(seconds=1))
    assert members.size == 1
    assert "cannot take part" in caplog.messages[0]
    assert "has 'mycoll 9." in caplog.messages[0]


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore"])
def test_a_job_that_restarts_on_one_store(kind: str, tmp_path: Path) -> None:
    """The handles of the killed processes remain in the store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = ("127.0.0.1", server.port) if kind == "TCPStore" else (str(tmp_path / "store"), -1)
    with ElasticCrew(store=where, min_ranks=2, ranks=3, timeout=TIMEOUT) as crew:
        for _ in range(3):
            began = time.monotonic()
            crew.enlist(3)
            crew.settle()
            assert time.monotonic() - began < 30
            crew.kill(crew.living)


def test_too_few_ranks_are_an_error() -> None:
    store = dist.HashStore()
    both = on_all(
        lambda _: mycoll.ElasticGroup(store, min_ranks=2, timeout=timedelta(seconds=30)), 2
    )
    assert on_all(lambda i: total(both[i], 1.0), 2) == [2.0, 2.0]
    both[0].close()
    with pytest.raises(dist.DistBackendError, match="left the group"):
        total(both[1], 1.0)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="1 of at least 2 processes are there"):
        both[1].recover(timedelta(seconds=1))
    assert time.monotonic() - began < 30
    with pytest.raises(dist.DistBackendError, match="was not recovered, or was closed"):
        both[1].admit()
    # Another process can still join.
    third: list[mycoll.ElasticGroup] = []

    def join(i: int) -> float:
        if i == 0:
            both[1].recover(timedelta(seconds=30))
            return total(both[1], 1.0)
        third.append(
            mycoll.ElasticGroup(
                handles=[both[1].handle], min_ranks=2, timeout=timedelta(seconds=30)
            )
        )
        return total(third[0], 2.0)

    assert on_all(join, 2) == [3.0, 3.0]
    assert (both[1].rank, third[0].rank) == (0, 1)


def test_groups_of_different_names_share_a_store() -> None:
    store = dist.HashStore()
    members = on_all(lambda i: mycoll.ElasticGroup(store, name=f"group {i}", timeout=TIMEOUT), 2)
    assert [each.size for each in members] == [1, 1]
    assert on_all(lambda i: members[i].admit(), 2) == [False, False]
    assert on_all(lambda i: total(members[i], float(i)), 2) == [0.0, 1.0]


def test_a_process_that_ended_before_it_published_is_skipped(tmp_path, monkeypatch) -> None:
    """It has taken a number. A FileStore raises a different error than other stores."""
    monkeypatch.setattr(elastic, "_TO_PUBLISH", timedelta(seconds=0.1))
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), -1)):
        for expected in ([], ["one"]):
            dist.PrefixStore("mycoll/members of x", store).add("number", 1)
            found = elastic._publish(store, "x", "one" if not expected else "two")
            assert found == expected


def test_processes_find_each_other_through_any_member() -> None:
    """Each process has only the handle of the one before it."""
    members: list[mycoll.ElasticGroup] = []
    handles = [threading.Event() for _ in range(4)]
    known: list[str] = []

    class Watched(mycoll.ElasticGroup):
        def _meet(self, needed: int, timeout: timedelta) -> None:
            known.append(self.handle)
            handles[len(known) - 1].set()
            super()._meet(needed, timeout)

    def start(i: int) -> mycoll.ElasticGroup:
        if i > 0:
            assert handles[i - 1].wait(20)
        return Watched(
            handles=known[i - 1 : i], min_ranks=4, ranks=4, timeout=timedelta(seconds=30)
        )

    members = on_all(start, 4)
    assert on_all(lambda i: total(members[i], float(i)), 4) == [6.0] * 4
    assert members[0].generation == members[3].generation
    for each in members:
        each.close()


def test_members_wait_once_for_an_absent_process() -> None:
    """The process has sent its request only to rank 1, and joins much later."""
    store = dist.HashStore()
    members = on_all(lambda _: mycoll.ElasticGroup(store, min_ranks=2, timeout=TIMEOUT), 2)
    has_asked, wakes = threading.Event(), threading.Event()

    class Sleepy(mycoll.ElasticGroup):
        def _meet(self, needed: int, timeout: timedelta) -> None:
            with pytest.raises(dist.DistBackendError):
                super()._meet(needed, timedelta(seconds=0.2))
            has_asked.set()
            assert wakes.wait(60)
            super()._meet(needed, timeout)

    def admit() -> bool:
        changes = on_all(lambda i: members[i].admit(), 2)
        assert changes[0] == changes[1]
        return bool(changes[0])

    def admit_until_changed() -> None:
        end = time.monotonic() + 30
        while not admit():
            assert time.monotonic() < end
            time.sleep(0.01)

    def join() -> None:
        last = Sleepy(handles=[members[1].handle], min_ranks=3, timeout=TIMEOUT)
        sums.append(total(last, 4.0))

    sums: list[float] = []
    newcomer = threading.Thread(target=join, daemon=True)
    newcomer.start()
    assert has_asked.wait(30)
    admit_until_changed()  # the members have waited for it
    assert {each.size for each in members} == {2}
    assert [admit() for _ in range(3)] == [False] * 3
    on_all(lambda i: members[i].recover(), 2)
    assert [admit() for _ in range(3)] == [False] * 3
    wakes.set()
    admit_until_changed()
    assert on_all(lambda i: total(members[i], float(i + 1)), 2) == [7.0] * 2
    newcomer.join(60)
    assert sums == [7.0]


def test_calls_of_a_closed_group_raise() -> None:
    members = mycoll.ElasticGroup(timeout=timedelta(seconds=30))
    assert members.size == 1
    members.close()
    members.close()
    for call in (members.admit, members.recover, lambda: members.group):
        with pytest.raises(dist.DistBackendError, match="closed"):
            call()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="min_ranks"):
        mycoll.ElasticGroup(min_ranks=0)
    with pytest.raises(ValueError, match="ranks at least min_ranks"):
        mycoll.ElasticGroup(min_ranks=3, ranks=2)
    with pytest.raises(mycoll.ArgumentError, match="not a handle of this version"):
        mycoll.ElasticGroup(handles=["gloo:0"])
