"""What readings of a device mean: findings with their figures, at once or when they last, each told once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.detect.devices import MemoryErrors, Reading, Xid
from elaunch.detect.health import (
    AGAIN_S,
    CORRECTABLE_S,
    HOT_S,
    SLOWDOWN_S,
    Condition,
    DeviceHealth,
    Finding,
    HealthVerdict,
    Tracker,
    xid_meaning,
)

WELL = Reading(
    memory_errors=MemoryErrors(uncorrectable=0, correctable=0, remap_pending=False, remap_failed=False),
    temperature_c=60,
    shutdown_c=95,
    power_w=690.0,
    clock_mhz=1755,
    max_clock_mhz=1980,
)
THERMAL = replace(WELL, slowdowns=frozenset({"thermal"}), clock_mhz=600, temperature_c=88)


def with_errors(**errors: Any) -> Reading:
    """Returns what a device says that is well but for these errors in its memory."""
    return replace(WELL, memory_errors=replace(WELL.memory_errors, **errors))


class Device:
    """One device, looked at every five seconds."""

    def __init__(self) -> None:
        self.health = DeviceHealth(1, "GPU 3")
        self.now_s = 100.0

    def reads(self, reading: Reading, times: int = 1) -> list[Finding]:
        found = []
        for _ in range(times):
            self.now_s += 5
            found += self.health.on_reading(self.now_s, reading)
        return found

    def xid(self, number: int, after_s: float = 0.0) -> list[Finding]:
        self.now_s += after_s
        return self.health.on_xid(self.now_s, Xid(1, number))


def told(findings: list[Finding]) -> list[tuple[HealthVerdict, str]]:
    return [(found.verdict, found.what) for found in findings]


# -- conditions -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=60),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_a_condition_is_told_once_it_has_lasted_and_when_it_is_over(
    looks: list[tuple[int, bool]], lasting_s: int, least: int
) -> None:
    """The twin counts: since when without a pause as long, and at how many looks, the condition was there."""
    tracker = Tracker()
    condition = Condition(Finding(HealthVerdict.WATCH, "GPU 3", "heat", "hot"), lasting_s, least)
    now_s = since_s = seen_s = 0
    count, standing = 0, False
    for after_s, there in looks:
        now_s += after_s
        found = told(tracker.take(now_s, [condition] if there else []))
        if there:
            since_s = since_s if count else now_s
            count, seen_s = count + 1, now_s
            begins = not standing and (not lasting_s or (now_s - since_s >= lasting_s and count >= least))
            assert found == ([(HealthVerdict.WATCH, "heat")] if begins else [])
            standing |= begins
        elif count and now_s - seen_s >= lasting_s:
            assert found == ([(HealthVerdict.HEALTHY, "heat")] if standing else [])
            count, standing = 0, False
        else:
            assert found == []


def test_what_gets_worse_is_told_again_and_what_gets_milder_is_not() -> None:
    tracker = Tracker()
    watch, drain = (
        Condition(Finding(verdict, "GPU 3", "ecc", "")) for verdict in (HealthVerdict.WATCH, HealthVerdict.DRAIN)
    )
    assert told(tracker.take(1, [watch])) == [(HealthVerdict.WATCH, "ecc")]
    assert told(tracker.take(2, [drain])) == [(HealthVerdict.DRAIN, "ecc")]
    assert told(tracker.take(3, [watch])) == []


# -- XIDs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        *[(number, HealthVerdict.HEALTHY) for number in (13, 31, 32, 43, 45, 69, 94, 96, 101, 139)],
        *[(number, HealthVerdict.WATCH) for number in (63, 74, 92, 121, 137, 145, 154, 9999)],
        *[(number, HealthVerdict.DRAIN) for number in (46, 48, 62, 64, 95, 109, 119, 120, 136, 140, 143, 155, 158)],
        (79, HealthVerdict.LOST),
    ],
)
def test_an_xid_means_what_the_catalogue_says(number: int, verdict: HealthVerdict) -> None:
    assert xid_meaning(number)[0] is verdict
    (found,) = Device().xid(number)
    assert found.verdict is max(verdict, HealthVerdict.WATCH)
    assert (found.subject, found.what, found.local_rank) == ("GPU 3", f"xid {number}", 1)
    assert found.evidence == {"xid": number, "count": 1, "application": verdict is HealthVerdict.HEALTHY}
    assert ("the fault of the application" in found.text) == (verdict is HealthVerdict.HEALTHY)


def test_the_same_xid_is_told_once_in_a_while() -> None:
    device = Device()
    assert [len(device.xid(31, after_s)) for after_s in (0, 1, AGAIN_S - 1, 2, 1)] == [1, 0, 0, 1, 0]
    assert told(device.xid(13)) == [(HealthVerdict.WATCH, "xid 13")]


def test_nvlink_errors_that_repeat_mean_a_drain() -> None:
    device = Device()
    assert told(device.xid(74)) == [(HealthVerdict.WATCH, "xid 74")]
    assert device.xid(74, 1) == []
    (found,) = device.xid(74, 1)
    assert found.verdict is HealthVerdict.DRAIN
    assert found.text == "XID 74 (NVLink error), 3 times in 60 min"


def test_nvlink_errors_now_and_then_do_not() -> None:
    device = Device()
    assert {found.verdict for _ in range(20) for found in device.xid(74, 2000)} == {HealthVerdict.WATCH}


# -- readings ---------------------------------------------------------------------------------------------------------


def test_a_device_that_is_well_is_not_spoken_of() -> None:
    assert Device().reads(WELL, 1000) == []
    assert Device().reads(Reading(), 1000) == []


def test_a_new_uncorrectable_error_is_a_drain_and_an_old_one_is_not() -> None:
    assert told(Device().reads(with_errors(uncorrectable=4))) == [(HealthVerdict.WATCH, "ecc uncorrectable")]
    device = Device()
    device.reads(with_errors(uncorrectable=4))
    (found,) = device.reads(with_errors(uncorrectable=5), 3)
    assert found.verdict is HealthVerdict.DRAIN
    assert found.text == "1 uncorrectable ECC errors since the job began, 5 in all"
    assert found.evidence == {"new": 1, "total": 5}


def test_correctable_errors_that_keep_growing_are_watched() -> None:
    device, found = Device(), []
    for count in range(0, 10_000, 50):
        found += device.reads(with_errors(correctable=count))
    (one,) = found
    assert (one.verdict, one.what, one.evidence["per_s"]) == (HealthVerdict.WATCH, "ecc correctable", 10.0)


def test_correctable_errors_in_a_burst_or_now_and_then_are_nothing() -> None:
    device = Device()
    assert device.reads(WELL, 20) == []
    assert device.reads(with_errors(correctable=500), int(CORRECTABLE_S)) == []
    for count in range(500, 700):
        assert device.reads(with_errors(correctable=count)) == []
    assert device.reads(with_errors(correctable=3), 100) == []  # the driver was loaded anew


def test_rows_to_be_remapped_are_watched_and_a_remapping_that_failed_is_a_drain() -> None:
    device = Device()
    assert told(device.reads(with_errors(remap_pending=True))) == [(HealthVerdict.WATCH, "remap pending")]
    both = with_errors(remap_pending=True, remap_failed=True)
    assert told(device.reads(both, 2)) == [(HealthVerdict.DRAIN, "remap failed")]


def test_throttling_counts_when_it_lasts_and_its_end_is_told() -> None:
    device = Device()
    for _ in range(50):  # comes and goes
        assert device.reads(THERMAL, 2) == []
        assert device.reads(WELL, int(SLOWDOWN_S / 5) + 1) == []
    (found,) = device.reads(THERMAL, 30)
    assert (found.verdict, found.what) == (HealthVerdict.WATCH, "slowdown thermal")
    assert found.text == "heat holds its clock down to 600 of 1980 MHz at 88 °C for 30 s and more"
    assert found.evidence["clock_mhz"] == 600
    assert device.reads(WELL, 3) == []
    assert told(device.reads(WELL, 10)) == [(HealthVerdict.HEALTHY, "slowdown thermal")]


def test_heat_just_below_the_shutdown_is_a_drain_once_it_lasts() -> None:
    device, hot = Device(), replace(WELL, temperature_c=94)
    assert device.reads(hot) == []
    assert device.reads(WELL, int(HOT_S) + 1) == []
    (found,) = device.reads(hot, 4)
    assert (found.verdict, found.text) == (HealthVerdict.DRAIN, "94 °C; it turns itself off at 95 °C")


@pytest.mark.parametrize(
    ("recovery", "verdict"),
    [("reset", HealthVerdict.DRAIN), ("reboot", HealthVerdict.DRAIN), ("drain and reset", HealthVerdict.WATCH)],
)
def test_what_the_driver_asks_for_is_believed(recovery: str, verdict: HealthVerdict) -> None:
    assert told(Device().reads(replace(WELL, recovery=recovery))) == [(verdict, "recovery")]


@pytest.mark.parametrize(
    ("state", "verdict"),
    [("warning", HealthVerdict.WATCH), ("alarm", HealthVerdict.DRAIN), ("critical", HealthVerdict.DRAIN)],
)
def test_the_state_that_a_device_reports_counts_when_it_lasts(state: str, verdict: HealthVerdict) -> None:
    device = Device()
    assert device.reads(Reading(state=state), 2) == []
    assert told(device.reads(Reading(state=state), 5)) == [(verdict, "state")]


def test_a_device_that_is_lost_is_told_of_at_once_and_nothing_else_is_taken_for_over() -> None:
    device = Device()
    device.reads(with_errors(remap_pending=True))
    (found,) = device.reads(Reading(lost="GPU is lost"), 5)
    assert (found.verdict, found.text) == (HealthVerdict.LOST, "it cannot be reached any more: GPU is lost")


def test_a_device_that_fails_to_answer_once_is_nothing() -> None:
    device = Device()
    assert device.reads(Reading(fails="nvmlDeviceGetMemoryInfo: Timeout"), 2) == []
    assert told(device.reads(Reading(fails="nvmlDeviceGetMemoryInfo: Timeout"), 5)) == [(HealthVerdict.WATCH, "fails")]
