"""What a worker shows its agent: whole, in spite of everything; and what its beating thread sees of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.watch.hang_watch import children_cpu_s, thread_state
from elaunch.detect.heartbeat import (
    AT_SEQUENCE,
    BEAT_S,
    COUNT,
    FILE_BYTES,
    TEXT_BYTES,
    VERSION,
    HeartbeatReading,
    OnDevice,
    Phase,
    Reader,
    Still,
    parse,
)
from elaunch.workers import heartbeat as worker_heartbeat
from tests.helpers import Spawned, Spawner, soak, wait_until

SHOWS = """
import os, sys, time
from elaunch.detect.heartbeat import Phase
from elaunch.workers import heartbeat
from tests.jobs import hangs

shown = heartbeat.open_heartbeat()
heartbeat.enter(Phase.STEP, 3, steps_here=2)
sys.stdout.write(f"heartbeat {shown.fd}\\n")
sys.stdout.flush()
"""

# Each state is told from the others by one number, which stands in several places.
WRITES = (
    SHOWS
    + """
number = 1
while True:
    number += 1
    heartbeat.enter(Phase.STEP, number, steps_here=number)
    with heartbeat.waiting([f"a/{number}#0", f"b/{number}#0"], number, number):
        pass
"""
)

FORKS = (
    SHOWS
    + """
if not os.fork():
    heartbeat.enter(Phase.ENDED, 99)
    with heartbeat.waiting(["a/1#0"], 1, 1):
        os._exit(0)
