"""DistributedDataParallel and FSDP2 while the ranks of the job change: torch's reconfigure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds.crew import Crew

pytestmark = [
    pytest.mark.usefixtures("mycoll_only"),
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "reconfigure"), reason="torch has it since 2.14"
    ),
]

PATIENCE = timedelta(seconds=30)
Gradients = list[torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def gradients(of: nn.Module, value: float) -> Gradients:
    """Gradients that are proportional to the value, so their mean is that of the mean value."""
    of.zero_grad()
    (of(torch.ones(3, 8)).square().mean() * value).backward()
    found: Gradients = []
    for parameter in of.parameters():
        grad = parameter.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return found


def begin(pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "mycoll",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=PATIENCE,
        enable_reconfigure=True,
    )
    pipe.send(dist.distributed_c10d._get_reconfigure_handle())


def change_ranks(uuid: int, handles: list[str]) -> None:
    dist.distributed_c10d._reconfigure(uuid=uuid, handles=handles, timeout=PATIENCE).wait()


def train_with_ddp(pipe: Connection, value: float) -> None:
    begin(pipe)
    parallel: Any = None
    while (command := pipe.recv()) is not None:
        if command == "make":
            parallel = DistributedDataParallel(model())
        elif command != "step":
            change_ranks(*command)
            continue
        try:
            pipe.send(gradients(parallel, value))
        except dist.DistBackendError as error:
            pipe.send(str(error))


def train_with_fsdp(pipe: Connection, value: float) -> None:
    """Keeps all parameters after each step, because those of a killed rank are lost."""
    begin(pipe)
    sharded = model()
    kept = sharded.state_dict()
    while (command := pipe.recv()) is not None:
        if command == "make":
            sharded = model()
            sharded.load_state_dict(kept)
            fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        elif command != "step":
            change_ranks(*command)
            continue
        try:
            found = gradients(sharded, value)
            kept = {name: part.full_tensor() for name, part in sharded.state_dict().items()}
            pipe.send(found)
        except dist.DistBackendError as error:
            pipe.send(str(error))


class Trainers(Crew):
    """Processes with the values 1, 2, 4, 8, and so on."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program
        self.handles: dict[int, str] = {}
        self.uuid = 0

    def enlist(self, count: int) -> None:
        for _ in range(count):
            number = self.start(self.program, 2.0 ** len(self.handles))
            self.handles[number] = self.receive(number)

    def change_ranks(self, members: Sequence[int]) -> None:
        self.uuid += 1
        for number in members:
            self.send(number, (self.uuid, [self.handles[each] for each in members]))

    def answers(self, command: str) -> list[Any]:
        for number in self.living:
            self.send(number, command)
        return [self.receive(number) for number in self.living]

    def check(self, command: str) -> None:
        """All ranks get the mean of all gradients, with the same bits."""
        numbers = self.living
        mean = sum(2.0**number for number in numbers) / len(numbers)
        expected = [mean * each for each in gradients(model(), 1.0)]
        answers = self.answers(command)
        for found in answers:
            assert isinstance(found, list), found
            for ours, first, right in zip(found, answers[0], expected, strict=True):
                assert torch.equal(ours, first)
                torch.testing.assert_close(ours, right)


def is_loss(answers: list[Any]) -> bool:
    return all("has ended" in each or "Connection closed" in each for each in answers)


def test_ddp_continues_with_fewer_ranks() -> None:
    """The same DDP object continues if ranks leave between steps. It must be made again after a
    step that failed, because torch would divide the next sum by the former number of ranks (over
    gloo, too), and when ranks have joined, because its constructor communicates."""
    with Trainers(train_with_ddp) as crew:
        crew.enlist(4)
        crew.change_ranks([0, 1, 2, 3])
        crew.check("make")
        crew.check("step")
        crew.kill([0])
        crew.change_ranks([3, 1, 2])
        crew.check("step")
        crew.check("step")
        crew.kill([3])
        assert is_loss(crew.answers("step"))
        crew.change_ranks([1, 2])
        crew.check("make")
        crew.check("step")
        crew.enlist(1)
        crew.change_ranks([2, 4, 1])
        crew.check("make")


def test_fsdp_is_made_again_from_kept_parameters() -> None:
    with Trainers(train_with_fsdp) as crew:
        crew.enlist(3)
        crew.change_ranks([0, 1, 2])
        crew.check("make")
        crew.check("step")
        crew.kill([1])
        assert is_loss(crew.answers("step"))
        crew.change_ranks([0, 2])
        crew.check("make")
        crew.check("step")
