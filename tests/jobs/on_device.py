"""Jobs that were written for CPU tensors, with their tensors on a device."""

from __future__ import annotations

import importlib

from worlds import device
from worlds.worker import Ctx


def mirrored(ctx: Ctx, module: str, name: str, *args: object) -> None:
    with device.on_device(ctx.device):
        getattr(importlib.import_module(module), name)(ctx, *args)


def native(ctx: Ctx, module: str, name: str, *args: object) -> None:
    with ctx.device:
        getattr(importlib.import_module(module), name)(ctx, *args)
