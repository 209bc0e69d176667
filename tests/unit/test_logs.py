"""Where workers' output goes, and the lines of it that the launcher shows."""

from __future__ import annotations

import io
import os
import re
import select
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elaunch.agent.output import tee as tee_module
from elaunch.agent.output.logs import LogFolders, LogSettings, WorkerLogs, parse_filters, parse_mask, parse_ranks
from elaunch.agent.output.tee import MAX_LINE_BYTES, LineSplitter, Tee, line_prefix
from elaunch.errors import LaunchError, UsageError
from tests.helpers import wait_until

SOON_S = 20.0


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, masks", [("0", 0), ("3", 3), ("0:1,1:2", {0: 1, 1: 2}), ("12:3", {12: 3})])
def test_a_mask_is_a_number_for_all_or_one_for_each_local_rank(text: str, masks: object) -> None:
    assert parse_mask("--tee", text) == masks


@pytest.mark.parametrize("text", ["", "4", "-1", "3\n", "0:4", "0:1,", "0:1, 1:2", "a:1", "0=1", "stdout"])
def test_anything_else_is_no_mask(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--tee={text}: expected 0 (none), 1 (stdout)")):
        parse_mask("--tee", text)


def test_local_ranks_are_numbers_separated_by_commas() -> None:
    assert parse_ranks("--local-ranks-filter", "0,2, 2") == frozenset({0, 2})
    assert parse_ranks("--local-ranks-filter", "") is None
    with pytest.raises(UsageError, match="--local-ranks-filter=0,a: expected local ranks separated by commas"):
        parse_ranks("--local-ranks-filter", "0,a")


@pytest.mark.parametrize(
    "text, filters",
    [("a,b", ("a", "b")), ("a,,b,c", ("a,b", "c")), (",,", (",",)), ("", ()), ("a,", ("a",)), (" a b", (" a b",))],
)
def test_filters_are_texts_separated_by_commas_and_two_commas_are_one(text: str, filters: tuple[str, ...]) -> None:
    assert parse_filters(text) == filters


# -- settings ---------------------------------------------------------------------------------------------------------


def test_default_settings_redirect_nothing() -> None:
    assert not LogSettings().redirects_something()
    assert not LogSettings(redirects={0: 0}, tee={}).redirects_something()
    assert not LogSettings(log_dir=os.devnull, redirects=3, tee=3).redirects_something()


def test_only_a_tee_needs_files_to_be_followed() -> None:
    assert LogSettings(tee={1: 2}).tees_something()
    assert LogSettings(tee={1: 2}).redirects_something()
    for one in (LogSettings(redirects=3), LogSettings(local_ranks_filter=frozenset({0}))):
        assert one.redirects_something()
        assert not one.tees_something()


@pytest.mark.parametrize(
    "template, prefix",
    [
        (None, "[trainer1]:"),
        ("", "[trainer1]:"),
        ("${role_name}/${rank} ${local_rank}@${node} ", "trainer/5 1@n0 "),
        ("$$ ${unknown} $", "$ ${unknown} $"),
    ],
)
def test_the_prefix_is_torchruns_or_the_template(template: str | None, prefix: str) -> None:
    assert line_prefix(LogSettings(role="trainer", prefix_template=template), 1, 5, "n0") == prefix


# -- folders ----------------------------------------------------------------------------------------------------------


def files_of(logs: WorkerLogs, base: Path) -> tuple[str | None, ...]:
    """Paths relative to the run's folder, which is checked to be one below `base`."""
    paths = (logs.stdout, logs.stderr, logs.error_file, logs.filtered_stdout, logs.filtered_stderr)
    return tuple(
        str(Path(*Path(path).relative_to(base).parts[1:])) if path and path != os.devnull else path for path in paths
    )


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    folders = LogFolders(LogSettings(log_dir=str(tmp_path / "logs"), redirects=3), 2)
    assert list(tmp_path.iterdir()) == []
    folders.worker(0, 1)
    (run,) = (tmp_path / "logs").iterdir()
    assert [str(path.relative_to(run)) for path in sorted(run.rglob("*"))] == ["attempt_0", "attempt_0/1"]


def test_files_stand_in_the_folder_of_run_attempt_and_local_rank(tmp_path: Path) -> None:
    folders = LogFolders(LogSettings(log_dir=str(tmp_path), redirects={0: 1}, tee={1: 2}, run_id="job/7"), 2)
    first, second = folders.worker(3, 0), folders.worker(3, 1)
    assert files_of(first, tmp_path) == ("attempt_3/0/stdout.log", None, "attempt_3/0/error.json", None, None)
    assert files_of(second, tmp_path) == (None, "attempt_3/1/stderr.log", "attempt_3/1/error.json", None, None)
    assert (first.tee_stdout, first.tee_stderr, second.tee_stdout, second.tee_stderr) == (False, False, False, True)
    (run,) = tmp_path.iterdir()
    assert run.name.startswith("job_7_")


def test_without_a_log_dir_a_fresh_folder_is_made_and_the_workers_keep_the_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = LogFolders(LogSettings(run_id="job"), 1).worker(0, 0)
    assert (logs.stdout, logs.stderr) == (None, None)
    (base,) = tmp_path.iterdir()
    assert base.name.startswith("torchelastic_")
    assert files_of(logs, base)[2] == "attempt_0/0/error.json"


def test_runs_in_one_log_dir_have_folders_of_their_own(tmp_path: Path) -> None:
    one = LogSettings(log_dir=str(tmp_path))
    assert LogFolders(one, 1).worker(0, 0).error_file != LogFolders(one, 1).worker(0, 0).error_file


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error_file = LogFolders(LogSettings(log_dir="logs"), 1).worker(0, 0).error_file
    assert error_file is not None
    assert error_file.startswith(f"{tmp_path}/logs/")


def test_logs_of_earlier_attempts_and_of_the_same_one_stay(tmp_path: Path) -> None:
    folders = LogFolders(LogSettings(log_dir=str(tmp_path), redirects=1), 1)
    first = folders.worker(0, 0).stdout
    assert first is not None
    Path(first).write_text("before\n")
    folders.worker(1, 0)
    assert folders.worker(0, 0).stdout == first
    assert Path(first).read_text() == "before\n"


def test_a_replacement_has_an_error_file_of_its_own(tmp_path: Path) -> None:
    folders = LogFolders(LogSettings(log_dir=str(tmp_path)), 2)
    starts = [(0, 0), (0, 0), (0, 1), (0, 0), (1, 0)]
    names = [files_of(folders.worker(*start), tmp_path)[2] for start in starts]
    assert names == [
        "attempt_0/0/error.json",
        "attempt_0/0/error.1.json",
        "attempt_0/1/error.json",
        "attempt_0/0/error.2.json",
        "attempt_1/0/error.json",
    ]


def test_ranks_that_the_filter_does_not_list_write_to_files_only(tmp_path: Path) -> None:
    chosen = LogSettings(log_dir=str(tmp_path), redirects=1, tee={1: 1}, local_ranks_filter=frozenset({0}))
    folders = LogFolders(chosen, 2)
    shown, hidden = folders.worker(0, 0), folders.worker(0, 1)
    assert files_of(shown, tmp_path)[:2] == ("attempt_0/0/stdout.log", None)
    assert files_of(hidden, tmp_path)[:2] == ("attempt_0/1/stdout.log", os.devnull)
    assert not hidden.tee_stdout


def test_with_dev_null_as_log_dir_there_are_no_files() -> None:
    chosen = LogSettings(log_dir=os.devnull, redirects=3, tee=3, duplicate_stdout_filters=("a",))
    assert LogFolders(chosen, 1).worker(0, 0) == WorkerLogs(None, None, None)
    hidden = LogSettings(log_dir=os.devnull, local_ranks_filter=frozenset({1}))
    assert LogFolders(hidden, 1).worker(0, 0) == WorkerLogs(os.devnull, os.devnull, None)


def test_files_of_filtered_lines_exist_for_each_attempt_as_soon_as_a_filter_is_given(tmp_path: Path) -> None:
    logs = LogFolders(LogSettings(log_dir=str(tmp_path), duplicate_stderr_filters=("x",)), 1).worker(2, 0)
    assert files_of(logs, tmp_path)[3:] == (None, "attempt_2/filtered_stderr.log")
    assert logs.filtered_stderr is not None
    assert Path(logs.filtered_stderr).read_bytes() == b""


def test_a_log_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LaunchError, match=re.escape(f"--log-dir={file}: cannot make the log folders: {file}: ")):
        LogFolders(LogSettings(log_dir=str(file)), 1).worker(0, 0)


