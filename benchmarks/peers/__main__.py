"""Measures MPIs beside the backends of `mycoll bench`, in the same rounds.

    python benchmarks/peers MPI[,MPI...] OP[,OP...] --nproc N [options of mycoll bench]

MPI is one of: openmpi, mpich, intelmpi, openmpi-tcp, mpich-tcp (those with -tcp use sockets only).
"""

from __future__ import annotations

import sys
from functools import partial

PEERS = ("openmpi", "mpich", "intelmpi", "openmpi-tcp", "mpich-tcp")


def main(words: list[str]) -> int:
    names = words[0].split(",") if words else []
    if not names or not set(names) <= set(PEERS):
        print(__doc__, file=sys.stderr)
        return 2
    from mpi import gather
    from mycoll._terminal import quietly
    from mycoll.bench import main as bench

    return quietly(lambda: bench(words[1:], partial(gather, names)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
