"""Messages between agent and worker: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch import wire
from elaunch.errors import ProtocolError
from elaunch.wire import (
    Abandoned,
    Announce,
    AnnounceEdit,
    Attach,
    Evict,
    Finished,
    Joined,
    Leaving,
    LineBuffer,
    Logged,
    Message,
    Profiled,
    Progress,
    Ready,
    Report,
    Saved,
    Unreachable,
    Welcome,
    decode,
    encode,
)
from tests.helpers import scaled

KINDS: tuple[type[Message], ...] = (
    Attach,
    Welcome,
    Evict,
    Ready,
    Joined,
    Progress,
    Saved,
    Profiled,
    Report,
    Unreachable,
    Finished,
    Leaving,
    Abandoned,
    Announce,
    AnnounceEdit,
    Logged,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)

repeatable = settings(deadline=None, derandomize=True)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(),
    "int": st.integers(0, wire.MOST - 1),
    "bool": st.booleans(),
    "dict[str, Any]": st.dictionaries(st.text(), JSON, max_size=4),
}


def messages_of(kind: type[Message]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: VALUES[str(f.type)] for name, f in kind.__dataclass_fields__.items()})


messages = st.one_of([messages_of(kind) for kind in KINDS])


def body_of(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(message))
    return body


def line(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_every_kind_of_message_is_listed_here() -> None:
    assert set(KINDS) == set(wire._KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
@repeatable
@given(data=st.data())
def test_a_message_is_read_as_it_was_written(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    assert decode(encode(message).rstrip(b"\n")) == message


@repeatable
@given(messages)
def test_a_message_is_one_line(message: Message) -> None:
    assert encode(message).count(b"\n") == 1
    assert encode(message).endswith(b"\n")


@repeatable
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@repeatable
@given(JSON)
def test_arbitrary_json_is_no_message(value: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(line(value))


@repeatable
@given(messages, st.data())
def test_a_cut_line_is_no_message(message: Message, data: st.DataObject) -> None:
    whole = encode(message).rstrip(b"\n")
    with pytest.raises(ProtocolError, match="not a message"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("version", [0, 2, "3", None, [3]])
def test_another_version_is_refused_and_both_versions_are_named(version: Any) -> None:
    with pytest.raises(ProtocolError, match=f"expected {wire.VERSION}: worker and agent run different elaunch"):
        decode(line({**body_of(Ready("a:1")), "v": version}))


@pytest.mark.parametrize("kind", ["Unknown", "", None, 3, [], {}, "Message"])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    with pytest.raises(ProtocolError, match="unknown message"):
        decode(line({**body_of(Ready("a:1")), "kind": kind}))


@pytest.mark.parametrize("missing", ["v", "kind", "body"])
def test_a_message_without_one_of_its_parts_is_refused(missing: str) -> None:
    body = body_of(Ready("a:1"))
    del body[missing]
    with pytest.raises(ProtocolError, match="not a message"):
        decode(line(body))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"generation": 1, "peer": "a"},
        {"generation": 1, "peer": "a", "refused": True, "more": 1},
        {"generation": "1", "peer": "a", "refused": True},
        {"generation": 1.0, "peer": "a", "refused": True},
        {"generation": True, "peer": "a", "refused": True},
        {"generation": 1, "peer": None, "refused": True},
        {"generation": 1, "peer": "a", "refused": 1},
        {"generation": 1, "peer": ["a"], "refused": True},
    ],
)
def test_missing_unknown_and_mistyped_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="damaged message Unreachable"):
        decode(line({**body_of(Unreachable(1, "a", True)), "body": fields}))


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(line({**body_of(Finished()), "body": body}))


def test_json_nested_too_deep_to_read_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(b"[" * 100_000)


@repeatable
@given(st.lists(st.binary(max_size=20).filter(lambda text: b"\n" not in text)), st.data())
def test_lines_come_out_whole_wherever_the_stream_is_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(text + b"\n" for text in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    buffer, found = LineBuffer(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)]):
        found += buffer.feed(stream[start:end])
    assert found == lines


def test_the_beginning_of_a_line_waits_for_its_end() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"ab") == []
    assert buffer.feed(b"c\nd") == [b"abc"]
    assert buffer.feed(b"\n") == [b"d"]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_refused(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 100)
    assert LineBuffer().feed(b"x" * 100 + b"\n") == [b"x" * 100]
    buffer = LineBuffer()
    buffer.feed(b"x" * 60)
    with pytest.raises(ProtocolError, match="a line of more than 100 bytes"):
        buffer.feed(b"x" * 41 + end)


LINE = encode(Unreachable(3, "a/1#0", True))


@settings(deadline=None, derandomize=True, max_examples=scaled(100, 300))
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.tuples(st.integers(0, len(LINE)), st.integers(0, len(LINE)), st.binary(max_size=4)).map(
                lambda cut: LINE[: cut[0]] + cut[2] + LINE[cut[1] :]
            ),
            st.sampled_from(
                [
                    LINE,
                    LINE * 3,
                    b"[" * 100_000 + b"\n",
                    b'{"v":' + b"[" * 900 + b"]" * 900 + b',"kind":"Ready","body":{}}\n',
                    b'{"v":1,"kind":' + b"[" * 900 + b"]" * 900 + b',"body":{}}\n',
                    LINE.replace(b"3", b"9" * 5000),
                    LINE.replace(b"3", b"9" * 4000),
                    LINE.replace(b"3", b"-1"),
                    LINE.replace(b"3", b"NaN"),
                    LINE.replace(b"a/1#0", b"\\ud800"),
                    LINE.replace(b"a/1#0", b"\xed\xa0\x80"),
                ]
            ),
        ),
        max_size=6,
    )
)
def test_whatever_comes_is_a_message_or_a_protocol_error(chunks: list[bytes]) -> None:
    buffer = LineBuffer(1 << 17)
    found: list[Message] = []
    problem = ""
    try:
        for chunk in chunks:
            found += [decode(line) for line in buffer.feed(chunk)]
    except ProtocolError as error:
        problem = str(error)
    assert len(problem) < 1000
    for message in found:
        assert decode(encode(message).rstrip(b"\n")) == message


def test_a_buffer_may_take_shorter_lines_until_it_is_told_otherwise() -> None:
    buffer = LineBuffer(10)
    assert buffer.feed(b"x" * 10 + b"\n" + b"y" * 8) == [b"x" * 10]
    buffer.limit_bytes = None
    assert buffer.feed(b"y" * 8 + b"\n") == [b"y" * 16]
    buffer.limit_bytes = 10
    with pytest.raises(ProtocolError, match="more than 10 bytes"):
        buffer.feed(b"x" * 11)


@pytest.mark.parametrize("number", [-1, wire.MOST, 10**4000])
def test_numbers_that_no_worker_has_are_refused(number: int) -> None:
    with pytest.raises(ProtocolError, match="damaged message Saved"):
        decode(line({**body_of(Saved(1)), "body": {"step": number}}))
