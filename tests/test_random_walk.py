"""Seeded random sequences of operations, the same on all ranks, whose results are checked.

To repeat a run: `pytest tests/test_random_walk.py --seed N`.
"""

from __future__ import annotations

import pytest
from jobs.walk import walk


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed = metafunc.config.getoption("--seed")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", [seed] if seed is not None else [1, 2, 3])


@pytest.mark.worlds(1, 2, 3, 4, 5, tcp=(3,))
def test_random_walk(world, seed):
    world.run(walk, seed, deadline=90)


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_walk_in_small_rounds(fresh, ranks):
    """With small chunks, an operation takes hundreds of rounds of shared memory."""
    env = {"MYCOLL_CHUNK_BYTES": "4096", "MYCOLL_SMALL_BYTES": "100"}
    fresh(ranks, "shm", env=env).run(walk, 4, deadline=90)


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_walk_by_single_copy(fresh, mycoll_only, ranks):
    """The ranks read each other's ordinary tensors through the kernel."""
    fresh(ranks, "shm", env=(("MYCOLL_SINGLE_COPY", "on"),)).run(walk, 5, deadline=90)
