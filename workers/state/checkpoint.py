"""A job's state on disk, in the format of torch.distributed.checkpoint: written part by part, read box by box.

Every tensor has a global name and its unsharded shape, so torch's own tools read it; which worker wrote what does not
matter. Beside torch's files lies `elaunch.json`, with the number of steps and all that is no tensor.

    write_part   a member's boxes, and a note in which it says where they are
    complete     once all notes are there: elaunch.json, then .metadata, then the folder gets its name
    Saved        a complete checkpoint: what it is of, and any boxes of its tensors
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from elaunch.checkpoints import ABOUT, path_of
from elaunch.errors import StateError
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.codec import dtype_of

VERSION = 1

_MOST_NAMED = 4


class Pieces:
    """One tensor in boxes, as torch.distributed.checkpoint wants to see it."""

    def __init__(self, shape: Sequence[int], parts: Sequence[tuple[Box, Tensor]]) -> None:
        self.shape = torch.Size(shape)
        self._parts = {tuple(start for start, _ in box): part for box, part in parts}

    @property
    def nbytes(self) -> int:
        """Of the boxes."""
        return sum(part.nbytes for part in self._parts.values())

    def copied(self) -> Pieces:
        """The same in host memory of its own."""
        found = Pieces(self.shape, ())
        found._parts = {
            offsets: part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for offsets, part in self._parts.items()
        }
        return found

    def _chunk(self, offsets: tuple[int, ...]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offsets), self._parts[offsets].shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    self._chunk(offsets), TensorProperties.create_from_tensor(part), self.shape
                ),
            )
            for offsets, part in self._parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(offsets) for offsets in self._parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._parts[tuple(index.offset)]


class SavePlanner(dcp.DefaultSavePlanner):
    """Finds the tensors of `Pieces`; torch's looks into tensors only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        found: Pieces = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into `Pieces`."""

    def __init__(self, pieces: Mapping[str, Pieces]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        found = []
        for name, pieces in self._pieces.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            found += create_read_items_for_chunk_list(name, stored, pieces.__create_chunk_list__())
        return LoadPlan(found)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].__get_tensor_shard__(index)


@dataclass(frozen=True)
class Part:
    """What one member adds to a checkpoint.

    Attributes:
        kind: of job: "layers" or "objects"; alike for all members, as `settings` is.
        settings: what must be the same when the job goes on from here; JSON.
        tensors: by name, its boxes of them.
        facts: whatever else it knows of the state; JSON.
    """

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Pieces]
    facts: Mapping[str, Any]

    def copied(self) -> Part:
        """The same, in host memory that nobody changes."""
        return replace(self, tensors={name: pieces.copied() for name, pieces in self.tensors.items()})


Note = Mapping[str, Any]
"""What a member leaves in the folder when its part is on the disk."""


# -- writing --------------------------------------------------------------------------------------------------------


def write_part(folder: Path, member: int, part: Part) -> None:
    """Write a member's part, then its note; all of it is on the disk when this returns."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    # The number is for the names of its files.
    writer.set_up_storage_writer(False, rank=member, use_collectives=False)
    planner = SavePlanner()
    planner.set_up_planner(dict(part.tensors))
    plan = writer.prepare_local_plan(planner.create_local_plan())
    results = {result.index: result.storage_data for result in writer.write_data(plan, planner).wait()}
    boxes = []
    for item in plan.items:
        told, where = item.tensor_data, results[item.index]
        assert told is not None
        assert told.chunk is not None
        boxes.append(
            {
                "name": item.index.fqn,
                "shape": list(told.size),
                "dtype": str(told.properties.dtype),
                "start": list(told.chunk.offsets),
                "sizes": list(told.chunk.sizes),
                "file": [where.relative_path, where.offset, where.length],
            }
        )
    n_bytes = sum(pieces.nbytes for pieces in part.tensors.values())
    said = {"kind": part.kind, "settings": part.settings, "facts": part.facts, "bytes": n_bytes, "boxes": boxes}
    _write(folder / _note(member), said)


def notes(folder: Path, members: int) -> dict[int, Note]:
    """The notes that are there, by member."""
    there = {*os.listdir(folder)}
    return {
        member: json.loads((folder / _note(member)).read_bytes()) for member in range(members) if _note(member) in there
    }


def complete(folder: Path, step: int, said: Sequence[Note]) -> Path:
    """Make a checkpoint of a folder in which everything is; return where it is.

    Raises:
        StateError: the parts do not make up all tensors.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for box in (box for note in said for box in note["boxes"]):
        dtype, shape = dtype_of(box["dtype"]), torch.Size(box["shape"])
        stored = tensors.setdefault(box["name"], TensorStorageMetadata(TensorProperties(dtype), shape, []))
        if (stored.properties.dtype, stored.size) != (dtype, shape):
            raise StateError(f"{box['name']} is {dtype} {list(shape)} on one member, and {stored} on another")
        start = torch.Size(box["start"])
        stored.chunks.append(ChunkStorageMetadata(start, torch.Size(box["sizes"])))
        results.append(WriteResult(MetadataIndex(box["name"], start), box["file"][2], _StorageInfo(*box["file"])))
    for name, stored in tensors.items():
        elements = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        if elements != math.prod(stored.size):
            raise StateError(f"the members have {elements} elements of {name} {list(stored.size)}")
    first = said[0]
    about = {
        "version": VERSION,
        "step": step,
        "kind": first["kind"],
        "settings": first["settings"],
        "facts": [note["facts"] for note in said],
    }
    _write(folder / ABOUT, about)
    dcp.FileSystemWriter(folder, sync_files=True).finish(Metadata(dict(tensors)), [results])
    for member in range(len(said)):
        (folder / _note(member)).unlink()
    _sync(folder)
    path = path_of(folder.parent, step)
    folder.rename(path)
    _sync(folder.parent)
    return path


