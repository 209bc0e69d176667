"""Estimates beside iteration times that others have measured and published, with profiles of their layers.

The figures are read from a copy of their repository, of which nothing is in this one:

    git clone https://github.com/JF-D/Parcae            # MIT; NSDI 2024
    python benchmarks/published_times.py Parcae

`liveput/cost.py` has iteration times of a GPT of 1.5 B parameters (47) and of 6.7 B (10) for (replicas, stages), and
the times of messages between two of its machines; `liveput/cost_cfg.py` the forward and backward times of a layer. One
V100 and 10 Gbit/s for each machine, DeepSpeed's 1F1B, float16.

The published layers do not take what the published iterations take (they come to about three times as much), so a
factor on their seconds is fitted; and, in the second model, the seconds of each forward and backward beside its layers.
Both are fitted on a part of the times and tested on the others.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import Report
from elaunch.plan import Pipeline, Plan, pipelines, share
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, Profile

HALF = 2  # bytes of a number
TOKENS = 1024
SHALLOW = 12
"""Stages, at most, of a pipeline that counts as shallow."""


@dataclass(frozen=True)
class Model:
    """A published model; the number of its blocks and its width are in the launch script of the repository."""

    name: str
    blocks: int
    hidden: int
    batch: int


MODELS = (Model("gpt-1.5b", 48, 1600, 128), Model("gpt-6.7b", 32, 4096, 64))


@dataclass(frozen=True)
class Time:
    """Seconds of an iteration with so many replicas and stages."""

    model: Model
    replicas: int
    stages: int
    seconds: float

    @property
    def plan(self) -> Plan:
        """As that repository cuts layers and batches: the last stage has least, then layers go to the ones before."""
        model, n_layers = self.model, self.model.blocks + 2
        size, more = divmod(n_layers - 1, self.stages)
        sizes = [size + 1] + [size] * (self.stages - 1)
        for place in range(more):
            sizes[-place - 2] += 1
        bounds = [sum(sizes[:stage]) for stage in range(self.stages + 1)]
        made = [
            Pipeline(
                share(model.batch, self.replicas, replica),
                tuple(
                    (range(bounds[stage], bounds[stage + 1]), (f"n{replica}.{stage}/0#0",))
                    for stage in range(self.stages)
                ),
            )
            for replica in range(self.replicas)
        ]
        # DeepSpeed's 1F1B takes all stages for equally long.
        costs = [cost for size in sizes for cost in (1, *[0] * (size - 1))]
        return replace(pipelines(n_layers, model.batch, 1, made), order="backward", costs=tuple(costs))


@dataclass(frozen=True)
class Published:
    """What was published: times of iterations, and a profile of each model by its name."""

    times: Sequence[Time]
    profiles: Mapping[str, Profile]


def read(folder: Path) -> Published:
    """Reads the figures of a copy of the repository, without running any of it."""
    cost = ast.parse((folder / "liveput/cost.py").read_text())
    layers = ast.parse((folder / "liveput/cost_cfg.py").read_text())
    messages = _assigned(cost, "p2p_volume_to_cost")
    assert messages is not None, "liveput/cost.py has no p2p_volume_to_cost"
    micros: dict[int, float] = ast.literal_eval(messages)
    most, few = max(micros), min(micros)
    times, profiles = [], {}
    for model in MODELS:
        given = _of_model(cost, model.name, "strategy_speed_throughput")
        kinds = _of_model(layers, model.name, "_profile")
        found: dict[tuple[int, int], tuple[float, float]] = ast.literal_eval(given)
        times += [Time(model, *way, milliseconds / 1e3) for way, (milliseconds, _) in found.items()]
        first, block, last = (_layer(kinds, kind, model) for kind in range(3))
        profiles[model.name] = Profile(
            model.name,
            (first, *[block] * model.blocks, last),
            1,
            bandwidth_bytes_per_s=most / micros[most] * 1e6,
            latency_s=micros[few] / 1e6,
        )
    return Published(times, profiles)


def _of_model(tree: ast.AST, model: str, name: str) -> ast.expr:
    """What is assigned to `name` in the first branch that does and whose condition names the model."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(
            isinstance(part, ast.Constant) and part.value == model for part in ast.walk(node.test)
        ):
            found = _assigned(ast.Module(node.body, []), name)
            if found is not None:
                return found
    raise ValueError(f"there is no {name} of {model} in that repository")


def _assigned(tree: ast.AST, name: str) -> ast.expr | None:
    """The first dictionary with entries that is assigned to a variable or an attribute of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.value.keys:
            target = node.targets[0]
            if name in (getattr(target, "id", None), getattr(target, "attr", None)):
                return node.value
    return None


def _layer(kinds: ast.expr, kind: int, model: Model) -> LayerProfile:
    assert isinstance(kinds, ast.Dict)
    figures = kinds.values[kind]
    assert isinstance(figures, ast.Dict)
    known: dict[str, Any] = {
        str(ast.literal_eval(key)): ast.literal_eval(value)
        for key, value in zip(figures.keys, figures.values)
        if key is not None and isinstance(value, ast.Constant)
    }
    return LayerProfile(
        known["forward"] / 1e3,
        known["backward"] / 1e3,
        HALF * known["params"],
        0,
        0,
        HALF * TOKENS * model.hidden,
        update_s=known["optimizer"] / 1e3,
    )


Way = Callable[[Profile, Sequence[float]], Profile]
"""Makes the profile that is used, of the published one and some coefficients."""


def by_factor(profile: Profile, given: Sequence[float]) -> Profile:
    """A factor on the layers' seconds; messages hold nobody up."""
    (factor,) = given
    layers = tuple(replace(layer.scaled(factor), update_s=layer.update_s) for layer in profile.layers)
    return replace(profile, layers=layers)


