"""Two simulated hosts: network namespaces connected by a veth pair, with two ranks in each."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mycoll
import pytest
import torch
import torch.distributed as dist
from faults.harness import SUITE_PATIENCE, Seen, answers, attempt, kill_one
from jobs.walk import walk
from worlds.crew import Crew
from worlds.elastic_walk import ElasticCrew
from worlds.hosts import Capture, enter, ip, join, namespaces
from worlds.smoke import smoke
from worlds.worker import Ctx

SUITE_TIMEOUT = timedelta(seconds=40)
PORT = 29_731  # no other process uses these namespaces
ADDRESSES = {"ipv4": ("10.213.0.1", "10.213.0.2"), "ipv6": ("fd21:3::1", "fd21:3::2")}


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, ...]]:
    with namespaces("a", "b") as names:
        join(names, "veth0")
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES['ipv4'][i]}/24", "dev", "veth0")
            ip("-n", name, "addr", "add", f"{ADDRESSES['ipv6'][i]}/64", "dev", "veth0", "nodad")
            ip("-n", name, "link", "set", "veth0", "up")
        yield names


def sockets_inside_a_host(address: str) -> int:
    """Established TCP connections of an address to itself, without those to the store."""
    found = 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
            local, remote, state = line.split()[1:4]
            (host, port), (peer, peer_port) = local.split(":"), remote.split(":")
            established = state == "01"
            store = PORT in (int(port, 16), int(peer_port, 16))
            found += established and host == peer and not store
    return found


def on_two_hosts(ctx: Ctx, names: tuple[str, str], family: str, interface: str) -> int:
    host = ctx.rank // 2
    enter(names[host])
    if interface:
        os.environ["MYCOLL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = interface
    elif ctx.gloo:
        os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    master = ADDRESSES[family][0]
    url = f"tcp://[{master}]:{PORT}" if ":" in master else f"tcp://{master}:{PORT}"
    dist.init_process_group(
        ctx.backend,
        init_method=url,
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=SUITE_TIMEOUT,
    )
    smoke(ctx.rank, ctx.size)
    one_host = [dist.new_group([0, 1]), dist.new_group([2, 3])][host]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][ctx.rank % 2]
    for group, members in (
        (one_host, [2 * host, 2 * host + 1]),
        (across, [ctx.rank % 2, ctx.rank % 2 + 2]),
    ):
        for numel in (10, 500_000):
            x = torch.full((numel,), float(ctx.rank))
            dist.all_reduce(x, group=group)
            ctx.equal(float(x[-1]), float(sum(members)))
    inputs = ctx.inputs(torch.float32, 70_001)
    x = inputs[ctx.rank].clone()
    dist.all_reduce(x)
    want = (inputs[0] + inputs[1]) + (inputs[2] + inputs[3])
    ctx.same(x, want, "the bits of a mixed group")
    inside = sockets_inside_a_host(ADDRESSES[family][host])
    dist.destroy_process_group()
    return inside


@pytest.mark.parametrize("interface", ["", "veth0", "^lo"])
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_two_hosts(fresh, backend, hosts, family, interface):
    inside = fresh(4, init=False).run(on_two_hosts, hosts, family, interface)
    if backend == "mycoll":
        assert max(inside) == 0, "ranks of one host use TCP, not shared memory"


@pytest.mark.parametrize("transport_between", ["tcp"])
def test_two_hosts_forced_to_tcp(fresh, backend, hosts, transport_between):
    fresh(4, transport_between, init=False).run(on_two_hosts, hosts, "ipv4", "")


def wait_for_store() -> None:
    """A client of TCPStore that finds no server tries again after seconds. Rank 0 may have failed
    and left by then, and the client reports only that the store was closed."""
    end = time.monotonic() + SUITE_PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection((ADDRESSES["ipv4"][0], PORT), 1).close()
            return
        time.sleep(0.02)


def begin(ctx: Ctx, names: tuple[str, str]) -> None:
    """Two ranks on each of the two hosts."""
    enter(names[ctx.rank // 2])
    if ctx.rank != 0:
        wait_for_store()
    dist.init_process_group(
        ctx.backend,
        init_method=f"tcp://{ADDRESSES['ipv4'][0]}:{PORT}",
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=SUITE_TIMEOUT,
    )


def walks(ctx: Ctx, names: tuple[str, str], seed: int) -> None:
    begin(ctx, names)
    walk(ctx, seed)
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", [5, 6])
def test_random_walk_on_two_hosts(fresh, hosts, seed):
    fresh(4, init=False).run(walks, hosts, seed, deadline=90)


def with_windows(ctx: Ctx, names: tuple[str, str], kind: str) -> list[str]:
    begin(ctx, names)
    numel = 1_500_000
    make = mycoll.zeros if kind == "shared" else torch.zeros
    memory = make(ctx.size, numel)
    window = mycoll.new_window(memory)
    for to in range(ctx.size):
        window.put(torch.full((numel,), 1.0 + ctx.rank), to, ctx.rank * numel, True)
        window.signal(to, True)
    for source in range(ctx.size):
        window.wait_signal(source, False)
        ctx.equal(memory[source].unique().tolist(), [1.0 + source])
    access = [window.get_attr(rank).access_type.name for rank in range(ctx.size)]
    far = (ctx.rank + 2) % ctx.size
    with pytest.raises(NotImplementedError, match=f"rank {far} .*is not on this host"):
        window.map_remote_tensor(far)
    window.tensor_deregister()
    dist.destroy_process_group()
    return access


@pytest.mark.parametrize("kind", ["shared", "ordinary"])
def test_windows_on_two_hosts(fresh, mycoll_only, hosts, kind):
    """Shared tensors are mapped inside a host; everything else is sent by messages."""
    for rank, access in enumerate(fresh(4, init=False).run(with_windows, hosts, kind)):
        near = (2 * (rank // 2), 2 * (rank // 2) + 1) if kind == "shared" else (rank,)
        assert access == ["UNIFIED" if other in near else "SEPARATE" for other in range(4)]


def encryption(folder: Path, is_on: bool) -> dict[str, str]:
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32))
    return {"MYCOLL_SECRET_FILE": str(secret), "MYCOLL_ENCRYPT": str(int(is_on))}


def dies_on_a_host(ctx: Ctx, names: tuple[str, str], victim: int, numel: int) -> Seen:
    here = ctx.store("before the kill")  # its connection works after this thread enters a host
    enter(names[ctx.rank // 3])
    url = f"tcp://{ADDRESSES['ipv4'][0]}:{PORT}"
    dist.init_process_group(
        ctx.backend, init_method=url, rank=ctx.rank, world_size=ctx.size, timeout=SUITE_TIMEOUT
    )
    x = torch.ones(numel)
    for _ in range(3):
        dist.all_reduce(x)
    kill_one(ctx, victim, here=here)

    def repeat() -> None:
        while True:
            dist.all_reduce(x)

    return attempt(repeat)


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("numel", [10, 3_000_000])
@pytest.mark.parametrize("victim", [3, 4])
def test_a_rank_dies_on_one_of_two_hosts(
    fresh, mycoll_only, hosts, tmp_path, victim, numel, encrypt
):
    """Ranks of its host wait for it in shared memory, the others for messages. All detect it."""
    world = fresh(6, init=False, env=encryption(tmp_path, encrypt))
    world.start(dies_on_a_host, hosts, victim, numel)
    for seen in answers(world, (victim,)).values():
        assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
        assert f"rank {victim} (" in seen.text and "has ended (killed" in seen.text, seen.text
        assert seen.seconds < SUITE_PATIENCE / 2, seen


def is_cut_off(ctx: Ctx, names: tuple[str, str], seconds: int) -> Seen:
    os.environ.update(MYCOLL_NETWORK_SECONDS=str(seconds), MYCOLL_SOCKET_IFNAME="veth0")
    begin(ctx, names)
    x = torch.ones(1000)
    dist.barrier()
    if ctx.rank == 0:
        ip("-n", names[1], "link", "set", "veth0", "down")

    def go_on() -> None:
        while True:
            dist.all_reduce(x)

    return attempt(go_on)


@pytest.mark.parametrize("seconds", [1, 4])
def test_a_network_that_fails_is_reported_as_such(fresh, mycoll_only, hosts, seconds):
    """Later than three seconds, rank 0's kernel reports that there is no route, not a timeout."""
    world = fresh(4, init=False)
    try:
        world.start(is_cut_off, hosts, seconds)
        for seen in answers(world).values():
            assert isinstance(seen, Seen) and seen.kind == "DistBackendError", seen
            assert "no longer responds: its host or the network has failed" in seen.text, seen.text
            assert seen.seconds < SUITE_PATIENCE / 2, seen
    finally:
        ip("-n", hosts[1], "link", "set", "veth0", "up")


