"""The layers of a model: described without being built, built alone, run with their own random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elaunch.errors import StateError
from elaunch.workers.comm.group import memory
from elaunch.workers.layers import tensor_parallel
from elaunch.workers.random.rng import layer_randomness, mix
from elaunch.workers.random.rows import RowsOfUnit, math_attention
from elaunch.workers.random.trace import GENERATORS, trace_random
from elaunch.workers.random.uncompiled import uncompiled
from elaunch.workers.refusals import refuse_sparse, refuse_wrappers
from elaunch.workers.state.layout import LayerSpec

Factory = Callable[[], nn.Module]


def describe(
    factories: Sequence[Factory], example: Tensor, micro_batch_size: int, dtype: torch.dtype | None
) -> tuple[LayerSpec, ...]:
    """Finds out shapes and random numbers of all layers on the meta device: nothing is allocated or computed.

    Args:
        factories: of the layers.
        example: one row of input of the first layer (1, …), on any device.
        micro_batch_size: rows of a logical micro-batch.
        dtype: of the parameters; None leaves them as they are.

    Raises:
        StateError: a layer cannot be built or run, or its output does not fit the next.
    """
    specs = []
    row: tuple[torch.Size, torch.dtype] = (example.shape[1:], example.dtype)
    source = "the data set"
    for index, factory in enumerate(factories):
        layer = _made_on_meta(index, factory, dtype)
        name = layer_name(index, layer)
        # A layer may make more buffers when it runs first: what it makes alone is no state.
        untrained = _untrained(layer, name)
        shape, kind = row

        def inputs(rows: int, shape: torch.Size = shape, kind: torch.dtype = kind) -> Tensor:
            return torch.empty((rows, *shape), dtype=kind, device="meta")

        with uncompiled():
            row = _output(layer, inputs, name, f"{source} gives rows of shape {tuple(shape)} and {kind}")
            trace = trace_random(layer, inputs, micro_batch_size, name.removeprefix("layer "))
        cuts = tensor_parallel.cuts_of(layer, name)
        trained = {key: value for key, value in layer.named_parameters() if value.requires_grad}
        specs.append(
            LayerSpec(
                index,
                name,
                {key: value.shape for key, value in trained.items()},
                {key: value.dtype for key, value in trained.items()},
                cuts,
                row,
                trace,
                untrained,
            )
        )
        source = name
    return tuple(specs)


def check_cuts(specs: Sequence[LayerSpec], factories: Sequence[Factory], dtype: torch.dtype | None, width: int) -> None:
    """Checks that the layers can be cut over tensor-parallel groups of `width` workers.

    Raises:
        StateError: one cannot, or none says how.
    """
    if width == 1:
        return
    if not any(spec.cuts for spec in specs):
        raise StateError(
            "no layer says how it is cut, so each member of a TP group would do all of the work; "
            "give the layers an attribute `placements`"
        )
    for spec, factory in zip(specs, factories, strict=True):
        layer = _made_on_meta(spec.index, factory, dtype)
        tensor_parallel.cut(layer, tensor_parallel.cuts_of(layer, spec.name), 0, width, spec.name)


def layer_name(index: int, layer: nn.Module) -> str:
    """Returns how messages name a layer: by its number and its class."""
    return f"layer {index} ({type(layer).__name__})"


def _untrained(layer: nn.Module, name: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Of frozen parameters and buffers: shape and dtype."""
    frozen = {key: value for key, value in layer.named_parameters() if not value.requires_grad}
    found: dict[str, Tensor] = {**frozen, **dict(layer.named_buffers())}
    for key, value in found.items():
        if value.layout is not torch.strided:
            raise StateError(f"{name} has {key} as {value.layout}, which cannot be sent; use a dense tensor")
    return {key: (value.shape, value.dtype) for key, value in found.items() if value.numel()}


def _made_on_meta(index: int, factory: Factory, dtype: torch.dtype | None) -> nn.Module:
    with torch.device("meta"), warnings.catch_warnings():
        # A factory may load values; here they go nowhere.
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
        return _made(index, factory, dtype)


def _made(index: int, factory: Factory, dtype: torch.dtype | None) -> nn.Module:
    layer = factory()
    if not isinstance(layer, nn.Module):
        raise StateError(
            f"layers[{index}] must be a function that makes an nn.Module; it returned {type(layer).__name__}"
        )
    refuse_wrappers([layer], layer_name(index, layer), "give the engine the module itself, which it cuts by the plan")
    refuse_sparse(layer, layer_name(index, layer))
    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise StateError(
                f"{layer_name(index, layer)} has {type(module).__name__}, whose statistics would depend on how the "
                "batch is divided; use LayerNorm, RMSNorm or GroupNorm"
            )
    return layer if dtype is None else layer.to(dtype=dtype)


