"""Writes when its first line ran, as Unix seconds, to the file that its argument and RANK name."""

import time

t = time.time()
# The clock is read before anything else is imported: this is the first line of a user's script.
import os  # noqa: E402
import sys  # noqa: E402

with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    file.write(repr(t))
