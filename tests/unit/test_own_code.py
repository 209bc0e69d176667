"""Which code of a script is a step, and which is its own time, as its agent sees it: for `init()` and `attach()`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import Spawner
from tests.jobs.watch import WARM

HEAD = """
import os
import torch
import elaunch
from torch import nn
from elaunch.detect.heartbeat import Reader
from elaunch.workers import heartbeat

shown = Reader(os.dup(heartbeat.open_heartbeat().fd))

def say(place):
    found = shown.read()
    print(f"{place}: {found.phase.name} {found.step}", flush=True)
"""

INIT = (
    HEAD
    + """
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index % 2 == 0:
            say("loads")
        return torch.ones(2)

class Noted(torch.optim.SGD):
    def step(self):
        say("updates")
        super().step()

class Net(nn.Linear):
    def forward(self, inputs):
        say("computes" if torch.is_grad_enabled() else "evaluates")
        return super().forward(inputs)

job = elaunch.init()
net = Net(2, 1)
net.weight.register_hook(lambda gradient: say("backward"))
model = job.wrap(net)
optimizer = Noted(model.parameters(), lr=0.1)
job.register(model=model, optimizer=optimizer)
for batch in job.batches(Samples(), global_batch_size=4, micro_batch_size=2, steps=2, shuffle=False):
    say("batch")
    loss = model(batch).sum()
    loss.backward()
    say("after backward")
    optimizer.step()
    say("after step")
    with torch.no_grad():
        model(batch)
    say("after evaluation")
say("end")
"""
)

ATTACH = (
    HEAD
    + """
from elaunch.hooks import Vote

class Hooks:
    step, holds = 0, False

    def vote(self):
        return Vote(self.step, member.entered, self.holds)

    def pause(self):
        pass

    def agreed(self, generation, verdict):
        pass

    def plan(self, generation, group, verdict):
        return {}

    def transfer(self, group, verdict):
        return 0

    def resume(self, generation, group, verdict):
        self.holds = True

hooks = Hooks()
member = elaunch.attach(hooks)
member.join()
while hooks.step < 2 or not member.finish():
    say("before")
    with member.attempt():
        say("attempt")
        with heartbeat.waiting():
            pass
        say("after a collective")
        with member.script_code():
            say("callback")
        say("after a callback")
        member.commit()
        say("committed")
        hooks.step += 1
        member.report(hooks.step - 1)
    say("after")
"""
)

MICRO_BATCH = ["loads: SCRIPT {0}", "batch: SCRIPT {0}", "computes: STEP {0}", "backward: STEP {0}"]
OF_INIT = [
    *MICRO_BATCH,
    "after backward: SCRIPT {0}",
    "after step: SCRIPT {0}",
    "evaluates: SCRIPT {0}",
    "after evaluation: SCRIPT {0}",
    *MICRO_BATCH,
    "after backward: SCRIPT {0}",
    "updates: STEP {0}",
    "after step: BETWEEN {1}",
    "evaluates: BETWEEN {1}",
    "after evaluation: BETWEEN {1}",
]
OF_ATTACH = [
    "before: BETWEEN {0}",
    "attempt: SCRIPT {0}",
    "after a collective: STEP {0}",
    "callback: SCRIPT {0}",
    "after a callback: STEP {0}",
    "committed: BETWEEN {1}",
    "after: BETWEEN {1}",
]


@pytest.mark.job
@pytest.mark.parametrize(("script", "expected", "end"), [(INIT, OF_INIT, ["end: ENDED 2"]), (ATTACH, OF_ATTACH, [])])
def test_only_model_collectives_and_update_are_the_step(
    spawn: Spawner, tmp_path: Path, script: str, expected: list[str], end: list[str]
) -> None:
    (tmp_path / "own_code.py").write_text(script)
    job = spawn.fork(WARM, "own_code", name="own_code")
    assert job.wait(60) == 0, job.tail()
    said = re.findall(r"^[a-z ]+: [A-Z]+ \d+$", job.text(), re.MULTILINE)
    steps = [line.format(step, step + 1) for step in range(2) for line in expected]
    assert said[: len(steps)] == steps
    assert set(said[len(steps) :]) <= {*end}, job.tail()
