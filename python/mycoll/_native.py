"""The compiled half of mycoll, and names that the Python half shares.

Nothing at the top of this file imports torch, which imports this file while it is being imported.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

NAME = "mycoll"  # of the backend
REPLACE = "MYCOLL_REPLACE"  # "gloo": mycoll takes gloo's place (replace.py)
ENCRYPT = "MYCOLL_ENCRYPT"
CPU = "MYCOLL_CPU"  # "gloo": torch's gloo takes the engine's place (_gloo.py)

_failure: Exception | None = None


def remember(error: Exception) -> None:
    """Keeps an error of the registration, which must not raise, for native() to raise."""
    global _failure
    _failure = _failure or error


def native() -> ModuleType:
    """mycoll._C, loaded on first use.

    Raises:
        ImportError: mycoll is not usable in this process; the message says what to do.
    """
    if _failure is not None:
        raise ImportError(f"mycoll could not register itself: {_failure!r}") from _failure
    from mycoll import _C

    return _C


def unknown_variables() -> list[tuple[str, str]]:
    """MYCOLL_* variables that are set but do not exist, most likely misspelt.

    Returns:
        Each with a hint: the known name that it resembles, or where to find those.
    """
    prefix = "MYCOLL_"
    known = [entry["name"].removeprefix(prefix) for entry in native().environment()]
    given = sorted(name.removeprefix(prefix) for name in os.environ if name.startswith(prefix))
    near = {name: difflib.get_close_matches(name, known, 1) for name in given if name not in known}
    return [
        (prefix + name, f"did you mean {prefix}{found[0]}?" if found else "`mycoll env` lists all")
        for name, found in near.items()
    ]


def native_module() -> ModuleType | None:
    """mycoll._C, or None where it does not load."""
    with contextlib.suppress(ImportError):
        return native()
    return None


def nccl_wheel() -> str:
    """The library of the nvidia-nccl wheel that CUDA builds of torch depend on; '' without one."""
    import torch

    if torch.version.cuda is None:
        return ""
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return str(library)
    return ""
