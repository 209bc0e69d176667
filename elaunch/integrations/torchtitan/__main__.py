"""`-m elaunch.integrations.torchtitan`, with the arguments of `-m torchtitan.train`."""

from __future__ import annotations

from elaunch.integrations.torchtitan.trainer import main

main()
