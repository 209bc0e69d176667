"""What tells the agent that a worker is in trouble before the worker ends.

`watchdog` keeps the timers that workers set on themselves. `heartbeat` is what they show, `hang` judges by that who
does not go on, `stacks` tells where it is. `health` judges devices, which `devices` and `nvml` read, `host` the machine
below. The modules here observe and decide; the agent acts.
"""

from __future__ import annotations
