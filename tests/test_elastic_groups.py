"""Groups whose ranks change: mycoll.Endpoint, and torch's reconfigure (since 2.14)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
import urllib.request
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mycoll
import pytest
import torch
import torch.distributed as dist
from mycoll import black_box
from worlds.crew import Crew
from worlds.threads import on_all
from worlds.worker import Ctx

pytestmark = pytest.mark.usefixtures("mycoll_only")

HAS_RECONFIGURE = hasattr(dist.ProcessGroup, "reconfigure")
needs_reconfigure = pytest.mark.skipif(not HAS_RECONFIGURE, reason="torch has it since 2.14")
PATIENCE = timedelta(seconds=30)


def total(group: dist.ProcessGroup, value: float) -> float:
    x = torch.full((1000,), value)
    group.allreduce([x]).wait()
    assert bool((x == x[0]).all())
    return float(x[0])


# --- mycoll.Endpoint ------------------------------------------------------------------------------


def form_all(endpoints: dict[int, Any], members: list[int], uuid: int) -> list[dist.ProcessGroup]:
    handles = [endpoints[member].handle for member in members]
    groups: list[dist.ProcessGroup] = on_all(
        lambda rank: endpoints[members[rank]].form(uuid, handles), len(members)
    )
    return groups


def test_groups_shrink_and_grow() -> None:
    endpoints = {i: mycoll.Endpoint(timeout=PATIENCE) for i in range(4)}
    for uuid, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0, 3], [3])):
        groups = form_all(endpoints, members, uuid)
        assert [group.rank() for group in groups] == list(range(len(members)))
        sums = on_all(
            lambda rank, groups=groups, members=members: total(groups[rank], members[rank]),
            len(members),
        )
        assert sums == [float(sum(members))] * len(members)
        for group in groups:
            group.abort()


def test_wrong_calls_are_refused() -> None:
    first, second = (mycoll.Endpoint(timeout=PATIENCE) for _ in range(2))
    group = first.form(1, [first.handle])
    with pytest.raises(mycoll.ArgumentError, match="the number 1 was already used"):
        first.form(1, [first.handle])
    with pytest.raises(mycoll.ArgumentError, match="own handle is not among"):
        first.form(2, [second.handle])
    with pytest.raises(mycoll.ArgumentError, match="the handle of rank 1 is not one of mycoll's"):
        first.form(2, [first.handle, "gloo:0"])
    with pytest.raises(dist.DistBackendError, match="missing: 1"):
        first.form(2, [first.handle, second.handle], timeout=timedelta(seconds=1))
    assert total(group, 3.0) == 3.0


def test_a_timeout_of_zero_is_not_the_default() -> None:
    first, second = (mycoll.Endpoint(timeout=PATIENCE) for _ in range(2))
    with pytest.raises(dist.DistBackendError, match="timeout after 0ms"):
        first.form(1, [first.handle, second.handle], timeout=timedelta(0))


@pytest.mark.skipif(HAS_RECONFIGURE, reason="this torch has reconfigure")
def test_an_older_torch_has_no_reconfigure() -> None:
    with pytest.raises(RuntimeError, match=r"2\.14 does; use mycoll\.Endpoint"):
        mycoll.process_group(dist.HashStore(), 0, 1, enable_reconfigure=True)


def test_sums_have_the_bits_of_a_new_group() -> None:
    """A group has the same sums as a new group of the same ranks, whatever groups preceded it."""
    endpoints = {i: mycoll.Endpoint(timeout=PATIENCE) for i in range(4)}
    form_all(endpoints, [0, 1, 2, 3], 0)
    changed = form_all(endpoints, [3, 0, 2], 1)
    store = dist.HashStore()
    fresh = on_all(lambda rank: mycoll.process_group(store, rank, 3, timeout=PATIENCE), 3)
    inputs = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))

    def summed(group: dist.ProcessGroup) -> torch.Tensor:
        x = inputs[group.rank()].clone()
        group.allreduce([x]).wait()
        return x

    sums = [on_all(lambda i, groups=groups: summed(groups[i]), 3) for groups in (changed, fresh)]
    assert all(torch.equal(x, sums[0][0]) for x in (*sums[0], *sums[1]))


def test_a_forked_child_is_refused() -> None:
    """It may drop its parent's endpoint, and make its own."""
    kept = [mycoll.Endpoint(timeout=PATIENCE)]
    native, handle = kept[0]._native, kept[0].handle
    calls = {
        "form": lambda: kept[0].form(1, [handle]),
        "send": lambda: native.send(handle, "text"),
        "receive": lambda: native.receive(timedelta(seconds=5)),
        "watch": lambda: native.watch([handle]),
        "loss_of": lambda: native.loss_of(handle),
    }
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 0
        try:
            for name, call in calls.items():
                with pytest.raises(dist.DistBackendError, match=f"{name}: this process was forked"):
                    call()
            calls.clear()
            del native, call
            kept.clear()
            own = mycoll.Endpoint(timeout=PATIENCE)
            code = int(total(own.form(1, [own.handle]), 5.0))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert total(kept[0].form(1, [handle]), 3.0) == 3.0