def has_another_secret(ctx: Ctx, names: tuple[str, str], odd: int, paths: list[str]) -> Seen:
    os.environ["MYCOLL_ENCRYPT"] = "1"
    os.environ["MYCOLL_SECRET_FILE"] = paths[ctx.rank == odd]
    return attempt(lambda: begin(ctx, names))


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_another_secret_on_one_of_two_hosts(fresh, mycoll_only, hosts, tmp_path, odd):
    """With encryption, all ranks of both hosts report it."""
    paths = [tmp_path / "right", tmp_path / "wrong"]
    for path in paths:
        path.write_text(path.name * 8)
    world = fresh(4, init=False)
    for seen in world.run(has_another_secret, hosts, odd, [str(path) for path in paths]):
        assert "must be the same everywhere" in seen.text, seen
        assert seen.seconds < SUITE_PATIENCE, seen


PATTERN = bytes(range(97, 123))


def sends_a_pattern(ctx: Ctx, names: tuple[str, str]) -> None:
    enter(names[ctx.rank])
    os.environ["MYCOLL_SOCKET_IFNAME"] = "veth0"
    url = f"tcp://{ADDRESSES['ipv4'][0]}:{PORT}"
    dist.init_process_group(
        ctx.backend, init_method=url, rank=ctx.rank, world_size=ctx.size, timeout=SUITE_TIMEOUT
    )
    sent = PATTERN * ((1 << 20) // len(PATTERN))
    x = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(ctx.device)
    dist.broadcast(x if ctx.rank == 0 else x.zero_(), 0)
    if ctx.rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x.zero_(), 0)
    ctx.equal(bytes(x.cpu().numpy()), sent)
    dist.destroy_process_group()


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_capture_shows_a_tensor_only_without_encryption(
    fresh, mycoll_only, hosts, tmp_path, encrypt
):
    capture = Capture(hosts[1], "veth0")
    try:
        fresh(2, init=False, env=encryption(tmp_path, encrypt)).run(sends_a_pattern, hosts)
    finally:
        seen = capture.end()
    assert len(seen) > 1 << 20
    pieces = [(PATTERN * 2)[i : i + 8] for i in range(len(PATTERN))]
    found = [seen.count(each) for each in pieces]
    if encrypt:
        assert not any(found), found
    else:  # some are split between packets
        assert min(found) > 0.9 * (1 << 20) / len(PATTERN), found


