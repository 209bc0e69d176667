"""The default group in the tables of `torch.distributed`, and the functions that it answers in torch's place.

`init_process_group` fills these tables and offers no way to bring one's own group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from elaunch.workers.comm.process_group import ElasticProcessGroup

NAME = "elaunch"

_HOSTS = ("gloo", "mpi", "ucc")
"""Backends for host memory; those of other names are some device's."""


def enter_default(group: ElasticProcessGroup) -> None:
    """Makes a group the default one; `dist.destroy_process_group()` undoes it.

    Raises:
        RuntimeError: there is a default group already.
    """
    world = distributed_c10d._world
    if world.default_pg is not None:
        raise RuntimeError("torch.distributed is initialized already; this group takes the place of its default group")
    if NAME not in dist.Backend.backend_list:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = ["cpu", *([accelerator.type] if accelerator is not None else [])]
        dist.Backend.register_backend(NAME, _refuse, devices=devices)
    enter(group, NAME, "default")
    distributed_c10d._update_default_pg(group)
    for name, answer in _ANSWERS.items():
        _take_over(group, name, answer)


def enter(group: ElasticProcessGroup, name: str, *tags: str) -> None:
    """Enters a group in the tables; the first tag is its own."""
    world = distributed_c10d._world
    world.pg_map[group] = (NAME, group.get_group_store())
    world.pg_names[group] = distributed_c10d.GroupName(name)
    world.pg_group_ranks[group] = group.ranks
    world.pg_backend_config[group] = f"cpu:{NAME},cuda:{NAME}"
    world.pg_to_tag[group] = tags[0]
    for tag in tags:
        world.tags_to_pg.setdefault(tag, []).append(group)
    distributed_c10d._register_process_group(distributed_c10d.GroupName(name), group)


def leave_default() -> None:
    """Gives torch its functions back."""
    for name in list(_TORCHS):
        original = _TORCHS.pop(name)
        for module in (dist, distributed_c10d):
            setattr(module, name, original)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"init_process_group(backend={NAME!r}) cannot connect workers: elaunch.init() or elaunch.attach() does that, "
        "and their process_group is the default group then"
    )


def _take_over(group: ElasticProcessGroup, name: str, answer: Callable[..., Any]) -> None:
    original = getattr(distributed_c10d, name)
    _TORCHS[name] = original

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Somebody may keep this function for longer than the group is the default one.
        if distributed_c10d._world.default_pg is not group:
            return original(*args, **kwargs)
        return answer(group, original, *args, **kwargs)

    for module in (dist, distributed_c10d):
        setattr(module, name, call)


def _init_process_group(
    group: ElasticProcessGroup,
    original: Callable[..., Any],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A framework connects the workers once more: the default group is there, if it is what is wanted."""
    for what, wanted, have in (("world_size", world_size, group.size()), ("rank", rank, group.rank())):
        if wanted not in (-1, have):
            raise ValueError(
                f"init_process_group({what}={wanted}) was called in a job of elaunch, where it is {have}: leave the "
                "argument out, or the call, since the workers are connected already"
            )
    types = {device.type for device in group._device_types}
    for part in (backend or "").lower().split(","):
        device, _, name = part.rpartition(":")
        device = device or ("cpu" if name in ("", "undefined", NAME, *_HOSTS) else "")
        fits = device in types if device else dist.get_default_backend_for_device(_accelerator(types)) == name
        if not fits:
            raise ValueError(
                f"init_process_group(backend={backend!r}) was called in a job of elaunch whose workers compute on "
                f"{_accelerator(types)}: leave the argument out, or the call, since the workers are connected already"
            )


def _accelerator(types: set[str]) -> str:
    return next(iter(types - {"cpu"}), "cpu")


def _monitored_barrier(
    default: ElasticProcessGroup,
    original: Callable[..., Any],
    group: Any = None,
    timeout: Any = None,
    wait_all_ranks: bool = False,
) -> Any:
    """Torch's own asks for the name of the backend first."""
    found = default if group is None else group
    if hasattr(found, "monitored_barrier") and found in distributed_c10d._world.pg_map:
        return found.monitored_barrier(timeout, wait_all_ranks)
    return original(group, timeout, wait_all_ranks)


def _batch_isend_irecv(
    default: ElasticProcessGroup, original: Callable[..., Any], p2p_op_list: list[dist.P2POp]
) -> list[dist.Work]:
    """Torch's own, up to 2.13, has the messages of a Python group begin one after the other.

    In a group of NCCL each keeps those after it waiting until its peer comes to it: two that both send first would wait
    for each other for ever.
    """
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    first = p2p_op_list[0]
    group: Any = default if first.group is None else first.group
    if not isinstance(group, type(default)):
        return original(p2p_op_list)  # type: ignore[no-any-return]

    def begin(one: Any) -> Any:
        peer = "group_dst" if one.op is distributed_c10d.isend else "group_src"
        return one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})

    works = group.begin_together(first.tensor.device, [functools.partial(begin, one) for one in p2p_op_list])
    return original(p2p_op_list) if works is None else works


@contextlib.contextmanager
def _coalescing_manager(
    default: ElasticProcessGroup,
    original: Callable[..., Any],
    group: Any = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[Any]:
    """Torch's own stays in the middle of it after an error, which a step that is done again is to know nothing of."""
    found = default if group is None else group
    try:
        with original(found, device, async_ops) as manager:
            yield manager
    except BaseException:
        if isinstance(found, type(default)):
            distributed_c10d._world.pg_coalesce_state.pop(found, None)
            found.give_up_coalescing()
        raise


def _split_group(
    default: ElasticProcessGroup,
    original: Callable[..., Any],
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Torch's own, up to 2.13, wants a device that is no CPU."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent = default if parent_pg is None else parent_pg
    places = [place for ranks in split_ranks for place in ranks]
    if len(set(places)) != len(places):
        raise ValueError(f"split_ranks={split_ranks} has a rank in it twice")
    found: Any = dist.GroupMember.NON_GROUP_MEMBER if hasattr(distributed_c10d, "_NonGroupMember") else None
    for ranks in split_ranks:
        to_default = [dist.get_global_rank(parent, place) for place in sorted(ranks)]
        made = dist.new_group(to_default, group_desc=kwargs.get("group_desc"))
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            found = made
    return found


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_coalescing_manager": _coalescing_manager,
    "batch_isend_irecv": _batch_isend_irecv,
    "init_process_group": _init_process_group,
    "monitored_barrier": _monitored_barrier,
    "split_group": _split_group,
}

_TORCHS: dict[str, Callable[..., Any]] = {}
"""Torch's own functions, as long as a default group answers them."""
