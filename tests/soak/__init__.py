"""Jobs that meet hundreds of random faults, and what must be true of each afterwards: `python -m tests.soak --help`."""