def test_tensors_of_a_device_are_encrypted_between_hosts(
    fresh_device_world, mycoll_only, hosts, tmp_path
):
    """NCCL would send them unencrypted."""
    world = fresh_device_world(2, "nccl-auto", init=False, env=encryption(tmp_path, True))
    capture = Capture(hosts[1], "veth0")
    try:
        world.run(sends_a_pattern, hosts)
    finally:
        seen = capture.end()
    assert len(seen) > 2 << 20  # the broadcast and the message
    assert not any(seen.count((PATTERN * 2)[i : i + 8]) for i in range(len(PATTERN)))
    warned = [member.log_tail().count("NCCL does not encrypt") for member in world.members]
    assert warned == [1, 0], "one warning"


def no_shared_memory(ctx: Ctx, names: tuple[str, str]) -> str:
    enter(names[ctx.rank])
    try:
        dist.init_process_group(
            ctx.backend,
            init_method=f"tcp://{ADDRESSES['ipv4'][0]}:{PORT}",
            rank=ctx.rank,
            world_size=ctx.size,
            timeout=timedelta(seconds=10),
        )
        dist.all_reduce(torch.ones(5))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_shm_between_hosts_is_refused(fresh, backend, hosts):
    """MYCOLL_TRANSPORT=shm without shared memory is an error, not a hang, and TCP is not used."""
    for text in fresh(2, "shm", init=False).run(no_shared_memory, hosts):
        assert "shm" in text or "shared memory" in text, text


