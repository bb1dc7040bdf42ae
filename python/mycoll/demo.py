"""`mycoll demo`: data-parallel training on two ranks, then collectives timed beside gloo.

Everything runs on this machine, with generated data.
"""

from __future__ import annotations

from collections.abc import Sequence

from mycoll import bench, launch
from mycoll._gloo import keep_names_honest
from mycoll._terminal import Parser
from mycoll._units import at_least


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `mycoll demo` with these words; returns the exit code."""
    parser = Parser(prog="mycoll demo", description=__doc__)
    parser.add_argument("--backend", default="mycoll", help="train over another backend")
    count = at_least(1)
    parser.add_argument("--ranks", type=count, default=2, help="processes (default 2)")
    parser.add_argument("--steps", type=count, default=3000, help="training steps")
    parser.add_argument("--rounds", type=count, default=12, help="rounds of each timing")
    options = parser.parse_args(arguments)
    keep_names_honest("mycoll demo")
    from mycoll.demo_training import run_rank

    args = (options.backend, options.steps)
    if code := launch.run_command("mycoll demo", run_rank, options.ranks, args, options.backend):
        return code
    print("Collectives, in rounds in which the backends take turns:\n", flush=True)
    backends = dict.fromkeys([options.backend, "gloo"])
    return bench.main(
        ["all_reduce,broadcast,all_gather,all_to_all,barrier", "--backend", ",".join(backends)]
        + ["--nproc", str(options.ranks), "--rounds", str(options.rounds)]
        + ["-b", "4K", "-e", "16M", "-f", "64", "--plot", ""]
    )
