"""Inputs that each rank can compute, and the expected results of reductions.

A reduction uses one tree over rank numbers, in a wide type for narrow floats, and rounds once at
the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.float16, torch.bfloat16, *FP8)
FLOATS = (torch.float32, torch.float64, *NARROW)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = SIGNED + UNSIGNED
REDUCIBLE = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)

ORDERED = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
BITWISE = ("BAND", "BOR", "BXOR")

_SIGNED_OF = dict(zip(UNSIGNED, SIGNED, strict=True))


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The reduce ops that are defined for a dtype (torch's Python refuses complex products)."""
    if dtype in COMPLEX:
        return ("SUM", "AVG")
    if dtype == torch.bool:
        return ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE)
    if dtype in INTEGERS:
        return ORDERED + BITWISE
    return ORDERED


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reduce_op(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name)


# --- inputs


# Jobs need the same numbers many times, for each operation, mode and root. Making them takes longer
# than sending them.
KEPT_BYTES = 32 << 20
_kept: dict[tuple[torch.dtype, tuple[int, ...], int], torch.Tensor] = {}


# Larger tensors repeat a block of this many random elements, which is much faster. It is a prime,
# so that chunks of a tensor, whose offsets are multiples of powers of two, differ.
PERIOD = 32_749


def values(dtype: torch.dtype, shape: int | Sequence[int], seed: int) -> torch.Tensor:
    """Random values for which order, width and rounding matter, on the default device. The caller
    may change the tensor."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    where = torch.get_default_device()
    with torch.device("cpu"):
        made = _repeated(dtype, shape, seed)
    return made.to(where)


def _repeated(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    numel = math.prod(shape)
    if numel <= PERIOD:
        return _kept_values(dtype, shape, seed).clone()
    block = _kept_values(dtype, (PERIOD,), seed)
    made = torch.empty(shape, dtype=dtype)
    flat = made.view(-1)
    whole = numel // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).copy_(block.expand(numel // PERIOD, PERIOD))
    flat[whole:].copy_(block[: numel - whole])
    return made


def _kept_values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    made = _kept.get((dtype, shape, seed))
    if made is None:
        made = _values(dtype, shape, seed)
        if made.nbytes + sum(each.nbytes for each in _kept.values()) > KEPT_BYTES:
            _kept.clear()
        _kept[dtype, shape, seed] = made
    return made


def _values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype in COMPLEX:
        parts = torch.float32 if dtype == torch.complex64 else torch.float64
        both = _values(parts, (*shape, 2), seed)
        return torch.view_as_complex(both)
    if dtype in FLOATS:
        spread = 3 if dtype in FP8 else 8
        scale = torch.randint(-spread, spread, shape, generator=g).to(torch.float64).exp2()
        uniform = torch.rand(shape, generator=g, dtype=torch.float64)  # cheaper than normal
        return ((2 * uniform - 1) * scale).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).to(torch.bool)
    return random_bytes(dtype, shape, g)


def random_bytes(
    dtype: torch.dtype, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Random bit patterns, for dtypes in which each is a value (or that are only moved)."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    target = raw(tensor)
    target.copy_(torch.randint(0, 256, target.shape, generator=generator, dtype=torch.uint8))
    return tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; shares memory with it if it is contiguous."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    start = tensor.storage_offset() * tensor.element_size()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data.set_(tensor.untyped_storage())
    return data[start : start + tensor.numel() * tensor.element_size()]


# --- reference


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in NARROW else dtype


def reduced(
    op: str, parts: Sequence[torch.Tensor], factors: Sequence[float] | None = None
) -> torch.Tensor:
    """The result of reducing `parts`, which are in rank order. Computed on the CPU, because a GPU
    divides by multiplying with the reciprocal."""
    parts = [part.cpu() for part in parts]
    dtype = parts[0].dtype
    if op == "PREMUL_SUM":
        assert factors is not None
        scaled = [(p.to(wide_of(dtype)) * f).to(dtype) for p, f in zip(parts, factors, strict=True)]
        return reduced("SUM", scaled)
    if dtype == torch.bool:
        return _reduced_bool(op, parts)
    if dtype in _SIGNED_OF and dtype != torch.uint8:
        return _reduced_unsigned(op, parts)
    wide = wide_of(dtype)
    total = _tree(_pair(op), [p.to(wide) for p in parts])
    if op == "AVG":
        n = len(parts)
        total = _average(total, n)
    return total.to(dtype)


def _tree(pair: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Splits at the largest power of two below their number, as docs/performance.md documents."""
    if len(parts) == 1:
        return parts[0]
    below = 1 << ((len(parts) - 1).bit_length() - 1)
    return pair(_tree(pair, parts[:below]), _tree(pair, parts[below:]))


