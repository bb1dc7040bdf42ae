"""mycoll doctor: its report on a healthy machine, and on machines with problems."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys

import pytest
from mycoll import doctor
from mycoll._load import NotUsable
from worlds import warm


@pytest.fixture(autouse=True)
def clean(monkeypatch, backend):
    for name in list(os.environ):
        if name.startswith("MYCOLL_"):
            monkeypatch.delenv(name)


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, **env)
    return warm.run_module("mycoll", "doctor", *options, environment=environment, timeout=200)


def only(check) -> doctor.Result:
    return list(doctor.examine(check))[-1]


class Module:
    """Replaces the compiled module of another machine."""

    torch_version = "2.13.0"

    def __init__(self, interface: tuple[str, str] = ("eth0", "10.0.0.3"), cores: int = 4) -> None:
        self.interface, self.cores = interface, cores

    def choose_interface(self, store_host: str) -> list[tuple[str, str]]:
        return [self.interface]

    def usable_cores(self) -> int:
        return self.cores


@pytest.mark.tools
def test_healthy_machine():
    done = run("--json", MYCOLL_TRANPORT="tcp")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    rows = report["findings"]
    tests = [row["text"] for row in rows if row["name"] == "self-test"]
    assert len(tests) == 2 and all("0 wrong" in text for text in tests), tests
    copies = [row["text"] for row in rows if row["name"] == "copies"]
    assert len(copies) == 1 and copies[0].startswith("single copy"), rows
    misspelt = next(row for row in rows if "MYCOLL_TRANPORT" in row["text"])
    assert misspelt["status"] == "WARN"
    assert misspelt["fix"] == "did you mean MYCOLL_TRANSPORT?"
    assert all(row["fix"] for row in rows if row["status"] != "ok")


@pytest.mark.tools
def test_machine_with_problems():
    done = run(MYCOLL_SOCKET_IFNAME="=nosuch", MYCOLL_SMALL_BYTES="many")
    assert done.returncode == 1
    assert "export MYCOLL_SOCKET_IFNAME=" in done.stdout
    assert "MYCOLL_SMALL_BYTES=many is not valid" in " ".join(done.stdout.split())
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == [
        "network",
        "self-test",
        "self-test",
    ]
    assert lines[-1] == "problems: 3, warnings: 0"
    # The path of a library is not folded.
    shown = [line for line in lines if not line.strip().startswith("/")]
    assert all(len(line) <= 80 for line in shown), done.stdout
    assert done.stderr == "", "progress belongs on a terminal"


def test_wrong_torch(monkeypatch):
    def native():
        raise NotUsable("compiled for torch 2.1", "pip install 'torch==2.1.*'")

    monkeypatch.setattr(doctor, "native", native)
    finding = only(doctor.check_torch)
    assert finding.status == "FAIL"
    assert finding.text.endswith(": compiled for torch 2.1")
    assert finding.fix == "pip install 'torch==2.1.*'"


def test_wrong_torch_is_reported_once(monkeypatch, capsys):
    """The checks that need the compiled module do not name other causes."""

    def native():
        raise ImportError("compiled for torch 2.1: run `pip install --no-build-isolation .` again")

    monkeypatch.setattr(doctor, "native", native)
    monkeypatch.setattr(doctor, "native_module", lambda: None)
    monkeypatch.setattr(doctor, "spawn", lambda *_, **__: pytest.fail("ranks were started"))
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [each["name"] for each in found if each["status"] == "FAIL"] == ["torch"]
    left_out = [each for each in found if "compiled module, see torch" in each["text"]]
    assert [each["name"] for each in left_out] == [
        "variables",
        "network",
        "cores",
        "ranks",
        "transports",
    ]
    assert not any("authors" in each["fix"] for each in found)


def test_hostname(monkeypatch):
    monkeypatch.setattr(doctor, "native", Module)
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


def test_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = list(doctor.examine(doctor.check_memory))
    assert any(each.fix == "ulimit -n 4096" and each.status == "WARN" for each in found)


def test_no_memfd(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = next(doctor.examine(doctor.check_memory))
    assert finding.status == "FAIL" and "seccomp" in finding.fix


def test_one_core(monkeypatch):
    monkeypatch.setattr(doctor, "native", lambda: Module(cores=1))
    assert only(doctor.check_cores).status == "WARN"


def test_ranks_on_a_host(monkeypatch):
    class Twelve(Module):
        @staticmethod
        def _better_sum_block(hosts):
            assert hosts == [12, 12]
            return 3

    monkeypatch.setattr(doctor, "native", Twelve)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not list(doctor.check_ranks())
    monkeypatch.setenv("WORLD_SIZE", "24")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "12")
    finding = only(doctor.check_ranks)
    assert finding.status == "WARN" and finding.fix == "export MYCOLL_SUM_BLOCK=3 on all of them"


def test_broken_check():
    def check_gravity():
        raise RuntimeError("none here")
        yield

    finding = only(check_gravity)
    assert (finding.name, finding.status) == ("gravity", "WARN")


def test_interface_and_cores_of_this_machine():
    """The checks use the engine's own choices."""
    (name, address), *_ = doctor.native().choose_interface("")
    assert name in {found for _, found in socket.if_nameindex()} and address
    assert doctor.native().choose_interface("127.0.0.1")[0] == ("lo", "127.0.0.1")
    assert 1 <= doctor.native().usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("use", ["off", "on"])
def test_why_single_copy_was_not_measured(use: str) -> None:
    code = "from mycoll import doctor; print(doctor.describe_copies([]))"
    environment = {**os.environ, "MYCOLL_SINGLE_COPY": use}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"single copy was not measured: MYCOLL_SINGLE_COPY={use}\n", done
