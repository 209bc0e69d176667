"""Which accelerators there are, which a worker sees, and what they say: GPUs by real calls into a stand-in library."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elaunch.detect.devices import (
    AscendNpus,
    Cpu,
    NpuRow,
    Reading,
    count_gpus,
    count_npus,
    find_accelerators,
    parse_npu_smi,
)
from elaunch.errors import ClocksUnsupported, DeviceError, DeviceNotFound
from tests.helpers import child_environment
from tests.nvml_stub import StubNvml

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 1     910B2               | {first}            | 95.0        45                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3372 / 65536         |
+===========================+===============+====================================================+
{second}+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 4711          | python                   | 3372                    |
+===========================+===============+====================================================+
"""
SECOND = """\
| 2     910B2               | {second}         | 105.4       44                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          54592/ 65536         |
+===========================+===============+====================================================+
"""


def table(first: str = "OK", second: str = "OK") -> str:
    return NPU_SMI.format(first=first, second=SECOND.format(second=second) if second else "")


# -- how many ---------------------------------------------------------------------------------------------------------


def put_gpus(proc: Path, uuids: str) -> None:
    for number, letter in enumerate(uuids):
        folder = proc / f"driver/nvidia/gpus/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: X\nGPU UUID:  GPU-{letter}\n")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("GPU-a,GPU-b,GPU-c", 3),
        ("0,1,9,2", 2),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", 5),
    ],
)
def test_visible_devices_narrow_the_gpus(tmp_path: Path, visible: str | None, expected: int) -> None:
    put_gpus(tmp_path, "abcd")
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == expected


@pytest.mark.parametrize(("visible", "expected"), [(None, 3), ("0,2", 2), ("", 0), ("0,1,2,3,4", 3)])
def test_visible_devices_narrow_the_npus(tmp_path: Path, visible: str | None, expected: int) -> None:
    for name in ("davinci0", "davinci1", "davinci12", "davinci_manager"):
        (tmp_path / name).touch()
    assert count_npus({} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}, str(tmp_path)) == expected
    assert count_npus({}, str(tmp_path / "nothing")) == 0


# -- nothing there ----------------------------------------------------------------------------------------------------


def test_without_any_device_there_is_the_cpu_and_a_debug_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.detect.devices.NVML", "libno-such-library.so.1")
    with caplog.at_level("DEBUG", "elaunch.detect.devices"):
        found = find_accelerators(2, {"PATH": ""})
    assert isinstance(found, Cpu)
    assert (found.kind, found.variable, found.names(), found.read(), found.wait(0.0)) == ("cpu", "", {}, {}, [])
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    with pytest.raises(ClocksUnsupported, match="local rank 1 computes on the CPU"):
        found.clocks(1)


def test_a_driver_without_its_binding_is_worth_a_debug_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.detect.devices.NVML", "libc.so.6")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level("DEBUG", "elaunch.detect.devices"):
        assert find_accelerators(2, {"PATH": ""}).kind == "cpu"
    (line, _) = caplog.messages
    assert line == (
        "no NVIDIA GPU is looked at: NVIDIA GPUs are read with pynvml: install nvidia-ml-py, or elaunch[cuda]"
    )


def test_closing_ends_a_wait(tmp_path: Path) -> None:
    found = Cpu()
    waiting = threading.Thread(target=found.wait, args=(60.0,))
    waiting.start()
    found.close()
    waiting.join(30)
    assert not waiting.is_alive()


# -- Ascend -----------------------------------------------------------------------------------------------------------


def test_the_table_of_npu_smi_is_read() -> None:
    assert parse_npu_smi(table(second="Alarm")) == [
        NpuRow(1, 0, Reading("", "", "", temperature_c=45, power_w=95.0, used_bytes=3372 << 20, total_bytes=64 << 30)),
        NpuRow(
            2,
            0,
            Reading(state="alarm", temperature_c=44, power_w=105.4, used_bytes=54592 << 20, total_bytes=64 << 30),
        ),
    ]


