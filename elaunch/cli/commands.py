"""What `elaunch ctl` and `elaunch schedule` have in common: a store, seconds, and how a command ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from elaunch.cli.flags.parser import where_to_read
from elaunch.errors import ElaunchError, UsageError
from elaunch.rendezvous.conf import CONNECT_S, RendezvousConf
from elaunch.rendezvous.security import users
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
        job: whose store it is, if it may be one that a job has started. With a secret that was given for this command
            it is taken for that, and else if it speaks TLS.

    Raises:
        UsageError: the secret, or a file of a certificate, cannot be used.
    """
    from elaunch.rendezvous.cluster.connection import parse_addresses  # not needed to tell of a wrong command line
    from elaunch.rendezvous.cluster.plain import speaks_tls
    from elaunch.rendezvous.etcd import EtcdStore

    limit_s = min(5.0, conf.connect_timeout or CONNECT_S)
    arguments = conf.etcd.arguments()
    if job is not None and not conf.etcd.cacert:
        security = read_security(conf.etcd.node, os.environ, of_user=partial(users.find, os.environ))
        is_given = security.has_proof and not security.is_users
        is_asked = not is_given and not any(arguments.values())
        if is_given or (is_asked and speaks_tls(parse_addresses(endpoint), limit_s)):
            return EtcdStore(endpoint, timeout_s=limit_s, pem=guest(security, job, time.time()))
    return EtcdStore(endpoint, timeout_s=limit_s, **arguments)
