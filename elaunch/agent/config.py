"""Settings of one agent: frozen, each of them a flag and an environment variable."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

from elaunch.agent.logs import LogSettings
from elaunch.agent.notices import Notice
from elaunch.checkpoints import Checkpointing
from elaunch.detect.hang import HangTimeout
from elaunch.errors import UsageError
from elaunch.policy.settings import PolicyConfig
from elaunch.rendezvous.conf import RendezvousConf

# What every training script imports; torch itself imports _dynamo, for a second, when the first optimizer is made.
PRELOAD = ("torch", "torch._dynamo", "elaunch.workers.data_parallel.job")


HEALTH_POLICIES = ("drain", "report", "off")
HEALTH_INTERVAL_S = 1.0
BACKENDS = ("static", "c10d", "etcd", "etcd-v3")
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MASTER_PORT = 29500
HOSTED_PORT = 29400  # where torchrun's c10d backend listens by default
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
    policy_config: PolicyConfig = field(default_factory=PolicyConfig)
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