os.wait()
heartbeat.enter(Phase.STEP, 4)
time.sleep(60)
"""
)


def start(spawn: Spawner, script: str, *arguments: str) -> tuple[Spawned, Reader]:
    worker = spawn.python("-c", script, *arguments)
    wait_until(lambda: "heartbeat " in worker.text() or worker.process.poll() is not None, 60, worker.tail)
    fd = int(worker.text().split("heartbeat ")[1].split()[0])
    return worker, Reader(os.open(f"/proc/{worker.pid}/fd/{fd}", os.O_RDONLY))


@pytest.fixture
def readers() -> Iterator[list[Reader]]:
    found: list[Reader] = []
    yield found
    for reader in found:
        reader.close()


def look(reader: Reader) -> HeartbeatReading:
    found = reader.read()
    assert found is not None
    return found


def test_what_is_read_is_whole_while_it_is_written(spawn: Spawner, readers: list[Reader]) -> None:
    worker, reader = start(spawn, WRITES)
    readers.append(reader)
    seen: set[int] = set()
    end_s = time.monotonic() + 30
    while len(seen) < 300 and time.monotonic() < end_s:
        heartbeat = reader.read()
        if heartbeat is None:
            continue
        seen.add(heartbeat.step)
        assert heartbeat.steps_here == heartbeat.step or heartbeat.step == 3
        if heartbeat.waits:
            number = heartbeat.awaited.operation
            assert heartbeat.awaited.peers == (f"a/{number}#0", f"b/{number}#0")
            assert heartbeat.awaited.generation == number == heartbeat.step
    assert len(seen) > 20, worker.tail()


def test_a_heartbeat_can_be_read_when_its_worker_is_dead(spawn: Spawner, readers: list[Reader]) -> None:
    worker, reader = start(spawn, SHOWS + "time.sleep(60)")
    readers.append(reader)
    worker.signal(signal.SIGKILL)
    worker.wait(30)
    assert (look(reader).pid, look(reader).step, look(reader).phase) == (worker.pid, 3, Phase.STEP)


def test_a_forked_child_shows_nothing(spawn: Spawner, readers: list[Reader]) -> None:
    _, reader = start(spawn, FORKS)
    readers.append(reader)
    wait_until(lambda: look(reader).step == 4, 30, "the parent to go on")
    assert look(reader).phase is Phase.STEP
    assert not look(reader).waits


@given(st.binary(min_size=FILE_BYTES, max_size=FILE_BYTES), st.binary(min_size=8, max_size=8))
def test_anything_may_stand_in_the_file(data: bytes, sequence: bytes) -> None:
    assert parse(data, sequence) is None or data[8 * AT_SEQUENCE : 8 * AT_SEQUENCE + 8] == sequence


@given(st.lists(st.integers(0, 2**64 - 1), min_size=COUNT, max_size=COUNT), st.booleans())
def test_numbers_that_mean_nothing_are_no_heartbeat(numbers: list[int], is_version: bool) -> None:
    numbers[0] = VERSION if is_version else VERSION + 1
    data = b"".join(number.to_bytes(8, "little") for number in numbers).ljust(FILE_BYTES, b"x")
    found = parse(data, numbers[AT_SEQUENCE].to_bytes(8, "little"))
    if found is not None:
        assert is_version
        assert numbers[AT_SEQUENCE] % 2 == 0


def test_a_file_of_another_size_is_none() -> None:
    assert parse(b"", b"") is None
    assert parse(bytes(FILE_BYTES - 1), bytes(8)) is None


# -- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(readers: list[Reader]) -> Iterator[Reader]:
    """This process shows a heartbeat, for a test."""
    heartbeat = worker_heartbeat.open_heartbeat()
    reader = Reader(os.dup(heartbeat.fd))
    readers.append(reader)
    yield reader
    worker_heartbeat.close()


def test_a_wait_inside_another_one_is_part_of_it(shown: Reader) -> None:
    with worker_heartbeat.waiting(["a/1#0"], 2, 5):
        with worker_heartbeat.waiting():
            assert look(shown).awaited.peers == ("a/1#0",), "who is waited for is known better outside"
        assert look(shown).waits
        with worker_heartbeat.waiting(["b/1#0"], 2, 6):
            assert (look(shown).awaited.peers, look(shown).awaited.operation) == (("b/1#0",), 6)
        assert look(shown).waits
    assert not look(shown).waits


def test_a_wait_that_ends_is_a_sign_of_progress(shown: Reader) -> None:
    worker_heartbeat.enter(Phase.STEP, 7)
    before = look(shown)
    with worker_heartbeat.waiting(["a/1#0"]):
        pass
    assert look(shown).since_s > before.since_s
    assert look(shown).step_since_s == before.step_since_s


def test_in_a_wait_bytes_that_come_are_a_sign_of_progress_too(shown: Reader) -> None:
    worker_heartbeat.enter(Phase.STEP, 7)
    begun_s = look(shown).since_s
    worker_heartbeat.moved()
    assert look(shown).since_s == begun_s, "who computes does not go on by what another thread receives"
    with worker_heartbeat.waiting(["a/1#0"]):
        waits_s = look(shown).since_s
        thread = threading.Thread(target=worker_heartbeat.moved)
        thread.start()
        thread.join()
        moved_s = look(shown).since_s
    assert begun_s < waits_s < moved_s < time.monotonic()


def test_a_thread_that_works_in_the_background_waits_for_nobody(shown: Reader) -> None:
    seen: list[bool] = []

    def run() -> None:
        worker_heartbeat.in_background()
        with worker_heartbeat.waiting(["a/1#0"]):
            seen.append(look(shown).waits)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


def test_more_peers_than_there_is_room_for_are_counted(shown: Reader) -> None:
    with worker_heartbeat.waiting([f"node/{number}#0" for number in range(1000)]):
        awaited = look(shown).awaited
        assert (awaited.peers[0], len(awaited.peers), awaited.others) == ("node/0#0", 8, 992)
    with worker_heartbeat.waiting(["n" * TEXT_BYTES + "/0#0"]):
        assert (look(shown).awaited.peers, look(shown).awaited.others) == ((), 1)


def test_steps_are_counted_from_the_last_change(shown: Reader) -> None:
    worker_heartbeat.enter(Phase.BETWEEN, 10, steps_here=0)
    worker_heartbeat.committed(11)
    worker_heartbeat.committed(12)
    assert (look(shown).step, look(shown).steps_here, look(shown).phase) == (12, 2, Phase.BETWEEN)
    worker_heartbeat.enter(Phase.CHANGING)
    worker_heartbeat.enter(Phase.BETWEEN, 12, steps_here=0)
    assert look(shown).steps_here == 0


def test_a_step_that_is_told_of_twice_counts_once(shown: Reader) -> None:
    worker_heartbeat.enter(Phase.BETWEEN, 10, steps_here=0)
    worker_heartbeat.committed(11)
    worker_heartbeat.enter(Phase.SCRIPT)
    worker_heartbeat.committed(11)
    assert (look(shown).step, look(shown).steps_here, look(shown).phase) == (11, 1, Phase.BETWEEN)


def test_the_first_wait_for_peers_ends_the_scripts_own_code(shown: Reader) -> None:
    for before, after in ((Phase.SCRIPT, Phase.STEP), (Phase.BETWEEN, Phase.BETWEEN), (Phase.SAVING, Phase.SAVING)):
        worker_heartbeat.enter(before, 7)
        with worker_heartbeat.waiting(["a/1#0"]):
            assert look(shown).phase is after
        assert look(shown).phase is after


def test_a_step_may_run_code_of_the_script(shown: Reader) -> None:
    for around, inside in ((Phase.STEP, Phase.SCRIPT), (Phase.SCRIPT, Phase.SCRIPT), (Phase.LOADING, Phase.LOADING)):
        worker_heartbeat.enter(around, 7)
        with worker_heartbeat.script_code():
            assert look(shown).phase is inside
        assert look(shown).phase is around


def test_after_the_end_nothing_is_shown_any_more(shown: Reader) -> None:
    worker_heartbeat.close()
    worker_heartbeat.enter(Phase.STEP, 99)
    with worker_heartbeat.waiting(["a/1#0"]):
        assert (look(shown).phase, look(shown).waits) == (Phase.ENDED, False)


def test_without_an_agent_all_of_it_does_nothing() -> None:
    worker_heartbeat.enter(Phase.STEP, 1)
    worker_heartbeat.committed(2)
    worker_heartbeat.moved()
    with worker_heartbeat.waiting(["a/1#0"]), worker_heartbeat.script_code():
        pass
    worker_heartbeat.close()


# -- what the beating thread sees -------------------------------------------------------------------------------------


def holds_the_lock(worker: Spawned, heartbeat: HeartbeatReading) -> bool:
    late = time.monotonic() - heartbeat.beat_s > 4 * BEAT_S
    return late and thread_state(worker.pid, heartbeat.beating_tid) == "S"


@pytest.mark.parametrize(
    ("kind", "is_seen"),
    [
        ("sleep", lambda worker, heartbeat: heartbeat.still is Still.ASLEEP),
        ("lock", lambda worker, heartbeat: heartbeat.still is Still.ASLEEP),
        ("child", lambda worker, heartbeat: heartbeat.still is Still.ASLEEP),
        ("loop", lambda worker, heartbeat: heartbeat.still is Still.SPINS),
        ("call", holds_the_lock),
    ],
)
def test_a_worker_that_does_not_go_on_is_seen_to_be_still(
    spawn: Spawner, readers: list[Reader], kind: str, is_seen: Callable[[Spawned, HeartbeatReading], bool]
) -> None:
    worker, reader = start(spawn, SHOWS + f"hangs.hang({kind!r})")
    readers.append(reader)
    wait_until(lambda: is_seen(worker, look(reader)), 30, lambda: f"{look(reader)}\n{worker.tail()}")


@pytest.mark.parametrize(
    "body",
    [
        "hangs.hang('work')",
        soak("while True: len(())"),
        soak("import itertools\nfor number in itertools.count(): pass"),
        soak("while True: [0 for number in range(1000)]"),
        soak("while True: os.stat('/')"),
    ],
)
def test_a_worker_that_calls_or_iterates_spins_in_no_loop(spawn: Spawner, readers: list[Reader], body: str) -> None:
    _, reader = start(spawn, SHOWS + body)
    readers.append(reader)
    for _ in range(40):
        assert look(reader).still is not Still.SPINS
        time.sleep(0.05)


@pytest.mark.parametrize("body", ["while True: number += 1", "while number >= 0: number = number ^ 1"])
def test_a_loop_that_only_computes_spins(spawn: Spawner, readers: list[Reader], body: str) -> None:
    _, reader = start(spawn, f"{SHOWS}def run():\n    number = 0\n    {body}\nrun()")
    readers.append(reader)
    wait_until(lambda: look(reader).still is Still.SPINS, 30, lambda: str(look(reader)))


def test_processor_time_of_children_and_theirs_counts(spawn: Spawner) -> None:
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    worker = spawn.python("-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])")
    first = wait_until(lambda: children_cpu_s(worker.pid), 60, worker.tail)
    wait_until(lambda: children_cpu_s(worker.pid) > first + 0.1, 60, worker.tail)


def test_a_process_that_is_gone_has_no_state_and_no_children() -> None:
    gone = 2**22 - 1
    assert not Path(f"/proc/{gone}").exists()
    assert thread_state(gone) == ""
    assert children_cpu_s(gone) == 0


def test_code_that_cannot_be_read_ends_the_search_for_loops_and_not_the_beats(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(frame: object) -> object:
        raise IndexError("rewritten code")

    shown = worker_heartbeat.Heartbeat()
    try:
        monkeypatch.setattr(worker_heartbeat, "_loop_of", broken)
        assert shown._loop() is None
        assert shown._loop() is None
        assert capfd.readouterr().err.count("loops that hang are no longer looked for: IndexError: rewritten code") == 1
        assert shown._thread.is_alive()
    finally:
        shown.close()
        shown._thread.join(20)


DIES = """
import threading, time
from elaunch.workers import heartbeat

