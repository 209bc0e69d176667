"""Accelerators behind one small interface: which there are, which a process sees, and what they say of themselves.

`find_accelerators` gives those of this machine: `NvidiaGpus` (elaunch/nvml.py), `AscendNpus`, or `Cpu` where there is
neither. A library that is absent is worth a debug line. Reading may block for as long as a driver hangs: never do it in
the agent's loop.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elaunch.errors import ClocksUnsupported, DeviceError, DeviceNotFound, LaunchError

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
NPU_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
NVML = "libnvidia-ml.so.1"
NPU_SMI = "npu-smi"
NPU_SMI_S = 20.0  # its usual answer takes one to three seconds

logger = logging.getLogger(__name__)


class Clocks(Protocol):
    """The clock of one device. All methods raise ClockError for what the device does not do."""

    def supported(self) -> tuple[int, ...]:
        """Returns the clocks that it can be locked at, in MHz, ascending."""

    def current(self) -> int:
        """Returns its clock now, in MHz. An idle device may clock down, so ask while it computes."""

    def lock(self, mhz: int) -> None:
        """Locks it at one of the supported clocks, in MHz, whatever was asked for before."""

    def reset(self) -> None:
        """Lets the device choose its clock by itself again; harmless if it does."""


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """What a device says of errors in its memory. None: it, or its driver, does not tell.

    Attributes:
        uncorrectable, correctable: ECC errors since the driver was loaded.
        remap_pending: rows, or pages, are to be replaced at the next reset.
        remap_failed: a row could not be replaced.
    """

    uncorrectable: int | None = None
    correctable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device says of itself. None: it, or its driver, does not tell.

    Attributes:
        lost: why it cannot be reached any more; empty as long as it answers.
        fails: what it answered with an error that may pass.
        state: what it says of its health as a whole ("warning", "alarm", "critical"); empty: none, or well.
        memory_errors: of its memory.
        recovery: what the driver says it needs: "" for nothing, else "reset", "reboot", "drain p2p", "drain and reset".
        slowdowns: reasons for which the hardware holds its clock down: "thermal", "power brake".
        temperature_c, shutdown_c: its temperature, and that at which it turns itself off.
        power_w: what it draws.
        clock_mhz, max_clock_mhz: at which it computes, and the highest one.
        used_bytes, total_bytes: of its memory.
    """

    lost: str = ""
    fails: str = ""
    state: str = ""
    memory_errors: MemoryErrors = MemoryErrors()
    recovery: str = ""
    slowdowns: frozenset[str] = frozenset()
    temperature_c: int | None = None
    shutdown_c: int | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that NVIDIA's driver reported of the device of a slot, by the number in NVIDIA's catalogue."""

    local_rank: int
    number: int


class Accelerators(Protocol):
    """The devices that the workers of this node see: slot n computes on the n-th.

    Attributes:
        kind: cpu, cuda or npu.
        variable: names the devices that a process sees; empty where there is no such variable.
    """

    kind: str
    variable: str

    def names(self) -> Mapping[int, str]:
        """Returns what the device of each slot that has one is called, as the vendor's tools number it."""

    def read(self) -> Mapping[int, Reading]:
        """Returns what the device of each slot that has one says now; may take seconds."""

    def wait(self, timeout_s: float) -> list[Xid]:
        """Waits this long for errors; returns those that are reported, at the first."""

    def clocks(self, local_rank: int) -> Clocks:
        """Returns the clock of the device of a slot.

        Raises:
            DeviceError: there is none, or it cannot be set.
        """

    def close(self) -> None:
        """Lets go of the library, and ends `wait` soon, if another thread is in it."""


def find_accelerators(slots: int, environment: Mapping[str, str]) -> Accelerators:
    """Returns the devices that `slots` workers with this environment see here: GPUs, else NPUs, else the CPU."""
    try:
        ctypes.CDLL(NVML)  # its binding takes long to import
        from elaunch.detect.nvml import NvidiaGpus

        return NvidiaGpus(slots, environment)
    except (OSError, DeviceError) as error:
        logger.debug("no NVIDIA GPU is looked at: %s", error)
    try:
        return AscendNpus(slots, environment)
    except DeviceError as error:
        logger.debug("%s", error)
    return Cpu()