@contextlib.contextmanager
def cut_off(
    hosts: tuple[str, str], **options: Any
) -> Iterator[tuple[ElasticCrew, list[int], dict[str, str]]]:
    """Interrupts the network of an elastic group. Yields the group, which continued with three
    ranks on one host, the two ranks of the other host that failed, and the environment of that
    host."""
    crew = ElasticCrew(min_ranks=1, timeout=SUITE_TIMEOUT, **options)
    common = {"MYCOLL_NETWORK_SECONDS": "1", "MYCOLL_SOCKET_IFNAME": "veth0"}
    env = [{"NETWORK_NAMESPACE": name, **common} for name in hosts]
    try:
        with crew:
            crew.enlist(1, **env[0])
            crew.settle()
            crew.options["min_ranks"] = 3
            crew.enlist(2, through=[0], **env[0])
            crew.settle()
            others = crew.enlist(2, through=[1], **env[1])
            crew.settle()
            ip("-n", hosts[0], "link", "set", "veth0", "down")
            crew.settle(without=others)
            for each in others:  # either may lead, and either may fail first
                assert "at least 3 processes" in crew.error(each)
            ip("-n", hosts[0], "link", "set", "veth0", "up")
            yield crew, others, env[1]
    finally:
        ip("-n", hosts[0], "link", "set", "veth0", "up")


def test_an_elastic_group_continues_on_the_host_with_most_ranks(mycoll_only, hosts):
    """The network between the hosts fails. When it works again, new processes join."""
    with cut_off(hosts, recovery=8.0) as (crew, others, env):
        crew.kill(others)
        crew.enlist(2, through=[1], **env)
        crew.settle()


def test_ranks_that_were_cut_off_rejoin(mycoll_only, hosts):
    """The network between the hosts fails for longer than a recover() lasts. When it works again,
    the next recover() finds the others."""
    with cut_off(hosts, recovery=4.0, persists=True) as (crew, _, _):
        crew.settle()


def admits_on_command(pipe: Connection) -> None:
    """Replies with the size of its group, and the number of processes that wait to join."""
    enter(os.environ["NETWORK_NAMESPACE"])
    members = mycoll.ElasticGroup(timeout=SUITE_TIMEOUT)
    pipe.send(members.handle)
    while True:
        pipe.recv()
        members.admit(timedelta(seconds=4))
        pipe.send((members.size, len(members._newcomers)))


def joins_on_command(pipe: Connection) -> None:
    enter(os.environ["NETWORK_NAMESPACE"])
    other_use = mycoll.Endpoint(name="other")  # also uses this process's connections
    assert other_use.handle
    while True:
        handle, tries = pipe.recv()
        result: int | str = ""
        while tries > 0 and not isinstance(result, int):
            tries -= 1
            try:
                members = mycoll.ElasticGroup(
                    handles=[handle], min_ranks=2, timeout=timedelta(seconds=4)
                )
                result = members.size
            except dist.DistBackendError as error:
                result = str(error)
        pipe.send(result)


