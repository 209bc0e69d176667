"""A job's state on disk, in the format of torch.distributed.checkpoint: written part by part, read box by box.

Every tensor has a global name and its unsharded shape, so torch's own tools read it; which worker wrote what does not
matter. Beside torch's files lies `elaunch.json`, with the number of steps and all that is no tensor.

    write_shard   a member's boxes, and a note in which it says where they are, with their checksums
    complete     once all notes are there: .metadata, then elaunch.json, then the folder gets its name
    Saved        a complete checkpoint: what it is of, and any boxes of its tensors

Everything has a checksum: `elaunch.json` its own, in its last entry, and those of `.metadata` and of each stored box.
The boxes cover the files without a gap. All later versions must keep the first of these, so that a newer version can be
told from damage.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import operator
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, Generic, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from elaunch.checkpoints import ABOUT, METADATA, path_of
from elaunch.errors import CheckpointDamaged, StateError
from elaunch.workers.state.boxes import Box, intersect, n_elements
from elaunch.workers.state.checksums import CheckedFile, checksum, seal, slices_of, sync, unseal
from elaunch.workers.state.codec import dtype_of

VERSION = 2

_KEYS_1 = {"version", "step", "kind", "settings", "facts"}
"""Of `elaunch.json` in version 1."""

_DAMAGES = {errno.ENOENT, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EISDIR, errno.ENOTDIR}
"""Errors of the file system that are lasting ones of what lies there, not of the way to it."""

_MOST_NAMED = 4


class ChunkedTensor:
    """One tensor in boxes.

    Attributes:
        shape: of the whole tensor.
        parts: each with its box.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[tuple[Box, Tensor]]) -> None:
        self.shape = torch.Size(shape)
        self.parts = tuple({tuple(start for start, _ in box): (box, part) for box, part in parts}.values())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the boxes."""
        return sum(part.nbytes for _, part in self.parts)

    def copied(self) -> ChunkedTensor:
        """Returns the same in host memory of its own."""
        return ChunkedTensor(
            self.shape,
            [
                (box, part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))
                for box, part in self.parts
            ],
        )


@dataclass(frozen=True)
class CheckpointShard:
    """What one member adds to a checkpoint.

    Attributes:
        kind: of job: "layers", "objects" or "tensors"; alike for all members, as `settings` is.
        settings: what must be the same when the job goes on from here; JSON.
        tensors: by name, its boxes of them.
        facts: whatever else it knows of the state; JSON.
    """

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, ChunkedTensor]
    facts: Mapping[str, Any]

    def copied(self) -> CheckpointShard:
        """Returns the same, in host memory that nobody changes."""
        return replace(self, tensors={name: pieces.copied() for name, pieces in self.tensors.items()})


Note = Mapping[str, Any]
"""What a member leaves in the folder when its part is on the disk."""


# -- writing --------------------------------------------------------------------------------------------------------


def write_shard(folder: Path, member: int, part: CheckpointShard, wanted: Callable[[], bool] = lambda: True) -> bool:
    """Writes a member's part into a folder that is there, then its note; all of it is on the disk when this returns.

    Args:
        folder: of the attempt.
        member: its number, for the names of its files.
        part: in host memory that nobody changes.
        wanted: whether to go on; asked before each tensor.

    Returns:
        False if it was not wanted to the end.
    """
    name = f"__{member}_0.distcp"
    boxes = []
    with CheckedFile(folder / name) as file:
        for tensor_name, pieces in part.tensors.items():
            for box, tensor in pieces.parts:
                if not wanted():
                    return False
                torch.save(tensor, cast(IO[bytes], file))
                offset, length, found = file.cut()
                boxes.append(
                    {
                        "name": tensor_name,
                        "shape": list(pieces.shape),
                        "dtype": str(tensor.dtype),
                        "start": [start for start, _ in box],
                        "sizes": list(tensor.shape),
                        "file": [name, offset, length],
                        "checksum": found,
                    }
                )
    n_bytes = sum(pieces.nbytes for pieces in part.tensors.values())
    note = {"kind": part.kind, "settings": part.settings, "facts": part.facts, "bytes": n_bytes, "boxes": boxes}
    _write(folder / _note(member), note)
    return True


def notes(folder: Path, members: int) -> dict[int, Note]:
    """Returns the notes that are there, by member.

    Raises:
        FileNotFoundError: the folder is not there.
        ValueError: a note is damaged.
    """
    there = {*os.listdir(folder)}
    found: dict[int, Note] = {}
    for member in range(members):
        if _note(member) in there:
            try:
                found[member] = unseal((folder / _note(member)).read_bytes())
            except ValueError as error:
                raise ValueError(f"{_note(member)}: {error}") from error
    return found


def complete(folder: Path, step: int, notes_by_rank: Sequence[Note]) -> Path:
    """Makes a checkpoint of a folder in which everything is; returns where it is.

    Raises:
        StateError: the parts do not make up all tensors.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    files: dict[str, list[tuple[int, str]]] = {}
    for box in (box for note in notes_by_rank for box in note["boxes"]):
        dtype, shape = dtype_of(box["dtype"]), torch.Size(box["shape"])
        stored = tensors.setdefault(box["name"], TensorStorageMetadata(TensorProperties(dtype), shape, []))
        if (stored.properties.dtype, stored.size) != (dtype, shape):
            raise StateError(f"{box['name']} is {dtype} {list(shape)} on one member, and {stored} on another")
        start = torch.Size(box["start"])
        stored.chunks.append(ChunkStorageMetadata(start, torch.Size(box["sizes"])))
        file, _, length = box["file"]
        files.setdefault(file, []).append((length, box["checksum"]))
        results.append(WriteResult(MetadataIndex(box["name"], start), length, _StorageInfo(*box["file"])))
    for name, stored in tensors.items():
        elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        if elements != math.prod(stored.size):
            raise StateError(f"the members have {elements} elements of {name} {list(stored.size)}")
    disk = _Disk()
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    writer.fs = disk
    writer.finish(Metadata(dict(tensors)), [results])
    files[METADATA] = [disk.written[1:]]
    first = notes_by_rank[0]
    about = {
        "version": VERSION,
        "step": step,
        "kind": first["kind"],
        "settings": first["settings"],
        "facts": [note["facts"] for note in notes_by_rank],
        # Of each file, lengths and checksums of its slices one after the other: a tensor's box each.
        "files": files,
    }
    _write(folder / ABOUT, about)
    for member in range(len(notes_by_rank)):
        (folder / _note(member)).unlink()
    sync(folder)
    path = path_of(folder.parent, step)
    folder.rename(path)
    sync(folder.parent)
    return path


