from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from elaunch.agent.config import NUMA_MODES
from elaunch.agent.placement import ANYWHERE, Topology, cpus_for, parse_ranges, read_topology, virtual_local_rank
from elaunch.detect.devices import Gpu, sysfs_address, visible_gpus
from elaunch.errors import LaunchError
from tests.helpers import Spawner, soak
from tests.jobs.watch import WARM


@dataclass(frozen=True)
class Machine:
    """What the kernel of a machine shows. Groups of CPUs are kernel lists ("0-3,8"); `gpus` maps addresses to nodes."""

    nodes: Mapping[int, str]
    sockets: tuple[str, ...]
    cores: tuple[str, ...]
    caches: tuple[str, ...]
    gpus: Mapping[str, int]

    def write(self, root: Path) -> None:
        def put(path: str, text: str) -> None:
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

        put("sys/devices/system/node/possible", ",".join(map(str, self.nodes)))
        for node, cpus in self.nodes.items():
            put(f"sys/devices/system/node/node{node}/cpulist", cpus)
        for number, group in enumerate(self.sockets):
            for cpu in parse_ranges(group):
                put(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(number))
        for group in self.cores:
            for cpu in parse_ranges(group):
                put(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", group)
        for group in self.caches:
            for cpu in parse_ranges(group):
                for index, (level, kind, shared) in enumerate(
                    [(1, "Data", str(cpu)), (4, "Instruction", str(cpu)), (3, "Unified", group)]
                ):
                    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
                    put(f"{folder}/level", str(level))
                    put(f"{folder}/type", kind)
                    put(f"{folder}/shared_cpu_list", shared)
        for number, (address, node) in enumerate(self.gpus.items()):
            put(f"sys/bus/pci/devices/{address}/numa_node", str(node))
            put(f"proc/driver/nvidia/gpus/{address}/information", f"Model:  X\nGPU UUID:  GPU-{number:04d}-aaaa")


# Two sockets of two nodes each, two threads a core, caches of unlike size on node 1, five GPUs.
SERVER = Machine(
    nodes={0: "0-3,16-19", 1: "4-7,20-23", 2: "8-11,24-27", 3: "12-15,28-31"},
    sockets=("0-7,16-23", "8-15,24-31"),
    cores=tuple(f"{cpu},{cpu + 16}" for cpu in range(16)),
    caches=("0-1,16-17", "2-3,18-19", "4,20", "5-7,21-23", "8-11,24-27", "12-15,28-31"),
    gpus={"0000:18:00.0": 1, "0000:3a:00.0": 1, "0000:5d:00.0": 1, "0000:9a:00.0": 2, "0001:01:00.0": 0},
)

# A virtual machine: no node known for the GPUs, and each CPU a socket.
VIRTUAL = Machine(
    nodes={0: "0-4"},
    sockets=("0", "1", "2", "3", "4"),
    cores=("0-1", "2-3", "4"),
    caches=("0-1", "2-3", "4"),
    gpus={"0000:00:05.0": -1, "0000:00:06.0": -1},
)

# The answers of torch.numa.binding on a described machine, for each mode and each local rank.
TORCHS_ANSWERS = """
import inspect, json, os, sys, types
import torch.numa.binding as binding

root, gpus, allowed, modes = json.loads(sys.argv[1])

def properties(gpu_index):
    domain, bus, rest = gpus[gpu_index].split(":")
    numbers = [int(part, 16) for part in (domain, bus, rest.split(".")[0])]
    return types.SimpleNamespace(**dict(zip(["pci_domain_id", "pci_bus_id", "pci_device_id"], numbers)))

binding.open = lambda path, *rest: open(root + path, *rest)
binding.os = types.SimpleNamespace(
    path=os.path, listdir=lambda path: os.listdir(root + path), sched_getaffinity=lambda pid: set(allowed)
)
cuda = types.SimpleNamespace(
    device_count=lambda: len(gpus),
    get_device_properties=properties,
    is_available=lambda: True,
    current_accelerator=lambda: "cuda",
)
binding.torch = types.SimpleNamespace(cuda=cuda, accelerator=cuda, get_device_module=lambda device: cuda)
# Newer versions of torch call the argument device_index.
(index_name,) = inspect.signature(binding._node_get_logical_cpus_to_bind_to).parameters
def answer(mode, gpu_index):
    options = binding.NumaOptions(binding.AffinityMode(mode))
    return sorted(binding._get_logical_cpus_to_bind_to(**{index_name: gpu_index}, numa_options=options))

answers = {mode: [answer(mode, gpu_index) for gpu_index in range(len(gpus))] for mode in modes}
sys.stdout.write(json.dumps(answers))
"""


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no GPU of this machine play a part."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


def topology_of(machine: Machine, root: Path, env: Mapping[str, str] | None = None) -> Topology:
    machine.write(root)
    return read_topology(env or {}, root / "sys", root / "proc")


def everything(machine: Machine) -> frozenset[int]:
    return frozenset().union(*map(parse_ranges, machine.nodes.values()))


def test_a_virtual_local_rank_is_0_and_sees_one_device() -> None:
    assert virtual_local_rank({}, 3) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert virtual_local_rank({"CUDA_VISIBLE_DEVICES": "4, GPU-ab,6"}, 1)["CUDA_VISIBLE_DEVICES"] == "GPU-ab"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_virtual_local_rank_leaves_hidden_devices_hidden(hidden: str) -> None:
    assert virtual_local_rank({"CUDA_VISIBLE_DEVICES": hidden}, 1)["CUDA_VISIBLE_DEVICES"] == hidden


def test_a_virtual_local_rank_without_a_device_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="no device for local rank 2, since CUDA_VISIBLE_DEVICES=4,5 names 2"):
        virtual_local_rank({"CUDA_VISIBLE_DEVICES": "4,5"}, 2)