@needs_reconfigure
def test_a_forked_child_may_drop_a_group_whose_ranks_change() -> None:
    groups = elastic(1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        groups.clear()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reconfigure_all(groups, [0], 1)
    assert total(groups[0], 3.0) == 3.0


# --- processes that are killed --------------------------------------------------------------------


def follow(pipe: Connection) -> None:
    """A process: forms the groups that it receives, and sums until a rank is lost."""
    torch.set_num_threads(1)
    endpoint = mycoll.Endpoint(timeout=PATIENCE)
    pipe.send(endpoint.handle)
    group = None
    while (command := pipe.recv()) is not None:
        if group is not None:
            group.abort()
        uuid, handles, value = command
        group = endpoint.form(uuid, handles)
        pipe.send((group.rank(), total(group, value)))
        try:
            while True:
                total(group, value)
        except dist.DistBackendError:
            pipe.send("lost")


def test_survivors_of_kills_form_groups_with_new_processes() -> None:
    """There is no store, and any rank may be killed."""
    seed = int(os.environ.get("SEED", str(random.randrange(1 << 30))))
    print("seed", seed)
    chance = random.Random(seed)
    handles: dict[int, str] = {}
    with Crew() as crew:
        for uuid in range(7):
            while len(crew.living) < (4 if uuid % 2 == 0 else 2):
                number = crew.start(follow)
                handles[number] = crew.receive(number)
            members = chance.sample(crew.living, len(crew.living))
            expected = float(sum(members) + len(members))
            for number in members:
                crew.send(number, (uuid, [handles[each] for each in members], number + 1.0))
            for rank, number in enumerate(members):
                assert crew.receive(number) == (rank, expected)
            # Kill rank 0, another rank, or two at a time.
            count = 2 if uuid % 3 == 2 and len(members) > 2 else 1
            crew.kill([members[0]] if uuid % 3 == 0 else chance.sample(members, count))
            for number in crew.living:
                assert crew.receive(number) == "lost"
        for number in crew.living:
            crew.send(number, None)
            crew.join(number)


def form_once(pipe: Connection) -> None:
    endpoint = mycoll.Endpoint()
    pipe.send(endpoint.handle)
    try:
        endpoint.form(1, pipe.recv(), timeout=timedelta(seconds=2))
        pipe.send("formed")
    except (dist.DistBackendError, mycoll.ArgumentError) as error:
        pipe.send(str(error))


@pytest.mark.parametrize("stranger", [None, 0, 2])
def test_a_process_with_another_secret_is_in_no_group(tmp_path: Path, stranger: int | None) -> None:
    secrets = [tmp_path / name for name in ("right", "wrong")]
    for path in secrets:
        path.write_text(path.name * 8)
    with Crew() as crew:
        for number in range(3):
            crew.start(form_once, MYCOLL_SECRET_FILE=str(secrets[number == stranger]))
        handles = [crew.receive(number) for number in crew.living]
        for number in crew.living:
            crew.send(number, handles)
        found = [crew.receive(number) for number in crew.living]
        if stranger is None:
            assert found == ["formed"] * 3
        else:  # without a common secret, a rank may detect only that the other one has ended
            assert "formed" not in found
            assert any("could not prove that it is a member" in each for each in found), found


# --- torch's interface ----------------------------------------------------------------------------


def options(uuid: int, handles: Any, **more: Any) -> Any:
    made = dist.distributed_c10d.ReconfigureOptions()
    made.uuid = uuid
    made.handles = handles
    for name, value in more.items():
        setattr(made, name, value)
    return made


def elastic(count: int) -> list[dist.ProcessGroup]:
    store = dist.HashStore()
    return [
        mycoll.process_group(store, rank, count, enable_reconfigure=True, timeout=PATIENCE)
        for rank in range(count)
    ]


def reconfigure_all(groups: list[Any], members: list[int], uuid: int, kind: Any = list) -> None:
    handles = kind(groups[member].get_reconfigure_handle() for member in members)
    on_all(
        lambda rank: groups[members[rank]].reconfigure(options(uuid, handles)).wait(), len(members)
    )


@needs_reconfigure
def test_the_same_group_gets_other_ranks() -> None:
    groups = elastic(3)
    assert all(group.supports_reconfigure for group in groups)
    with pytest.raises(mycoll.ArgumentError, match=r"has no ranks yet: call reconfigure\(\) first"):
        groups[0].barrier().wait()
    for uuid, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0])):
        reconfigure_all(groups, members, uuid)
        sums = on_all(lambda rank, m=members: total(groups[m[rank]], m[rank]), len(members))
        assert sums == [float(sum(members))] * len(members)
        assert [groups[member].rank() for member in members] == list(range(len(members)))
        assert {groups[member].size() for member in members} == {len(members)}
    with pytest.raises(mycoll.ArgumentError, match="already used"):
        groups[0].reconfigure(options(1, [groups[0].get_reconfigure_handle()]))


