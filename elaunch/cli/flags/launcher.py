"""The flags of `elaunch`: their names, groups, variables, defaults and help. `run` makes settings of their values."""

from __future__ import annotations

import argparse

from elaunch import __version__, checkpoints, replica_check
from elaunch.agent.config import HEALTH_INTERVAL_S, MASTER_PORT, NUMA_MODES, PRELOAD
from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.cli.rendezvous.keys import conf_keys
from elaunch.detect import hang
from elaunch.policy import collectives
from elaunch.policy import settings as policies
from elaunch.rendezvous.rules.spares import STATE_FLAG, STATE_VARIABLE
from elaunch.rendezvous.security.secret import LINK_ENCRYPTION

NO_ID = "none"
"""torchrun's name for a job that was given none."""


def parser() -> FlagParser:
    """Returns the command line of elaunch."""
    p = FlagParser(
        prog="elaunch",
        usage="elaunch [FLAGS] SCRIPT [ARGUMENTS]",
        description="Launch a training job whose surviving workers go on when its membership changes. The flags are "
        "torchrun's and some more. Each may be written with underscores too, and most can be set as PET_<NAME>.\n\n"
        f"{VERBATIM}elaunch --standalone --nproc-per-node=4 train.py --lr 0.1\n"
        f"{VERBATIM}elaunch --nnodes=1:3 --nproc-per-node=8 --rdzv-endpoint=etcd:2379 --rdzv-id=run-17 train.py",
        epilog="Other commands, each with a --help of its own; a script of such a name is ./ctl, ./ui and so on:\n\n"
        f"{VERBATIM}ctl       look at a job that runs, or ask it for something\n"
        f"{VERBATIM}ui        a job in a browser\n"
        f"{VERBATIM}plan      what a job would do if workers were lost or joined\n"
        f"{VERBATIM}trace     a job's event logs as a trace for Perfetto\n"
        f"{VERBATIM}schedule  many elastic jobs on one cluster\n"
        f"{VERBATIM}simulate  a job, or a cluster of jobs, on a simulated clock",
        add_help=False,
    )
    _add_job(p)
    _add_program(p)
    _add_rendezvous(p)
    _add_state(p)
    _add_planning(p)
    _add_detection(p)
    _add_processes(p)
    _add_output(p)
    p.section("other", "The first two are torchrun's, and have no effect here.")
    p.flag(
        "--monitor-interval", default=0.1, type=float, metavar="S", help="no effect: the kernel reports ends of workers"
    )
    p.flag("--start-method", default="spawn", choices=("spawn", "fork", "forkserver"), help="no effect")
    p._section.add_argument("-h", "--help", action="help", help="show this and exit")
    p._section.add_argument(
        "--version", action="version", version=f"elaunch {__version__}", help="show the version and exit"
    )
    return p


def _add_job(p: FlagParser) -> None:
    p.section("job", f"{VERBATIM}elaunch --nnodes=2:4 --nproc-per-node=gpu ... train.py")
    p.flag("--nnodes", default="1:1", metavar="N|MIN:MAX", help="number of nodes, or MIN:MAX")
    p.flag(
        "--nproc-per-node", default="1", metavar="N", help="workers on this node: a number, cpu, gpu, npu, xpu or auto"
    )
    p.own(
        "--spares",
        "ELAUNCH_SPARES",
        "0",
        metavar="N",
        help="nodes beyond the maximum of --nnodes whose workers start and wait, so that they take the place of a lost "
        "node at once; not for static rendezvous",
    )
    p.own(
        STATE_FLAG,
        STATE_VARIABLE,
        action="store_true",
        help="the workers of spares hold the state, and take part in each step, so that none is moved when a node is "
        "lost; for scripts that use elaunch.init()",
    )
    p.flag("--standalone", action="store_true", default=False, help="one node, with a rendezvous of its own")
    p.flag(
        "--max-restarts",
        default=None,
        type=int,
        metavar="N",
        help="replacements of workers on a node, and restarts of the whole job after a failure that memory cannot "
        "mend; not given: workers are replaced as long as steps commit between failures, and there is no restart",
    )
    p.flag(
        "--node-name",
        default="",
        metavar="NAME",
        help="name of this node in identities and logs, unique in the job; default: the host's and a suffix",
    )
    p.own(
        "--failure-domain",
        "ELAUNCH_FAILURE_DOMAIN",
        metavar="NAME",
        help="what this node shares with others that may be lost together, such as a rack: copies of the state go to "
        "other domains; default: with slurm its switch, else the node alone",
    )
    p.flag("--role", default="default", metavar="NAME", help="role of the workers of this node")