def test_a_table_without_hbm_and_with_gaps_is_read() -> None:
    text = """\
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | Warning         | NA           66                15    / 15            |
| 0       0                     | NA              | 0            957   / 10810                           |
+===============================+=================+======================================================+
"""
    (row,) = parse_npu_smi(text)
    reading = row.reading
    assert (reading.state, reading.power_w, reading.temperature_c) == ("warning", None, 66)
    assert (reading.used_bytes, reading.total_bytes) == (957 << 20, 10810 << 20)


@pytest.mark.parametrize("text", ["", "no devices were found\n", "| x |\n| 0 |\n"])
def test_what_is_no_table_has_no_devices(text: str) -> None:
    assert parse_npu_smi(text) == []


@pytest.fixture
def npu_smi(tmp_path: Path) -> Path:
    """The file with what a stand-in for npu-smi prints; a first line `exit N` makes it fail."""
    program = tmp_path / "npu-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = info ] || exit 9\nread -r first code < {tmp_path}/said\n'
        f'[ "$first" = exit ] && {{ echo "dcmi model initialized failed" >&2; exit "$code"; }}\ncat {tmp_path}/said\n'
    )
    program.chmod(0o755)
    said = tmp_path / "said"
    said.write_text(table())
    return said


def npus(npu_smi: Path, slots: int = 2, **variables: str) -> AscendNpus:
    return AscendNpus(slots, {"PATH": f"{npu_smi.parent}:/usr/bin:/bin", **variables})


def test_npus_are_read_through_npu_smi(npu_smi: Path) -> None:
    found = npus(npu_smi)
    assert found.names() == {0: "NPU 1/0", 1: "NPU 2/0"}
    npu_smi.write_text(table(second="Critical"))
    assert [reading.state for reading in found.read().values()] == ["", "critical"]
    npu_smi.write_text(table(second=""))
    assert found.read()[1] == Reading(lost="npu-smi no longer lists it")
    assert not found.read()[0].lost
    npu_smi.write_text("exit 255\n")
    assert found.read()[1] == Reading(fails="npu-smi info ended with 255: dcmi model initialized failed")
    with pytest.raises(ClocksUnsupported, match="the clock of NPU 2/0 cannot be set"):
        found.clocks(1)


def test_npus_follow_their_variable_and_the_number_of_workers(npu_smi: Path) -> None:
    assert npus(npu_smi, ASCEND_RT_VISIBLE_DEVICES="1").names() == {0: "NPU 2/0"}
    assert npus(npu_smi, slots=1).names() == {0: "NPU 1/0"}
    with pytest.raises(DeviceNotFound, match="shows 2 devices, of which ASCEND_RT_VISIBLE_DEVICES=7 leaves none"):
        npus(npu_smi, ASCEND_RT_VISIBLE_DEVICES="7")


