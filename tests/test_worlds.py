"""The harness: its reports when ranks fail, crash or hang."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import arith, warm
from worlds.pool import WorldFailure
from worlds.worker import Ctx

pytestmark = pytest.mark.transports("shm")


def one_raises(ctx: Ctx) -> None:
    if ctx.rank == 1:
        raise ValueError("planted")
    dist.barrier()


def one_dies(ctx: Ctx) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def one_hangs(ctx: Ctx) -> None:
    if ctx.rank == 1:
        with ctx.case("the stuck case"):
            time.sleep(1000)


def cases_fail(ctx: Ctx) -> None:
    for i in range(3):
        with ctx.case(f"case {i}"):
            ctx.same(torch.tensor([1.0, i]), torch.tensor([1.0, 1.0]))


def works(ctx: Ctx) -> int:
    return ctx.rank


@pytest.mark.parametrize(
    ("job", "texts"),
    [
        (one_raises, ("rank 1: ", "ValueError: planted", "one_raises")),
        (one_dies, ("rank 1: ", "SIGKILL")),
        (one_hangs, ("rank 1: no answer", "in case: the stuck case", "one_hangs")),
        (cases_fail, ("rank 0,1: 2 cases failed", "case 0: 1 of 2", "first at 1: 0.0, want 1.0")),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_failures_are_reported(pool, transport, job, texts):
    spec = pool.spec(2, transport)
    world = pool.get(spec)
    with pytest.raises(WorldFailure) as caught:
        world.run(job, deadline=3)
    for text in texts:
        assert text in str(caught.value)
    assert pool.get(spec).run(works) == [0, 1], "the world was made anew"


def test_reference_against_python():
    """Compares the reference arithmetic with Python's."""
    for dtype in arith.INTEGERS:
        bits = torch.iinfo(dtype).bits
        signed = dtype in arith.SIGNED
        parts = [arith.values(dtype, 50, seed) for seed in range(3)]
        columns = list(zip(*(p.tolist() for p in parts), strict=True))

        def wrapped(value: int, bits: int = bits, signed: bool = signed) -> int:
            value &= (1 << bits) - 1
            return value - (1 << bits) if signed and value >> (bits - 1) else value

        def average(column: tuple[int, ...], wrapped=wrapped) -> int:
            total = wrapped(sum(column))
            return abs(total) // 3 * (1 if total >= 0 else -1)

        for op, want in {
            "SUM": lambda c: wrapped(sum(c)),
            "PRODUCT": lambda c: wrapped(c[0] * c[1] * c[2]),
            "MIN": min,
            "MAX": max,
            "AVG": average,
            "BXOR": lambda c: wrapped(c[0] ^ c[1] ^ c[2]),
        }.items():
            got = arith.reduced(op, parts).tolist()
            assert got == [want(c) for c in columns], (dtype, op)


def test_inputs_belong_to_the_caller():
    for dtype in (torch.float32, torch.bool, torch.complex64):
        first, second = (arith.values(dtype, (3, 5), seed=1) for _ in range(2))
        assert torch.equal(first, second) and first.any()
        second.zero_()
        assert torch.equal(arith.values(dtype, (3, 5), seed=1), first)


def is_warm(ctx: Ctx) -> bool:
    return gc.get_freeze_count() > 0 and "torch._dynamo" in sys.modules


def test_servers_are_warm(pool, transport):
    """A missing import would cost each rank a second, without any other effect."""
    assert all(pool.get(pool.spec(2, transport)).run(is_warm))
    text = "import gc; print(gc.get_freeze_count() > 0)"
    assert warm.start(text).communicate(timeout=60)[0] == "True\n"


def test_tests_that_must_not_be_skipped() -> None:
    """As in .ci/run; without CPP_TEST_DIR all programs are skipped."""
    names = [f"tests/test_cpp.py::test_cpp[{name}]" for name in ("base_test", "real_nccl_test")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--must-run", "-p", "no:cacheprovider", *names],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "CPP_TEST_DIR": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 skipped" in done.stdout
    assert "must not be skipped (tests/must_run.txt): Skipped: CPP_TEST_DIR" in done.stdout