MASKS = st.integers(0, 3) | st.dictionaries(st.integers(0, 3), st.integers(0, 3))
RANKS = st.none() | st.frozensets(st.integers(0, 3))


def torch_says(chosen: LogSettings, size: int) -> list[tuple[object, ...]]:
    """The same as `ours`, from torchrun's own class."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

    def masks(value: Any) -> Any:
        return Std(value) if isinstance(value, int) else {rank: Std(mask) for rank, mask in value.items()}

    ranks = None if chosen.local_ranks_filter is None else set(chosen.local_ranks_filter)
    specs = DefaultLogsSpecs(chosen.log_dir, masks(chosen.redirects), masks(chosen.tee), ranks)
    environments: dict[int, dict[str, str]] = {rank: {"TORCHELASTIC_RUN_ID": "job"} for rank in range(size)}
    found = specs.reify(environments)
    return [
        (
            found.stdouts[rank] or None,
            found.stderrs[rank] or None,
            found.error_files[rank],
            rank in found.tee_stdouts,
            rank in found.tee_stderrs,
        )
        for rank in range(size)
    ]


@settings(max_examples=60, deadline=None)
@given(redirects=MASKS, tee=MASKS, ranks=RANKS, size=st.integers(1, 4))
def test_the_files_are_those_of_torchrun(redirects: Any, tee: Any, ranks: frozenset[int] | None, size: int) -> None:
    def below(row: tuple[object, ...], base: str) -> tuple[object, ...]:
        return tuple(
            item.removeprefix(base).split("/", 2)[2] if isinstance(item, str) and item != os.devnull else item
            for item in row
        )

    with TemporaryDirectory() as base:
        chosen = LogSettings(base, redirects, tee, ranks)
        folders = LogFolders(chosen, size)
        ours = [
            (logs.stdout, logs.stderr, logs.error_file, logs.tee_stdout, logs.tee_stderr)
            for logs in (folders.worker(0, rank) for rank in range(size))
        ]
        assert [below(row, base) for row in ours] == [below(row, base) for row in torch_says(chosen, size)]


# -- lines ------------------------------------------------------------------------------------------------------------

TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\xff\x00", b"\xc3\xa9"]), max_size=12).map(b"".join)


def lines_of(data: bytes, limit_bytes: int = MAX_LINE_BYTES) -> list[bytes]:
    """The obvious version: everything at once."""
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    if not lines[-1]:
        lines.pop()
    pieces = []
    for line in lines:
        while len(line) > limit_bytes:
            pieces.append(line[:limit_bytes])
            line = line[limit_bytes:]
        pieces.append(line)
    return pieces


@settings(deadline=None)
@given(st.lists(TEXT), st.integers(1, 6))
@example([b"a\r", b"\nb"], 1)
def test_lines_do_not_depend_on_how_the_stream_is_cut(chunks: list[bytes], limit_bytes: int) -> None:
    splitter = LineSplitter(limit_bytes)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()
    assert lines == lines_of(b"".join(chunks), limit_bytes)


def test_a_line_that_is_rewritten_is_shown_each_time() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10 %\r 20 %") == [b"", b" 10 %"]
    assert splitter.feed(b"\r") == [b" 20 %"]
    assert splitter.feed(b"\ndone\n") == [b"done"]


def test_an_endless_line_is_never_held_whole() -> None:
    splitter = LineSplitter(1000)
    came = went = 0
    for _ in range(100):
        came += 333
        went += sum(map(len, splitter.feed(b"x" * 333)))
        assert came - went <= 1000


# -- the tee ----------------------------------------------------------------------------------------------------------


class Launcher:
    """The launcher's two streams, as files, and workers that write what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TextIO] = {}

    def tee(self, chosen: LogSettings | None = None, **streams: TextIO) -> Tee:
        for name in ("stdout", "stderr"):
            if name not in streams:
                streams[name] = self._files[name] = open(self.folder / name, "w")  # noqa: SIM115
        return Tee(chosen or LogSettings(), "n0", **streams)

    def logs(self, name: str, **more: Any) -> WorkerLogs:
        out, err = (str(self.folder / f"{name}.{stream}") for stream in ("out", "err"))
        return WorkerLogs(out, err, None, tee_stdout=True, tee_stderr=True, **more)

    def shown(self, stream: str = "stdout") -> bytes:
        return (self.folder / stream).read_bytes()

    def wait_for(self, data: bytes) -> None:
        wait_until(lambda: self.shown() == data, SOON_S, lambda: f"{data!r}; shown is {self.shown()!r}")

    def close(self) -> None:
        for file in self._files.values():
            file.close()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    one = Launcher(tmp_path)
    yield one
    one.close()