@needs_reconfigure
def test_a_set_of_handles_gives_each_process_one_rank() -> None:
    groups = elastic(3)
    reconfigure_all(groups, [2, 0, 1], 1, set)
    assert sorted(group.rank() for group in groups) == [0, 1, 2]
    assert on_all(lambda i: total(groups[i], i), 3) == [3.0] * 3


@needs_reconfigure
def test_a_rank_that_is_left_out_gets_an_error() -> None:
    groups = elastic(3)
    reconfigure_all(groups, [0, 1, 2], 1)
    reconfigure_all(groups, [0, 1], 2)
    with pytest.raises(dist.DistBackendError, match=r"reconfigured \(2\) without this rank"):
        groups[2].barrier().wait()
    reconfigure_all(groups, [2, 1, 0], 3)
    assert on_all(lambda i: total(groups[i], i), 3) == [3.0] * 3


@needs_reconfigure
def test_a_reconfigure_that_times_out_leaves_the_group_as_it_was() -> None:
    groups = elastic(3)
    reconfigure_all(groups, [0, 1], 1)
    handles = [group.get_reconfigure_handle() for group in groups]
    late = options(2, handles, timeout=timedelta(seconds=1))

    def time_out(rank: int) -> None:
        with pytest.raises(dist.DistBackendError, match="missing: 2"):
            groups[rank].reconfigure(late)

    on_all(time_out, 2)
    assert on_all(lambda i: total(groups[i], 1.0), 2) == [2.0] * 2
    reconfigure_all(groups, [0, 1, 2], 3)
    assert on_all(lambda i: total(groups[i], 1.0), 3) == [3.0] * 3


@needs_reconfigure
def test_the_ranks_of_a_generation_know_it_by_one_name() -> None:
    """split_group counts by it: newcomers have not split the generations before."""
    groups = elastic(3)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    reconfigure_all(groups, [0, 1], 1)
    (first,) = {each._name for each in backends[:2]}
    reconfigure_all(groups, [2, 1, 0], 2)
    (second,) = {each._name for each in backends}
    assert first != second


