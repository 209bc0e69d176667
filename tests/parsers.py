"""Every way in for what others send: a parser each, with the errors that it documents, and valid inputs.

For `tests/unit/test_fuzz.py`, which tries each with some thousand mutations, and for `python -m tests.fuzz`, which
tries each with as many as one wants. `tests/data/corpus` has inputs that were told apart by what the parsers say of
them.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import re
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from elaunch import failures, wire
from elaunch.agent import notices
from elaunch.agent.tcp_store.conversation import MAGIC, VALIDATE, Conversation
from elaunch.agent.tcp_store.data import StoreData
from elaunch.agent.watch.node_check import Figures
from elaunch.checkpoints import ABOUT
from elaunch.detect import heartbeat, watchdog
from elaunch.detect.devices import parse_npu_smi
from elaunch.errors import GenerationChanged, LinkLost, ProtocolError, StateError, UsageError
from elaunch.plan.tiling import Plan
from elaunch.policy.ahead_process import Answer
from elaunch.policy.decision import Decision, History
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.estimate import StepEstimate
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.policy.sample import Overheads, Sample
from elaunch.policy.select import Candidate, Choice, SelectorSettings
from elaunch.policy.stragglers.remedies import Eviction
from elaunch.policy.transition import TransitionEstimate
from elaunch.rendezvous.cluster import connection
from elaunch.rendezvous.cluster.calls import Call, RpcError
from elaunch.rendezvous.cluster.http2 import Http2Connection
from elaunch.rendezvous.cluster.inquiry import answer_line, question_line, read_answer, read_question
from elaunch.rendezvous.cluster.messages import message
from elaunch.rendezvous.cluster.servers import EtcdServer, EtcdServers
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.conf import parse_conf, parse_endpoints
from elaunch.rendezvous.intake import read_name, read_text
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
from elaunch.rendezvous.rules.edit import GenerationEdit, edit_between
from elaunch.rendezvous.rules.founding import Absent, Founding, Standing
from elaunch.rendezvous.rules.spares import HeldSpares
from elaunch.rendezvous.status import LastRecovery, TrainingStatus, speeds_of
from elaunch.rendezvous.torchrun import read_document
from elaunch.scheduler.service.documents import (
    AgentDoc,
    AgentStage,
    GrowthDoc,
    JobProgress,
    JobSpec,
    JobStage,
    NodeRow,
    PlacementDoc,
    ScheduleDoc,
    read_agent_name,
)
from elaunch.workers.comm import wire as link_wire
from elaunch.workers.comm.link import Link
from elaunch.workers.member.notes import Notes, pack
from elaunch.workers.state import checkpoint
from elaunch.workers.state.checksums import seal, unseal
from tests import ROOT

CORPUS = ROOT / "tests" / "data" / "corpus"


@dataclass(frozen=True)
class Parser:
    """One way in: what it reads, what it may raise, and valid inputs."""

    name: str
    read: Callable[[bytes], object]
    raises: type[Exception] | tuple[type[Exception], ...]
    valid: Sequence[bytes]


class Later(Sequence[bytes]):
    """One valid input that is made when it is needed."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self._make()][index]


def slug(parser: Parser) -> str:
    """The name of its corpus."""
    return re.sub(r"[^a-z0-9]+", "-", parser.name.lower()).strip("-")


def corpus(parser: Parser) -> list[bytes]:
    """Inputs that were kept."""
    path = CORPUS / f"{slug(parser)}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()] if path.exists() else []


def link_header(data: bytes) -> object:
    return link_wire.unpack_header(data[: link_wire.HEADER_BYTES].ljust(link_wire.HEADER_BYTES, b"\0"))


def link_frames(data: bytes) -> object:
    """A link that waits for a part, whose peer sends this and goes."""
    ours, theirs = socket.socketpair()  # a million connections over TCP would take all ports
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


