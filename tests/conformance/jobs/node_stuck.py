"""Puts itself into uninterruptible sleep: the parent of a vfork stays in it while the child neither ends nor executes.

Writes `FOLDER/stuck.pid`. The child ends once its parent is gone, or `FOLDER/all.order` exists.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import time
from pathlib import Path

SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_VFORK = 0x4000


def main() -> None:
    folder, parent = Path(sys.argv[1]), os.getpid()
    (folder / "stuck.pid").write_text(str(parent))
    flags = ctypes.c_ulong(CLONE_VFORK | signal.SIGCHLD)
    null = ctypes.c_void_p()
    if ctypes.CDLL(None).syscall(ctypes.c_long(SYS_CLONE[platform.machine()]), flags, null, null, null, null) == 0:
        while os.getppid() == parent and not (folder / "all.order").exists():
            time.sleep(0.02)
        os._exit(0)


if __name__ == "__main__":
    main()
