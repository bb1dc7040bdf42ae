"""Finds the compiled module for the running torch."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from mycoll._version import SUPPORTED_TORCH


class NotUsable(ImportError):
    """mycoll cannot be used here. `problem` and `fix` are the parts of the message."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


def load() -> ModuleType:
    """Returns the compiled module for the running torch, for mycoll._C to become.

    Each minor of torch has its own module in a folder: the virtual functions of torch's C++ classes
    differ between minors, and a module for another minor loads without an error and then crashes.

    Raises:
        NotUsable: There is no module for this system or this torch.
    """
    import torch

    if sys.platform != "linux":
        raise NotUsable(
            f"mycoll works on Linux, and this is {sys.platform}",
            "with MYCOLL_CPU=gloo, groups called mycoll are torch's gloo",
        )
    running = ".".join(torch.__version__.split(".")[:2])
    here = Path(__file__).parent
    folders = {each.name.removeprefix("torch"): each for each in here.glob("torch[0-9]*")}
    built = sorted(folders, key=_numbers)
    oldest, newest = SUPPORTED_TORCH
    is_supported = oldest <= _numbers(running) <= newest
    supported = f"mycoll supports torch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    build = "run `pip install --no-build-isolation .` in its source folder"
    if built and running not in folders:
        problem = (
            f"this mycoll was compiled for torch {', '.join(built)} and cannot work with torch "
            f"{torch.__version__}"
        )
        fix = f"{build}, or install torch {built[-1]}"
        if not is_supported:
            fix = f"{supported}: pip install 'torch=={built[-1]}.*'"
        raise NotUsable(problem, fix)
    spec = PathFinder.find_spec("mycoll._C", [str(folders[running])]) if built else None
    if spec is None or spec.loader is None:
        raise NotUsable(
            "mycoll's compiled module is missing",
            build if is_supported else f"{supported}, and this is torch {torch.__version__}",
        )
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NotUsable(f"mycoll's compiled module does not load ({error})", build) from error
    return module


def _numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
