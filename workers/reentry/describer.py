"""Descriptions of the same objects again and again, quick while what is in them stays where it is.

An object is asked for its state each time. Where that has the same tensors as the last time, and they lie where they
lay, what was said of it holds. It is read in sections, so that a number that changes, such as a learning rate, does not
have all tensors described anew.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.workers.reentry.encoding import (
    Description,
    ShardEncoder,
    Stretch,
    manifest_of,
    state_of,
)
from elaunch.workers.state.codec import TensorPlaces, where

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LOCAL, _SPEC = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")
_SCALARS = frozenset((type(None), bool, int, str))
_DEEPEST = 16


def tensor_kinds() -> frozenset[type]:
    """Returns the types of tensors of which it can be seen whether they are as they were."""
    module = sys.modules.get("torch.distributed.tensor")
    return _PLAIN if module is None else _PLAIN | {module.DTensor}


class Contents:
    """What is in a value: its keys, its scalars and its tensors.

    Attributes:
        kinds: the types of all that is in it.
        scalars: and sizes, and keys.
        tensors: all of it that are tensors.
        unreadable: whether something else is in it.
    """

    def __init__(self, value: Any) -> None:
        self.kinds: list[type] = []
        self.scalars: list[Any] = []
        self.tensors: list[Any] = []
        self.unreadable = False
        self._tensor_kinds = tensor_kinds()
        self._add_all([value], 0)

    def _add_all(self, values: Collection[Any], depth: int) -> None:
        kinds = list(map(type, values))
        self.kinds += kinds
        distinct = set(kinds)
        if distinct <= self._tensor_kinds:
            self.tensors += values
        elif distinct <= _SCALARS:
            self.scalars += values
        elif depth > _DEEPEST:
            self.unreadable = True
        elif distinct == {dict}:
            self.scalars += map(len, values)
            self._add_keys(itertools.chain.from_iterable(values))
            self._add_all(list(itertools.chain.from_iterable(map(dict.values, values))), depth + 1)
        else:
            for value, kind in zip(values, kinds):
                self._add(value, kind, depth + 1)

    def _add(self, value: Any, kind: type, depth: int) -> None:
        """Adds one of several kinds."""
        if kind in self._tensor_kinds:
            self.tensors.append(value)
        elif kind in _SCALARS:
            self.scalars.append(value)
        elif kind is float:
            self.scalars.append(repr(value))  # which tells -0.0 from 0.0
        elif kind in (dict, OrderedDict):
            self.scalars.append(len(value))
            self._add_keys(value)
            self._add_all(value.values(), depth)
            if kind is OrderedDict:
                self._add_all([getattr(value, "_metadata", None)], depth)
        elif kind in (list, tuple):
            self.scalars.append(len(value))
            self._add_all(value, depth)
        else:
            self.unreadable = True

    def _add_keys(self, keys: Iterable[Any]) -> None:
        keys = list(keys)
        kinds = list(map(type, keys))
        self.kinds += kinds
        self.scalars += keys
        self.unreadable |= not _SCALARS.issuperset(kinds)

    def is_like(self, other: Contents) -> bool:
        """Returns whether both have the same scalars, in the same order, and the very same tensors."""
        return (
            not self.unreadable
            and self.kinds == other.kinds
            and self.scalars == other.scalars
            and all(map(operator.is_, self.tensors, other.tensors))  # as many, since the kinds are alike
        )


class Lie:
    """Where tensors lie.

    Args:
        tensors: plain ones, and DTensors.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._cut = [tensor for tensor in tensors if type(tensor) not in _PLAIN]
        self._locals, self._specs = list(map(_LOCAL, self._cut)), list(map(_SPEC, self._cut))
        self._plain = [tensor for tensor in tensors if type(tensor) in _PLAIN] + self._locals
        self._places = list(map(where, self._plain))

    @property
    def is_certain(self) -> bool:
        """Returns whether what is not as it was is noticed."""
        return _PLAIN.issuperset(map(type, self._locals))

    def is_as_it_was(self) -> bool:
        """Returns whether the tensors lie where they lay when this was made."""
        return (
            all(map(operator.is_, map(_LOCAL, self._cut), self._locals))
            and all(map(operator.is_, map(_SPEC, self._cut), self._specs))
            and list(map(where, self._plain)) == self._places
            and not any(map(Tensor.is_neg, self._plain))
            and not any(map(Tensor.is_conj, self._plain))
        )


@dataclass(frozen=True, eq=False)
class Section:
    """A part of a state as it was described.

    Attributes:
        path: of it.
        contents: what was in it.
        lie: where its tensors lay; None: it is not known to stay as it is.
        stretch: what the encoder found in it.
        encoded: what stands for it in the manifest.
    """

    path: str
    contents: Contents
    lie: Lie | None
    stretch: Stretch
    encoded: Any

    def holds(self, path: str, contents: Contents) -> bool:
        """Returns whether what was said holds for what is at a path now."""
        if self.lie is None or self.path != path:
            return False
        return contents.is_like(self.contents) and self.lie.is_as_it_was()


class Describer:
    """Describes the same objects again and again. It holds their tensors."""

    def __init__(self) -> None:
        self._found: TensorPlaces | None = None
        self._sections: list[Section] = []
        self._form = object()

    @torch.no_grad()
    def describe(self, objects: Mapping[str, Any]) -> Description:
        """Returns what `describe_shards` does of objects."""
        reading = _Reading(self._sections, self._found)
        described = {name: reading.object(name, thing) for name, thing in objects.items()}
        encoder = reading.encoder
        if not reading.is_like_former or len(reading.sections) != len(self._sections):
            self._form = object()
        self._sections, self._found = reading.sections, encoder.found
        return Description(manifest_of(described, encoder), encoder.tensors, encoder.boxes, self._form)


class _Reading:
    """One description of objects.

    Args:
        former: the sections of the last one.
        found: what its encoder found.

    Attributes:
        encoder: of this one.
        sections: of it, until now.
        is_like_former: whether all tensors until now are those of the last one, at the same places.
    """

    def __init__(self, former: list[Section], found: TensorPlaces | None) -> None:
        self._former: Iterator[Section] = iter(former)
        self.encoder = ShardEncoder(found)
        self.sections: list[Section] = []
        self.is_like_former = True

    def object(self, name: str, thing: Any) -> Any:
        """Returns what stands for an object in the manifest."""
        state = state_of(thing)
        # As of an optimizer: what it keeps of parameters stays where it is, and numbers of the groups change.
        if type(state) is dict and state and all(type(key) is str for key in state) and _has_containers(state):
            items = [[key, self._section(f"{name}.{key}", item, 1)] for key, item in state.items()]
            return {"k": "dict", "v": items}
        return self._section(name, state, 0)

    def _section(self, path: str, value: Any, depth: int) -> Any:
        encoder, contents = self.encoder, Contents(value)
        former = next(self._former, None)
        if self.is_like_former and former is not None and former.holds(path, contents):
            encoder.adopt(former.stretch)
            self.sections.append(former)
            return former.encoded
        start = len(encoder.tensors)
        encoded = encoder.encode(value, path, depth)
        stretch = encoder.since(start)
        stays = former is not None and former.path == path and contents.is_like(former.contents)
        lie = Lie(contents.tensors) if stays and None not in stretch.places else None
        self.sections.append(Section(path, contents, lie if lie and lie.is_certain else None, stretch, encoded))
        self.is_like_former = self.is_like_former and former is not None and stretch.is_like(former.stretch)
        return encoded


def _has_containers(state: dict[str, Any]) -> bool:
    return any(type(item) in (dict, OrderedDict, list) for item in state.values())
