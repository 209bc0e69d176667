"""Prometheus metrics of one agent: a pure function of what it has counted, of its state, and of its store's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from elaunch import __version__
from elaunch.rendezvous.membership import GenerationStage, WorkerState
from elaunch.rendezvous.status import slow_slots, speeds_of
from elaunch.telemetry.node_view import NodeView
from elaunch.telemetry.tally import Distribution, Tally
from elaunch.telemetry.timed_store import StoreTimes

Labelled = Mapping[tuple[str, ...], float]
Distributions = Mapping[tuple[str, ...], Distribution]


class _Families:
    """Makes metrics that all have the labels of the job and the node."""

    def __init__(self, job: str, node: str) -> None:
        self._names = ("rdzv_id", "node")
        self._values = (job, node)

    def gauge(self, name: str, text: str, values: Labelled, labels: Sequence[str] = ()) -> Metric:
        found = GaugeMetricFamily(name, text, labels=[*self._names, *labels])
        for own, value in values.items():
            found.add_metric([*self._values, *own], value)
        return found

    def counter(self, name: str, text: str, values: Labelled, labels: Sequence[str] = ()) -> Metric:
        found = CounterMetricFamily(name, text, labels=[*self._names, *labels])
        for own, value in values.items():
            found.add_metric([*self._values, *own], value)
        return found

    def histogram(self, name: str, text: str, values: Distributions, labels: Sequence[str] = ()) -> Metric:
        found = HistogramMetricFamily(name, text, labels=[*self._names, *labels])
        for own, one in values.items():
            found.add_metric([*self._values, *own], one.buckets(), one.sum_s)
        return found


def metrics_of(job: str, node: str, tally: Tally, view: NodeView, times: StoreTimes) -> Iterator[Metric]:
    """Returns the metrics.

    Args:
        job: its name.
        node: name of this node.
        tally: of the agent's events.
        view: of its state.
        times: of its requests to the store.
    """
    make = _Families(job, node)
    yield InfoMetricFamily("elaunch", "This agent.", {"rdzv_id": job, "node": node, "version": __version__})
    yield from _membership(make, view)
    yield from _steps(make, tally, view)
    yield from _recoveries(make, tally)
    yield from _trouble(make, tally, view)
    yield from _store(make, times)


def _membership(make: _Families, view: NodeView) -> Iterator[Metric]:
    generation = view.generation
    training = generation is not None and generation.stage is GenerationStage.TRAIN
    yield make.gauge(
        "elaunch_generation", "Number of the newest generation.", {(): generation.number if generation else 0}
    )
    yield make.gauge(
        "elaunch_attempt", "How often all workers were started again.", {(): generation.attempt if generation else 0}
    )
    yield make.gauge(
        "elaunch_members", "Workers in the newest generation.", {(): len(generation.workers) if generation else 0}
    )
    yield make.gauge(
        "elaunch_nodes", "Nodes in the newest generation.", {(): len(generation.nodes) if generation else 0}
    )
    yield make.gauge(
        "elaunch_training",
        "1 while the newest generation trains; 0 while its workers start, meet again or wait for nodes.",
        {(): float(training and generation is not None and not generation.hold)},
    )
    yield make.gauge("elaunch_node_slots", "Workers that this node may have.", {(): view.slots})
    yield make.gauge(
        "elaunch_node_workers",
        "Workers of this node, by state.",
        {(state.value,): view.workers.get(state, 0) for state in WorkerState},
        ["state"],
    )
    yield make.gauge("elaunch_spare_nodes", "Nodes that hold workers ready (--spares).", {(): view.spares})
    yield make.gauge("elaunch_node_spare", "1 while this node is one of them.", {(): float(view.is_spare)})
    yield make.gauge("elaunch_node_draining", "1 while this node is to leave.", {(): float(view.is_draining)})


def _steps(make: _Families, tally: Tally, view: NodeView) -> Iterator[Metric]:
    steps = tally.steps
    yield make.counter("elaunch_steps_total", "Committed steps that this agent logged.", {(): steps.count})
    yield make.counter("elaunch_samples_total", "Samples of these steps, of all members.", {(): steps.samples})
    yield make.histogram(
        "elaunch_step_duration_seconds", "From the commit before to that of the step.", {(): steps.durations}
    )
    yield make.counter(
        "elaunch_training_seconds_total",
        "Time of these steps without what recoveries and other changes took; its rate is the effective-time ratio.",
        {(): steps.training_s},
    )
    newest, loss = steps.newest, steps.loss
    yield make.gauge(
        "elaunch_step", "Number of the newest step that this agent logged.", {(): newest[0]} if newest else {}
    )
    yield make.gauge(
        "elaunch_step_commit_timestamp_seconds", "Unix time of its commit.", {(): newest[1]} if newest else {}
    )
    yield make.gauge("elaunch_loss", "Its loss, if the script reports one.", {} if loss is None else {(): loss})
    yield make.gauge(
        "elaunch_copy_lag_steps",
        "By how many steps the oldest copy of a worker's state in another one's memory was behind it.",
        {} if steps.copy_lag is None else {(): steps.copy_lag},
    )
    yield make.histogram("elaunch_checkpoint_duration_seconds", "What checkpoints took.", {(): tally.saves})
    yield make.counter("elaunch_checkpoint_bytes_total", "Bytes of tensors in checkpoints.", {(): tally.saved_bytes})
    lag: dict[tuple[str, ...], float] = {}
    if newest is not None and view.saved is not None:
        lag[()] = max(0, newest[0] + 1 - view.saved)
    yield make.gauge(
        "elaunch_checkpoint_lag_steps", "Committed steps that are in no checkpoint yet, as this agent knows.", lag
    )


def _recoveries(make: _Families, tally: Tally) -> Iterator[Metric]:
    yield make.histogram(
        "elaunch_recovery_duration_seconds",
        "From the cause of a change to the next commit; interrupted: whether it broke off a step.",
        {(_text(kind),): one for kind, one in tally.changes.items()},
        ["interrupted"],
    )
    yield make.histogram(
        "elaunch_recovery_phase_duration_seconds",
        "The same, by phase.",
        {(phase, _text(kind)): one for (phase, kind), one in tally.phases.items()},
        ["phase", "interrupted"],
    )
    yield make.counter(
        "elaunch_state_moved_bytes_total",
        "State that members received in changes, by how it went.",
        {(path,): moved for path, moved in {"links": 0, **tally.moved_bytes}.items()},
        ["path"],
    )
    yield make.counter(
        "elaunch_decisions_total",
        "Plans that were chosen, by policy.",
        {(policy,): chosen for policy, chosen in tally.decisions.items()},
        ["policy"],
    )


def _trouble(make: _Families, tally: Tally, view: NodeView) -> Iterator[Metric]:
    slow = slow_slots(speeds_of(view.profile))
    yield make.gauge("elaunch_slow_workers", "Slow workers of the job, as the first member knows.", {(): len(slow)})
    yield make.gauge(
        "elaunch_slow_worker_ratio",
        "How many times as long as others a slow worker takes.",
        {(slot,): ratio for slot, ratio in slow.items()},
        ["slot"],
    )
    yield make.counter(
        "elaunch_worker_exits_total",
        "Ends of this node's workers, by signal or exit code.",
        {(end,): ended for end, ended in {"0": 0, **tally.exits}.items()},
        ["end"],
    )
    yield make.counter(
        "elaunch_health_events_total",
        "What was noticed of this node's devices and of the machine, by verdict.",
        {(verdict,): seen for verdict, seen in tally.verdicts.items()},
        ["verdict"],
    )
    yield make.gauge("elaunch_unreachable_nodes", "Nodes that this one cannot reach.", {(): tally.unreachable})
    yield make.counter(
        "elaunch_events_total",
        "Lines of the event log, by kind; hangs are counted here, too.",
        {(kind,): written for kind, written in {"hang": 0, **tally.kinds}.items()},
        ["kind"],
    )


def _store(make: _Families, times: StoreTimes) -> Iterator[Metric]:
    answers = times.answers
    yield make.gauge(
        "elaunch_etcd_up",
        "Whether etcd answered the last request of this agent.",
        {} if answers is None else {(): float(answers)},
    )
    yield make.histogram(
        "elaunch_etcd_request_duration_seconds",
        "What requests to etcd took that were answered.",
        {(operation,): one for operation, one in times.took.items()},
        ["operation"],
    )
    yield make.counter(
        "elaunch_etcd_request_failures_total",
        "Requests to etcd that were not answered or were refused.",
        {(operation,): failed for operation, failed in times.failures.items()},
        ["operation"],
    )


def _text(is_so: bool) -> str:
    return "true" if is_so else "false"
