"""Checkpoints: which are complete, what is in them, and that any plan finds its part there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elaunch import checkpoints
from elaunch.checkpoints import Checkpointing
from elaunch.errors import LaunchError, StateError, UsageError
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.comm.group import Group
from elaunch.workers.engine.engine import Engine, StepReport
from elaunch.workers.plan import Plan, symmetric
from elaunch.workers.state import objects
from elaunch.workers.state.boxes import slabs, whole
from elaunch.workers.state.checkpoint import Part, Pieces, Saved, complete, notes, write_part
from tests.unit.comm_crew import PATIENCE_S, addresses, switching_often, together
from tests.unit.engine_crew import TRAIN_S, Sentences, loss, model, train
from tests.unit.engine_crew import whole as whole_parameters
from tests.unit.plan_strategies import valid_plans


class TestSettings:
    def test_without_a_folder_there_are_none(self) -> None:
        assert checkpoints.parse(None, None) is None
        assert checkpoints.from_environment({}) is None

    def test_one_every_hundred_steps_unless_asked_otherwise(self, tmp_path: Path) -> None:
        assert checkpoints.parse(str(tmp_path), None) == Checkpointing(tmp_path, 100)
        assert checkpoints.parse(str(tmp_path), "7") == Checkpointing(tmp_path, 7)

    @pytest.mark.parametrize("every", ["0", "-1", "1.5", "often"])
    def test_a_number_of_steps_is_at_least_one(self, every: str) -> None:
        with pytest.raises(UsageError, match=f"ELAUNCH_CHECKPOINT_EVERY={every}: expected a number of steps of at lea"):
            checkpoints.parse("saved", every)

    def test_steps_need_a_folder(self) -> None:
        with pytest.raises(UsageError, match="ELAUNCH_CHECKPOINT_EVERY=5 needs ELAUNCH_CHECKPOINT_DIR=PATH"):
            checkpoints.parse(None, "5")

    def test_the_folder_is_made(self, tmp_path: Path) -> None:
        found = checkpoints.from_environment({checkpoints.FOLDER: str(tmp_path / "a" / "b")})
        assert found is not None
        assert found.folder.is_dir()

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(LaunchError, match="file: the folder cannot be made: it is a file"):
            checkpoints.from_environment({checkpoints.FOLDER: str(tmp_path / "file")})
        with pytest.raises(LaunchError, match="below: the folder cannot be made: Not a directory"):
            checkpoints.from_environment({checkpoints.FOLDER: str(tmp_path / "file" / "below")})


def made(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        for file in (checkpoints.METADATA, checkpoints.ABOUT):
            (folder / name / file).touch()


class TestFolder:
    def test_the_newest_complete_one_counts(self, tmp_path: Path) -> None:
        assert checkpoints.newest(tmp_path / "nowhere") is None
        made(tmp_path, "step-000000020", "step-000000100", "step-000000300.2-ab.part", "else", "step-7")
        (tmp_path / "step-000000200").mkdir()
        assert checkpoints.complete(tmp_path) == [100, 20]
        assert checkpoints.newest(tmp_path) == 100

    def test_the_two_newest_stay_and_what_is_incomplete_goes(self, tmp_path: Path) -> None:
        made(tmp_path, "step-000000010", "step-000000020", "step-000000030", "mine", "step-000000030.1-a.part")
        made(tmp_path, "step-000000020.1-a.part", "step-000000040.1-a.part")
        (tmp_path / "step-000000025").mkdir()
        gone = {path.name for path in checkpoints.outdated(tmp_path, 30)}
        parts = {"step-000000030.1-a.part", "step-000000020.1-a.part"}
        assert gone == {"step-000000010", "step-000000025", *parts}


# -- the format -----------------------------------------------------------------------------------------------------


def spread(tensors: dict[str, Tensor], members: int, cuts: int) -> list[Part]:
    """Parts of members that have slabs of each tensor in turn."""
    found: list[dict[str, Pieces]] = [{} for _ in range(members)]
    for number, (name, tensor) in enumerate(tensors.items()):
        boxes = slabs(whole(tensor.shape), cuts)
        for member in range(members):
            mine = [box for place, box in enumerate(boxes) if (place + number) % members == member]
            views = [(box, tensor[tuple(slice(*ends) for ends in box)]) for box in mine]
            if views:
                found[member][name] = Pieces(tensor.shape, views)
    return [Part("layers", {"seed": 1}, pieces, {"member": member}) for member, pieces in enumerate(found)]


def written(folder: Path, parts: Sequence[Part], step: int = 40) -> Path:
    part = checkpoints.part_of(folder, step, "1-a")
    for member, mine in enumerate(parts):
        write_part(part, member, mine.copied())
    said = notes(part, len(parts))
    return complete(part, step, [said[member] for member in range(len(parts))])


TENSORS = {
    "model.layers.0.weight": torch.arange(35.0).view(5, 7),
    "optimizer.layers.0.weight.exp_avg": torch.arange(35.0, dtype=torch.float64).view(5, 7) / 3,
    "scalar": torch.tensor(3.5),
    "numbers": torch.arange(9, dtype=torch.int32),
    "half": torch.arange(8.0).to(torch.bfloat16).view(2, 2, 2),
}


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    path = written(tmp_path, spread(TENSORS, members=3, cuts=4))
    assert path == tmp_path / "step-000000040"
    assert dcp.FileSystemReader(path).read_metadata().state_dict_metadata.keys() == TENSORS.keys()
    assert Saved(path).shapes() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(found, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert all(torch.equal(one[name], TENSORS[name]) for name in TENSORS)


def test_any_boxes_are_read(tmp_path: Path) -> None:
    saved = Saved(written(tmp_path, spread(TENSORS, members=2, cuts=3)))
    assert (saved.step, [facts["member"] for facts in saved.facts]) == (40, [0, 1])
    name = "model.layers.0.weight"
    boxes = [((1, 4), (2, 7)), ((4, 5), (0, 1))]
    parts = [(box, torch.empty([stop - start for start, stop in box])) for box in boxes]
    assert saved.read({name: Pieces((5, 7), parts)}) == 16 * 4
    for box, tensor in parts:
        assert torch.equal(tensor, TENSORS[name][tuple(slice(*ends) for ends in box)])


def test_a_copy_does_not_follow_the_state() -> None:
    tensor = torch.ones(4)
    part = Part("layers", {}, {"x": Pieces((4,), [(((0, 4),), tensor)])}, {}).copied()
    tensor.zero_()
    index = part.tensors["x"].__create_write_items__("x", None)[0].index
    assert torch.equal(part.tensors["x"].__get_tensor_shard__(index), torch.ones(4))


def test_what_is_missing_is_found_out_before_it_counts(tmp_path: Path) -> None:
    parts = spread(TENSORS, members=2, cuts=2)
    with pytest.raises(StateError, match=r"the members have \d+ elements of"):
        written(tmp_path, parts[:1])
    assert checkpoints.newest(tmp_path) is None


def test_a_damaged_one_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path, spread(TENSORS, members=1, cuts=1))
    saved = Saved(path)
    (path / "__0_0.distcp").write_bytes(b"nothing")
    with pytest.raises(StateError, match=r"step-000000040 cannot be read: .* If it is damaged, remove it"):
        saved.read({"scalar": Pieces((), [((), torch.empty(()))])})
    (path / checkpoints.METADATA).write_bytes(b"nothing")
    with pytest.raises(StateError, match="cannot be read"):
        Saved(path)


def test_another_job_is_refused_with_what_differs(tmp_path: Path) -> None:
    saved = Saved(written(tmp_path, spread(TENSORS, members=1, cuts=1)))
    saved.check("layers", {"seed": 1})
    with pytest.raises(StateError, match=r"seed is 1 there and 2 here\. Give another --checkpoint-dir"):
        saved.check("layers", {"seed": 2})
    with pytest.raises(StateError, match=r"is of a job of elaunch.hybrid\(\), this is one of elaunch.init\(\)"):
        saved.check("objects", {"seed": 1})


# -- the engine -----------------------------------------------------------------------------------------------------


Course = tuple[list[StepReport], dict[str, Tensor]]


def crew(plan: Plan, steps: int, folder: Path, step: int | None, save: bool, **settings: Any) -> Course:
    """Train under a plan, from a checkpoint if `step` is given, and write one at the end."""
    fabrics = [Fabric(worker, "secret") for worker in plan.workers]
    engines: dict[str, Engine] = {}
    settings = {"dtype": torch.float64, "seed": 3, "dataset": Sentences(), "snapshots": 0, **settings}
    make_optimizer = settings.pop("optimizer", lambda named: torch.optim.AdamW(named, lr=0.01))
    layers = settings.pop("layers", None) or model(plan.n_layers)

    def work(fabric: Fabric) -> list[StepReport]:
        try:
            fabric.connect(addresses(fabrics), epoch=1, timeout_s=PATIENCE_S)
            group = Group(fabric, 1, plan.workers)
            make = partial(Engine, layers, loss, make_optimizer, plan, **settings)
            if step is None:
                engine = make(group=group)
            else:
                engine = make(joining=True)
                engine.restore(group, plan, Saved(checkpoints.path_of(folder, step)))
                engine.install()
                assert engine.step == step
            engines[fabric.worker] = engine
            return [engine.train_step() for _ in range(steps)]
        except BaseException:
            fabric.interrupt(1 << 60)
            fabric.close()
            raise

    try:
        with switching_often():
            reports = together([partial(work, fabric) for fabric in fabrics], TRAIN_S)
        if save:
            written(folder, [engines[worker].durable() for worker in plan.workers], steps)
        return reports[0], whole_parameters(list(engines.values()))
    finally:
        for engine in engines.values():
            engine.close()
        for fabric in fabrics:
            fabric.interrupt(1 << 60)
            fabric.close()


def check_course(first: Plan, second: Plan, folder: Path, **kind: Any) -> None:
    """Two steps under one plan, a checkpoint, two under another: the bits of four steps."""
    expected, undisturbed = train(first, 4, **kind)
    reports, _ = crew(first, 2, folder, None, save=True, **kind)
    rest, weights = crew(second, 2, folder, 2, save=False, **kind)
    assert [*reports, *rest] == expected
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


W = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (symmetric(W, 4, 12, 2, dp=2, pp=2), symmetric(W, 4, 12, 2, dp=4)),
        (symmetric(W, 4, 12, 2, pp=4), symmetric(W[:1], 4, 12, 2)),
        (symmetric(W[:2], 4, 12, 2, dp=2), symmetric(W, 4, 12, 2, dp=2, pp=2, zero="contiguous")),
    ],
    ids=["DP x PP to DP", "four to one", "two to four"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_one_plan_has_written_another_goes_on_from(
    tmp_path: Path, first: Plan, second: Plan, dtype: torch.dtype
) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    check_course(first, second, tmp_path, scheduler=scheduler, clip_norm=0.5, dtype=dtype)


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.05, momentum=0.9), torch.optim.NAdam])
def test_all_that_an_optimizer_keeps_is_in_it(tmp_path: Path, optimizer: Any) -> None:
    check_course(symmetric(W[:2], 4, 8, 2, pp=2), symmetric(W[:2], 4, 8, 2, dp=2), tmp_path, optimizer=optimizer)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_plan_reads_what_any_plan_has_written(tmp_path_factory: pytest.TempPathFactory, data: DataObject) -> None:
    plans = valid_plans(4, 4, 4, tp=(1, 2), max_unit_rows=3, exact=True)
    first, second = data.draw(plans), data.draw(plans)
    folder = tmp_path_factory.mktemp("saved")
    _, before = crew(first, 1, folder, None, save=True)
    _, after = crew(second, 0, folder, 1, save=False)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_names_are_those_of_the_model(tmp_path: Path) -> None:
    crew(symmetric(W[:2], 2, 8, 2, pp=2), 1, tmp_path, None, save=True)
    shapes = Saved(checkpoints.path_of(tmp_path, 1)).shapes()
    assert shapes["model.layers.0.embedding.weight"] == (24, 16)
    assert shapes["optimizer.layers.0.embedding.weight.exp_avg_sq"] == (24, 16)
    assert {name.partition(".")[0] for name in shapes} == {"model", "optimizer"}


def test_another_model_optimizer_or_seed_is_refused(tmp_path: Path) -> None:
    alone = symmetric(W[:1], 3, 8, 2)
    crew(alone, 1, tmp_path, None, save=True)
    with pytest.raises(StateError, match=r"layers\.1\.qkv\.weight is \[48, 16\] there and missing here"):
        crew(symmetric(W[:1], 2, 8, 2), 0, tmp_path, 1, save=False)
    with pytest.raises(StateError, match="the optimizer is AdamW there and SGD here"):
        crew(alone, 0, tmp_path, 1, save=False, optimizer=partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(StateError, match="seed is 3 there and 4 here"):
        crew(alone, 0, tmp_path, 1, save=False, seed=4)
    with pytest.raises(StateError, match="global_batch_size is 8 there and 16 here"):
        crew(symmetric(W[:1], 3, 16, 2), 0, tmp_path, 1, save=False)


# -- registered objects ---------------------------------------------------------------------------------------------


def trained(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(steps):
        net(torch.randn(6, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("members", [1, 3])
def test_registered_objects_come_back_as_they_were(tmp_path: Path, members: int) -> None:
    there, here = trained(1, 3), trained(2, 0)
    parts = [objects.part_of(there, {"seed": 1}, rank, members) for rank in range(members)]
    assert all(part.tensors for part in parts)
    saved = Saved(written(tmp_path, parts))
    assert "model.0.weight" in saved.shapes()
    assert objects.load(here, saved) > 0
    for _ in range(2):
        for each in (there, here):
            torch.manual_seed(9)
            each["optimizer"].zero_grad()
            each["model"](torch.randn(6, 5)).sum().backward()
            each["optimizer"].step()
            each["scheduler"].step()
    states = [each["model"].state_dict() for each in (there, here)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert there["scheduler"].get_last_lr() == here["scheduler"].get_last_lr()


def test_other_objects_are_refused(tmp_path: Path) -> None:
    saved = Saved(written(tmp_path, [objects.part_of(trained(1, 1), {}, 0, 1)]))
    other = {**trained(1, 0), "model": nn.Linear(5, 7)}
    with pytest.raises(StateError, match=r"step-000000040 is of another job: model is not what the checkpoint has"):
        objects.load(other, saved)


# -- one worker's part ----------------------------------------------------------------------------------------------


class Silent:
    """A client that tells nobody."""

    worker = "b/1#0"

    def send(self, message: object) -> None:
        pass


def test_who_does_not_see_the_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoints.FOLDER, str(tmp_path))
    monkeypatch.setattr("elaunch.workers.checkpoints.VISIBLE_S", 0.0)
    mine: Any = Silent()
    with pytest.raises(StateError, match=r"b/1#0 does not see the checkpoint .*step-000000040.* shared file system"):
        Checkpoints(mine).open(40)
    monkeypatch.delenv(checkpoints.FOLDER)
    with pytest.raises(StateError, match="b/1#0 has no --checkpoint-dir"):
        Checkpoints(mine).open(40)


def test_its_facts_are_json(tmp_path: Path) -> None:
    path = written(tmp_path, [objects.part_of(trained(1, 1), {"seed": 5}, 0, 1)])
    about = json.loads((path / checkpoints.ABOUT).read_text())
    assert (about["step"], about["kind"], about["settings"]) == (40, "objects", {"seed": 5})