def write(path: str | None, data: bytes) -> None:
    assert path is not None
    with open(path, "ab") as file:
        file.write(data)


def tee_threads() -> int:
    return sum(thread.name == "elaunch-tee" for thread in threading.enumerate())


def test_without_anything_to_show_there_is_no_thread(launcher: Launcher, tmp_path: Path) -> None:
    others = tee_threads()
    folders = LogFolders(LogSettings(log_dir=str(tmp_path / "logs"), redirects=3), 1)
    tee = launcher.tee()
    tee.follow("n0/0#0", 0, 0, folders.worker(0, 0))
    tee.ended("n0/0#0")
    assert tee_threads() <= others
    tee.close()


def test_lines_of_a_running_worker_appear_with_a_prefix_on_the_same_stream(launcher: Launcher) -> None:
    others = tee_threads()
    tee, logs = launcher.tee(LogSettings(role="trainer")), launcher.logs("a")
    tee.follow("n0/2#0", 2, 5, logs)
    assert tee_threads() == 1
    write(logs.stdout, b"one\ntw")
    launcher.wait_for(b"[trainer2]:one\n")
    write(logs.stdout, b"o\n")
    write(logs.stderr, b"oh\n")
    launcher.wait_for(b"[trainer2]:one\n[trainer2]:two\n")
    tee.close()
    assert launcher.shown("stderr") == b"[trainer2]:oh\n"
    assert tee_threads() <= others


