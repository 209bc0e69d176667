"""How the rendezvous is reached: `--rdzv-conf`, and endpoints as users write them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from elaunch.errors import LaunchError, UsageError
from elaunch.rendezvous.security.secret import NodeFiles

ETCD_PORT = 2379
ETCD_PASSWORD = "ELAUNCH_ETCD_PASSWORD"
FOUND, WAIT = "found", "wait"  # what nodes do that lose the store
CONNECT_S = 10.0  # for a store that should be there already

# Read by torchrun's rendezvous, and without an effect here: an etcd needs no such setting.
_TORCHRUN_ONLY = ("close_timeout", "heartbeat_timeout", "store_type", "rank")
_PORT_DIGITS = 5
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class EtcdCredentials:
    """Who this node is to etcd, and how they know each other.

    Attributes:
        user, password: also ELAUNCH_ETCD_USER and ELAUNCH_ETCD_PASSWORD.
        cacert, cert, key: TLS files; also ELAUNCH_ETCD_CACERT, ELAUNCH_ETCD_CERT, ELAUNCH_ETCD_KEY.
        node: who it is to other nodes, and to an etcd that one of them has started.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    cacert: str = ""
    cert: str = ""
    key: str = ""
    node: NodeFiles = field(default_factory=NodeFiles)

    def arguments(self) -> dict[str, Any]:
        """Returns the same as arguments of `EtcdStore`."""
        given = {
            "user": self.user,
            "password": self.password,
            "ca_cert": self.cacert,
            "cert": self.cert,
            "key": self.key,
        }
        return {name: value or None for name, value in given.items()}

    def check(self) -> None:
        """Raises `UsageError` where half of a pair is missing, or a file is not there."""
        if bool(self.user) != bool(self.password):
            raise UsageError("--rdzv-conf: user and password go together")
        if bool(self.cert) != bool(self.key):
            raise UsageError("--rdzv-conf: cert and key go together")
        for name, path in (("cacert", self.cacert), ("cert", self.cert), ("key", self.key)):
            if path and not os.path.isfile(path):
                raise UsageError(f"--rdzv-conf {name}={path}: no such file")


