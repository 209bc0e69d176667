"""Announcements that a machine is taken away: files, metadata services, and those that packages add."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.agent import notices
from elaunch.agent.notices import Announcement, Notices, parse
from elaunch.errors import UsageError
from tests.helpers import scaled

PATIENCE_S = 20.0

Answers = dict[tuple[str, str], tuple[int, str]]
"""By method and path: status and text. What is not there is not found."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "FILE_S", 0.01)
    monkeypatch.setattr(notices, "METADATA_S", 0.01)


@contextmanager
def service(answers: Answers, asked: list[tuple[str, dict[str, str]]]) -> Iterator[str]:
    """A metadata service whose answers may change."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            status, text = answers.get((self.command, self.path), (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def listening(text: str) -> Iterator[tuple[Queue[Announcement], Queue[str]]]:
    """What is heard, and what is complained of."""
    heard: Queue[Announcement] = Queue()
    complaints: Queue[str] = Queue()
    waiting = Notices(parse(text), heard.put, complaints.put)
    try:
        yield heard, complaints
    finally:
        waiting.close()


def test_a_file_announces_with_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "drain"
    with listening(f"file:{path}") as (heard, complaints):
        part = tmp_path / "part"
        part.write_text("maintenance of rack 7\nmore\n")
        part.rename(path)
        assert heard.get(timeout=PATIENCE_S) == Announcement(f"{path}: maintenance of rack 7")
    assert complaints.empty()


def test_an_empty_file_announces_too(tmp_path: Path) -> None:
    path = tmp_path / "drain"
    path.touch()
    with listening(f"file:{path}") as (heard, _):
        assert heard.get(timeout=PATIENCE_S) == Announcement(f"{path} is there")


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


INSTANCE_ACTION = ("GET", "/latest/meta-data/spot/instance-action")
EVENTS = ("GET", "/metadata/scheduledevents?api-version=2020-07-01")


@pytest.mark.parametrize(
    ("name", "quiet", "announced", "reason", "header"),
    [
        (
            "aws",
            {("PUT", "/latest/api/token"): (200, "secret")},
            {INSTANCE_ACTION: (200, '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')},
            "aws: the instance is to terminate at 2026-01-01T00:00:00Z",
            ("x-aws-ec2-metadata-token", "secret"),
        ),
        (
            "gcp",
            {("GET", "/computeMetadata/v1/instance/preempted"): (200, "FALSE")},
            {("GET", "/computeMetadata/v1/instance/preempted"): (200, "TRUE\n")},
            "gcp: the machine is preempted",
            ("metadata-flavor", "Google"),
        ),
        (
            "azure",
            {EVENTS: (200, '{"Events": [{"EventType": "Reboot", "Resources": ["other"]}]}')},
            {EVENTS: (200, '{"Events": [{"EventType": "Preempt", "Resources": ["vm-7"]}]}')},
            "azure: Preempt of vm-7",
            ("metadata", "true"),
        ),
    ],
)
def test_a_metadata_service_announces(
    monkeypatch: pytest.MonkeyPatch, name: str, quiet: Answers, announced: Answers, reason: str, header: tuple[str, str]
) -> None:
    answers, asked = dict(quiet), list[tuple[str, dict[str, str]]]()
    with service(answers, asked) as url:
        monkeypatch.setenv(notices.METADATA_URL, url)
        with listening(name) as (heard, complaints):
            wait_for(lambda: len(asked) > 6)
            assert heard.empty()
            answers[next(iter(announced))] = (500, "busy")  # once it has answered, failures pass
            begun = len(asked)
            wait_for(lambda: len(asked) > begun + 6)
            answers.update(announced)
            found = heard.get(timeout=PATIENCE_S)
    assert found.reason == reason
    assert found.within_s is not None
    assert found.within_s >= 0
    assert complaints.empty()
    headers = [had for path, had in asked if path == next(iter(announced))[1]][-1]
    assert headers[header[0]] == header[1]


def test_where_there_is_no_such_service_a_line_says_so(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv(notices.METADATA_URL, f"http://127.0.0.1:{free_port}")
    with listening("gcp") as (_, complaints):
        line = complaints.get(timeout=PATIENCE_S)
    assert re.fullmatch(r"--notice=gcp: .*refused.*; nothing is heard from it, it is asked again in 30 s", line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file:", "--notice=file: name the file, as in --notice=file:/run/drain"),
        ("aws:eu-1", "--notice=aws:eu-1: aws takes no argument"),
        ("slurm", "--notice=slurm: there is no notice 'slurm'; there are aws, azure, file, gcp; packages add"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(text)


PACKAGE = """
from elaunch.agent.notices import Announcement