def _average(total: torch.Tensor, n: int) -> torch.Tensor:
    if total.dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(total) / n)
    if total.dtype.is_floating_point:
        return total / n
    return torch.div(total, n, rounding_mode="trunc").to(total.dtype)


def _pair(op: str):
    return {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]


def _reduced_bool(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if op in ("SUM", "MAX", "BOR"):
        return functools.reduce(torch.logical_or, parts)
    if op in ("PRODUCT", "MIN", "BAND"):
        return functools.reduce(torch.logical_and, parts)
    assert op == "BXOR"
    return functools.reduce(torch.logical_xor, parts)


def _reduced_unsigned(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch has little arithmetic for these: use the signed type of the same width."""
    dtype = parts[0].dtype
    signed = _SIGNED_OF[dtype]
    views = [p.view(signed) for p in parts]
    if op in ("MIN", "MAX"):
        top = torch.iinfo(signed).min  # flipping the top bit keeps the order
        return (functools.reduce(_pair(op), [v ^ top for v in views]) ^ top).view(dtype)
    total = functools.reduce(_pair(op), views)
    if op == "AVG":
        n, bits = len(parts), torch.iinfo(signed).bits
        # Unsigned division by means of the halved dividend, which is never negative.
        half = torch.bitwise_and(total >> 1, (1 << (bits - 1)) - 1)
        quotient = torch.div(half, n, rounding_mode="trunc").to(signed) << 1
        rest = total - quotient * n
        total = quotient + (rest >= n).to(signed)
    return total.view(dtype)


# --- comparison


def difference(got: torch.Tensor, want: torch.Tensor, exact: bool = True) -> str:
    """Empty if equal; otherwise where and how they differ."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, want {want.dtype}"
    # NumPy, because torch compares byte by byte.
    if got.numel() == 0 or np.array_equal(raw(got).numpy(), raw(want).numpy()):
        return ""
    if got.dtype.is_complex and got.dtype != torch.complex32:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if got.dtype in FLOATS:
        wrong = _wrong_floats(got, want, exact)
    else:
        width = got.element_size()
        wrong = (raw(got).reshape(-1, width) != raw(want).reshape(-1, width)).any(1)
    count = int(wrong.sum())
    if count == 0:
        return ""
    first = int(wrong.reshape(-1).nonzero()[0])
    return (
        f"{count} of {wrong.numel()} elements differ, first at {first}: "
        f"{_shown(got, first)}, want {_shown(want, first)}"
    )


def _wrong_floats(got: torch.Tensor, want: torch.Tensor, exact: bool) -> torch.Tensor:
    eps = torch.finfo(got.dtype).eps
    g, w = got.reshape(-1).to(torch.float64), want.reshape(-1).to(torch.float64)
    nans = g.isnan() & w.isnan()
    if exact:
        # Zeros of either sign are equal here; everything else has one bit pattern per value.
        return (g != w) & ~nans
    scale = w[w.isfinite()].abs().max() if w.isfinite().any() else 1.0
    return ((g - w).abs() > eps * (8 * w.abs() + scale)) & ~nans & (g != w)


def _shown(tensor: torch.Tensor, index: int) -> str:
    flat = tensor.contiguous().reshape(-1)
    try:
        return repr(flat[index].item())
    except (RuntimeError, NotImplementedError):
        width = tensor.element_size()
        return raw(tensor)[index * width : (index + 1) * width].tolist().__repr__()
