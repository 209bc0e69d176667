"""The page of `elaunch ui` for a job of 400 workers, in a headless Chromium: how long people wait for it.

    python benchmarks/page.py
    python benchmarks/page.py --quick --json page.json
    python benchmarks/page.py --pictures docs/images

The log is made up: two generations of 400 workers with a plan each, and 3,000 steps. Times are taken in the page, by
its own clock. *Load*: from the navigation until all is drawn and a frame was made. *Arrow key*: from the key to the
next frame, which shows another change with its plans. *A step*, *a change*: one event more, or another generation
with its plan. Their *answer*: from the page's request, which comes once a second, until the server has sent all;
*drawn*: from then until the frame that shows it. Page and server share the cores of this machine; nothing is drawn by
a GPU.

With --pictures, only pictures are made: of a recorded job of four workers, one of which was killed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs import ELAUNCH, HERE, JobFailed, Processes
from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import symmetric
from tests.browser import Browser, find_chromium
from tests.pages import large_job, lines

WORKERS = 400
SERVING_S = 30.0
COLOURS = 256  # of a picture, which is less than half as large then
RECORDED = HERE.parent / "tests" / "data" / "kill.jsonl"

# A message that a frame's callback posts comes when the frame has been made. The page notes in an attribute that it has
# drawn an answer; plans come after that.
MEASURES = """
window.found = { load: [], key: [], answer: [], drawn: [] };
const afterFrame = (act) => requestAnimationFrame(() => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => act(performance.now());
  channel.port2.postMessage(0);
});
const once = (condition, act) => condition() ? afterFrame(act) : requestAnimationFrame(() => once(condition, act));
once(() => document.querySelectorAll("#plans .tile").length >= TILES, (now) => found.load.push(now));
document.addEventListener("keydown", (event) => afterFrame((now) => found.key.push(now - event.timeStamp)), true);
const fetched = window.fetch;
let answered, plan;
window.fetch = async (...asked) => {
  const begun = performance.now(), reply = await fetched(...asked);
  if (asked[0] !== "job.json" || reply.status !== 200) return reply;
  const text = await reply.text();
  [answered, plan] = [performance.now(), document.querySelector("#plans svg")];
  found.answer.push(answered - begun);
  return new Response(text, { status: 200, headers: reply.headers });
};
new MutationObserver(() => {
  const since = answered, before = plan;
  const isDrawn = () => !window.awaitsPlan || document.querySelector("#plans svg") !== before;
  once(isDrawn, (now) => found.drawn.push(now - since));
}).observe(document, { subtree: true, attributeFilter: ["data-drawn"] });
"""


@contextmanager
def shown(log: Path, folder: Path, script: str = "") -> Iterator[tuple[Browser, str]]:
    """Serves a log, and opens a browser for it; yields the browser and the address.

    Args:
        log: of a job.
        folder: for files of the browser and the server.
        script: what the page runs before its own.

    Raises:
        JobFailed: there is no Chromium, or the server does not serve.
    """
    program = find_chromium()
    if program is None:
        raise JobFailed("no Chromium on this machine (Debian's package chromium)")
    with Processes(folder) as processes:
        processes.start([*ELAUNCH, "ui", log])
        until_s = time.monotonic() + SERVING_S
        while not (found := re.findall(r"elaunch ui: (http://\S+)", processes.tail())):
            if time.monotonic() > until_s:
                raise JobFailed(f"the page is not served after {SERVING_S:g} s:\n{processes.tail()}")
            time.sleep(0.05)
        browser = Browser(program, folder)
        try:
            browser.look(1400, 1000)
            if script:
                browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
            yield browser, found[0]
        finally:
            browser.close()


def loads(browser: Browser, url: str, count: int) -> list[float]:
    """Returns milliseconds of each time that the page is opened."""
    found = []
    for _ in range(count + 1):
        browser.open("about:blank")
        browser.open(url)
        found.append(browser.wait_for("window.found?.load[0]"))
    return found[1:]  # the first one warms up


def keys(browser: Browser, count: int) -> list[float]:
    """Returns milliseconds of each arrow key; plans were fetched before."""
    for number in range(count + 2):
        browser.press("ArrowRight" if number % 2 else "ArrowLeft")
        browser.wait_for(f"found.key.length > {number}")
    return list(browser.evaluate("found.key"))[2:]


def events(browser: Browser, add: Callable[[int], None], count: int, has_plan: bool) -> tuple[list[float], list[float]]:
    """Returns milliseconds of the server's answers, and of what is drawn, for events that are added one at a time."""
    browser.evaluate(f"found.answer = []; found.drawn = []; window.awaitsPlan = {str(has_plan).lower()}; 1")
    for number in range(count):
        add(number)
        browser.wait_for(f"(ask(), found.drawn.length > {number})")
    return list(browser.evaluate("found.answer"))[:count], list(browser.evaluate("found.drawn"))[:count]


