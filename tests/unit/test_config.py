"""The command line and the environment: what is accepted, and what the user is told otherwise."""

from __future__ import annotations

import os
import re
import socket
from operator import attrgetter
from pathlib import Path

import pytest

from elaunch.agent.config import PRELOAD, AgentConfig, HealthSettings, parse_nproc, settings_for_all
from elaunch.checkpoints import Checkpointing
from elaunch.cli import run as cli
from elaunch.detect import devices
from elaunch.detect.hang import HangTimeout
from elaunch.errors import LaunchError, UsageError
from elaunch.ranges import parse_range
from elaunch.rendezvous.conf import RendezvousConf, WorkerLimits, own_address, parse_conf, parse_endpoint


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "ELAUNCH_ETCD_")) or name in (
            "ELAUNCH_EVENTS",
            "ELAUNCH_HEALTH_POLICY",
            "ELAUNCH_HEALTH_INTERVAL",
            "ELAUNCH_NODE_CHECK",
            "ELAUNCH_PRELOAD",
            "ELAUNCH_CHECKPOINT_DIR",
            "ELAUNCH_CHECKPOINT_EVERY",
            "ELAUNCH_HANG_TIMEOUT",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "CUDA_VISIBLE_DEVICES",
        ):
            monkeypatch.delenv(name)


def parse(*arguments: str) -> AgentConfig:
    return cli.parse(list(arguments))


class TestNnodes:
    @pytest.mark.parametrize(
        ("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2)), ("10:1000", (10, 1000))]
    )
    def test_a_number_or_a_range(self, text: str, expected: tuple[int, int]) -> None:
        assert parse_range(text, "--nnodes") == expected

    @pytest.mark.parametrize("text", ["0", "-1", "3:1", "0:2", "1:2:3", "a", "1:b", "", ":", "1:", ":2", "1.5", "1-2"])
    def test_anything_else_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_range(text, "--nnodes")
        assert str(caught.value) == f"--nnodes={text}: expected N or MIN:MAX with 1 <= MIN <= MAX"


class TestSettingsForAll:
    def test_names_and_values_are_those_of_the_command_line(self) -> None:
        flags = "--consistency=bitwise", "--dp=1:2", "--checkpoint-dir=/a", "--allow-dvfs", "--profile=/here/alone"
        one, other = (dict(settings_for_all(parse("--standalone", *given, "x.py"), {})) for given in ((), flags))
        assert set(other.items()) - set(one.items()) == {
            ("--consistency", "bitwise"),
            ("--dp", "1:2"),
            ("--checkpoint-dir", "/a"),
            ("--checkpoint-every", "100"),
            ("--allow-dvfs", "1"),
        }
        assert one["--policy"] == "auto"

    def test_so_is_what_workers_read_in_their_environment(self) -> None:
        config = parse("--standalone", "x.py")
        told = settings_for_all(config, {"ELAUNCH_STATE_PATH": "links", "ELAUNCH_EVENTS": "/here"})
        assert dict(told).items() - dict(settings_for_all(config, {})).items() == {("ELAUNCH_STATE_PATH", "links")}

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            (["--standalone"], {}),
            (["--rdzv-backend=etcd", "--rdzv-endpoint=h"], {"lease_ttl": "5"}),
            (
                ["--nnodes=2", "--rdzv-backend=static", "--rdzv-conf=lease_ttl=2.5"],
                {"lease_ttl": "2.5", "on_store_loss": "found"},
            ),
            (
                ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=h,i,j", "--rdzv-conf=on_store_loss=wait"],
                {"lease_ttl": "5", "on_store_loss": "wait", "store_nodes": "3"},
            ),
            (
                ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=h,i,j", "--rdzv-conf=store_nodes=1"],
                {"lease_ttl": "5", "on_store_loss": "found", "store_nodes": "1"},
            ),
        ],
    )
    def test_so_are_the_rendezvous_keys_that_the_backend_has(self, flags: list[str], expected: dict[str, str]) -> None:
        told = dict(settings_for_all(parse(*flags, "x.py"), {}))
        begin = "--rdzv-conf="
        assert {name.removeprefix(begin): told[name] for name in told if name.startswith(begin)} == expected


