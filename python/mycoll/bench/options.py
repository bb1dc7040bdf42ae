"""The command line: nccl-tests' options under nccl-tests' names, and what mycoll adds to them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "sendrecv",
    "pingpong",
    "bandwidth",
    "bandwidth_bidir",
    "overlap",
    "ddp",
    "init",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDOPS = ("sum", "prod", "min", "max", "avg")
_MOST = 1e6  # seconds, milliseconds, factors
_MOST_SIZES = 10_000
PEERS = ("openmpi", "mpich", "openmpi-tcp", "mpich-tcp", "intelmpi", "iperf3")

# nccl-tests' names beside torch's own.
_DTYPE_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "bfloat": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "f8e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "f8e5m2": "float8_e5m2",
    "int": "int32",
    "long": "int64",
}
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
)


@dataclass(frozen=True)
class Options:
    """What one run measures. Rounds, warm-ups and iterations of 0 mean: chosen by the size."""

    operations: tuple[str, ...]
    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    iterations: int
    warmups: int
    rounds: int
    round_milliseconds: float
    checks: int
    dtypes: tuple[str, ...]
    redops: tuple[str, ...]
    blocking: bool
    root: int
    in_place: bool
    hot: bool
    device: str
    threads: int
    timeout_seconds: float
    floor: bool
    limit: bool
    peers: tuple[str, ...]
    worlds: tuple[int, ...]
    nproc: int
    json: str
    csv: str
    plot: str
    plant_error: int


def parse_size(text: str) -> int:
    """Bytes from `8`, `64K`, `1.5M`, `1G` (powers of 1024, as in nccl-tests)."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 8, 64K, 1M or 1G")
    shift = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2].lower()]
    size = float(match[1]) * (1 << shift)
    if size >= 1 << 63:
        raise argparse.ArgumentTypeError(f"'{text}' is more than any memory holds")
    return int(size)


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def sweep(begin: int, end: int, factor: float, step: int) -> tuple[int, ...]:
    """The sizes from begin to end, multiplied by the factor or, with a step, added to.

    ValueError if nobody can want that many.
    """
    sizes = [begin]
    while len(sizes) <= _MOST_SIZES:
        following = sizes[-1] + step if step else max(int(sizes[-1] * factor), sizes[-1] + 1)
        if following > end:
            return tuple(sizes)
        sizes.append(following)
    raise ValueError(f"more than {_MOST_SIZES} sizes: choose a larger -f or -i")


def _names(
    choices: Sequence[str], what: str, aliases: Mapping[str, str] | None = None
) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple((aliases or {}).get(name, name) for name in text.split(",") if name)
        if found == ("all",):
            return tuple(choices)
        unknown = [name for name in found if name not in choices]
        if unknown or not found:
            raise argparse.ArgumentTypeError(
                f"unknown {what} '{','.join(unknown)}'; choose from {', '.join(choices)}"
            )
        return found

    return parse


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return value

    return parse


