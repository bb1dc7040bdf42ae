"""MYCOLL_ENCRYPT: two ranks communicate through a relay that reads and changes their bytes.

Each rank advertises the address of a relay that forwards to it, so that their connection passes a
relay, whichever of them connects.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.harness import SUITE_PATIENCE, Seen, attempt
from mycoll import black_box, status
from worlds.worker import Ctx

PATTERN = bytes(range(97, 123)) * 4
TIMEOUT = timedelta(seconds=40)
CHANGED = 60  # the number of the record that is changed, which is sent while the group is used

Change = Callable[[int, list[bytes]], list[bytes]]


def records_of(stream: bytes) -> tuple[list[bytes], bytes]:
    """The complete TLS records of a stream, and the remaining bytes."""
    found = []
    while len(stream) >= 5 and len(stream) >= (end := 5 + int.from_bytes(stream[3:5], "big")):
        found.append(stream[:end])
        stream = stream[end:]
    return found, stream


class Relay:
    """Records and forwards all bytes. change(number of earlier records, records) may replace the
    records from the connecting side."""

    def __init__(self, target: int, change: Change | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.target = target
        self.change = change
        self.seen = bytearray()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                threading.Thread(target=self.join, args=(near,), daemon=True).start()

    def join(self, near: socket.socket) -> None:
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target)) as far,
        ):
            passed, rest = 0, b""
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 18)
                    if not data:
                        return
                    self.seen += data
                    if source is near and self.change:
                        records, rest = records_of(rest + data)
                        data = b"".join(self.change(passed, records))
                        passed += len(records)
                    (far if source is near else near).sendall(data)

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(2):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(listener.getsockname()[1])
    return found


@pytest.fixture
def relayed(fresh: Any, free_ports: list[int], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a job on two ranks that reach each other only through relays."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    relays: list[Relay] = []

    def run(
        job: Callable[..., Any], *args: Any, change: Change | None = None, encrypt: bool = True
    ):
        relays[:] = [Relay(port, change) for port in free_ports]
        places = [(port, relay.port) for port, relay in zip(free_ports, relays, strict=True)]
        env = {
            "MYCOLL_SECRET_FILE": str(secret),
            "MYCOLL_ENCRYPT": str(int(encrypt)),
            "MYCOLL_NETWORK_SECONDS": "2",
        }
        world = fresh(2, "tcp", init=False, env=env)
        return world.run(job, places, *args), b"".join(bytes(each.seen) for each in relays)

    yield run
    for relay in relays:
        relay.close()


def begin(ctx: Ctx, places: list[tuple[int, int]]) -> None:
    port, advertised = places[ctx.rank]
    os.environ["MYCOLL_PORTS"] = f"{port}-{port}"
    os.environ["MYCOLL_ADVERTISE"] = f"127.0.0.1:{advertised}"
    os.environ["MYCOLL_SOCKET_IFNAME"] = "lo"
    ctx.init("relayed", timeout=TIMEOUT)


def sends_a_pattern(ctx: Ctx, places: list[tuple[int, int]]) -> str:
    begin(ctx, places)
    repeats = (1 << 20) // len(PATTERN)
    x = torch.frombuffer(bytearray(PATTERN * repeats), dtype=torch.uint8)
    got = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(got, x)
    ctx.equal(bytes(got[1 - ctx.rank].numpy()), PATTERN * repeats)
    for numel in (1, 1000, 100_000):
        y = torch.full((numel,), 1.0 + ctx.rank)
        dist.all_reduce(y)
        ctx.equal(y.unique().tolist(), [3.0])
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    encryption = backend.encryption()
    seen = black_box.find([os.getpid()])
    ctx.equal({each.encryption for each in seen[0].groups if each.is_used}, {encryption})
    text = " ".join(status.as_text(seen).split())  # joins folded lines
    ctx.equal(f", encrypted: {encryption}" in text, encryption != "")
    dist.destroy_process_group()
    return encryption


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_capture_shows_the_data_only_without_encryption(mycoll_only, relayed, encrypt):
    found, seen = relayed(sends_a_pattern, encrypt=encrypt)
    assert len(seen) > 2 << 20
    assert (PATTERN[:40] in seen) != encrypt
    assert (b"relayed" in seen) is False  # the group's name is not sent
    expected = r"TLS 1\.3 PSK, (AES-128-GCM|ChaCha20-Poly1305)" if encrypt else ""
    for text in found:
        assert re.fullmatch(expected, text), text


def calls_until_error(ctx: Ctx, places: list[tuple[int, int]]) -> tuple[Seen, bool]:
    """The first error of some calls, and whether all results before it were right."""
    begin(ctx, places)
    right = True

    def work() -> None:
        nonlocal right
        for turn in range(60):
            x = torch.full((20_000,), float(turn + ctx.rank))
            dist.all_reduce(x)
            right &= x.unique().tolist() == [2.0 * turn + 1]

    seen = attempt(work)
    dist.destroy_process_group()
    return seen, right


def flip(where: int) -> Change:
    def change(passed: int, records: list[bytes]) -> list[bytes]:
        result = [bytearray(each) for each in records]
        if 0 <= CHANGED - passed < len(records):
            result[CHANGED - passed][where] ^= 1
        return [bytes(each) for each in result]

    return change


def drop(passed: int, records: list[bytes]) -> list[bytes]:
    return [each for i, each in enumerate(records, passed) if i != CHANGED]


def repeat(passed: int, records: list[bytes]) -> list[bytes]:
    return [each for i, each in enumerate(records, passed) for _ in range(1 + (i == CHANGED))]


def swap() -> Change:
    kept: list[bytes] = []

    def change(passed: int, records: list[bytes]) -> list[bytes]:
        result = []
        for i, each in enumerate(records, passed):
            if i == CHANGED:
                kept.append(each)
            else:
                result += [each, *kept]
                kept.clear()
        return result

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(flip(7), id="a bit of the data"),
        pytest.param(flip(-1), id="a bit of the tag"),
        pytest.param(flip(0), id="a bit of the record's type"),
        pytest.param(drop, id="a record is dropped"),
        pytest.param(repeat, id="a record is repeated"),
        pytest.param(swap(), id="two records are swapped"),
    ],
)
def test_changed_records_are_an_error(mycoll_only, relayed, change):
    """The rank that receives a changed record raises an error that names the sender; no result is
    wrong."""
    found, _ = relayed(calls_until_error, change=change)
    assert all(right for _, right in found)
    texts = [seen.text for seen, _ in found]
    assert all(seen.kind == "DistBackendError" for seen, _ in found), texts
    assert any(
        re.search(r"rank [01] \(\S+\) sent data that was changed on the way", text)
        for text in texts
    ), texts


def meets(ctx: Ctx, odd: int, changes: dict[str, str]) -> Seen:
    if ctx.rank == odd:
        os.environ.update(changes)
    return attempt(lambda: ctx.init("odd"))


def secrets(folder: Path) -> tuple[str, str]:
    for name in ("right", "wrong"):
        (folder / name).write_text(name * 8)
    return str(folder / "right"), str(folder / "wrong")


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_another_secret_is_named_on_all_ranks(fresh, mycoll_only, tmp_path, odd):
    right, wrong = secrets(tmp_path)
    env = {"MYCOLL_SECRET_FILE": right, "MYCOLL_ENCRYPT": "1"}
    world = fresh(4, "tcp", init=False, env=env)
    for seen in world.run(meets, odd, {"MYCOLL_SECRET_FILE": wrong}):
        assert seen.kind, seen
        assert "another secret" in seen.text, seen.text
        assert "MYCOLL_SECRET_FILE must be the same everywhere" in seen.text, seen.text
        assert odd == 0 or f"rank {odd} (" in seen.text, seen.text
        assert seen.seconds < SUITE_PATIENCE / 2, seen


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("others", ["0", "1"])
def test_a_rank_that_differs_is_named(fresh, mycoll_only, tmp_path, odd, others):
    """One rank does not encrypt and all others do, or the other way round."""
    right, _ = secrets(tmp_path)
    env = {"MYCOLL_SECRET_FILE": right, "MYCOLL_ENCRYPT": others}
    changes = {"MYCOLL_ENCRYPT": "0" if others == "1" else "1"}
    for seen in fresh(3, "tcp", init=False, env=env).run(meets, odd, changes):
        assert seen.kind, seen
        assert "MYCOLL_ENCRYPT=1" in seen.text and "must be the same on all ranks" in seen.text
        assert odd == 0 or f"rank {odd} (" in seen.text, seen.text


def test_a_secret_file_is_needed(fresh, mycoll_only):
    world = fresh(2, "tcp", init=False, env={"MYCOLL_ENCRYPT": "1"})
    for seen in world.run(meets, -1, {}):
        assert "MYCOLL_ENCRYPT=1 needs MYCOLL_SECRET_FILE" in seen.text, seen


# ---- instead of gloo, with certificates ----------------------------------------------------------


def certificate(folder: Path, name: str, authority: str) -> dict[str, str]:
    """Makes a key, and a certificate by this authority, which is made if it does not exist."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    if not (folder / f"{authority}.pem").exists():
        openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{authority}.key",
            "-out", f"{authority}.pem", "-subj", f"/CN={authority}", "-days", "2",
        )  # fmt: skip
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
            "-subj", f"/CN={name}")  # fmt: skip
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey",
            f"{authority}.key", "-CAcreateserial", "-out", f"{name}.pem", "-days", "2")  # fmt: skip
    prefix = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"
    return {
        "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
        prefix + "PKEY": str(folder / f"{name}.key"),
        prefix + "CERT": str(folder / f"{name}.pem"),
        prefix + "CA_FILE": str(folder / f"{authority}.pem"),
        "MYCOLL_REPLACE": "gloo",
    }


def certified(ctx: Ctx, places: list[dict[str, str]]) -> tuple[Seen, str]:
    os.environ.update(places[ctx.rank])

    def work() -> None:
        ctx.init("certified")
        x = torch.ones(100_000)
        dist.all_reduce(x)
        ctx.equal(x.unique().tolist(), [2.0])

    seen = attempt(work)
    if seen.kind:
        return seen, ""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return seen, backend.encryption()


@pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl program is not installed")
def test_certificates_of_gloo(fresh, mycoll_only, tmp_path):
    env = [certificate(tmp_path, name, "authority") for name in ("one", "two")]
    for seen, encryption in fresh(2, "tcp", init=False).run(certified, env):
        assert not seen.kind, seen.text
        assert encryption.startswith("TLS 1.3 certificates, "), encryption
    for odd in (0, 1):
        strange = [*env]
        strange[odd] = certificate(tmp_path, "three", "another authority")
        for seen, _ in fresh(2, "tcp", init=False).run(certified, strange):
            assert re.search("certificate verify failed|unknown CA", seen.text), seen
            assert "by an authority that the others trust" in seen.text, seen