def with_actions(profile: Profile, given: Sequence[float]) -> Profile:
    """That, and seconds of each forward and backward; DeepSpeed's sends return when the rows have gone."""
    factor, action_s = given
    send_s = profile.latency_s + profile.layers[1].output_bytes_per_row / profile.bandwidth_bytes_per_s
    return replace(by_factor(profile, [factor]), action_s=action_s, send_s=send_s, hop_s=-send_s)


WAYS: dict[str, tuple[Way, tuple[float, ...]]] = {
    "a factor on layers": (by_factor, (0.35,)),
    "and seconds of each action": (with_actions, (0.3, 2e-3)),
}


def errors(published: Published, times: Sequence[Time], way: Way, given: Sequence[float]) -> list[float]:
    """Of each estimate, as a part of what was measured."""
    profiles = {name: way(profile, given) for name, profile in published.profiles.items()}
    return [estimate_step(one.plan, profiles[one.model.name]).step_s / one.seconds - 1 for one in times]


@dataclass(frozen=True)
class Linear:
    """Errors of all estimates near some coefficients, and how they change with each of them."""

    at: Sequence[float]
    errors: Mapping[Time, float]
    slopes: Sequence[Mapping[Time, float]]

    @classmethod
    def of(cls, published: Published, way: Way, at: Sequence[float]) -> Linear:
        """Finds them by moving each coefficient by a tenth."""
        times = published.times
        here = errors(published, times, way, at)
        slopes = []
        for place, value in enumerate(at):
            moved = errors(published, times, way, [*at[:place], 1.1 * value, *at[place + 1 :]])
            slopes.append({one: (b - a) / (0.1 * value) for one, a, b in zip(times, here, moved, strict=True)})
        return cls(at, dict(zip(times, here, strict=True)), slopes)

    def fitted(self, times: Sequence[Time]) -> list[float]:
        """The coefficients with the least sum of squares of these errors; none falls below 0. Seconds of a step are
        linear in them as long as the critical path is the same.
        """
        changes = _least_squares(
            [[slope[one] for one in times] for slope in self.slopes], [self.errors[one] for one in times]
        )
        return [max(0.0, value - change) for value, change in zip(self.at, changes, strict=True)]


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Of one or two columns."""
    products = [[sum(a * b for a, b in zip(one, other)) for other in columns] for one in columns]
    right = [sum(a * b for a, b in zip(one, values)) for one in columns]
    if len(columns) == 1:
        return [right[0] / products[0][0]]
    (a, b), (_, d) = products
    whole = a * d - b * b
    return [(d * right[0] - b * right[1]) / whole, (a * right[1] - b * right[0]) / whole]


def splits(times: Sequence[Time]) -> dict[str, tuple[list[Time], list[Time]]]:
    """Names of splits, with the times that are fitted on and those that are tested on."""
    small = [one for one in times if one.model is MODELS[0]]
    return {
        "all 47 of 1.5 B on themselves": (small, small),
        f"1.5 B, up to {SHALLOW} stages; tested on deeper ones": (
            [one for one in small if one.stages <= SHALLOW],
            [one for one in small if one.stages > SHALLOW],
        ),
        f"1.5 B, more than {SHALLOW} stages; tested on shallower ones": (
            [one for one in small if one.stages > SHALLOW],
            [one for one in small if one.stages <= SHALLOW],
        ),
        "1.5 B, every second time; tested on the others": (small[::2], small[1::2]),
        "1.5 B; tested on 6.7 B": (small, [one for one in times if one.model is MODELS[1]]),
    }


def rows(report: Report, published: Published) -> None:
    """Adds the table."""
    linear = {what: Linear.of(published, way, start) for what, (way, start) in WAYS.items()}
    for name, (fit_on, test_on) in splits(published.times).items():
        for what, (way, _) in WAYS.items():
            given = linear[what].fitted(fit_on)
            found = errors(published, test_on, way, given)
            worst, where = max(zip(found, test_on), key=lambda one: abs(one[0]))
            report.row(
                {
                    "fitted on": name,
                    "model": what,
                    "coefficients": ", ".join(f"{one:.3g}" for one in given),
                    "tested": len(test_on),
                    "mean_error_pct": 100 * statistics.fmean(map(abs, found)),
                    "worst_error_pct": 100 * worst,
                    "worst_at": f"{where.replicas} x {where.stages}",
                }
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a copy of the repository")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write machine and rows to PATH")
    args = parser.parse_args()
    published = read(args.folder)
    report = Report("estimates beside published iteration times")
    rows(report, published)
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
