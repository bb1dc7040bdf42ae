"""Measures encryption between hosts: mycoll plain and encrypted, gloo plain and with its TLS.

    ./dev python benchmarks/encryption.py --ranks 1,1
    ./dev python benchmarks/encryption.py --ranks 2,2 --rate 1gbit
    ./dev python benchmarks/encryption.py --ranks 1,1 --sizes 64M --kinds plain,encrypted

Network namespaces represent hosts; see hosts.py. Encryption is chosen for a process, so each round
starts a job of each kind, one after the other. A row has the medians over the rounds; ratios are of
jobs of the same round, with their quartiles. The time of a job is the median over its calls on rank
0; that of init is the time of init_process_group.

With one rank on each host, the last column is plain / (plain + bytes that a rank encrypts and
decrypts / rate): the ratio if encryption has no other cost and does not overlap. The rate is that
of `openssl speed` on one core, in records of 16 KiB.

--openssl FOLDER adds jobs with the libssl.so.3 and libcrypto.so.3 of this folder. gloo's TLS needs
libssl.so (Debian: libssl-dev) and the openssl program; otherwise it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from hosts import PORT, Network, show, size

PREFIX = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = arguments.rank, sum(arguments.ranks)
    began = time.perf_counter()
    dist.init_process_group(
        arguments.backend, init_method=f"tcp://10.214.0.1:{PORT}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=120))  # fmt: skip
    dist.barrier()
    found = {"init": time.perf_counter() - began}
    for bytes_each in map(size, arguments.sizes.split(",")):
        x = torch.ones(bytes_each // 4)
        calls = max(5, min(2000, arguments.work // max(bytes_each, 40_000)))
        for name in ("all_reduce", "send") if ranks == 2 else ("all_reduce",):
            times = []
            for _ in range(calls + calls // 10 + 2):
                dist.barrier()
                before = time.perf_counter()
                if name == "all_reduce":
                    dist.all_reduce(x)
                elif rank == 0:  # the message, and an answer of 4 bytes
                    dist.send(x, 1)
                    dist.recv(x[:1], 1)
                else:
                    dist.recv(x, 0)
                    dist.send(x[:1], 0)
                times.append(time.perf_counter() - before)
            found[f"{name} {show(bytes_each)}"] = statistics.median(times[-calls:])
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def certificate(folder: Path) -> dict[str, str]:
    """The variables of gloo's TLS, or none if it cannot be used here."""
    if not shutil.which("openssl") or not list(Path("/usr/lib").glob("*/libssl.so")):
        return {}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem",
         "-out", "cert.pem", "-subj", "/CN=mycoll", "-days", "1"],
        cwd=folder, check=True, capture_output=True)  # fmt: skip
    return {
        "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
        PREFIX + "PKEY": str(folder / "key.pem"),
        PREFIX + "CERT": str(folder / "cert.pem"),
        PREFIX + "CA_FILE": str(folder / "cert.pem"),
    }


def cipher_rate() -> float:
    """Bytes per second of AES-128-GCM on one core; 0 without the openssl program."""
    if not shutil.which("openssl"):
        return 0.0
    words = ["openssl", "speed", "-evp", "aes-128-gcm", "-bytes", "16384", "-seconds", "2"]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return float(out.split()[-1].rstrip("k")) * 1000


def with_cipher(row: str, plain: float, rate: float) -> str:
    name, _, bytes_each = row.rpartition(" ")
    # Each rank of an all_reduce sends as many bytes as the tensor has, and receives as many.
    passes = {"all_reduce": 2, "send": 1}.get(name, 0)
    if not (passes and rate):
        return ""
    return f"{plain / (plain + passes * size(bytes_each) / rate):.2f}"


def run_job(words: list[str], network: Network, ranks: list[int], env: dict[str, str],
            backend: str) -> dict[str, float]:  # fmt: skip
    places = [name for name, count in zip(network.names, ranks, strict=True) for _ in range(count)]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c",
             f'hostname {name}; exec "$@"', "sh", *words, "--backend", backend,
             "--rank", str(rank)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "veth0", **env},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for rank, name in enumerate(places)
    ]  # fmt: skip
    output = processes[0].communicate()[0]
    if any(process.wait() for process in processes):
        return {}
    return {name: float(value) for name, value in json.loads(output).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="1,1", help="the number of ranks on each host")
    parser.add_argument("--rate", default="", help="of each host's link, in tc's syntax: 1gbit")
    parser.add_argument("--sizes", default="4,64K,1M,16M,64M")
    parser.add_argument(
        "--kinds", default="", help="plain,encrypted and perhaps gloo; by default all"
    )
    parser.add_argument("--openssl", type=Path, help="a folder with another OpenSSL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=int, default=200_000_000, help="bytes of each row and job")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    words = [sys.executable, __file__, *sys.argv[1:]]
    arguments.ranks = [int(each) for each in arguments.ranks.split(",")]
    if arguments.rank >= 0:
        rank_main(arguments)
        return
    with (
        tempfile.TemporaryDirectory(prefix="mycoll-encryption-") as name,
        Network(len(arguments.ranks), arguments.rate, "") as network,
    ):
        folder = Path(name)
        (folder / "secret").write_bytes(os.urandom(32))
        secret = {"MYCOLL_SECRET_FILE": str(folder / "secret")}
        kinds = {
            "plain": ("mycoll", secret),
            "encrypted": ("mycoll", {**secret, "MYCOLL_ENCRYPT": "1"}),
            "gloo": ("gloo", {}),
            "gloo TLS": ("gloo", certificate(folder)),
        }
        if not kinds["gloo TLS"][1]:
            del kinds["gloo TLS"]
        chosen = arguments.kinds.split(",") if arguments.kinds else list(kinds)
        kinds = {kind: each for kind, each in kinds.items() if kind in chosen}
        if arguments.openssl:
            folder_of = {"LD_LIBRARY_PATH": str(arguments.openssl)}
            kinds["other OpenSSL"] = ("mycoll", {**kinds["encrypted"][1], **folder_of})
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(arguments.rounds):
            for kind, (backend, env) in kinds.items():
                found[kind].append(run_job(words, network, arguments.ranks, env, backend))
    print(f"Hosts of {arguments.ranks} ranks{f' at {arguments.rate}' * bool(arguments.rate)}; us\n")
    ratios = [(kind, "encrypted") for kind in kinds if kind not in ("encrypted", "other OpenSSL")]
    ratios += [("plain", "other OpenSSL")] * ("other OpenSSL" in kinds)
    rate = cipher_rate() if arguments.ranks == [1, 1] else 0.0
    titles = [*kinds, *map("/".join, ratios)] + ["plain/(plain + cipher)"] * bool(rate)
    if rate:
        print(f"AES-128-GCM: {rate / 1e9:.2f} GB/s on one core\n")
    print(f"| | {' | '.join(titles)} |")
    print("|" + "---|" * (1 + len(titles)))
    for row in found["plain"][0]:
        cells = []
        for kind in kinds:
            times = [job[row] for job in found[kind] if job]
            cells.append(f"{statistics.median(times) * 1e6:.4g}" if times else "failed")
        for one, other in ratios:
            pairs = zip(found[one], found[other], strict=True)
            each = [job[row] / encrypted[row] for job, encrypted in pairs if job and encrypted]
            low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else [0.0] * 3
            cells.append(f"{middle:.2f} [{low:.2f} {high:.2f}]" if high else "")
        if rate:
            plain = statistics.median(job[row] for job in found["plain"] if job)
            cells.append(with_cipher(row, plain, rate))
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
