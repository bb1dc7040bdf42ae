"""The devices on which a rank has a context."""

from __future__ import annotations

import ctypes

import torch
from worlds import device
from worlds.worker import Ctx


def contexts(ctx: Ctx) -> list[int]:
    if ctx.device.type == "cuda":
        count = torch.cuda.device_count()
        return [index for index in range(count) if torch._C._cuda_hasPrimaryContext(index)]
    library = ctypes.CDLL(str(device.standins() / "libmycoll_standin_device.so"))
    library.mycoll_standin_device_contexts.restype = ctypes.c_uint64
    found = library.mycoll_standin_device_contexts()
    return [index for index in range(64) if found >> index & 1]
