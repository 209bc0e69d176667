"""In the first attempt rank 0 hangs under torch's timer, and the others wait; later attempts end well at once.

Every worker writes `FOLDER/<attempt>-<rank>.pid`; those that wait end once `FOLDER/all.order` exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    (folder / f"{attempt}-{rank}.pid").write_text(str(os.getpid()))
    if attempt != "0":
        return
    if rank == "0":
        from torch.distributed.elastic import timer

        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        with timer.expires(after=1):
            time.sleep(600)
    while not (folder / "all.order").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