class TestNproc:
    def test_a_number(self) -> None:
        assert parse_nproc("3") == 3

    def test_cpu_is_what_this_process_may_use(self) -> None:
        assert parse_nproc("cpu") == len(os.sched_getaffinity(0))

    def test_auto_and_gpu_are_the_gpus_where_there_are_some(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "count_gpus", lambda environment: 8)
        assert (parse_nproc("auto"), parse_nproc("gpu")) == (8, 8)

    def test_without_gpus_auto_is_cpu_and_gpu_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "count_gpus", lambda environment: 0)
        assert parse_nproc("auto") == parse_nproc("cpu")
        with pytest.raises(UsageError, match="--nproc-per-node=gpu: this machine has no NVIDIA GPU"):
            parse_nproc("gpu")

    @pytest.mark.parametrize("text", ["0", "-2", "two", "", "1.0", "cpus"])
    def test_anything_else_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_nproc(text)
        assert (
            str(caught.value) == f"--nproc-per-node={text}: expected a number of at least 1, cpu, gpu, npu, xpu or auto"
        )


class TestConf:
    def test_nothing_given_means_the_defaults(self) -> None:
        assert parse_conf("") == RendezvousConf()

    def test_keys_and_values_with_spaces_and_empty_parts(self) -> None:
        conf = parse_conf(" join_timeout = 30 ,,lease_ttl=2.5, ready_timeout=0")
        assert (conf.join_timeout, conf.lease_ttl, conf.ready_timeout) == (30.0, 2.5, 0.0)

    def test_limits_of_workers_stand_together(self) -> None:
        conf = parse_conf("stop_timeout=2,first_steps_timeout=60")
        assert conf.workers == WorkerLimits(register_timeout=900.0, first_steps_timeout=60.0, stop_timeout=2.0)

    @pytest.mark.parametrize("item", ["nonsense=1", "join_timeout", "=3", "JOIN_TIMEOUT=1"])
    def test_an_unknown_key_is_refused_with_the_known_ones(self, item: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_conf(f"lease_ttl=3,{item}")
        assert repr(item) in str(caught.value)
        assert "key, last_call_timeout, lease_ttl, link_timeout, node_ca, node_cert" in str(caught.value)

    @pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "1s"])
    def test_what_is_no_number_of_seconds_is_refused_by_name(self, value: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_conf(f"join_timeout={value}")
        assert str(caught.value) == f"--rdzv-conf 'join_timeout={value}': expected a number of seconds"

    def test_a_lease_of_no_time_is_refused(self) -> None:
        with pytest.raises(UsageError, match="'lease_ttl=0': a lease lasts at least 1 second"):
            parse_conf("lease_ttl=0")

    def test_a_store_may_be_away_for_a_second(self) -> None:
        assert parse_conf("store_timeout=1").store_timeout == 1.0
        with pytest.raises(UsageError, match=r"'store_timeout=0.5': a store that starts again is away for a second"):
            parse_conf("store_timeout=0.5")

    def test_a_link_may_be_silent_for_the_time_that_a_living_one_is(self) -> None:
        assert parse_conf("link_timeout=2").link_timeout == 2.0
        with pytest.raises(UsageError, match="'link_timeout=1': a link that lives may be silent for a second"):
            parse_conf("link_timeout=1")

    def test_user_and_password_go_together(self) -> None:
        conf = parse_conf("user=u,password=p=q")
        assert (conf.etcd.user, conf.etcd.password) == ("u", "p=q")
        for half in ("user=u", "password=p"):
            with pytest.raises(UsageError, match="user and password go together"):
                parse_conf(half)

    def test_a_password_is_not_shown(self) -> None:
        assert "secret" not in repr(parse_conf("user=u,password=secret"))

    def test_certificate_and_key_go_together_and_must_be_there(self, tmp_path: Path) -> None:
        pem = tmp_path / "a.pem"
        pem.touch()
        assert parse_conf(f"cert={pem},key={pem},cacert={pem}").etcd.cacert == str(pem)
        with pytest.raises(UsageError, match="cert and key go together"):
            parse_conf(f"cert={pem}")
        with pytest.raises(UsageError, match=r"cacert=.*none.pem: no such file"):
            parse_conf(f"cacert={tmp_path / 'none.pem'}")

    def test_secrets_may_come_from_the_environment_and_the_flag_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ELAUNCH_ETCD_USER", "from-env")
        monkeypatch.setenv("ELAUNCH_ETCD_PASSWORD", "a,b")
        assert (parse_conf("").etcd.user, parse_conf("").etcd.password) == ("from-env", "a,b")
        assert parse_conf("user=flag").etcd.user == "flag"


class TestEndpoint:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("host", ("host", 99)),
            ("host:1", ("host", 1)),
            ("127.0.0.1:0", ("127.0.0.1", 0)),
            ("[::1]:5", ("::1", 5)),
            ("[::1]", ("::1", 99)),
            ("::1", ("::1", 99)),
            ("host:65535", ("host", 65535)),
        ],
    )
    def test_a_host_and_perhaps_a_port(self, text: str, expected: tuple[str, int]) -> None:
        assert parse_endpoint(text, 99) == expected

    @pytest.mark.parametrize("text", ["", ":1", "host:", "host:x", "host:65536", "host:-1", "[::1]:x", "[]:1"])
    def test_anything_else_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_endpoint(text, 99)
        assert str(caught.value) == f"--rdzv-endpoint={text}: expected HOST:PORT"

    def test_the_address_on_the_route_to_the_endpoint(self) -> None:
        assert own_address("127.0.0.1", 2379) == "127.0.0.1"

    def test_a_name_that_does_not_resolve_is_named_with_advice(self) -> None:
        with pytest.raises(LaunchError, match=r"--rdzv-endpoint no-such-host.invalid:1: .*--local-addr"):
            own_address("no-such-host.invalid", 1)


