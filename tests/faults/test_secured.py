"""Nodes on hosts of their own that know each other by a secret: nobody in between reads, nobody else joins."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.security.identity import guest
from elaunch.rendezvous.security.secret import SecuritySettings
from elaunch.workers.comm.wire import VERSION, derive_proof
from tests.faults.test_workers import left, reference
from tests.helpers import Spawned, Spawner
from tests.jobs.watch import (
    SCRIPT,
    Node,
    assert_same,
    digests,
    elaunch,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)
from tests.netns import Network, network

SECRET = secrets.token_hex(16)
STEPS = ("--steps", "60")
PORT = 29400
LIMIT_S = 60.0
FRAME = re.compile(b"eL%c[\x01-\x07].{5}\x00{7}" % VERSION, re.DOTALL)
"""The header of a frame of a link: magic, version, kind, part and generation."""

OPEN = "warning: the etcd of this job"

ETH_P_ALL = 3


class Listening:
    """All that passes a host's cable. In this process, in a thread, from when it is made."""

    def __init__(self, made: Network, host: str) -> None:
        # With a protocol it would hear all interfaces of this machine, and so other tests, until it is bound to one.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind((made.cable(host), ETH_P_ALL))
        self._socket.setblocking(False)
        self.heard = bytearray()

    def take(self) -> bytearray:
        """Takes what has passed meanwhile."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard += self._socket.recv(1 << 17)
        return self.heard

    def close(self) -> None:
        self._socket.close()


class Pair:
    """Two hosts with a node of two workers each, of which the first hosts the rendezvous."""

    def __init__(self, spawn: Spawner, folder: Path, made: Network) -> None:
        self._spawn, self._folder, self.network = spawn, folder, made
        self.hosts = {name: made.add(name) for name in ("a", "b", "c")}
        self.nodes: list[Node] = []

    def start(self, name: str, secret: str = "", flags: tuple[str, ...] = (), called: str = "", conf: str = "") -> Node:
        environment: Mapping[str, str] = {"ELAUNCH_SECRET": secret} if secret else {}
        return elaunch(
            self._spawn,
            self._folder,
            "--nnodes=2:3",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.network.address('a')}:{PORT}",
            "--rdzv-id=job",
            f"--rdzv-conf=lease_ttl=2,last_call_timeout=0{conf}",
            f"--node-name={called or name}",
            *flags,
            script=(SCRIPT, *STEPS, "--sleep", "0.03", "--crew", "4", "--hold", f"20:{self._folder / 'gate'}"),
            name=called or name,
            host=self.hosts[name],
            environment=environment,
        )

    def begin(self, secret: str = "", flags: tuple[str, ...] = ()) -> Listening:
        listening = Listening(self.network, "b")
        self.nodes = [self.start(name, secret, flags) for name in "ab"]
        wait_for_members(self.nodes, 4)
        wait_for_step(self.nodes, 5)
        return listening

    def token(self, secret: str, encryption: str = "auto") -> bytes:
        """The job's, as only this secret shows it; without one, the job's id."""
        pem = guest(SecuritySettings(secret.encode()), "job", time.time()) if encryption == "auto" else None
        store = EtcdStore(f"{self.network.address('a')}:{PORT}", timeout_s=10.0, pem=pem)
        try:
            entry = store.get("/elaunch/job/config")
            assert entry is not None
            return str(json.loads(entry.value)["token"]).encode()
        finally:
            store.close()


@pytest.fixture
def pair(spawn: Spawner, tmp_path: Path) -> Iterator[Pair]:
    with network() as made:
        yield Pair(spawn, tmp_path, made)
        spawn.end_all()  # before their network goes


def ctl(spawn: Spawner, pair: Pair, secret: str, job: str = "job") -> Spawned:
    where = f"--rdzv-endpoint={pair.network.address('a')}:{PORT}"
    return spawn.elaunch("ctl", "status", where, f"--rdzv-id={job}", env={"ELAUNCH_SECRET": secret or None}, name="ctl")


@pytest.mark.timeout(240)
def test_with_a_secret_nobody_in_between_reads_and_nobody_else_joins(
    pair: Pair, spawn: Spawner, tmp_path: Path
) -> None:
    listening = pair.begin(SECRET)
    try:
        token = pair.token(SECRET)
        assert len(token) == 32
        # Others are refused with a line that says why, and the job goes on.
        strangers = [
            (
                pair.start("c", "quite another secret", called="c1", conf=",read_timeout=3"),
                "whoever answers there has another secret",
            ),
            (pair.start("c", called="c2", conf=",read_timeout=3"), "whoever answers there has another secret"),
            (pair.start("c", SECRET, ("--link-encryption=off",), "c3"), "this node was started with --link-enc"),
        ]
        for stranger, says in strangers:
            assert stranger.agent.wait(LIMIT_S) == 1
            said = [line for line in stranger.agent.text().splitlines() if "error" in line or says in line]
            assert any(says in line for line in said), stranger.agent.tail()
            assert SECRET not in stranger.agent.text()
            assert "Traceback" not in stranger.agent.text()
        assert ctl(spawn, pair, SECRET).wait(LIMIT_S) == 0
        for wrong in ("quite another secret", ""):
            assert ctl(spawn, pair, wrong).wait(LIMIT_S) == 1
        (tmp_path / "gate").touch()
        # A worker is lost and replaced, over encrypted links.
        victim = next(worker for worker in pair.nodes[1].members() if worker.startswith("b/"))
        os.kill(pair.nodes[1].pids()[victim], signal.SIGKILL)
        wait_for(pair.nodes, partial(left, pair.nodes[0], victim), 30, f"a generation without {victim}")
        wait_for_members(pair.nodes, 4)
        heard = listening.take()
        folders = find_folders()
        assert len(folders) == 2
    finally:
        listening.close()
    for node in pair.nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
        assert OPEN not in node.agent.text()
        for text in (SECRET, token.decode(), "PRIVATE KEY"):
            assert text not in node.agent.text() + node.log.read_text()
    assert len(heard) > 100_000
    assert token not in heard
    assert FRAME.search(heard) is None
    for word in (b"elaunch/%d " % VERSION, b"/elaunch/job", b"b/0#0", SECRET.encode()):
        assert word not in heard
    assert not any(folder.exists() for folder in folders), "keys go with their node"
    expected, samples, _ = reference(spawn, tmp_path, *STEPS)
    assert_same(losses(pair.nodes), expected, 1e-9)
    assert digests(pair.nodes) == samples


@pytest.mark.timeout(240)
@pytest.mark.parametrize("encryption", ["auto", "off"])
def test_without_a_secret_who_listens_learns_nothing_unless_nothing_is_encrypted(
    pair: Pair, spawn: Spawner, tmp_path: Path, encryption: str
) -> None:
    is_open, port = encryption == "off", f"{pair.network.address('a')}:{PORT}"
    listening = pair.begin(flags=(f"--link-encryption={encryption}",))
    try:
        wait_for_step(pair.nodes, 15)
        assert ctl(spawn, pair, "").wait(LIMIT_S) == 0
        heard, token = listening.take(), pair.token("", encryption)
        assert len(heard) > 100_000
        for word in (token, b"/elaunch/job", b"b/0#0"):
            assert (word in heard) == is_open, word
        assert (FRAME.search(heard) is not None) == is_open
        hellos = re.findall(rb"elaunch/%d (\d+) (\w+) " % VERSION, heard)
        assert bool(hellos) == is_open
        assert all(proof.decode() == derive_proof(token.decode(), int(number)) for number, proof in hellos)
        stranger = EtcdStore(port, timeout_s=2.0)
        try:
            with contextlib.nullcontext() if is_open else pytest.raises(StoreUnavailable, match="want TLS"):
                stranger.put("/elaunch/job/x", b"1")
        finally:
            stranger.close()
    finally:
        listening.close()
    (tmp_path / "gate").touch()
    for node in pair.nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
    told = "is open: whoever reaches it" if is_open else "takes whoever knows the job's id: they"
    told = f"[elaunch a] warning: the etcd of this job, at {port}, {told} can read and change the job. A secret closes"
    assert [node.agent.text().count(told) for node in pair.nodes] == [1, 0], "who hosts it says so, once"


@pytest.mark.timeout(240)
def test_a_node_waits_for_the_end_of_another_job_that_meets_at_the_same_address(
    pair: Pair, spawn: Spawner, tmp_path: Path
) -> None:
    pair.begin().close()
    late = pair.start("c", flags=("--rdzv-id=next",), called="late", conf=",read_timeout=90")
    gone = pair.start("c", flags=("--rdzv-id=next",), called="gone", conf=",read_timeout=2")
    says = "whoever answers there has another secret, or is of another job: give all nodes the same --rdzv-id"
    assert gone.agent.wait(LIMIT_S) == 1
    assert says in gone.agent.text()
    assert "gave up after 2 s" in gone.agent.text()
    assert late.agent.wait_for_text(says, LIMIT_S)
    assert ctl(spawn, pair, "", "next").wait(LIMIT_S) == 1
    (tmp_path / "gate").touch()
    for node in pair.nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
    following = pair.start("a", flags=("--rdzv-id=next",), called="a2")
    for node in (late, following):
        assert node.agent.wait(100) == 0, node.agent.tail()


@pytest.mark.timeout(240)
def test_the_secret_of_a_user_counts_for_jobs_of_several_machines(
    pair: Pair, spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "home/.config/elaunch/secret"
    path.parent.mkdir(parents=True)
    path.write_text(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("ELAUNCH_SECRET_FILE", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pair.begin().close()
    assert pair.token(SECRET)
    stranger = pair.start("c", "none of this user's", called="c1", conf=",read_timeout=2")
    assert stranger.agent.wait(LIMIT_S) == 1
    assert "whoever answers there has another secret" in stranger.agent.text()
    assert ctl(spawn, pair, "").wait(LIMIT_S) == 0
    (tmp_path / "gate").touch()
    for node in pair.nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
        assert OPEN not in node.agent.text()
        assert SECRET not in node.agent.text()


def find_folders() -> list[Path]:
    """Where nodes of this job that run have their keys."""
    own = guest(SecuritySettings(SECRET.encode()), "job", time.time())
    issuer = x509.load_pem_x509_certificate(own.certificate).issuer
    found = [path for path in Path(tempfile.gettempdir()).glob("elaunch-tls-*/node.pem") if path.exists()]
    return [path.parent for path in found if x509.load_pem_x509_certificate(path.read_bytes()).issuer == issuer]


def test_workers_see_neither_the_secret_of_a_job_nor_the_password_of_its_etcd(spawn: Spawner) -> None:
    script = "env; tr '\\0' ' ' </proc/self/environ; cat /proc/self/cmdline"
    secrets = {"ELAUNCH_SECRET": SECRET, "ELAUNCH_ETCD_USER": "root", "ELAUNCH_ETCD_PASSWORD": "word of the store"}
    node = spawn.elaunch("--standalone", "--no-python", "sh", "-c", script, env=secrets)
    assert node.wait(LIMIT_S) == 0, node.tail()
    for name in ("LOCAL_RANK=0", "ELAUNCH_ETCD_USER=root"):
        assert name in node.text()
    for secret in (SECRET, secrets["ELAUNCH_ETCD_PASSWORD"]):
        assert secret not in node.text()