KEYS = {
    "join_timeout": "how long a job may have fewer nodes than its minimum before it fails",
    "last_call_timeout": "how long a job with enough nodes waits for more before it starts (c10d: 30)",
    "connect_timeout": "how long an agent tries to reach the store at the start (etcd: 10; else the next two)",
    "read_timeout": "for c10d, how long a node tries to reach the one that hosts the rendezvous",
    "timeout": "for static, the same",
    "lease_ttl": "a node that is silent for this long has left; at least 1",
    "store_timeout": "how long a node that cannot go on without the store waits for it to come back; at least 1",
    "on_store_loss": "for c10d and static, what the other nodes do when those that host the store are lost: found "
    "another one, or wait",
    "store_nodes": "for c10d, on how many nodes the store is, once the job has as many: 1, 3 or 5 (3 where "
    "--rdzv-endpoint names three nodes)",
    "ready_timeout": "how long ready workers wait for others that still start before the first step",
    "attach_timeout": "how long a script has to call elaunch.init() before a new node restarts it as a whole",
    "register_timeout": "how long a worker of a training job may take to call register() before it is replaced",
    "first_steps_timeout": "how long a worker for which others wait may show no progress before ten steps have been "
    "seen, when it is not known yet how long one takes, before it is replaced",
    "stop_timeout": "how long a worker may be stopped (SIGSTOP) before it is replaced",
    "link_timeout": "how long nothing may come from the machine of a worker for which others wait, not even the "
    "acknowledgement of a byte, before their link counts as cut; at least 2",
    "keep_alive_interval": "its product with keep_alive_max_attempt is lease_ttl where that is not given",
    "keep_alive_max_attempt": "see keep_alive_interval; 3 where it is not given",
    "is_host": "for c10d, true or false: whether this node hosts the rendezvous; otherwise it finds out by itself",
    "user": "for etcd, with password; better: ELAUNCH_ETCD_USER and ELAUNCH_ETCD_PASSWORD, which no process list shows",
    "password": "see user",
    "cacert": "for etcd with TLS: file of the CA; also ELAUNCH_ETCD_CACERT",
    "cert": "file of this node's own certificate, with key; also ELAUNCH_ETCD_CERT",
    "key": "file of its key; also ELAUNCH_ETCD_KEY",
    "secret_file": "file that holds the job's secret, for this user alone; also ELAUNCH_SECRET_FILE, or the secret "
    "itself in ELAUNCH_SECRET",
    "node_ca": "file of your own CA, by which nodes know each other instead; also ELAUNCH_NODE_CA",
    "node_cert": "file of this node's own certificate of that CA; also ELAUNCH_NODE_CERT",
    "node_key": "file of its key; also ELAUNCH_NODE_KEY",
}
"""What each key of `--rdzv-conf` means; times are in seconds."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """torchrun's way to say how long a node may be silent: so many attempts, with so many seconds between two."""

    interval: float = 0.0
    max_attempt: float = 3.0


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How long a worker may show no progress, in seconds: until it registers, in first steps, while stopped."""

    register_timeout: float = 900.0
    first_steps_timeout: float = 1800.0
    stop_timeout: float = 1.0


@dataclass(frozen=True, slots=True)
class RendezvousConf:
    """The values of `--rdzv-conf`, of which `KEYS` says what they mean. Times in seconds.

    `connect_timeout` 0 is what is usual for the backend, and `store_nodes` 0 what is usual for the endpoint; `etcd` has
    the keys of `EtcdCredentials`, `workers` those of `WorkerLimits`.
    """

    join_timeout: float = 600.0
    last_call_timeout: float = 2.0
    connect_timeout: float = 0.0
    lease_ttl: float = 5.0
    store_timeout: float = 300.0
    store_nodes: int = 0
    on_store_loss: str = FOUND
    ready_timeout: float = 30.0
    attach_timeout: float = 10.0
    link_timeout: float = 5.0
    workers: WorkerLimits = WorkerLimits()
    read_timeout: float = 60.0
    timeout: float = 900.0
    keep_alive: KeepAlive = KeepAlive()
    is_host: bool | None = None
    etcd: EtcdCredentials = EtcdCredentials()


def parse_conf(text: str, defaults: RendezvousConf = RendezvousConf()) -> RendezvousConf:
    """Reads `--rdzv-conf`: key=value, separated by commas; environment variables give the defaults of secrets.

    Raises:
        UsageError: an unknown key, no number of seconds where one is needed, or a file that is not there.
    """
    values: dict[str, str | float | bool] = {}
    variables = {one.name: f"ELAUNCH_ETCD_{one.name.upper()}" for one in fields(EtcdCredentials) if one.name != "node"}
    variables |= {one.name: f"ELAUNCH_{one.name.upper()}" for one in fields(NodeFiles)}
    access = {name: given for name, variable in variables.items() if (given := os.environ.get(variable))}
    known = set(KEYS)
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
        if name == "on_store_loss":
            if value.strip() not in (FOUND, WAIT):
                raise UsageError(f"--rdzv-conf {item!r}: expected {FOUND} or {WAIT}")
            values[name] = value.strip()
            continue
        if name == "store_nodes":
            if value.strip() not in ("1", "3", "5"):
                raise UsageError(f"--rdzv-conf {item!r}: expected 1, 3 or 5")
            values[name] = int(value)
            continue
        if name not in known:
            continue
        if name in variables:
            access[name] = value.strip()
            continue
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise UsageError(f"--rdzv-conf {item!r}: expected a number of seconds")
        if name == "lease_ttl" and number < 1:
            raise UsageError(f"--rdzv-conf {item!r}: a lease lasts at least 1 second")
        if name == "store_timeout" and number < 1:
            raise UsageError(
                f"--rdzv-conf {item!r}: a store that starts again is away for a second; expected at least 1"
            )
        if name == "link_timeout" and number < 2:
            raise UsageError(f"--rdzv-conf {item!r}: a link that lives may be silent for a second; expected at least 2")
        values[name] = number
    keep_alive = {
        key: values.pop(f"keep_alive_{key}") for key in ("interval", "max_attempt") if f"keep_alive_{key}" in values
    }
    node = replace(defaults.etcd.node, **_of(NodeFiles, access))
    node.check()
    etcd = replace(defaults.etcd, node=node, **_of(EtcdCredentials, access))
    etcd.check()
    alive = replace(defaults.keep_alive, **keep_alive)  # type: ignore[arg-type]
    limits = {one.name: values.pop(one.name) for one in fields(WorkerLimits) if one.name in values}
    workers = replace(defaults.workers, **limits)  # type: ignore[arg-type]
    conf = replace(defaults, etcd=etcd, keep_alive=alive, workers=workers, **values)  # type: ignore[arg-type]
    if alive.interval and "lease_ttl" not in values:
        conf = replace(conf, lease_ttl=max(1.0, alive.interval * alive.max_attempt))
    return conf


def _of(kind: type[EtcdCredentials] | type[NodeFiles], texts: Mapping[str, str]) -> dict[str, str]:
    return {one.name: texts[one.name] for one in fields(kind) if one.name in texts}


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Reads HOST, HOST:PORT or [V6]:PORT.

    Raises:
        UsageError: the port is no port.
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isdecimal() or len(port) > _PORT_DIGITS or int(port) >= 1 << 16:
        raise UsageError(f"--rdzv-endpoint={text}: expected HOST:PORT")
    return host, int(port)


def parse_endpoints(text: str, backend: str) -> list[tuple[str, int]]:
    """Reads the endpoints of an etcd cluster, separated by commas; `backend` is named where there are none.

    Raises:
        UsageError: there are none, or the port of one is no port.
    """
    if not text.strip():
        raise UsageError(f"--rdzv-backend={backend} needs --rdzv-endpoint=HOST:PORT of an etcd server")
    return [parse_endpoint(member.strip(), ETCD_PORT) for member in text.split(",")]


def join_endpoint(host: str, port: int) -> str:
    """Writes what `parse_endpoint` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(endpoint_host: str, endpoint_port: int) -> str:
    """Returns the address of this machine on the route to the endpoint; nothing is sent.

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


def route_to(addresses: list[tuple[str, int]]) -> str:
    """Returns this machine's address on the route to the first of the endpoints that there is a route to.

    Raises:
        LaunchError: there is a route to none of them.
    """
    for host, port in addresses[:-1]:
        with suppress(LaunchError):
            return own_address(host, port)
    return own_address(*addresses[-1])
