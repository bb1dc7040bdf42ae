"""Inputs that make errors visible, and the result that must come out of them.

An element depends on its rank, its index and the round. The period over the index is a prime, so
that data moved by any power of two is seen; a new seed each round shows stale results. Values are
small integers that all partial sums represent exactly, so that a sum has one right answer in any
order; only where a dtype is too coarse for that many ranks is a distance allowed. Imaginary parts
are other integers than the real ones; in products, complex numbers are turned by right angles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_PRIMES = (3, 5, 7, 11, 13, 17, 31, 61, 127, 251)
_BLOCK = 1 << 20
_POISON = 0x5A
_QUARTER_TURNS = torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128)


@dataclass(frozen=True)
class Pattern:
    """The inputs of all ranks for one call, and its results."""

    dtype: torch.dtype
    redop: str
    ranks: int
    seed: int

    @property
    def _is_rounded(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def _exact_integers(self) -> int:
        """Integers up to this one have no rounding in the dtype."""
        if self.dtype == torch.bool:
            return 2
        if self._is_rounded:
            return int(2 / torch.finfo(self.dtype).eps)
        return int(torch.iinfo(self.dtype).max)

    @property
    def _period(self) -> int:
        """The period over the index. To verify a result, one period is enough."""
        if self.dtype == torch.bool:
            return 7
        if self.redop == "prod":
            return 5
        summands = self.ranks if self.redop in ("sum", "avg") else 1
        fitting = [prime for prime in _PRIMES if prime * summands <= self._exact_integers]
        return fitting[-1] if fitting else _PRIMES[0]

    def values(self, rank: int, begin: int) -> torch.Tensor:
        """One period of a rank's input, from element begin on, as int64 or complex128."""
        index = torch.arange(begin, begin + self._period, dtype=torch.int64)
        # Neither factor is a multiple of a period: every rank and every round differs.
        mixed = (index + 19 * rank + 23 * self.seed) % self._period
        if self.dtype == torch.bool:
            return ((mixed == 1) | (mixed == 2) | (mixed == 4)).to(torch.int64)
        if self.redop == "prod":
            # Powers of two from few ranks, signs from the others: the product stays exact.
            lengths = 1 + (mixed == 0).to(torch.int64) * (1 if rank < 6 else -2)
            return lengths * _QUARTER_TURNS[mixed % 4] if self.dtype.is_complex else lengths
        if self.dtype.is_complex and self.redop not in ("min", "max"):  # these have no order
            return torch.complex(mixed.double(), ((2 * mixed + 1) % self._period).double())
        return mixed

    def reduced(self, begin: int) -> torch.Tensor:
        """One period of what reducing all inputs gives, before rounding to the dtype."""
        functions = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
        function = functions.get(self.redop, torch.add)
        result = self.values(0, begin)
        for rank in range(1, self.ranks):
            result = function(result, self.values(rank, begin))
        if self.redop != "avg":
            return result
        if self._is_rounded:
            return result.to(self._wide) / self.ranks
        return torch.div(result, self.ranks, rounding_mode="trunc")

    def fill(self, tensor: torch.Tensor, rank: int) -> None:
        """Writes a rank's input."""
        for begin, block in _blocks(tensor):
            block.copy_(_tiled(self.values(rank, begin).to(self.dtype), block.numel()))

    def wrong_reduced(self, tensor: torch.Tensor, offset: int) -> int:
        """Elements that differ from the reduction of elements [offset, offset + numel)."""
        return sum(
            self._differing(block.cpu(), self.reduced(offset + begin))
            for begin, block in _blocks(tensor)
        )

    def wrong_copy(self, tensor: torch.Tensor, rank: int, offset: int = 0) -> int:
        """Elements that differ from a rank's input starting at an offset."""
        return sum(
            _different_bits(block.cpu(), self.values(rank, offset + begin).to(self.dtype))
            for begin, block in _blocks(tensor)
        )

    @property
    def _wide(self) -> torch.dtype:
        return torch.complex128 if self.dtype.is_complex else torch.float64

    def _differing(self, found: torch.Tensor, period: torch.Tensor) -> int:
        if self.dtype.is_complex:
            # The sign of a zero in a complex product hangs on the order: adding 0 makes it +.
            found, period = found + 0, period + 0
        if self._distance() == 0:
            return _different_bits(found, period.to(self.dtype))
        expected = _tiled(period, found.numel()).to(self._wide)
        distance = (found.to(self._wide) - expected).abs()
        return int((~(distance <= self._distance() * expected.abs())).sum())

    def _distance(self) -> float:
        """Relative distance allowed: none where every partial result is exact."""
        if not self._is_rounded:
            return 0.0
        step = torch.finfo(self.dtype).eps
        if self.redop in ("sum", "avg") and self._period * self.ranks > self._exact_integers:
            return step * self.ranks  # sums are rounded
        return 2 * step if self.redop == "avg" else 0.0


def poison(tensor: torch.Tensor) -> None:
    """Marks an output, so that an element that was not written is wrong."""
    tensor.view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else _POISON)


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces with the index of their first element: references need not be as large as results."""
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), _BLOCK):
        yield begin, flat[begin : begin + _BLOCK]


def _tiled(period: torch.Tensor, count: int) -> torch.Tensor:
    return period.repeat(-(-count // period.numel()))[:count]


def _different_bits(found: torch.Tensor, period: torch.Tensor) -> int:
    """Elements whose bytes differ: distinguishes NaNs and signed zeros.

    A bool is true if its byte is not 0, as for torch: gloo adds the bytes of bools.
    """
    expected = _tiled(period, found.numel())
    if found.dtype == torch.bool:
        return int(((found.view(torch.uint8) != 0) != expected).sum())
    different = found.contiguous().view(torch.uint8) != expected.view(torch.uint8)
    if not bool(different.any()):
        return 0
    return int(different.view(found.numel(), -1).any(-1).sum())
