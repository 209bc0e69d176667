"""What a worker of `--run-path` runs: `python -m elaunch.run_path SCRIPT ARGUMENT…`."""

from __future__ import annotations

import faulthandler
import runpy
import sys

from elaunch.failures import record_own_error


def main() -> None:
    """Runs the script as torchrun's --run-path does: an exception that ends it is written into the error file.

    The folder of the script is not put into sys.path.
    """
    del sys.argv[0]
    faulthandler.enable(all_threads=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        record_own_error(error)
        raise


if __name__ == "__main__":
    main()
