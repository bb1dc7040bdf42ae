"""mycoll doctor: a healthy machine, and what it says about sick ones."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mycoll import _interfaces, doctor
from mycoll._interfaces import Interface

ETH, BRIDGE, LO = (
    Interface("eth0", "10.0.0.3", False),
    Interface("docker0", "172.17.0.1", False),
    Interface("lo", "127.0.0.1", True),
)


@pytest.fixture(autouse=True)
def clean(monkeypatch, backend):
    for name in list(os.environ):
        if name.startswith("MYCOLL_"):
            monkeypatch.delenv(name)


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mycoll", "doctor", *options]
    return subprocess.run(
        command, env=dict(os.environ, **env), capture_output=True, text=True, timeout=200
    )


def only(check) -> doctor.Finding:
    return doctor.examine(check)[-1]


def test_healthy_machine():
    done = run("--json", MYCOLL_TRANPORT="tcp")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    rows = report["findings"]
    tests = [row["text"] for row in rows if row["name"] == "self-test"]
    assert len(tests) == 2 and all("0 wrong" in text for text in tests), tests
    misspelt = next(row for row in rows if "MYCOLL_TRANPORT" in row["text"])
    assert misspelt["status"] == "WARN"
    assert misspelt["fix"] == "did you mean MYCOLL_TRANSPORT?"
    assert all(row["fix"] for row in rows if row["status"] != "ok")


def test_sick_machine():
    done = run(MYCOLL_SOCKET_IFNAME="=nosuch", MYCOLL_SMALL_BYTES="many")
    assert done.returncode == 1
    assert "export MYCOLL_SOCKET_IFNAME=" in done.stdout
    assert "MYCOLL_SMALL_BYTES=many is not valid" in done.stdout
    assert done.stdout.count(" FAIL\n") == 3, done.stdout


def test_wrong_torch(monkeypatch):
    def native():
        raise ImportError("compiled for torch 2.1: run `pip install --no-build-isolation .` again")

    monkeypatch.setattr(doctor, "native", native)
    finding = only(doctor.check_torch)
    assert finding.status == "FAIL"
    assert finding.fix.startswith("run `pip install")


def test_wrong_torch_is_told_once(monkeypatch, capsys):
    """The checks that need the compiled module do not guess at other causes."""

    def native():
        raise ImportError("compiled for torch 2.1: run `pip install --no-build-isolation .` again")

    monkeypatch.setattr(doctor, "native", native)
    monkeypatch.setattr(doctor, "spawn", lambda *_, **__: pytest.fail("ranks were started"))
    assert doctor.main(as_json=True) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [each["name"] for each in found if each["status"] == "FAIL"] == ["torch"]
    left_out = [each for each in found if "compiled module, see torch" in each["text"]]
    assert [each["name"] for each in left_out] == ["variables", "transports"]
    assert not any("authors" in each["fix"] for each in found)


def test_hostname(monkeypatch):
    monkeypatch.setattr(_interfaces, "interfaces", lambda: [ETH, LO])
    there = [(socket.AF_INET6, 0, 0, "", ("::1", 0)), (socket.AF_INET, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, type: list(there))
    finding = only(doctor.check_network)
    assert finding.status == "WARN"
    assert "export MYCOLL_SOCKET_IFNAME=eth0" in finding.fix
    there[1] = (socket.AF_INET, 0, 0, "", ("10.0.0.3", 0))
    assert only(doctor.check_network).status == "ok"

    def fails(name, port, type):
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert "/etc/hosts" in only(doctor.check_network).fix


def test_files_of_variables(tmp_path: Path):
    assert not list(doctor.file_of("MYCOLL_TRACE_FILE", tmp_path / "rank_%r"))
    assert not list(doctor.file_of("MYCOLL_TRACE_FILE", Path("off")))
    assert not list(doctor.file_of("MYCOLL_LOG_FILE", Path("/nonexistent/%h/log")))
    (finding,) = doctor.file_of("MYCOLL_LOG_FILE", Path("/nonexistent/x.log"))
    assert finding.fix.startswith("mkdir -p /nonexistent")
    (finding,) = doctor.file_of("MYCOLL_SECRET_FILE", tmp_path / "none")
    assert "cannot be read" in finding.text


def test_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = doctor.examine(doctor.check_memory)
    assert any(each.fix == "ulimit -n 4096" and each.status == "WARN" for each in found)


def test_no_memfd(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = doctor.examine(doctor.check_memory)[0]
    assert finding.status == "FAIL" and "seccomp" in finding.fix


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_cgroup_cores(tmp_path: Path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert doctor.cgroup_cores(tmp_path) == cores


def test_one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert only(doctor.check_cores).status == "WARN"


def test_broken_check():
    def check_gravity():
        raise RuntimeError("none here")
        yield

    finding = only(check_gravity)
    assert (finding.name, finding.status) == ("gravity", "WARN")


@pytest.mark.parametrize(
    "found, filter_text, name",
    [
        ([LO, BRIDGE, ETH], "", "eth0"),
        ([LO, BRIDGE], "", "lo"),
        ([BRIDGE, LO], "", "lo"),
        ([BRIDGE], "", None),
        ([LO], "", "lo"),
        ([LO, ETH], "lo", "lo"),
        ([LO, BRIDGE, ETH], "^ib", "eth0"),
        ([LO, BRIDGE, ETH], "=eth0", "eth0"),
        ([LO, ETH], "=eth", None),
        ([LO, ETH], "^eth0", None),
    ],
)
def test_choice_of_interface(found, filter_text, name):
    chosen, _ = _interfaces.choose(found, filter_text, "")
    assert (chosen and chosen.name) == name


def test_interfaces_are_those_of_the_system():
    assert {each.name for each in _interfaces.interfaces()} <= {n for _, n in socket.if_nameindex()}
    assert any(each.is_loopback for each in _interfaces.interfaces())
