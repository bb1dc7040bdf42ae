"""python -m worlds.program DEVICE PATH MODULE [ARGUMENTS]: runs the module as a program on a rank
of a launcher, with this device and path of worlds.device."""

from __future__ import annotations

import os
import runpy
import sys

from worlds import device


def main() -> None:
    kind, path, module, *arguments = sys.argv[1:]
    os.environ.update(device.environment(kind, path, int(os.environ.get("RANK", "0"))))
    if kind == "standin":
        device.start(kind, path, int(os.environ.get("LOCAL_RANK", "0")))
    else:
        device.rehearse()

    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
