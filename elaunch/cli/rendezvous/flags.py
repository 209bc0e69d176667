"""Where and how the nodes meet: the flags about the rendezvous, as torchrun understands them."""

from __future__ import annotations

import argparse
from dataclasses import replace

from elaunch.agent.config import BACKENDS, HOSTED_PORT, MASTER_PORT, STATIC_SHIFT, RendezvousSettings
from elaunch.agent.launch import is_free_here
from elaunch.cli.rendezvous import slurm
from elaunch.errors import UsageError
from elaunch.rendezvous.conf import CONNECT_S, ETCD_PORT, RendezvousConf, join_endpoint, parse_conf, parse_endpoint
from elaunch.rendezvous.rules.spares import STATE_FLAG

FOREIGN = "foreign"  # a rendezvous of somebody else's
MOST_DOMAIN = 100  # characters; every worker of a generation has one


def read_rendezvous(args: argparse.Namespace, low: int, high: int) -> RendezvousSettings:
    """Returns where and how `low` to `high` nodes meet, and how many more are held ready, as the flags in `args` say.

    Raises:
        UsageError: a value cannot be used, or two do not go together.
    """
    found, spares = _meeting(args, low, high), count("--spares", args.spares)
    if spares and found.backend not in ("c10d", "etcd"):
        raise UsageError(
            f"--spares={spares} needs --rdzv-endpoint=HOST:PORT of an etcd server, or --rdzv-backend=c10d: no node can "
            f"come to a {found.backend} rendezvous beside those of --nnodes={args.nnodes}"
        )
    if args.spare_state and not spares:
        raise UsageError(f"{STATE_FLAG} is about the spares of a job, and this one has none: give --spares=N, too")
    domain = args.failure_domain
    if len(domain) > MOST_DOMAIN or not domain.isprintable():
        raise UsageError(f"--failure-domain={domain[:80]!r}: expected at most {MOST_DOMAIN} printable characters")
    return replace(found, spares=spares, spare_state=args.spare_state, failure_domain=domain)


def _meeting(args: argparse.Namespace, low: int, high: int) -> RendezvousSettings:
    backend = args.rdzv_backend
    if backend and backend not in BACKENDS:
        from elaunch.agent import plugins

        if plugins.find(plugins.HANDLERS, backend) is None:
            raise UsageError(
                f"--rdzv-backend={backend}: expected one of {', '.join((*BACKENDS, slurm.BACKEND))}, or the name of a "
                f"{plugins.HANDLERS} entry point; etcd is spoken to as etcd v3"
            )
        return RendezvousSettings(FOREIGN, "", RendezvousConf())
    if args.standalone:
        if high > 1:
            raise UsageError(f"--standalone is for one node, not for --nnodes={args.nnodes}")
        backend = "standalone"
    backend = backend or _default_backend(args, high)
    if backend == "static" and not args.rdzv_endpoint and args.master_port is None and high == 1:
        backend = "standalone"
    # torchrun's own defaults; with etcd, nodes that come later join the running job.
    defaults = {"c10d": RendezvousConf(last_call_timeout=30.0), "static": RendezvousConf(join_timeout=0.0)}
    conf = parse_conf(args.rdzv_conf, defaults.get(backend, RendezvousConf()))
    alone = RendezvousSettings("standalone", "", _reach(conf, CONNECT_S))
    if backend == "standalone":
        return alone
    endpoint = args.rdzv_endpoint
    if backend == "static":
        return _static(args, low, high, replace(conf, join_timeout=conf.join_timeout or conf.timeout))
    if backend == "c10d":
        endpoint = endpoint or f"localhost:{HOSTED_PORT}"
        hosts = [parse_endpoint(host.strip(), HOSTED_PORT) for host in endpoint.split(",")]
        if all(port for _, port in hosts):
            joined = ",".join(join_endpoint(name, port) for name, port in hosts)
            return RendezvousSettings("c10d", joined, _reach(conf, conf.read_timeout))
        if high > 1:
            raise UsageError(f"--rdzv-endpoint={endpoint}: port 0 is for one node, not for --nnodes={args.nnodes}")
        return alone
    if not endpoint:
        raise UsageError(f"--rdzv-backend={backend} needs --rdzv-endpoint=HOST:PORT of an etcd server")
    for member in endpoint.split(","):
        parse_endpoint(member, ETCD_PORT)
    return RendezvousSettings("etcd", endpoint, _reach(conf, CONNECT_S))


def _reach(conf: RendezvousConf, usual_s: float) -> RendezvousConf:
    """With the time to connect that the user has given, else the usual one."""
    return replace(conf, connect_timeout=conf.connect_timeout or usual_s)


def _default_backend(args: argparse.Namespace, high: int) -> str:
    """What torchrun would do by default, but for an endpoint at which an etcd may be."""
    if not args.rdzv_endpoint or args.node_rank is not None:
        return "static"
    if high == 1 and "," not in args.rdzv_endpoint and is_free_here(*parse_endpoint(args.rdzv_endpoint, MASTER_PORT)):
        return "static"  # the way to give a job on one machine a port of its own
    return "etcd"


def _static(args: argparse.Namespace, low: int, high: int, conf: RendezvousConf) -> RendezvousSettings:
    if low != high:
        raise UsageError(
            f"--nnodes={args.nnodes} needs --rdzv-endpoint=HOST:PORT of an etcd server, or --rdzv-backend=c10d: "
            "a static rendezvous has a fixed number of nodes"
        )
    if args.rdzv_endpoint:
        name, port = parse_endpoint(args.rdzv_endpoint, MASTER_PORT)
    else:
        name, port = args.master_addr, MASTER_PORT if args.master_port is None else args.master_port
        name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    rank = count("--node-rank", args.node_rank or 0)
    if rank >= high:
        raise UsageError(f"--node-rank={rank}: expected 0 to {high - 1} with --nnodes={args.nnodes}")
    if not 0 < port < 65536:
        raise UsageError(f"--master-port={port}: expected a port, 1 to 65535")
    if high == 1:
        return RendezvousSettings("standalone", "", _reach(conf, CONNECT_S), master=(name, port))
    shifted = port - STATIC_SHIFT if port > STATIC_SHIFT + 1024 else port + STATIC_SHIFT
    return RendezvousSettings("static", join_endpoint(name, shifted), _reach(conf, conf.timeout), rank, (name, port))


def count(flag: str, text: object) -> int:
    """Reads the number that a flag gives.

    Raises:
        UsageError: it is no number of at least 0.
    """
    if not str(text).isdecimal():
        raise UsageError(f"{flag}={text}: expected a number of at least 0")
    return int(str(text))
