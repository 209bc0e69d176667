"""State of registered objects as a manifest that JSON can carry plus a flat list of tensors, and back.

In a manifest None, booleans, integers, finite floats and strings stand for themselves and a JSON list for a list. All
else is an object with the key "k" (its kind), so nothing is ever executed to read one. Tensors appear as their index
in the list. Supported besides: dict, OrderedDict, defaultdict, Counter, tuple, torch.Size, set, frozenset, bytes,
bytearray, complex, torch.dtype, torch.device, and numpy arrays and scalars without fields and objects. A subclass of
any of these (an enum, a named tuple) is refused: it could only come back as something else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from elaunch.errors import ProtocolError, StateError

VERSION = 1
PEERS = "the peers"
_DEEPEST = 64
_MOST_NAMED = 5
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_SCALARS = (type(None), bool, int, str)
_TENSORS = (torch.Tensor, nn.Parameter)

Manifest = dict[str, Any]
Where = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device]
"""Where a tensor lies, and how."""


def where(tensor: torch.Tensor) -> Where:
    """Returns where a tensor lies, and how."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def describe(objects: Mapping[str, Any]) -> tuple[Manifest, list[torch.Tensor]]:
    """Returns the state of `objects`, by name: anything with `state_dict` and `load_state_dict`.

    The tensors are the live ones where possible (dense in memory, not conjugated), so nobody may change them while
    they are sent. A tensor that appears twice (tied weights) is listed once.

    Returns:
        The manifest, and the tensors in the order of `manifest["tensors"]`.

    Raises:
        StateError: an object has no state_dict, or one with a value that cannot be described; names the path.
    """
    encoder = Encoder()
    described = {}
    for name, thing in objects.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise StateError(f"{name}: {type(thing).__name__} has no {method}(); register things that have one")
        described[name] = encoder.encode(thing.state_dict(), name)
    return {"version": VERSION, "objects": described, "tensors": encoder.specs}, encoder.tensors


def _load(thing: Any, state: Any) -> None:
    thing.load_state_dict(state)


def restore(
    objects: Mapping[str, Any],
    manifest: Manifest,
    tensors: Sequence[torch.Tensor],
    whose: str = PEERS,
    load: Callable[[Any, Any], None] = _load,
) -> None:
    """Loads the described state into `objects`, which must have the names and shapes of the described ones.

    Names and shapes are checked first: if they differ, nothing is changed. Objects may keep the given tensors as
    their own (optimizers do), so these must not be used for anything else afterwards. `whose` state it is
    goes into messages. `load` gives a state to an object that is no optimizer.

    Raises:
        StateError: names, shapes or dtypes differ, or an object refuses its state.
        ProtocolError: the manifest is of another version, or damaged.
    """
    if manifest.get("version") != VERSION:
        raise ProtocolError(f"a state manifest of version {manifest.get('version')!r}, expected {VERSION}")
    if set(objects) != set(manifest["objects"]):
        raise StateError(
            f"registered here: {', '.join(sorted(objects)) or 'nothing'}; registered by {whose}: "
            f"{', '.join(sorted(manifest['objects'])) or 'nothing'}. All workers must register the same names"
        )
    _check_tensors(manifest, tensors)
    states = {}
    for name, thing in objects.items():
        # A module copies to its own device by itself.
        decoder = _Decoder(tensors, [] if isinstance(thing, nn.Module) else manifest["tensors"])
        try:
            states[name] = decoder.decode(manifest["objects"][name])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the manifest of {name} is damaged: {error!r}") from error
        _check_fits(name, thing, states[name], whose)
    for name, thing in objects.items():
        try:
            if isinstance(thing, torch.optim.Optimizer):
                _load_optimizer(thing, states[name])
            else:
                load(thing, states[name])
        except Exception as error:
            raise StateError(f"{name}: {type(thing).__name__} does not take the state of {whose}: {error}") from error


