"""Measures collectives between hosts: mycoll and gloo on network namespaces that represent hosts.

    ./dev hosts --ranks 4,4 --rate 1gbit
    ./dev hosts --all

The first measures two hosts of four ranks. --all prints every table of a results page; other
options apply to each of them.

The program creates the namespaces, connects them by a bridge, limits each host's link to the rate
in both directions, and removes everything at the end. This needs root. The backends alternate in
the same processes. A row has the medians over the rounds with their quartiles, the processor time
of all ranks, and the bytes that the host with the most traffic has sent, as a multiple of the
tensor.

--mpi adds Open MPI (Debian: openmpi-bin libopenmpi-dev) to the rounds, with each of its components
for collectives: tuned, han and adapt. The row has the fastest.

--delay 25ms adds this delay one way between two hosts, by sending packets through router.py.
--iperf first measures iperf3 (Debian: iperf3) between two of these hosts: one way by one connection
and by four, and both ways together by two each. The operation send is a message from the first rank
to the first one of another host.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

PORT = 29_711
OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "barrier",
)  # fmt: skip
SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}
RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def size(text: str) -> int:
    return int(text[:-1]) * SUFFIXES[text[-1]] if text[-1] in SUFFIXES else int(text)


def measure_of(text: str, units: dict[str, float]) -> float:
    for unit, factor in units.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    sys.exit(f"hosts: '{text}' has none of the units {', '.join(units)}")


def show(count: int) -> str:
    for suffix in "GMK":
        if count >= SUFFIXES[suffix] and count % SUFFIXES[suffix] == 0:
            return f"{count // SUFFIXES[suffix]}{suffix}"
    return str(count)


# ---- the hosts -----------------------------------------------------------------------------------


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Network:
    """Namespaces that a bridge or a router connects. Host i has the address 10.214.0.(i + 1)."""

    def __init__(self, hosts: int, rate: str, delay: str) -> None:
        self.prefix = f"mycoll-{os.getpid()}"
        self.names = [f"{self.prefix}-{i}" for i in range(hosts)]
        self.bridge = f"{self.prefix}-sw"
        self.rate = rate
        self.delay = delay
        self.router: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        try:
            for name in [*self.names, self.bridge]:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            if self.delay:
                self.start_router()
                return self
            run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.bridge, "link", "set", "br0", "up")
            for i, name in enumerate(self.names):
                run("ip", "link", "add", "veth0", "netns", name, "type", "veth",
                    "peer", "name", f"port{i}", "netns", self.bridge)  # fmt: skip
                run("ip", "-n", self.bridge, "link", "set", f"port{i}", "master", "br0", "up")
                run("ip", "-n", name, "addr", "add", f"10.214.0.{i + 1}/24", "dev", "veth0")
                run("ip", "-n", name, "link", "set", "veth0", "up")
                for where, link in ((name, "veth0"), (self.bridge, f"port{i}")):
                    if self.rate:
                        run("tc", "-n", where, "qdisc", "add", "dev", link, "root", "tbf",
                            "rate", self.rate, "burst", "256k", "latency", "50ms")  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            text = getattr(error, "stderr", "") or str(error)
            sys.exit(f"hosts: network namespaces cannot be made here (root?): {text.strip()}")
        return self

    def start_router(self) -> None:
        command = [
            "ip", "netns", "exec", self.bridge,
            sys.executable, str(Path(__file__).with_name("router.py")),
            "--delay", str(measure_of(self.delay, TIMES)),
            "--rate", str(measure_of(self.rate, RATES) / 8 if self.rate else 0), *self.names,
        ]  # fmt: skip
        self.router = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.router.stdout is not None
        if self.router.stdout.readline() != "ready\n":
            raise OSError("the router has ended")

    def iperf(self, connections: int, *options: str, seconds: int = 10) -> list[float]:
        """Bits per second from the second host to the first, and with --bidir also back."""
        inside = ["ip", "netns", "exec"]
        server = subprocess.Popen(
            [*inside, self.names[0], "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL
        )
        time.sleep(1)
        done = subprocess.run(
            [*inside, self.names[1], "iperf3", "-c", "10.214.0.1", "-J", "-t", str(seconds),
             "-P", str(connections), *options],
            check=True, capture_output=True, text=True)  # fmt: skip
        server.wait()
        end = json.loads(done.stdout)["end"]
        ways = ("sum_received", "sum_received_bidir_reverse")
        return [float(end[way]["bits_per_second"]) for way in ways if way in end]

    def __exit__(self, *_: object) -> None:
        if self.router:
            assert self.router.stdin is not None
            self.router.stdin.close()
            self.router.wait()
        for name in [*self.names, self.bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


# ---- Open MPI ------------------------------------------------------------------------------------

COMPONENTS = {
    "tuned": [],
    "han": ["--mca", "coll_han_priority", "100"],
    "adapt": ["--mca", "coll_adapt_priority", "100"],
}
# The command by which mpirun starts a program on another host. Each host gets its own name, because
# Open MPI uses names to decide which processes share a host.
AGENT = """#!/bin/sh
number=$(($(echo "$1" | cut -d. -f4) - 1))
shift
exec ip netns exec {prefix}-$number unshare --uts sh -c "hostname host$number; $*"
"""


class Mpi:
    """The ranks of one mpirun, which read commands and answer them (peers/mpi_bench.c)."""

    def __init__(self, name: str, hosts: list[int], network: str, folder: Path) -> None:
        agent = folder / "agent"
        agent.write_text(AGENT.format(prefix=network))
        agent.chmod(0o755)
        address = str(folder / name)
        where = ",".join(f"10.214.0.{i + 1}:{ranks}" for i, ranks in enumerate(hosts))
        command = [
            "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(sum(hosts)),
            "--host", where, "--map-by", "slot", "--mca", "plm_rsh_agent", str(agent),
            "--mca", "oob_tcp_if_include", "veth0", "--mca", "btl_tcp_if_include", "veth0",
            "--mca", "mpi_yield_when_idle", "1",  # all hosts share the same cores
            "--mca", "pml", "ob1", "--mca", "btl", "self,vader,tcp",
            *COMPONENTS[name], str(folder / "mpi_bench"), address,
        ]  # fmt: skip
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(sum(hosts))
            listener.settimeout(60)
            self.process = subprocess.Popen(
                ["unshare", "--uts", "sh", "-c", 'hostname host0; exec "$@"', "sh", *command],
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self.channels: list[Any] = []
            for _ in range(sum(hosts)):
                self.channels.append(listener.accept()[0].makefile("rw"))
                self.channels[-1].readline()

    def ask(self, words: str) -> list[dict[str, Any]]:
        for channel in self.channels:
            channel.write(words + "\n")
            channel.flush()
        return [json.loads(channel.readline()) for channel in self.channels]

    def run(self, operation: str, count: int, repeats: int) -> float:
        """Seconds per call on the slowest rank; infinite if a rank has died, or if the program does
        not support the operation."""
        if self.process.poll() is not None:
            return math.inf
        try:
            # Each rank has at least one element.
            elements = max(count, len(self.channels))
            prepared = self.ask(f"prepare {operation} float32 sum {elements * 4} 0 1 0")
            if "unsupported" in prepared[0]:
                return math.inf
            self.ask("run 0 1")
            answers = self.ask(f"run 0 {repeats}")
        except (OSError, ValueError):  # Open MPI 4.1.4's han crashes in large in-place all_reduces
            self.process.wait()
            return math.inf
        return max(sum(answer["ns"]) for answer in answers) / repeats / 1e9

    def close(self) -> None:
        if self.process.poll() is None:
            for channel in self.channels:
                channel.write("quit\n")
                channel.close()
        self.process.wait(timeout=30)


# ---- a rank --------------------------------------------------------------------------------------


def sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("veth0:"):
            return int(line.split(":")[1].split()[8])
    return 0


def call(dist: Any, torch: Any, operation: str, count: int, hosts: list[int], group: Any) -> Any:
    """Returns a function that makes one call. count: the float32 elements of all ranks together."""
    x = torch.ones(max(count, 1))
    if operation == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if operation == "reduce":
        return lambda: dist.reduce(x, 0, group=group)
    if operation == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    if operation == "barrier":
        return lambda: dist.barrier(group=group)
    if operation == "send":
        other, rank = hosts[0], dist.get_rank()
        if rank == 0:
            return lambda: dist.send(x, other, group=group)
        return lambda: dist.recv(x, 0, group=group) if rank == other else None
    ranks = sum(hosts)
    part = torch.ones(max(count // ranks, 1))
    whole = torch.ones(part.numel() * ranks)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if operation == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    parts = list(whole.chunk(ranks)) if dist.get_rank() == 0 else None
    if operation == "gather":
        return lambda: dist.gather(part, parts, group=group)
    if operation == "scatter":
        return lambda: dist.scatter(part, parts, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    dist.init_process_group(
        "mycoll", init_method=f"tcp://10.214.0.1:{PORT}", rank=arguments.rank,
        world_size=sum(arguments.ranks), timeout=timedelta(seconds=300))  # fmt: skip
    groups = {"mycoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    peers = {name: None for name in COMPONENTS if arguments.mpi}
    with tempfile.TemporaryDirectory(prefix="mycoll-hosts-") as folder:
        if arguments.rank == 0 and arguments.mpi:
            source = Path(__file__).parent / "peers" / "mpi_bench.c"
            run("mpicc", "-O2", str(source), "-o", f"{folder}/mpi_bench")
            peers = {
                name: Mpi(name, arguments.ranks, arguments.network, Path(folder))
                for name in COMPONENTS
            }
        work(arguments, dist, torch, groups, peers)
        for peer in peers.values():
            if peer:
                peer.close()
    dist.destroy_process_group()


def work(arguments: argparse.Namespace, dist: Any, torch: Any, groups: dict[str, Any],
         peers: dict[str, Mpi | None]) -> None:  # fmt: skip
    for operation in arguments.operations.split(","):
        sizes = (
            [0] if operation == "barrier" else [size(each) for each in arguments.sizes.split(",")]
        )
        for bytes_each in sizes:
            row = measure(arguments, dist, torch, groups, peers, operation, bytes_each)
            if arguments.rank == 0:
                print(json.dumps(row), flush=True)


def measure(arguments: argparse.Namespace, dist: Any, torch: Any, groups: dict[str, Any],
            peers: dict[str, Mpi | None], operation: str,
            bytes_each: int) -> dict[str, Any]:  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in [*groups, *peers]}
    traffic: dict[str, float] = {}
    processor: dict[str, list[float]] = {name: [] for name in groups}
    calls = {
        name: call(dist, torch, operation, bytes_each // 4, arguments.ranks, group)
        for name, group in groups.items()
    }
    for each in calls.values():
        each()

    def timed(each: Any, repeats: int) -> tuple[float, float, float]:
        """Of a call: seconds on the slowest rank, processor seconds of all ranks, and bytes that
        the host with the most traffic sent."""
        dist.barrier()
        before, worked, sent = time.perf_counter(), time.process_time(), sent_bytes()
        for _ in range(repeats):
            each()
        seconds = torch.tensor([(time.perf_counter() - before) / repeats])
        work = torch.tensor([(time.process_time() - worked) / repeats])
        load = torch.tensor([(sent_bytes() - sent) / repeats])
        dist.all_reduce(work)
        for value in (seconds, load):
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(seconds), float(work), float(load)

    def repeats_of(time_of: Any) -> int:
        """The calls of a round. In a shorter one, the ranks' wake-ups would count more."""
        repeats = 1
        while time_of(repeats) * repeats * 2 < arguments.seconds and repeats < 10_000:
            repeats *= 2
        return repeats

    repeats = {
        name: repeats_of(lambda n, each=each: timed(each, n)[0]) for name, each in calls.items()
    }
    for name, peer in peers.items():
        if peer:  # on rank 0; the other ranks wait for it
            repeats[name] = repeats_of(partial(peer.run, operation, bytes_each // 4))
        dist.barrier()
    for _ in range(arguments.rounds):
        for name, each in calls.items():
            seconds, work, traffic[name] = timed(each, repeats[name])
            times[name].append(seconds)
            processor[name].append(work)
        for name, peer in peers.items():
            if peer:
                times[name].append(peer.run(operation, bytes_each // 4, repeats[name]))
            dist.barrier()
    return {
        "operation": operation, "bytes": bytes_each, "times": times, "processor": processor,
        "sent": traffic,
    }  # fmt: skip


# ---- the table -----------------------------------------------------------------------------------


def bound(operation: str, hosts: list[int]) -> float:
    """The least that the host with the most traffic must send, as a multiple of the tensor. hosts:
    the ranks of each; the root is on the first."""
    ranks = sum(hosts)
    share = (len(hosts) - 1) / len(hosts)
    return {
        "all_reduce": 2 * share,
        "reduce_scatter": 1 - min(hosts) / ranks,
        "all_gather": max(share, max(hosts) / ranks),
        "broadcast": 1,
        "reduce": 1,
        "gather": max(hosts[1:]) / ranks,
        "scatter": 1 - hosts[0] / ranks,
        "all_to_all": max(own * (1 - own / ranks) for own in hosts),
        "send": 1,
    }.get(operation, 0)


def line(row: dict[str, Any], arguments: argparse.Namespace) -> str:
    cells = [row["operation"], show(row["bytes"]) if row["bytes"] else ""]
    middle = {}
    for name in ("mycoll", "gloo"):
        times = row["times"][name]
        low, middle[name], high = statistics.quantiles(times, n=4)
        cells.append(f"{middle[name] * 1e3:.3g} [{low * 1e3:.3g} {high * 1e3:.3g}]")
    ratios = [g / m for m, g in zip(row["times"]["mycoll"], row["times"]["gloo"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    cells.append(f"{ratio:.2f} [{low:.2f} {high:.2f}]")
    if arguments.mpi:
        best = min(COMPONENTS, key=lambda name: statistics.median(row["times"][name]))
        theirs = row["times"][best]
        if math.isinf(statistics.median(theirs)):
            cells += ["", ""]
        else:
            low, ratio, high = statistics.quantiles(
                [m / o for m, o in zip(row["times"]["mycoll"], theirs, strict=True)], n=4
            )
            cells += [f"{statistics.median(theirs) * 1e3:.3g} {best}"]
            cells += [f"{ratio:.2f} [{low:.2f} {high:.2f}]"]
    ratios = [
        m / g for m, g in zip(row["processor"]["mycoll"], row["processor"]["gloo"], strict=True)
    ]
    cells.append(f"{statistics.median(ratios):.2f}")
    if row["bytes"] >= 2**20:
        cells += [f"{row['sent'][name] / row['bytes']:.2f}" for name in ("mycoll", "gloo")]
        cells.append(f"{bound(row['operation'], arguments.ranks):.2f}")
    else:
        cells += ["", "", ""]
    return "| " + " | ".join(cells) + " |"


LARGE = ["--sizes", "64M", "--operations", "all_reduce,reduce_scatter,all_gather,broadcast,reduce"]
# Each table of a results page.
TABLES = (
    ["--ranks", "2,2", "--iperf"],
    ["--ranks", "2,2,2,2", "--sizes", "4", "--operations", "all_reduce,barrier"],
    *(["--ranks", ranks, "--rate", "1gbit"] for ranks in ("2,2", "4,4", "2,2,2,2", "4,4,4,4")),
    ["--ranks", "3,5", "--rate", "1gbit", *LARGE],
    ["--ranks", "1,1", "--rate", "1gbit", "--delay", "25ms", "--iperf", "--sizes", "1M,64M,256M",
     "--operations", "send,all_reduce"],
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="2,2", help="the number of ranks on each host")
    parser.add_argument("--all", action="store_true", help="print every table of a results page")
    parser.add_argument("--rate", default="", help="of each host's link, in tc's syntax: 1gbit")
    parser.add_argument("--delay", default="", help="one way: 25ms")
    parser.add_argument("--iperf", action="store_true", help="measure iperf3 first")
    parser.add_argument("--sizes", default="4,64K,1M,16M,64M", help="of the tensor of each rank")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="these, or send")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each backend's calls, about")
    parser.add_argument("--mpi", action="store_true", help="also measure Open MPI")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--network", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    words = [sys.executable, __file__, *sys.argv[1:]]
    if arguments.all:
        words.remove("--all")
        for table in TABLES:
            if subprocess.run([*words[:2], *table, *words[2:]]).returncode != 0:
                sys.exit(f"hosts: the table of {' '.join(table)} failed")
            print(flush=True)
        return
    arguments.ranks = [int(each) for each in arguments.ranks.split(",")]
    if arguments.rank >= 0:
        rank_main(arguments)
        return
    from mycoll._gloo import keep_names_honest

    keep_names_honest("hosts")
    for is_asked, tool, package in (
        (arguments.mpi, "mpicc", "libopenmpi-dev"),
        (arguments.mpi, "mpirun", "openmpi-bin"),
        (arguments.iperf, "iperf3", "iperf3"),
    ):
        if is_asked and shutil.which(tool) is None:
            sys.exit(f"hosts: {tool} is missing: apt install {package}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("hosts: ended by SIGTERM"))
    rate = f" at {arguments.rate}" if arguments.rate else ""
    rate += f", {arguments.delay} apart" if arguments.delay else ""
    print(f"Hosts of {arguments.ranks} ranks{rate}; ms, and ratios to gloo's time\n")
    with Network(len(arguments.ranks), arguments.rate, arguments.delay) as network:
        run_ranks(arguments, network, words)


def run_ranks(arguments: argparse.Namespace, network: Network, words: list[str]) -> None:
    if arguments.iperf:
        for options in (("1",), ("4",), ("2", "--bidir")):
            rates = network.iperf(int(options[0]), *options[1:])
            text = ", ".join(f"{rate / 1e6:.0f} Mbit/s" for rate in rates)
            print(f"iperf3 -P {' '.join(options)}: {text}")
        print()
    columns = "operation | bytes | mycoll | gloo | gloo/mycoll |"
    columns += " Open MPI's best | mycoll/Open MPI |" if arguments.mpi else ""
    print(f"| {columns} processor: mycoll/gloo | sent: mycoll | gloo | bound |")
    print("|" + "---|" * (9 + 2 * arguments.mpi), flush=True)
    places = [
        name
        for name, count in zip(network.names, arguments.ranks, strict=True)
        for _ in range(count)
    ]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *words, "--network", network.prefix, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(places)
    ]
    try:
        assert ranks[0].stdout is not None
        for text in ranks[0].stdout:
            if text.startswith("{"):
                print(line(json.loads(text), arguments), flush=True)
        codes = [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        sys.exit(f"hosts: ranks ended with {codes}")


if __name__ == "__main__":
    main()
