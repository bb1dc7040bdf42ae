"""Training with the model on a device: DDP and its hooks, FSDP2, groups of the device."""

from __future__ import annotations

import pytest
from jobs import ddp as training
from jobs import fsdp
from jobs.on_device import native
from worlds.worker import Ctx


def ddp(ctx: Ctx) -> str:
    with ctx.device:
        return training.ddp(ctx)


@pytest.mark.worlds(1, 2)
def test_ddp_on_device(device_world):
    digests = device_world.run(ddp)
    assert len(set(digests)) == 1, "the weights of the ranks differ"


@pytest.mark.parametrize("job", [training.accumulated, fsdp.fsdp2], ids=lambda job: job.__name__)
@pytest.mark.worlds(2)
def test_more_training_on_device(device_world, job):
    device_world.run(native, job.__module__, job.__name__)