def test_a_process_that_was_cut_off_may_join_later(mycoll_only, hosts):
    """It is lost while it waits to be admitted. The group does not change meanwhile."""
    common = {"MYCOLL_NETWORK_SECONDS": "1", "MYCOLL_SOCKET_IFNAME": "veth0"}

    def admit() -> tuple[int, int]:
        crew.send(member, "admit")
        found: tuple[int, int] = crew.receive(member)
        return found

    def admit_until(wanted: tuple[int, int]) -> None:
        end = time.monotonic() + 60
        while (found := admit()) != wanted:
            assert time.monotonic() < end, found
            time.sleep(0.02)

    try:
        with Crew() as crew:
            member = crew.start(admits_on_command, NETWORK_NAMESPACE=hosts[0], **common)
            guest = crew.start(joins_on_command, NETWORK_NAMESPACE=hosts[1], **common)
            handle = crew.receive(member)
            crew.send(guest, (handle, 1))
            assert "at least 2" in crew.receive(guest)
            ip("-n", hosts[0], "link", "set", "veth0", "down")
            assert admit() == (1, 1)  # the process could not be reached
            admit_until((1, 0))
            ip("-n", hosts[0], "link", "set", "veth0", "up")
            # This may need several tries, because one side may still use the old connection.
            crew.send(guest, (handle, 20))
            admit_until((2, 0))
            assert crew.receive(guest) == 2
    finally:
        ip("-n", hosts[0], "link", "set", "veth0", "up")


def forms_on_command(pipe: Connection) -> None:
    """A process with an endpoint: forms the groups that it receives, and sums in each."""
    enter(os.environ["NETWORK_NAMESPACE"])
    torch.set_num_threads(1)
    endpoint = mycoll.Endpoint(timeout=SUITE_TIMEOUT)
    pipe.send(endpoint.handle)
    while True:
        number, handles = pipe.recv()
        began = time.monotonic()
        try:
            group = endpoint.form(number, handles, timeout=timedelta(seconds=4))
            x = torch.ones(100_000)
            group.allreduce([x]).wait()
            assert bool((x == x[0]).all())
            pipe.send((float(x[0]), time.monotonic() - began))
        except (dist.DistBackendError, dist.DistNetworkError) as error:
            pipe.send((str(error), time.monotonic() - began))


def test_the_network_fails_while_a_group_is_formed(mycoll_only, hosts):
    """Forming fails on all ranks, by the deadline. It succeeds when the network works again, maybe
    after several tries, because one side may still use the old connection."""
    common = {"MYCOLL_NETWORK_SECONDS": "1", "MYCOLL_SOCKET_IFNAME": "veth0"}
    with Crew() as crew:
        members = [
            crew.start(forms_on_command, NETWORK_NAMESPACE=name, **common)
            for name in hosts
            for _ in range(2)
        ]
        handles = [crew.receive(each) for each in members]

        def order(some: list[int], number: int) -> None:
            for each in some:
                crew.send(each, (number, handles))

        def results() -> list[float | str]:
            found = [crew.receive(each) for each in members]
            assert all(seconds < 10 for _, seconds in found), found
            return [result for result, _ in found]

        order(members, 1)
        assert results() == [4.0] * 4
        try:
            for number, early in ((2, 2), (3, 0)):  # early: the ranks that start before the failure
                order(members[:early], number)
                time.sleep(0.2)
                ip("-n", hosts[0], "link", "set", "veth0", "down")
                order(members[early:], number)
                for result in results():
                    assert isinstance(result, str), result
                    assert re.search(r"rank \d|missing: \d", result), result
                ip("-n", hosts[0], "link", "set", "veth0", "up")
                end = time.monotonic() + 20
                for again in range(10 * number, 10 * number + 10):
                    order(members, again)
                    if (found := results()) == [4.0] * 4:
                        break
                    assert time.monotonic() < end, found
        finally:
            ip("-n", hosts[0], "link", "set", "veth0", "up")


# ---- two network interfaces on each host ---------------------------------------------------------

RAILS = ("rail0", "rail1")


def rail_address(host: int, rail: int) -> str:
    return f"10.213.{10 + rail}.{host + 1}"