def between(low: float, high: float) -> Callable[[str], float]:
    """A number from low to high: no NaN, nothing infinite."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:g} to {high:g}")
        return value

    return parse


def _worlds(text: str) -> tuple[int, ...]:
    return tuple(_at_least(1)(part) for part in text.split(",") if part)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError("must be 0 or 1")
    return text == "1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mycoll bench",
        description="Measure and verify collectives; several backends are interleaved round by "
        "round and compared in pairs. Under torchrun every rank runs this command; with --nproc "
        "it starts its own ranks on this host.",
        epilog="`mycoll bench compare A.jsonl B.jsonl` tells what became faster or slower.",
    )
    add = parser.add_argument
    add(
        "operations",
        type=_names(OPERATIONS, "operation"),
        metavar="OP[,OP...]",
        help=f"all, or some of: {', '.join(OPERATIONS)}",
    )
    add("--backend", default="mycoll", help="backends to measure; the first is the subject")
    add("--nproc", type=_at_least(1), default=0, help="start this many ranks on this host")
    add("-b", "--minbytes", type=parse_size, default=8, help="smallest size (default 8)")
    add("-e", "--maxbytes", type=parse_size, default=64 << 20, help="largest size (default 64M)")
    factor = between(1, _MOST)
    add("-f", "--stepfactor", type=factor, default=8, help="factor between sizes (default 8)")
    add("-i", "--stepbytes", type=parse_size, default=0, help="fixed step between sizes instead")
    add("-n", "--iters", type=_at_least(0), default=0, help="calls a round (default: by time)")
    add("-w", "--warmup_iters", type=_at_least(0), default=-1, help="untimed calls a round")
    add("--rounds", type=_at_least(1), default=12, help="rounds of each backend (default 12)")
    add("--round-ms", type=between(0, _MOST), default=20.0, help="time a round aims at (20 ms)")
    add("-c", "--check", type=_at_least(1), default=2, help="verified calls (default 2)")
    add(
        "-d",
        "--dtype",
        type=_names(DTYPES, "dtype", _DTYPE_ALIASES),
        default=("float32",),
        help=f"all, or some of: {', '.join(DTYPES)}",
    )
    add("-o", "--op", type=_names(REDOPS, "redop"), default=("sum",), help=", ".join(REDOPS))
    add("-z", "--blocking", type=_flag, default=False, help="1: align the ranks before each call")
    add("-r", "--root", type=_at_least(0), default=0, help="root of rooted operations")
    add("--in-place", action="store_true", help="where torch offers both")
    add("--hot", action="store_true", help="reuse one buffer, so that it stays in cache")
    add("--device", default="cpu", help="where the tensors are: cpu (default) or cuda")
    add("--threads", type=_at_least(1), default=1, help="torch threads a rank (default 1)")
    add("--timeout", type=between(0.1, _MOST), default=120.0, help="seconds until a group gives up")
    add("--floor", action="store_true", help="torch's own cost of a call (its `fake` backend)")
    add("--limit", action="store_true", help="the machine's memory copy rate, all ranks at once")
    add(
        "--peers",
        type=_names(PEERS, "peer"),
        default=(),
        help=f"measured in the same run when installed: {', '.join(PEERS)}",
    )
    add(
        "--worlds",
        type=_worlds,
        default=(),
        help="world sizes of `init` (default: powers of 2 up to this host's ranks)",
    )
    add("--json", default="", metavar="FILE", help="write JSON lines")
    add("--csv", default="", metavar="FILE", help="write comma separated values")
    add("--plot", default="", metavar="FILE.png", help="draw latency and bandwidth")
    # For the harness' own tests: this rank spoils one element of every result it verifies.
    add("--plant-error", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


def _labels(names: list[str]) -> tuple[str, ...]:
    """A backend named twice gets two groups, to see what a comparison of equals looks like."""
    labels: list[str] = []
    for name in names:
        seen = sum(label.split("#")[0] == name for label in labels)
        labels.append(f"{name}#{seen + 1}" if seen else name)
    return tuple(labels)


def parse_options(argv: Sequence[str]) -> Options:
    """Exits with argparse's message where the line makes no sense."""
    parser = _parser()
    found = parser.parse_args(list(argv))
    backends = _labels([name for name in found.backend.split(",") if name])
    if not backends:
        parser.error("--backend names no backend")
    try:
        device = torch.device(found.device)
    except RuntimeError:
        parser.error(f"--device: torch knows no '{found.device}'")
    if ":" in found.device:
        parser.error(f"--device: every rank takes its own; say '{device.type}'")
    if found.minbytes < 1 or found.maxbytes < found.minbytes:
        parser.error("-b must be at least 1 and -e at least -b")
    if found.stepfactor <= 1 and not found.stepbytes:
        parser.error("-f must be more than 1")
    try:
        sizes = sweep(found.minbytes, found.maxbytes, found.stepfactor, found.stepbytes)
    except ValueError as cause:
        parser.error(str(cause))
    return Options(
        operations=found.operations,
        backends=backends,
        sizes=sizes,
        iterations=found.iters,
        warmups=found.warmup_iters,
        rounds=found.rounds,
        round_milliseconds=found.round_ms,
        checks=found.check,
        dtypes=found.dtype,
        redops=found.op,
        blocking=found.blocking,
        root=found.root,
        in_place=found.in_place,
        hot=found.hot,
        device=found.device,
        threads=found.threads,
        timeout_seconds=found.timeout,
        floor=found.floor,
        limit=found.limit,
        peers=found.peers,
        worlds=found.worlds,
        nproc=found.nproc,
        json=found.json,
        csv=found.csv,
        plot=found.plot,
        plant_error=found.plant_error,
    )