def test_an_unfinished_last_line_is_shown_when_the_worker_has_ended(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"one\nno end")
    launcher.wait_for(b"[default0]:one\n")
    tee.ended("w")
    launcher.wait_for(b"[default0]:one\n[default0]:no end\n")
    tee.close()


def test_close_shows_what_still_came_after_a_worker_had_ended(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"one\n")
    tee.ended("w")
    launcher.wait_for(b"[default0]:one\n")
    write(logs.stdout, b"from a grandchild")
    tee.close()
    assert launcher.shown() == b"[default0]:one\n[default0]:from a grandchild\n"
    tee.close()
    assert launcher.shown() == b"[default0]:one\n[default0]:from a grandchild\n"


def test_a_worker_that_never_writes_is_no_trouble(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    tee.ended("w")
    tee.close()
    assert (launcher.shown(), launcher.shown("stderr")) == (b"", b"")


def test_a_replacement_goes_on_in_the_same_file_under_its_own_prefix(launcher: Launcher) -> None:
    tee, logs = launcher.tee(LogSettings(prefix_template="${rank}|")), launcher.logs("a")
    tee.follow("w#0", 0, 3, logs)
    write(logs.stdout, b"one\ncut")
    tee.ended("w#0")
    tee.follow("w#1", 0, 4, logs)
    write(logs.stdout, b"two\n")
    tee.close()
    assert launcher.shown() == b"3|one\n3|cut\n4|two\n"


def test_lines_that_a_child_of_the_former_worker_adds_meanwhile_are_shown_once(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tee, logs = launcher.tee(LogSettings(prefix_template="${rank}|")), launcher.logs("a")
    tee.follow("w#0", 0, 3, logs)
    write(logs.stdout, b"one\nlate\n")
    launcher.wait_for(b"3|one\n3|late\n")
    monkeypatch.setattr("elaunch.agent.output.tee._size_bytes", lambda path: len(b"one\n"))
    tee.follow("w#1", 0, 4, logs)
    monkeypatch.undo()
    write(logs.stdout, b"two\nthree\n")
    tee.close()
    assert launcher.shown() == b"3|one\n3|late\n4|two\n4|three\n"


def test_the_end_of_a_former_worker_does_not_end_its_replacement(launcher: Launcher) -> None:
    tee, logs = launcher.tee(LogSettings(prefix_template="${rank}|")), launcher.logs("a")
    tee.follow("w#0", 0, 3, logs)
    tee.follow("w#1", 0, 4, logs)
    tee.ended("w#0")
    write(logs.stdout, b"unfin")
    write(logs.stderr, b"mark\n")
    wait_until(lambda: launcher.shown("stderr"), SOON_S, "the marker on stderr")
    write(logs.stdout, b"ished\n")
    launcher.wait_for(b"4|unfinished\n")
    tee.close()


def test_a_running_worker_can_get_another_rank(launcher: Launcher) -> None:
    tee, logs = launcher.tee(LogSettings(prefix_template="${rank}|")), launcher.logs("a")
    tee.follow("w", 0, 3, logs)
    write(logs.stdout, b"one\nunfin")
    launcher.wait_for(b"3|one\n")
    tee.follow("w", 0, 2, logs)
    write(logs.stdout, b"ished\n")
    launcher.wait_for(b"3|one\n2|unfinished\n")
    tee.close()


def test_only_streams_that_are_teed_are_shown(launcher: Launcher) -> None:
    tee = launcher.tee()
    out, err = str(launcher.folder / "o"), str(launcher.folder / "e")
    tee.follow("w", 0, 0, WorkerLogs(out, err, None, tee_stderr=True))
    write(out, b"hidden\n")
    write(err, b"shown\n")
    tee.close()
    assert (launcher.shown(), launcher.shown("stderr")) == (b"", b"[default0]:shown\n")


def test_bytes_that_are_no_text_pass_unchanged(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    binary = bytes(byte for byte in range(256) if byte not in b"\r\n")
    write(logs.stdout, binary + b"\n")
    tee.close()
    assert launcher.shown() == b"[default0]:" + binary + b"\n"


def test_a_line_beyond_the_limit_is_shown_in_pieces_with_a_prefix_each(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"x" * (2 * MAX_LINE_BYTES) + b"y\nnext\n")
    tee.close()
    whole = b"[default0]:" + b"x" * MAX_LINE_BYTES + b"\n"
    assert launcher.shown() == whole + whole + b"[default0]:y\n[default0]:next\n"


def test_teed_lines_that_match_are_copied_without_colour_to_the_files_of_filtered_lines(launcher: Launcher) -> None:
    chosen = LogSettings(duplicate_stdout_filters=("loss", "é"), duplicate_stderr_filters=("error",), color=True)
    tee = launcher.tee(chosen)
    files = {f"filtered_{stream}": str(launcher.folder / f"filtered_{stream}.log") for stream in ("stdout", "stderr")}
    for local_rank in range(2):
        logs = launcher.logs(str(local_rank), **files)
        tee.follow(f"w{local_rank}", local_rank, local_rank, logs)
        write(logs.stdout, f"loss {local_rank}\nerror\ncafé\n".encode())
        write(logs.stderr, f"loss\nan error {local_rank}\n".encode())
    tee.close()
    copied = {name: sorted(Path(path).read_text().splitlines()) for name, path in files.items()}
    assert copied["filtered_stdout"] == ["[default0]:café", "[default0]:loss 0", "[default1]:café", "[default1]:loss 1"]
    assert copied["filtered_stderr"] == ["[default0]:an error 0", "[default1]:an error 1"]
    assert len(launcher.shown().splitlines()) == 6


def test_a_full_disk_ends_the_copy_of_filtered_lines_and_nothing_else(launcher: Launcher) -> None:
    tee = launcher.tee(LogSettings(duplicate_stdout_filters=("a",)))
    logs = launcher.logs("a", filtered_stdout="/dev/full")
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"a\na\n")
    tee.close()
    assert launcher.shown() == b"[default0]:a\n[default0]:a\n"
    assert launcher.shown("stderr") == b"[elaunch] /dev/full ends here: No space left on device\n"


def test_a_file_that_cannot_be_read_is_reported_once_and_the_others_are_shown(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    (launcher.folder / "a.err").mkdir()
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"one\n")
    launcher.wait_for(b"[default0]:one\n")
    tee.close()
    assert launcher.shown("stderr") == f"[elaunch] cannot show {logs.stderr} any more: Is a directory\n".encode()


def test_a_stream_whose_reader_has_gone_does_not_disturb_the_other(launcher: Launcher) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        tee, logs = launcher.tee(stdout=gone), launcher.logs("a")
        tee.follow("w", 0, 0, logs)
        write(logs.stdout, b"a\nb\n")
        write(logs.stderr, b"c\n")
        tee.close()
    assert launcher.shown("stderr") == b"[default0]:c\n"


def test_a_stream_that_does_not_block_gets_everything(launcher: Launcher) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = b"".join(b"%d\n" % number for number in range(20_000))
    with open(writer, "w") as stream, open(reader, "rb") as pipe:
        tee, logs = launcher.tee(stdout=stream), launcher.logs("a")
        write(logs.stdout, data)
        tee.follow("w", 0, 0, logs)
        shown = [pipe.readline() for _ in range(20_000)]
        tee.close()
    assert b"".join(shown) == re.sub(rb"(?m)^(?=\d)", b"[default0]:", data)


def test_each_line_is_one_write(launcher: Launcher) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.dup(theirs.fileno()), "w") as stream:
        tee, logs = launcher.tee(stdout=stream), launcher.logs("a")
        tee.follow("w", 0, 0, logs)
        write(logs.stdout, b"one\n\nthree\nfour")
        tee.close()
        writes = [ours.recv(100) for _ in range(4)]
    assert writes == [b"[default0]:one\n", b"[default0]:\n", b"[default0]:three\n", b"[default0]:four\n"]


def test_a_stream_without_a_descriptor_gets_text(launcher: Launcher) -> None:
    notebook = io.StringIO()
    tee, logs = launcher.tee(stdout=notebook), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"caf\xc3\xa9 \xff\n")
    tee.close()
    assert notebook.getvalue() == "[default0]:café \N{REPLACEMENT CHARACTER}\n"