def digest(manifest: Manifest) -> str:
    """Returns SHA-256 (hex) of a manifest: workers with equal digests agree on all that is not in a tensor."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class TensorPlaces(NamedTuple):
    """What an encoder found, without the tensors: where each of its list lay, and what the manifest says of it."""

    places: Sequence[Where | None] = ()
    specs: Sequence[dict[str, Any]] = ()


class Encoder:
    """Describes values, one after the other; the tensors among them come into its list.

    Args:
        before: what an encoder found in the same values before. A tensor that lies where it lay then is described
            alike, without another look; the specs are shared.

    Attributes:
        tensors: the live ones.
        specs: what a manifest says of each.
    """

    def __init__(self, before: TensorPlaces | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.specs: list[dict[str, Any]] = []
        self._known: dict[Where, int] = {}
        self._places: list[Where | None] = []  # None: the list has a copy of it
        self._before = TensorPlaces() if before is None else before

    @property
    def found(self) -> TensorPlaces:
        """Returns what the next encoder of the same values may be given."""
        return TensorPlaces(self._places, self.specs)

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Returns what stands for a value in a manifest.

        Raises:
            StateError: it cannot be described.
        """
        if depth > _DEEPEST:
            raise StateError(f"{path}: nested more than {_DEEPEST} deep; does it contain itself?")
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"k": "float", "v": str(value)}
        if kind is complex:
            return {"k": "complex", "v": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            return {"k": kind.__name__, "v": base64.b64encode(value).decode()}
        if kind in (torch.dtype, torch.device):
            return {"k": kind.__name__, "v": str(value)}
        if kind in _TENSORS:
            return {"k": "tensor", "i": self.add(value, path)}
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic) and _is_plain(value.dtype):
            return {"k": "scalar", "dtype": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
        if kind is list:
            return [self.encode(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
        if kind in (tuple, torch.Size):
            items = [self.encode(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
            return {"k": kind.__name__, "v": items}
        if kind in (set, frozenset):
            items = [self._key(item, path, depth) for item in value]
            return {"k": kind.__name__, "v": sorted(items, key=json.dumps)}
        if kind in (dict, OrderedDict, defaultdict, Counter):
            return self._dict(value, path, depth)
        raise StateError(f"{path}: type {kind.__qualname__}; give it a state_dict of plain values and tensors")

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        items = [
            [self._key(key, path, depth), self.encode(item, f"{path}.{key}", depth + 1)] for key, item in value.items()
        ]
        encoded: dict[str, Any] = {"k": type(value).__name__, "v": items}
        if isinstance(value, defaultdict) and value.default_factory is not None:
            factory = value.default_factory
            if factory not in _FACTORIES.values():
                raise StateError(f"{path}: defaultdict of {factory!r}; only {', '.join(_FACTORIES)} can be described")
            encoded["factory"] = next(name for name, known in _FACTORIES.items() if known is factory)
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:  # the versions of a module's parts, which load_state_dict looks at
            encoded["metadata"] = self.encode(metadata, f"{path}._metadata", depth + 1)
        return encoded

    def _key(self, key: Any, path: str, depth: int) -> Any:
        if isinstance(key, torch.Tensor):
            raise StateError(f"{path}: a tensor as a key or in a set; give it a state_dict of plain values and tensors")
        if type(key) in _SCALARS:
            return key
        return self.encode(key, f"{path}.{key}", depth + 1)

    def _array(self, value: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        if not _is_plain(value.dtype):
            raise StateError(f"{path}: numpy array of {value.dtype}; give it a state_dict of plain values and tensors")
        flat = np.ascontiguousarray(value).reshape(-1)
        flat = flat if flat.flags.writeable else flat.copy()
        index = self.add(torch.from_numpy(flat.view(np.uint8)), path)
        return {"k": "array", "dtype": value.dtype.str, "shape": list(value.shape), "i": index}

    def add(self, tensor: torch.Tensor, path: str, *, tied: bool = True) -> int:
        """Takes a tensor into the list; returns its place there. With `tied`, one that is in the list is not added."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
            raise StateError(f"{path}: a tensor without plain memory ({'meta' if tensor.is_meta else what})")
        place = where(tensor)
        plain = not (tensor.is_conj() or tensor.is_neg())
        ties = tied and plain and tensor.numel() > 0
        if ties and place in self._known:
            return self._known[place]
        spec = self._former_spec(place, path) if plain else None
        if spec is not None:
            dense = tensor.detach()
        else:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            strides = torch.empty_like(tensor, device="meta").stride()
            # Gaps and overlaps are not moved; a permuted order of the dimensions (channels_last) is kept.
            dense = tensor if strides == tensor.stride() else tensor.contiguous()
            plain = plain and dense is tensor
            spec = self._spec(dense, path)
        if ties and plain:  # the list keeps it alive, so nothing else can come to this place
            self._known[place] = len(self.tensors)
        self.tensors.append(dense)
        self.specs.append(spec)
        self._places.append(place if plain else None)
        return len(self.tensors) - 1

    def _former_spec(self, place: Where, path: str) -> dict[str, Any] | None:
        """Returns what was said of a tensor before, if it lies where it lay, at the same place in the list."""
        number, (places, specs) = len(self.tensors), self._before
        if number < len(places) and places[number] == place and specs[number]["path"] == path:
            return specs[number]
        return None

    @staticmethod
    def _spec(dense: torch.Tensor, path: str) -> dict[str, Any]:
        spec: dict[str, Any] = {"path": path, "dtype": str(dense.dtype), "shape": list(dense.shape)}
        if not dense.is_contiguous():
            spec["strides"] = list(dense.stride())
        if dense.device.type != "cpu":
            spec["device"] = dense.device.type
        return spec


class _Decoder:
    def __init__(self, tensors: Sequence[torch.Tensor], specs: Sequence[dict[str, Any]]) -> None:
        self._tensors = list(tensors)
        for index, spec in enumerate(specs):
            if "device" in spec:
                self._tensors[index] = self._tensors[index].to(spec["device"])
        self._simple: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "complex": lambda value: complex(*map(self.decode, value)),
            "bytes": base64.b64decode,
            "bytearray": lambda value: bytearray(base64.b64decode(value)),
            "dtype": dtype_of,
            "device": torch.device,
            "tuple": lambda value: tuple(map(self.decode, value)),
            "Size": lambda value: torch.Size(map(self.decode, value)),
            "set": lambda value: set(map(self.decode, value)),
            "frozenset": lambda value: frozenset(map(self.decode, value)),
        }

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value["k"]
        if kind in self._simple:
            return self._simple[kind](value["v"])
        if kind == "tensor":
            return self._tensors[value["i"]]
        if kind == "array":
            array = self._tensors[value["i"]].cpu().numpy()
            return array.view(np.dtype(value["dtype"])).reshape(value["shape"])
        if kind == "scalar":
            return np.frombuffer(base64.b64decode(value["v"]), np.dtype(value["dtype"]))[0]
        return self._dict(kind, value)

    def _dict(self, kind: str, value: dict[str, Any]) -> Any:
        pairs = [(self.decode(key), self.decode(item)) for key, item in value["v"]]
        result: Any
        if kind == "dict":
            result = dict(pairs)
        elif kind == "OrderedDict":
            result = OrderedDict(pairs)
        elif kind == "Counter":
            result = Counter(dict(pairs))
        elif kind == "defaultdict":
            factory = value.get("factory")
            result = defaultdict(_FACTORIES[factory] if factory else None, pairs)
        else:
            raise ValueError(f"unknown kind {kind!r}")
        if "metadata" in value:
            result._metadata = self.decode(value["metadata"])
        return result


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name such as "torch.float32"; ValueError if there is none."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return dtype


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return not dtype.hasobject and dtype.fields is None and dtype.kind != "V" and np.dtype(dtype.str) == dtype


def _check_tensors(manifest: Manifest, tensors: Sequence[torch.Tensor]) -> None:
    specs = manifest["tensors"]
    if len(tensors) != len(specs):
        raise StateError(f"got {len(tensors)} tensors for a manifest of {len(specs)}")
    for spec, tensor in zip(specs, tensors):
        if list(tensor.shape) != spec["shape"] or str(tensor.dtype) != spec["dtype"]:
            raise StateError(
                f"{spec['path']}: got {tensor.dtype} {list(tensor.shape)}, the manifest says "
                f"{spec['dtype']} {spec['shape']}"
            )


def _check_fits(name: str, thing: Any, state: Any, whose: str) -> None:
    wrong = []
    if isinstance(thing, nn.Module):
        wrong = _differences(thing.state_dict(), state, whose)
    elif isinstance(thing, torch.optim.Optimizer) and _is_usual(state):
        here = [len(group["params"]) for group in thing.param_groups]
        there = [len(group["params"]) for group in state["param_groups"]]
        if here != there:
            wrong = [f"parameters per group: {here} here, {there} at {whose}"]
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise StateError(
            f"{name} is not what {'its peers have' if whose == PEERS else f'{whose} has'}: "
            f"{'; '.join(wrong[:_MOST_NAMED])}{more}. "
            "A joining worker must build the same model and optimizer"
        )


def _is_usual(state: Any) -> bool:
    """Whether an optimizer's state has the form that torch documents; a subclass may have its own."""
    return isinstance(state, dict) and set(state) >= {"state", "param_groups"}


def _differences(here: Mapping[str, Any], there: Mapping[str, Any], whose: str) -> list[str]:
    wrong = []
    for key in [*here, *(key for key in there if key not in here)]:
        if key not in here or key not in there:
            wrong.append(f"{key} only {'here' if key in here else f'at {whose}'}")
            continue
        shapes = [
            f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"
            for value in (here[key], there[key])
        ]
        if shapes[0] != shapes[1]:
            wrong.append(f"{key} is {shapes[0]} here, {shapes[1]} at {whose}")
    return wrong


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    if not _is_usual(state):
        return
    # load_state_dict casts to the parameter's dtype what a mixed-precision optimizer keeps in a wider one.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters):
        own = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != own[key].dtype:
                own[key] = value.to(own[key].device)
