"""Whatever others send, each parser gives a value or its documented error: 100,000 hostile inputs, the same each time.

An input is a valid message of some format, mutated: cut, repeated, with pieces that trip parsers put in. It goes to the
parser of its format, so that the mutations meet the code behind the first check.
"""

from __future__ import annotations

import json
import select
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elaunch import failures, wire
from elaunch.agent import notices
from elaunch.agent.watch.node_check import Figures
from elaunch.detect import heartbeat, watchdog
from elaunch.detect.devices import parse_npu_smi
from elaunch.errors import GenerationChanged, LinkLost, ProtocolError
from elaunch.plan.tiling import Plan
from elaunch.policy.ahead_process import Answer
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import (
    BrokenLink,
    Cut,
    Deadlock,
    DrainRequest,
    Generation,
    GenerationStage,
    JobConfig,
    JobSize,
    NodeDoc,
    NodeProgress,
    NodeWorker,
    PeerFaults,
    PlanRequest,
    Result,
    Streak,
    Worker,
    WorkerState,
    split_address,
)
from elaunch.rendezvous.rules.edit import edit_between
from elaunch.workers.comm import wire as link_wire
from elaunch.workers.comm.link import Link
from tests.helpers import scaled
from tests.hostile import KINDS, PIECES, Mutation, hostile, mutated
from tests.unit.comm_crew import connect_all, crew
from tests.unit.test_comm_transport import say_to, swap

INPUTS = scaled(10_000, 100_000)
A_BATCH = 50


@dataclass(frozen=True)
class Parser:
    """One way in: what it reads, what it may raise, and valid inputs."""

    name: str
    read: Callable[[bytes], object]
    raises: type[Exception] | tuple[type[Exception], ...]
    valid: Sequence[bytes]


def link_header(data: bytes) -> object:
    return link_wire.unpack_header(data[: link_wire.HEADER_BYTES].ljust(link_wire.HEADER_BYTES, b"\0"))