def measure(report: Report, folder: Path, count: int) -> None:
    """Adds the rows."""
    log = folder / "events.jsonl"
    log.write_text(large_job())

    def append(*new: dict[str, object]) -> None:
        with log.open("a") as file:
            file.write(lines(*new))

    def a_step(number: int) -> None:
        commit = {"t": 3500.0 + number, "generation": 3, "kind": "step", "step": 6000 + number, "members": WORKERS}
        append({**commit, "seconds": 0.3, "loss": 0.1, "samples": 3200})

    def a_change(number: int) -> None:
        workers = [f"node{place // 8}/{place % 8}#{number + 2 if place == 9 else 0}" for place in range(WORKERS)]
        begun = {"t": 4000.0 + number, "generation": 4 + number}
        plan = str(symmetric(workers, 48, 3200, 4, dp=50, pp=8))
        append(
            {**begun, "kind": "generation", "workers": workers, "cause": "a worker joins", "stage": "train"},
            {**begun, "kind": "decision", "policy": "stay", "reason": "", "candidates": [], "plan": plan},
        )

    # Its two plans, before and after.
    with shown(log, folder, MEASURES.replace("TILES", str(2 * WORKERS))) as (browser, url):
        rows = {"load": loads(browser, url, count), "arrow key": keys(browser, 2 * count)}
        rows["a step: its answer"], rows["a step: drawn"] = events(browser, a_step, count, has_plan=False)
        rows["a change: its answer"], rows["a change: drawn"] = events(browser, a_change, count, has_plan=True)
        if browser.said:
            raise JobFailed(f"the page complains: {browser.said}")
    for what, times_ms in rows.items():
        one = spread(times_ms)
        report.row(what=what, n=one.count, median_ms=one.median, least_ms=one.least, p90_ms=one.p90, worst_ms=one.worst)


def draw(folder: Path, into: Path) -> None:
    """Writes pictures of a recorded job, at the change in which a worker was killed: one light, one dark.

    Raises:
        JobFailed: the package pillow is missing, or the page is not served.
    """
    try:
        from PIL import Image
    except ImportError:
        raise JobFailed("pillow, which comes with matplotlib, is not installed: pip install 'elaunch[plots]'") from None
    with shown(RECORDED, folder) as (browser, url):
        for scheme in ("light", "dark"):
            browser.look(1100, 1000, scheme)
            browser.open(url)
            browser.wait_for("document.querySelectorAll('#plans figure').length > 0")
            browser.press("ArrowLeft")
            browser.wait_for("document.querySelectorAll('#plans figure').length === 2")
            path = into / f"page-{scheme}.png"
            browser.picture(path)
            with Image.open(path) as drawn:
                drawn.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> int:
    """Prints the table, or draws pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--count", type=int, default=30, help="of each measurement")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw pictures there, and measure nothing")
    args = parser.parse_args()
    report = Report(f"The page of a job of {WORKERS} workers")
    with tempfile.TemporaryDirectory(prefix="elaunch-page-") as name:
        try:
            if args.pictures is not None:
                draw(Path(name), args.pictures)
                return 0
            measure(report, Path(name), 5 if args.quick else args.count)
        except JobFailed as error:
            print(f"page: {error}", file=sys.stderr)
            return 1
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
