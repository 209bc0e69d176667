"""State over a native group while its members do a step.

The group is opened for the move and serves nothing else: what is issued in a group comes in one order on all members,
so the step's own operations would wait for the move in one of theirs. NCCL asks for more: that operations of two
communicators of a device do not run at the same time unless they come in one order everywhere. So the step itself goes
over links, and no other group is opened before it commits (`NativeGroups.open_in_step`).

A thread beside the training one waits for the group, finds out over links whether it stands on all members, and issues
the exchanges. These come in one order on all members and wait for nothing but each other, so nobody waits in a circle,
whatever the training threads wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.opening import Begun
from elaunch.workers.comm.paths import Parcels
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.state.paths.native import NativePath

MESSAGE_BYTES = 4 << 20
"""Two exchanges of such messages are under way; what the step's own copies wait for is not more."""

REASON_BYTES = 200

POLL_S = 0.0005
"""The training thread needs the interpreter meanwhile."""


class NativeStepPath:
    """A native group that is being opened for one move in a step.

    Args:
        native: the native groups of this member.
        begun: the opening of this one; None: it cannot be opened here.
        group: of all members.
        device: where the native group takes tensors from.
        refused: called where the group does not stand on all, with the reason if this member is to say it, "" else.
    """

    message_bytes = MESSAGE_BYTES

    def __init__(
        self,
        native: NativeGroups,
        begun: Begun | None,
        group: Group,
        device: torch.device,
        refused: Callable[[str], None],
    ) -> None:
        self._native, self._begun, self._group = native, begun, group
        self._device, self._refused = device, refused
        self._bulk: Bulk | None = None
        self._stream: torch.Stream | None = None

    def start(self, run: Callable[[], None]) -> threading.Thread:
        """Starts the thread; on a device what it does is on a stream of its own, of the lowest priority there is."""
        if self._device.type == "cpu":
            return self._native.start("elaunch-state-move", lambda: _in_background(run))
        index = torch.accelerator.current_device_index()
        stream = self._stream = torch.Stream(self._device)
        stream.wait_stream(torch.accelerator.current_stream())

        def on_stream() -> None:
            torch.accelerator.set_device_index(index)
            with stream:
                _in_background(run)

        return self._native.start("elaunch-state-move", on_stream)

    def stands(self, traffic: Traffic, part: int) -> bool:
        """Waits for the group, and for what the others say of theirs."""
        wrong = f"there are no native groups in generation {self._group.generation}"
        if self._begun is not None:
            self._bulk, wrong = self._native.await_begun(self._begun, traffic.check)
        wrong = first_reason(self._group, traffic, part, wrong)
        if wrong:
            self._refused(wrong if self._group.rank == 0 else "")
        return not wrong

    def move(self, traffic: Traffic, outgoing: Parcels, incoming: Parcels, came: Callable[[int], None]) -> None:
        """Moves messages, the k-th of all pairs of members in one exchange, two exchanges at a time."""
        assert self._bulk is not None, "it stands"
        path = _PathInStep(self._bulk, self._group, self._device, self._native.failed, traffic.check, came)
        path.move(outgoing, incoming, checksum=False, hold=lambda n_bytes: None)
        path.finish()

    def leave(self) -> None:
        """Has the present stream wait for that of the move, on a device."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)


class _PathInStep(NativePath):
    """A native path that tells of each message that has come, and waits beside the traffic of a step."""

    message_bytes = MESSAGE_BYTES
    poll_s = POLL_S

    def __init__(
        self,
        bulk: Bulk,
        group: Group,
        device: torch.device,
        failed: Callable[[int], None],
        check: Callable[[], None],
        came: Callable[[int], None],
    ) -> None:
        super().__init__(bulk, group, device, bounded=False, failed=failed)
        self._check, self._came = check, came

    def _end_first(self, found: object, hold: Callable[[int], None]) -> None:
        ranks = [rank for rank, _, _ in self._under_way[0].came]
        super()._end_first(None, hold)
        self.finish()  # what has come counts once the device is done, and the group has not failed by then
        for rank in ranks:
            self._came(rank)

    def _look(self) -> None:
        self._check()  # the thread that drives the traffic looks at the links


def first_reason(group: Group, traffic: Traffic, part: int, reason: str) -> str:
    """Returns the first of the reasons of all members of a group, each of which calls this; for any thread.

    Args:
        group: of the members.
        traffic: an open operation of the group; it has the links of the group's tree.
        part: under which they tell each other.
        reason: of this member; "": it has none.

    Returns:
        One of them, cut to `REASON_BYTES`, the same on all; "" if nobody has any.

    Raises:
        StepInterrupted: the traffic has ended.
    """
    above, below = group.branches
    told = {member: bytearray(REASON_BYTES) for member in below}
    for member, one in told.items():
        traffic.post(member, part, memoryview(one))
    for member in below:
        traffic.wait(member, part)
    local = " ".join(reason.split()).encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
    first = bytearray(min((one for one in (local, *map(bytes, told.values())) if one[0]), default=local))
    if above is not None:
        whole = bytearray(REASON_BYTES)
        traffic.post(above, part, memoryview(whole))
        traffic.send(above, part, memoryview(first))
        traffic.wait(above, part)
        first = whole
    for member in below:
        traffic.send(member, part, memoryview(first))
    return first.rstrip(b"\0").decode(errors="replace")


def _in_background(run: Callable[[], None]) -> None:
    heartbeat.in_background()
    run()
