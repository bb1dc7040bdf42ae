"""The cheapest of the fault tests (./dev faults), with limits that a busy machine can keep."""

from __future__ import annotations

import pytest
from faults import deaths, lifecycle, strangers
from faults.harness import Stage

PATIENCE = 10.0  # times the limits of ./dev faults: 10 s instead of 1 s


@pytest.mark.parametrize(
    "scenario",
    [deaths.in_loop, deaths.while_idle, lifecycle.exit_without_destroy, lifecycle.fork],
    ids=lambda scenario: scenario.__name__,
)
def test_fault(pool, backend, transport, scenario):
    if backend != "mycoll":
        pytest.skip("gloo does not promise this")
    outcome = scenario(Stage(pool, transport, PATIENCE))
    assert outcome.verdict == "pass", "\n".join([*outcome.notes, outcome.sample])


def test_junk_connections(pool, backend):
    """The short one of scenario 20."""
    if backend != "mycoll":
        pytest.skip("gloo does not promise this")
    outcome = strangers.strangers(Stage(pool, "tcp", PATIENCE), 400)
    assert outcome.verdict == "pass", "\n".join([*outcome.notes, outcome.sample])
