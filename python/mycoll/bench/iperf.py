"""What TCP over loopback can carry, by iperf3: the reference of mycoll with sockets only."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess

from mycoll.bench.peer_build import PeerAbsent

_STREAMS = (1, 2, 4)
_SECONDS = 1
_TIMEOUT_SECONDS = 20


def measure_tcp() -> list[dict[str, object]]:
    program = shutil.which("iperf3")
    if program is None:
        raise PeerAbsent("not installed (Debian, Ubuntu: apt install iperf3)")
    return [
        {
            "kind": "limit",
            "name": "iperf3",
            "what": f"TCP over loopback, {streams} streams",
            "streams": streams,
            "gigabytes_per_second": _transfer(program, streams),
        }
        for streams in _STREAMS
    ]


def _transfer(program: str, streams: int) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [program, "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "listening" in line:
                break
        client = [program, "-c", "127.0.0.1", "-p", port, "-J", "-t", str(_SECONDS)]
        client += ["-P", str(streams)]
        told = subprocess.run(client, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        report = json.loads(told.stdout)
        return float(report["end"]["sum_received"]["bits_per_second"]) / 8e9
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as cause:
        raise PeerAbsent(f"gave no figure: {cause}") from cause
    finally:
        server.kill()
        server.wait()
