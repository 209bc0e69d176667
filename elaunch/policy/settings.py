"""How a job may go on after a change: what the user wants, as flags of `elaunch` and as environment of the workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from elaunch.errors import UsageError
from elaunch.ranges import parse_numbers, parse_range

POLICY = "ELAUNCH_POLICY"
CONSISTENCY = "ELAUNCH_CONSISTENCY"
ALLOW_DVFS = "ELAUNCH_ALLOW_DVFS"
PROFILE = "ELAUNCH_PROFILE"
SLOW_POLICY = "ELAUNCH_SLOW_POLICY"
DP = "ELAUNCH_DP"
PP = "ELAUNCH_PP"
TP = "ELAUNCH_TP"

Policy = Literal["auto", "reroute", "resize", "reparallelize"]
POLICIES: tuple[str, ...] = get_args(Policy)

Consistency = Literal["bitwise", "fast"]
CONSISTENCIES: tuple[str, ...] = get_args(Consistency)

SlowPolicy = Literal["rebalance", "replace", "exclude", "report"]
SLOW_POLICIES: tuple[str, ...] = get_args(SlowPolicy)

NAMES = {
    POLICY: "--policy",
    CONSISTENCY: "--consistency",
    PROFILE: "--profile",
    SLOW_POLICY: "--slow-policy",
    DP: "--dp",
    PP: "--pp",
    TP: "--tp",
    ALLOW_DVFS: "--allow-dvfs",
}
"""Of the variables, as flags."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The user's settings of policies.

    Attributes:
        policy: the only one that may be chosen, as long as it has a plan.
        consistency: "bitwise": the result must not depend on the plan by a single bit; "fast": gradients may be summed
            in any order; None: as the script says, and plans may cut micro-batches.
        allow_dvfs: whether the clocks of devices may be changed.
        profile: file with the profile of the job, read at its start and kept up to date.
        slow_policy: what is done about a slow worker: another plan, another process in its place, the others go on
            without it, or nothing but an event.
        dp: the least and the greatest number of pipelines that `reparallelize` may make; None: near what it is.
        pp: likewise of stages of a pipeline; None: any.
        tp: numbers of workers that tensor-parallel groups may get, beside those of the given plan.
    """

    policy: Policy = "auto"
    consistency: Consistency | None = None
    allow_dvfs: bool = False
    profile: Path | None = None
    slow_policy: SlowPolicy = "rebalance"
    dp: tuple[int, int] | None = None
    pp: tuple[int, int] | None = None
    tp: tuple[int, ...] = ()

    def variables(self) -> dict[str, str]:
        """Returns variables for the environment of workers; `from_environment` reads them."""
        found = {POLICY: self.policy, ALLOW_DVFS: str(int(self.allow_dvfs)), SLOW_POLICY: self.slow_policy}
        if self.consistency is not None:
            found[CONSISTENCY] = self.consistency
        if self.profile is not None:
            found[PROFILE] = str(self.profile)
        found |= {name: "{}:{}".format(*given) for name, given in ((DP, self.dp), (PP, self.pp)) if given is not None}
        if self.tp:
            found[TP] = ",".join(map(str, self.tp))
        return found


def parse(
    policy: str,
    consistency: str,
    allow_dvfs: bool,
    profile: str,
    slow_policy: str = "",
    dp: str = "",
    pp: str = "",
    tp: str = "",
    names: Mapping[str, str] = NAMES,
) -> PolicyConfig:
    """Reads the settings; empty ones were not given.

    Args:
        policy, consistency, profile, slow_policy, dp, pp, tp: as given.
        allow_dvfs: likewise.
        names: what the variables are called in messages.

    Raises:
        UsageError: a value is none of those there are, or no range or list of numbers.
    """
    for name, value, known in (
        (POLICY, policy, POLICIES),
        (CONSISTENCY, consistency, CONSISTENCIES),
        (SLOW_POLICY, slow_policy, SLOW_POLICIES),
    ):
        if value and value not in known:
            raise UsageError(f"{names.get(name, name)}={value}: expected one of {', '.join(known)}")
    return PolicyConfig(
        policy or "auto",  # type: ignore[arg-type]
        consistency or None,  # type: ignore[arg-type]
        allow_dvfs,
        Path(os.path.abspath(profile)) if profile else None,
        slow_policy or "rebalance",  # type: ignore[arg-type]
        parse_range(dp, names.get(DP, DP)) if dp else None,
        parse_range(pp, names.get(PP, PP)) if pp else None,
        parse_numbers(tp, names.get(TP, TP), "workers"),
    )


def from_environment(environment: Mapping[str, str]) -> PolicyConfig:
    """Returns the settings of a worker.

    Raises:
        UsageError: as `parse`.
    """
    policy, consistency, dvfs, profile, slow_policy, dp, pp, tp = (
        environment.get(name, "") for name in (POLICY, CONSISTENCY, ALLOW_DVFS, PROFILE, SLOW_POLICY, DP, PP, TP)
    )
    return parse(policy, consistency, dvfs not in ("", "0"), profile, slow_policy, dp, pp, tp, {})
