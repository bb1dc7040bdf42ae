"""Functional collectives, and those of torch.distributed.nn with gradients."""

from __future__ import annotations

import pytest
from jobs.functional import functional, gradients


@pytest.mark.worlds(1, 2, 3)
def test_functional_collectives(world):
    world.run(functional)


@pytest.mark.worlds(2, 3)
def test_collectives_with_gradients(world):
    world.run(gradients)
