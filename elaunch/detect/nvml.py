"""NVIDIA's GPUs through its management library: pynvml (package nvidia-ml-py), imported when it is first needed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from elaunch.detect.devices import (
    CUDA_VISIBLE,
    Clocks,
    Gpu,
    MemoryErrors,
    Reading,
    Xid,
    logger,
    sysfs_address,
    visible_gpus,
)
from elaunch.errors import ClockError, ClocksDenied, ClocksUnsupported, DeviceNotFound, NvmlNotFound

T = TypeVar("T")

SLICE_S = 0.25  # NVML's wait cannot be woken
RECOVERIES = {0: "", 1: "reset", 2: "reboot", 3: "drain p2p", 4: "drain and reset", 6: "reset", 7: "reboot"}
# Not: a cap on power, which a busy GPU reaches, nor clocks that somebody asked for.
SLOWDOWNS = {
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def open_nvml() -> Any:
    """Returns the module pynvml, in use until `nvmlShutdown` is called as often.

    Raises:
        NvmlNotFound: pynvml cannot be imported.
        DeviceNotFound: there is no driver.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlNotFound("NVIDIA GPUs are read with pynvml: install nvidia-ml-py, or elaunch[cuda]") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceNotFound(f"NVML cannot be used ({error}): is NVIDIA's driver loaded?") from error
    return pynvml


def list_gpus() -> list[Gpu]:
    """Returns the GPUs of this machine in NVML's order, which is that of their PCI addresses.

    Raises:
        NvmlNotFound, DeviceNotFound: as `open_nvml`.
        NVMLError: of pynvml; the driver does not answer about one.
    """
    nvml = open_nvml()
    try:
        return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise DeviceNotFound(f"the driver does not answer about its GPUs: {error}") from error
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    parts = []
    with suppress(nvml.NVMLError):  # after the last one, and where MIG is off
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            parts.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
    address = sysfs_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    return Gpu(_text(nvml.nvmlDeviceGetUUID(handle)), address, tuple(parts))


def _text(value: str | bytes) -> str:
    """What NVML returns: bytes in older versions of its binding."""
    return value.decode() if isinstance(value, bytes) else value


def gpu_of(local_rank: int, environment: Mapping[str, str]) -> str:
    """Returns the UUID of the GPU that the worker of a slot computes on.

    Raises:
        NvmlNotFound: pynvml cannot be imported.
        DeviceNotFound: there is no driver, or this worker sees no such GPU.
    """
    visible = environment.get(CUDA_VISIBLE)
    gpus = visible_gpus(list_gpus(), visible)
    if local_rank >= len(gpus):
        why = "on this machine" if visible is None else f"with {CUDA_VISIBLE}={visible}"
        raise DeviceNotFound(f"local rank {local_rank} has no GPU: {len(gpus)} can be seen {why}")
    return gpus[local_rank].uuid


