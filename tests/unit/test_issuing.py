"""Certificates that another process makes: as this one would make them, and an agent loads nothing that makes them."""

from __future__ import annotations

import datetime
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.x509 import DNSName, SubjectAlternativeName, load_pem_x509_certificate

from elaunch.errors import UsageError
from elaunch.rendezvous.security import issuing
from elaunch.rendezvous.security.authority import Authority, Pem
from elaunch.rendezvous.security.issuing import check, issue

SECRET = b"0123456789abcdef\x00\xff0123456789abcdef"
NOW = datetime.datetime(2026, 11, 26, 12, tzinfo=datetime.UTC)
NOW_S = NOW.timestamp()
LIMIT_S = 60

AN_AGENT = """
import sys
from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.security.secret import NodeFiles, SecuritySettings

files = NodeFiles(node_ca=sys.argv[1], node_cert=sys.argv[2], node_key=sys.argv[3]) if sys.argv[1:] else NodeFiles()
identity = NodeIdentity(SecuritySettings(files=files), "job", "node", encrypts=True, guards_store=True)
identity.make({now}, ("127.0.0.1",))
identity.make_of_token("a token", {now})
assert identity.pem and identity.store_pem
identity.remove()
print(sorted(name for name in sys.modules if name.partition(".")[0] == "cryptography"))
"""


def check_chain(pem: Pem, secret: bytes, job: str) -> None:
    """Checks that another node's authority has issued it."""
    ours = load_pem_x509_certificate(Authority(secret, job).certificate)
    theirs = load_pem_x509_certificate(pem.authority)
    assert theirs.public_key() == ours.public_key()
    load_pem_x509_certificate(pem.certificate).verify_directly_issued_by(ours)


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_they_are_of_the_jobs_authority(secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuing, "_issue", lambda *_: pytest.fail("this process makes them"))
    one, other = issue(secret, "job é", [("node ü", ("192.0.2.7", "node1")), ("node ü", ())], NOW_S)
    for pem in (one, other):
        check_chain(pem, secret, "job é")
        assert pem.is_of_job
    assert one.key != other.key
    names = load_pem_x509_certificate(one.certificate).extensions.get_extension_for_class(SubjectAlternativeName)
    assert names.value.get_values_for_type(DNSName) == ["node1"]
    assert load_pem_x509_certificate(other.certificate).not_valid_before_utc < NOW


def test_an_agent_loads_nothing_of_what_makes_or_checks_them(tmp_path: Path) -> None:
    program = AN_AGENT.format(now=datetime.datetime.now(datetime.UTC).timestamp())
    own = Authority(SECRET, "job").issue("own", (), datetime.datetime.now(datetime.UTC))
    files = []
    for name, content in (("ca", own.authority), ("cert", own.certificate), ("key", own.key)):
        (tmp_path / name).write_bytes(content)
        files.append(str(tmp_path / name))
    for arguments in ([], files):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("program", ["", "/nowhere/python", "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho no answer\n"])
def test_where_no_process_does_it_this_one_does(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program.startswith("#!"):
        path = tmp_path / "python"
        path.write_text(program)
        path.chmod(stat.S_IRWXU)
        program = str(path)
    monkeypatch.setattr(sys, "executable", program)
    (pem,) = issue(SECRET, "job", [("node", ())], NOW_S)
    check_chain(pem, SECRET, "job")
    check(pem, "here", NOW_S)


def test_what_is_wrong_with_the_users_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = issue(SECRET, "job", [("node", ()), ("node", ())], NOW_S)
    with pytest.raises(UsageError, match=r"^here: the key is not that of the certificate$"):
        check(Pem(one.authority, one.certificate, other.key), "here", NOW_S)
    with pytest.raises(UsageError, match=r"^here: the certificate ended at 2026-12-04 12:00 UTC; renew it$"):
        check(one, "here", NOW_S + 30 * 86_400)
    monkeypatch.setattr(issuing, "check_own", lambda *_: pytest.fail("this process checks it"))
    check(one, "here", NOW_S)


def test_the_secret_is_on_no_command_line_and_in_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = subprocess.run

    def look(command: list[str], *, env: dict[str, str], **options: object) -> object:
        seen.append(json.dumps([command, {key: text for key, text in env.items() if os.environ.get(key) != text}]))
        return run(command, env=env, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", look)
    issue(b"a secret of some length", "job", [("node", ())], NOW_S)
    assert len(seen) == 1
    assert "secret of some length" not in seen[0]
    assert "YSBzZWNyZXQ" not in seen[0]
