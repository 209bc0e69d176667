"""Certificates made, and checked, by a process that ends when it has done so.

`cryptography` brings an OpenSSL of its own, which takes 12 MiB for as long as a process lives. An agent needs it for an
instant once a day. Where no process can be started, or it fails, the agent does the work itself.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from elaunch.rendezvous.security.authority import Authority, Pem, check_own
from elaunch.threads import with_elaunch

LIMIT_S = 5.0
"""How long the process may take, since the agent waits for it; a tenth of a second is usual."""

Wanted = tuple[str, Collection[str]]
"""The name of a node, and the names and addresses under which it is a server, as `Authority.issue` takes them."""


def issue(secret: bytes, job: str, wanted: Sequence[Wanted], now_s: float) -> list[Pem]:
    """Returns certificates of a job's authority, in the order in which they are wanted.

    Args:
        secret: of the job, or empty, as `Authority` takes it.
        job: its id.
        wanted: what each is to be for.
        now_s: the time, in seconds since 1970.
    """
    with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError):
        request = {"secret": _text(secret), "job": job, "wanted": [(name, list(hosts)) for name, hosts in wanted]}
        answer = _ask({**request, "now_s": now_s})
        authority = _bytes(answer["authority"])
        issued = [(_bytes(one), _bytes(key)) for one, key in answer["issued"]]
        return [Pem(authority, one, key, is_of_job=True) for one, key in issued]
    return _issue(secret, job, wanted, now_s)


def check(pem: Pem, where: str, now_s: float) -> None:
    """Checks a certificate of the user's, as `check_own` does.

    Args:
        pem: what its files hold.
        where: the files, for people.
        now_s: the time, in seconds since 1970.

    Raises:
        UsageError: as `check_own` says.
    """
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        _ask({"pem": [_text(part) for part in (pem.authority, pem.certificate, pem.key)], "now_s": now_s})
        return
    check_own(pem, where, _time(now_s))


def main() -> None:
    """Reads a request, does what it asks for, and writes the answer."""
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    if "pem" in request:
        authority, certificate, key = map(_bytes, request["pem"])
        check_own(Pem(authority, certificate, key), "", _time(request["now_s"]))
    else:
        wanted = [(name, hosts) for name, hosts in request["wanted"]]
        made = _issue(_bytes(request["secret"]), request["job"], wanted, request["now_s"])
        answer["authority"] = _text(made[0].authority)
        answer["issued"] = [(_text(one.certificate), _text(one.key)) for one in made]
    print(json.dumps(answer))


def _issue(secret: bytes, job: str, wanted: Sequence[Wanted], now_s: float) -> list[Pem]:
    authority = Authority(secret, job)
    return [authority.issue(name, hosts, _time(now_s)) for name, hosts in wanted]


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """Asks a process; the request has a secret, so it goes where nobody else can read it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "elaunch.rendezvous.security.issuing"],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=with_elaunch(os.environ),
        timeout=LIMIT_S,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _time(now_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(now_s, datetime.UTC)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


if __name__ == "__main__":
    main()