@pytest.mark.parametrize(
    "machine, allowed",
    [soak(SERVER, everything(SERVER)), (SERVER, everything(SERVER) - {4, 8, 9}), (VIRTUAL, everything(VIRTUAL))],
    ids=["server", "some CPUs withheld", "virtual machine"],
)
def test_every_mode_gives_the_cpus_that_torchrun_gives(
    tmp_path: Path, spawn: Spawner, machine: Machine, allowed: frozenset[int]
) -> None:
    topology = topology_of(machine, tmp_path)
    question = json.dumps([str(tmp_path), list(machine.gpus), sorted(allowed), NUMA_MODES])
    (tmp_path / "torchs_answers.py").write_text(TORCHS_ANSWERS)
    torch = spawn.fork(WARM, "torchs_answers", question, name="torch")
    assert torch.wait(60) == 0
    ranks = range(len(machine.gpus))
    assert json.loads(torch.text()) == {
        mode: [sorted(cpus_for(mode, rank, topology, allowed)) for rank in ranks] for mode in NUMA_MODES
    }


def test_node_and_socket_are_those_of_the_workers_gpu(tmp_path: Path) -> None:
    topology = topology_of(SERVER, tmp_path)
    allowed = everything(SERVER)
    assert cpus_for("node", 3, topology, allowed) == parse_ranges("8-11,24-27")
    assert cpus_for("socket", 3, topology, allowed) == parse_ranges("8-15,24-31")


def test_exclusive_shares_of_a_node_have_no_core_in_common_and_leave_none_over(tmp_path: Path) -> None:
    topology = topology_of(SERVER, tmp_path)
    shares = [cpus_for("exclusive", rank, topology, everything(SERVER)) for rank in range(3)]
    assert shares == [{4, 20, 5, 21}, {6, 22}, {7, 23}]


def test_core_complexes_go_round_with_the_largest_first(tmp_path: Path) -> None:
    topology = topology_of(SERVER, tmp_path)
    complexes = [cpus_for("core-complex", rank, topology, everything(SERVER)) for rank in range(3)]
    assert complexes == [parse_ranges("5-7,21-23"), {4, 20}, parse_ranges("5-7,21-23")]


def test_a_gpu_whose_node_is_unknown_counts_as_near_to_all_of_several_nodes(tmp_path: Path) -> None:
    gpus = {"0000:18:00.0": -1, "0000:3a:00.0": -1, "0000:5d:00.0": 3}
    topology = topology_of(Machine(SERVER.nodes, SERVER.sockets, SERVER.cores, SERVER.caches, gpus), tmp_path)
    allowed = everything(SERVER)
    assert topology.gpu_nodes == (ANYWHERE, ANYWHERE, 3)
    for mode in ("node", "socket"):
        assert cpus_for(mode, 0, topology, allowed) == allowed
    assert cpus_for("exclusive", 0, topology, allowed) == parse_ranges("0-7,16-23")
    assert cpus_for("exclusive", 1, topology, allowed) == parse_ranges("8-15,24-31")


def test_nodes_of_memory_alone_or_out_of_reach_are_passed_over(tmp_path: Path) -> None:
    machine = Machine({**SERVER.nodes, 4: ""}, SERVER.sockets, SERVER.cores, SERVER.caches, SERVER.gpus)
    topology = topology_of(machine, tmp_path)
    assert set(topology.node_cpus) == {0, 1, 2, 3}
    assert cpus_for("socket", 3, topology, parse_ranges("0-11")) == parse_ranges("8-11")


def test_workers_follow_cuda_visible_devices(tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "4,GPU-0003"}
    assert topology_of(SERVER, tmp_path, env).gpu_nodes == (0, 2)