@needs_reconfigure
def test_abort_ends_one_generation() -> None:
    groups = elastic(2)
    reconfigure_all(groups, [0, 1], 1)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert [str(each.get_error()) for each in backends] == ["ErrorType.SUCCESS"] * 2
    groups[0].abort()
    with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
        groups[1].barrier().wait()
    assert "SUCCESS" not in {str(each.get_error()) for each in backends}
    reconfigure_all(groups, [1, 0], 2)
    assert [str(each.get_error()) for each in backends] == ["ErrorType.SUCCESS"] * 2
    assert on_all(lambda i: total(groups[i], 1.0), 2) == [2.0] * 2


@needs_reconfigure
def test_the_timeout_and_subgroups_follow_the_generation() -> None:
    groups = elastic(3)
    groups[0].set_timeout(timedelta(seconds=7))
    for uuid, members in enumerate(([0, 1, 2], [1, 0])):
        reconfigure_all(groups, members, uuid)
        assert groups[0]._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        # A subgroup of this generation.
        children = on_all(
            lambda rank, m=members: groups[m[rank]].split_group([0, 1], group_name="part"),
            len(members),
        )
        parts = [child for child in children if child is not None]
        assert on_all(lambda i, parts=parts: total(parts[i], 1.0), 2) == [2.0] * 2


@needs_reconfigure
def test_subgroups_are_counted_anew_in_each_generation() -> None:
    """The ranks of a generation may have made different numbers of subgroups in earlier ones."""
    groups = elastic(3)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    reconfigure_all(groups, [0, 1, 2], 1)
    for name in ("first", "second"):
        on_all(lambda i, name=name: groups[i].split_group([0, 1], group_name=name), 3)
    on_all(lambda i: backends[i].shrink([2], 0, None), 2)
    reconfigure_all(groups, [0, 2], 2)
    parts = on_all(lambda i: groups[2 * i].split_group([0, 1], group_name="third"), 2)
    assert on_all(lambda i: total(parts[i], 1.0), 2) == [2.0] * 2
    shrunk = on_all(lambda i: backends[2 * i].shrink([], 0, None), 2)
    assert [each.size() for each in shrunk] == [2, 2]


@needs_reconfigure
def test_calls_of_other_threads_belong_to_one_generation() -> None:
    """The number of ranks changes while threads pass lists with a tensor for each rank."""
    groups = elastic(3)
    reconfigure_all(groups, [0, 1, 2], 1)
    is_over = threading.Event()
    errors: list[Exception] = []

    def gather(group: Any, ranks: int) -> None:
        while not is_over.is_set():
            options = dist.distributed_c10d.AllgatherOptions()
            options.asyncOp = False
            options.timeout = timedelta(milliseconds=50)
            try:
                outputs = [torch.zeros(64) for _ in range(ranks)]
                group._get_backend(torch.device("cpu")).allgather(
                    [outputs], [torch.ones(64)], options
                )
            except (dist.DistBackendError, mycoll.ArgumentError):
                pass
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=gather, args=(groups[i], 2 + i)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        for uuid in range(2, 12):
            reconfigure_all(groups, [0, 1, 2][: 2 + uuid % 2], uuid)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors
    reconfigure_all(groups, [0, 1, 2], 20)
    assert on_all(lambda i: total(groups[i], 1.0), 3) == [3.0] * 3


@needs_reconfigure
def test_a_merged_group_has_its_ranks() -> None:
    """A group that was merged from groups whose ranks change has fixed ranks."""
    groups = elastic(2)
    store = dist.HashStore()
    merged = on_all(lambda i: groups[i].merge_remote_group(store, 2, PATIENCE, "merged"), 2)
    assert on_all(lambda i: total(merged[i], 1.0), 2) == [2.0] * 2


