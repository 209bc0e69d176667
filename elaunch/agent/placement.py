"""Where a worker runs: which GPU it sees (`--virtual-local-rank`) and which CPUs it may use (`--numa-binding`).

Local rank n uses GPU n of those that CUDA_VISIBLE_DEVICES leaves. Which CPUs are near a GPU is read from sysfs; the
choice among them is pure. The CPUs are for `os.sched_setaffinity` in the worker before its program starts, which needs
no `numactl`; memory is then taken from the node of the CPU that first touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.config import NUMA_MODES
from elaunch.detect.devices import CUDA_VISIBLE as VISIBLE
from elaunch.detect.devices import driver_gpus, logger, visible_gpus
from elaunch.detect.nvml import list_gpus
from elaunch.errors import DeviceError, LaunchError

ANYWHERE = -1
"""The node of a GPU of which the kernel does not know where it is, on a machine with several nodes: all of these."""


def virtual_local_rank(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Returns the variables of a worker that sees its own GPU alone, as device 0.

    Args:
        env: the launcher's environment. A CUDA_VISIBLE_DEVICES that hides every GPU stays as it is.
        local_rank: the worker's place on this node.

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names fewer devices than there are workers.
    """
    visible = env.get(VISIBLE)
    if visible is None:
        device = str(local_rank)
    elif visible.strip() in ("", "-1"):
        device = visible
    else:
        devices = [item.strip() for item in visible.split(",")]
        if local_rank >= len(devices):
            raise LaunchError(
                f"--virtual-local-rank: no device for local rank {local_rank}, since {VISIBLE}={visible} names "
                f"{len(devices)}; start fewer workers with --nproc-per-node, or name more devices"
            )
        device = devices[local_rank]
    return {"LOCAL_RANK": "0", VISIBLE: device}


# -- which CPUs are near a GPU: pure ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Topology:
    """Where GPUs and CPUs are. CPUs, nodes and sockets have the kernel's numbers.

    Attributes:
        gpu_nodes: the NUMA node of each GPU, in CUDA's order; ANYWHERE if unknown.
        node_cpus: the CPUs of each node, if it has any.
        sockets: the socket of each CPU.
        cores: for each CPU, the lowest CPU of its physical core.
        caches: for each CPU, the lowest CPU of those that share its last-level cache.
    """

    gpu_nodes: tuple[int, ...]
    node_cpus: Mapping[int, frozenset[int]]
    sockets: Mapping[int, int]
    cores: Mapping[int, int]
    caches: Mapping[int, int]


def cpus_for(mode: str, local_rank: int, topology: Topology, allowed: Set[int]) -> frozenset[int]:
    """Returns the CPUs for a worker, never none.

    Modes, as in torch/numa/binding.py: `node` is all CPUs of the GPU's NUMA node; `socket` all of the nodes of its
    socket; `exclusive` an equal share of the node's physical cores, the first GPUs one more where that does not come
    out even; `core-complex` the CPUs around one last-level cache of the node, the largest first, another for each GPU
    if there are enough.

    Args:
        mode: one of NUMA_MODES.
        local_rank: the worker's place on this node, and the number of its GPU.
        topology: of this machine.
        allowed: the CPUs that the launcher may use (`os.sched_getaffinity`).

    Raises:
        LaunchError: there is no such GPU, none of the CPUs near it may be used, or too few for `exclusive`.
    """
    assert mode in NUMA_MODES, mode
    if not topology.gpu_nodes:
        raise LaunchError(f"--numa-binding={mode} binds workers to the CPUs near their GPUs, and there is no GPU here")
    if local_rank >= len(topology.gpu_nodes):
        raise LaunchError(
            f"--numa-binding={mode}: no GPU for local rank {local_rank}, since {len(topology.gpu_nodes)} can be used; "
            f"start fewer workers with --nproc-per-node, or look at {VISIBLE}"
        )
    node = topology.gpu_nodes[local_rank]
    if node == ANYWHERE:
        near = frozenset().union(*topology.node_cpus.values()) & allowed
    else:
        near = topology.node_cpus.get(node, frozenset()) & allowed
    if not near:
        raise LaunchError(
            f"--numa-binding={mode}: GPU {local_rank} is on NUMA node {node}, of whose CPUs this process may use none; "
            "give the job CPUs of that node (cgroup, taskset, --cpu-bind), or leave the flag out"
        )
    if mode == "node" or (mode == "socket" and node == ANYWHERE):
        return near
    if mode == "socket":
        return _of_socket(topology, near, allowed)
    gpus = [gpu for gpu, its_node in enumerate(topology.gpu_nodes) if its_node == node]
    position = gpus.index(local_rank)
    if mode == "exclusive":
        return _share(position, len(gpus), _groups(near, topology.cores, "share a core"), node)
    complexes = _groups(near, topology.caches, "share a cache")
    complexes.sort(key=lambda cpus: (-len(cpus), min(cpus)))
    return complexes[position % len(complexes)]


