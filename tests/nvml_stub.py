"""A machine with NVIDIA GPUs that a test makes up: `nvml_stub.c` in the place of NVIDIA's library."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class StubNvml:
    """GPUs of one node; whatever is set is what the library says at its next call.

    Args:
        folder: for the library and its file.
        gpus: how many.
    """

    def __init__(self, folder: Path, gpus: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if find_spec("pynvml") is None:
            pytest.fail("this test calls NVIDIA's library through pynvml: pip install nvidia-ml-py, or .[test]")
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.fail("this test builds a stand-in for libnvidia-ml.so.1 and needs a C compiler: apt-get install gcc")
        done = subprocess.run(
            [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        self._folder = folder
        self._lines = [f"gpus {gpus}"]
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """For processes that are to see these GPUs."""
        path = os.pathsep.join(filter(None, [str(self._folder), os.environ.get("LD_LIBRARY_PATH")]))
        return {"LD_LIBRARY_PATH": path, "NVML_STUB": str(self._folder / "state")}

    def set(self, gpu: int, **values: int) -> None:
        """From now on the GPU answers so; the names are those of nvml_stub.c."""
        self._lines.extend(f"{gpu} {name} {value}" for name, value in values.items())
        self._write()

    def xid(self, gpu: int, number: int) -> None:
        """Let the driver report an XID."""
        self._lines.append(f"xid {gpu} {number}")
        self._write()

    def _write(self) -> None:
        new = self._folder / "state.new"
        new.write_text("\n".join(self._lines) + "\n")
        new.rename(self._folder / "state")
