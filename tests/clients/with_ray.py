"""Ray actors in groups of ray.util.collective. The first rank is the driver. PYTHONPATH contains
examples/."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the home folder

import numpy as np
import ray
import ray_backend
import torch
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective.types import ReduceOp


@ray.remote(num_cpus=0.5)
class Member:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        ray_backend.register()

    def run(self, name: str) -> list:
        collective.init_collective_group(2, self.rank, backend="mycoll", group_name=name)
        assert collective.get_collective_group_size(name) == 2
        total = torch.full((4,), self.rank + 1.0)
        collective.allreduce(total, name)
        product = np.full(3, self.rank + 2.0)
        collective.allreduce(product, name, ReduceOp.PRODUCT)
        own = torch.full((4,), self.rank + 1.0)
        reduced = own.clone()
        collective.reduce(reduced, 1, name, ReduceOp.MAX)
        sent = np.full(2, float(self.rank))
        collective.broadcast(sent, 1, name)
        gathered = [torch.zeros(2), torch.zeros(2)]
        collective.allgather(gathered, torch.full((2,), float(self.rank)), name)
        part = torch.zeros(2)
        collective.reducescatter(part, [torch.full((2,), r + 1.0) for r in range(2)], name)
        message = torch.full((3,), 7.0)
        if self.rank == 0:
            collective.send(message, 1, name)
        else:
            message.zero_()
            collective.recv(message, 0, name)
        collective.barrier(name)
        collective.destroy_collective_group(name)
        found = [total, product, reduced, sent, *gathered, part, message]
        return [value.tolist() for value in found]


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    members = [Member.remote(rank) for rank in range(2)]
    # A rank 0 that was killed while it waited for the others leaves this.
    internal_kv._internal_kv_put("mycoll group first", "127.0.0.1:1")
    for name in ("first", "second", "first"):  # a name may be used again
        got = ray.get([member.run.remote(name) for member in members])
        for rank, values in enumerate(got):
            assert values == [
                [3.0] * 4,
                [6.0] * 3,
                [2.0] * 4 if rank == 1 else [1.0] * 4,
                [1.0] * 2,
                [0.0] * 2,
                [1.0] * 2,
                [2.0 * (rank + 1)] * 2,
                [7.0] * 3,
            ], (rank, values)
    print(f"client: ray {ray.__version__}", flush=True)
    ray.shutdown()


if os.environ["RANK"] == "0":
    main()