def link_frames(data: bytes) -> object:
    """A link that waits for a part, whose peer sends this and goes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        link = Link("b/0#0", ours)
        try:
            link.post_receive(3, 7, 0, bytearray())
            theirs.sendall(data[:100_000])
            theirs.shutdown(socket.SHUT_WR)
            poll = select.poll()
            while wanted := link.wants():
                poll.register(ours, wanted)
                link.advance(poll.poll()[0][1])
        finally:
            link.finish()
            link.close()
    return None


def agent_messages(data: bytes) -> object:
    return [wire.decode(line) for line in wire.LineBuffer().feed(data)]


def failure_record(data: bytes) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        found = failures.read_failure(rank=0, local_rank=0, pid=1, exitcode=1, error_file=file.name, t=0.0)
        return failures.summary(file.name), failures.report("job", [found])


def shown(data: bytes) -> object:
    return heartbeat.parse(data.ljust(heartbeat.FILE_BYTES, b"\0")[: heartbeat.FILE_BYTES], data[-8:].rjust(8, b"\0"))


def answered(ask: Callable[[], Any]) -> Callable[[bytes], object]:
    """What a metadata service answers."""

    def read(data: bytes) -> object:
        text = data.decode("utf-8", "surrogateescape")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(notices, "_get", lambda *_: text)
            return ask()

    return read


def text_of(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


def document(kind: type[Any], *examples: Any) -> Parser:
    return Parser(kind.__name__, lambda data: from_json(kind, data), ProtocolError, [to_json(one) for one in examples])


STREAK = Streak(3, 2, 4, (BrokenLink("a/0#0", "b/0#0"),), ("b/0#0",))
NODE = NodeDoc(
    "a",
    "10.0.0.1",
    2,
    (NodeWorker("a/0#0", 0, WorkerState.MEMBER, "10.0.0.1:4711"), NodeWorker("a/1#3", 1, WorkerState.READY)),
    cause="worker a/1#2 was killed by SIGKILL",
    cause_t=1.7e9,
    port=4000,
    progress=NodeProgress(generation=7),
    peers=PeerFaults(cut=(Cut("b", "10.0.0.2"),)),
)
GENERATION = Generation(
    7,
    GenerationStage.TRAIN,
    (Worker("a/0#0", "a", 0, "10.0.0.1:4711"), Worker("b/0#0", "b", 0, "10.0.0.2:4712")),
    cause="start",
    cause_t=1.7e9,
    aborts_step_before=7,
    streak=STREAK,
)
MESSAGES: list[wire.Message] = [
    wire.Attach("a/0#0", 4711),
    wire.Ready("10.0.0.1:4711", True),
    wire.Joined(7),
    wire.Report("step", {"step": 3, "loss": 0.5, "digest": "00ff"}),
    wire.Unreachable(7, "b/0#0", refused=False),
    wire.Evict(True, "it is slow"),
    wire.Announce(to_json(GENERATION).decode()),
    wire.AnnounceEdit(to_json(edit_between(replace(GENERATION, number=6, workers=()), GENERATION)).decode()),
]
FRAME = link_wire.pack_header(link_wire.Header(link_wire.LAST, 0, 3, 7, 5)) + b"12345"
RECORD = {"message": {"message": "boom", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1700000000"}}}
NPU = b"""| 0  910B  | OK   | 98.2   45    0 / 0  |
| 0        | 0000:C1:00.0  | 0    0 / 0   3000 / 65536 |
"""
TIMER = b'{"version":1,"pid":7,"scope_id":"s","expiration_time":1.7e9,"signal":9}'
AWS = b'{"action":"stop","time":"2026-11-20T10:11:12Z"}'
AZURE = b'{"Events":[{"EventType":"Preempt","Resources":["a"]}]}'
PLAN = b"""plan layers 4 batch 8 micro-batch 2 zero interleaved
layers 0:4 samples 0:2 2:8 workers a/0#0,a/1#0
costs 2*3 1 1
"""
SHARES = b"plan layers 1 batch 7 micro-batch 2 zero interleaved\nlayers 0:1 samples 0:6/2 6:7 workers a/0#0\nidle b"
LAYER = LayerProfile(1e-3, 2e-3, 100, 200, 300, 400)
PROFILE = Profile("net", (LAYER,) * 3, 1, 1e9, 1e-5, workers={"a/0": WorkerProfile(speed=0.9)})

PARSERS = [
    Parser(
        "a worker's port",
        lambda line: link_wire.read_hello(line, "secret"),
        ProtocolError,
        [link_wire.hello_line("secret", link_wire.Hello("a/0#0", "link"))],
    ),
    Parser(
        "behind the token",
        lambda line: link_wire.read_hello(b"elaunch/6 secret " + line, "secret"),
        ProtocolError,
        [b'{"from": "a/0#0", "for": "probe"}\n'],
    ),
    Parser("who answers a dial", link_wire.read_ack, ProtocolError, [link_wire.ack_line("a/0#0", 3)]),
    Parser("the confirmation", link_wire.read_go, ProtocolError, [link_wire.go_line()]),
    Parser("header of a frame", link_header, ProtocolError, [FRAME]),
    Parser("frames", link_frames, (LinkLost, GenerationChanged), [FRAME]),
    Parser("agent and worker", agent_messages, ProtocolError, [wire.encode(message) for message in MESSAGES]),
    document(NodeDoc, NODE),
    document(Generation, GENERATION),
    document(JobConfig, JobConfig(1, 3, None, "secret", (("--consistency", "bitwise"),))),
    document(JobSize, JobSize("1", 1, 3, 1.7e9)),
    document(PlanRequest, PlanRequest("1", 7, "plan", 1.7e9)),
    document(DrainRequest, DrainRequest("SIGTERM", 1.7e9)),
    document(Deadlock, Deadlock("a/0#0", 4, ("a/0#0 waits for b/0#0",))),
    document(Result, Result(True, "done")),
    Parser("figures", Figures.from_json, ProtocolError, [Figures({"matmul cpu": 1.5}).to_json().encode()]),
    Parser("a timer", watchdog.parse, ValueError, [TIMER]),
    Parser("a heartbeat", shown, (), [bytes(heartbeat.FILE_BYTES)]),
    Parser("an error file", failure_record, (), [json.dumps(RECORD).encode()]),
    Parser("npu-smi", text_of(parse_npu_smi), (), [NPU]),
    Parser("AWS", answered(notices._aws), (OSError, ValueError), [AWS]),
    Parser("GCP", answered(notices._gcp), (OSError, ValueError), [b"TRUE"]),
    Parser("Azure", answered(notices._azure), (OSError, ValueError), [AZURE]),
    Parser("a plan", text_of(Plan.parse), ValueError, [PLAN, SHARES]),
    Parser("a profile", text_of(Profile.from_json), ProtocolError, [PROFILE.to_json().encode()]),
    Parser("the planning process", Answer.from_json, ProtocolError, [Answer(1, 2, None, "no").to_json().encode()]),
    Parser("an address", text_of(split_address), ValueError, [b"10.0.0.1:4711", b"[::1]:80"]),
]

MUTATION = st.tuples(st.sampled_from(KINDS), st.floats(0, 1), st.sampled_from(PIECES))


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_valid_input_is_read(parser: Parser) -> None:
    for data in parser.valid:
        parser.read(data)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_hostile_input_gives_a_value_or_the_documented_error(parser: Parser) -> None:
    inputs = st.tuples(st.sampled_from(parser.valid), st.lists(MUTATION, min_size=1, max_size=3))

    found: list[str] = []

    @settings(
        max_examples=-(-INPUTS // len(PARSERS) // A_BATCH),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(inputs, min_size=A_BATCH, max_size=A_BATCH))
    def run(batch: list[tuple[bytes, list[Mutation]]]) -> None:
        for valid, mutations in batch:
            data = mutated(valid, mutations)
            try:
                parser.read(data)
            except parser.raises:
                pass
            except Exception as error:
                found.append(f"{type(error).__name__}: {str(error)[:200]} for {data[:300]!r}")

    run()
    assert not found, "\n".join(found[:5])


HELLO = link_wire.hello_line("secret", link_wire.Hello("x/9#9", "link"))


def test_the_thread_that_makes_links_outlives_whatever_is_said_to_it(capfd: pytest.CaptureFixture[str]) -> None:
    with crew(2) as (a, b):
        for line in hostile(1, [HELLO, HELLO + link_wire.go_line() + FRAME, FRAME], scaled(1000, 3000)):
            say_to(a.address, line, patience_s=0.02)  # some are links: nobody ends these
        a.retain(())
        connect_all([a, b], generation=2)
        swap(a, b, 2, 1)
    assert capfd.readouterr().err == ""
