"""The notices of clouds, each heard from a metadata service that is as strict as the cloud's documentation says."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from elaunch.agent import notices
from elaunch.agent.notices import Announcement, Notices, parse

PATIENCE_S = 20.0
TOKEN_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"


class MetadataServer(ThreadingHTTPServer):
    """What a cloud says of one machine.

    Attributes:
        document: what is announced; empty: nothing.
        refused: requests that the cloud would not answer.
        asked: how many were answered.
    """

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.document = ""
        self.refused: list[str] = []
        self.asked = 0
        self.tokens: dict[str, float] = {}


class Cloud(BaseHTTPRequestHandler):
    server: MetadataServer
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, text: str, kind: str = "text/plain", **headers: str) -> None:
        if status in (400, 401, 403, 405):
            self.server.refused.append(f"{status} {self.command} {self.path}")
        else:
            self.server.asked += 1
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Ec2(Cloud):
    """IMDSv2 alone: a session's token comes by PUT, lives for as long as was asked for, and is needed for all else."""

    def do_PUT(self) -> None:
        ttl = self.headers.get(TOKEN_TTL_HEADER, "")
        if self.path != "/latest/api/token" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21600:
            return self.answer(400, "")
        if "X-Forwarded-For" in self.headers:
            return self.answer(403, "")
        token = secrets.token_urlsafe(40)
        self.server.tokens[token] = time.monotonic() + int(ttl)
        return self.answer(200, token, X_aws_ec2_metadata_token_ttl_seconds=ttl)

    def do_GET(self) -> None:
        if self.server.tokens.get(self.headers.get(TOKEN_HEADER, ""), 0.0) < time.monotonic():
            return self.answer(401, "")
        if self.path == "/latest/meta-data/spot/instance-action" and self.server.document:
            return self.answer(200, self.server.document)
        return self.answer(404, "<html><body>Not Found</body></html>", "text/html")


class ComputeEngine(Cloud):
    """Answers only those who say Metadata-Flavor: Google, and says it too."""

    def do_GET(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in self.headers:
            return self.answer(403, "Missing Metadata-Flavor:Google header.", "text/html")
        if self.path != "/computeMetadata/v1/instance/preempted":
            return self.answer(404, "", "text/html")
        return self.answer(200, self.server.document or "FALSE", "application/text", Metadata_Flavor="Google")


class Azure(Cloud):
    """Wants Metadata: true and a version. Its events are those of the whole scale set; this machine is train_2."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if self.headers.get("Metadata", "").lower() != "true" or "X-Forwarded-For" in self.headers:
            return self.answer(400, '{"error": "Bad request. Required metadata header not specified"}')
        if url.path == "/metadata/scheduledevents" and query.get("api-version") == ["2020-07-01"]:
            nothing = '{"DocumentIncarnation": 1, "Events": []}'
            return self.answer(200, self.server.document or nothing, "application/json")
        if url.path == "/metadata/instance/compute/name" and query.get("api-version") == ["2021-02-01"]:
            if query.get("format") != ["text"]:
                return self.answer(400, '{"error": "Bad request. api-version is invalid or was not specified"}')
            return self.answer(200, "train_2")
        return self.answer(400, '{"error": "Bad request"}')


def azure_event(kind: str, machine: str, not_before: str) -> str:
    event = {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "EventStatus": "Scheduled",
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


@contextmanager
def hearing(
    monkeypatch: pytest.MonkeyPatch, name: str, cloud: type[Cloud]
) -> Iterator[tuple[MetadataServer, Queue[Announcement], Queue[str]]]:
    monkeypatch.setattr(notices, "METADATA_S", 0.01)
    server = MetadataServer(cloud)
    monkeypatch.setenv(notices.METADATA_URL, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # these services are on the machine's own network
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    heard: Queue[Announcement] = Queue()
    complaints: Queue[str] = Queue()
    waiting = Notices(parse(name), heard.put, complaints.put)
    try:
        yield server, heard, complaints
    finally:
        waiting.close()
        server.shutdown()
        thread.join()
        server.server_close()


def heard_nothing(server: MetadataServer, heard: Queue[Announcement]) -> bool:
    """Whether the service was asked some times more, and nothing was announced."""
    before, end_s = server.asked, time.monotonic() + PATIENCE_S
    while server.asked < before + 6 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert server.asked >= before + 6, server.refused
    try:
        heard.get_nowait()
    except Empty:
        return True
    return False


def test_ec2_announces_to_who_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with hearing(monkeypatch, "aws", Ec2) as (server, heard, complaints):
        assert heard_nothing(server, heard)
        server.tokens.clear()  # they have expired
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        server.document = json.dumps({"action": "terminate", "time": at})
        found = heard.get(timeout=PATIENCE_S)
    assert found.reason == f"aws: the instance is to terminate at {at}"
    assert found.within_s is not None
    assert 90 < found.within_s <= 120
    assert complaints.empty()
    assert len(server.refused) <= 1, "but for the request under way when its token expired"


def test_compute_engine_announces_to_who_names_its_flavor(monkeypatch: pytest.MonkeyPatch) -> None:
    with hearing(monkeypatch, "gcp", ComputeEngine) as (server, heard, complaints):
        assert heard_nothing(server, heard)
        server.document = "TRUE"
        assert heard.get(timeout=PATIENCE_S) == Announcement("gcp: the machine is preempted", 30.0)
    assert (complaints.empty(), server.refused) == (True, [])


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_azure_announces_the_end_of_this_machine_not_of_others(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with hearing(monkeypatch, "azure", Azure) as (server, heard, complaints):
        assert heard_nothing(server, heard)
        at = formatdate(time.time() + 300, usegmt=True)
        server.document = azure_event("Reboot", "train_2", at)
        assert heard_nothing(server, heard)
        server.document = azure_event(kind, "train_1", at)
        assert heard_nothing(server, heard), "another machine of the scale set"
        server.document = azure_event(kind, "train_2", at)
        found = heard.get(timeout=PATIENCE_S)
    assert found.reason == f"azure: {kind} of train_2"
    assert found.within_s is not None
    assert 270 < found.within_s <= 300
    assert (complaints.empty(), server.refused) == (True, [])


def test_an_azure_event_that_has_begun_has_no_time_and_counts_as_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hearing(monkeypatch, "azure", Azure) as (server, heard, _):
        server.document = azure_event("Preempt", "TRAIN_2", "")
        assert heard.get(timeout=PATIENCE_S) == Announcement("azure: Preempt of TRAIN_2", 30.0)
