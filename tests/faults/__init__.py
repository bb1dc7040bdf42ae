"""Fault tests: real processes are killed, stopped, cut off or misused, and the others are timed.

`./dev faults` runs them on mycoll (over shared memory and over tcp) and on gloo, and writes
docs/reliability.md. They take minutes, so they are not part of the test suite; `test_faults.py`
has the cheapest of them.

Modules: `harness` (stage, judge, what a rank saw), `deaths`, `elastic`, `stalls`, `network`,
`misuse`, `lifecycle`, `strangers` (the scenarios), `report` (the table). A scenario gets a `Stage`
and returns an `Outcome`; it fails where an expectation is not met, and says which.
"""