@needs_reconfigure
def test_messages_and_windows_end_with_their_generation() -> None:
    groups = elastic(3)
    reconfigure_all(groups, [0, 1, 2], 1)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    memories = [mycoll.zeros(4) for _ in groups]
    windows = on_all(lambda i: backends[i].new_window(memories[i]), 3)
    on_all(lambda i: windows[i].put(torch.full((1,), 1.0 + i), (i + 1) % 3, i, False), 3)
    groups[0].send([torch.ones(3)], 1, 7)  # it is never received
    reconfigure_all(groups, [0, 1], 2)
    assert [memory.tolist() for memory in memories[:2]] == [[0, 0, 3, 0], [1, 0, 0, 0]]
    for window in windows[:2]:
        with pytest.raises(dist.DistBackendError, match=r"reconfigured|destroyed"):
            window.put(torch.ones(1), 0, 0, False)
    found = torch.zeros(3)

    def exchange(rank: int) -> None:
        if rank == 0:
            groups[0].send([torch.full((3,), 2.0)], 1, 7).wait()
        else:
            groups[1].recv([found], 0, 7).wait()
        window = backends[rank].new_window(memories[rank])
        window.put(torch.full((1,), 5.0), 1 - rank, 3, False)
        window.signal(1 - rank, False)
        window.wait_signal(1 - rank, False)

    on_all(exchange, 2)
    assert found.tolist() == [2.0] * 3
    assert [memory.tolist()[3] for memory in memories[:2]] == [5.0] * 2


@needs_reconfigure
def test_status_shows_the_generation() -> None:
    groups = elastic(2)
    for uuid, members in ((17, [0, 1]), (18, [1, 0])):
        reconfigure_all(groups, members, uuid)
        on_all(lambda i: total(groups[i], 1.0), 2)
        process = black_box.read(os.getpid())
        assert process is not None
        shown = [each for each in process.groups if each.name == f"group@{uuid}"]
        assert sorted(each.rank for each in shown) == [0, 1]
        assert all(each.ranks == 2 and each.collectives() for each in shown)


@needs_reconfigure
def test_abort_hooks_are_called_for_a_failure() -> None:
    groups = elastic(2)
    called = [threading.Event() for _ in range(3)]
    for i, group in enumerate(groups):
        group.register_abort_hook(7, called[i].set)
    groups[1].register_abort_hook(8, called[2].set)
    groups[1].unregister_abort_hook(8)
    reconfigure_all(groups, [0, 1], 1)
    groups[0].abort()  # this is not a failure
    reconfigure_all(groups, [0, 1], 2)
    assert on_all(lambda i: total(groups[i], 1.0), 2) == [2.0] * 2
    time.sleep(0.1)
    assert not any(each.is_set() for each in called)

    def differ(rank: int) -> None:
        with pytest.raises(dist.DistBackendError, match="MISMATCH"):
            groups[rank].allreduce([torch.ones(1 + rank)]).wait()

    on_all(differ, 2)
    assert called[0].wait(10)
    assert called[1].wait(10)
    assert not called[2].is_set()


