"""The command line: nccl-tests' options under nccl-tests' names, and what mycoll adds to them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from mycoll._terminal import Parser
from mycoll._units import at_least, parse_size, seconds

_OPERATIONS = (
    "all_reduce broadcast reduce all_gather reduce_scatter all_to_all gather scatter barrier "
    "sendrecv pingpong bandwidth"
)
_DTYPES = (
    "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 uint8 int16 int32 int64 bool "
    "complex64 complex128"
)
OPERATIONS, DTYPES = tuple(_OPERATIONS.split()), tuple(_DTYPES.split())
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDOPS = ("sum", "prod", "min", "max", "avg")


class Options(argparse.Namespace):
    """The options of a run. Iterations of 0 and warm-ups of -1 are chosen by the size."""

    operations: tuple[str, ...]
    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    iterations: int
    warmups: int
    rounds: int
    dtypes: tuple[str, ...]
    redops: tuple[str, ...]
    hot: bool
    memory: str
    ops: bool
    device: str
    timeout_seconds: float
    floor: bool
    limit: bool
    nproc: int
    json: str
    plot: str | None


def sweep(begin: int, end: int, factor: float) -> tuple[int, ...]:
    """The sizes from begin, multiplied by the factor, to the end, which is one of them."""
    sizes = [begin]
    while sizes[-1] < end:
        sizes.append(min(end, max(int(sizes[-1] * factor), sizes[-1] + 1)))
    return tuple(sizes)


def _names(choices: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name for name in text.split(",") if name)
        if found == ("all",):
            return tuple(choices)
        unknown = [name for name in found if name not in choices]
        if unknown or not found:
            raise argparse.ArgumentTypeError(
                f"unknown {what} '{','.join(unknown)}'; choose from {', '.join(choices)}"
            )
        return found

    return parse


def _parser() -> Parser:
    parser = Parser(
        prog="mycoll bench",
        usage="mycoll bench OP[,OP...] --nproc N [options]\n"
        "       torchrun --nproc-per-node N -m mycoll bench OP[,OP...] [options]\n"
        "       mycoll bench compare BEFORE.jsonl AFTER.jsonl",
        description="Measures and verifies collectives. Several backends take turns, round by "
        "round, so that a busy machine disturbs all alike.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26),
    )
    add = parser.add_argument
    some = "all, or some of: {}".format

    def lists(*flags: str, of: Sequence[str], what: str, **more: Any) -> None:
        add(*flags, type=_names(of, what), help=some(", ".join(of)), **more)

    lists("operations", of=OPERATIONS, what="operation", metavar="OP[,OP...]")
    add("--nproc", type=at_least(1), default=0, metavar="N", help="start N ranks on this host")
    text = "backends, such as mycoll,gloo or mycoll,nccl; the first is compared with the others"
    add("--backend", default="mycoll", metavar="NAMES", help=text)
    size: dict[str, Any] = {"type": parse_size, "metavar": "SIZE"}
    count: dict[str, Any] = {"type": at_least(0), "metavar": "N"}
    add("-b", "--minbytes", default=8, **size, help="smallest size (default 8)")
    add("-e", "--maxbytes", default=64 << 20, **size, help="largest size (default 64M)")
    factor = at_least(1.01)  # from 1 byte to the largest size in less than 5,000 steps
    add("-f", "--stepfactor", type=factor, default=8, metavar="X", help="between sizes (default 8)")
    text = "calls in a round (default: 20 ms)"
    add("-n", "--iters", dest="iterations", default=0, **count, help=text)
    text = "untimed calls in a round"
    add("-w", "--warmup_iters", dest="warmups", default=-1, **count, help=text)
    text = "turns of each backend (default 12)"
    add("--rounds", type=at_least(1), default=12, metavar="N", help=text)
    names: dict[str, Any] = {"metavar": "NAMES"}
    lists("-d", "--dtype", of=DTYPES, what="dtype", dest="dtypes", default=("float32",), **names)
    lists("-o", "--op", of=REDOPS, what="redop", dest="redops", default=("sum",), **names)
    add("--device", default="cpu", help="where the tensors are: cpu (default) or cuda")
    add("--hot", action="store_true", help="reuse one buffer, so that it stays in cache")
    memory = ("private", "shared", "both")
    text = "CPU tensors in ordinary memory, in shared memory, or mycoll with both in turn"
    add("--memory", choices=memory, default="private", help=text)
    add("--ops", action="store_true", help="also time torch.ops.mycoll, where it has the operation")
    add("--floor", action="store_true", help="also time torch's own cost of a call")
    text = "also time copies by all ranks together: of their own memory, and of another rank's"
    add("--limit", action="store_true", help=text)
    text = "timeout of a group, in seconds"
    add("--timeout", dest="timeout_seconds", type=seconds, default=120.0, metavar="S", help=text)
    add("--json", default="", metavar="FILE", help="write each result to FILE as a line of JSON")
    text = "draw time and bandwidth against size; '': do not (default: mycoll-bench.png, with "
    add("--plot", metavar="FILE", help=text + "matplotlib and several sizes)")
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Exits with a message where the line makes no sense."""
    parser = _parser()
    found = parser.parse_args(list(argv), Options())
    backends: list[str] = []
    for name in filter(None, found.backend.split(",")):
        # A number follows a name that came before: `gloo,gloo` shows the noise.
        earlier = sum(label.split("#")[0] == name for label in backends)
        backends.append(f"{name}#{earlier + 1}" if earlier else name)
    if not backends:
        parser.error("--backend names no backend")
    if ":" in found.device:
        kind = found.device.partition(":")[0]
        parser.error(f"--device: every rank takes its own; say '{kind}'")
    if found.memory != "private" and found.device != "cpu":
        parser.error("--memory is about CPU tensors")
    if found.ops and found.device != "cpu":
        parser.error("--ops are for CPU tensors")
    if found.ops and "mycoll" not in backends:
        parser.error("--ops are mycoll's: name it in --backend")
    if found.minbytes < 1 or found.maxbytes < found.minbytes:
        parser.error("-b must be at least 1 and -e at least -b")
    found.backends = tuple(backends)
    found.sizes = sweep(found.minbytes, found.maxbytes, found.stepfactor)
    return found
