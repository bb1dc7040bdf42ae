"""`mycoll plan`: from the code that runs, for clusters that nobody has here."""

from __future__ import annotations

import pytest
from mycoll import plan
from mycoll._native import native

LAN = (25e9 / 8, 50e-6)


def cost(operation: str, hosts: list[int], size: int, element: int = 4) -> dict[str, float]:
    whole, _ = native()._plan_cost(operation, hosts, size, element, 4, *LAN)
    return whole


def test_bytes_are_the_least_that_a_host_can_send():
    size = 64 << 20
    for hosts in (2, 4, 16):
        share = (hosts - 1) / hosts
        for operation, least in (
            ("all_reduce", 2 * share),
            ("reduce_scatter", share),
            ("broadcast", 1),
            ("reduce", 1),
        ):
            sent = cost(operation, [8] * hosts, size)["sent"]
            assert 0.99 * least <= sent / size <= 1.02 * least, (operation, hosts)


def test_the_clock_knows_the_link():
    """A small call takes the latency, a large one what its bytes take on the link."""
    latency = cost("all_reduce", [1, 1], 4)["seconds"]
    assert 50e-6 < latency < 100e-6
    size = 256 << 20
    link = 2 * size * 3 / 4 / LAN[0]
    assert link < cost("all_reduce", [8] * 4, size)["seconds"] < 3 * link


def test_a_block_of_ranks_saves_bytes(capsys):
    words = ["all_reduce", "--hosts", "2", "--ranks", "12"]
    assert plan.main(words) == 0
    assert "MYCOLL_SUM_BLOCK=3" in capsys.readouterr().out
    assert plan.main([*words[:-1], "8"]) == 0
    assert "MYCOLL_SUM_BLOCK" not in capsys.readouterr().out


def test_half_floats_travel_wide_where_a_host_adds_up():
    size = 16 << 20
    wide = cost("all_reduce", [4, 4], size, 2)["sent"]
    assert 1.4 * size < wide < 1.6 * size


def test_the_page(capsys):
    words = [
        "all_reduce",
        "--hosts",
        "4",
        "--ranks",
        "8",
        "--size",
        "64M",
        "--bandwidth",
        "25G",
        "--latency",
        "50us",
    ]
    assert plan.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("all_reduce of 64 MiB float32, 32 ranks on 4 hosts: ")
    assert "a host sends at most  96 MiB" in text
    assert max(map(len, text.splitlines())) <= 80


def test_unequal_hosts(capsys):
    assert plan.main(["broadcast", "--hosts", "2", "--ranks", "3,5", "--size", "1M"]) == 0
    assert "8 ranks on 2 hosts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all_reduce --ranks 3,5 --hosts 3", "--ranks 3,5 does not give 3 hosts"),
        ("all_reduce --size 64X", "'64X' is no size"),
        ("all_reduce --bandwidth fast", "'fast' is no bandwidth"),
        ("all_reduce --latency 5", "'5' is no time"),
        ("all_prod", "invalid choice"),
    ],
)
def test_bad_arguments(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        plan.main(words.split())
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
