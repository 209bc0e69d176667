"""What `elaunch ctl` and `elaunch schedule` have in common: a store, seconds, and how a command ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elaunch.cli.flags.parser import where_to_read
from elaunch.errors import ElaunchError, UsageError
from elaunch.rendezvous.conf import CONNECT_S, RendezvousConf
from elaunch.rendezvous.security.identity import guest
from elaunch.rendezvous.security.secret import read_security

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd import EtcdStore


def run_command(
    name: str, run: Callable[[argparse.Namespace], None], args: argparse.Namespace, interrupted: str = ""
) -> int:
    """Runs a command, and tells of an error in a line.

    Args:
        name: of the command.
        run: it.
        args: for it.
        interrupted: what is told where it is interrupted.

    Returns:
        0 when it is done, 1 when it was refused or not done in time, 2 for a command line that cannot be used.
    """
    try:
        run(args)
    except UsageError as error:
        print(f"{name}: error: {error}", where_to_read(name), sep="\n", file=sys.stderr)
        return 2
    except ElaunchError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if interrupted:
            print(f"{name}: {interrupted}", file=sys.stderr)
        return 1
    return 0


def seconds(text: str) -> float:
    """Reads a number of seconds above 0; raises argparse's error for others."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text!r}")


def open_store(endpoint: str, conf: RendezvousConf, job: str | None = None) -> EtcdStore:
    """Returns the store at an endpoint.

    Args:
        endpoint: of the store.
        conf: how it is reached.
        job: whose store it is, if it may be one that a job has started; with a job's secret it is taken for that.

    Raises:
        UsageError: the secret, or a file of a certificate, cannot be used.
    """
    from elaunch.rendezvous.etcd import EtcdStore  # loads its client: not needed to tell of a wrong command line

    limit_s = min(5.0, conf.connect_timeout or CONNECT_S)
    if job is not None and not conf.etcd.cacert:
        pem = guest(read_security(conf.etcd.node, os.environ), job, time.time())
        if pem is not None:
            return EtcdStore(endpoint, timeout_s=limit_s, pem=pem)
    return EtcdStore(endpoint, timeout_s=limit_s, **conf.etcd.arguments())