def _note(member: int) -> str:
    return f"part-{member:05d}.json"


def _write(path: Path, said: Mapping[str, Any]) -> None:
    """So that the file is there with all of it, or is not there."""
    unnamed = path.with_name(path.name + ".tmp")
    with unnamed.open("w") as file:
        json.dump(said, file)
        file.flush()
        os.fsync(file.fileno())
    unnamed.rename(path)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems cannot do it for folders.
        with contextlib.suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


# -- reading --------------------------------------------------------------------------------------------------------


class Saved:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        step: number of steps that had committed.
        facts: of each member that wrote it.

    Raises:
        StateError: it is damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading():
            about = json.loads((path / ABOUT).read_bytes())
            if about["version"] != VERSION:
                raise StateError(f"the checkpoint {path} has version {about['version']}, expected {VERSION}")
            self.step: int = about["step"]
            self.facts: list[dict[str, Any]] = about["facts"]
            self._kind, self._settings = about["kind"], about["settings"]
            self._reader = dcp.FileSystemReader(path)
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, False)

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """Of all tensors whose names begin so, unsharded, without this beginning."""
        return {
            name.removeprefix(prefix): tuple(stored.size)
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and name.startswith(prefix)
        }

    def check(self, kind: str, settings: Mapping[str, Any]) -> None:
        """That a job can go on from here.

        Raises:
            StateError: it is of another job; says what differs.
        """
        calls = {"layers": "elaunch.hybrid()", "objects": "elaunch.init()"}
        if kind != self._kind:
            raise StateError(
                f"the checkpoint {self.path} is of a job of {calls[self._kind]}, this is one of {calls[kind]}"
            )
        wrong = [
            f"{name} is {self._settings.get(name)!r} there and {value!r} here"
            for name, value in settings.items()
            if self._settings.get(name) != value
        ]
        self.refuse(wrong)

    def refuse(self, differences: Sequence[str]) -> None:
        """Say what differs, if anything does.

        Raises:
            StateError: something does.
        """
        if differences:
            more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
            raise StateError(
                f"the checkpoint {self.path} is of another job: {'; '.join(differences[:_MOST_NAMED])}{more}. Give "
                "another --checkpoint-dir, or the settings with which it was written"
            )

    def read(self, wanted: Mapping[str, Pieces]) -> int:
        """Fill these boxes; return their bytes.

        Raises:
            StateError: they are not in it.
        """
        planner = LoadPlanner(wanted)
        planner.set_up_planner({}, self._metadata)
        with self._reading():
            plan = planner.create_local_plan()
            found = sum(math.prod(item.lengths) for item in plan.items)
            needed = sum(
                math.prod(chunk.sizes) for pieces in wanted.values() for chunk in pieces.__create_chunk_list__()
            )
            if found != needed:
                raise StateError(f"the checkpoint {self.path} has {found} of {needed} elements")
            self._reader.read_data(plan, planner).wait()
        return sum(pieces.nbytes for pieces in wanted.values())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                f"the checkpoint {self.path} cannot be read: {type(error).__name__}: {error}. If it is damaged, remove "
                "it: then the one before it counts"
            ) from error
