"""What tells the agent that a worker is in trouble before the worker ends.

`watchdog` keeps the timers that workers set on themselves. `pulse` is what they show, `hang` judges by that who does
not go on, `stacks` tells where it is. `health` judges devices, `host` the machine below. `track` is the statistics by
which `slow` and `slow_links` find slow workers and links; the workers run these, since they measure. The modules here
observe and decide; the agent acts.
"""

from __future__ import annotations
