"""Settings of one agent: frozen, each of them a flag and an environment variable."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from elaunch.agent.notices import Notice
from elaunch.agent.output.logs import LogSettings
from elaunch.checkpoints import EVERY_FLAG, FOLDER_FLAG, Checkpointing
from elaunch.detect.hang import HangTimeout
from elaunch.errors import UsageError
from elaunch.policy.collectives import Collectives
from elaunch.policy.settings import NAMES, PROFILE, PolicyConfig
from elaunch.rendezvous.conf import FOUND, RendezvousConf, parse_endpoints
from elaunch.rendezvous.rules.spares import STATE_FLAG
from elaunch.rendezvous.security.identity import is_loopback
from elaunch.rendezvous.security.secret import SecuritySettings
from elaunch.replica_check import ReplicaCheck

# What every training script imports; torch itself imports _dynamo, for a second, when the first optimizer is made.
PRELOAD = ("torch", "torch._dynamo", "elaunch.workers.data_parallel.job")


HEALTH_POLICIES = ("drain", "report", "off")
HEALTH_INTERVAL_S = 1.0
BACKENDS = ("static", "c10d", "etcd", "etcd-v3")
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MASTER_PORT = 29500
STORE_NODES = 3  # that serve the store, where as many endpoints are given
HOSTED_PORT = 29400  # where torchrun's c10d backend listens by default
ALL_INTERFACES = "0.0.0.0"
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
STATIC_SHIFT = 10000  # from --master-port, which is the workers' own, to the port of the rendezvous


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
class DetectionSettings:
    """How trouble is looked for: in devices and the machine, in workers that hang, and in the node before it joins."""

    health: HealthSettings = field(default_factory=HealthSettings)
    hang: HangTimeout = field(default_factory=HangTimeout)
    node_check: bool = False


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """Where and how the nodes meet.

    Attributes:
        backend: `standalone` for a job on this machine alone, else `static`, `c10d` or `etcd`.
        endpoint: where the etcd of that one is; with commas, where any of its servers may be.
        conf: the keys of `--rdzv-conf`.
        node_rank: of this node, where the user has fixed it.
        master: what workers find in MASTER_ADDR and MASTER_PORT, where the user has fixed it.
        spares: how many nodes beyond the maximum hold workers ready.
        spare_state: whether these hold the state, too.
        failure_domain: of this node; empty: it has none but itself.
        security: how the nodes know each other.
    """

    backend: str
    endpoint: str = ""
    conf: RendezvousConf = field(default_factory=RendezvousConf)
    node_rank: int = 0
    master: tuple[str, int] | None = None
    spares: int = 0
    spare_state: bool = False
    failure_domain: str = ""
    security: SecuritySettings = field(default_factory=SecuritySettings)

    @property
    def is_hosted(self) -> bool:
        """Returns whether an agent of the job hosts the store, so that it ends with that agent."""
        return self.backend != "etcd"

    @property
    def encrypts_links(self) -> bool:
        """Returns whether workers need a certificate: where no other node can come, all links are of one machine."""
        links = self.security.links
        return links == "on" or (links == "auto" and self.backend != "standalone")

    @property
    def is_within(self) -> bool:
        """Returns whether the nodes meet at loopback addresses, so that all are on this machine."""
        if not self.endpoint:
            return True
        return all(is_loopback(host) for host, _ in parse_endpoints(self.endpoint, self.backend))

    @property
    def guards_store(self) -> bool:
        """Returns whether an etcd that this job starts asks for certificates, alike on all nodes.

        It does in a job with a secret or own certificates, and in any other one between machines, unless nothing is to
        be encrypted.
        """
        links = self.security.links
        is_asked = self.security.has_proof or links == "on"
        return self.is_hosted and (is_asked or (links == "auto" and not self.is_within))

    def store_nodes(self, max_nodes: int) -> int:
        """Returns on how many nodes the store is, at most, in a job of so many nodes and its spares.

        Who gives several endpoints can find the job without its first node. Otherwise that node, when it comes back,
        would take itself for the first of a new job.
        """
        several = self.conf.store_nodes or (STORE_NODES if self.endpoint.count(",") >= STORE_NODES - 1 else 1)
        return several if self.backend == "c10d" and max_nodes + self.spares >= several else 1


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """What each worker runs.

    Attributes:
        script: a path, or the name of a module or program.
        args: its arguments.
        module: it is the name of a module, as for `python -m`.
        no_python: it is a program.
        run_path: it is run by `runpy.run_path`, as torchrun's --run-path.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    run_path: bool = False


@dataclass(frozen=True, slots=True)
class StartSettings:
    """How workers are started.

    Attributes:
        numa_binding: to which CPUs they are bound; empty: to none.
        virtual_local_rank: each sees one device only, as the first.
        warm: replacements are forks of a process that has `preload` imported.
        warm_start: the first workers are, too.
        preload: modules.
    """

    numa_binding: str = ""
    virtual_local_rank: bool = False
    warm: bool = True
    warm_start: bool = False
    preload: tuple[str, ...] = PRELOAD


