"""Parts of `mycoll bench`, in this process: options, patterns, caches, contenders."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

import mycoll
import pytest
import torch
from mycoll._native import native_module
from mycoll._units import parse_size
from mycoll.bench import main
from mycoll.bench import world as worlds
from mycoll.bench.contenders import Contender
from mycoll.bench.options import DTYPES, REDOPS, parse_options, sweep
from mycoll.bench.pairwise import BandwidthWorkload, PingPongWorkload
from mycoll.bench.patterns import Pattern
from mycoll.bench.rounds import History, Measurement, cases
from mycoll.bench.workload import Case, Unsupported, Workload
from worlds.alone import alone
from worlds.spoiled_bench import spoil

_QUICK = ["-n", "2", "-w", "1", "--rounds", "2"]


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("8", 8), ("64K", 65536), ("1.5M", 3 << 19), ("1G", 1 << 30), ("4kib", 4096)],
    )
    def test_sizes(self, text: str, size: int) -> None:
        assert parse_size(text) == size

    def test_a_sweep_ends_where_it_should(self) -> None:
        assert sweep(8, 512, 8) == (8, 64, 512)
        assert sweep(8, 600, 8) == (8, 64, 512, 600)
        assert sweep(8, 64 << 20, 8)[-2:] == (16 << 20, 64 << 20)
        assert sweep(8, 8, 8) == (8,)

    def test_names_known_from_nccl_tests(self) -> None:
        line = "all_reduce,barrier -b 8 -e 1K -f 2 -n 5 -w 1 -d float32,bfloat16 -o sum,max"
        options = parse_options([*line.split(), "--backend", "mycoll,gloo,gloo"])
        assert options.operations == ("all_reduce", "barrier")
        assert options.backends == ("mycoll", "gloo", "gloo#2")
        assert options.sizes == (8, 16, 32, 64, 128, 256, 512, 1024)
        assert (options.iterations, options.warmups) == (5, 1)
        assert options.dtypes == ("float32", "bfloat16")
        assert options.redops == ("sum", "max")

    @pytest.mark.parametrize(
        "options",
        ["-b 9 -e 8", "-e 1T -f 1.00001", f"-e {'9' * 400}", "-f nan", "-f inf", "-f 1"]
        + ["-d float3", "--timeout nan", "--timeout -1", "--device cuda:0"],
    )
    def test_nonsense_is_refused(self, options: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            parse_options(["all_reduce", *options.split()])
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("mycoll bench: ") and "usage: " in message

    def test_without_a_launcher(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("RANK", raising=False)
        assert main(["all_reduce"]) == 2
        assert "--nproc" in capsys.readouterr().err


class TestPatterns:
    @pytest.mark.parametrize("name", DTYPES)
    def test_copies(self, name: str) -> None:
        pattern = Pattern(getattr(torch, name), "none", ranks=4, seed=1)
        tensor = torch.empty(1000, dtype=pattern.dtype)
        pattern.fill(tensor, rank=2)
        assert pattern.wrong_copy(tensor, rank=2) == 0
        assert pattern.wrong_copy(tensor[256:], rank=2, offset=256) == 0
        # A neighbour's data, the same rank's data moved, and the last round's.
        assert pattern.wrong_copy(tensor, rank=1) > 0
        assert pattern.wrong_copy(tensor[256:], rank=2) > 0
        assert replace(pattern, seed=2).wrong_copy(tensor, rank=2) > 0
        spoil(tensor)
        assert pattern.wrong_copy(tensor, rank=2) == 1

    @pytest.mark.parametrize("redop", REDOPS)
    @pytest.mark.parametrize("name", DTYPES)
    def test_reductions(self, name: str, redop: str) -> None:
        dtype = getattr(torch, name)
        pattern = Pattern(dtype, redop, ranks=3, seed=1)
        period = pattern.reduced(0).to(dtype)
        result = period.repeat(1000 // period.numel() + 1)[:1000]
        assert pattern.wrong_reduced(result, 0) == 0
        assert pattern.wrong_reduced(result[128:], 128) == 0
        result[500] = result[500] == 0  # another value in every dtype
        assert pattern.wrong_reduced(result, 0) == 1

    def test_any_byte_but_0_is_true(self) -> None:
        pattern = Pattern(torch.bool, "sum", ranks=2, seed=1)
        added = (pattern.values(0, 0) + pattern.values(1, 0)).to(torch.uint8)
        assert added.max() == 2
        assert pattern.wrong_reduced(added.view(torch.bool), 0) == 0

    def test_a_contribution_that_is_missing(self) -> None:
        pattern = Pattern(torch.float32, "sum", ranks=3, seed=1)
        partial_sum = pattern.values(0, 0) + pattern.values(1, 0)
        assert pattern.wrong_reduced(partial_sum.to(torch.float32), 0) == partial_sum.numel() - 1

    @pytest.mark.parametrize("name", ["complex64", "complex128"])
    def test_imaginary_parts(self, name: str) -> None:
        """Any order of the inputs is correct, and so is either sign of a zero."""

        def result(redop: str, reduce: Callable[..., torch.Tensor], *order: int) -> int:
            pattern = Pattern(getattr(torch, name), redop, ranks=3, seed=1)
            inputs = [torch.empty(1000, dtype=pattern.dtype) for _ in order]
            for rank, tensor in zip(order, inputs):
                pattern.fill(tensor, rank)
            return pattern.wrong_reduced(functools.reduce(reduce, inputs), 0)

        def by_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.view_as_complex(torch.view_as_real(a) * torch.view_as_real(b))

        def real_only(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.complex(a.real + b.real, a.imag)

        assert result("prod", torch.mul, 0, 1, 2) == result("prod", torch.mul, 2, 1, 0) == 0
        assert result("sum", torch.add, 2, 0, 1) == 0
        assert result("prod", by_parts, 0, 1, 2) > 0
        assert result("sum", real_only, 0, 1, 2) > 0


class TestCaches:
    @pytest.mark.parametrize("ranks", [2, 8, 64])
    def test_working_set_exceeds_the_caches(self, ranks: int) -> None:
        world = alone(size=ranks, local_size=ranks, cache_bytes=64 << 20)
        workload = PingPongWorkload(Case("pingpong", 65536, "uint8", "none", -1), world, False)
        assert 2 * workload.arena.windows * workload.touched_bytes >= 2 * world.cache_bytes

    def test_calls_share_no_window_with_the_one_before(self) -> None:
        case = Case("bandwidth", 65536, "uint8", "none", -1)
        workload = BandwidthWorkload(case, alone(size=2, local_size=2, cache_bytes=4 << 20), False)
        beginnings: list[int] = []
        workload.call = lambda index, group: beginnings.append(index)  # type: ignore[method-assign]
        workload.calls(None)  # type: ignore[arg-type]
        assert workload.arena.windows == 33
        assert [index % 33 for index in beginnings[:4]] == [0, 16, 32, 15]
        assert len({index % 33 for index in beginnings}) == len(beginnings) == 33

    def test_caches_of_all_ranks_of_a_host_are_added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each rank is bound to a core with its own cache."""

        def gather(boxes: list[object], mine: object) -> None:
            boxes[:] = [(socket.gethostname(), [0]), (socket.gethostname(), [1]), ("other", [2])]

        for name, stub in {
            "init_process_group": lambda *_, **__: None,
            "get_world_size": lambda: 3,
            "get_rank": lambda: 0,
            "all_gather_object": gather,
        }.items():
            monkeypatch.setattr(worlds.dist, name, stub)
        monkeypatch.setattr(worlds.gc, "disable", lambda: None)
        monkeypatch.setattr(worlds, "last_level_cache_bytes", lambda cpus: 32 * len(cpus))
        world = worlds.join(parse_options(["barrier"]))
        assert (world.cache_bytes, world.local_size, world.hosts) == (64, 2, 2)


class TestContenders:
    def test_a_contender_that_dies_is_left_out(self) -> None:
        class Steady(Contender):
            rounds = 0

            def prepare(self, workload: Workload) -> None:
                pass

            def run(self, warmups: int, iterations: int) -> list[list[int]]:
                return [[1000] * iterations]

        class Dying(Steady):
            def run(self, warmups: int, iterations: int) -> list[list[int]]:
                self.rounds += 1
                if self.rounds == 2:
                    raise Unsupported("it is dead")
                return super().run(warmups, iterations)

        world = alone()
        options = parse_options(["barrier", "--backend", "steady", *_QUICK])
        contenders = [Dying("dying", "peer", world), Steady("steady", "backend", world)]
        (case,) = cases(options, "barrier")
        measurement = Measurement(case, contenders, world, options, History())
        assert [row.contender for row in measurement.run()] == ["steady"]
        assert measurement.notes == ["dying: it is dead"]


def test_a_number_that_is_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["all_reduce", "--nproc", "abc"])
    assert "'abc' is not a whole number" in capsys.readouterr().err


def test_a_build_for_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_module() is not None
    monkeypatch.delitem(sys.modules, "mycoll._C")
    monkeypatch.delattr(mycoll, "_C")
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    assert native_module() is None
