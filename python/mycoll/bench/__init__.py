"""`mycoll bench`: measures and verifies collectives of any torch.distributed backend.

How to read its output, and how it measures, is in benchmarks/README.md. The command line is here;
it imports torch only when ranks start.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mycoll import launch
from mycoll._gloo import keep_names_honest
from mycoll._terminal import Progress
from mycoll.bench.compare import compare_main
from mycoll.bench.options import Options, parse_options
from mycoll.bench.report import misused, wrong_files

if TYPE_CHECKING:
    from mycoll.bench.run import Gather


def main(arguments: list[str], gather: Gather | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: The words after the name of the command.
        gather: Finds the contenders, instead of those that the words name.

    Returns:
        The exit code: 0 only if everything was measured, and no result was wrong.
    """
    if arguments[:1] == ["compare"]:
        return compare_main(arguments[1:])
    options = parse_options(arguments)
    if options.nproc:
        return _start_ranks(options, arguments, gather)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return misused("add --nproc N to start N ranks here, or run it under torchrun")
    from mycoll.bench.run import run_rank

    return run_rank(options, arguments, gather)


def _start_ranks(options: Options, arguments: list[str], gather: Gather | None) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers' variables may be exported
        how = "torchrun has started the ranks already; leave --nproc out"
        return misused(how, is_shown=os.environ.get("RANK") == "0")
    if wrong := wrong_files(options):
        return misused(wrong)
    keep_names_honest("mycoll bench")
    Progress().show(f"starting {options.nproc} ranks ...")  # rank 0 clears the line
    from mycoll.bench.run import run_rank

    # The ranks agree with each other by gloo: a backend that is measured may fail.
    return launch.run_command(
        "mycoll bench", run_rank, options.nproc, (options, arguments, gather), backend="gloo"
    )
