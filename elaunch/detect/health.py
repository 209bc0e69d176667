"""What a device's readings mean, pure: findings with the figures that they rest on.

A device is looked at again and again. Each look gives *conditions*, what is wrong with it just then. `Tracker` makes
*findings* of them: a condition that comes and goes, like a device that is throttled, counts once it has lasted; each
counts once, and again when it gets worse or is over.

What the numbers of NVIDIA's XIDs mean is its catalogue's, by the immediate action that this names
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html): RESTART_APP is the application's fault or
contained in it, RESET_GPU and what is graver means that the device cannot be trusted on. Rows of memory that wait to
be remapped do not: "unaffected applications can continue running without affecting accuracy and performance"
(https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elaunch.detect.devices import MemoryErrors, Reading, Xid


class HealthVerdict(enum.IntEnum):
    """How well something is, the worst last."""

    HEALTHY = 0
    WATCH = 1  # not as it should be, and usable
    DRAIN = 2  # about to fail, or wrong by now: nothing should compute there any more
    LOST = 3  # gone


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the user should know of.

    Attributes:
        subject: what it is about: "GPU 3", "worker a/0#1", a folder, "node a".
        what: of which kind, for programs: "xid 79", "ecc uncorrectable", "memory", …
        text: a clause for the user, with the figures.
        evidence: the figures, by name with unit; JSON values.
        local_rank: of the device or worker; None for the node.
    """

    verdict: HealthVerdict
    subject: str
    what: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    local_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """What is wrong at one look: a finding, once it was so for `lasting_s` and at so many looks."""

    finding: Finding
    lasting_s: float = 0.0
    looks: int = 3


@dataclass(slots=True)
class _HeldState:
    condition: Condition
    since_s: float
    seen_s: float
    looks: int = 0
    told: HealthVerdict = HealthVerdict.HEALTHY

    def take(self, now_s: float, condition: Condition) -> list[Finding]:
        self.condition, self.seen_s = condition, now_s
        self.looks += 1
        lasted = now_s - self.since_s >= condition.lasting_s and self.looks >= condition.looks
        if condition.finding.verdict <= self.told or (condition.lasting_s and not lasted):
            return []
        self.told = condition.finding.verdict
        return [condition.finding]


