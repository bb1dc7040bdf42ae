"""Collectives between hosts: mycoll and gloo on network namespaces that stand for hosts.

    ./dev hosts --hosts 2 --ranks 4 --rate 1gbit

Makes the namespaces, joins them by a bridge, limits each host's link to the rate both ways, and
removes it all at the end. Needs the right to do that (root). Both backends run in the same
processes, in turns; a row has the medians over the rounds with their quartiles, and the bytes that
the host that sent most has put on its link, as a multiple of the tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

PORT = 29_711
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    return int(text[:-1]) * SUFFIXES[text[-1]] if text[-1] in SUFFIXES else int(text)


def show(count: int) -> str:
    for suffix in "GMK":
        if count >= SUFFIXES[suffix] and count % SUFFIXES[suffix] == 0:
            return f"{count // SUFFIXES[suffix]}{suffix}"
    return str(count)


# ---- the hosts -----------------------------------------------------------------------------------


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Network:
    """Namespaces a bridge joins. Host i has the address 10.214.0.(i + 1)."""

    def __init__(self, hosts: int, rate: str) -> None:
        self.names = [f"mycoll-{os.getpid()}-{i}" for i in range(hosts)]
        self.bridge = f"mycoll-{os.getpid()}-sw"
        self.rate = rate

    def __enter__(self) -> Network:
        try:
            for name in [*self.names, self.bridge]:
                run("ip", "netns", "add", name)
            run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.bridge, "link", "set", "br0", "up")
            for i, name in enumerate(self.names):
                run("ip", "link", "add", "veth0", "netns", name, "type", "veth",
                    "peer", "name", f"port{i}", "netns", self.bridge)  # fmt: skip
                run("ip", "-n", self.bridge, "link", "set", f"port{i}", "master", "br0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
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

    def __exit__(self, *_: object) -> None:
        for name in [*self.names, self.bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


# ---- a rank --------------------------------------------------------------------------------------


def sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("veth0:"):
            return int(line.split(":")[1].split()[8])
    return 0


def call(dist: Any, torch: Any, operation: str, count: int, ranks: int, group: Any) -> Any:
    """What runs one call. `count` float32 elements: the whole that is reduced or gathered."""
    x = torch.ones(max(count, 1))
    if operation == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if operation == "reduce":
        return lambda: dist.reduce(x, 0, group=group)
    if operation == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    if operation == "barrier":
        return lambda: dist.barrier(group=group)
    part = torch.ones(max(count // ranks, 1))
    whole = torch.ones(part.numel() * ranks)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks = arguments.hosts * arguments.ranks
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    dist.init_process_group(
        "mycoll", init_method=f"tcp://10.214.0.1:{PORT}", rank=arguments.rank, world_size=ranks,
        timeout=timedelta(seconds=300))  # fmt: skip
    groups = {"mycoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for operation in arguments.operations.split(","):
        sizes = (
            [0] if operation == "barrier" else [size(each) for each in arguments.sizes.split(",")]
        )
        for bytes_each in sizes:
            row = measure(arguments, dist, torch, groups, operation, bytes_each)
            if arguments.rank == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, dist: Any, torch: Any, groups: dict[str, Any],
            operation: str, bytes_each: int) -> dict[str, Any]:  # fmt: skip
    ranks = arguments.hosts * arguments.ranks
    times: dict[str, list[float]] = {name: [] for name in groups}
    traffic: dict[str, float] = {}
    calls = {
        name: call(dist, torch, operation, bytes_each // 4, ranks, group)
        for name, group in groups.items()
    }
    for each in calls.values():
        each()
    repeats = arguments.repeats if bytes_each >= 2**20 else 20 * arguments.repeats
    for _ in range(arguments.rounds):
        for name, each in calls.items():
            dist.barrier()
            before, sent = time.perf_counter(), sent_bytes()
            for _ in range(repeats):
                each()
            seconds = torch.tensor([(time.perf_counter() - before) / repeats])
            dist.barrier()
            load = torch.tensor([(sent_bytes() - sent) / repeats])
            for each_value in (seconds, load):
                dist.all_reduce(each_value, dist.ReduceOp.MAX)
            times[name].append(float(seconds))
            traffic[name] = float(load)
    return {"operation": operation, "bytes": bytes_each, "times": times, "sent": traffic}


# ---- the table -----------------------------------------------------------------------------------


def bound(operation: str, hosts: int) -> float:
    """What a host has to send at least, as a multiple of the whole."""
    share = (hosts - 1) / hosts
    return {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "broadcast": 1,
        "reduce": 1,
    }.get(operation, 0)


def line(row: dict[str, Any], arguments: argparse.Namespace) -> str:
    cells = [row["operation"], show(row["bytes"]) if row["bytes"] else ""]
    middle = {}
    for name, times in row["times"].items():
        low, middle[name], high = statistics.quantiles(times, n=4)
        cells.append(f"{middle[name] * 1e3:.3g} [{low * 1e3:.3g} {high * 1e3:.3g}]")
    ratios = [g / m for m, g in zip(row["times"]["mycoll"], row["times"]["gloo"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    cells.append(f"{ratio:.2f} [{low:.2f} {high:.2f}]")
    if row["bytes"] >= 2**20:
        cells += [f"{row['sent'][name] / row['bytes']:.2f}" for name in row["times"]]
        cells.append(f"{bound(row['operation'], arguments.hosts):.2f}")
    else:
        cells += ["", "", ""]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rate", default="", help="of each host's link, as tc takes it: 1gbit")
    parser.add_argument("--sizes", default="4,64K,1M,16M,64M", help="of the tensor of a rank")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="of a call in a round")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank >= 0:
        rank_main(arguments)
        return
    words = [sys.executable, __file__, *sys.argv[1:]]
    rate = f" at {arguments.rate}" if arguments.rate else ""
    print(
        f"{arguments.hosts} hosts of {arguments.ranks} ranks{rate}; ms, and how often gloo's time\n"
    )
    print("| operation | bytes | mycoll | gloo | gloo/mycoll | sent: mycoll | gloo | bound |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with Network(arguments.hosts, arguments.rate) as network:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *words, "--rank", str(host * arguments.ranks + i)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for host, name in enumerate(network.names)
            for i in range(arguments.ranks)
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