@pytest.mark.parametrize("color, end", [(True, "\x1b[0m"), (False, "")])
def test_prefixes_are_coloured_by_local_rank_on_terminals_only(launcher: Launcher, color: bool, end: str) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        tee = launcher.tee(LogSettings(color=color), stdout=terminal)
        for local_rank in range(2):
            logs = launcher.logs(str(local_rank))
            tee.follow(f"w{local_rank}", local_rank, local_rank, logs)
            write(logs.stdout, b"one\n")
            write(logs.stderr, b"two\n")
        tee.close()
        text = ""
        while text.count("\n") < 2 and select.select([screen], [], [], SOON_S)[0]:
            text += screen.read(1000).decode()
    begins = ["", ""]
    for line in text.splitlines():
        found = re.fullmatch(r"(.*)\[default([01])]:(.*)one", line)
        assert found
        assert found[3] == end
        begins[int(found[2])] = found[1]
    assert begins == ["", ""] if not color else all(re.fullmatch(r"\x1b\[\d+m", begin) for begin in begins)
    assert not color or begins[0] != begins[1]
    assert sorted(launcher.shown("stderr").splitlines()) == [b"[default0]:two", b"[default1]:two"]


def test_a_closed_tee_can_follow_again(launcher: Launcher) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    for worker in ("w#0", "w#1"):
        tee.follow(worker, 0, 0, logs)
        write(logs.stdout, worker.encode())
        tee.close()
    assert launcher.shown() == b"[default0]:w#0\n[default0]:w#1\n"


