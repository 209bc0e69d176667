"""The demo: it does what it announces, tells what happened, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner, scaled

DEMO = ROOT / "examples" / "demo.py"
STEPS = scaled(12, 36)

# It trains a real model: beside many other jobs a step takes seconds.
pytestmark = pytest.mark.timeout(330)


def test_the_demo_kills_a_worker_and_tells_what_happened(spawn: Spawner, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    # Its workers share their imports; the example needs the compiler.
    env = {"ELAUNCH_WARM_START": "1", "ELAUNCH_PRELOAD": None}
    demo = spawn.python(DEMO, f"--steps={STEPS}", "--workers=2", f"--events={log}", env=env, name="demo")
    assert demo.wait(280) == 0, demo.tail()
    text = demo.text()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    pids = {event["worker"]: event["pid"] for event in events if event["kind"] == "worker_started"}
    killed, survivor = pids["node0/0#0"], pids["node0/1#0"]
    assert f"kill -9 {killed}: node0/0#0, in the middle of step" in text
    assert f"node0/0#0 (pid {killed}) died by SIGKILL" in text
    assert "its 1 peer had committed step" in text
    assert "Its replacement node0/0#1" in text
    assert f"pid {survivor} before, {survivor} at the end" in text
    assert f"Each of the {STEPS} steps committed once, {64 * STEPS} samples in all" in text


@pytest.mark.soak
def test_an_interrupted_demo_ends_everything_that_it_started(spawn: Spawner) -> None:
    demo = spawn.python(DEMO, "--workers=2", name="demo")
    demo.wait_for_text("step     0", timeout_s=200)
    demo.signal(signal.SIGINT)
    assert demo.wait(40) == 130, demo.tail()
    assert "interrupted; the job was ended" in demo.text()