class Pager:
    def __init__(self, number):
        self.number = number
    def wait(self, stop):
        if self.number == "broken":
            raise RuntimeError("no line")
        return Announcement(f"call from {self.number}", 7.0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds a notice."""
    (tmp_path / "pager_notice.py").write_text(PACKAGE)
    info = tmp_path / "pager_notice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pager-notice\nVersion: 1.0\n")
    entries = "pager = pager_notice:Pager\nmissing = pager_notice:Missing\n"
    (info / "entry_points.txt").write_text(f"[{notices.GROUP}]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
def test_a_package_adds_one() -> None:
    with listening("pager:112") as (heard, _):
        assert heard.get(timeout=PATIENCE_S) == Announcement("call from 112", 7.0)


@pytest.mark.usefixtures("package")
def test_one_that_fails_is_named() -> None:
    with listening("pager:broken") as (heard, complaints):
        line = complaints.get(timeout=PATIENCE_S)
    assert line == "--notice=pager:broken: no line; nothing is heard from it, it is asked again in 30 s"
    assert heard.empty()
    with pytest.raises(UsageError, match=r"--notice=missing \(pager_notice:Missing\): AttributeError"):
        parse("missing")


def test_a_service_that_is_not_there_yet_is_heard_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "AGAIN_S", 0.01)
    path = ("GET", "/computeMetadata/v1/instance/preempted")
    answers, asked = {path: (500, "starting")}, list[tuple[str, dict[str, str]]]()
    with service(answers, asked) as url:
        monkeypatch.setenv(notices.METADATA_URL, url)
        with listening("gcp") as (heard, complaints):
            wait_for(lambda: len(asked) > 3)
            answers[path] = (200, "TRUE")
            assert heard.get(timeout=PATIENCE_S).reason == "gcp: the machine is preempted"
    assert complaints.qsize() == 1


@pytest.mark.parametrize("nonsense", ["[]", "{}", "[" * 100_000, '{"Events": 3}', '{"action": 1, "time": 2}', "x"])
@pytest.mark.parametrize(("name", "path"), [("aws", INSTANCE_ACTION), ("azure", EVENTS)])
def test_nonsense_from_a_service_does_not_end_the_hearing(
    monkeypatch: pytest.MonkeyPatch, name: str, path: tuple[str, str], nonsense: str
) -> None:
    monkeypatch.setattr(notices, "AGAIN_S", 0.01)
    answers: Answers = {("PUT", "/latest/api/token"): (200, "secret"), path: (200, nonsense)}
    asked = list[tuple[str, dict[str, str]]]()
    good = {
        "aws": '{"action": "stop", "time": "2026-01-01T00:00:00Z"}',
        "azure": '{"Events": [{"EventType": "Terminate", "Resources": ["vm"]}]}',
    }
    with service(answers, asked) as url:
        monkeypatch.setenv(notices.METADATA_URL, url)
        with listening(name) as (heard, complaints):
            wait_for(lambda: len(asked) > 3)
            answers[path] = (200, good[name])
            assert heard.get(timeout=PATIENCE_S).reason.startswith(f"{name}: ")
    assert complaints.qsize() <= 1


TEXTS = st.one_of(
    st.text(max_size=50),
    st.sampled_from(["[" * 100_000, '{"Events": [[]]}', '{"Events": [{"EventType": "Preempt", "Resources": 1}]}']),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["Preempt", "0001-01-01"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["Events", "EventType", "Resources", "NotBefore", "action", "time"])
                | st.text(max_size=3),
                inner,
            )
        ),
        max_leaves=8,
    ).map(json.dumps),
)


@settings(deadline=None, derandomize=True, max_examples=scaled(70, 200))
@given(TEXTS, st.sampled_from([notices.aws_announcement, notices.azure_announcement]))
def test_any_answer_is_an_announcement_or_none(said: str, read: Callable[[str], Announcement | None]) -> None:
    try:
        found = read(said)
    except ValueError:
        return
    assert found is None or (found.reason and (found.within_s is None or found.within_s >= 0))
