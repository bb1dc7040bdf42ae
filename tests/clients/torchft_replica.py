"""A replica that trains with torchft, for test_torchft.py. Replica 2 kills itself during a step.
The others record their attempts at each step, and compare their weights with those that one process
computes.

    python torchft_replica.py ddp|diloco adapter|native NUMBER STORE_PORT
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections import Counter
from datetime import timedelta
from typing import Any

import mycoll
import torch
import torch.distributed as dist
from common import RATE, data, model
from mycoll.adapters.torchft import ProcessGroupMycoll
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

STEPS, REPLICAS = 5, 3
LOST, VICTIM = 2, 2
TIMEOUT = timedelta(seconds=120)
INNER = 2  # inner steps of DiLoCo for each outer step


class Replica(Manager):
    """Records each attempt at a step. The victim dies at its second all_reduce of step LOST, so
    that the first one has completed on the others."""

    def __init__(self, number: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._number = number
        self._calls: Counter[int] = Counter()
        # The step, whether it was committed, and with how many replicas.
        self.attempts: list[tuple[int, bool, int]] = []

    def allreduce(self, *arguments: Any, **options: Any) -> Any:
        step = self.current_step()
        self._calls[step] += 1
        if self._number == VICTIM and step == LOST and self._calls[step] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allreduce(*arguments, **options)

    def should_commit(self, *arguments: Any, **options: Any) -> bool:
        step = self.current_step()
        committed = super().should_commit(*arguments, **options)
        self.attempts.append((step, committed, self.num_participants()))
        return committed


def learn(net: nn.Module, number: int, step: int) -> None:
    x, y = data(number, step)
    nn.functional.mse_loss(net(x), y).backward()


def train_ddp(manager: Replica, net: nn.Module, number: int) -> None:
    """Trains with several buckets. DDP calls torchft's hook for each."""
    wrapped = DistributedDataParallel(manager, net, bucket_cap_mb=1e-4)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=RATE))
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        learn(wrapped, number, manager.current_step())
        optimizer.step()


def expected_ddp(_: int) -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        replicas = REPLICAS if step < LOST else REPLICAS - 1
        for number in range(replicas):
            learn(net, number, step)
        for each in net.parameters():
            assert each.grad is not None
            each.grad /= replicas
        optimizer.step()
    return net


def fragments(net: nn.Module) -> list[nn.Module]:
    return [each for each in net.children() if list(each.parameters())]


def outer(fragment: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(fragment.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def train_diloco(manager: Replica, net: nn.Module, number: int) -> None:
    """Streaming DiLoCo averages one fragment of the model in each outer step."""
    parts = fragments(net)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    outers: Any = [outer(each) for each in parts]
    with DiLoCo(manager, parts, inner, outers, sync_every=INNER * len(parts)):
        step = 0
        while manager.current_step() < STEPS:
            inner.zero_grad()
            learn(net, number, step)
            inner.step()
            step += 1
    assert step == INNER * len(manager.attempts)


def expected_diloco(replica: int) -> nn.Module:
    """The final weights of this replica. The fragment that was not averaged last includes inner
    steps of this replica alone."""
    common = model()
    parts = fragments(common)
    outers = [outer(each) for each in parts]
    nets = [copy.deepcopy(common) for _ in range(REPLICAS)]
    step = attempts = 0
    while step < STEPS:
        for at in range(INNER * attempts, INNER * (attempts + 1)):
            for number, net in enumerate(nets):
                net.zero_grad()
                learn(net, number, at)
                with torch.no_grad():
                    for each in net.parameters():
                        assert each.grad is not None
                        each -= RATE * each.grad
        attempts += 1
        chosen = step % len(parts)
        if step == LOST and len(nets) == REPLICAS:
            nets.pop()  # the others return to the common weights
        else:
            locals_ = [list(fragments(net)[chosen].parameters()) for net in nets]
            for index, each in enumerate(parts[chosen].parameters()):
                moved = [each.detach() - own[index].detach() for own in locals_]
                each.grad = torch.stack(moved).mean(0)
            outers[chosen].step()
            step += 1
        for net in nets:
            fragments(net)[chosen].load_state_dict(parts[chosen].state_dict())
    return nets[replica]


def main(program: str, kind: str, number: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    lighthouse = None
    if number == 0:
        # The lighthouse waits for all replicas that send heartbeats, even if they are slow.
        lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=REPLICAS - 1, join_timeout_ms=60_000
        )
        store.set("lighthouse", lighthouse.address())
    # torchft stores the addresses of a replica's ranks in a store of that replica.
    own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if kind == "native":
        group = mycoll.process_group(
            dist.HashStore(), 0, 1, timeout=TIMEOUT, enable_reconfigure=True
        )
    else:
        group = ProcessGroupMycoll(timeout=TIMEOUT)
    net = model()
    manager = Replica(
        number,
        pg=group,
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        min_replica_size=REPLICAS - 1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own_store.port,
        lighthouse_addr=store.get("lighthouse").decode(),
        replica_id=f"replica{number}",
        init_sync=False,  # all start with the same weights
        use_async_quorum=program == "ddp",  # DiLoCo does not support it
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    )

    def wait_for_all(name: str, replicas: int) -> None:
        if store.add(name, 1) == replicas:
            store.set(f"{name}: all", "")
        store.wait([f"{name}: all"], TIMEOUT)

    wait_for_all("begin", REPLICAS)  # all have registered with the lighthouse
    {"ddp": train_ddp, "diloco": train_diloco}[program](manager, net, number)
    assert group.size() == REPLICAS - 1
    wanted = {"ddp": expected_ddp, "diloco": expected_diloco}[program](number)
    for got, want in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-5)
    print("attempts:", json.dumps(manager.attempts), flush=True)
    wait_for_all("end", REPLICAS - 1)
    manager.shutdown(wait=False)
    group.shutdown()
    wait_for_all("closed", REPLICAS - 1)
    if lighthouse:
        lighthouse.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