def test_no_line_of_processes_that_write_at_full_speed_is_lost(launcher: Launcher) -> None:
    count, size = 5_000, 3
    program = f"import sys\nfor n in range({count}): sys.stdout.write(f'{{n}}\\n'); n % 7 or sys.stdout.flush()"
    tee = launcher.tee()
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    for local_rank in range(size):
        logs = launcher.logs(str(local_rank))
        assert logs.stdout is not None
        tee.follow(f"w{local_rank}", local_rank, local_rank, logs)
        with open(logs.stdout, "ab") as file:
            running.append((f"w{local_rank}", subprocess.Popen([sys.executable, "-S", "-c", program], stdout=file)))
    for worker, process in running:
        assert process.wait(SOON_S) == 0
        tee.ended(worker)
    tee.close()
    numbers: dict[str, list[int]] = defaultdict(list)
    for line in launcher.shown().decode().splitlines():
        prefix, _, number = line.partition(":")
        numbers[prefix].append(int(number))
    assert numbers == {f"[default{local_rank}]": list(range(count)) for local_rank in range(size)}


Deed = tuple[int, bytes | None]
DEEDS = st.lists(st.tuples(st.integers(0, 1), st.none() | TEXT), max_size=20)


@settings(max_examples=60, deadline=None)
@given(DEEDS, st.lists(st.booleans(), min_size=20, max_size=20))
def test_what_is_shown_is_the_lines_of_each_worker_with_its_prefix(deeds: list[Deed], seen: list[bool]) -> None:
    """Two local ranks write (bytes) or are replaced (None); where `seen` is true, the tee has met that before the next.

    Each worker has a rank of its own, which is its prefix.
    """
    with TemporaryDirectory() as folder, open(f"{folder}/stdout", "w") as out, open(f"{folder}/stderr", "w") as err:
        tee = Tee(LogSettings(prefix_template="${rank}|"), "n0", out, err)
        logs = [WorkerLogs(f"{folder}/{rank}", None, None, tee_stdout=True) for rank in range(2)]
        written: list[bytes] = [b"", b""]
        workers = [0, 1]
        for rank in workers:
            tee.follow(f"w{rank}", rank, rank, logs[rank])
        for (local_rank, data), wait in zip(deeds, seen):
            if data is None:
                tee.ended(f"w{workers[local_rank]}")
                workers[local_rank] = len(written)
                written.append(b"")
                tee.follow(f"w{workers[local_rank]}", local_rank, workers[local_rank], logs[local_rank])
            else:
                write(logs[local_rank].stdout, data)
                written[workers[local_rank]] += data
            if wait:
                wait_until(shows_all_whole_lines(f"{folder}/stdout", written), SOON_S, "the lines that are complete")
        tee.close()
        assert by_prefix(f"{folder}/stdout") == {
            rank: lines for rank, data in enumerate(written) if (lines := lines_of(data))
        }