def broken(self):
    raise OSError("no clock")

shown = heartbeat.open_heartbeat()
heartbeat.Heartbeat._used_ns = broken
time.sleep(60)
"""


def test_a_worker_whose_heartbeat_stops_ends(spawn: Spawner) -> None:
    worker = spawn.python("-c", DIES)
    assert worker.wait(20) == 1
    assert "this process ends: its heartbeat failed: OSError: no clock" in worker.text()


@pytest.fixture
def heartbeat() -> Iterator[worker_heartbeat.Heartbeat]:
    shown = worker_heartbeat.Heartbeat()
    yield shown
    shown.close()
    shown._thread.join(20)


def test_who_waits_when_news_comes_is_free_at_the_end_of_the_last_wait(heartbeat: worker_heartbeat.Heartbeat) -> None:
    assert heartbeat.take_freed_s() is None, "no news has come"
    heartbeat.begin_wait(["a/1#0"], 2, 5)
    heartbeat.begin_wait([], 2, 6)
    begin_s = time.monotonic()
    heartbeat.news()
    time.sleep(0.05)
    heartbeat.news()
    heartbeat.end_wait()
    assert heartbeat.take_freed_s() is None, "one of its threads still waits"
    heartbeat.end_wait()
    freed_s = heartbeat.take_freed_s()
    assert freed_s is not None
    assert 0.05 <= freed_s <= time.monotonic() - begin_s
    assert heartbeat.take_freed_s() is None


def test_who_does_not_wait_when_news_comes_is_free(heartbeat: worker_heartbeat.Heartbeat) -> None:
    heartbeat.news()
    heartbeat.begin_wait(["a/1#0"], 2, 5)
    time.sleep(0.01)
    heartbeat.end_wait()
    assert heartbeat.take_freed_s() == 0
    with worker_heartbeat.waiting():
        worker_heartbeat.news()  # of a process that shows none
    assert worker_heartbeat.take_freed_s() is None


class Event:
    """A mark of a device that comes to it when it is told to."""

    def __init__(self) -> None:
        self.is_there = False
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_there


def test_a_device_that_waits_for_peers_is_seen_from_its_beginning_to_its_end(shown: Reader) -> None:
    before, after = Event(), Event()
    with worker_heartbeat.waiting(["a/1#0"], 2, 5):
        worker_heartbeat.on_device(before, after)
        assert look(shown).device is OnDevice.NOTHING, "its thread waits: that is known better"
    worker_heartbeat.enter(Phase.STEP, 7)
    assert look(shown).device in (OnDevice.ISSUED, OnDevice.COMPUTES)
    wait_until(lambda: look(shown).device is OnDevice.COMPUTES, 20, "the device to be looked at")
    assert not look(shown).waits
    since_s = look(shown).since_s
    before.is_there = True
    wait_until(lambda: look(shown).device is OnDevice.PEERS, 20, "it to come to the operation")
    assert look(shown).waits
    assert look(shown).awaited.peers == ("a/1#0",)
    assert (begun_s := look(shown).since_s) > since_s
    after.is_there = True
    wait_until(lambda: look(shown).device is OnDevice.NOTHING, 20, "the end of the operation")
    assert not look(shown).waits
    assert look(shown).since_s > begun_s, "what it did not do in the wait is no hang"


def test_of_several_waits_of_a_device_each_is_seen_in_its_turn(shown: Reader) -> None:
    marks = [Event() for _ in range(4)]
    worker_heartbeat.on_device(marks[0], marks[1])
    worker_heartbeat.on_device(marks[2], marks[3])
    marks[0].is_there = True
    wait_until(lambda: look(shown).waits, 20, "the first wait")
    marks[1].is_there = True
    wait_until(lambda: look(shown).device is OnDevice.COMPUTES, 20, "the work in between")
    marks[2].is_there = True
    wait_until(lambda: look(shown).waits, 20, "the second wait")
    marks[3].is_there = True
    wait_until(lambda: look(shown).device is OnDevice.NOTHING, 20, "the end")


def test_what_a_device_was_told_is_over_with_the_step_and_with_the_device(shown: Reader) -> None:
    worker_heartbeat.on_device(Event(), Event())
    worker_heartbeat.committed(8)
    assert look(shown).device is OnDevice.NOTHING
    failed = Event()
    worker_heartbeat.on_device(failed, failed)
    failed.error = RuntimeError("an illegal memory access")
    wait_until(lambda: look(shown).device is OnDevice.NOTHING, 20, "a device that has failed to be given up")
    for _ in range(2 * worker_heartbeat.MOST_MARKS):
        worker_heartbeat.on_device(Event(), Event())
    assert worker_heartbeat._current is not None
    assert len(worker_heartbeat._current._on_device) == worker_heartbeat.MOST_MARKS
    worker_heartbeat.committed(9)


def test_a_call_that_keeps_the_interpreters_lock_does_not_hide_that_a_device_was_told_to_wait(shown: Reader) -> None:
    """What the agent reads needs no interpreter here: it stands from the moment on at which the device was told."""
    assert worker_heartbeat._current is not None
    worker_heartbeat._current.look_at_device = lambda: None  # type: ignore[method-assign]  # no beat comes to it
    worker_heartbeat.on_device(Event(), Event())
    reading = look(shown)
    assert reading.device is OnDevice.ISSUED
    assert not reading.is_doubtful(reading.beat_s)
    assert reading.is_doubtful(reading.beat_s + 2.0)
