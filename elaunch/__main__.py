"""`python -m elaunch` is the command `elaunch`."""

from __future__ import annotations

from elaunch.cli.run import main

if __name__ == "__main__":
    raise SystemExit(main())