def by_prefix(path: str) -> dict[int, list[bytes]]:
    found = defaultdict(list)
    for line in Path(path).read_bytes().split(b"\n")[:-1]:
        prefix, _, text = line.partition(b"|")
        found[int(prefix)].append(text)
    return dict(found)


def shows_all_whole_lines(path: str, written: list[bytes]) -> Callable[[], bool]:
    counts = [len(LineSplitter().feed(data)) for data in written]

    def condition() -> bool:
        found = by_prefix(path)
        return all(len(found.get(rank, [])) >= count for rank, count in enumerate(counts))

    return condition


def test_a_defect_in_one_file_ends_the_showing_of_that_one(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = launcher.logs("good"), launcher.logs("bad")
    show = tee_module._Tail._show

    def sometimes(tail: tee_module._Tail, lines: list[bytes]) -> None:
        if any(b"defect" in line for line in lines):
            raise ZeroDivisionError("a defect")
        show(tail, lines)

    monkeypatch.setattr(tee_module._Tail, "_show", sometimes)
    tee = launcher.tee()
    tee.follow("w0", 0, 0, bad)
    tee.follow("w1", 1, 1, good)
    write(bad.stdout, b"defect\n")
    wait_until(lambda: tee._tails[str(bad.stdout)]._broken, 20, "the defect")
    write(good.stdout, b"fine\n")
    launcher.wait_for(b"[default1]:fine\n")
    tee.ended("w0")
    tee.ended("w1")
    tee.close()
    assert f"cannot show {bad.stdout} any more: ZeroDivisionError: a defect" in capfd.readouterr().err


def test_a_tee_whose_thread_died_shows_all_at_the_next_request(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    deaths: list[BaseException] = []
    pump = tee_module._Tail.pump

    def dies(tail: tee_module._Tail, learn: Callable[[], None] = lambda: None) -> bool:
        if deaths:
            raise deaths.pop()
        return pump(tail, learn)

    monkeypatch.setattr(tee_module._Tail, "pump", dies)
    tee.follow("w", 0, 0, logs)
    thread = tee._thread
    assert thread is not None
    deaths.append(SystemExit(1))  # only now: `follow` asks twice, and the second request would start the next thread
    wait_until(lambda: not thread.is_alive(), 20, "the death")
    write(logs.stdout, b"one\n")
    tee.ended("w")
    launcher.wait_for(b"[default0]:one\n")
    tee.close()
    assert "thread elaunch-tee died: SystemExit: 1" in capfd.readouterr().err


def test_a_tee_whose_thread_ends_before_close_looks_at_it_is_closed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    tee.follow("w", 0, 0, logs)
    thread = tee._thread
    assert thread is not None
    write(logs.stdout, b"one\n")
    requests = tee._requests

    def is_over() -> bool:
        return not thread.is_alive()

    class Quick:
        """The thread has taken the request, and has ended, before `put` returns."""

        def put(self, request: object) -> None:
            requests.put(request)  # type: ignore[arg-type]
            wait_until(is_over, 20, "the end of the thread")

        def __getattr__(self, name: str) -> object:
            return getattr(requests, name)

    monkeypatch.setattr(tee, "_requests", Quick())
    tee.close()
    assert launcher.shown("stdout") == b"[default0]:one\n"


def test_a_tee_whose_thread_dies_while_it_is_closed_shows_all(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tee, logs = launcher.tee(), launcher.logs("a")
    deaths: list[BaseException] = [SystemExit(1)]
    drain = tee_module._Tail.drain

    def dies(tail: tee_module._Tail) -> None:
        if deaths:
            raise deaths.pop()
        drain(tail)

    monkeypatch.setattr(tee_module._Tail, "drain", dies)
    tee.follow("w", 0, 0, logs)
    write(logs.stdout, b"one\n")
    tee.close()
    assert launcher.shown("stdout") == b"[default0]:one\n"
    assert "thread elaunch-tee died: SystemExit: 1" in capfd.readouterr().err
