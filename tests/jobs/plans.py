"""A training runtime of its own, on the hook protocol: it says by which plan it was asked to go on; a file ends it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from elaunch.errors import StepInterrupted
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Finished, Progress
from elaunch.workers import agent_client
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.recovery import Recovery
from tests.jobs import come_late, say


class Runtime:
    """Steps that compute nothing, on all members or on none."""

    def __init__(self) -> None:
        self.client = agent_client.connect()
        self.transport = Transport(self.client.worker, self.client.token, self.client.host, self.client.security)
        self.membership = Recovery(self.client, self.transport, self)
        self.group: Group | None = None
        self.acted_on = ""
        self.step = 0

    def train(self, end: Path) -> None:
        self.client.ready(self.transport.address, takes_plans=True)
        self.membership.settle()
        self.client.send(Progress(self.step))
        while True:
            try:
                newest, over = self.do_step(end)
            except StepInterrupted as error:
                self.membership.agree(error)
                self.membership.settle()
                continue
            if over:
                break
            if newest > self.membership.generation.number:
                self.membership.agree()
                self.membership.settle()
        self.client.send(Finished())
        self.transport.close()
        self.client.close()

    def do_step(self, end: Path) -> tuple[int, bool]:
        """The newest generation that all members know of, and whether all have seen the file."""
        assert self.group is not None
        time.sleep(0.01)
        mine = json.dumps([self.membership.newest_generation(), end.exists()]).encode()
        said = [json.loads(one) for one in self.group.all_gather_bytes(mine)]
        self.step += 1
        return min(generation for generation, _ in said), all(seen for _, seen in said)

    def vote(self) -> Vote:
        return Vote(self.step, entered=True, holds=self.group is not None)

    def pause(self) -> None:
        pass

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        self.step = verdict.step

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        if generation.plan_request not in ("", self.acted_on):
            self.acted_on = generation.plan_request
            say(f"{self.client.worker} goes by {generation.plan!r}")
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        return 0

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self.group = group


if __name__ == "__main__":
    come_late()
    Runtime().train(Path(sys.argv[1]))
