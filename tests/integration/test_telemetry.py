"""A job as its monitoring sees it, while workers train, die and are replaced."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers import ROOT, Spawner, wait_until
from tests.jobs.watch import START_S, Node, elaunch, wait_for

TRAIN = ROOT / "tests" / "jobs" / "train.py"
LIMIT_S = 60.0

IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"

pytestmark = pytest.mark.timeout(300)


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does, by OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TakeSpans)
        self.requests: list[ExportTraceServiceRequest] = []


class TakeSpans(BaseHTTPRequestHandler):
    """One connection to the collector."""

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Collector)
        self.server.requests.append(request)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def metrics(node: Node) -> dict[tuple[str, str], float]:
    """What Prometheus would read: values by name, and by the values of the labels beside those of all."""
    (address,) = re.findall(r"\] metrics: (http://\S+)$", node.agent.text(), re.MULTILINE)
    with urllib.request.urlopen(address, timeout=LIMIT_S) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {
            (
                one.name,
                ",".join(value for name, value in one.labels.items() if name not in ("rdzv_id", "node")),
            ): one.value
            for family in families
            for one in family.samples
        }


def check_pages(spawn: Spawner, node: Node) -> None:
    """The agent's page shows the recovery from its events, and that of `elaunch ui` from the job's documents."""
    (own,) = re.findall(r"\] ui: (http://127\.0\.0\.1:\d+/)$", node.agent.text(), re.MULTILINE)
    server = spawn.elaunch("ui", name="ui")
    (other,) = re.findall(r"http://\S+", server.wait_for_text("(Ctrl-C ends it)", LIMIT_S))
    for url in (own, other):
        page = wait_until(partial(page_of, url, 3), LIMIT_S, f"three members at {url}")
        assert page["recoveries"] == 1, url
        (repair,) = [one["recovery"] for one in page["changes"] if (one["recovery"] or {}).get("interrupted")]
        assert repair["cause"] == "worker node0/1#0 was killed by SIGKILL"
        assert page["step"] > 20
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
            assert b"page.js" in reply.read()
    server.signal(signal.SIGINT)
    assert server.wait(LIMIT_S) == 0, server.tail()


def page_of(url: str, members: int) -> dict[str, Any] | None:
    with urllib.request.urlopen(f"{url}job.json", timeout=LIMIT_S) as reply:
        found: dict[str, Any] = json.load(reply)
    return found if found["members"] == members else None


@pytest.fixture(autouse=True)
def a_machine_without_other_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))


def test_metrics_top_and_spans_follow_a_job_whose_worker_is_killed(
    spawn: Spawner, tmp_path: Path, collector: Collector
) -> None:
    script = (TRAIN, "--steps", "100000", "--sleep", "0.01", "--die", "1:20:reduce")
    flags: tuple[str, ...] = ("--standalone", "--nproc-per-node=3", "--slow-policy=report", "--rdzv-id=run-17")
    sends = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
    }
    node = elaunch(
        spawn, tmp_path, *flags, "--metrics-port=127.0.0.1:0", "--ui-port=0", script=script, environment=sends
    )
    wait_for(node, lambda: len(node.events("transition")) >= 3, START_S, "the replacement to join")
    wait_until(lambda: metrics(node)["elaunch_node_workers", "member"] == 3, LIMIT_S, "three members")
    before, found, after = len(node.events("step")), metrics(node), len(node.events("step"))
    assert before <= found["elaunch_steps_total", ""] <= after + 1
    recovery = next(event for event in node.events("transition") if event["interrupted"])
    assert found["elaunch_recovery_duration_seconds_count", "true"] == 1
    assert found["elaunch_recovery_duration_seconds_sum", "true"] == recovery["total_s"]
    assert found["elaunch_recovery_phase_duration_seconds_sum", "true,resume"] == recovery["phases"]["resume_s"]
    assert found["elaunch_members", ""] == 3
    assert found["elaunch_generation", ""] >= 4
    assert found["elaunch_training", ""] == found["elaunch_etcd_up", ""] == 1
    assert found["elaunch_worker_exits_total", "SIGKILL"] == 1
    assert found["elaunch_state_moved_bytes_total", "links"] > 0
    assert 0 < found["elaunch_training_seconds_total", ""] < found["elaunch_step_duration_seconds_sum", ""]
    assert found["elaunch_etcd_request_duration_seconds_count", "lease_keep_alive"] >= 1

    once = spawn.elaunch("ctl", "top", "--once", env={"COLUMNS": "120"}, name="once")
    assert once.wait(LIMIT_S) == 0, once.tail()
    frame = once.text()
    assert re.search(r"job run-17 at 127\.0\.0\.1:\d+: trains", frame)
    assert "worker node0/1#0 was killed by SIGKILL" in frame
    assert re.search(r"■ resume [\d.]+ m?s", frame)
    assert re.search(r"^ *\d +node0/1#1 +member ", frame, re.MULTILINE)
    # In a terminal it is drawn again as steps commit, until the job's etcd has gone.
    looks = spawn([sys.executable, "-c", IN_TERMINAL, sys.executable, "-m", "elaunch", "ctl", "top"], name="top")
    wait_until(lambda: len(set(re.findall(r"step ([\d,]+)", looks.text()))) >= 3, LIMIT_S, looks.tail)
    check_pages(spawn, node)
    node.agent.signal(signal.SIGINT)
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    looks.wait(LIMIT_S)
    assert "Traceback" not in looks.text()

    # What has not been sent goes out when the agent ends.
    sent = [resource for request in collector.requests for resource in request.resource_spans]
    named = {one.key: one.value.string_value for resource in sent for one in resource.resource.attributes}
    assert (named["service.name"], named["elaunch.rdzv_id"], named["elaunch.node"]) == ("elaunch", "run-17", "node0")
    spans = [span for resource in sent for scope in resource.scope_spans for span in scope.spans]
    (whole,) = [span for span in spans if span.name == "recovery"]
    assert (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9 == pytest.approx(recovery["total_s"], abs=1e-5)
    phases = {span.name for span in spans if span.parent_span_id == whole.span_id}
    assert phases == {name.removesuffix("_s") for name, took_s in recovery["phases"].items() if took_s > 0}


def test_without_the_package_the_flag_is_refused_in_a_line_and_nothing_else_needs_it(
    spawn: Spawner, tmp_path: Path
) -> None:
    for name in ("prometheus_client", "opentelemetry"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    flags = ("-m", "elaunch", "--standalone", "--no-python")
    lacking = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    refused = spawn([sys.executable, *flags, "--metrics-port=0", "true"], env=lacking)
    assert refused.wait(LIMIT_S) == 1, refused.tail()
    assert refused.text().splitlines() == [
        "elaunch: error: --metrics-port needs the package prometheus-client: pip install 'elaunch[metrics]'"
    ]
    asks = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    plain = spawn([sys.executable, *flags, "true"], env=lacking | asks)
    assert plain.wait(LIMIT_S) == 0, plain.tail()
    (line,) = plain.text().splitlines()
    assert line.endswith("OTEL_* asks for spans, which need packages that are not there: pip install 'elaunch[otel]'")
