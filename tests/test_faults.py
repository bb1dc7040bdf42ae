"""The cheapest of the fault tests (./dev faults), with limits for a busy machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import deaths, elastic, lifecycle, strangers
from faults.harness import Stage
from worlds import warm

PATIENCE = 10.0  # times the limits of ./dev faults: 10 s instead of 1 s


@pytest.mark.parametrize(
    "scenario",
    [deaths.in_loop, deaths.while_idle, lifecycle.exit_without_destroy, lifecycle.fork],
    ids=lambda scenario: scenario.__name__,
)
def test_fault(pool, mycoll_only, transport, scenario):
    outcome = scenario(Stage(pool, transport, PATIENCE))
    assert outcome.verdict == "pass", "\n".join([*outcome.notes, outcome.sample])


def test_junk_connections(pool, mycoll_only):
    """A short version of scenario 20."""
    outcome = strangers.strangers(Stage(pool, "tcp", PATIENCE), 400)
    assert outcome.verdict == "pass", "\n".join([*outcome.notes, outcome.sample])


def test_an_elastic_group_loses_two_ranks(pool, mycoll_only, transport):
    outcome = elastic.while_recovering(Stage(pool, transport, PATIENCE), times=1)
    assert outcome.verdict == "pass", "\n".join([*outcome.notes, outcome.sample])


@pytest.mark.tools
def test_the_program(tmp_path: Path) -> None:
    results = tmp_path / "faults.json"
    words = f"--only 19a --backend mycoll --transport shm --json {results}".split()
    run = warm.run_module("faults", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = json.loads(results.read_text())["19a"]["mycoll shm"]
    assert [outcome["verdict"] for outcome in outcomes] == ["pass"]
