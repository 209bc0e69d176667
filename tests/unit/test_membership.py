"""The documents of a job: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import MOST_BYTES, VERSION, from_json, to_json
from elaunch.rendezvous.intake import with_order
from elaunch.rendezvous.membership import (
    BrokenLink,
    Departure,
    Generation,
    GenerationStage,
    JobConfig,
    Master,
    NodeDoc,
    NodeProgress,
    NodeWorker,
    PeerFaults,
    PlanRequest,
    RequestedPlan,
    Restarts,
    Result,
    Streak,
    Worker,
    WorkerState,
    WorkerSummary,
    worker_id,
)
from tests.helpers import scaled

repeatable = settings(deadline=None, derandomize=True)

names = st.text(max_size=8)
numbers = st.integers(0, 10**6)
ports = st.integers(0, 65535)
places = st.integers(0, 4095)
times = st.floats(0, 2e9)
workers = st.builds(Worker, names, names, places, names)
broken = st.lists(st.builds(BrokenLink, names, names)).map(tuple)
documents: dict[type[Any], st.SearchStrategy[Any]] = {
    JobConfig: st.builds(JobConfig, numbers, numbers, st.none() | numbers, names),
    NodeDoc: st.builds(
        NodeDoc,
        node=names,
        host=names,
        slots=st.integers(1, 4096),
        workers=st.lists(st.builds(NodeWorker, names, places, st.sampled_from(WorkerState), names)).map(tuple),
        cause=names,
        cause_t=times,
        port=ports,
        summary=st.builds(WorkerSummary, elastic=st.booleans(), finished=st.booleans(), failed=names),
        progress=st.builds(NodeProgress, numbers, numbers, names, numbers),
        peers=st.builds(PeerFaults, st.lists(names).map(tuple), broken, numbers),
        departure=st.builds(Departure, st.booleans()),
    ),
    Generation: st.builds(
        Generation,
        number=numbers,
        stage=st.sampled_from(GenerationStage),
        workers=st.lists(workers).map(tuple),
        attempt=numbers,
        restarts=st.builds(Restarts, numbers, st.none() | numbers, numbers),
        cause=names,
        cause_t=times,
        aborts_step_before=numbers,
        begun=st.booleans(),
        hold=st.booleans(),
        leaving=st.lists(names).map(tuple),
        master=st.builds(Master, names, ports),
        requested_plan=st.builds(RequestedPlan, names, names),
        streak=st.builds(Streak, numbers, numbers, numbers, broken, st.lists(names).map(tuple)),
    ),
    PlanRequest: st.builds(PlanRequest, names, numbers, names, times),
    Result: st.builds(Result, st.booleans(), names),
}
GENERATION = Generation(
    3, GenerationStage.TRAIN, (Worker("a/0#0", "a", 0, "h:1"), Worker("b/0#0", "b", 0), Worker("a/1#2", "a", 1))
)


def changed(document: Any, **changes: Any) -> bytes:
    return json.dumps({**json.loads(to_json(document)), **changes}).encode()


@pytest.mark.parametrize("kind", documents)
@repeatable
@given(data=st.data())
def test_a_document_is_read_as_it_was_written(kind: type[Any], data: st.DataObject) -> None:
    document = data.draw(documents[kind])
    read = from_json(kind, to_json(document))
    assert read == document
    assert type(read) is kind
    assert hash(read) == hash(document)


def test_what_is_read_has_the_types_that_were_written() -> None:
    read = from_json(Generation, to_json(GENERATION))
    assert read.stage is GenerationStage.TRAIN
    assert isinstance(read.workers[0], Worker)
    assert isinstance(read.cause_t, float)


def test_the_order_of_a_node_comes_from_the_store_and_is_not_written() -> None:
    doc = with_order(NodeDoc("a", "h", 1), 17)
    assert doc.order == 17
    assert b"order" not in to_json(doc)
    assert from_json(NodeDoc, to_json(doc)).order == 0


@pytest.mark.parametrize("kind", documents)
@repeatable
@given(data=st.binary(max_size=60))
def test_arbitrary_bytes_are_no_document(kind: type[Any], data: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"expected a {kind.__name__} document"):
        from_json(kind, data)


@st.composite
def mutated(draw: st.DrawFn, sources: list[bytes]) -> bytes:
    """A valid document in which some bytes are changed, cut out, or repeated, or a value is another one."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 40)))
        piece = st.binary(max_size=9) | st.sampled_from(HOSTILE) | st.just(bytes(data[begin:end]) * 2)
        data[begin:end] = draw(piece)
    return bytes(data)


HOSTILE = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 900 + b"]" * 900,
    b"9" * 5000,
    b"-" + b"9" * 400,
    b"1e999",
    b"NaN",
    b"-Infinity",
    b'"\\ud800"',
    b'"\xed\xa0\x80"',
    b"\xff\xfe",
    b"\0",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"0.5",
    b"-1",
    b"9223372036854775807",
]


@pytest.mark.parametrize("kind", documents)
@settings(deadline=None, derandomize=True, max_examples=scaled(100, 400))
@given(data=st.data())
def test_whatever_comes_is_a_valid_document_or_a_protocol_error(kind: type[Any], data: st.DataObject) -> None:
    example = data.draw(documents[kind])
    found = data.draw(mutated([to_json(example)]))
    try:
        read = from_json(kind, found)
    except ProtocolError:
        return
    assert from_json(kind, to_json(read)) == read, "what was read can be written"


