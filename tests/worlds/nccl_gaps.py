"""What NCCL cannot do, and mycoll refuses on that path: the cases that jobs leave out there."""

from __future__ import annotations

import fnmatch
import functools

GAPS = (
    # Reductions that ncclDataType_t or ncclRedOp_t does not know.
    "*/int16/*",
    "*/uint16/*",
    "*/BAND/*",
    "*/BOR/*",
    "*/BXOR/*",
    "*/AVG/bool/*",
    # fp8 as numbers needs NCCL 2.24 and a GPU of capability 9.
    "*/float8_e4m3fn/*",
    "*/float8_e5m2/*",
    "narrow/*",  # how NCCL accumulates is NCCL's business
    # The product of two of the three overflows, and NCCL may begin with these two.
    "reduce/PRODUCT/float16/4099",
)


@functools.cache
def skips(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, gap) for gap in GAPS)