class NvmlClocks:
    """The graphics clock of an NVIDIA GPU (Volta or newer), through pynvml (`pip install elaunch[cuda]`).

    Locking needs root and is for the whole GPU, whoever computes on it. NVML does not tell whether somebody else has
    locked it: `reset` undoes that too.

    Args:
        device: the GPU's number as NVML counts (by PCI address, all GPUs of the machine), or its UUID ("GPU-…").

    Raises:
        NvmlNotFound: pynvml cannot be imported.
        DeviceNotFound: there is no driver, or no such device.
    """

    def __init__(self, device: int | str) -> None:
        # NVML stays in use until the process ends.
        self._nvml = nvml = open_nvml()
        self._name = f"GPU {device}"
        find = nvml.nvmlDeviceGetHandleByIndex if isinstance(device, int) else nvml.nvmlDeviceGetHandleByUUID
        try:
            self._handle: Any = find(device)
        except nvml.NVMLError as error:
            raise DeviceNotFound(f"NVML finds no {self._name} ({error}): look at `nvidia-smi -L`") from error

    def supported(self) -> tuple[int, ...]:
        """Implements `Clocks.supported`."""
        memory_mhz = max(self._ask("nvmlDeviceGetSupportedMemoryClocks"), default=0)
        return tuple(sorted(set(self._ask("nvmlDeviceGetSupportedGraphicsClocks", memory_mhz))))

    def current(self) -> int:
        """Implements `Clocks.current`."""
        return int(self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_GRAPHICS))

    def lock(self, mhz: int) -> None:
        """Implements `Clocks.lock`."""
        one_of(mhz, self.supported(), self._name)
        self._ask("nvmlDeviceSetGpuLockedClocks", mhz, mhz)

    def reset(self) -> None:
        """Implements `Clocks.reset`."""
        self._ask("nvmlDeviceResetGpuLockedClocks")

    def _ask(self, name: str, *arguments: int) -> Any:
        nvml = self._nvml
        try:
            return getattr(nvml, name)(self._handle, *arguments)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NO_PERMISSION:
                raise ClocksDenied(f"{name} of {self._name} needs root: run as root, or without DVFS") from error
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise ClocksUnsupported(f"{self._name} or its driver does not have {name}") from error
            raise ClockError(f"{name} of {self._name} failed: {error}") from error


def one_of(mhz: int, supported: tuple[int, ...], name: str) -> int:
    """Returns a clock that a device can be locked at.

    Raises:
        ClocksUnsupported: it cannot.
    """
    if mhz not in supported:
        span = f"{supported[0]}..{supported[-1]} MHz" if supported else "none"
        raise ClocksUnsupported(f"{name} cannot be locked at {mhz} MHz; it supports {span}")
    return mhz


class _Lost(Exception):
    """NVML says that the GPU is gone; the message is its."""


