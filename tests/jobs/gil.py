"""Operations beside a C call that holds the GIL."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from worlds.worker import Ctx


def proceeds(ctx: Ctx, start: Callable[[], list[dist.Work]], keeps: bool) -> None:
    """Operations of rank 0 proceed while a C call holds the GIL. keeps: rank 0 keeps the Works."""
    gil_holder = ctypes.PyDLL(None)
    store = ctx.store("gil")
    for work in start():
        work.wait()
    for round_ in range(8):  # one success is enough, because a slow machine may fail at times
        dist.barrier()
        if ctx.rank == 0:
            works = start()
            if not keeps:
                del works
            store.set(f"holding {round_}", "")
            gil_holder.usleep(400_000)
            has_ended = store.check([f"ended {round_}"])
            if keeps:
                for work in works:
                    work.wait()
        else:
            store.wait([f"holding {round_}"], timedelta(seconds=30))
            time.sleep(0.1)
            for work in start():
                work.wait()
            store.set(f"ended {round_}", "")
            has_ended = True
        verdict = torch.tensor([int(has_ended)])
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        if int(verdict):
            return
    ctx.fail("the operations ended only after the other rank had released the GIL")