@cache
def saved() -> tuple[Path, bytes]:
    """A checkpoint on the disk, and its elaunch.json."""
    folder = Path(tempfile.mkdtemp(prefix="elaunch-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    part = folder / "part"
    part.mkdir()
    pieces = checkpoint.ChunkedTensor([2, 2], [(((0, 2), (0, 2)), torch.zeros(2, 2))])
    shard = checkpoint.CheckpointShard("objects", {"batch": 8}, {"model.weight": pieces}, {"rank": 0})
    checkpoint.write_shard(part, 0, shard)
    path = checkpoint.complete(part, 7, [checkpoint.notes(part, 1)[0]])
    return path, (path / ABOUT).read_bytes()


def checkpoint_file(name: str, data: bytes) -> object:
    """The checkpoint with one of its files exchanged."""
    path = saved()[0] / name
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        found = checkpoint.SavedCheckpoint(saved()[0])
        found.check("objects", {"batch": 8})
        return found.read({"model.weight": checkpoint.ChunkedTensor([2, 2], [(((0, 2), (0, 2)), torch.ones(2, 2))])})
    finally:
        path.write_bytes(before)


def about(data: bytes) -> object:
    return checkpoint_file(ABOUT, data)


def sealed_about(data: bytes) -> object:
    """elaunch.json by somebody who can make checksums."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(data)
        if isinstance(fields, dict):
            fields.pop("checksum", None)
            data = seal(fields)
    return checkpoint_file(ABOUT, data)


def conversation(data: bytes) -> object:
    """A client of the workers' store."""
    client = Conversation(StoreData(), lambda _: None)
    client.hear(data)
    return len(client.answers)


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

CONFS = [
    b"lease_ttl=3,join_timeout=60,is_host=true,store_nodes=3",
    b"user=u,password=p=q,link_timeout=5, keep_alive_interval=2,keep_alive_max_attempt=3",
    b"connect_timeout=1e3,secret_file=/dev/null,store_type=tcp,timeout=1",
]
GREETING = struct.pack("=BI", VALIDATE, MAGIC)
KEY = struct.pack("=Q", 3) + b"key"
STORE = [
    GREETING + b"\x01" + KEY + struct.pack("=Q", 2) + b"12" + b"\x04" + KEY + struct.pack("=q", 3),
    GREETING + b"\x02" + KEY * 3 + b"\x03" + KEY + b"\x05" + struct.pack("=Q", 2) + KEY * 2,
    GREETING + b"\x0e" + KEY * 2 + b"\x0f" + KEY + b"\x10" + KEY + b"\x11\x0d1234\x07\x08" + KEY,
    GREETING + b"\x06" + struct.pack("=Q", 1) + KEY + b"\x0c\x12" + KEY + struct.pack("=q", 2),
]

ETCD = message(
    "TxnResponse",
    header=message("ResponseHeader", revision=7),
    responses=[
        message(
            "ResponseOp",
            response_range=message(
                "RangeResponse", kvs=[message("KeyValue", key=b"/elaunch/job/x", value=b"1", mod_revision=6)], count=1
            ),
        )
    ],
).to_bytes()


class Nowhere:
    """A connection whose calls go nowhere."""

    def send(self, call: Call, data: bytes, is_last: bool) -> None: ...

    def cancel(self, call: Call) -> None: ...


def etcd_stream(data: bytes) -> list[bytes]:
    """What a call of etcd's interface gets out of these bytes, which come in two parts."""
    call = Call(Nowhere())
    call.take_data(data[: len(data) // 2])
    call.take_data(data[len(data) // 2 :])
    call.end(None)
    return list(call)


PROOF = link_wire._credentials("secret", 3)


def headers(data: bytes) -> object:
    """What a call of etcd makes of these headers; one a line, its name before a blank."""
    call = Call(Nowhere())
    call.take_headers([tuple(line.partition(b" ")[::2]) for line in data.split(b"\n")])
    call.finish()
    return list(call)


class Fed(Http2Connection):
    """A connection whose server says what it is given, and hangs up; one call is open."""

    def __init__(self, data: bytes) -> None:
        self._said = data
        super().__init__("127.0.0.1:1", None, "", 10.0)

    def _dial(self, deadline_s: float) -> None:
        self._socket, server = socket.socketpair()
        self._socket.setblocking(False)
        with server, self._lock:
            self._frames.initiate_connection()
            self._frames.send_headers(1, [(b":method", b"POST"), (b":path", b"/etcd")], end_stream=True)
            self.call = self._calls[1] = Call(self)
            self.call.has_said_all = True
            server.sendall(self._said[:100_000])


def http2(data: bytes) -> object:
    """Returns what the call got, or raises why it has ended; fails where the connection's thread did."""
    fed = Fed(data)
    while fed._wake_writer >= 0:  # until the thread has closed its descriptors
        time.sleep(0)
    assert fed.problem is not None
    assert "its thread has ended" not in str(fed.problem)
    return list(fed.call)


def http2_frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def told(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """What a member has told at a barrier, read as its parts are."""
    return lambda data: read(Notes({0: struct.pack("<I", len(data)) + data}).of_selectors(["a"])["a"])


HTTP2 = b"".join(
    (
        http2_frame(4, 0, 0, struct.pack(">HI", 3, 100)),  # settings
        http2_frame(1, 4, 1, b"\x88"),  # headers: status 200
        http2_frame(0, 0, 1, struct.pack(">BI", 0, len(ETCD)) + ETCD),  # data
        http2_frame(6, 0, 0, b"12345678"),  # ping
        http2_frame(1, 5, 1, b"\0\x0bgrpc-status\x010"),  # trailers
        http2_frame(7, 0, 0, bytes(8)),  # it goes
    )
)
SEAT, CHALLENGE = "10.0.0.1:4711", b"0" * 32
STANDING = Standing("a", 1, 2, "10.0.0.1:1", "b", 7, away=True, votes=True, ended=("10.0.0.2:2",))
SAMPLE = Sample(
    {(0, 2, 1): (1e-3, 2e-3, 0.0)},
    {0: 100.0},
    1e-9,
    {"b/0": (1e9, 1e-5)},
    1 << 30,
    ClockRange(1500, (1000, 1500, 1800)),
    {1: (0.5, 10.0)},
    Overheads(1e-4, 1e-5, 1e-6, 1e-3),
)
STEP = StepEstimate(0.5, 0.1, {"a/0#0": 0.4, "a/1#0": 0.4}, {"a/0#0": 1 << 20, "a/1#0": 1 << 20})
CANDIDATE = Candidate("resize", Plan.parse(PLAN.decode()), STEP, TransitionEstimate(0.1, 0.2, 0.1, 1000), 16.0)
CHOICE = Choice(
    CANDIDATE, Plan.parse(SHARES.decode()), (CANDIDATE, Candidate("reroute", rejected="too slow")), "it is fast"
)
SPEC = JobSpec(
    "run-17",
    ("--policy=auto", "train.py"),
    "/work",
    2,
    8,
    kinds=("H100",),
    rates=((2, 10.0), (4, 18.5)),
    options=("--partition=gpu",),
)
PROGRESS = JobProgress(
    JobStage.RUNNING, agents=(AgentDoc(0, "n1", 2, AgentStage.JOINED, 1.7e9),), next_number=1, step=17, started_t=1.7e9
)
SCHEDULE = ScheduleDoc(
    "suika",
    1.7e9,
    (
        PlacementDoc(
            "run-17", 0, (("n1", 2),), (GrowthDoc((("n2", 1),), 3.5, 1.7e9),), 1.7e9, 1.7e9, "grow", "it gains"
        ),
    ),
    (NodeRow("n1", 8, "H100", "r1", True),),
)
EVICTION = Eviction(("a/0#0",), True, "it is slow")
HISTORY = History(1.7e9, 2, ("b/0#1",), {"a/0": 1.5}, ("a/1",))
NODE_OF_TORCH = ["10.0.0.1", 4711, 0]
RENDEZVOUS = json.dumps(
    {
        "version": 1,
        "lease": 7,
        "ttl_s": 5.0,
        "round": 1,
        "complete": True,
        "closed": False,
        "deadline": "2026-11-20T10:11:12+00:00",
        "participants": [[*NODE_OF_TORCH, 0]],
        "wait_list": [NODE_OF_TORCH],
        "redundancy_list": [],
        "last_heartbeats": [[*NODE_OF_TORCH, "2026-11-20T10:11:12+00:00"]],
    }
).encode()


def placements(data: bytes) -> object:
    """What the scheduler's policies make of its schedule."""
    return [(one.placement, one.allocation) for one in from_json(ScheduleDoc, data).placements]


def notes(data: bytes) -> object:
    """What all members take out of the note of one."""
    packed = Notes({0: data})
    return packed.of_selectors(["a"]), packed.of_frameworks(1)


PARSERS = [
    Parser("an answer of etcd", lambda data: connection.read("Txn", data), RpcError, [ETCD]),
    Parser("HTTP/2 of etcd", http2, RpcError, [HTTP2]),
    Parser("headers of etcd", headers, RpcError, [b":status 200\ngrpc-status 0\ngrpc-message it is well%21"]),
    Parser("answers of etcd", etcd_stream, RpcError, [struct.pack(">BI", 0, len(ETCD)) + ETCD, b"\0\0\0\0\0"]),
    Parser(
        "a worker's port",
        lambda line: link_wire.read_hello(line, "secret"),
        ProtocolError,
        [link_wire.hello_line("secret", link_wire.Hello("a/0#0", "link"))],
    ),
    Parser(
        "behind the token",
        lambda line: link_wire.read_hello(PROOF + line, "secret"),
        ProtocolError,
        [b'{"from": "a/0#0", "for": "probe"}\n'],
    ),
    Parser("who answers a dial", link_wire.read_ack, ProtocolError, [link_wire.ack_line(link_wire.Ack("a/0#0", 3, 2))]),
    Parser(
        "a question to an agent",
        lambda line: read_question(line, "secret", SEAT),
        ProtocolError,
        [question_line("secret", SEAT, CHALLENGE)],
    ),
    Parser(
        "an agent's answer",
        lambda line: read_answer(line, "secret", SEAT, CHALLENGE),
        ProtocolError,
        [answer_line("secret", SEAT, CHALLENGE, STANDING)],
    ),
    Parser("the confirmation", link_wire.read_go, ProtocolError, [link_wire.go_line()]),
    Parser("header of a frame", link_header, ProtocolError, [FRAME]),
    Parser(
        "an offer", link_wire.unpack_offer, ProtocolError, [link_wire.pack_offer(link_wire.Offer(4096, 7, 8192, 1, 2))]
    ),
    Parser("frames", link_frames, (LinkLost, GenerationChanged), [FRAME]),
    Parser("agent and worker", agent_messages, ProtocolError, [wire.encode(message) for message in MESSAGES]),
    document(NodeDoc, NODE),
    document(Generation, GENERATION),
    document(GenerationEdit, edit_between(replace(GENERATION, number=6), GENERATION)),
    document(JobConfig, JobConfig(1, 3, None, "secret", (("--consistency", "bitwise"),))),
    document(JobSize, JobSize("1", 1, 3, 1.7e9)),
    document(PlanRequest, PlanRequest("1", 7, "plan", 1.7e9)),
    document(DrainRequest, DrainRequest("SIGTERM", 1.7e9)),
    document(Deadlock, Deadlock("a/0#0", 4, ("a/0#0 waits for b/0#0",))),
    document(Result, Result(True, "done")),
    document(Standing, STANDING),
    document(Founding, Founding(1, "b", ("10.0.0.1:4711",), ("a",))),
    document(Absent, Absent(("10.0.0.1:4711",))),
    document(HeldSpares, HeldSpares(("c", "d"))),
    document(
        TrainingStatus,
        TrainingStatus(7, 17, 1.7e9, 4, 2.5, 0.5, recovery=LastRecovery("a/0#0 died", 1.7e9, 0.5, (("agree", 0.1),))),
    ),
    Parser("a name in etcd", read_name, ProtocolError, [b"node-1", b"a"]),
    Parser("a text in etcd", read_text, (), [b"10.0.0.1:4711,10.0.0.2:4711"]),
    Parser("speeds in a profile", text_of(speeds_of), (), [PROFILE.to_json().encode()]),
    document(JobSpec, SPEC),
    Parser(
        "a job that is submitted",
        lambda data: from_json(JobSpec, data).check(),
        (ProtocolError, UsageError),
        [to_json(SPEC)],
    ),
    document(JobProgress, PROGRESS),
    document(ScheduleDoc, SCHEDULE),
    Parser("placements", placements, ProtocolError, [to_json(SCHEDULE)]),
    Parser("name of a scheduled agent", text_of(read_agent_name), (), [b"run-17.0.3"]),
    Parser("torch's rendezvous", lambda data: read_document(data, "key"), RendezvousStateError, [RENDEZVOUS]),
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
    Parser(
        "what a member has measured", told(Sample.from_json), ProtocolError, [json.dumps(SAMPLE.to_json()).encode()]
    ),
    Parser("why members leave", told(Eviction.from_json), ProtocolError, [json.dumps(EVICTION.to_json()).encode()]),
    Parser("changes of a job", told(History.from_json), ProtocolError, [json.dumps(asdict(HISTORY)).encode()]),
    Parser("notes of a member", notes, ProtocolError, [pack({"pace": 0.5, "closer": True}, b"note")]),
    Parser("the decision", Decision.from_bytes, ProtocolError, [Decision.of(CHOICE).to_bytes()]),
    Parser("a choice", text_of(Choice.from_json), ProtocolError, [CHOICE.to_json().encode()]),
    Parser(
        "settings of the choice",
        text_of(SelectorSettings.from_json),
        ProtocolError,
        [SelectorSettings().to_json().encode()],
    ),
    Parser("the planning process", Answer.from_json, ProtocolError, [Answer(1, 2, None, "no").to_json().encode()]),
    Parser("rdzv-conf", text_of(parse_conf), UsageError, CONFS),
    Parser("rdzv-endpoint", text_of(lambda text: parse_endpoints(text, "c10d")), UsageError, [b"a:1,[::1]:2,c"]),
    document(EtcdServers, EtcdServers((EtcdServer("a", "10.0.0.1:1", "10.0.0.1:2", True),))),
    Parser("a store's client", conversation, ProtocolError, STORE),
    Parser("a sealed text", unseal, ValueError, [seal({"a": 1})]),
    Parser(
        "about a checkpoint",
        lambda data: checkpoint_file(ABOUT, data),
        StateError,
        Later(lambda: saved()[1]),
    ),
    Parser("about a checkpoint, sealed", sealed_about, StateError, Later(lambda: saved()[1])),
    Parser(
        "metadata of a checkpoint",
        lambda data: checkpoint_file(".metadata", data),
        StateError,
        Later(lambda: (saved()[0] / ".metadata").read_bytes()),
    ),
    Parser("an address", text_of(split_address), ValueError, [b"10.0.0.1:4711", b"[::1]:80"]),
]
