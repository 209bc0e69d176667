"""Fails inside the decorator with which scripts report an exception to their launcher."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    raise ValueError("the loss is not a number")


if __name__ == "__main__":
    main()