class Tracker:
    """Makes findings of conditions. The time is an argument, in seconds of a clock that does not go back."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str], _HeldState] = {}
        self._events: dict[tuple[str, str], tuple[float, HealthVerdict]] = {}

    def take(self, now_s: float, conditions: Iterable[Condition], *, all_known: bool = True) -> list[Finding]:
        """Takes the conditions of one look.

        Args:
            now_s: when it was.
            conditions: what is wrong.
            all_known: whatever is not among them is no longer so.

        Returns:
            What is news: conditions that have lasted, or got worse, and the end of those that were told of.
        """
        news: list[Finding] = []
        for condition in conditions:
            key = condition.finding.subject, condition.finding.what
            news.extend(self._standing.setdefault(key, _HeldState(condition, now_s, now_s)).take(now_s, condition))
        for key, standing in list(self._standing.items()) if all_known else ():
            away_s, was = now_s - standing.seen_s, standing.condition.finding
            if away_s <= 0 or away_s < standing.condition.lasting_s:
                continue
            del self._standing[key]
            if standing.told:
                news.append(
                    Finding(HealthVerdict.HEALTHY, was.subject, was.what, f"no longer: {was.text}", {}, was.local_rank)
                )
        return news

    def event(self, now_s: float, finding: Finding, again_s: float) -> list[Finding]:
        """Returns the news of an event: none if the same one, and no milder, was told in the `again_s` before."""
        key = finding.subject, finding.what
        told_s, told = self._events.get(key, (now_s, HealthVerdict.HEALTHY))
        if finding.verdict <= told and now_s - told_s <= again_s:
            return []
        self._events[key] = now_s, finding.verdict
        return [finding]


# -- XIDs -------------------------------------------------------------------------------------------------------------

_APPLICATION = {
    8: "GPU stopped processing",
    11: "invalid push buffer",
    13: "graphics engine exception",
    31: "memory page fault",
    32: "invalid push buffer",
    39: "copy engine exception",
    40: "copy engine exception",
    41: "copy engine exception",
    43: "GPU stopped processing",
    45: "channel removed, after another error or the end of its process",
    60: "video processor exception",
    68: "video decoder exception",
    69: "graphics engine class error",
    70: "copy engine exception",
    71: "copy engine exception",
    72: "copy engine exception",
    75: "copy engine exception",
    76: "copy engine exception",
    77: "copy engine exception",
    80: "corrupted push buffer",
    85: "copy engine exception",
    94: "ECC error, contained in the application that it hit",
}
_WATCH = {
    54: "auxiliary power is not connected: reduced clocks",
    63: "row remapping, or page retirement, recorded",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    74: "NVLink error",
    92: "many correctable ECC errors",
    121: "corrected error of the link between chips",
    137: "NVLink fault of a peer",
    154: "the driver's recovery action has changed",
    157: "resource retirement failed",
    160: "channel retired",
    161: "channel retirement failed",
}
_DRAIN = {
    46: "GPU stopped processing, reset needed",
    48: "uncorrectable ECC error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    64: "row remapping, or page retirement, failed",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "GPU system processor does not answer",
    120: "GPU system processor error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation error",
    151: "key rotation error",
    155: "NVLink error defined by software",
    156: "resource retired, reset needed",
    158: "GPU fatal timeout",
}
_LOST = {79: "GPU has fallen off the bus"}
_NVLINK5 = range(144, 151)  # grave or not by bits that NVML does not tell; the driver's recovery action says it

REPEATS = {74: 3}
"""XIDs that mean a drain once they have come so often in `REPEATS_S`; single ones are corrected or belong to a peer."""
REPEATS_S = 3600.0
AGAIN_S = 60.0  # the same XID within this time is not told again


def xid_meaning(number: int) -> tuple[HealthVerdict, str]:
    """Returns what NVIDIA's catalogue says of an XID. HEALTHY: the application's fault, or one that ended with it."""
    for verdict, table in (
        (HealthVerdict.HEALTHY, _APPLICATION),
        (HealthVerdict.WATCH, _WATCH),
        (HealthVerdict.DRAIN, _DRAIN),
        (HealthVerdict.LOST, _LOST),
    ):
        if number in table:
            return verdict, table[number]
    if number in _NVLINK5:
        return HealthVerdict.WATCH, "NVLink error"
    if number in (*range(82, 90), *range(96, 106), *range(126, 136), 139):
        return HealthVerdict.HEALTHY, "engine exception"
    return HealthVerdict.WATCH, "not in the catalogue that this version knows"


# -- one device -------------------------------------------------------------------------------------------------------

SLOWDOWN_S = 30.0
HOT_S = 5.0
HOT_MARGIN_C = 2
FAILING_S = 15.0
STATE_S = 10.0
CORRECTABLE_PER_S = 1.0
CORRECTABLE_S = 60.0  # over which correctable errors are counted
_STATES = {"warning": HealthVerdict.WATCH, "alarm": HealthVerdict.DRAIN, "critical": HealthVerdict.DRAIN}
_RECOVERIES = {
    "reset": HealthVerdict.DRAIN,
    "reboot": HealthVerdict.DRAIN,
    "drain p2p": HealthVerdict.DRAIN,
    "drain and reset": HealthVerdict.WATCH,  # rows to be remapped: at the next occasion
}


class DeviceHealth:
    """Judges one device by what it says over time.

    Args:
        local_rank: whose device it is.
        name: what it is called.
    """

    def __init__(self, local_rank: int, name: str) -> None:
        self._local_rank = local_rank
        self._name = name
        self._tracker = Tracker()
        self._first: Reading | None = None
        self._correctable: list[tuple[float, int]] = []
        self._xids: list[tuple[float, int]] = []

    def on_xid(self, now_s: float, xid: Xid) -> list[Finding]:
        """Returns what is news when the driver reports an error; an application's own counts, so that it is blamed."""
        self._xids = [one for one in self._xids if now_s - one[0] <= REPEATS_S]
        self._xids.append((now_s, xid.number))
        verdict, meaning = xid_meaning(xid.number)
        count = sum(number == xid.number for _, number in self._xids)
        fault = ", the fault of the application or confined to it" if verdict is HealthVerdict.HEALTHY else ""
        often = f", {count} times in {REPEATS_S / 60:.0f} min" if count > 1 else ""
        if verdict is HealthVerdict.WATCH and count >= REPEATS.get(xid.number, count + 1):
            verdict = HealthVerdict.DRAIN
        finding = self._finding(
            max(verdict, HealthVerdict.WATCH),
            f"xid {xid.number}",
            f"XID {xid.number} ({meaning}{fault}){often}",
            xid=xid.number,
            count=count,
            application=not verdict,
        )
        return self._tracker.event(now_s, finding, AGAIN_S)

    def on_reading(self, now_s: float, reading: Reading) -> list[Finding]:
        """Returns what is news after another look."""
        if self._first is None:
            self._first = reading
        return self._tracker.take(
            now_s, self._conditions(now_s, reading), all_known=not (reading.lost or reading.fails)
        )

    def _conditions(self, now_s: float, reading: Reading) -> list[Condition]:
        if reading.lost:
            text = f"it cannot be reached any more: {reading.lost}"
            return [Condition(self._finding(HealthVerdict.LOST, "lost", text))]
        found = [*self._memory(now_s, reading.memory_errors), *self._heat(reading)]
        if reading.fails:
            text = f"it does not answer: {reading.fails}"
            found.append(Condition(self._finding(HealthVerdict.WATCH, "fails", text), FAILING_S))
        if reading.state:
            text = f"it reports the state {reading.state!r}"
            verdict = _STATES.get(reading.state, HealthVerdict.WATCH)
            found.append(Condition(self._finding(verdict, "state", text, state=reading.state), STATE_S))
        if reading.recovery:
            text = f"the driver asks for: {reading.recovery}"
            verdict = _RECOVERIES.get(reading.recovery, HealthVerdict.DRAIN)
            found.append(Condition(self._finding(verdict, "recovery", text, recovery=reading.recovery)))
        return found

    def _memory(self, now_s: float, errors: MemoryErrors) -> list[Condition]:
        assert self._first is not None
        found = []
        if errors.uncorrectable:
            before = self._first.memory_errors.uncorrectable or 0
            new = errors.uncorrectable - before
            if new > 0:
                text = f"{new} uncorrectable ECC errors since the job began, {errors.uncorrectable} in all"
                verdict = HealthVerdict.DRAIN
            else:
                text = f"{before} uncorrectable ECC errors before the job began"
                verdict = HealthVerdict.WATCH
            found.append(
                Condition(
                    self._finding(verdict, "ecc uncorrectable", text, new=max(new, 0), total=errors.uncorrectable)
                )
            )
        if errors.correctable is not None:
            found.extend(self._correctable_rate(now_s, errors.correctable))
        if errors.remap_failed:
            text = "a faulty row of its memory could not be replaced"
            found.append(Condition(self._finding(HealthVerdict.DRAIN, "remap failed", text)))
        if errors.remap_pending:
            text = "faulty rows of its memory are replaced at its next reset"
            found.append(Condition(self._finding(HealthVerdict.WATCH, "remap pending", text)))
        return found

    def _correctable_rate(self, now_s: float, count: int) -> list[Condition]:
        if self._correctable and count < self._correctable[-1][1]:
            self._correctable.clear()  # the driver was loaded anew
        self._correctable.append((now_s, count))
        while len(self._correctable) > 2 and now_s - self._correctable[1][0] >= CORRECTABLE_S:
            del self._correctable[0]
        since_s, before = self._correctable[0]
        if now_s - since_s < CORRECTABLE_S / 2 or count - before < CORRECTABLE_PER_S * (now_s - since_s):
            return []
        rate = (count - before) / (now_s - since_s)
        text = f"{count - before} correctable ECC errors in {now_s - since_s:.0f} s, {count} in all"
        finding = self._finding(HealthVerdict.WATCH, "ecc correctable", text, per_s=round(rate, 3), total=count)
        return [Condition(finding, CORRECTABLE_S)]

    def _heat(self, reading: Reading) -> list[Condition]:
        found = []
        clock = ""
        if reading.clock_mhz is not None and reading.max_clock_mhz:
            clock = f" to {reading.clock_mhz} of {reading.max_clock_mhz} MHz"
        for reason in sorted(reading.slowdowns):
            why = "heat" if reason == "thermal" else f"the {reason}"
            at = "" if reading.temperature_c is None else f" at {reading.temperature_c} °C"
            finding = self._finding(
                HealthVerdict.WATCH,
                f"slowdown {reason}",
                f"{why} holds its clock down{clock}{at} for {SLOWDOWN_S:.0f} s and more",
                clock_mhz=reading.clock_mhz,
                max_clock_mhz=reading.max_clock_mhz,
                temperature_c=reading.temperature_c,
                power_w=reading.power_w,
            )
            found.append(Condition(finding, SLOWDOWN_S))
        now_c, off_c = reading.temperature_c, reading.shutdown_c
        if now_c is not None and off_c and now_c >= off_c - HOT_MARGIN_C:
            text = f"{now_c} °C; it turns itself off at {off_c} °C"
            finding = self._finding(HealthVerdict.DRAIN, "heat", text, temperature_c=now_c, shutdown_c=off_c)
            found.append(Condition(finding, HOT_S))
        return found

    def _finding(self, verdict: HealthVerdict, what: str, text: str, **evidence: Any) -> Finding:
        return Finding(verdict, self._name, what, text, evidence, self._local_rank)
