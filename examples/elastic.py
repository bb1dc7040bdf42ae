"""Training that continues without a restart when processes are killed or join.

python examples/elastic.py

The program starts four processes that train with DistributedDataParallel. After a while it kills
two of them, including rank 0, and starts another one. The survivors repeat the step in which a rank
was lost, with their current parameters.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import mycoll
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 400


def share_state(group: dist.ProcessGroup, step: int, tensors: list[torch.Tensor]) -> int:
    """Copies the state of the rank with the most steps to all ranks. Returns its number of
    steps."""
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(steps, torch.tensor([step]), group=group)
    latest = max(range(group.size()), key=lambda rank: steps[rank].item())
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=latest)
    return int(steps[latest])


def train(port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    members = mycoll.ElasticGroup(store, min_ranks=2, ranks=4, timeout=timedelta(seconds=30))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step, generation = 0, 0
    while step < STEPS or members.size < 3:  # the process that joins may be late
        try:
            if generation != members.generation:  # the ranks have changed
                generation = members.generation
                state = [parameter.detach() for parameter in model.parameters()]
                step = share_state(members.group, step, state)
                parallel = DistributedDataParallel(model, process_group=members.group)
                results.put((step, members.rank, members.size, os.getpid()))
            random = torch.Generator().manual_seed(1000 * step + members.rank)
            data = torch.randn(64, 8, generator=random)
            loss = nn.functional.mse_loss(parallel(data), data.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(0.005)  # instead of the computation of a larger model
            members.admit()
        except dist.DistBackendError:
            members.recover()
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    results.put((step, members.rank, members.size, f"{weights:.12f}"))
    members.close()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results = context.Queue()

    def start(count: int) -> None:
        for _ in range(count):
            context.Process(target=train, args=(store.port, results), daemon=True).start()

    def report(count: int) -> list[tuple[int, int, int, Any]]:
        found = sorted((results.get(timeout=120) for _ in range(count)), key=lambda each: each[1])
        step, _, size, _ = found[0]
        print(f"step {step}: {size} ranks", flush=True)
        return found

    start(4)
    ranks = report(4)
    time.sleep(0.5)
    for _, rank, _, pid in (ranks[0], ranks[2]):
        print(f"killing rank {rank}", flush=True)
        os.kill(pid, signal.SIGKILL)
    report(2)
    start(1)
    report(3)
    final = report(3)
    if len({weights for *_, weights in final}) != 1:
        sys.exit(f"the ranks have different parameters: {final}")
    print(f"done: all ranks have the same parameters, sum {final[0][3]}")


if __name__ == "__main__":
    main()
