"""What the agent looks at while workers run, and before it joins: hangs, devices, the machine, ways to other nodes.

What a reading means is decided in `elaunch.detect`; here are the threads and timers that take the readings.
"""
