"""Cases that NCCL does not support. mycoll refuses them on that path, and jobs omit them there."""

from __future__ import annotations

import fnmatch
import functools

GAPS = (
    # Reductions that ncclDataType_t or ncclRedOp_t does not have.
    "*/int16/*",
    "*/uint16/*",
    "*/BAND/*",
    "*/BOR/*",
    "*/BXOR/*",
    "*/AVG/bool/*",
    # fp8 as numbers needs NCCL 2.24 and a GPU of capability 9.
    "*/float8_e4m3fn/*",
    "*/float8_e5m2/*",
    "narrow/*",  # NCCL may accumulate in another type
    # The product of two of the three inputs overflows, and NCCL may multiply these first.
    "reduce/PRODUCT/float16/4099",
)


@functools.cache
def skips(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, gap) for gap in GAPS)
