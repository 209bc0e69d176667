"""The secret that a user has for all jobs."""

from __future__ import annotations

import io
import os
import stat
import threading
from pathlib import Path

import pytest

from elaunch.cli.run import parse
from elaunch.errors import UsageError
from elaunch.rendezvous.security import users
from elaunch.rendezvous.security.secret import NodeFiles, read_security

MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 0:41 / /home rw,relatime shared:20 - autofs systemd-1 rw,fd=53
41 40 0:50 /export /home rw,relatime shared:21 - nfs4 server:/export rw,vers=4.2
42 41 0:51 / /home/local\\040disk rw - xfs /dev/sdb rw
nonsense
43 22 0:52 / /homework rw - lustre
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user whose home folder many machines share."""
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        monkeypatch.setattr(users, "_SHARED", {users.file_system_of(str(tmp_path), mounts)})
    return {"HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/root/.config", "ext4"),
        ("/home/ann/.config", "nfs4"),
        ("/home", "nfs4"),
        ("/home/local disk/ann", "xfs"),
        ("/homework/ann", "lustre"),
        ("/homestead", "ext4"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_last_mount_above_it(path: str, kind: str) -> None:
    assert users.file_system_of(path, io.StringIO(MOUNTS)) == kind


def test_a_home_that_many_machines_share_gets_a_secret_once(home: dict[str, str]) -> None:
    said: list[str] = []
    found = users.find(home, said.append)
    path = Path(home["HOME"]) / ".config/elaunch/secret"
    assert len(found) == 64
    assert path.read_bytes().strip() == found
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name] == os.listdir(path.parent)
    assert said == [
        f"made {path}, a secret by which the nodes of this user's jobs know each other; all nodes need the same"
    ]
    assert found.decode() not in said[0]
    assert users.find(home, said.append) == users.find(home) == found
    assert len(said) == 1


def test_nodes_that_make_it_at_once_have_the_same(home: dict[str, str]) -> None:
    barrier, found, said = threading.Barrier(8), list[bytes](), list[str]()

    def node() -> None:
        barrier.wait()
        found.append(users.find(home, said.append))

    threads = [threading.Thread(target=node) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(said) == 1


def test_none_is_made_by_a_command_nor_on_a_disk_of_this_machine(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert users.find(home) == b""
    monkeypatch.setattr(users, "_SHARED", {"nfs4"})
    assert users.find(home, pytest.fail) == b""
    assert users.find({}, pytest.fail) == b""
    assert os.listdir(home["HOME"]) == []


def test_a_home_that_cannot_be_written_has_none(home: dict[str, str]) -> None:
    (Path(home["HOME"]) / ".config").write_text("a file where the folder would be")
    assert users.find(home, pytest.fail) == b""


def test_a_secret_that_others_may_read_is_told_and_that_of_another_user_does_not_count(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(home["HOME"]) / "settings"
    home |= {"XDG_CONFIG_HOME": str(folder)}
    secret = users.find(home, lambda line: None)
    path = folder / "elaunch/secret"
    path.chmod(0o640)
    with pytest.raises(UsageError, match=f"{path}, has mode 0640, so others may use it: chmod 600"):
        users.find(home)
    path.chmod(0o600)
    assert users.find(home) == secret
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert users.find(home) == b""


def test_it_counts_where_no_other_one_is_given(tmp_path: Path) -> None:
    own, given = b"of the user, and long enough", b"of the job, and long enough as well"
    path = tmp_path / "secret"
    path.write_bytes(given)
    path.chmod(0o600)

    def read(file: str = "", secret: str = "", links: str = "auto") -> tuple[bytes, bool]:
        environment = {"ELAUNCH_SECRET": secret} if secret else {}
        found = read_security(NodeFiles(file), environment, links, lambda: own)
        return found.secret, found.is_users

    assert read() == read(links="on") == (own, True)
    assert read(str(path)) == read(secret=given.decode()) == (given, False)
    assert read("none") == read(links="off") == (b"", False)
    with pytest.raises(UsageError, match=r"the secret in ~/\.config/elaunch/secret has 5 bytes"):
        read_security(NodeFiles(), {}, "auto", lambda: b"short")


@pytest.mark.parametrize(
    ("flags", "is_used", "guards"),
    [
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node1.example:29400"], True, True),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:1,10.0.0.2:1,10.0.0.3:1"], True, True),
        (["--master-addr=10.0.0.1", "--nnodes=2", "--node-rank=1"], True, True),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400", "--link-encryption=off"], False, False),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400", "--rdzv-conf=secret_file=none"], False, True),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400"], False, False),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "--link-encryption=on"], False, True),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=node1:2379"], False, False),
        (["--standalone"], False, False),
    ],
)
def test_it_is_for_jobs_of_several_machines_that_start_their_etcd_themselves(
    flags: list[str], is_used: bool, guards: bool, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ELAUNCH_SECRET", "ELAUNCH_SECRET_FILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home["HOME"])
    rendezvous = parse([*flags, "train.py"]).rendezvous
    assert rendezvous.security.is_users is is_used
    assert bool(rendezvous.security.secret) is is_used
    assert rendezvous.guards_store is guards
    assert (Path(home["HOME"]) / ".config/elaunch/secret").exists() is is_used
