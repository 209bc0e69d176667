"""Where the workers' output goes: what the flags say, and the folders and files of a run. `tee` shows the files.

    worker ──stdout, stderr──> the launcher's streams                 (neither redirected nor teed)
                          └──> stdout.log, stderr.log ──Tee──> the launcher's streams, each line with its prefix
                                                         └───> filtered_stdout.log, filtered_stderr.log

    <log_dir>/<run_id>_<random>/attempt_<N>/filtered_{stdout,stderr}.log
    <log_dir>/<run_id>_<random>/attempt_<N>/<local rank>/{stdout.log,stderr.log,error.json,error.<k>.json}

Files are appended to and never deleted: a worker that replaces another within an attempt goes on in the same files,
and has an error file of its own. With `--log-dir /dev/null` there are no files, and nothing is redirected to any.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elaunch.errors import LaunchError, UsageError

OUT, ERR = 1, 2  # the bits of a mask
Masks = int | Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What the flags say about logs.

    Attributes:
        log_dir: the base of the log folders; None for a fresh one under the temporary directory, /dev/null for none.
        redirects: the streams (`OUT`, `ERR`) that go to a file, for all workers or by local rank.
        tee: the streams that go to a file and, with a prefix on each line, to the launcher's own as well.
        local_ranks_filter: the only local ranks whose output appears on the launcher's streams; None or empty for all.
        duplicate_stdout_filters: a teed line of stdout that contains one of them goes to filtered_stdout.log too.
        duplicate_stderr_filters: likewise for stderr and filtered_stderr.log.
        role: begins the prefix.
        run_id: begins the name of the run's folder.
        prefix_template: of the prefix, with ${role_name}, ${rank}, ${local_rank} and ${node}; None or empty for
            `[<role><local rank>]:`.
        color: whether prefixes are coloured by local rank, on streams that are a terminal.
    """

    log_dir: str | None = None
    redirects: Masks = 0
    tee: Masks = 0
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    role: str = "default"
    run_id: str = "none"
    prefix_template: str | None = None
    color: bool = False

    def redirects_something(self) -> bool:
        """Returns whether the output of any worker goes elsewhere than to the launcher's streams."""
        return bool(self.local_ranks_filter) or (
            self.log_dir != os.devnull and (_any(self.redirects) or self.tees_something())
        )

    def tees_something(self) -> bool:
        """Returns whether any worker's file may have to be followed; without that, a `Tee` starts no thread."""
        return self.log_dir != os.devnull and _any(self.tee)


Told = Callable[[], dict[int, dict[str, str]]]
"""Returns torchrun's variables for each local rank of a node, for plug-ins that go by them."""


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """Where one worker's output goes. Whoever opens a file opens it with O_APPEND | O_CREAT and never truncates it.

    Attributes:
        stdout, stderr: the file (or /dev/null) that the stream is redirected to; None: it is the launcher's.
        error_file: for TORCHELASTIC_ERROR_FILE; None where there are no files: the variable is then empty.
        tee_stdout, tee_stderr: whether the launcher shows the lines of the file.
        filtered_stdout, filtered_stderr: the file for teed lines that match a filter; None where there is no filter.
        variables: what is to be set in the worker's environment besides.
    """

    stdout: str | None
    stderr: str | None
    error_file: str | None
    tee_stdout: bool = False
    tee_stderr: bool = False
    filtered_stdout: str | None = None
    filtered_stderr: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


# -- flags ------------------------------------------------------------------------------------------------------------


def parse_mask(flag: str, text: str) -> Masks:
    """Reads a mask (0 none, 1 stdout, 2 stderr, 3 both) or rank:mask pairs; ranks that are not listed have 0.

    Raises:
        UsageError: it is neither.
    """
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        raise UsageError(
            f"{flag}={text}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or such numbers for local ranks, as in 0:1,1:2"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(rank): int(mask) for rank, mask in pairs}


def parse_ranks(flag: str, text: str | None) -> frozenset[int] | None:
    """Reads local ranks separated by commas; None for an empty text.

    Raises:
        UsageError: one of them is no integer.
    """
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag}={text}: expected local ranks separated by commas, as in 0,1,2") from None


def parse_filters(text: str | None) -> tuple[str, ...]:
    """Reads texts separated by commas; two commas stand for one that belongs to the text. Empty texts do not count."""
    parts = (text or "").replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


