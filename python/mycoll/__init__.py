"""mycoll: a torch.distributed backend for CPU and CUDA tensors.

    import torch.distributed as dist

    dist.init_process_group("mycoll")

`import torch` registers the backend by itself; `import mycoll` does the same where torch's autoload
is switched off. `mycoll.spawn` runs a function on several ranks of this machine. The compiled
module is loaded when a group is first made, or an attribute is used.
"""

from __future__ import annotations

import importlib
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from mycoll._native import native
from mycoll._registration import autoload, is_called_later
from mycoll._version import __version__ as __version__

if TYPE_CHECKING:
    from mycoll._C import ArgumentError as ArgumentError
    from mycoll._C import Options as Options
    from mycoll._C import PutOptions as PutOptions
    from mycoll._C import SignalOptions as SignalOptions
    from mycoll._C import WaitSignalOptions as WaitSignalOptions
    from mycoll._C import Window as Window
    from mycoll._log import log_to_python as log_to_python
    from mycoll.elastic import ElasticGroup as ElasticGroup
    from mycoll.groups import Endpoint as Endpoint
    from mycoll.groups import new_window as new_window
    from mycoll.groups import process_group as process_group
    from mycoll.launch import SpawnError as SpawnError
    from mycoll.launch import spawn as spawn
    from mycoll.memory import deregister_mem_pool as deregister_mem_pool
    from mycoll.memory import nccl_mem_pool as nccl_mem_pool
    from mycoll.memory import register_mem_pool as register_mem_pool
    from mycoll.shared import empty as empty
    from mycoll.shared import empty_like as empty_like
    from mycoll.shared import shared_tensors as shared_tensors
    from mycoll.shared import zeros as zeros

# The modules of names that are imported when they are used first.
_MODULES = {
    "_C": "ArgumentError Options PutOptions SignalOptions WaitSignalOptions Window",
    "_log": "log_to_python",
    "elastic": "ElasticGroup",
    "groups": "Endpoint new_window process_group",
    "launch": "SpawnError spawn",
    "memory": "deregister_mem_pool nccl_mem_pool register_mem_pool",
    "shared": "empty empty_like shared_tensors zeros",
}

__all__ = ["__version__", "dump_trace", *" ".join(_MODULES.values()).split()]

if not is_called_later():
    autoload()


def dump_trace(path: str | PathLike[str] | None = None) -> str:
    """Writes the last operations of this process to a file, which `mycoll trace` reads.

    Any thread may call it at any time, without disturbing the group.

    Args:
        path: The file; `None`: where a failure would write it, MYCOLL_TRACE_FILE.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: The file cannot be written.

    Example:
        path = mycoll.dump_trace(f"/tmp/trace/rank_{dist.get_rank()}")
    """
    return str(native().dump_trace("" if path is None else fspath(path)))


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            whole = native() if module == "_C" else importlib.import_module(f"mycoll.{module}")
            return getattr(whole, name)
    raise AttributeError(f"module 'mycoll' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
