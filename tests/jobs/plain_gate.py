"""A module to preload: its import waits for the file that PLAIN_GATE names, then does as the file says."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import ModuleType

while not os.path.exists(os.environ["PLAIN_GATE"]):
    time.sleep(0.005)
with open(os.environ["PLAIN_GATE"]) as file:
    wish = file.read()
if wish == "fail":
    raise RuntimeError("this module cannot be imported today")
if wish == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if wish.endswith(".context"):  # as the module of that kind of device has it once that is in use
    sys.modules[wish.removesuffix(".context")] = device = ModuleType("device")
    device.is_initialized = lambda: True  # type: ignore[attr-defined]
