"""Fault tests: kill, stop, disconnect or misuse real processes, and measure the others.

`./dev faults` runs them on mycoll (over shared memory and over tcp) and on gloo, and writes
docs/reliability.md. They take minutes, so they are not part of the test suite; `test_faults.py`
runs the cheapest of them.

Modules: `harness` (Stage, Judge, Seen), `deaths`, `elastic`, `stalls`, `network`, `misuse`,
`lifecycle`, `strangers` (the scenarios), `report` (the table). A scenario gets a `Stage` and
returns an `Outcome`, which lists the expectations that were not met.
"""
