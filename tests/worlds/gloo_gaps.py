"""Cases that torch's gloo backend cannot do or does wrong, for `pytest --backend gloo`.

A pattern is matched against test ids, with and without parameters (`test_work.py::test_x[2xgloo]`),
and against names of cases inside a job (`all_reduce/AVG/int8`). A test that matches is skipped
(some of these crash or hang), a case is left out.
"""

from __future__ import annotations

import fnmatch
import functools
from typing import NamedTuple


class Gap(NamedTuple):
    pattern: str
    reason: str


NO_DTYPE = "no such dtype in gloo: Invalid scalar type"
NO_INT_AVG = "divides by a float: result type Float can't be cast"

GAPS: tuple[Gap, ...] = (
    # --- reductions
    *(Gap(f"*/{t}/*", NO_DTYPE) for t in ("int16", "uint16", "uint32", "uint64")),
    *(Gap(f"*/{t}/*", NO_DTYPE) for t in ("float8_e4m3fn", "float8_e5m2")),
    *(Gap(f"*/AVG/{t}/*", NO_INT_AVG) for t in ("int8", "uint8", "int32", "int64")),
    Gap("reduce/untouched", "the other ranks' tensors serve as scratch space"),
    Gap("*/SUM/bool/*", "adds bytes: a bool of 2"),
    Gap("*/PRODUCT/float16/*", "rounds every step to float16: overflows"),
    Gap("narrow/*", "accumulates in the narrow type"),
    Gap("test_reductions.py::test_premul_sum", "no PREMUL_SUM"),
    Gap("test_reductions.py::test_integer_average_truncates", NO_INT_AVG),
    Gap("test_reductions.py::test_bits_do_not_depend_on_message_size", "they do: ring order"),
    Gap("reduce_scatter_tensor/stacked", "concatenated form only"),
    Gap("test_p2p.py::test_to_oneself*", "a rank cannot send to itself"),
    # --- moves
    *(
        Gap(f"every dtype/{t}/*", NO_DTYPE)
        for t in ("bits*", "float[48]_*", "int[1-7]", "int16", "q*", "uint[1-7]", "uint16")
    ),
    *(Gap(f"every dtype/{t}/*", NO_DTYPE) for t in ("complex*", "uint32", "uint64")),
    Gap("gather/complex*", NO_DTYPE),
    Gap("test_moves.py::test_moves*all_gather_uneven]", "takes one shape for that of all"),
    Gap("all_to_all/uneven", "takes the shape of the first tensor for that of all"),
    Gap("all_gather_into_tensor/stacked", "concatenated form only"),
    Gap("all_gather_into_tensor/scalars", "refuses them"),
    *(
        Gap(f"test_layouts.py::{test}", "strided tensors: refused, or silently wrong")
        for test in ("test_layouts", "test_strided_*", "test_expanded_inputs", "*_everywhere")
    ),
    # --- errors
    Gap("errors/ranks/*", "SIGSEGV"),
    Gap("errors/freed/*", "SIGSEGV, or `Bad address` and broken connections"),
    Gap("errors/outputs/*", "writes to memory that several elements share"),
    *(
        Gap(f"errors/{kind}/*", "not checked, or after a sequence number is used up: hangs")
        for kind in ("lists", "shapes", "devices", "meaningless")
    ),
    Gap("test_errors.py::test_destroyed_group", "a destroyed group continues to work"),
    Gap("test_mismatch.py::*", "wrong numbers, a hang or SIGABRT"),
    Gap("test_interrupt.py::*", "Ctrl-C is handled only after the timeout"),
    # --- starting
    Gap("test_fallback.py::*", "specific to mycoll"),
    Gap("test_init.py::test_options", "specific to mycoll"),
    Gap("test_init.py::test_store_in_python", "calls other methods of a store"),
    Gap("test_init.py::test_timeout_of_options", "specific to mycoll"),
    Gap("test_init.py::test_meaningless_timeouts", "a timeout of 0 means not to wait"),
    Gap("test_init.py::test_only_for_cuda", "specific to mycoll"),
    Gap("test_init.py::test_groups_of_two_backends", "specific to mycoll"),
    Gap("test_two_hosts.py::*^lo]", "no exclusions in GLOO_SOCKET_IFNAME"),
    Gap("test_two_hosts.py::test_two_hosts_forced_to_tcp", "has no other transport"),
    Gap("test_two_hosts.py::test_shm_between_hosts_is_refused", "has no other transport"),
    # --- groups
    Gap("test_leaks.py::test_200_groups", "two threads and several descriptors a group"),
    Gap("test_groups.py::test_split_group", "children split together share store keys: hangs"),
    # --- work
    Gap("work/reduce_scatter_tensor", "its Work finishes only in wait() and has no future"),
    Gap("test_work.py::test_work_and_tensors_dropped", "a dropped isend is never sent"),
    # --- coalescing
    Gap("_coalescing_manager/device", "no startCoalescing"),
    Gap("test_coalesced.py::test_coalescing_manager_of_mixed_ops", "no startCoalescing"),
    Gap("test_coalesced.py::test_an_exception_in_a_block*", "an exception leaves the block open"),
    Gap("test_coalesced.py::test_nested_blocks*", "no startCoalescing"),
    Gap("test_coalesced.py::test_blocks_of_two_threads*", "no startCoalescing"),
)


@functools.cache
def reason(name: str) -> str | None:
    for gap in GAPS:
        if fnmatch.fnmatchcase(name, gap.pattern):
            return gap.reason
    return None