@pytest.mark.parametrize("said", ["exit 1\n", ""])
def test_without_npus_it_is_as_if_there_were_no_npu_smi(
    npu_smi: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.detect.devices.NVML", "libno-such-library.so.1")
    npu_smi.write_text(said)
    assert find_accelerators(2, {"PATH": f"{npu_smi.parent}:/usr/bin:/bin"}).kind == "cpu"
    with pytest.raises(DeviceError):
        npus(npu_smi)


# -- NVIDIA -----------------------------------------------------------------------------------------------------------

# pynvml loads the library by its name once, so a process of its own sees the stand-in. It answers one line per request.
ASK = """
import json, os, sys
from dataclasses import asdict
from elaunch.detect.devices import find_accelerators
found = None
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "find":
        found = find_accelerators(arguments[0], {**os.environ, **arguments[1]})
        answer = [found.kind, found.variable, found.names()]
    elif name == "read":
        answer = {slot: {**asdict(one), "slowdowns": sorted(one.slowdowns)} for slot, one in found.read().items()}
    elif name == "wait":
        answer = [[xid.local_rank, xid.number] for xid in found.wait(*arguments)]
    print(json.dumps(answer), flush=True)
"""


class Asked:
    """A process that sees the stand-in."""

    def __init__(self, stub: StubNvml) -> None:
        self.stub = stub
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            env=child_environment({**stub.environment, "CUDA_VISIBLE_DEVICES": None}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def read(self, local_rank: int = 0) -> Mapping[str, Any]:
        answer: dict[str, Any] = self.ask("read")[str(local_rank)]
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    process = Asked(StubNvml(tmp_path / "nvml", 3))
    yield process
    process.end()


def test_gpus_are_found_through_nvml_and_narrowed_by_their_variable(asked: Asked) -> None:
    assert asked.ask("find", 2, {}) == ["cuda", "CUDA_VISIBLE_DEVICES", {"0": "GPU 0", "1": "GPU 1"}]
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-00000002,0"}
    assert asked.ask("find", 8, visible)[2] == {"0": "GPU 2", "1": "GPU 0"}
    assert asked.ask("find", 8, {"CUDA_VISIBLE_DEVICES": "-1", "PATH": ""}) == ["cpu", "", {}]


def test_a_gpu_tells_its_health(asked: Asked) -> None:
    asked.ask("find", 2, {})
    well = asked.read(1)
    assert well == {
        "lost": "",
        "fails": "",
        "state": "",
        "memory_errors": {"uncorrectable": 0, "correctable": 0, "remap_pending": False, "remap_failed": False},
        "recovery": "",
        "slowdowns": [],
        "temperature_c": 50,
        "shutdown_c": 95,
        "power_w": 300.0,
        "clock_mhz": 1755,
        "max_clock_mhz": 1980,
        "used_bytes": 1 << 30,
        "total_bytes": 80 << 30,
    }
    sick = {"uncorrectable": 2, "correctable": 70, "remap_pending": 1, "remap_failed": 1}
    # The hardware's thermal slowdown, its power brake, and a power cap, which is as it should be.
    asked.stub.set(1, **sick, recovery=4, throttle=0x40 | 0x80 | 0x4, temperature=91)
    expected = {"recovery": "drain and reset", "slowdowns": ["power brake", "thermal"], "temperature_c": 91}
    errors = {**sick, "remap_pending": True, "remap_failed": True}
    assert asked.read(1) == {**well, "memory_errors": errors, **expected}
    assert asked.read(0) == well


def test_a_gpu_that_is_lost_or_needs_a_reset_says_so_and_an_error_is_told(asked: Asked) -> None:
    asked.ask("find", 3, {})
    asked.stub.set(0, lost=1)
    asked.stub.set(1, fails=16)
    asked.stub.set(2, fails=999)
    assert asked.read(0)["lost"] == "GPU is lost"
    assert (asked.read(1)["recovery"], asked.read(1)["lost"], asked.read(1)["fails"]) == ("reset", "", "")
    assert asked.read(2)["fails"].startswith("nvmlDeviceGetMemoryInfo: ")


def test_a_gpu_from_before_row_remapping_tells_of_pages(asked: Asked) -> None:
    asked.ask("find", 1, {})
    asked.stub.set(0, old=1, pages_pending=1)
    errors = asked.read()["memory_errors"]
    assert (errors["remap_pending"], errors["remap_failed"]) == (True, None)


def test_xids_come_to_the_slots_of_their_gpu(asked: Asked) -> None:
    asked.ask("find", 2, {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert asked.ask("wait", 0.01) == []
    asked.stub.xid(1, 13)  # nobody of this job computes there
    asked.stub.xid(0, 31)
    asked.stub.xid(2, 79)
    assert asked.ask("wait", 30.0) == [[1, 31]]
    asked.stub.set(2, lost=1)  # then it does not tell its UUID either
    assert asked.ask("wait", 30.0) == [[0, 79]]
    assert asked.ask("wait", 0.01) == []


def test_a_driver_that_reports_no_xids_is_read_all_the_same(asked: Asked) -> None:
    asked.stub.set(0, no_events=1)
    asked.ask("find", 1, {})
    began_s = time.monotonic()
    assert asked.ask("wait", 0.2) == []
    assert time.monotonic() - began_s >= 0.2
    assert asked.read()["memory_errors"]["uncorrectable"] == 0