# -- folders ----------------------------------------------------------------------------------------------------------


class LogFolders:
    """Makes the log folders of one run on this node, when they are needed.

    Args:
        settings: what the flags say.
        local_world_size: workers of this node; local ranks are below it.
    """

    def __init__(self, settings: LogSettings, local_world_size: int) -> None:
        self._settings = settings
        self._local_world_size = local_world_size
        self._run_folder: str | None = None
        self._starts: Counter[tuple[int, int]] = Counter()

    def check(self) -> None:
        """Makes the base folder where the user has named one, so that a mistake shows before anything is started.

        Raises:
            LaunchError: it cannot be made or written to.
        """
        base = self._settings.log_dir
        if not base or base == os.devnull:
            return
        try:
            os.makedirs(base, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=base))
        except OSError as error:
            raise LaunchError(f"--log-dir={base}: cannot make a folder there: {error.strerror}") from error

    def tidy(self) -> None:
        """Removes the folders that were made without being asked for, if there is no file in them."""
        if self._run_folder is not None and not self._settings.log_dir:
            base = os.path.dirname(self._run_folder)
            for folder, _, _ in os.walk(base, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def worker(self, attempt: int, local_rank: int, told: Told | None = None) -> WorkerLogs:
        """Prepares for the start of a worker; called once for each start.

        The first start of a local rank in an attempt has `error.json`, the k-th replacement `error.<k>.json`: so no
        worker's report is taken for another's, however late it is written, and a path stays valid.

        Raises:
            LaunchError: a folder or file cannot be made.
        """
        assert 0 <= local_rank < self._local_world_size, f"local rank {local_rank} of {self._local_world_size}"
        settings = self._settings
        shown = not settings.local_ranks_filter or local_rank in settings.local_ranks_filter
        console = None if shown else os.devnull
        if settings.log_dir == os.devnull:
            return WorkerLogs(console, console, None)
        tee = _mask(settings.tee, local_rank)
        to_file = _mask(settings.redirects, local_rank) | tee
        try:
            folder, filtered_stdout, filtered_stderr = self._make(attempt, local_rank)
        except OSError as error:
            where = f"--log-dir={settings.log_dir}" if settings.log_dir else "the default --log-dir"
            what = f"{error.filename}: " if error.filename else ""
            raise LaunchError(f"{where}: cannot make the log folders: {what}{error.strerror}") from error
        former = self._starts[attempt, local_rank]
        self._starts[attempt, local_rank] += 1
        return WorkerLogs(
            stdout=os.path.join(folder, "stdout.log") if to_file & OUT else console,
            stderr=os.path.join(folder, "stderr.log") if to_file & ERR else console,
            error_file=os.path.join(folder, f"error.{former}.json" if former else "error.json"),
            tee_stdout=shown and bool(tee & OUT),
            tee_stderr=shown and bool(tee & ERR),
            filtered_stdout=filtered_stdout,
            filtered_stderr=filtered_stderr,
        )

    def _make(self, attempt: int, local_rank: int) -> tuple[str, str | None, str | None]:
        if self._run_folder is None:
            base = os.path.abspath(self._settings.log_dir or tempfile.mkdtemp(prefix="torchelastic_"))
            os.makedirs(base, exist_ok=True)
            name = self._settings.run_id.replace(os.sep, "_")
            self._run_folder = tempfile.mkdtemp(prefix=f"{name}_", dir=base)
        attempt_folder = os.path.join(self._run_folder, f"attempt_{attempt}")
        folder = os.path.join(attempt_folder, str(local_rank))
        os.makedirs(folder, exist_ok=True)
        filtered: list[str | None] = []
        for name, filters in (
            ("filtered_stdout.log", self._settings.duplicate_stdout_filters),
            ("filtered_stderr.log", self._settings.duplicate_stderr_filters),
        ):
            path = os.path.join(attempt_folder, name)
            if filters:
                os.close(open_to_append(path))
            filtered.append(path if filters else None)
        return folder, filtered[0], filtered[1]


def open_to_append(path: str) -> int:
    """Returns a descriptor of a file that is appended to, and made where it is not there."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _mask(masks: Masks, local_rank: int) -> int:
    return masks if isinstance(masks, int) else masks.get(local_rank, 0)


def _any(masks: Masks) -> bool:
    return bool(masks) if isinstance(masks, int) else any(masks.values())
