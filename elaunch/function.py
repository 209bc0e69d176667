"""What a worker runs when a job was started with a function: `python -m elaunch.function FOLDER`."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys

from elaunch.failures import record_own_error


def main(folder: str) -> None:
    """Calls the function in FOLDER/call.pickle; what it returns goes to FOLDER/result-RANK.pickle."""
    with open(os.path.join(folder, "call.pickle"), "rb") as file:
        preparation, call = pickle.load(file)  # noqa: S301 (written by the program that asked for this)
        multiprocessing.spawn.prepare(preparation)
        function, args = pickle.loads(call)  # noqa: S301
    local_rank = os.environ["LOCAL_RANK"]
    args = [arg.replace("${local_rank}", local_rank) if isinstance(arg, str) else arg for arg in args]
    try:
        result = function(*args)
        path = os.path.join(folder, f"result-{os.environ['RANK']}.pickle")
        with open(path + ".part", "wb") as file:
            pickle.dump(result, file)
        os.replace(path + ".part", path)
    except Exception as error:
        record_own_error(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