class Cpu:
    """No accelerator: nothing to read, nothing to set."""

    kind = "cpu"
    variable = ""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def names(self) -> dict[int, str]:
        """Implements `Accelerators.names`."""
        return {}

    def read(self) -> dict[int, Reading]:
        """Implements `Accelerators.read`."""
        return {}

    def wait(self, timeout_s: float) -> list[Xid]:
        """Implements `Accelerators.wait`."""
        self._closed.wait(timeout_s)
        return []

    def clocks(self, local_rank: int) -> Clocks:
        """Implements `Accelerators.clocks`."""
        raise ClocksUnsupported(f"local rank {local_rank} computes on the CPU, whose clock is not set here")

    def close(self) -> None:
        """Implements `Accelerators.close`."""
        self._closed.set()


# -- NVIDIA: which GPUs there are, without NVML ------------------------------------------------------------------------

_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the driver: its UUID ("GPU-…") and its PCI address as sysfs writes it ("0000:18:00.0").

    `parts` are the UUIDs of its MIG devices.
    """

    uuid: str
    address: str
    parts: tuple[str, ...] = ()


def visible_gpus(present: Iterable[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that a process sees, in its order.

    As CUDA does, this ends at the first item that names no GPU; a UUID may be cut short, and a MIG device stands for
    its GPU. Numbers count by PCI address (CUDA_DEVICE_ORDER=PCI_BUS_ID); CUDA's own order differs only between unlike
    GPUs.

    Args:
        present: the GPUs that the driver shows.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    gpus = sorted(present, key=_pci_order)
    if visible is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for item in (part.strip() for part in visible.split(",")):
        if item.isdecimal() and int(item) < len(gpus):
            found.append(gpus[int(item)])
            continue
        named = [gpu for gpu in gpus if _names(item, gpu)] if item.startswith(("GPU-", "MIG-")) else []
        if len(named) != 1:
            break
        found.append(named[0])
    return tuple(found)


def _pci_order(gpu: Gpu) -> list[int]:
    return [int(part, 16) for part in re.split("[:.]", gpu.address)]


def _names(item: str, gpu: Gpu) -> bool:
    if item.startswith("MIG-GPU-"):
        return item.removeprefix("MIG-").split("/")[0] == gpu.uuid
    return any(uuid.startswith(item) for uuid in (gpu.uuid, *gpu.parts))


def sysfs_address(address: str) -> str:
    """Returns a PCI address in the form that sysfs uses: 00000000:DC:00.0 becomes 0000:dc:00.0.

    Raises:
        LaunchError: it is no PCI address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise LaunchError(f"the driver gave {address!r} as the PCI address of a GPU")
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def driver_gpus(proc_root: Path = Path("/proc")) -> list[Gpu]:
    """Returns what the driver shows under /proc, which takes no time; without MIG devices."""
    gpus = []
    folder = proc_root / "driver/nvidia/gpus"
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            information = (entry / "information").read_text(errors="replace")
        except OSError:
            information = ""
        uuid = re.search(r"^GPU UUID:\s*(\S+)", information, re.MULTILINE)
        gpus.append(Gpu(uuid[1] if uuid else "", sysfs_address(entry.name)))
    return gpus


def count_gpus(environment: Mapping[str, str], proc_root: Path = Path("/proc")) -> int:
    """Returns how many NVIDIA devices a process with this environment sees; MIG devices count one by one."""
    present, visible = driver_gpus(proc_root), environment.get(CUDA_VISIBLE)
    if present and visible is not None and "MIG-" in visible:
        # Only NVML knows them. What the user has listed is taken for right: CUDA will say so otherwise.
        return len([item for item in visible.split(",") if item.strip()])
    return len(visible_gpus(present, visible))


# -- Ascend ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NpuRow:
    """A chip in the table that `npu-smi info` prints: the number of its card, its own on it, and what it says."""

    card: int
    chip: int
    reading: Reading


_OWN_ROW = re.compile(
    r"\|\s*(?P<card>\d{1,9})\s+(?P<name>\S+)\s*\|\s*(?P<health>[A-Za-z]+)\s*"
    r"\|\s*(?P<power>\d{1,9}(?:\.\d*)?|-|NA)\s+(?P<temp>\d{1,9}|-|NA)\b"
)
_CHIP_ROW = re.compile(r"\|\s*(?P<chip>\d{1,9})(?:\s+\d+)?\s*\|\s*(?P<bus>[0-9A-Fa-f:.]+|NA)\s*\|(?P<rest>[^|]*)\|")
_USAGE = re.compile(r"(\d{1,15})\s*/\s*(\d{1,15})")


