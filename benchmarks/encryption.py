"""What it costs that links between nodes are encrypted: in bytes a second, in a step, and when a link is made.

    python benchmarks/encryption.py
    python benchmarks/encryption.py --quick --json encryption.json

*Links*: two processes of this machine with one link, over TCP on loopback, plain and with TLS 1.3 (AES-256-GCM) in
turn. *One way*: a message at a time, until the receiver has it. *Both ways*: one in each direction at once. *There
and back*: 1 KiB. *AES-GCM alone*: the cipher over records of 16 KiB, in one thread, nothing sent. *Connect*: what it
takes until a link is there.

*Jobs* (root only): two hosts made of network namespaces, one worker each, gradients over links, no emulated work: the
step is as short as it gets, so that the share of encryption is as large as it gets. Jobs with and without it alternate.

On loopback there is no wire to wait for, and both ends share the same two cores: between machines either end has cores
of its own, and a network of 25 Gbit/s carries 3,000 MB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.crew import PATIENCE_S, Crew, Rank, crew
from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, percentile, spread
from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.security.secret import SecuritySettings
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.comm.transport import Transport
from tests.netns import Network, network

WORKERS = ["a/0#0", "b/0#0"]
WAYS = ("plain", "TLS")
RECORD_BYTES = 1 << 14
PORT = 29400


class Plain(Rank):
    """One end of a link."""

    def __init__(self, workers: Sequence[str], place: int, store: dist.Store) -> None:
        super().__init__(workers, place, store)
        self._peer = workers[1 - place]
        self._op = 0
        self._store = store
        self._times = 0

    def one_way(self, size: int, count: int) -> float:
        """Seconds in which so many messages have gone from the first to the second, each acknowledged."""
        body, acknowledgement = memoryview(bytearray(size)), memoryview(bytearray(1))
        begin_s = time.perf_counter()
        for _ in range(count):
            self._op += 1
            sends, receives = [(self._peer, 0, body)], [(self._peer, 1, acknowledgement)]
            if self.place:
                self.transport.exchange(1, self._op, receives=[(self._peer, 0, body)])
                self.transport.exchange(1, self._op + 1, sends=[(self._peer, 1, acknowledgement)])
            else:
                self.transport.exchange(1, self._op, sends=sends)
                self.transport.exchange(1, self._op + 1, receives=receives)
            self._op += 1
        return time.perf_counter() - begin_s

    def both_ways(self, size: int, count: int) -> float:
        """Seconds in which so many messages have gone in each direction, at the same time."""
        out, into = memoryview(bytearray(size)), memoryview(bytearray(size))
        begin_s = time.perf_counter()
        for _ in range(count):
            self._op += 1
            self.transport.exchange(1, self._op, sends=[(self._peer, 0, out)], receives=[(self._peer, 0, into)])
        return time.perf_counter() - begin_s

    def connect(self) -> float:
        """Seconds until two more workers have a link."""
        self._times += 1
        made = Transport(f"{self.worker}{self._times}", "", security=self.security)
        try:
            self._store.set(made.worker, made.address)
            names = [f"{worker}{self._times}" for worker in WORKERS]
            members = {name: self._store.get(name).decode() for name in names}
            begin_s = time.perf_counter()
            made.connect(members, generation=1, timeout_s=PATIENCE_S)
            seconds = time.perf_counter() - begin_s
            self._store.set(f"{made.worker} is linked", "")
            self._store.wait([f"{name} is linked" for name in names])
            return seconds
        finally:
            made.close()


class Encrypted(Plain):
    """The same with TLS; `main` sets its security before there are processes."""


def rates(report: Report, crews: dict[str, Crew], rounds: int) -> None:
    """Megabytes a second, and microseconds there and back."""
    shapes = [
        ("one way", 64 << 10, 200),
        ("one way", 1 << 20, 60),
        ("one way", 64 << 20, 2),
        ("both ways", 64 << 20, 2),
    ]
    for what, size, count in shapes:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        method = "one_way" if what == "one way" else "both_ways"
        for number in range(rounds + 1):
            for way in WAYS[:: 1 if number % 2 else -1]:
                seconds = max(crews[way](method, size, count))
                if number:  # the first one warms up
                    found[way].append(size * count / seconds / 1e6)
        for way in WAYS:
            row(report, f"{what}, {size >> 10} KiB", way, found, "MB/s")
    there: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            seconds = max(crews[way]("one_way", 1 << 10, 1000)) / 1000
            if number:
                there[way].append(seconds * 1e6)
    for way in WAYS:
        row(report, "there and back, 1 KiB", way, there, "µs")
    linked: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(3 * rounds):
        for way in WAYS:
            seconds = max(crews[way]("connect"))
            if number:
                linked[way].append(seconds * 1e3)
    for way in WAYS:
        row(report, "connect", way, linked, "ms")


def row(report: Report, what: str, way: str, found: dict[str, list[float]], unit: str) -> None:
    values, plain = found[way], spread(found["plain"]).median
    one = spread(values)
    report.row(
        what=what,
        way=way,
        unit=unit,
        median=one.median,
        p10=percentile(values, 0.1),
        p90=one.p90,
        of_plain=one.median / plain,
        n=one.count,
    )


def cipher_alone() -> list[float]:
    """Megabytes a second of AES-256-GCM."""
    cipher, data, nonce = AESGCM(os.urandom(32)), os.urandom(RECORD_BYTES), os.urandom(12)
    found = []
    for _ in range(10):
        begin_s = time.perf_counter()
        for _ in range(4000):
            cipher.encrypt(nonce, data, None)
        found.append(4000 * RECORD_BYTES / (time.perf_counter() - begin_s) / 1e6)
    return found


class TwoHosts(Job):
    """One worker on each of two hosts."""

    def __init__(self, encryption: str, wires: Network, places: Sequence[str], folder: Path, steps: int) -> None:
        super().__init__(encryption, Training(2, 0.0, steps), folder)
        self._wires, self._places, self._encryption = wires, places, encryption

    def begin(self) -> None:
        self._agents = [
            self.processes.start(
                [
                    *["ip", "netns", "exec", place, *ELAUNCH, "--nnodes=2", "--nproc-per-node=1"],
                    *["--rdzv-backend=c10d", f"--rdzv-endpoint={self._wires.address('a')}:{PORT}"],
                    *[f"--rdzv-id={self.log.stem}", "--collectives=links", f"--link-encryption={self._encryption}"],
                    *["--events", str(self.log), str(HERE / "train_small.py"), *self.training.flags],
                ]
            )
            for place in self._places
        ]

    def launcher(self):  # type: ignore[no-untyped-def]
        return self._agents[0]


def steps(report: Report, folder: Path, rounds: int, count: int) -> None:
    """Milliseconds of a step."""
    found: dict[str, list[float]] = {"plain": [], "TLS": []}
    medians: dict[str, list[float]] = {"plain": [], "TLS": []}
    with network() as wires:
        places = [wires.add(name) for name in "ab"]
        for number in range(rounds):
            for way, encryption in (("plain", "off"), ("TLS", "auto"))[:: 1 if number % 2 else -1]:
                with TwoHosts(encryption, wires, places, folder, 50 + count) as job:
                    job.wait(job.finished, "its end", 200.0)
                    job.read()
                    times = [one.t for one in job.commits()]
                    gaps = [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times[50:])]
                    found[way] += gaps
                    medians[way].append(spread(gaps).median)
    for way in WAYS:
        row(report, "step of 2 nodes", way, found, "ms")
    for way in WAYS:
        row(report, "the same, medians of jobs", way, medians, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of each measurement")
    parser.add_argument("--jobs", type=int, default=4, help="of each kind")
    parser.add_argument("--only", choices=("links", "jobs"), help="one of both")
    parser.add_argument("--limit-s", type=int, default=900, help="stop and report after so long")
    add_arguments(parser)
    args = parser.parse_args()
    rounds, jobs, count = (2, 1, 50) if args.quick else (args.rounds, args.jobs, 300)
    report = Report("Encrypted links")
    limit_time(args.limit_s)
    folder = Path(tempfile.mkdtemp(prefix="elaunch-encryption-"))
    node = NodeIdentity(SecuritySettings(os.urandom(32)), "encryption", "node", encrypts=True)
    try:
        with contextlib.suppress(TimeLimit):
            if args.only != "jobs":
                os.environ["ELAUNCH_LINKS"] = "tcp"
                node.make(time.time())
                Encrypted.security = LinkSecurity(node.folder, always=True)
                with crew(WORKERS, Plain) as plain, crew(WORKERS, Encrypted) as encrypted:
                    rates(report, {"plain": plain, "TLS": encrypted}, rounds)
                del os.environ["ELAUNCH_LINKS"]
                alone = cipher_alone()
                row(report, "AES-GCM alone, 16 KiB", "plain", {"plain": alone}, "MB/s")
            if args.only != "links":
                if os.geteuid() == 0 and shutil.which("ip"):
                    steps(report, folder, jobs, count)
                else:
                    report.notes.append("jobs on two hosts: not measured, since only root makes network namespaces")
    except JobFailed as error:
        report.notes.append(str(error))
    finally:
        node.remove()
        shutil.rmtree(folder, ignore_errors=True)
    report.print()
    report.write(args.json)


if __name__ == "__main__":
    main()