@pytest.fixture
def rails() -> Iterator[tuple[str, ...]]:
    """Two hosts that are connected by two networks."""
    with namespaces("ra", "rb") as names:
        for rail, link in enumerate(RAILS):
            join(names, link)
            for host, name in enumerate(names):
                ip("-n", name, "addr", "add", f"{rail_address(host, rail)}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        yield names


def sent_by(link: str) -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{link}:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError(f"there is no {link}")


LEFT_OUT = "one is not used, as it does not work"


def wait_for(happened: Callable[[], bool]) -> None:
    ended = time.monotonic() + 30
    while not happened() and time.monotonic() < ended:
        time.sleep(0.1)


def over_rails(
    ctx: Ctx, names: tuple[str, str], folder: str, broken: int | None
) -> tuple[list[int], str]:
    """The number of bytes that each interface has sent in a large all_reduce, and the log."""
    host = ctx.rank
    enter(names[host])
    log = Path(folder) / f"log{host}"
    os.environ["MYCOLL_LOG_FILE"] = str(log)
    os.environ["MYCOLL_LOG"] = "warn"
    os.environ["MYCOLL_SOCKET_IFNAME"] = "=rail0,rail1"
    if broken is not None and host == 1:
        # The interface has its address, and does not answer ARP requests of rank 0.
        ip("-n", names[1], "link", "set", RAILS[broken], "arp", "off")
    dist.init_process_group(
        ctx.backend,
        init_method=f"tcp://{rail_address(0, 0)}:{PORT}",
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=SUITE_TIMEOUT,
    )
    start = [sent_by(link) for link in RAILS]
    for _ in range(100):  # the first one connects, and further sockets are added later
        dist.all_reduce(torch.ones(1_000_000))
        used = [sent_by(link) - at > 200_000 for link, at in zip(RAILS, start, strict=True)]
        have_joined = torch.tensor(all(used) or (broken is not None and any(used)))
        dist.all_reduce(have_joined, op=dist.ReduceOp.BAND)
        if have_joined:
            break
    if broken is not None:  # the kernel repeats its ARP request three times
        wait_for(lambda: any(LEFT_OUT in each.read_text() for each in Path(folder).glob("log*")))
        dist.barrier()
    before = [sent_by(link) for link in RAILS]
    x = torch.full((4_000_000,), float(ctx.rank + 1))
    dist.all_reduce(x)
    ctx.equal(float(x.sum()), 3.0 * x.numel())
    dist.barrier()  # before it, some of the data may be in the kernel's buffers
    sent = [sent_by(link) - at for link, at in zip(RAILS, before, strict=True)]
    dist.destroy_process_group()
    return sent, log.read_text() if log.exists() else ""


def test_all_named_interfaces_are_used(fresh, mycoll_only, rails, tmp_path):
    for sent, log in fresh(2, init=False).run(over_rails, rails, str(tmp_path), None):
        assert min(sent) > 4_000_000, sent  # of 16 MB
        assert log == ""


def test_an_interface_that_does_not_work_is_left_out(fresh, mycoll_only, rails, tmp_path):
    seen = fresh(2, init=False).run(over_rails, rails, str(tmp_path), 1)
    for sent, _ in seen:
        assert sent[0] > 15_000_000 and sent[1] < 100_000, sent
    logs = "".join(log for _, log in seen)
    assert logs.count(LEFT_OUT) == 1, logs


@pytest.mark.tools
def test_the_benchmark_of_hosts(hosts, mycoll_only):
    """Hosts of one and two ranks: prints a table with the bytes sent, and removes the
    namespaces."""
    program = Path(__file__).parents[1] / "benchmarks" / "hosts.py"
    words = ["--ranks=1,2", "--sizes=1M", "--operations=all_gather,broadcast,barrier", "--rounds=3"]
    command = [sys.executable, str(program), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| all_gather", "| broadcast", "| barrier"], out
    for row in rows[:2]:
        sent, _, bound = (float(cell.strip(" |")) for cell in row[-3:])
        assert bound <= sent <= 1.05 * bound, row
    assert f"mycoll-{process.pid}-" not in subprocess.getoutput("ip netns list")