@pytest.mark.parametrize("kind", documents)
@pytest.mark.parametrize("value", HOSTILE)
def test_no_field_takes_what_is_hostile(kind: type[Any], value: bytes) -> None:
    for name in (name for name in kind.__dataclass_fields__ if name != "succeeded"):
        data = b'{"kind":"%s","v":%d,"%s":%s}' % (kind.__name__.encode(), VERSION, name.encode(), value)
        with pytest.raises(ProtocolError):  # also as others are missing
            from_json(kind, data)


def test_a_document_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(ProtocolError, match="at most 4194304 are expected"):
        from_json(Result, b" " * (MOST_BYTES + 1))


def test_a_document_is_utf_8_and_no_other_encoding() -> None:
    with pytest.raises(ProtocolError, match="expected a Result document"):
        from_json(Result, to_json(Result(True)).decode().encode("utf-16"))


def test_half_of_a_surrogate_pair_is_written_as_a_question_mark() -> None:
    result = Result(False, "no file \udcff.txt")
    assert from_json(Result, to_json(result)) == Result(False, "no file ?.txt")


@pytest.mark.parametrize("data", [b"null", b"3", b'"x"', b"[]", b"{}", b'{"kind":"Result"}', b"[" * 100_000])
def test_json_without_kind_and_version_is_no_document(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a Result document"):
        from_json(Result, data)


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"expected JobConfig version {VERSION}, found Result version {VERSION}"):
        from_json(JobConfig, to_json(Result(True)))


@pytest.mark.parametrize("version", [0, VERSION + 1, str(VERSION), None])
def test_a_document_of_another_version_is_refused_with_advice(version: Any) -> None:
    with pytest.raises(ProtocolError, match="all nodes of a job must run the same version of elaunch"):
        from_json(Result, changed(Result(True), v=version))


@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (Result(True), {"succeeded": 1}),
        (Result(True), {"succeeded": None}),
        (Result(True), {"message": None}),
        (Result(True), {"extra": 1}),
        (JobConfig(1, 2, None), {"min_nodes": True}),
        (JobConfig(1, 2, None), {"min_nodes": 1.5}),
        (JobConfig(1, 2, None), {"max_restarts": "3"}),
        (GENERATION, {"stage": "sleep"}),
        (GENERATION, {"stage": []}),
        (GENERATION, {"workers": {}}),
        (GENERATION, {"workers": ["a/0#0"]}),
        (GENERATION, {"workers": [{"id": "a/0#0", "node": "a"}]}),
        (GENERATION, {"workers": [{"id": "a/0#0", "node": "a", "slot": 0, "rank": 0}]}),
        (GENERATION, {"leaving": "a/0#0"}),
        (GENERATION, {"leaving": [1]}),
        (GENERATION, {"cause_t": "0"}),
        (GENERATION, {"cause_t": True}),
        (NodeDoc("a", "h", 1), {"workers": [{"id": "a/0#0", "slot": 0, "state": "idle"}]}),
        (NodeDoc("a", "h", 1), {"slots": 0}),
        (NodeDoc("a", "h", 1), {"slots": -1}),
        (NodeDoc("a", "h", 1), {"slots": 10**9}),
        (NodeDoc("a", "h", 1), {"port": 65536}),
        (NodeDoc("a", "h", 1), {"progress": {"generation": 2**63 - 1}}),
        (NodeDoc("a", "h", 1), {"progress": {"saved": 2**63}}),
        (NodeDoc("a", "h", 1), {"progress": {"attempt": -1}}),
        (NodeDoc("a", "h", 1), {"progress": {"step": 1}}),
        (NodeDoc("a", "h", 1), {"progress": 1}),
        (NodeDoc("a", "h", 1), {"peers": None}),
        (NodeDoc("a", "h", 1), {"peers": {"reset_generation": 2**49}}),
        (NodeDoc("a", "h", 1), {"departure": {"joined": -1}}),
        (NodeDoc("a", "h", 1), {"summary": {"elastic": 1}}),
        (NodeDoc("a", "h", 1), {"cause_t": 10**400}),
        (GENERATION, {"generation": -1}),
        (GENERATION, {"number": -1}),
        (GENERATION, {"master": {"port": 65536}}),
        (GENERATION, {"restarts": 1}),
        (GENERATION, {"restarts": {"saved": 2**63}}),
        (GENERATION, {"requested_plan": {"text": 1}}),
        (GENERATION, {"roles": [["a"]]}),
        (GENERATION, {"roles": [["a", "b", "c"]]}),
        (Result(True), {"message": "\ud800"}),
    ],
)
def test_unknown_missing_and_mistyped_fields_are_refused(document: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=f"damaged {type(document).__name__} document"):
        from_json(type(document), changed(document, **changes))


def test_a_required_field_may_not_be_left_out() -> None:
    body = json.loads(to_json(Result(True)))
    del body["succeeded"]
    with pytest.raises(ProtocolError, match=r"damaged Result document.*succeeded"):
        from_json(Result, json.dumps(body).encode())


def test_a_rank_is_a_position_in_the_generation() -> None:
    assert GENERATION.ids == ("a/0#0", "b/0#0", "a/1#2")
    assert [GENERATION.ranks[worker] for worker in GENERATION.ids] == [0, 1, 2]
    assert GENERATION.nodes == ("a", "b")


def test_the_identity_of_a_worker_names_node_slot_and_incarnation() -> None:
    assert worker_id("a", 1, 2) == "a/1#2"
