"""Send the state of the job from the members that hold it to those that need it, memory to memory.

Every source sends an even part of the bytes, straight from its tensors; what is not a tensor comes from the first
source. Where more receive than send, each gets a chunk of that part and passes it on to the others: a source's link
carries its part once, however many join. Each part carries a checksum. This is the transfer for state that all members
hold whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Verdict
from elaunch.workers.state.codec import describe, restore
from elaunch.workers.state.transfer import allocate, checksum, cut, scatter, stage, total_bytes, windows


def move_state(group: Group, verdict: Verdict, objects: Mapping[str, Any], step: int) -> tuple[int, int]:
    """Take part in a transfer as what the verdict says this member is.

    Returns:
        The bytes of tensors that this member received, and the step at which the state stands.

    Raises:
        StateError: the state does not fit this worker's objects, or arrived damaged.
        StepInterrupted: a peer was lost, or the generation changed; registered objects of a receiver may be spoilt.
    """
    if group.rank in verdict.sources:
        _send(group, verdict, objects, step)
        return 0, step
    return _receive(group, verdict, objects)


def _send(group: Group, verdict: Verdict, objects: Mapping[str, Any], step: int) -> None:
    manifest, tensors = describe(objects)
    total = total_bytes(tensors)
    parts = {int(source): (start, stop) for source, start, stop in cut(total, [str(s) for s in verdict.sources])}
    start, stop = parts.get(group.rank, (0, 0))
    staged = stage(tensors, start, stop)
    views = windows(staged, start, stop)
    head = json.dumps({"step": step, "total": total, "checksum": checksum(views)}).encode()
    if group.rank == verdict.sources[0]:
        head += b"\n" + json.dumps(manifest).encode()
    chunks = scatter(start, stop, len(verdict.sources), verdict.receivers)
    outgoing = (
        {to: windows(staged, *ends) for to, *ends in chunks} if chunks else dict.fromkeys(verdict.receivers, views)
    )
    group.exchange([(to, view) for to in verdict.receivers for view in (memoryview(head), *outgoing.get(to, ()))], [])


def _receive(group: Group, verdict: Verdict, objects: Mapping[str, Any]) -> tuple[int, int]:
    texts = [bytearray() for _ in verdict.sources]
    group.exchange([], [(source, text) for source, text in zip(verdict.sources, texts, strict=True)])
    first, _, body = bytes(texts[0]).partition(b"\n")
    heads = [json.loads(first), *(json.loads(text) for text in texts[1:])]
    if len({(head["step"], head["total"]) for head in heads}) > 1:
        raise StateError(f"the members that hold the state differ in it: {heads}; this is a bug in elaunch")
    manifest = json.loads(body)
    step, total = heads[0]["step"], heads[0]["total"]
    tensors = allocate(manifest, into=objects)
    parts = {int(source): (start, stop) for source, start, stop in cut(total, [str(s) for s in verdict.sources])}
    incoming = {source: windows(tensors, *parts.get(source, (0, 0))) for source in verdict.sources}
    straight: list[tuple[int, memoryview]] = []
    own: list[memoryview] = []
    passed_on: list[tuple[int, memoryview]] = []
    for source, views in incoming.items():
        chunks = scatter(*parts.get(source, (0, 0)), len(verdict.sources), verdict.receivers)
        straight += [(source, view) for view in views if not chunks]
        for receiver, *ends in chunks:
            if receiver == group.rank:
                own += windows(tensors, *ends)
                straight += [(source, view) for view in windows(tensors, *ends)]
            else:
                passed_on += [(receiver, view) for view in windows(tensors, *ends)]
    group.exchange([], straight)
    # Chunks travel between two receivers in the order of the sources they come from.
    group.exchange([(to, view) for to in verdict.receivers if to != group.rank for view in own], passed_on)
    for source, head in zip(verdict.sources, heads, strict=True):
        if checksum(incoming[source]) != head["checksum"]:
            raise StateError(f"the part of the state that {group.members[source]} has arrived damaged")
    restore(objects, manifest, tensors)
    return total, step