def _add_program(p: FlagParser) -> None:
    p.section(
        "program", f"{VERBATIM}elaunch ... -m package.train --lr 0.1\n{VERBATIM}elaunch ... --no-python ./train.sh"
    )
    p._section.add_argument("script", metavar="SCRIPT", help="the training script, module or program")
    p._section.add_argument("script_args", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its arguments")
    p.flag("--module", "-m", action="store_true", default=False, help="run the script as python -m does")
    p.flag("--no-python", action="store_true", default=False, help="the script is a program, not a Python file")
    p.flag("--run-path", action="store_true", default=False, help="run the script by runpy.run_path")


def _add_rendezvous(p: FlagParser) -> None:
    p.section(
        "rendezvous",
        "How nodes meet. Without a server of your own, the first node hosts one:\n"
        f"{VERBATIM}elaunch --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29400 --rdzv-id=run-17 train.py\n"
        f"Keys of --rdzv-conf, times in seconds, as in --rdzv-conf=join_timeout=60,lease_ttl=10:\n"
        f"{conf_keys(VERBATIM)}",
    )
    p.flag(
        "--rdzv-backend",
        default="",
        metavar="NAME",
        help="static: nodes meet at --master-addr and --master-port, each has its --node-rank; c10d: the first node "
        "hosts the rendezvous at --rdzv-endpoint; slurm: c10d, with nodes, endpoint and names from the step of srun; "
        "etcd: the server at the endpoint. Not given: etcd if there is an endpoint and "
        "no --node-rank, else static",
    )
    p.flag("--rdzv-endpoint", default="", metavar="HOST:PORT", help="the rendezvous; several etcd servers: with commas")
    p.flag(
        "--rdzv-id",
        default=NO_ID,
        metavar="ID",
        help="name of the job; nodes of one job give the same; a job of one node without a name is given one",
    )
    p.flag("--rdzv-conf", default="", metavar="KEY=VALUE,…", help="further settings, see above")
    p.flag("--node-rank", default=None, type=int, metavar="N", help="static: rank of this node, 0 to N-1")
    p.flag("--master-addr", default="127.0.0.1", metavar="HOST", help="static: address of node 0")
    p.flag(
        "--master-port", default=None, type=int, metavar="PORT", help=f"static: port on node 0; default: {MASTER_PORT}"
    )
    p.flag(
        "--local-addr",
        default="",
        metavar="HOST",
        help="address of this node; default: the one on the route to the endpoint",
    )
    p.own(
        "--link-encryption",
        LINK_ENCRYPTION,
        "auto",
        metavar="NAME",
        help="which connections between workers, agents and the etcd of the job are encrypted: auto, those between "
        "machines; on, also TCP within one; off, none",
    )


def _add_state(p: FlagParser) -> None:
    p.section(
        "checkpoints and leaving",
        f"{VERBATIM}elaunch ... --checkpoint-dir=/shared/run-17 --checkpoint-every=200 --notice=aws train.py",
    )
    p.own(
        "--checkpoint-dir",
        checkpoints.FOLDER,
        None,
        metavar="PATH",
        help="folder for checkpoints of a script that uses elaunch, the same for all nodes; the job resumes from there",
    )
    p.own(
        "--checkpoint-every",
        checkpoints.EVERY,
        None,
        metavar="N",
        help=f"steps from one checkpoint to the next; default: {checkpoints.DEFAULT_EVERY}",
    )
    p.own(
        "--check-replicas",
        replica_check.NAME,
        None,
        metavar="N[,repair]|off",
        help="steps from one comparison of the workers' model and optimizer to the next; where they differ the job "
        f"ends, or with repair they get the state of most workers; default: {replica_check.DEFAULT_EVERY}",
    )
    p.own(
        "--notice",
        "ELAUNCH_NOTICE",
        metavar="NAME[:ARG],…",
        help="who announces that this machine is taken away, so that the node drains before: file:PATH, aws, gcp, "
        "azure, or what a package adds",
    )
    p.own(
        "--left-exit-code",
        "ELAUNCH_LEFT_EXIT_CODE",
        "0",
        metavar="N",
        help="exit code of a node that has left a job which goes on, for those who start again what fails",
    )


def _add_planning(p: FlagParser) -> None:
    p.section(
        "how a script that uses elaunch goes on after a change",
        f"{VERBATIM}elaunch ... --policy=reparallelize --pp=1:4 --profile=model.json train.py",
    )
    p.own("--policy", policies.POLICY, metavar="NAME", help="auto (default), reroute, resize or reparallelize")
    p.own(
        "--consistency",
        policies.CONSISTENCY,
        metavar="NAME",
        help="bitwise: no plan changes a bit of the result; fast: gradients are summed in any order",
    )
    p.own(
        "--collectives",
        collectives.NAME,
        metavar="NAME",
        help="what carries tensors: native (NCCL, HCCL, Gloo), links, or auto (default): native on accelerators",
    )
    for name, variable, what in (("dp", policies.DP, "pipelines"), ("pp", policies.PP, "stages of a pipeline")):
        p.own(f"--{name}", variable, metavar="MIN:MAX", help=f"{what} that reparallelize may make")
    p.own(
        "--tp",
        policies.TP,
        metavar="N,…",
        help="numbers of workers that a tensor-parallel group may get besides its own",
    )
    p.own(
        "--profile",
        policies.PROFILE,
        metavar="FILE",
        help="file with what the model's layers cost: read at the start, if it is there, and kept up to date",
    )
    p.own(
        "--slow-policy",
        policies.SLOW_POLICY,
        metavar="NAME",
        help="what is done about a slow worker: rebalance (default), replace, exclude or report",
    )
    p.own(
        "--allow-dvfs",
        policies.ALLOW_DVFS,
        action="store_true",
        help="the clocks of devices may be locked, to a higher frequency where one holds up the others",
    )


def _add_detection(p: FlagParser) -> None:
    p.section(
        "detection of failures",
        f"{VERBATIM}elaunch ... --node-check --hang-timeout=120 --health-policy=report train.py",
    )
    p.own(
        hang.FLAG,
        hang.VARIABLE,
        metavar="SECONDS",
        help="of a script that uses elaunch: end a worker that does not go on, nor wait for others, for so long; auto "
        "(default): a limit learnt from the job's steps; off: never",
    )
    p.own(
        "--health-policy",
        "ELAUNCH_HEALTH_POLICY",
        metavar="NAME",
        help="when a device of this node is about to fail: drain (its workers leave the job; the default), report (a "
        "line and an event), off (nobody looks)",
    )
    p.own(
        "--health-interval",
        "ELAUNCH_HEALTH_INTERVAL",
        metavar="SECONDS",
        help=f"seconds between two looks at the memory of this node; default: {HEALTH_INTERVAL_S:g}. GPUs are looked "
        "at every fifth time, disks every tenth",
    )
    p.own(
        "--node-check",
        "ELAUNCH_NODE_CHECK",
        action="store_true",
        help="before it joins, this node multiplies matrices on each device and reduces over its loopback; one that "
        "fails, or is far slower than its peers, does not join",
    )


def _add_processes(p: FlagParser) -> None:
    p.section(
        "worker processes",
        f"{VERBATIM}elaunch ... --preload=torch,transformers --warm-start --shutdown-timeout=60 train.py",
    )
    p.own(
        "--preload",
        "ELAUNCH_PRELOAD",
        ",".join(PRELOAD),
        metavar="MODULE,…",
        help="modules that the warm parent of replacements imports; empty: no warm parent",
    )
    p.own(
        "--warm-start",
        "ELAUNCH_WARM_START",
        action="store_true",
        help="the first workers of a node, too, are forks of the warm parent: its modules are imported once",
    )
    p.flag(
        "--virtual-local-rank",
        action="store_true",
        default=False,
        help="each worker sees its own device only, and LOCAL_RANK 0",
    )
    p.flag(
        "--numa-binding",
        default=None,
        choices=NUMA_MODES,
        in_environment=False,
        help="bind each worker to the CPUs near its GPU",
    )
    p.flag(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAME,…",
        help="signals that end this node's workers",
    )
    p.flag(
        "--shutdown-timeout",
        default=None,
        type=float,
        metavar="SECONDS",
        help="seconds between the signal and SIGKILL for workers; default: 30",
    )


def _add_output(p: FlagParser) -> None:
    p.section("output", f"{VERBATIM}elaunch ... --log-dir=logs --tee=3 --events=events-%n.jsonl train.py")
    p.flag("--log-dir", default=None, metavar="PATH", help="folder for log files; default: a fresh temporary one")
    p.flag(
        "--redirects",
        "-r",
        default="0",
        metavar="MASK",
        help="streams that go into files: 0, 1 (stdout), 2 (stderr), 3, or rank:mask,…",
    )
    p.flag("--tee", "-t", default="0", metavar="MASK", help="the same, and to the console too")
    p.flag("--local-ranks-filter", default="", metavar="N,…", help="local ranks whose streams the console shows")
    p.flag(
        "--duplicate-stdout-filters",
        default="",
        metavar="TEXT,…",
        help="lines of tee'd stdout to duplicate: with one of these",
    )
    p.flag("--duplicate-stderr-filters", default="", metavar="TEXT,…", help="the same for stderr; ,, is a comma")
    p.flag(
        "--logs-specs",
        default="",
        in_environment=False,
        metavar="NAME",
        help="name of a torchrun.logs_specs entry point",
    )
    p.flag(
        "--event-log-handler",
        default="null",
        metavar="NAME",
        help="null, or console: events are printed to standard error",
    )
    p.own("--events", "ELAUNCH_EVENTS", None, metavar="PATH", help="append events to this file; %%n: the node")
    p.own(
        "--metrics-port",
        "ELAUNCH_METRICS_PORT",
        None,
        metavar="[ADDRESS:]PORT",
        help="serve metrics to Prometheus at this port, of all interfaces unless an address is given; 0: a free port",
    )
    p.own(
        "--ui-port",
        "ELAUNCH_UI_PORT",
        None,
        metavar="[ADDRESS:]PORT",
        help="serve a page that shows the job, at this port of this machine only unless an address is given; 0: a free "
        "port",
    )
