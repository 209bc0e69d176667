"""What travels at an agent's liveness address: one question and one answer, each with a proof of the job's token. Pure.

    asker                                     agent
      elaunch-standing/1 CHALLENGE PROOF   ->
                                          <-  elaunch-standing/1 PROOF {"kind": "Standing", ...}     and it hangs up

Between machines that is inside TLS, where both sides have shown a certificate of the job (`security.contexts`).
Anybody can reach that address, and anybody may have taken it since its agent ended. So the agent tells nothing to who
does not know the token, and what is said there counts only with a proof, which is HMAC-SHA256 (RFC 2104). Its key is
derived from the token and the address that was asked, so an agent answers for no other address. The challenge is
random and new for each question, so an answer that was overheard is of no use later.
"""

from __future__ import annotations

import hmac
import re
import secrets

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.rules.founding import Standing

HEAD = b"elaunch-standing/1 "
ANSWER_BYTES = 1 << 20
"""At most so many bytes are read of an answer."""

_HEX = 32  # digits, of 128 bits
_QUESTION = re.compile(HEAD + rb"([0-9a-f]{%d}) ([0-9a-f]{%d})\n" % (_HEX, _HEX))
QUESTION_BYTES = len(HEAD) + 2 * _HEX + 2
"""A question has exactly so many bytes."""


def new_challenge() -> bytes:
    """Returns 128 random bits, in hex."""
    return secrets.token_hex(_HEX // 2).encode()


def question_line(token: str, address: str, challenge: bytes) -> bytes:
    """Returns the question of one who knows the job's token to the agent at an address."""
    return b"%s%s %s\n" % (HEAD, challenge, _proof(token, address, b"question", challenge))


def read_question(line: bytes, token: str, address: str) -> bytes:
    """Returns the challenge of a question to the agent at this address.

    Raises:
        ProtocolError: it is no question, or not of one who knows the token and has asked this address.
    """
    found = _QUESTION.fullmatch(line)
    if found is None:
        raise ProtocolError("not a question of an agent")
    if not token or not hmac.compare_digest(found[2], _proof(token, address, b"question", found[1])):
        raise ProtocolError("it does not know the token of this job, or asks for another address")
    return found[1]


def answer_line(token: str, address: str, challenge: bytes, standing: Standing) -> bytes:
    """Returns the answer of the agent at this address to a question with this challenge."""
    body = to_json(standing)
    return b"%s%s %s\n" % (HEAD, _proof(token, address, b"answer", challenge, body), body)


def read_answer(line: bytes, token: str, address: str, challenge: bytes) -> Standing:
    """Returns what the agent at an address has answered to a question with this challenge.

    Raises:
        ProtocolError: it has no proof that it is of this job, lives at that address, and was asked just now; or it is
            of another version.
    """
    proof, body = line[len(HEAD) : len(HEAD) + _HEX], line[len(HEAD) + _HEX + 1 : -1]
    expected = _proof(token, address, b"answer", challenge, body)
    if not token or not hmac.compare_digest(b"%s%s %s\n" % (HEAD, expected, body), line):
        raise ProtocolError(f"no proof of the job's token: {bytes(proof)!r}")
    return from_json(Standing, body)


def is_cut_off(line: bytes) -> bool:
    """Returns whether these bytes may be the beginning of an answer whose end has not come."""
    return len(line) < ANSWER_BYTES and not line.endswith(b"\n") and HEAD.startswith(line[: len(HEAD)])


def _proof(token: str, address: str, what: bytes, challenge: bytes, body: bytes = b"") -> bytes:
    key = hmac.digest(token.encode(), b"elaunch standing, " + address.encode(errors="surrogateescape"), "sha256")
    return hmac.digest(key, b"%s %s %s" % (what, challenge, body), "sha256").hex()[:_HEX].encode()
