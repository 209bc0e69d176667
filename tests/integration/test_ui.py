"""The page of a job in a real browser."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, find_chromium
from tests.helpers import ROOT, Spawner
from tests.pages import large_job, lines

LOG = ROOT / "tests" / "data" / "kill.jsonl"
LIMIT_S = 60.0

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium) for the page of a job"),
]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

CHOSEN = "document.querySelector('#list [aria-selected=true]').innerText"
PLANS = "document.querySelectorAll('#plans .tile').length"
FITS = "document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    folder = tmp_path / "browser"
    folder.mkdir()
    browser = Browser(CHROMIUM, folder)
    yield browser
    browser.close()


def serve(spawn: Spawner, *logs: Path) -> tuple[str, Any]:
    server = spawn.elaunch("ui", *map(str, logs), name="ui")
    text = server.wait_for_text("(Ctrl-C ends it)", LIMIT_S)
    (url,) = re.findall(r"http://\S+", text)
    return url, server


def test_a_job_is_shown_followed_and_driven_by_keys_in_light_and_dark(
    spawn: Spawner, tmp_path: Path, browser: Browser
) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(LOG.read_bytes())
    url, server = serve(spawn, log)
    browser.look(1400, 1000)
    browser.open(url)
    browser.wait_for(f"{PLANS} > 0")
    # The newest change is chosen; an arrow goes to the one before, in which a worker was killed.
    assert "node0/1#1 joins" in browser.evaluate(CHOSEN)
    browser.press("ArrowLeft")
    assert "worker node0/1#0 was killed by SIGKILL" in browser.evaluate(CHOSEN)
    browser.wait_for("document.querySelectorAll('#plans figure').length === 2")
    shown = browser.evaluate("document.body.innerText")
    for text in ("reparallelize ✓", "node0/1#0 must be replaced", "nobody is free", "detect 144 ms", "resume 320 ms"):
        assert text in shown, text
    assert "No worker has hung." in shown
    figures = browser.evaluate("[...document.querySelectorAll('#figures dd')].map((one) => one.textContent)")
    assert figures[2:5] == ["4", "79", "3.32"]
    assert figures[6] == "6.32e-4", "whole, in as little room as a figure has"
    browser.look(1100, 1000)
    browser.wait_for("((table) => table.scrollWidth <= table.clientWidth)(document.querySelector('#decision .scroll'))")
    browser.look(1400, 1000)
    assert browser.evaluate("document.querySelectorAll('#curves .curve').length") == 2
    # Tab reaches every control, in view and with its focus drawn.
    seen: list[str] = []
    while not seen or (seen[-1] != "list" and len(seen) < 14):
        browser.press("Tab")
        seen.append(browser.evaluate("document.activeElement.id || document.activeElement.className"))
        assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", seen
    reached = [name for name in seen if name in ("former", "slider", "later", "newest", "list")]
    assert reached == ["former", "slider", "later", "newest", "list"]
    assert sum(name.startswith("cell") for name in seen) == 1, "one stop for all workers"
    browser.evaluate("document.querySelector('.cell').focus()")
    browser.press("ArrowRight")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.dataset.slot") == "node0/1"
    assert "node0/1#1" in browser.evaluate("document.getElementById('member').textContent")
    chosen = "[...document.querySelectorAll('#plans .tile.chosen')].every((one) => one.slots.includes('node0/1'))"
    assert browser.evaluate(chosen)
    assert browser.evaluate("document.querySelectorAll('#plans .tile.chosen').length") == 4, "of the plan before"
    # What is appended appears, and no text of it is taken for more than a text.
    stacks = tmp_path / "stacks.0.txt"
    stacks.write_text(f"Thread 1\n  in {HOSTILE}\n")
    bad = {"cause": HOSTILE, "worker": HOSTILE, "doing": HOSTILE, "place": HOSTILE, "stacks": str(stacks)}
    with log.open("a") as file:
        more = {"t": 1795696750.0, "generation": 5}
        train = {**more, "kind": "generation", "workers": [HOSTILE, "node0/0#0"], "cause": HOSTILE, "stage": "train"}
        decision = {**more, "kind": "decision", "policy": HOSTILE, "reason": HOSTILE, "plan": HOSTILE}
        rejected = [{"policy": HOSTILE, "rejected": HOSTILE}]
        file.write(lines(train, {**decision, "candidates": rejected}, {**more, "kind": "hang", **bad}))
        file.write(lines({**more, "kind": "health", "node": HOSTILE, "subject": HOSTILE, "text": HOSTILE}))
        file.write(lines({**more, "kind": HOSTILE, HOSTILE: HOSTILE}))
    browser.wait_for("document.querySelector('#hangs strong')?.textContent.startsWith('<img')")
    assert "worker node0/1#0 was killed by SIGKILL" in browser.evaluate(CHOSEN), "what was chosen stays chosen"
    browser.evaluate("document.getElementById('newest').click()")
    browser.wait_for("document.getElementById('decision').innerText.includes('<script>')")
    browser.evaluate("document.querySelector('#hangs summary').click()")
    browser.wait_for("document.querySelector('#hangs details pre').textContent.startsWith('Thread 1')")
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in browser.evaluate("document.title.slice(0, 5)")
    # It can be read in either mode, and nothing sticks out of a narrow window.
    colours = "((style) => [style.backgroundColor, style.color])(getComputedStyle(document.body))"
    for scheme in ("light", "dark"):
        for width in (1400, 380):
            browser.look(width, 900, scheme)
            browser.wait_for(FITS)
        back, ink = (sum(map(int, re.findall(r"\d+", one)[:3])) for one in browser.evaluate(colours))
        assert abs(back - ink) > 450, scheme
        assert (back > ink) == (scheme == "light")
    assert browser.said == []
    server.signal(signal.SIGINT)
    assert server.wait(LIMIT_S) == 0, server.tail()
    browser.wait_for("document.getElementById('link').textContent.startsWith('The server does not answer.')")


def test_400_workers_are_drawn_and_an_empty_log_says_what_is_missing(
    spawn: Spawner, tmp_path: Path, browser: Browser
) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text("")
    url, _ = serve(spawn, log)
    browser.look(1400, 1000)
    browser.open(url)
    browser.wait_for("document.querySelectorAll('.empty').length >= 6")
    shown = browser.evaluate("document.body.innerText")
    for text in ("No events yet", "No step has committed yet", "No generation has begun yet", "No worker has hung"):
        assert text in shown, text
    log.write_text(large_job())
    browser.wait_for(f"{PLANS} >= 800")
    assert browser.evaluate("document.querySelectorAll('.cell').length") == 400
    assert browser.evaluate("document.getElementsByTagName('*').length") < 6000
    browser.press("ArrowLeft")
    browser.wait_for(f"{PLANS} >= 400 && document.querySelectorAll('#plans figure').length === 1")
    assert browser.evaluate(FITS)
    assert browser.said == []
