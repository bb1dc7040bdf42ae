"""mycoll: a torch.distributed backend for CPU and CUDA tensors.

    import torch.distributed as dist

    dist.init_process_group("mycoll")

`import torch` registers the backend by itself; `import mycoll` does the same where torch's autoload
is switched off. `mycoll.spawn` runs a function on several ranks of this machine. The compiled
module is loaded when a group is first made, or an attribute is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mycoll._registration import autoload, native
from mycoll._version import __version__

if TYPE_CHECKING:
    from mycoll._C import Options
    from mycoll.launch import SpawnError, spawn

__all__ = ["Options", "SpawnError", "__version__", "spawn"]

autoload()


def __getattr__(name: str) -> Any:
    if name == "Options":
        return native().Options
    if name in ("spawn", "SpawnError"):
        from mycoll import launch

        return getattr(launch, name)
    raise AttributeError(f"module 'mycoll' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