class TestCommandLine:
    def test_a_script_alone_runs_as_one_worker_with_a_rendezvous_of_its_own(self) -> None:
        found = parse("train.py")
        assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (1, 1, 1)
        assert (found.rendezvous.backend, found.rendezvous.endpoint, found.node) == ("standalone", "", "node0")
        assert (found.program.script, found.program.args, found.max_restarts) == ("train.py", (), None)

    @pytest.mark.parametrize("separator", ["-", "_"])
    def test_dashes_and_underscores_mean_the_same(self, separator: str) -> None:
        flags = ["--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=j", "--rdzv-endpoint=h:1", "--local-addr=x"]
        found = parse(*(flag.replace("-", separator).replace(separator * 2, "--", 1) for flag in flags), "t.py")
        assert (found.nproc_per_node, found.max_restarts, found.job, found.rendezvous.endpoint, found.local_addr) == (
            2,
            3,
            "j",
            "h:1",
            "x",
        )

    def test_a_value_may_follow_a_space(self) -> None:
        found = parse("--nnodes", "1:4", "--rdzv-backend", "etcd", "--rdzv-endpoint", "h", "t.py")
        assert (found.min_nodes, found.max_nodes, found.rendezvous.backend) == (1, 4, "etcd")

    def test_what_follows_the_script_belongs_to_the_script(self) -> None:
        found = parse("--nproc-per-node=2", "t.py", "--nproc-per-node=9", "-m", "--lr", "0.1", "--help", "--unknown")
        assert found.nproc_per_node == 2
        assert not found.program.module
        assert found.program.args == ("--nproc-per-node=9", "-m", "--lr", "0.1", "--help", "--unknown")

    def test_module_and_program(self) -> None:
        assert parse("-m", "pkg.train", "x").program.module
        assert parse("--no-python", "bash", "-c", "true").program.args == ("-c", "true")
        with pytest.raises(UsageError, match="--module and --no-python exclude each other"):
            parse("-m", "--no-python", "x")

    def test_checkpoints(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert parse("t.py").training.checkpoints is None
        assert parse("--checkpoint-dir=saved", "t.py").training.checkpoints == Checkpointing(Path.cwd() / "saved", 100)
        with pytest.raises(UsageError, match="--checkpoint-every=0: expected a number of steps of at least 1"):
            parse("--checkpoint-dir=saved", "--checkpoint-every=0", "t.py")
        with pytest.raises(UsageError, match="--checkpoint-every=5 needs --checkpoint-dir=PATH"):
            parse("--checkpoint-every=5", "t.py")
        monkeypatch.setenv("ELAUNCH_CHECKPOINT_DIR", str(tmp_path))
        monkeypatch.setenv("ELAUNCH_CHECKPOINT_EVERY", "20")
        assert parse("t.py").training.checkpoints == Checkpointing(tmp_path, 20)
        assert parse("--checkpoint-every=30", "t.py").training.checkpoints == Checkpointing(tmp_path, 30)

    def test_spares_are_for_jobs_to_which_more_nodes_can_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert parse("t.py").rendezvous.spares == 0
        found = parse("--nnodes=2", "--spares=1", "--rdzv-endpoint=h", "t.py")
        assert (found.min_nodes, found.max_nodes, found.rendezvous.spares) == (2, 2, 1)
        three = "--rdzv-endpoint=a:1,b:1,c:1"
        found = parse("--nnodes=2", "--spares=1", "--rdzv-backend=c10d", three, "t.py")
        assert found.rendezvous.store_nodes(found.max_nodes) == 3, "a spare may serve the store as well"
        with pytest.raises(UsageError, match="--spares=x: expected a number of at least 0"):
            parse("--spares=x", "t.py")
        for flags in (["--standalone"], ["--nnodes=2", "--node-rank=0"]):
            with pytest.raises(UsageError, match="--spares=1 needs --rdzv-endpoint=HOST:PORT"):
                parse("--spares=1", *flags, "t.py")
        assert not found.rendezvous.spare_state
        assert parse("--spares=1", "--spare-state", "--rdzv-endpoint=h", "t.py").rendezvous.spare_state
        with pytest.raises(UsageError, match="--spare-state is about the spares of a job, and this one has none: give"):
            parse("--spare-state", "--rdzv-endpoint=h", "t.py")
        monkeypatch.setenv("ELAUNCH_SPARE_STATE", "1")
        found = parse("--spares=1", "--rdzv-endpoint=h", "t.py")
        assert ("--spare-state", "1") in settings_for_all(found, {}), "all nodes must have it"
        monkeypatch.setenv("ELAUNCH_SPARES", "2")
        assert parse("--rdzv-endpoint=h", "--nnodes=2", "t.py").rendezvous.spares == 2

    def test_a_failure_domain_is_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert parse("t.py").rendezvous.failure_domain == ""
        assert parse("--failure-domain=rack 7", "t.py").rendezvous.failure_domain == "rack 7"
        monkeypatch.setenv("ELAUNCH_FAILURE_DOMAIN", "eu-1a")
        assert parse("t.py").rendezvous.failure_domain == "eu-1a"
        for wrong in ("x" * 101, "a\nb"):
            with pytest.raises(UsageError, match=r"--failure-domain='.*: expected at most 100 printable characters"):
                parse(f"--failure-domain={wrong}", "t.py")

    def test_the_limit_of_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert parse("t.py").detection.hang == HangTimeout()
        monkeypatch.setenv("ELAUNCH_HANG_TIMEOUT", "90")
        assert parse("t.py").detection.hang == HangTimeout("seconds", 90.0)
        assert parse("--hang-timeout=off", "t.py").detection.hang == HangTimeout("off")
        with pytest.raises(UsageError, match="--hang-timeout=soon: expected auto, off, or a number of seconds above 0"):
            parse("--hang-timeout=soon", "t.py")

    def test_an_empty_preload_means_no_warm_parent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert parse("t.py").start.preload == PRELOAD
        assert not parse("--preload=", "t.py").start.warm
        monkeypatch.setenv("ELAUNCH_PRELOAD", "numpy,torch")
        assert parse("t.py").start.preload == ("numpy", "torch")

    def test_a_warm_start_is_a_flag_and_a_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not parse("t.py").start.warm_start
        assert parse("--warm-start", "t.py").start.warm_start
        monkeypatch.setenv("ELAUNCH_WARM_START", "1")
        assert parse("t.py").start.warm_start
        monkeypatch.setenv("ELAUNCH_WARM_START", "0")
        assert not parse("t.py").start.warm_start

    def test_standalone_jobs_do_not_share_a_name(self) -> None:
        assert parse("--standalone", "t.py").job != parse("--standalone", "t.py").job

    def test_agents_of_one_machine_do_not_share_a_name(self) -> None:
        names = {parse("--nnodes=2", "--rdzv-endpoint=h", "t.py").node for _ in range(50)}
        assert len(names) == 50
        # Containers may all have one host name: with a thousand of them, 16 bits would not do.
        assert all(re.search("-[0-9a-f]{8}$", name) for name in names)

    def test_the_shutdown_timeout_may_come_from_torchelastics_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
        assert parse("t.py").stop.shutdown_timeout == 7.0
        assert parse("--shutdown-timeout=3", "t.py").stop.shutdown_timeout == 3.0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--nnodes=1:2"], "--nnodes=1:2 needs --rdzv-endpoint=HOST:PORT"),
            (["--nnodes=1:2", "--rdzv-backend=static"], "a static rendezvous has a fixed number of nodes"),
            (["--rdzv-backend=c10d", "--rdzv-endpoint=h:0", "--nnodes=2"], "port 0 is for one node"),
            (["--nnodes=2", "--node-rank=2"], "--node-rank=2: expected 0 to 1"),
            (["--master-port=0"], "--master-port=0: expected a port"),
            (["--monitor-interval=nan"], "--monitor-interval=nan: expected a number of seconds"),
            (
                ["--rdzv-backend=zookeeper", "--rdzv-endpoint=h"],
                "--rdzv-backend=zookeeper: expected one of static, c10d, etcd",
            ),
            (["--rdzv-backend=etcd"], "needs --rdzv-endpoint=HOST:PORT"),
            (["--standalone", "--nnodes=2"], "--standalone is for one node, not for --nnodes=2"),
            (["--rdzv-endpoint=h:port"], "--rdzv-endpoint=h:port: expected HOST:PORT"),
            (["--rdzv-endpoint=h", "--rdzv-id="], "--rdzv-id='': expected a name"),
            (["--max-restarts=-1"], "--max-restarts=-1: expected a number of at least 0"),
            (["--node-name=a b"], "--node-name='a b': expected letters"),
            (["--shutdown-timeout=-1"], "--shutdown-timeout=-1.0: expected a number of seconds"),
            (["--rdzv-conf=a=1"], "--rdzv-conf 'a=1': expected key=value"),
            (["--rdzv-conf=store_nodes=2"], "--rdzv-conf 'store_nodes=2': expected 1, 3 or 5"),
            (["--health-policy=flee"], "--health-policy=flee: expected one of drain, report, off"),
            (["--health-interval=often"], "--health-interval=often: expected seconds, 0.01 to 3600"),
            (["--health-interval=0"], "--health-interval=0: expected seconds, 0.01 to 3600"),
            (["--nproc-per-node=npu"], "--nproc-per-node=npu: this machine has no Ascend NPU"),
        ],
    )
    def test_a_value_that_cannot_be_used_is_named(self, arguments: list[str], message: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse(*arguments, "t.py")
        assert message in str(caught.value)


class TestEnvironment:
    @pytest.mark.parametrize(
        ("name", "value", "attribute", "expected"),
        [
            ("PET_NNODES", "1:3", "max_nodes", 3),
            ("PET_NPROC_PER_NODE", "2", "nproc_per_node", 2),
            ("PET_RDZV_ENDPOINT", "other:5", "rendezvous.endpoint", "other:5"),
            ("PET_RDZV_BACKEND", "c10d", "rendezvous.backend", "c10d"),
            ("PET_RDZV_ID", "job7", "job", "job7"),
            ("PET_RDZV_CONF", "lease_ttl=3", "rendezvous.conf", RendezvousConf(lease_ttl=3.0, connect_timeout=10.0)),
            ("PET_MAX_RESTARTS", "5", "max_restarts", 5),
            ("PET_LOCAL_ADDR", "10.0.0.1", "local_addr", "10.0.0.1"),
            ("PET_NODE_NAME", "left", "node", "left"),
            ("PET_MODULE", "1", "program.module", True),
            ("PET_MODULE", "0", "program.module", False),
            ("PET_NO_PYTHON", "true", "program.no_python", True),
            ("PET_SHUTDOWN_TIMEOUT", "4", "stop.shutdown_timeout", 4.0),
            ("ELAUNCH_EVENTS", "e.jsonl", "output.events", "e.jsonl"),
            ("ELAUNCH_HEALTH_POLICY", "report", "detection.health", HealthSettings("report", 1.0)),
            ("ELAUNCH_HEALTH_INTERVAL", "0.5", "detection.health", HealthSettings("drain", 0.5)),
            ("ELAUNCH_NODE_CHECK", "1", "detection.node_check", True),
            ("ELAUNCH_NODE_CHECK", "0", "detection.node_check", False),
        ],
    )
    def test_each_flag_has_a_variable(
        self, name: str, value: str, attribute: str, expected: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if name != "PET_RDZV_ENDPOINT":
            monkeypatch.setenv("PET_RDZV_ENDPOINT", "h:1")
        monkeypatch.setenv(name, value)
        assert attrgetter(attribute)(parse("t.py")) == expected

    @pytest.mark.parametrize(
        ("value", "backend"), [("1", "standalone"), ("0", "etcd"), ("", "etcd"), ("false", "etcd")]
    )
    def test_a_switch_is_on_unless_its_variable_says_no(
        self, value: str, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PET_STANDALONE", value)
        assert parse("--rdzv-endpoint=h", "t.py").rendezvous.backend == backend

    @pytest.mark.parametrize("name", ["PET_STANDALONE", "PET_MODULE", "ELAUNCH_NODE_CHECK", "ELAUNCH_WARM_START"])
    @pytest.mark.parametrize("value", ["abc", "1.5", "yes please"])
    def test_a_switch_that_is_neither_on_nor_off_is_refused(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=f"^{name}={value}: expected 1 or 0, true or false$"):
            parse("t.py")

    @pytest.mark.parametrize(
        "flags", [["--standalone"], [], ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]], ids=str
    )
    def test_a_job_of_one_node_is_named_unless_it_has_a_name(self, flags: list[str]) -> None:
        assert parse(*flags, "--rdzv-id=given", "t.py").job == "given"
        assert parse(*flags, "--rdzv-id=given", "t.py").output.logs.run_id == "given"
        assert len(parse(*flags, "t.py").job) == 36
        assert parse(*flags, "t.py").job != parse(*flags, "t.py").job

    def test_the_command_line_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
        monkeypatch.setenv("PET_RDZV_ID", "env")
        found = parse("--nproc-per-node=2", "--rdzv-endpoint=h", "--rdzv_id=line", "t.py")
        assert (found.nproc_per_node, found.job) == (2, "line")

    def test_a_bad_value_of_a_variable_is_named_like_a_flags(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_NNODES", "3:1")
        with pytest.raises(UsageError, match="--nnodes=3:1"):
            parse("t.py")


class TestMeeting:
    """Where nodes meet: torchrun's rules, but that an endpoint alone may be that of an etcd."""

    @pytest.mark.parametrize(
        ("arguments", "backend", "endpoint", "master"),
        [
            ((), "standalone", "", None),
            (("--standalone", "--rdzv-backend=etcd", "--rdzv-endpoint=h:1"), "standalone", "", None),
            (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), "standalone", "", None),
            (("--rdzv-backend=c10d",), "c10d", "localhost:29400", None),
            (("--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=h"), "c10d", "h:29400", None),
            (
                ("--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=h,i:1,[::1]:2"),
                "c10d",
                "h:29400,i:1,[::1]:2",
                None,
            ),
            (("--nnodes=1:4", "--rdzv-endpoint=h:2379"), "etcd", "h:2379", None),
            (("--nnodes=2", "--rdzv-endpoint=h:2379"), "etcd", "h:2379", None),
            (("--nnodes=2", "--rdzv-backend=etcd-v3", "--rdzv-endpoint=a:1,b:2"), "etcd", "a:1,b:2", None),
            (("--master-port=29600",), "standalone", "", ("127.0.0.1", 29600)),
            (("--nnodes=2",), "static", "127.0.0.1:19500", ("127.0.0.1", 29500)),
            (("--nnodes=2", "--master-addr=h", "--master-port=1234"), "static", "h:11234", ("h", 1234)),
            (("--nnodes=2", "--master-addr=[::1]"), "static", "[::1]:19500", ("::1", 29500)),
            (("--nnodes=2", "--node-rank=1", "--rdzv-endpoint=h:29501"), "static", "h:19501", ("h", 29501)),
        ],
    )
    def test_flags_say_where(
        self, arguments: tuple[str, ...], backend: str, endpoint: str, master: tuple[str, int] | None
    ) -> None:
        found = parse(*arguments, "t.py").rendezvous
        assert (found.backend, found.endpoint, found.master) == (backend, endpoint, master)

    def test_one_node_with_an_endpoint_at_which_nobody_listens_has_that_port_for_its_workers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert parse(f"--rdzv-endpoint=127.0.0.1:{port}", "t.py").rendezvous.backend == "etcd"
        found = parse(f"--rdzv-endpoint=127.0.0.1:{port}", "t.py")
        assert (found.rendezvous.backend, found.rendezvous.master) == ("standalone", ("127.0.0.1", port))

    def test_torchruns_keys_are_known(self) -> None:
        conf = parse("--rdzv-backend=c10d", "t.py").rendezvous.conf
        assert (conf.last_call_timeout, conf.connect_timeout, conf.lease_ttl) == (30.0, 60.0, 5.0)
        keys = "close_timeout=3,heartbeat_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=4,store_type=tcp"
        conf = parse("--rdzv-backend=c10d", f"--rdzv-conf={keys},is_host=true,read_timeout=9", "t.py").rendezvous.conf
        assert (conf.lease_ttl, conf.is_host, conf.connect_timeout) == (8.0, True, 9.0)
        assert parse("--nnodes=2", "--rdzv-conf=timeout=30", "t.py").rendezvous.conf.connect_timeout == 30.0

    def test_the_store_is_on_three_nodes_where_three_can_host_it_or_the_user_says_so(self) -> None:
        def nodes(backend: str, endpoint: str, most: int = 4, conf: str = "") -> int:
            flags = (f"--nnodes={most}", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}")
            return parse(*flags, f"--rdzv-conf={conf}", "t.py").rendezvous.store_nodes(most)

        assert nodes("c10d", "h,i,j") == 3
        assert [nodes("c10d", "h,i,j", most=2), nodes("c10d", "h"), nodes("c10d", "h,i")] == [1, 1, 1]
        assert [nodes("c10d", "h", conf="store_nodes=3"), nodes("c10d", "h,i,j", conf="store_nodes=1")] == [3, 1]
        assert [nodes("etcd", "h,i,j"), nodes("static", "h", conf="store_nodes=3")] == [1, 1]


class TestExitCodes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--max-restarts=many", "t.py"], "invalid int value: 'many'"),
            (["--no-such-flag", "t.py"], "unrecognized arguments|ambiguous|no-such-flag"),
            ([], "required: SCRIPT"),
            (["--nnodes"], "expected one argument"),
        ],
    )
    def test_a_command_line_that_cannot_be_read_ends_with_2_and_the_usage(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        written = capsys.readouterr().err
        assert caught.value.code == 2
        assert written.startswith("usage: elaunch")
        assert any(part in written for part in message.split("|"))

    def test_a_value_that_cannot_be_used_ends_with_1_and_says_where_to_read_on(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["--nnodes=3:1", "t.py"]) == 1
        first, *rest = capsys.readouterr().err.splitlines()
        assert first == "elaunch: error: --nnodes=3:1: expected N or MIN:MAX with 1 <= MIN <= MAX"
        assert rest == ["  `elaunch --help` shows what can be given, with examples"]

    def test_a_script_that_is_not_there_ends_with_1_and_its_name(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        missing = str(tmp_path / "none.py")
        assert cli.main([missing]) == 1
        assert f"{missing}: no such file" in capsys.readouterr().err

    def test_a_folder_for_events_that_is_not_there_ends_with_1_and_its_name(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "t.py"
        script.touch()
        assert cli.main([f"--events={tmp_path}/none/e.jsonl", str(script)]) == 1
        assert f"{tmp_path}/none" in capsys.readouterr().err

    def test_help_and_version_end_with_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        for flag in ("--help", "--version"):
            with pytest.raises(SystemExit) as caught:
                cli.main([flag])
            assert caught.value.code == 0
        assert "--nproc-per-node" in capsys.readouterr().out
