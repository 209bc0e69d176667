"""Settings of one agent: frozen, each of them a flag and an environment variable."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field, replace

from elaunch.checkpoints import Checkpointing
from elaunch.detect.hang import HangTimeout
from elaunch.errors import LaunchError, UsageError
from elaunch.logs import LogSettings
from elaunch.notices import Notice
from elaunch.policies import Wishes

# What every training script imports; torch itself imports _dynamo, for a second, when the first optimizer is made.
PRELOAD = ("torch", "torch._dynamo", "elaunch.workers.session")


HEALTH_POLICIES = ("drain", "report", "off")
HEALTH_INTERVAL_S = 1.0
BACKENDS = ("static", "c10d", "etcd", "etcd-v3")
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MASTER_PORT = 29500
ETCD_PORT = 2379
HOSTED_PORT = 29400  # where torchrun's c10d backend listens by default
CONNECT_S = 10.0  # for a store that should be there already
STATIC_SHIFT = 10000  # from --master-port, which is the workers' own, to the port of the rendezvous

# Read by torchrun's rendezvous, and without an effect here: an etcd needs no such setting.
_TORCHRUN_ONLY = ("close_timeout", "heartbeat_timeout", "store_type", "rank")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class RendezvousConf:
    """The keys of `--rdzv-conf`. Times in seconds.

    Attributes:
        join_timeout: how long a job may have fewer nodes than its minimum before it fails.
        last_call_timeout: how long a job with enough nodes waits for more before it starts.
        connect_timeout: how long an agent tries to reach the store at the start; 0 for what is usual for the backend.
        lease_ttl: a node that is silent for this long has left.
        ready_timeout: how long ready workers wait for others that still start before the first step.
        attach_timeout: how long a script has to call `elaunch.init()` before a new node restarts it as a whole.
        stop_timeout: how long a worker may be stopped (SIGSTOP) before it is replaced.
        link_timeout: how long nothing may come from the machine of a worker for which others wait, not even the
            acknowledgement of a byte, before their link counts as cut.
        user, password: of etcd; also ELAUNCH_ETCD_USER and ELAUNCH_ETCD_PASSWORD.
        read_timeout: for c10d, how long a node tries to reach the one that hosts the rendezvous.
        timeout: for static, the same.
        keep_alive_interval, keep_alive_max_attempt: their product is `lease_ttl` where that is not given.
        is_host: for c10d, whether this node hosts the rendezvous; otherwise it finds out by itself.
        cacert, cert, key: TLS files for etcd; also ELAUNCH_ETCD_CACERT, ELAUNCH_ETCD_CERT, ELAUNCH_ETCD_KEY.
    """

    join_timeout: float = 600.0
    last_call_timeout: float = 2.0
    connect_timeout: float = 0.0
    lease_ttl: float = 5.0
    ready_timeout: float = 30.0
    attach_timeout: float = 10.0
    stop_timeout: float = 1.0
    link_timeout: float = 5.0
    read_timeout: float = 60.0
    timeout: float = 900.0
    keep_alive_interval: float = 0.0
    keep_alive_max_attempt: float = 3.0
    is_host: bool | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    cacert: str = ""
    cert: str = ""
    key: str = ""

    def credentials(self) -> dict[str, str | None]:
        """The same as arguments of `EtcdStore`."""
        given = {
            "user": self.user,
            "password": self.password,
            "ca_cert": self.cacert,
            "cert": self.cert,
            "key": self.key,
        }
        return {name: value or None for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """What the user wants done about health.

    Attributes:
        policy: "drain": a node with a sick device leaves the job; "report": it only says so; "off": nobody looks.
        interval_s: between two looks.
    """

    policy: str = "drain"
    interval_s: float = HEALTH_INTERVAL_S


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Everything an agent is told.

    `backend` is `standalone` for a job on this machine alone, else `static`, `c10d` or `etcd`; `endpoint` is where that
    one's etcd is. `master` is what workers find in MASTER_ADDR and MASTER_PORT, where the user has fixed it.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    backend: str
    endpoint: str
    job: str
    script: str
    script_args: tuple[str, ...] = ()
    conf: RendezvousConf = field(default_factory=RendezvousConf)
    max_restarts: int | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    local_addr: str = ""
    node: str = ""
    node_rank: int = 0
    master: tuple[str, int] | None = None
    role: str = "default"
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    logs: LogSettings = field(default_factory=LogSettings)
    logs_specs: str = ""
    numa_binding: str = ""
    virtual_local_rank: bool = False
    events: str | None = None
    events_to_console: bool = False
    warm: bool = True
    warm_start: bool = False
    preload: tuple[str, ...] = PRELOAD
    shutdown_timeout: float = 30.0
    notices: tuple[tuple[str, Notice], ...] = ()
    checkpoints: Checkpointing | None = None
    wishes: Wishes = field(default_factory=Wishes)
    health: HealthSettings = field(default_factory=HealthSettings)
    node_check: bool = False
    hang: HangTimeout = field(default_factory=HangTimeout)


def parse_nproc(text: str) -> int:
    """Read a number of workers, or cpu, gpu, npu, xpu or auto (devices where there are some, else cpu).

    Raises:
        UsageError: it is none of these, or there is no device of the kind.
    """
    if text not in ("cpu", "gpu", "npu", "xpu", "auto"):
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--nproc-per-node={text}: expected a number of at least 1, cpu, gpu, npu, xpu or auto")
        return int(text)
    from elaunch import devices  # a plain number needs none of it

    gpus = devices.count_gpus(os.environ) if text in ("gpu", "auto") else 0
    npus = devices.count_npus(os.environ) if text == "npu" or (text == "auto" and not gpus) else 0
    xpus = _count_xpus() if text == "xpu" or (text == "auto" and not gpus and not npus) else 0
    cpus = len(os.sched_getaffinity(0))
    if text == "gpu" and not gpus:
        raise UsageError("--nproc-per-node=gpu: this machine has no NVIDIA GPU that the driver shows")
    if text == "xpu" and not xpus:
        raise UsageError("--nproc-per-node=xpu: this machine has no Intel GPU that the driver shows")
    if text == "npu" and not npus:
        raise UsageError("--nproc-per-node=npu: this machine has no Ascend NPU that the driver shows")
    return {"cpu": cpus, "gpu": gpus, "npu": npus, "xpu": xpus, "auto": gpus or npus or xpus or cpus}[text]


def _count_xpus(drivers: str = "/sys/class/drm") -> int:
    """Intel GPUs that a kernel driver for computing serves; ZE_AFFINITY_MASK narrows them."""
    cards = [name for name in _listdir(drivers) if name.startswith("renderD")]
    served = ("xe", "i915")
    present = sum(os.path.basename(os.path.realpath(f"{drivers}/{card}/device/driver")) in served for card in cards)
    mask = os.environ.get("ZE_AFFINITY_MASK")
    return present if mask is None else min(present, len({item.split(".")[0] for item in mask.split(",") if item}))


def _listdir(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def parse_health(policy: str, interval: str) -> HealthSettings:
    """Read `--health-policy` and `--health-interval`; empty ones were not given.

    Raises:
        UsageError: a value cannot be used.
    """
    if policy and policy not in HEALTH_POLICIES:
        raise UsageError(f"--health-policy={policy}: expected one of {', '.join(HEALTH_POLICIES)}")
    try:
        interval_s = float(interval or HEALTH_INTERVAL_S)
    except ValueError:
        interval_s = 0.0
    if not 0.01 <= interval_s <= 3600:
        raise UsageError(f"--health-interval={interval}: expected seconds, 0.01 to 3600")
    return HealthSettings(policy or "drain", interval_s)


def parse_signals(text: str) -> tuple[int, ...]:
    """Read `--signals-to-handle`: names, separated by commas.

    Raises:
        UsageError: one of them is no signal, or one that cannot be handled.
    """
    numbers = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise UsageError(f"--signals-to-handle={text}: {name} is no signal that can be handled")
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def parse_conf(text: str, defaults: RendezvousConf = RendezvousConf()) -> RendezvousConf:
    """Read `--rdzv-conf`: key=value, separated by commas; environment variables give the defaults of secrets.

    Raises:
        UsageError: an unknown key, no number of seconds where one is needed, or a file that is not there.
    """
    values: dict[str, str | float | bool] = {}
    for name in ("user", "password", "cacert", "cert", "key"):
        if os.environ.get(f"ELAUNCH_ETCD_{name.upper()}"):
            values[name] = os.environ[f"ELAUNCH_ETCD_{name.upper()}"]
    known = {name: type(getattr(defaults, name)) for name in RendezvousConf.__slots__}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or name not in (*known, *_TORCHRUN_ONLY):
            raise UsageError(f"--rdzv-conf {item!r}: expected key=value with a key of {', '.join(sorted(known))}")
        if name == "store_type" and value.strip() != "tcp":
            raise UsageError(f"--rdzv-conf {item!r}: the rendezvous is an etcd; expected store_type=tcp or none")
        if name == "is_host":
            if value.strip().lower() not in _BOOLEANS:
                raise UsageError(f"--rdzv-conf {item!r}: expected true or false")
            values[name] = _BOOLEANS[value.strip().lower()]
            continue
        if name not in known:
            continue
        if known[name] is str:
            values[name] = value.strip()
            continue
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise UsageError(f"--rdzv-conf {item!r}: expected a number of seconds")
        if name == "lease_ttl" and number < 1:
            raise UsageError(f"--rdzv-conf {item!r}: a lease lasts at least 1 second")
        if name == "link_timeout" and number < 2:
            raise UsageError(f"--rdzv-conf {item!r}: a link that lives may be silent for a second; expected at least 2")
        values[name] = number
    conf = replace(defaults, **values)  # type: ignore[arg-type]
    if conf.keep_alive_interval and "lease_ttl" not in values:
        conf = replace(conf, lease_ttl=max(1.0, conf.keep_alive_interval * conf.keep_alive_max_attempt))
    if bool(conf.user) != bool(conf.password):
        raise UsageError("--rdzv-conf: user and password go together")
    if bool(conf.cert) != bool(conf.key):
        raise UsageError("--rdzv-conf: cert and key go together")
    for name in ("cacert", "cert", "key"):
        path = getattr(conf, name)
        if path and not os.path.isfile(path):
            raise UsageError(f"--rdzv-conf {name}={path}: no such file")
    return conf


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Read HOST, HOST:PORT or [V6]:PORT.

    Raises:
        UsageError: the port is no port.
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"--rdzv-endpoint={text}: expected HOST:PORT")
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Write what `parse_endpoint` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(endpoint_host: str, endpoint_port: int) -> str:
    """The address of this machine on the route to the endpoint; nothing is sent.

    Raises:
        LaunchError: the host name does not resolve, or there is no route.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            endpoint_host, endpoint_port or 2379, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise LaunchError(
            f"--rdzv-endpoint {endpoint_host}:{endpoint_port}: {error.strerror or error}; "
            "check the name, or give this machine's address with --local-addr"
        ) from error