@dataclass(frozen=True, slots=True)
class StopSettings:
    """What ends the workers of this node.

    Attributes:
        signals: to the agent.
        notices: sources of announcements that the node will be taken away, each with its name.
        shutdown_timeout: seconds after which workers that were told to end are killed.
        left_code: exit code of a node that has left a job which goes on.
    """

    signals: tuple[int, ...] = DEFAULT_SIGNALS
    notices: tuple[tuple[str, Notice], ...] = ()
    shutdown_timeout: float = 30.0
    left_code: int = 0


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Where the streams of workers and the events of the agent go.

    Attributes:
        logs: of the workers.
        logs_specs: the entry point that decides on those instead; empty: none.
        events: path of the event log; None: there is none.
        events_to_console: events go to standard error, too.
        metrics: address and port at which Prometheus finds this agent; port 0: a free one; None: it does not listen.
        ui: the same of the page that shows the job.
    """

    logs: LogSettings = field(default_factory=LogSettings)
    logs_specs: str = ""
    events: str | None = None
    events_to_console: bool = False
    metrics: tuple[str, int] | None = None
    ui: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What scripts that use elaunch are told: checkpoints, how plans are chosen, when replicas are compared."""

    checkpoints: Checkpointing | None = None
    replica_check: ReplicaCheck = field(default_factory=ReplicaCheck)
    collectives: Collectives = "auto"
    policy: PolicyConfig = field(default_factory=PolicyConfig)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Everything an agent is told.

    Attributes:
        min_nodes, max_nodes: of the job.
        nproc_per_node: workers of this node.
        job: its name, the same for all nodes.
        rendezvous: where and how they meet.
        program: what each worker runs.
        max_restarts: how often workers are started again after failures; None: as often as that makes sense.
        node: name of this node.
        role: of its workers.
        local_addr: the address at which other nodes reach this one; empty: it is found out.
        start: how workers are started.
        stop: what ends them.
        output: where their streams and the events go.
        detection: how trouble is looked for.
        training: what scripts that use elaunch are told.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    job: str
    rendezvous: RendezvousSettings
    program: WorkerProgram
    max_restarts: int | None = None
    node: str = ""
    role: str = "default"
    local_addr: str = ""
    start: StartSettings = field(default_factory=StartSettings)
    stop: StopSettings = field(default_factory=StopSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    detection: DetectionSettings = field(default_factory=DetectionSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def founds(self) -> bool:
        """Returns whether nodes that lose the store of this job found another one."""
        is_shared = self.rendezvous.is_hosted and self.rendezvous.backend != "standalone" and self.max_nodes > 1
        return is_shared and self.rendezvous.conf.on_store_loss == FOUND


def settings_for_all(config: AgentConfig, environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns what must be alike on all nodes: names of flags, keys or variables, and the values that hold here."""
    training = config.training
    found = {NAMES.get(name, name): value for name, value in training.policy.variables().items() if name != PROFILE}
    if training.checkpoints is not None:
        found |= {FOLDER_FLAG: str(training.checkpoints.folder), EVERY_FLAG: str(training.checkpoints.every)}
    found |= {"--collectives": training.collectives, "--check-replicas": str(training.replica_check)}
    found |= {name: environment[name] for name in ("ELAUNCH_STATE_PATH",) if environment.get(name)}
    if config.rendezvous.spare_state:
        found[STATE_FLAG] = "1"
    found |= {f"--rdzv-conf={key}": value for key, value in _keys_for_all(config).items()}
    return tuple(sorted((found | dict(config.rendezvous.security.for_all())).items()))


def _keys_for_all(config: AgentConfig) -> dict[str, str]:
    """Returns the rendezvous keys among those. With `standalone` there is no other node."""
    rendezvous = config.rendezvous
    if rendezvous.backend == "standalone":
        return {}
    keys = {"lease_ttl": f"{rendezvous.conf.lease_ttl:g}"}
    if rendezvous.is_hosted:
        keys["on_store_loss"] = rendezvous.conf.on_store_loss
    if rendezvous.backend == "c10d":
        keys["store_nodes"] = str(rendezvous.store_nodes(config.max_nodes))
    return keys


def parse_nproc(text: str) -> int:
    """Reads a number of workers, or cpu, gpu, npu, xpu or auto (devices where there are some, else cpu).

    Raises:
        UsageError: it is none of these, or there is no device of the kind.
    """
    if text not in ("cpu", "gpu", "npu", "xpu", "auto"):
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--nproc-per-node={text}: expected a number of at least 1, cpu, gpu, npu, xpu or auto")
        return int(text)
    from elaunch.detect import devices

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


def parse_address(text: str | None, flag: str, address: str) -> tuple[str, int] | None:
    """Reads where something is to listen: a port, or ADDRESS:PORT; None and "" were not given.

    Args:
        text: what was given.
        flag: by which.
        address: at which it listens if none is given.

    Raises:
        UsageError: it is neither.
    """
    if not text:
        return None
    given, colon, port = text.rpartition(":")
    bare = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    if (
        not port.isdecimal()
        or len(port) > len(str(MAX_PORT))
        or int(port) > MAX_PORT
        or (colon and ":" in bare and bare == given)
    ):
        raise UsageError(f"{flag}={text}: expected a port, 0 for a free one, or ADDRESS:PORT")
    return bare or address, int(port)


def parse_health(policy: str, interval: str) -> HealthSettings:
    """Reads `--health-policy` and `--health-interval`; empty ones were not given.

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
    """Reads `--signals-to-handle`: names, separated by commas.

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
