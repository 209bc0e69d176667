"""A module to preload: its import waits for the file that PLAIN_GATE names, then does as the file says."""

from __future__ import annotations

import os
import threading
import time

while not os.path.exists(os.environ["PLAIN_GATE"]):
    time.sleep(0.005)
with open(os.environ["PLAIN_GATE"]) as file:
    wish = file.read()
if wish == "fail":
    raise RuntimeError("this module cannot be imported today")
if wish == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