class NvidiaGpus:
    """The GPUs that the workers of this node see.

    Args:
        slots: how many workers.
        environment: theirs, which CUDA_VISIBLE_DEVICES may narrow.

    Raises:
        NvmlNotFound: pynvml cannot be imported.
        DeviceNotFound: there is no driver, or the workers see no GPU.
    """

    kind = "cuda"
    variable = CUDA_VISIBLE

    def __init__(self, slots: int, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._closed = threading.Event()
        present = list_gpus()
        gpus = visible_gpus(present, environment.get(CUDA_VISIBLE))[:slots]
        if not gpus:
            visible = environment.get(CUDA_VISIBLE)
            raise DeviceNotFound(f"NVML shows {len(present)} GPUs, of which {CUDA_VISIBLE}={visible} leaves none")
        self._nvml = nvml = open_nvml()
        order = [gpu.uuid for gpu in visible_gpus(present, None)]
        self._uuids = {local_rank: gpu.uuid for local_rank, gpu in enumerate(gpus)}
        self._names = {local_rank: f"GPU {order.index(gpu.uuid)}" for local_rank, gpu in enumerate(gpus)}
        self._handles: dict[str, Any] = {}
        self._events: Any = None
        try:
            for uuid in self._uuids.values():
                self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            raise DeviceNotFound(f"the driver does not answer about its GPUs: {error}") from error
        self._register()

    def _register(self) -> None:
        """Has XIDs reported; without, those that leave something to read are still seen."""
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as error:
            logger.debug("the driver reports no XIDs: %s", error)
            self._free_events()

    def _free_events(self) -> None:
        if self._events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        self._events = None

    def names(self) -> dict[int, str]:
        """Implements `Accelerators.names`."""
        return dict(self._names)

    def read(self) -> dict[int, Reading]:
        """Implements `Accelerators.read`."""
        found = {uuid: self._read(handle) for uuid, handle in self._handles.items()}
        return {local_rank: found[uuid] for local_rank, uuid in self._uuids.items()}

    def _read(self, handle: Any) -> Reading:
        nvml = self._nvml
        errors: list[str] = []

        def ask(name: str, *arguments: Any, read: Callable[[Any], T]) -> T | None:
            try:
                return read(getattr(nvml, name)(handle, *arguments))
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    raise _Lost(str(error)) from error
                if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
                    recoveries.append("reset")
                elif error.value not in (
                    nvml.NVML_ERROR_NOT_SUPPORTED,
                    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                    nvml.NVML_ERROR_NO_PERMISSION,
                    nvml.NVML_ERROR_INVALID_ARGUMENT,  # what this driver is too old for
                ):
                    errors.append(f"{name}: {error}")
                return None

        recoveries: list[str] = []
        try:
            memory = ask("nvmlDeviceGetMemoryInfo", read=lambda info: (int(info.used), int(info.total)))
            uncorrectable = ask(
                "nvmlDeviceGetTotalEccErrors",
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
                read=int,
            )
            correctable = ask(
                "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC, read=int
            )
            rows = ask("nvmlDeviceGetRemappedRows", read=lambda rows: (bool(rows[2]), bool(rows[3])))
            # GPUs before Ampere retire pages instead.
            pages = ask("nvmlDeviceGetRetiredPagesPendingStatus", read=bool) if rows is None else None
            recovery = ask("nvmlDeviceGetFieldValues", [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION], read=_recovery)
            mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons", read=int) or 0
            temperature_c = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU, read=int)
            shutdown_c = ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, read=int)
            power_w = ask("nvmlDeviceGetPowerUsage", read=lambda milliwatts: milliwatts / 1000)
            clock_mhz = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM, read=int)
            max_clock_mhz = ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM, read=int)
        except _Lost as error:
            return Reading(lost=str(error))
        return Reading(
            fails="; ".join(errors[:3]),
            memory_errors=MemoryErrors(
                uncorrectable=uncorrectable,
                correctable=correctable,
                remap_pending=pages if rows is None else rows[0],
                remap_failed=None if rows is None else rows[1],
            ),
            recovery=recovery or "".join(recoveries[:1]),
            slowdowns=frozenset(what for name, what in SLOWDOWNS.items() if mask & getattr(nvml, name)),
            temperature_c=temperature_c,
            shutdown_c=shutdown_c,
            power_w=power_w,
            clock_mhz=clock_mhz,
            max_clock_mhz=max_clock_mhz,
            used_bytes=memory[0] if memory else None,
            total_bytes=memory[1] if memory else None,
        )

    def wait(self, timeout_s: float) -> list[Xid]:
        """Implements `Accelerators.wait`."""
        end_s = time.monotonic() + timeout_s
        while not self._closed.is_set() and (left_s := end_s - time.monotonic()) > 0:
            if self._events is None:
                self._closed.wait(left_s)
                continue
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, int(1000 * min(left_s, SLICE_S)) + 1)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    # Of a GPU that is lost, `read` says so.
                    logger.debug("the driver reports no more XIDs: %s", error)
                    self._free_events()
                continue
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                uuid = self._uuid(event.device)
                return [Xid(local_rank, int(event.eventData)) for local_rank, its in self._uuids.items() if its == uuid]
        return []

    def _uuid(self, device: Any) -> str | None:
        """Of a device in an event; one that is lost no longer tells it, but has the handle that it had."""
        try:
            return _text(self._nvml.nvmlDeviceGetUUID(device))
        except self._nvml.NVMLError:
            return next((uuid for uuid, handle in self._handles.items() if _address(handle) == _address(device)), None)

    def clocks(self, local_rank: int) -> Clocks:
        """Implements `Accelerators.clocks`."""
        if local_rank not in self._uuids:
            raise DeviceNotFound(f"local rank {local_rank} has no GPU: the workers see {len(self._uuids)}")
        return NvmlClocks(self._uuids[local_rank])

    def close(self) -> None:
        """Implements `Accelerators.close`. NVML stays loaded: another thread may wait in it."""
        self._closed.set()


def _recovery(values: Any) -> str:
    value = values[0]
    return RECOVERIES.get(int(value.value.uiVal), "reset") if value.nvmlReturn == 0 else ""


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
