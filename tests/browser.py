"""A headless Chromium, driven over a pipe by its DevTools protocol: no package is needed for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.helpers import child_environment

PROGRAMS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
LIMIT_S = 60.0


def find_chromium() -> str | None:
    """Returns the program; None: there is none on this machine."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


class Browser:
    """A browser with one page."""

    def __init__(self, program: str, folder: Path) -> None:
        down, self._to = os.pipe()
        self._from, up = os.pipe()
        (folder / "home").mkdir()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [
            "--no-first-run",
            "--disable-background-networking",
            "--disable-breakpad",
            f"--user-data-dir={folder / 'profile'}",
        ]
        # It reads from descriptor 3 and writes to 4; through copies, since one of ours may have such a number.
        run = f'exec 8<&{down} 9>&{up}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        log = (folder / "chromium.log").open("wb")
        self.process = subprocess.Popen(
            ["bash", "-c", run, "bash", program, *flags, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(down, up),
            env=child_environment({"HOME": str(folder / "home")}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        log.close()
        os.close(down)
        os.close(up)
        self._rest = b""
        self._number = 0
        self._session = ""
        self.said: list[str] = []
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns what it answers."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while True:
            message = self._read(until)
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        """Keeps what the page complains of: errors, and what its policy has blocked."""
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "assert"):
                self.said.append(json.dumps(given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] == "error":
                self.said.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """Returns what an expression is in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Waits until an expression is true in the page, and returns what it is."""
        until = time.monotonic() + LIMIT_S
        while not (found := self.evaluate(expression)):
            text = "document.body ? document.body.innerText.slice(0, 3000) : ''"
            assert time.monotonic() < until, f"{expression} is not true: {self.evaluate(text)} {self.said}"
            time.sleep(0.05)
        return found

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=url)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the size of the window, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        """Presses a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        typed = {"type": "keyDown", "text": "\r"} if key == "Enter" else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **typed, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def picture(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._to)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._from)