def becomes_unhealthy(ctx: Ctx) -> None:
    from torch._C._distributed_c10d import _WorkerServer

    server = _WorkerServer("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/handler/c10d_health_check"

    def health() -> dict[str, Any]:
        request = urllib.request.Request(url, data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    dist.all_reduce(torch.ones(3))
    ctx.equal(health(), {"healthy": True, "unhealthy_backends": []})
    with ctx.raises(RuntimeError, "MISMATCH"):
        dist.all_reduce(torch.ones(1 + ctx.rank))
    end = time.monotonic() + 10
    while health()["healthy"] and time.monotonic() < end:
        time.sleep(0.01)
    ctx.equal(health(), {"healthy": False, "unhealthy_backends": ["mycoll"]})
    server.shutdown()


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch has it since 2.15")
def test_the_debug_server_reports_a_failure(fresh: Any) -> None:
    fresh(2).run(becomes_unhealthy)


@needs_reconfigure
def test_an_ephemeral_timeout_ends_with_the_first_operation_after_it() -> None:
    def tenths_waited(group: dist.ProcessGroup) -> int:
        """The time that an operation without a counterpart waited."""
        with pytest.raises(dist.DistBackendError) as error:
            group.barrier().wait()
        found = re.search(r"Timed out waiting (\d+)ms", str(error.value))
        assert found is not None, error.value
        return round(int(found[1]) / 100)

    def pair() -> list[Any]:
        groups = elastic(2)
        reconfigure_all(groups, [0, 1], 1)
        groups[0].set_timeout(timedelta(seconds=0.5))
        return groups

    groups = pair()
    for extension in (0.5, 1):
        groups[0]._add_ephemeral_timeout(timedelta(seconds=extension))
    assert tenths_waited(groups[0]) == 20
    # It also applies to operations that are called before the first one ends.
    groups = pair()
    groups[0]._add_ephemeral_timeout(timedelta(seconds=30))
    first = groups[0].recv([torch.empty(3)], 1, 0)
    assert on_all(lambda i: total(groups[i], 1.0), 2) == [2.0] * 2
    second = groups[0].recv([torch.empty(3)], 1, 1)
    time.sleep(1)
    for tag, work in enumerate((first, second)):
        groups[1].send([torch.ones(3)], 0, tag).wait()
        work.wait()
    assert tenths_waited(groups[0]) == 5
    # A synchronous operation also ends it, and so does one whose work was dropped.
    for call in (lambda group: group.allreduce([torch.ones(3)]).wait(),
                 lambda group: group.allreduce([torch.ones(3)])):  # fmt: skip
        groups = pair()
        groups[0]._add_ephemeral_timeout(timedelta(seconds=30))
        on_all(lambda i, groups=groups, call=call: call(groups[i]), 2)
        on_all(lambda i, groups=groups: total(groups[i], 1.0), 2)
        assert tenths_waited(groups[0]) == 5


def reconfigure_on_command(pipe: Connection) -> None:
    """A process: sends the results of reconfigure() and of an operation after it."""
    torch.set_num_threads(1)
    (group,) = elastic(1)
    pipe.send(group.get_reconfigure_handle())
    while (command := pipe.recv()) is not None:
        for action in (lambda c=command: group.reconfigure(options(*c)).wait() and "formed",
                       lambda: total(group, 1.0)):  # fmt: skip
            try:
                pipe.send(action())
            except dist.DistBackendError as error:
                pipe.send(str(error))


@needs_reconfigure
@pytest.mark.parametrize("role", ["newcomer", "member"])
def test_a_rank_that_dies_during_reconfigure(role: str) -> None:
    """A rank dies at any step. If the new group was not formed, the former group remains usable,
    provided that the rank was not in it; else each operation raises. The survivors can form a
    group without the rank."""
    seed = int(os.environ.get("SEED", str(random.randrange(1 << 30))))
    print("seed", seed)
    chance = random.Random(seed)
    with Crew() as crew:
        survivors = [crew.start(reconfigure_on_command) for _ in range(2)]
        handles = {number: crew.receive(number) for number in survivors}
        uuid = 0

        def reconfigure(members: list[int]) -> None:
            nonlocal uuid
            uuid += 1
            for number in set(members) & set(crew.living):
                crew.send(number, (uuid, [handles[each] for each in members]))

        def outcomes(members: list[int]) -> list[Any]:
            return [(crew.receive(number), crew.receive(number)) for number in members]

        for delay in (None, 0.0, *(chance.uniform(0, 0.02) for _ in range(6))):
            victim = crew.start(reconfigure_on_command)
            handles[victim] = crew.receive(victim)
            everyone = [*survivors, victim]
            chance.shuffle(everyone)
            if role == "member":
                reconfigure(everyone)
                assert outcomes(everyone) == [("formed", 3.0)] * 3
            else:
                reconfigure(survivors)
                assert outcomes(survivors) == [("formed", 2.0)] * 2
            if delay is None:  # before reconfigure()
                crew.kill([victim])
            reconfigure(everyone)
            if delay is not None:
                time.sleep(delay)
                crew.kill([victim])
            found = outcomes(survivors)
            named = re.compile(rf"(rank|missing:) {everyone.index(victim)}\b|without this rank")
            for formed, result in found:
                assert formed == "formed" or named.search(formed), formed
                had_victim = formed == "formed" or role == "member"
                assert result == (3.0 if had_victim else 2.0) or named.search(result), result
            if role == "newcomer" and not any(formed == "formed" for formed, _ in found):
                assert [result for _, result in found] == [2.0] * 2
            reconfigure(survivors)
            assert outcomes(survivors) == [("formed", 2.0)] * 2