def parse_npu_smi(text: str) -> list[NpuRow]:
    """Reads the table of `npu-smi info`: two lines for each chip, in the order in which Ascend's runtime numbers them.

    The last usage in a chip's second line is that of the memory it computes in: HBM where it has some.
    """
    rows: list[NpuRow] = []
    own: re.Match[str] | None = None
    for line in text.splitlines():
        if "Process id" in line:
            break  # the table of processes follows
        if own is None:
            own = _OWN_ROW.match(line)
            continue
        chip = _CHIP_ROW.match(line)
        if chip is not None:
            usages = [(int(used), int(total)) for used, total in _USAGE.findall(chip["rest"])]
            used, total = next((usage for usage in reversed(usages) if usage[1]), (None, None))
            health = own["health"].lower()
            rows.append(
                NpuRow(
                    int(own["card"]),
                    int(chip["chip"]),
                    Reading(
                        state="" if health in ("ok", "unknown") else health,
                        temperature_c=int(own["temp"]) if own["temp"].isdecimal() else None,
                        power_w=float(own["power"]) if own["power"][0].isdigit() else None,
                        used_bytes=None if used is None else used << 20,
                        total_bytes=None if total is None else total << 20,
                    ),
                )
            )
        own = None
    return rows


class AscendNpus:
    """Ascend NPUs, through the text of `npu-smi info`.

    Raises:
        DeviceNotFound: there is no npu-smi, or it shows no device.
    """

    kind = "npu"
    variable = NPU_VISIBLE

    def __init__(self, slots: int, environment: Mapping[str, str]) -> None:
        self._program = shutil.which(NPU_SMI, path=environment.get("PATH"))
        if self._program is None:
            raise DeviceNotFound(f"there is no {NPU_SMI} in PATH: no Ascend device is looked at")
        self._closed = threading.Event()
        rows = parse_npu_smi(self._ask())
        visible = environment.get(NPU_VISIBLE)
        if visible is None:
            numbers = list(range(len(rows)))
        else:
            numbers = [int(item) for item in visible.split(",") if item.strip().isdecimal() and int(item) < len(rows)]
        if not numbers:
            raise DeviceNotFound(f"{NPU_SMI} shows {len(rows)} devices, of which {NPU_VISIBLE}={visible} leaves none")
        self._places = {
            local_rank: (rows[number].card, rows[number].chip) for local_rank, number in enumerate(numbers[:slots])
        }

    def names(self) -> dict[int, str]:
        """Implements `Accelerators.names`."""
        return {local_rank: f"NPU {card}/{chip}" for local_rank, (card, chip) in self._places.items()}

    def read(self) -> dict[int, Reading]:
        """Implements `Accelerators.read`. A device that npu-smi no longer lists is lost."""
        try:
            rows = {(row.card, row.chip): row.reading for row in parse_npu_smi(self._ask())}
        except DeviceError as error:
            return {local_rank: Reading(fails=str(error)) for local_rank in self._places}
        gone = Reading(lost=f"{NPU_SMI} no longer lists it") if rows else Reading(fails=f"{NPU_SMI} lists no device")
        return {local_rank: rows.get(place, gone) for local_rank, place in self._places.items()}

    def _ask(self) -> str:
        assert self._program is not None
        try:
            done = subprocess.run(
                [self._program, "info"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NPU_SMI_S
            )
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"{NPU_SMI} info gave no answer in {NPU_SMI_S:g} s") from error
        except OSError as error:
            raise DeviceError(f"{NPU_SMI} cannot be run: {error.strerror}") from error
        if done.returncode:
            output = (done.stderr or done.stdout).strip().splitlines()
            raise DeviceNotFound(
                f"{NPU_SMI} info ended with {done.returncode}: {output[-1] if output else 'no output'}"
            )
        return done.stdout

    def wait(self, timeout_s: float) -> list[Xid]:
        """Implements `Accelerators.wait`."""
        self._closed.wait(timeout_s)
        return []

    def clocks(self, local_rank: int) -> Clocks:
        """Implements `Accelerators.clocks`."""
        raise ClocksUnsupported(
            f"the clock of {self.names().get(local_rank, f'local rank {local_rank}')} cannot be set: Ascend has no call"
        )

    def close(self) -> None:
        """Implements `Accelerators.close`."""
        self._closed.set()


def count_npus(environment: Mapping[str, str], folder: str = "/dev") -> int:
    """Returns how many Ascend devices a process with this environment sees: each is a file /dev/davinciN."""
    try:
        present = len([name for name in os.listdir(folder) if re.fullmatch(r"davinci\d+", name)])
    except FileNotFoundError:
        present = 0
    visible = environment.get(NPU_VISIBLE)
    if visible is None:
        return present
    return min(present, len([item for item in visible.split(",") if item.strip().isdecimal()]))
