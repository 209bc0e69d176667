"""Who announces that this machine is taken away: `--notice=NAME[:ARGUMENT],...`.

    file:PATH    when the file is there; its first line is the reason
    aws          EC2's instance metadata: a spot instance is to be stopped or terminated
    gcp          Compute Engine's metadata server: a spot or preemptible machine is preempted
    azure        Scheduled Events: this machine is to be preempted

A package adds others by entry points of the group `elaunch.notices`: a function of the text after the colon, which
returns a `Notice`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from elaunch import threads
from elaunch.errors import UsageError

GROUP = "elaunch.notices"
FILE_S = 0.5
"""How often is looked for a file."""

METADATA_S = 2.0
"""How often a metadata service is asked; clouds recommend up to five seconds."""

AGAIN_S = 30.0
"""After what a notice raises it is asked again: a service may not be there yet, or may be away for a while."""

ANSWER_S = 2.0
ANSWER_BYTES = 1 << 20
METADATA_URL = "ELAUNCH_METADATA_URL"
"""Of the environment: where the metadata service is, if not at its usual address."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """This machine is to be taken away; `within_s` from now, if that is known."""

    reason: str
    within_s: float | None = None


class Notice(Protocol):
    """Hears of the end of this machine."""

    def wait(self, stop: threading.Event) -> Announcement | None:
        """Returns when it is announced, or with None when `stop` is set. Runs in a thread of its own.

        What it raises is told to the user in a line, and after `AGAIN_S` it is called again.
        """


class FileNotice:
    """A file that a hook of the scheduler makes.

    Args:
        path: of the file; one that is there already counts.
    """

    def __init__(self, path: str) -> None:
        if not path:
            raise UsageError("--notice=file: name the file, as in --notice=file:/run/drain")
        self._path = path

    def wait(self, stop: threading.Event) -> Announcement | None:
        """Implements `Notice.wait`."""
        while not stop.wait(FILE_S):
            try:
                with open(self._path, encoding="utf-8", errors="replace") as file:
                    reply = file.readline(200).strip()
            except OSError:
                continue
            return Announcement(f"{self._path}: {reply}" if reply else f"{self._path} is there")
        return None


class MetadataNotice:
    """A metadata service that is asked again and again.

    Args:
        name: of the cloud, for messages.
        ask: tells what the service says by now.
    """

    def __init__(self, name: str, ask: Callable[[], Announcement | None]) -> None:
        self._name, self._ask = name, ask

    def wait(self, stop: threading.Event) -> Announcement | None:
        """Implements `Notice.wait`.

        Raises:
            OSError: the first answer did not come, so there may be no such service here.
            ValueError: the first answer is not such a service's.
        """
        answered = False
        while not stop.is_set():
            try:
                found = self._ask()
            except (OSError, ValueError):
                if not answered:
                    raise
            else:
                answered = True
                if found is not None:
                    return Announcement(f"{self._name}: {found.reason}", found.within_s)
            stop.wait(METADATA_S)
        return None


def _aws() -> Announcement | None:
    base = os.environ.get(METADATA_URL, "http://169.254.169.254")
    token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    reply = _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    if reply is None:
        return None
    return aws_announcement(reply)


def aws_announcement(reply: str) -> Announcement:
    """Reads the instance action of EC2.

    Raises:
        ValueError: it is none.
    """
    found = _object(reply)
    action, time_text = found.get("action"), found.get("time")
    if not isinstance(action, str) or not isinstance(time_text, str):
        raise ValueError(f"expected an action and a time, found {reply[:80]!r}")
    return Announcement(f"the instance is to {action} at {time_text}", _seconds_to(time_text))


def _gcp() -> Announcement | None:
    base = os.environ.get(METADATA_URL, "http://metadata.google.internal")
    reply = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return Announcement("the machine is preempted", 30.0) if reply is not None and reply.strip() == "TRUE" else None


def _azure() -> Announcement | None:
    base = os.environ.get(METADATA_URL, "http://169.254.169.254")
    header = {"Metadata": "true"}
    reply = _get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header) or "{}"
    if azure_announcement(reply) is None:
        return None
    # The events of a scale set or an availability set come to all of its machines.
    machine = _get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
    return azure_announcement(reply, (machine or "").strip())


def azure_announcement(reply: str, machine: str = "") -> Announcement | None:
    """Reads Azure's scheduled events: those of this machine, by its name, or of all where it is not known.

    Raises:
        ValueError: they are none.
    """
    events = _object(reply).get("Events", [])
    if not isinstance(events, list):
        raise ValueError(f"expected a list of events, found {reply[:80]!r}")
    for event in events:
        kind = event.get("EventType") if isinstance(event, dict) else None
        if kind not in ("Preempt", "Terminate"):
            continue
        found = event.get("Resources", [])
        named = [str(one) for one in found] if isinstance(found, list) else []
        if machine and named and machine.lower() not in (name.lower() for name in named):
            continue
        left_s = _seconds_to_http_date(str(event.get("NotBefore", "")))
        return Announcement(f"{kind} of {', '.join(named[:8]) or 'this machine'}", 30.0 if left_s is None else left_s)
    return None


def _object(reply: str) -> dict[str, Any]:
    try:
        found = json.loads(reply)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {reply[:80]!r}")
    return found


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """What the service answers; None where there is nothing to say (404).

    Raises:
        OSError: it does not answer, or not so.
        ValueError: its answer is no text.
    """
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers=headers, method=method)
    # Never through a proxy: the service is on this machine's own network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            text: str = answer.read(ANSWER_BYTES).decode()
            return text
    except http.client.HTTPException as error:
        raise OSError(f"its answer is not HTTP: {error!r}") from error
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _seconds_to(time_text: str) -> float | None:
    """To a time as in 2026-11-20T10:11:12Z; None where it is none."""
    try:
        then = datetime.fromisoformat(time_text)
        return max(0.0, then.replace(tzinfo=then.tzinfo or UTC).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _seconds_to_http_date(text: str) -> float | None:
    """To a time as in Mon, 19 Sep 2026 18:29:47 GMT; None where it is none."""
    from email.utils import parsedate_to_datetime

    try:
        then = parsedate_to_datetime(text)
        return max(0.0, then.replace(tzinfo=then.tzinfo or UTC).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _cloud(name: str, ask: Callable[[], Announcement | None], argument: str) -> Notice:
    if argument:
        raise UsageError(f"--notice={name}:{argument}: {name} takes no argument")
    return MetadataNotice(name, ask)


BUILT_IN: dict[str, Callable[[str], Notice]] = {
    "file": FileNotice,
    "aws": partial(_cloud, "aws", _aws),
    "gcp": partial(_cloud, "gcp", _gcp),
    "azure": partial(_cloud, "azure", _azure),
}


def parse(text: str) -> tuple[tuple[str, Notice], ...]:
    """Reads `--notice`: each with its text, for messages.

    Raises:
        UsageError: nothing has this name, or its argument cannot be used.
    """
    found: list[tuple[str, Notice]] = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, _, argument = one.partition(":")
        make = BUILT_IN.get(name)
        if make is None:
            from importlib.metadata import entry_points

            entry = next(iter(entry_points(group=GROUP, name=name)), None)
            if entry is None:
                known = sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})
                raise UsageError(
                    f"--notice={one}: there is no notice {name!r}; there are {', '.join(known)}; packages add others "
                    f"by entry points of the group {GROUP}"
                )
            try:
                make = entry.load()
            except Exception as error:  # of code that is not ours
                raise UsageError(f"--notice={one} ({entry.value}): {type(error).__name__}: {error}") from error
        found.append((one, make(argument)))
    return tuple(found)


class Notices:
    """Waits for announcements, in a thread for each notice, until it is closed.

    Args:
        notices: as `parse` returns them.
        notify: called from these threads.
        complain: told in a line of a notice that fails.
    """

    def __init__(
        self,
        notices: Sequence[tuple[str, Notice]],
        notify: Callable[[Announcement], None],
        complain: Callable[[str], None],
    ) -> None:
        self._notify, self._complain = notify, complain
        self._stop = threading.Event()
        for name, notice in notices:
            threads.start("elaunch-notice", partial(self._wait, name, notice), partial(self._died, name))

    def close(self) -> None:
        """Hears no more."""
        self._stop.set()

    def _wait(self, name: str, notice: Notice) -> None:
        told = ""
        while True:
            try:
                found = notice.wait(self._stop)
                break
            except Exception as error:  # of code that is not ours, or of a service that is not there
                text = " ".join(str(error).split()) or type(error).__name__
            if self._stop.is_set():
                return
            if text != told:
                told = text
                self._complain(f"--notice={name}: {text}; nothing is heard from it, it is asked again in {AGAIN_S:g} s")
            if self._stop.wait(AGAIN_S):
                return
        if found is not None and not self._stop.is_set():
            self._notify(found)

    def _died(self, name: str, error: BaseException) -> None:
        self._complain(f"--notice={name}: {threads.describe(error)}; nothing will be heard from it")