def _of_socket(topology: Topology, near: frozenset[int], allowed: Set[int]) -> frozenset[int]:
    """All nodes of the socket. A node counts as a whole: virtual machines show each CPU as a socket of its own."""
    socket = topology.sockets.get(min(near))
    usable = [cpus & allowed for cpus in topology.node_cpus.values()]
    return near.union(*(cpus for cpus in usable if cpus and topology.sockets.get(min(cpus)) == socket))


def _share(position: int, sharers: int, cores: list[frozenset[int]], node: int) -> frozenset[int]:
    each, more = divmod(len(cores), sharers)
    if each < 1:
        raise LaunchError(
            f"--numa-binding=exclusive: {sharers} GPUs are on NUMA node {node}, of which {len(cores)} cores can be "
            "used; give the job more CPUs, or choose --numa-binding=node"
        )
    start = position * each + min(position, more)
    return frozenset().union(*cores[start : start + each + (position < more)])


def _groups(cpus: frozenset[int], leaders: Mapping[int, int], what: str) -> list[frozenset[int]]:
    """The CPUs by their leader, in its order."""
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        if cpu not in leaders:
            raise LaunchError(
                f"--numa-binding: the kernel does not say which CPUs {what} with CPU {cpu}; choose --numa-binding=node"
            )
        groups.setdefault(leaders[cpu], set()).add(cpu)
    return [frozenset(groups[leader]) for leader in sorted(groups)]


def parse_ranges(text: str) -> frozenset[int]:
    """Returns the numbers of a kernel list such as "0-2,4,6-7".

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = item.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


# -- reading this machine ---------------------------------------------------------------------------------------------


def read_topology(env: Mapping[str, str], sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> Topology:
    """Describes this machine for `cpus_for`.

    GPUs are asked of pynvml where it can be imported, else of /proc/driver/nvidia/gpus. On a machine without any, as
    torchrun does, this fails: there the flag has nothing to go by.

    Args:
        env: the launcher's environment.
        sys_root, proc_root: where sysfs and procfs are.

    Raises:
        LaunchError: there is no GPU that can be used, or the kernel shows no NUMA nodes.
    """
    try:
        present = list_gpus()
    except DeviceError as error:
        logger.debug("%s", error)
        present = driver_gpus(proc_root)
    gpus = visible_gpus(present, env.get(VISIBLE))
    if not gpus:
        hidden = f"{VISIBLE}={env[VISIBLE]} leaves none of {len(present)}" if present else "the driver shows none"
        if present and "MIG-" in env[VISIBLE]:
            hidden += "; MIG devices are found with nvidia-ml-py only"
        raise LaunchError(
            f"--numa-binding binds workers to the CPUs near their GPUs, and there is no NVIDIA GPU here ({hidden}); "
            "leave the flag out"
        )
    node_cpus = _node_cpus(sys_root)
    cpus = frozenset().union(*node_cpus.values())
    return Topology(
        gpu_nodes=tuple(_gpu_node(sys_root, gpu.address, node_cpus) for gpu in gpus),
        node_cpus=node_cpus,
        sockets=_known(cpus, lambda cpu: int(_cpu_file(sys_root, cpu, "topology/physical_package_id"))),
        cores=_known(cpus, lambda cpu: min(parse_ranges(_cpu_file(sys_root, cpu, "topology/thread_siblings_list")))),
        caches=_known(cpus, lambda cpu: min(_last_level(sys_root / f"devices/system/cpu/cpu{cpu}/cache"))),
    )


def _gpu_node(sys_root: Path, address: str, node_cpus: Mapping[int, frozenset[int]]) -> int:
    path = sys_root / "bus/pci/devices" / address / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        node = ANYWHERE
    if node < 0:
        # Usual with a single node. Of several, torchrun takes the first, for all GPUs.
        return next(iter(node_cpus)) if len(node_cpus) == 1 else ANYWHERE
    return node


def _node_cpus(sys_root: Path) -> dict[int, frozenset[int]]:
    """The nodes that have CPUs: memory may form nodes of its own."""
    found = {}
    for path in sorted(sys_root.glob("devices/system/node/node[0-9]*/cpulist")):
        try:
            cpus = parse_ranges(path.read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found[int(path.parent.name.removeprefix("node"))] = cpus
    if not found:
        raise LaunchError(
            f"--numa-binding: the kernel shows no NUMA nodes under {sys_root}/devices/system/node; leave the flag out"
        )
    return found


def _known(cpus: Iterable[int], read: Callable[[int], int]) -> dict[int, int]:
    """What is read of each CPU, without those of which the kernel does not say it."""
    found = {}
    for cpu in cpus:
        try:
            found[cpu] = read(cpu)
        except (OSError, ValueError):
            continue
    return found


def _cpu_file(sys_root: Path, cpu: int, name: str) -> str:
    return (sys_root / f"devices/system/cpu/cpu{cpu}" / name).read_text()


def _last_level(folder: Path) -> frozenset[int]:
    """The CPUs that share the highest level of data cache with the one whose cache folder this is."""
    levels = {
        int((index / "level").read_text()): parse_ranges((index / "shared_cpu_list").read_text())
        for index in folder.glob("index[0-9]*")
        if (index / "type").read_text().strip() in ("Unified", "Data")
    }
    return levels[max(levels)]
