"""`mycoll plan`: what a collective would do on a cluster, from the code that would run there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from mycoll import _terminal
from mycoll._native import native

OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
# Bytes of an element, and of a partial sum of it.
DTYPES = {"float32": (4, 4), "float64": (8, 8), "bfloat16": (2, 4), "float16": (2, 4)}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def byte_count(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: 4, 64K, 16M, 1G")
    return int(found[1]) * UNITS[found[2]]


def bytes_per_second(text: str) -> float:
    """Of bits in a second: 25G is 25 Gbit/s."""
    found = re.fullmatch(r"([\d.]+)([MG])", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is no bandwidth in bits a second: 100M, 25G")
    return float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]] / 8


def duration(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no time: 50us, 1.5ms")
    return float(found[1]) * SECONDS[found[2]]


def ranks_of_hosts(hosts: int, ranks: str) -> list[int]:
    """`ranks` is one number for all hosts, or one for each: 8 or 3,5."""
    numbers = [int(each) for each in ranks.split(",")]
    sizes = numbers * hosts if len(numbers) == 1 else numbers
    if len(sizes) != hosts or min(sizes) < 1:
        raise ValueError(f"--ranks {ranks} does not give {hosts} hosts a rank or more each")
    return sizes


def show_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def show_time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def main(words: Sequence[str]) -> int:
    parser = _terminal.Parser(
        prog="mycoll plan",
        description="What a collective would do between hosts: phases, messages, bytes, and the "
        "time that a simple model expects (a link's bandwidth and latency, 5 us for a message, "
        "5 GB/s for a rank's own copies). From the code that would run there.",
    )
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", default="8", help="on each host: 8, or one number each: 3,5")
    parser.add_argument("--size", type=byte_count, default=2**20, help="of a rank's input: 64M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--bandwidth", type=bytes_per_second, default=25e9 / 8,
                        help="of a host's link, bits a second: 25G")  # fmt: skip
    parser.add_argument("--latency", type=duration, default=50e-6, help="one way: 50us")
    parsed = parser.parse_args(list(words))
    try:
        hosts = ranks_of_hosts(parsed.hosts, parsed.ranks)
    except ValueError as error:
        parser.error(str(error))
    element, wide = DTYPES[parsed.dtype]
    size = parsed.size // element * element
    whole, phases = native()._plan_cost(
        parsed.operation, hosts, size, element, wide, parsed.bandwidth, parsed.latency
    )
    print(f"{parsed.operation} of {show_bytes(size)} {parsed.dtype}, {sum(hosts)} ranks on "
          f"{len(hosts)} hosts: {show_time(whole['seconds'])}")  # fmt: skip
    print(f"  a host sends at most  {show_bytes(whole['sent'])}")
    print(f"  between hosts         {whole['messages']:.0f} messages")
    print(f"  a rank talks to       {whole['peers']:.0f} ranks on other hosts")
    print(f"  scratch memory        {show_bytes(whole['scratch'])} a rank at most")
    block = native()._better_sum_block(hosts)
    if block and parsed.operation in ("all_reduce", "reduce", "reduce_scatter"):
        print(f"  with MYCOLL_SUM_BLOCK={block} a host would send less")
    print(f"\n  {whole['chunks']:.0f} chunk(s), each in {len(phases)} phases:\n")
    print("  phase  messages  of a rank   host sends    receives  inside a rank        time")
    for number, phase in enumerate(phases):
        print(f"  {number:5}  {phase['messages']:8.0f}  {phase['per_rank']:9.0f}  "
              f"{show_bytes(phase['sent']):>11} {show_bytes(phase['received']):>11}  "
              f"{show_bytes(phase['inside']):>13} {show_time(phase['seconds']):>11}")  # fmt: skip
    return 0
