"""What a checkpoint consists of comes to the disk with checksums: XXH3 with 128 bits, in hexadecimal digits.

They are made of the bytes that are handed to the disk, not of those that it gives back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

_MARK = ', "checksum": "'
_END = '"}'


def checksum(data: bytes) -> str:
    """Returns the checksum of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class CheckedFile:
    """A new file that knows the checksums of what was written to it; all of it is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_128()
        self._begin = self._end = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Appends some bytes."""
        self._hash.update(data)
        try:
            n_bytes = self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self._end += n_bytes
        return n_bytes

    def cut(self) -> tuple[int, int, str]:
        """Returns offset, length and checksum of what was written since the last call."""
        found = self._begin, self._end - self._begin, self._hash.hexdigest()
        self._hash.reset()
        self._begin = self._end
        return found

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Returns the descriptor of the file."""
        return self._file.fileno()

    def close(self) -> None:
        """Waits until everything is on the disk."""
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # It tries again to write what it could not.
            with contextlib.suppress(OSError):
                self._file.close()
            if self._error is not None and error is not self._error:
                # torch.save hides it behind one of its own.
                raise self._error


def sync(folder: Path) -> None:
    """Waits until the names of the files in a folder are on the disk, where the file system can do that."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems cannot do it for folders.
        with contextlib.suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


def seal(fields: Mapping[str, Any]) -> bytes:
    """Returns a JSON object whose last entry is the checksum of the text before it."""
    body = json.dumps(fields)[:-1]
    return f"{body}{_MARK}{checksum(body.encode())}{_END}".encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Reads what `seal` has written.

    Raises:
        ValueError: it is something else.
    """
    body, mark, rest = data.rpartition(_MARK.encode())
    if not mark:
        raise ValueError("it has no checksum")
    if rest != f"{checksum(body)}{_END}".encode():
        raise ValueError(f"its checksum is {checksum(body)}, expected {rest[:32].decode(errors='replace')}")
    fields: dict[str, Any] = json.loads(data)
    del fields["checksum"]
    return fields


def slices_of(files: Mapping[str, Sequence[tuple[int, str]]]) -> dict[str, dict[int, tuple[int, str]]]:
    """Returns lengths and checksums of the slices of each file, by offset."""
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for name, slices in files.items():
        offset, found[name] = 0, {}
        for length, expected in slices:
            found[name][offset] = length, expected
            offset += length
    return found
