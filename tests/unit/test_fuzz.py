"""Whatever others send, each parser gives a value or its documented error: 100,000 hostile inputs, the same each time.

An input is a valid message of some format, mutated: cut, repeated, with pieces that trip parsers put in. It goes to the
parser of its format, so that the mutations meet the code behind the first check.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elaunch.workers.comm import wire as link_wire
from tests.helpers import scaled
from tests.hostile import KINDS, PIECES, Mutation, hostile, mutated
from tests.parsers import FRAME, PARSERS, Parser, corpus
from tests.unit.comm_crew import connect_all, crew
from tests.unit.test_comm_transport import say_to, swap

INPUTS = scaled(10_000, 100_000)
A_BATCH = 50


def raised(parser: Parser) -> tuple[type[Exception], ...]:
    return parser.raises if isinstance(parser.raises, tuple) else (parser.raises,)


MUTATION = st.tuples(st.sampled_from(KINDS), st.floats(0, 1), st.sampled_from(PIECES))


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_valid_input_is_read(parser: Parser) -> None:
    for data in parser.valid:
        parser.read(data)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_what_was_once_sent_gives_a_value_or_the_documented_error_again(parser: Parser) -> None:
    inputs = corpus(parser)
    assert inputs
    for data in inputs:
        with contextlib.suppress(*raised(parser)):
            parser.read(data)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_hostile_input_gives_a_value_or_the_documented_error(parser: Parser) -> None:
    inputs = st.tuples(st.sampled_from(list(parser.valid)), st.lists(MUTATION, min_size=1, max_size=3))

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


FOUND = {
    "headers of etcd": b"grpc-status " + b"9" * 5000,
    "name of a scheduled agent": b"run-17." + b"9" * 5000 + b".3",
    "a choice": b'{"reason":' + b"[" * 4000,
    "settings of the choice": b'{"degrees":' + b"[" * 4000,
    "the decision": b'{"event":' + b"[" * 4000,
    "notes of a member": b"\x05\0",
    "what a member has measured": b'{"turns": [[0, 1, 1, "1", 0, 0]]}',
    "why members leave": b'{"workers": "a/0#0", "replace": true}',
    "changes of a job": b'{"since_t": []}',
}
"""What once raised something else, and is too long or too rare for the inputs that are kept or tried each time."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_gives_a_value_or_the_documented_error(name: str) -> None:
    (parser,) = (one for one in PARSERS if one.name == name)
    with contextlib.suppress(*raised(parser)):
        parser.read(FOUND[name])


HELLO = link_wire.hello_line("secret", link_wire.Hello("x/9#9", "link"))


def test_the_thread_that_makes_links_outlives_whatever_is_said_to_it(capfd: pytest.CaptureFixture[str]) -> None:
    with crew(2) as (a, b):
        for line in hostile(1, [HELLO, HELLO + link_wire.go_line() + FRAME, FRAME], scaled(1000, 3000)):
            say_to(a.address, line, patience_s=0.02)  # some are links: nobody ends these
        a.retain(())
        connect_all([a, b], generation=2)
        swap(a, b, 2, 1)
    assert capfd.readouterr().err == ""