def _output(layer: nn.Module, inputs: Callable[[int], Tensor], name: str, given: str) -> tuple[torch.Size, torch.dtype]:
    found = []
    for rows in (2, 3):
        given_rows = inputs(rows)
        try:
            with torch.no_grad():
                output = layer(given_rows)
        except StateError:
            raise
        except Exception as error:
            raise StateError(f"{name} cannot be run: {given}; {type(error).__name__}: {error}") from error
        if given_rows._version:
            raise StateError(f"{name} changes its input in place, which others still need; let it return a new tensor")
        if not isinstance(output, Tensor):
            raise StateError(f"{name} returns {type(output).__name__}; a layer must return one tensor (rows, …)")
        if output.dim() == 0 or output.shape[0] != rows:
            raise StateError(
                f"{name} returns shape {tuple(output.shape)} for {rows} rows; the first dimension must be {rows}"
            )
        found.append((output.shape[1:], output.dtype))
    if found[0] != found[1]:
        raise StateError(
            f"{name}: the shape of an output row depends on the number of rows: {found[0][0]}, {found[1][0]}"
        )
    return found[0]


@dataclass(eq=False)
class Layer:
    """A layer on this worker, or this worker's part of it.

    Attributes:
        module: with its parameters.
        spec: of the whole layer.
        recompute: whether its activations are computed again in backward.
        parameters: those that are trained, this worker's part, by name.
    """

    module: nn.Module
    spec: LayerSpec
    tp_rank: tensor_parallel.TPRank
    recompute: bool = False
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = {name: self._slot(name) for name in (*self.parameters, *self.spec.untrained)}
        self._kinds = {name: (value.shape, value.dtype) for name, value in self._named_untrained()}
        self._grads: dict[int, Tensor] = {}
        self._done: Callable[[list[Tensor]], None] | None = None
        for place, parameter in enumerate(self.parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._take, place))

    def untrained(self) -> dict[str, Tensor]:
        """Returns the frozen parameters and the buffers, this worker's part, as they are now.

        Raises:
            StateError: the script has given one another shape or dtype, or none.
        """
        found = {}
        for name, value in self._named_untrained():
            kind = self._kinds[name]
            if value is None or (value.shape, value.dtype) != kind:
                now = "gone" if value is None else f"{tuple(value.shape)} {value.dtype}"
                raise StateError(
                    f"{self.spec.name}: {name} was {tuple(kind[0])} {kind[1]} when the layer was made, and is {now}; "
                    "shapes and dtypes of a layer must stay as they are"
                )
            found[name] = value.detach()
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Returns all of this worker's part: what is trained, what is frozen, and the buffers."""
        return {name: value.data for name, value in self.parameters.items()} | self.untrained()

    def place(self, device: torch.device) -> None:
        """Has this worker's part on a device, as the same parameters and buffers."""
        for value in (*self.parameters.values(), *(value for _, value in self._named_untrained())):
            if value.device.type != device.type:
                value.data = value.data.to(device)

    def own_memory(self) -> None:
        """Gives each element a place of its own, so that values can come there; a buffer may be an expanded one."""
        for _, value in self._named_untrained():
            if not value.is_contiguous():
                value.data = value.data.contiguous()

    def check(self) -> None:
        """Checks that what is trained has been neither replaced nor frozen, and that the rest has kept its shapes.

        Raises:
            StateError: the script has done otherwise.
        """
        self.untrained()
        for name, parameter in self.parameters.items():
            module, key = self._slots[name]
            if module._parameters.get(key) is not parameter:
                raise StateError(
                    f"{self.spec.name}: {name} was replaced after the layer had been made; copy the values into it "
                    "(load_state_dict without assign=True), or replace it in the function that makes the layer"
                )
            if not parameter.requires_grad:
                raise StateError(
                    f"{self.spec.name}: {name} was frozen after the layer had been made; set requires_grad=False in "
                    "the function that makes the layer"
                )

    def _slot(self, name: str) -> tuple[nn.Module, str]:
        owner, _, key = name.rpartition(".")
        return self.module.get_submodule(owner), key

    def _named_untrained(self) -> Iterator[tuple[str, Any]]:
        for name in self.spec.untrained:
            module, key = self._slots[name]
            # By name at each time: assigning a tensor to a buffer makes that one the buffer.
            yield name, module._buffers.get(key, module._parameters.get(key))

    def run(self, x: Tensor, draw: Draw) -> Tensor:
        """Returns the output for `x` (rows, …)."""
        here, trace = self.tp_rank, self.spec.trace
        before = [(value, value._version) for _, value in self._named_untrained()]
        if here.size == 1 and not trace.ops and not trace.fused:
            y: Tensor = self.module(x)
        else:
            # Parts of a micro-batch need the plain formula of attention, so whole ones have to draw the same numbers.
            with (
                tensor_parallel.placed(here),
                math_attention(trace, x.device),
                draw.layer(self.spec, here.rank, here.size, x.device),
            ):
                y = self.module(x)
        for (was, version), (name, value) in zip(before, self._named_untrained(), strict=True):
            alike = value is not None and (value.dtype, value.device) == (was.dtype, was.device)
            if value is not was and alike and torch.equal(was, value):
                continue
            if value is not was or value._version != version:
                raise StateError(
                    f"{self.spec.name} changes {name} in forward; what it came to would depend on how the batch is "
                    "divided, so a layer must not keep such a state"
                )
        shape, dtype = self.spec.output
        if y.shape != (x.shape[0], *shape) or y.dtype != dtype:
            raise StateError(
                f"{self.spec.name} returned {tuple(y.shape)} {y.dtype}, and {(x.shape[0], *shape)} {dtype} when it was "
                "tried on the meta device"
            )
        return y

    def expect(self, done: Callable[[list[Tensor]], None]) -> None:
        """Has `done` called with the gradients of `parameters`, in their order, as soon as a backward has them all."""
        self._grads, self._done = {}, done

    def settle(self) -> None:
        """Gives what has got no gradient a zero one, now that the backward is over."""
        if self._done is not None:
            for place, parameter in enumerate(self.parameters.values()):
                if place not in self._grads:
                    self._grads[place] = torch.zeros_like(parameter)
            self._finish()

    def _take(self, place: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._grads[place], parameter.grad = parameter.grad, None
        if len(self._grads) == len(self.parameters):
            self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        grads, self._grads = self._grads, {}
        if done is not None:
            done([grads[place] for place in range(len(self.parameters))])


@dataclass(frozen=True)
class Draw:
    """Whose random numbers a layer uses: those of some rows of a step."""

    seed: int
    step: int
    rows_by_unit: tuple[RowsOfUnit, ...]
    micro_batch_size: int

    def layer(self, spec: LayerSpec, tp_rank: int, tp_size: int, device: torch.device) -> Any:
        """Returns a context in which the layer runs."""
        return layer_randomness(
            spec.trace,
            seed=self.seed,
            step=self.step,
            layer=spec.index,
            rows_by_unit=self.rows_by_unit,
            micro_batch_size=self.micro_batch_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            device=device,
        )


def build(
    spec: LayerSpec,
    factory: Factory,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    tp_rank: tensor_parallel.TPRank,
    recompute: bool = False,
    values: bool = True,
) -> Layer:
    """Makes a layer, or this worker's part of it; its initial values depend on (seed, layer) only.

    Without `values` no random numbers are drawn for parameters, since others will take their place; unless the layer
    draws some for anything else as well, which would become others then.

    Raises:
        StateError: it cannot be cut as it says.
    """
    make, start = partial(_made, spec.index, factory, dtype), mix(seed, spec.index)
    with GENERATORS, torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        module = make() if values else _made_without_values(make, start)
    cuts = tensor_parallel.cuts_of(module, spec.name)
    tensor_parallel.cut(module, cuts, tp_rank.rank, tp_rank.size, spec.name)
    module.to(device).train()
    parameters = dict(module.named_parameters())
    layer = Layer(module, spec, tp_rank, recompute, {name: parameters[name] for name in spec.shapes})
    layer.own_memory()
    return layer


def digest_of(layer: Layer) -> str:
    """Returns a checksum of all values of this worker's part of a layer."""
    import xxhash  # no job loads it that has nothing to compare

    found = xxhash.xxh3_64()
    for tensor in layer.tensors().values():
        found.update(memory(tensor.cpu().contiguous()))
    return found.hexdigest()


def _made_without_values(make: Callable[[], nn.Module], start: int) -> nn.Module:
    """Makes a layer without random numbers for its parameters, or with them where it draws others as well.

    Args:
        make: makes it.
        start: with which the generators have been seeded.
    """
    before = torch.random.get_rng_state()
    with _NoValues():
        module = make()
    if torch.equal(before, torch.random.get_rng_state()):
        return module
    torch.manual_seed(start)
    return make()


class _NoValues(TorchFunctionMode):
    """Random numbers are not drawn for parameters.

    What a parameter of unknown values would be checked for is true of its mean: `trunc_normal_` draws again what lies
    too far from it.
    """

    _DRAWING = frozenset(
        getattr(Tensor, name) for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")
    )
    _INITIAL = frozenset({nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_})
    """Those of `torch.nn.init` that come here whole; the others come as the functions of tensors that they call."""

    def __init__(self) -> None:
        super().__init__()
        self._same: list[Tensor] = []  # the memory of parameters, as the script got it; it stays so while it is listed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if not isinstance(target, Tensor) or kwargs.get("generator") is not None or not self._is_parameters(target):
            return func(*args, **kwargs)
        if func in self._INITIAL:
            return target
        if func in self._DRAWING:
            mean = kwargs.get("mean", args[1] if len(args) > 1 else 0.0) if func is Tensor.normal_ else 0.0
            with torch.no_grad():
                return target.fill_(mean)
        found = func(*args, **kwargs)
        if func in (Tensor.data.__get__, Tensor.detach):  # type: ignore[attr-defined]
            self._same.append(found)
        return found

    def _is_parameters(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or any(tensor is one for one in self._same)