class _Disk(FileSystem):
    """Where torch's writer writes.

    Attributes:
        written: offset, length and checksum of the last file.
    """

    written = (0, 0, "")

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Opens a new file."""
        with CheckedFile(Path(path)) as file:
            yield file
        self.written = file.cut()


def _note(member: int) -> str:
    return f"part-{member:05d}.json"


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    """So that the file is there with all of it, or is not there."""
    unnamed = path.with_name(path.name + ".tmp")
    with CheckedFile(unnamed) as file:
        file.write(seal(fields))
    unnamed.rename(path)


# -- reading --------------------------------------------------------------------------------------------------------


class SavedCheckpoint:
    """A complete checkpoint. What is read of it is checked first, unless it has no checksums.

    Attributes:
        path: its folder.
        step: number of steps that had committed.
        facts: of each member that wrote it.
        checked: it has checksums; version 1 had none.

    Raises:
        CheckpointDamaged: it is not what was written.
        StateError: it is of a newer version, or cannot be read at present.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checked = False
        about = self._about()
        with self._reading(ABOUT):  # whoever can make checksums may have written anything
            self.step: int = operator.index(about["step"])
            self.facts: list[dict[str, Any]] = list(about["facts"])
            self._kind, self._settings = str(about["kind"]), dict(about["settings"])
            self._slices = slices_of(about["files"]) if self.checked else {}
        with self._reading(METADATA), self._open(METADATA) as file:
            data = file.read()
            if self.checked:
                self._check(data, METADATA, 0, "")
            # It is torch's format.
            self._metadata: Metadata = pickle.loads(data)  # noqa: S301
            self._stored = {
                name: stored
                for name, stored in self._metadata.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }

    def _about(self) -> dict[str, Any]:
        with self._reading(ABOUT), self._open(ABOUT) as file:
            data = file.read()
        try:
            about = unseal(data)
        except ValueError as error:
            of_version_1 = _of_version_1(data)
            if of_version_1 is None:
                raise CheckpointDamaged(self.path, f"{ABOUT}: {error}") from error
            return of_version_1
        self.checked = True
        if about.get("version") != VERSION:
            raise StateError(
                f"the checkpoint {self.path} has version {about.get('version')}, and this elaunch reads versions up to "
                f"{VERSION}"
            )
        return about

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """Returns the unsharded shapes of all tensors whose names begin with `prefix`, by the rest of their names."""
        return {
            name.removeprefix(prefix): tuple(stored.size)
            for name, stored in self._stored.items()
            if name.startswith(prefix)
        }

    def check(self, kind: str, settings: Mapping[str, Any]) -> None:
        """Checks that a job can go on from here.

        Raises:
            StateError: it is of another job; says what differs.
        """
        calls = {"layers": "elaunch.hybrid()", "objects": "elaunch.init()", "tensors": "elaunch.attach()"}
        if kind != self._kind:
            raise StateError(
                f"the checkpoint {self.path} is of a job of {calls.get(self._kind)}, this is one of {calls[kind]}"
            )
        wrong = [
            f"{name} is {_recorded(self._settings, name)} there and {value!r} here"
            for name, value in settings.items()
            if self._settings.get(name) != value
        ]
        self.refuse(wrong)

    def refuse(self, differences: Sequence[str]) -> None:
        """Raises an error that says what differs, if anything does.

        Raises:
            StateError: something does.
        """
        if differences:
            more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
            raise StateError(
                f"the checkpoint {self.path} is of another job: {'; '.join(differences[:_MOST_NAMED])}{more}. Give "
                "another --checkpoint-dir, or the settings with which it was written"
            )

    def read(self, wanted: Mapping[str, ChunkedTensor]) -> int:
        """Fills these boxes; returns their bytes.

        Raises:
            CheckpointDamaged: what is stored there is not what was written.
            StateError: they are not in it.
        """
        found = self._find(wanted)
        for file_name, slices in found.items():
            with self._reading(file_name), self._open(file_name) as file:
                for stored in sorted(slices, key=lambda stored: stored.offset):
                    stored.copy(self._load(file, file_name, stored))
        return sum(pieces.nbytes for pieces in wanted.values())

    def _find(self, wanted: Mapping[str, ChunkedTensor]) -> dict[str, list[_Slice]]:
        """What to read of each file."""
        by_file: dict[str, list[_Slice]] = {}
        found = 0
        for name, pieces in wanted.items():
            for chunk in self._stored[name].chunks if name in self._stored else ():
                begin = tuple(chunk.offsets)
                box = tuple((start, start + size) for start, size in zip(begin, chunk.sizes, strict=True))
                copies = [
                    (common, held, part) for held, part in pieces.parts if (common := intersect(box, held)) is not None
                ]
                if copies:
                    found += sum(n_elements(common) for common, _, _ in copies)
                    info = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                    stored = _Slice(name, box, info.offset, info.length, copies)
                    by_file.setdefault(info.relative_path, []).append(stored)
        needed = sum(n_elements(box) for pieces in wanted.values() for box, _ in pieces.parts)
        if found != needed:
            raise StateError(f"the checkpoint {self.path} has {found} of {needed} elements")
        return by_file

    def _load(self, file: BinaryIO, file_name: str, stored: _Slice) -> Tensor:
        file.seek(stored.offset)
        data = file.read(stored.length)
        if self.checked:
            self._check(data, file_name, stored.offset, f" ({stored.name})")
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        sizes = [stop - start for start, stop in stored.box]
        if not isinstance(loaded, Tensor) or list(loaded.shape) != sizes:
            raise CheckpointDamaged(self.path, f"{file_name}: {stored.name} has not the shape {sizes}")
        return loaded

    def _check(self, data: bytes, file: str, offset: int, what: str) -> None:
        length, expected = self._slices[file][offset]
        where = f"{file}: bytes {offset} to {offset + length}{what}"
        if len(data) != length:
            raise CheckpointDamaged(self.path, f"{where}: only {len(data)} of {length} are there")
        here = checksum(data)
        if here != expected:
            raise CheckpointDamaged(self.path, f"{where} have the checksum {here}, expected {expected}")

    def _open(self, name: str) -> BinaryIO:
        file = (self.path / name).open("rb")
        slices = self._slices.get(name) if self.checked and name != ABOUT else None
        if slices is not None:
            n_bytes, expected = os.fstat(file.fileno()).st_size, sum(length for length, _ in slices.values())
            if n_bytes != expected:
                file.close()
                raise CheckpointDamaged(self.path, f"{name} has {n_bytes} bytes, expected {expected}")
        return file

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Tells damage from what else can go wrong."""
        try:
            yield
        except StateError:
            raise
        except OSError as error:
            if error.errno in _DAMAGES:
                problem = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
                raise CheckpointDamaged(self.path, f"{name} {problem}") from error
            raise StateError(f"the checkpoint {self.path} cannot be read: {error}") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self.checked or isinstance(error, MemoryError):
                # The bytes are those that were written.
                raise StateError(f"the checkpoint {self.path} cannot be read: {name}: {text}") from error
            raise CheckpointDamaged(self.path, f"{name} cannot be read: {text}") from error


@dataclass(frozen=True)
class _Slice:
    """What is stored of a tensor in one place, and where it goes.

    Attributes:
        name: of the tensor.
        box: that is stored.
        offset: in the file, as `length`.
        copies: boxes in it, each with the box of a wanted part, and this part.
    """

    name: str
    box: Box
    offset: int
    length: int
    copies: Sequence[tuple[Box, Box, Tensor]]

    def copy(self, loaded: Tensor) -> None:
        """Fills the parts."""
        for common, held, part in self.copies:
            part.detach()[_within(common, held)].copy_(loaded[_within(common, self.box)])


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(start - begin, stop - begin) for (start, stop), (begin, _) in zip(box, outer, strict=True))


def _recorded(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not recorded (its elaunch was older)"


def _of_version_1(data: bytes) -> dict[str, Any] | None:
    try:
        about = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(about, dict) and about.keys() == _KEYS_1 and about["version"] == 1
    return about if is_one else None


T = TypeVar("T")


@dataclass(frozen=True)
class Restored(Generic[T]):
    """What members go on from.

    Attributes:
        saved: the checkpoint.
        state: what this member read of it.
        read_bytes: how much that was.
        seconds: since the first checkpoint was tried.
    """

    saved: SavedCheckpoint
    state: T
    read_bytes: int
    seconds: float


Read = Callable[[SavedCheckpoint], tuple[T, int]]
"""Reads what a member needs from a checkpoint; returns that, and the bytes it read. It talks to nobody."""