def test_visible_devices_end_where_cuda_ends_them() -> None:
    gpus = [Gpu("GPU-aa1", "0000:3a:00.0"), Gpu("GPU-ab2", "0000:18:00.0", ("MIG-7", "MIG-8"))]
    first, second = gpus[1], gpus[0]
    assert visible_gpus(gpus, None) == (first, second)
    assert visible_gpus(gpus, "1,0") == (second, first)
    assert visible_gpus(gpus, "1,-1,0") == (second,)
    assert visible_gpus(gpus, "1,2,0") == (second,)
    assert visible_gpus(gpus, "GPU-ab, GPU-aa1") == (first, second)
    assert visible_gpus(gpus, "GPU-a,0") == ()
    assert visible_gpus(gpus, "MIG-8") == (first,)
    assert visible_gpus(gpus, "MIG-GPU-ab2/1/0") == (first,)
    assert visible_gpus(gpus, "") == ()


def test_what_nvml_lists_comes_before_what_proc_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def no_part(handle: str, index: int = 0) -> str:
        raise NVMLError

    addresses = [b"00000000:9A:00.0", "00000001:01:00.0"]
    ended = []
    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: ended.append(True),
        nvmlDeviceGetCount=lambda: len(addresses),
        nvmlDeviceGetHandleByIndex=lambda index: addresses[index],
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}".encode(),
        nvmlDeviceGetPciInfo=lambda handle: types.SimpleNamespace(busId=handle),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=no_part,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert topology_of(SERVER, tmp_path).gpu_nodes == (2, 0)
    assert ended == [True]

    nvml.nvmlInit = lambda: no_part("")  # the library is there, the driver is not
    assert topology_of(SERVER, tmp_path).gpu_nodes == (1, 1, 1, 2, 0)


def test_pci_addresses_are_written_as_sysfs_does() -> None:
    assert sysfs_address("00000000:DC:00.0") == "0000:dc:00.0"
    assert sysfs_address("00010000:0A:1F.1") == "10000:0a:1f.1"
    with pytest.raises(LaunchError, match="'nonsense' as the PCI address"):
        sysfs_address("nonsense")


def test_without_a_gpu_the_flag_is_a_launch_error(tmp_path: Path) -> None:
    without = Machine(SERVER.nodes, SERVER.sockets, SERVER.cores, SERVER.caches, {})
    with pytest.raises(LaunchError, match=r"no NVIDIA GPU here \(the driver shows none\); leave the flag out"):
        topology_of(without, tmp_path)
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES=-1 leaves none of 5"):
        topology_of(SERVER, tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})


def test_without_numa_nodes_the_flag_is_a_launch_error(tmp_path: Path) -> None:
    bare = Machine({}, SERVER.sockets, SERVER.cores, SERVER.caches, SERVER.gpus)
    with pytest.raises(LaunchError, match="the kernel shows no NUMA nodes"):
        topology_of(bare, tmp_path)


def test_what_cannot_be_bound_is_said_with_its_numbers(tmp_path: Path) -> None:
    topology = topology_of(SERVER, tmp_path)
    with pytest.raises(LaunchError, match="no GPU for local rank 5, since 5 can be used"):
        cpus_for("node", 5, topology, everything(SERVER))
    with pytest.raises(LaunchError, match="GPU 0 is on NUMA node 1, of whose CPUs this process may use none"):
        cpus_for("node", 0, topology, {0, 1})
    with pytest.raises(LaunchError, match="3 GPUs are on NUMA node 1, of which 2 cores can be used"):
        cpus_for("exclusive", 0, topology, {4, 5, 20})


def test_without_caches_in_sysfs_only_core_complexes_are_refused(tmp_path: Path) -> None:
    topology = topology_of(Machine(SERVER.nodes, SERVER.sockets, SERVER.cores, (), SERVER.gpus), tmp_path)
    assert cpus_for("exclusive", 3, topology, everything(SERVER)) == parse_ranges("8-11,24-27")
    with pytest.raises(LaunchError, match="which CPUs share a cache with CPU 8; choose --numa-binding=node"):
        cpus_for("core-complex", 3, topology, {8})


def test_the_cpus_of_this_machine_can_be_read(tmp_path: Path) -> None:
    """The kernel's own files, with a GPU made up: what is near to it is among what this process may use."""
    if not Path("/sys/devices/system/node/node0/cpulist").exists():
        pytest.skip("the kernel of this machine shows no NUMA nodes")
    (tmp_path / "driver/nvidia/gpus/ffff:ff:1f.0").mkdir(parents=True)
    topology = read_topology({}, Path("/sys"), tmp_path)
    allowed = os.sched_getaffinity(0)
    for mode in ("node", "socket", "exclusive"):
        near = cpus_for(mode, 0, topology, allowed)
        assert near
        assert near <= allowed
