"""Checkpoints: which are complete, what is in them, and that any plan finds its part there."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from elaunch.errors import CheckpointDamaged, LaunchError, StateError, UsageError
from elaunch.plan import Plan, symmetric
from elaunch.wire import Message, Report
from elaunch.wire import Saved as SavedMessage
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.data_parallel.layout import SampleLayout
from elaunch.workers.layers.change.held_state import StepReport
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.member.saving import bytes_on_disk, free_bytes
from elaunch.workers.state import objects
from elaunch.workers.state.boxes import slabs, whole
from elaunch.workers.state.checkpoint import (
    CheckpointShard,
    ChunkedTensor,
    Restored,
    SavedCheckpoint,
    complete,
    notes,
    write_shard,
)
from elaunch.workers.state.checksums import seal, unseal
from tests.helpers import scaled, wait_until
from tests.unit.comm_crew import PATIENCE_S, addresses, switching_often, together
from tests.unit.comm_crew import crew as crew_of
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
        made(tmp_path, "step-000000200.damaged", "step-000000200.damaged-2")
        assert checkpoints.complete(tmp_path) == [100, 20]
        assert checkpoints.newest(tmp_path) == 100
        assert (checkpoints.before(tmp_path, 100), checkpoints.before(tmp_path, 20)) == (20, None)

    def test_one_that_lacks_a_file_is_damaged_and_not_passed_over_without_a_word(self, tmp_path: Path) -> None:
        made(tmp_path, "step-000000100", "step-000000200")
        (tmp_path / "step-000000200" / checkpoints.METADATA).unlink()
        assert checkpoints.newest(tmp_path) == 200

    def test_the_two_newest_stay_and_damaged_ones_that_are_newer(self, tmp_path: Path) -> None:
        made(tmp_path, "step-000000010", "step-000000030", "mine", "step-000000040.1-a.part")
        made(tmp_path, *(f"step-0000000{step}.damaged" for step in (10, 20, 25)))
        assert checkpoints.outdated(tmp_path) == [tmp_path / "step-000000010.damaged"]
        made(tmp_path, "step-000000020", "step-000000020.damaged-2")
        gone = {path.name for path in checkpoints.outdated(tmp_path)}
        damaged = {"step-000000010.damaged", "step-000000020.damaged", "step-000000020.damaged-2"}
        assert gone == {"step-000000010", *damaged}

    def test_what_is_removed_is_told_from_what_was_not_there(self, tmp_path: Path) -> None:
        made(tmp_path, "step-000000010", "step-000000020.1-a.part")
        assert checkpoints.parts(tmp_path) == [tmp_path / "step-000000020.1-a.part"]
        assert checkpoints.discard(tmp_path / "step-000000010")
        assert checkpoints.discard(tmp_path / "step-000000020.1-a.part")
        assert not checkpoints.discard(tmp_path / "step-000000020.1-a.part")
        assert list(tmp_path.iterdir()) == []

    def test_each_damaged_one_that_is_set_aside_gets_a_name(self, tmp_path: Path) -> None:
        for name in ("step-000000010.damaged", "step-000000010.damaged-2"):
            made(tmp_path, "step-000000010")
            assert checkpoints.set_aside(tmp_path / "step-000000010") == tmp_path / name
        assert checkpoints.complete(tmp_path) == []


# -- the format -----------------------------------------------------------------------------------------------------


def spread(tensors: dict[str, Tensor], members: int, cuts: int) -> list[CheckpointShard]:
    """Parts of members that have slabs of each tensor in turn."""
    found: list[dict[str, ChunkedTensor]] = [{} for _ in range(members)]
    for number, (name, tensor) in enumerate(tensors.items()):
        boxes = slabs(whole(tensor.shape), cuts)
        for member in range(members):
            mine = [box for place, box in enumerate(boxes) if (place + number) % members == member]
            views = [(box, tensor[tuple(slice(*ends) for ends in box)]) for box in mine]
            if views:
                found[member][name] = ChunkedTensor(tensor.shape, views)
    return [CheckpointShard("layers", {"seed": 1}, pieces, {"member": member}) for member, pieces in enumerate(found)]


def written(folder: Path, parts: Sequence[CheckpointShard], step: int = 40) -> Path:
    part = checkpoints.part_of(folder, step, "1-a")
    part.mkdir()
    for member, mine in enumerate(parts):
        assert write_shard(part, member, mine.copied())
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
    assert SavedCheckpoint(path).shapes() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(found, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert all(torch.equal(one[name], TENSORS[name]) for name in TENSORS)


def test_any_boxes_are_read(tmp_path: Path) -> None:
    saved = SavedCheckpoint(written(tmp_path, spread(TENSORS, members=2, cuts=3)))
    assert (saved.step, [facts["member"] for facts in saved.facts]) == (40, [0, 1])
    name = "model.layers.0.weight"
    boxes = [((1, 4), (2, 7)), ((4, 5), (0, 1))]
    parts = [(box, torch.empty([stop - start for start, stop in box])) for box in boxes]
    assert saved.read({name: ChunkedTensor((5, 7), parts)}) == 16 * 4
    for box, tensor in parts:
        assert torch.equal(tensor, TENSORS[name][tuple(slice(*ends) for ends in box)])


def test_a_copy_does_not_follow_the_state() -> None:
    tensor = torch.ones(4)
    part = CheckpointShard("layers", {}, {"x": ChunkedTensor((4,), [(((0, 4),), tensor)])}, {}).copied()
    tensor.zero_()
    ((_, copy),) = part.tensors["x"].parts
    assert torch.equal(copy, torch.ones(4))


def test_what_is_missing_is_found_out_before_it_counts(tmp_path: Path) -> None:
    parts = spread(TENSORS, members=2, cuts=2)
    with pytest.raises(StateError, match=r"the members have \d+ elements of"):
        written(tmp_path, parts[:1])
    assert checkpoints.newest(tmp_path) is None


# -- damage ---------------------------------------------------------------------------------------------------------


def restored(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    SavedCheckpoint(path).read(
        {name: ChunkedTensor(tensor.shape, [(whole(tensor.shape), tensor)]) for name, tensor in found.items()}
    )
    return found


def flip(path: Path, begin: int, count: int = 64) -> None:
    """Invert bytes of a file; a negative place counts from its end."""
    data = bytearray(path.read_bytes())
    begin %= len(data)
    for place in range(begin, min(begin + count, len(data))):
        data[place] ^= 0xFF
    path.write_bytes(data)


LARGE = {"model.layers.0.weight": torch.arange(20_000.0).view(100, 200), "scalar": torch.tensor(3.5)}
DISTCP = "__0_0.distcp"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda path: flip(path / DISTCP, 40_000),
            r"__0_0\.distcp: bytes 0 to \d+ \(model\.layers\.0\.weight\) have the checksum \w{32}, expected \w{32}",
        ),
        (lambda path: flip(path / DISTCP, 100, 1), r"__0_0\.distcp: bytes 0 to \d+ \(model\.layers\.0\.weight\) have"),
        (lambda path: flip(path / DISTCP, -40, 1), r"__0_0\.distcp: bytes \d+ to \d+ \(scalar\) have the checksum"),
        (lambda path: os.truncate(path / DISTCP, 50_000), r"__0_0\.distcp has 50000 bytes, expected \d+"),
        (lambda path: (path / DISTCP).write_bytes(b""), r"__0_0\.distcp has 0 bytes, expected \d+"),
        (lambda path: (path / DISTCP).unlink(), r"__0_0\.distcp is missing"),
        (lambda path: flip(path / ".metadata", 300), r"\.metadata: bytes 0 to \d+ have the checksum \w{32}, expected"),
        (lambda path: (path / ".metadata").write_bytes(b"x"), r"\.metadata has 1 bytes, expected \d+"),
        (lambda path: (path / ".metadata").unlink(), r"\.metadata is missing"),
        (lambda path: flip(path / "elaunch.json", 20, 1), r"elaunch\.json: its checksum is \w{32}, expected \w{32}"),
        (lambda path: flip(path / "elaunch.json", -3, 1), r"elaunch\.json: its checksum is \w{32}, expected"),
        (lambda path: flip(path / "elaunch.json", -45), r"elaunch\.json: it has no checksum"),
        (lambda path: (path / "elaunch.json").unlink(), r"elaunch\.json is missing"),
        (lambda path: (path / "elaunch.json").write_bytes(b""), r"elaunch\.json: it has no checksum"),
        (lambda path: (path / "elaunch.json").write_text("[" * 100_000), r"elaunch\.json: it has no checksum"),
        (lambda path: (path / "elaunch.json").write_text('{"version": ' + "1" * 100_000 + "}"), "it has no checksum"),
        (lambda path: (path / "elaunch.json").write_text('"\\ud800"'), r"elaunch\.json: it has no checksum"),
        (lambda path: (path / "elaunch.json").write_bytes(b'{"step": "\xed\xa0\x80"}'), "it has no checksum"),
        (lambda path: (path / "elaunch.json").write_text("[]" * 10_000_000), r"elaunch\.json: it has no checksum"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], object], problem: str) -> None:
    path = written(tmp_path, spread(LARGE, members=1, cuts=1))
    assert torch.equal(restored(path, LARGE)["model.layers.0.weight"], LARGE["model.layers.0.weight"])
    damage(path)
    with pytest.raises(CheckpointDamaged, match=f"step-000000040 is damaged: .*{problem}"):
        restored(path, LARGE)


def test_checksums_are_of_what_was_to_be_written(tmp_path: Path) -> None:
    part = checkpoints.part_of(tmp_path, 40, "1-a")
    part.mkdir()
    write_shard(part, 0, spread(LARGE, members=1, cuts=1)[0].copied())
    flip(part / DISTCP, 40_000)  # by the disk, before anybody has read it
    path = complete(part, 40, [notes(part, 1)[0]])
    with pytest.raises(CheckpointDamaged, match="have the checksum"):
        restored(path, LARGE)


def test_a_member_that_needs_nothing_of_what_is_damaged_finds_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, spread(LARGE, members=1, cuts=2))
    saved = SavedCheckpoint(path)
    flip(path / DISTCP, 10_000, 1)
    half = torch.empty(50, 200)
    name = "model.layers.0.weight"
    saved.read({name: ChunkedTensor((100, 200), [(((50, 100), (0, 200)), half)])})
    assert torch.equal(half, LARGE[name][50:])
    with pytest.raises(CheckpointDamaged):
        saved.read({name: ChunkedTensor((100, 200), [(((49, 100), (0, 200)), torch.empty(51, 200))])})


@settings(max_examples=scaled(100, 300), deadline=None)
@given(st.data())
def test_no_flipped_byte_ever_reaches_a_tensor(tmp_path_factory: pytest.TempPathFactory, data: DataObject) -> None:
    """Either it is found, or nobody reads it and the tensors are what they were."""
    path = _undamaged(tmp_path_factory)
    file = path / data.draw(st.sampled_from(sorted(each.name for each in path.iterdir())))
    whole_file = file.read_bytes()
    places = data.draw(st.lists(st.integers(0, len(whole_file) - 1), min_size=1, max_size=8, unique=True))
    changed = bytearray(whole_file)
    for place in places:
        changed[place] ^= data.draw(st.integers(1, 255))
    try:
        file.write_bytes(changed)
        try:
            found = restored(path, TENSORS)
        except CheckpointDamaged:
            return
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
        assert (SavedCheckpoint(path).step, SavedCheckpoint(path).facts) == (40, [{"member": 0}, {"member": 1}])
    finally:
        file.write_bytes(whole_file)


_written: list[Path] = []


def _undamaged(factory: pytest.TempPathFactory) -> Path:
    if not _written:
        _written.append(written(factory.mktemp("flipped"), spread(TENSORS, members=2, cuts=3)))
    return _written[0]


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.EIO, CheckpointDamaged, "elaunch.json cannot be read: Input/output error"),
        (errno.EACCES, StateError, "cannot be read: .*Permission denied"),
        (errno.ESTALE, StateError, "cannot be read: .*Stale file handle"),
    ],
)
def test_only_lasting_errors_of_the_disk_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StateError], text: str
) -> None:
    path = written(tmp_path, spread(LARGE, members=1, cuts=1))

    def fails(self: Path, *_: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(StateError, match=text) as error:
        SavedCheckpoint(path)
    assert type(error.value) is kind


def test_a_newer_version_is_not_damage(tmp_path: Path) -> None:
    path = written(tmp_path, spread(LARGE, members=1, cuts=1))
    (path / checkpoints.ABOUT).write_bytes(seal({"version": 3, "else": "unknown"}))
    with pytest.raises(StateError, match="has version 3, and this elaunch reads versions up to 2") as error:
        SavedCheckpoint(path)
    assert type(error.value) is StateError


def as_version_1(path: Path) -> None:
    about = unseal((path / checkpoints.ABOUT).read_bytes())
    del about["files"]
    (path / checkpoints.ABOUT).write_text(json.dumps({**about, "version": 1}))


def test_the_version_before_is_read_without_checks(tmp_path: Path) -> None:
    path = written(tmp_path, spread(LARGE, members=1, cuts=1))
    assert SavedCheckpoint(path).checked
    as_version_1(path)
    assert not SavedCheckpoint(path).checked
    assert torch.equal(restored(path, LARGE)["scalar"], LARGE["scalar"])
    (path / DISTCP).write_bytes(b"nothing")
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp cannot be read"):
        restored(path, LARGE)
    (path / checkpoints.METADATA).write_bytes(b"nothing")
    with pytest.raises(CheckpointDamaged, match=r"\.metadata cannot be read"):
        SavedCheckpoint(path)


def test_a_note_that_the_disk_has_garbled_completes_nothing(tmp_path: Path) -> None:
    part = checkpoints.part_of(tmp_path, 40, "1-a")
    part.mkdir()
    write_shard(part, 0, spread(LARGE, members=1, cuts=1)[0].copied())
    flip(part / "part-00000.json", 30, 1)
    with pytest.raises(ValueError, match=r"part-00000\.json: its checksum is"):
        notes(part, 1)


def test_another_job_is_refused_with_what_differs(tmp_path: Path) -> None:
    saved = SavedCheckpoint(written(tmp_path, spread(TENSORS, members=1, cuts=1)))
    saved.check("layers", {"seed": 1})
    with pytest.raises(StateError, match=r"seed is 1 there and 2 here\. Give another --checkpoint-dir"):
        saved.check("layers", {"seed": 2})
    with pytest.raises(StateError, match=r"is of a job of elaunch.hybrid\(\), this is one of elaunch.init\(\)"):
        saved.check("objects", {"seed": 1})


def test_a_checkpoint_of_an_older_order_of_samples_is_refused(tmp_path: Path) -> None:
    before = SampleLayout(6, 2, False, n_samples=30, seed=1, shuffle=False).cursor
    saved = SavedCheckpoint(written(tmp_path, [replace(one, settings=before) for one in spread(TENSORS, 1, cuts=1)]))
    saved.check("layers", before)
    now = SampleLayout(6, 2, False, n_samples=30, seed=1, shuffle=True).cursor
    with pytest.raises(StateError, match=r"shuffled order is not recorded \(its elaunch was older\) there and 2 here"):
        saved.check("layers", {**now, "shuffle": False})


# -- the engine -----------------------------------------------------------------------------------------------------


Course = tuple[list[StepReport], dict[str, Tensor]]


def crew(plan: Plan, steps: int, folder: Path, step: int | None, save: bool, **settings: Any) -> Course:
    """Train under a plan, from a checkpoint if `step` is given, and write one at the end."""
    transports = [Transport(worker, "secret") for worker in plan.workers]
    engines: dict[str, Engine] = {}
    settings = {"dtype": torch.float64, "seed": 3, "dataset": Sentences(), "snapshots": 0, **settings}
    make_optimizer = settings.pop("optimizer", lambda named: torch.optim.AdamW(named, lr=0.01))
    layers = settings.pop("layers", None) or model(plan.n_layers)
    script = settings.pop("script", lambda engine: None)

    def work(transport: Transport) -> list[StepReport]:
        try:
            transport.connect(addresses(transports), generation=1, timeout_s=PATIENCE_S)
            group = Group(transport, 1, plan.workers)
            make = partial(Engine, layers, loss, make_optimizer, plan, EngineSettings(**settings))
            if step is None:
                engine = make(group=group)
                script(engine)
            else:
                engine = make(joining=True)
                saved = SavedCheckpoint(checkpoints.path_of(folder, step))
                engine.restore(group, plan, lambda read: Restored(saved, *read(saved), 0.0))
                engine.install()
                assert engine.step == step
            engines[transport.worker] = engine
            return [engine.train_step() for _ in range(steps)]
        except BaseException:
            transport.interrupt(1 << 60)
            transport.close()
            raise

    try:
        with switching_often():
            reports = together([partial(work, transport) for transport in transports], TRAIN_S)
        if save:
            written(folder, [engines[worker].durable() for worker in plan.workers], steps)
        return reports[0], whole_parameters(list(engines.values()))
    finally:
        for engine in engines.values():
            engine.close()
        for transport in transports:
            transport.interrupt(1 << 60)
            transport.close()


def check_course(first: Plan, second: Plan, folder: Path, **kind: Any) -> None:
    """Two steps under one plan, a checkpoint, two under another: the bits of four steps."""
    expected, undisturbed = train(first, 4, **kind)
    reports, _ = crew(first, 2, folder, None, save=True, **kind)
    rest, weights = crew(second, 2, folder, 2, save=False, **kind)
    assert [*reports, *rest] == expected
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


W = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]


@pytest.mark.job
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


@pytest.mark.job
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.05, momentum=0.9), torch.optim.NAdam])
def test_all_that_an_optimizer_keeps_is_in_it(tmp_path: Path, optimizer: Any) -> None:
    check_course(symmetric(W[:2], 4, 8, 2, pp=2), symmetric(W[:2], 4, 8, 2, dp=2), tmp_path, optimizer=optimizer)


@pytest.mark.job
@settings(max_examples=scaled(4, 8), deadline=None)
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
    shapes = SavedCheckpoint(checkpoints.path_of(tmp_path, 1)).shapes()
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
    saved = SavedCheckpoint(written(tmp_path, parts))
    assert "model.0.weight" in saved.shapes()
    state, read_bytes = objects.read(saved)
    assert read_bytes > 0
    objects.fill(here, saved, state)
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
    saved = SavedCheckpoint(written(tmp_path, [objects.part_of(trained(1, 1), {}, 0, 1)]))
    other = {**trained(1, 0), "model": nn.Linear(5, 7)}
    with pytest.raises(StateError, match=r"step-000000040 is of another job: model is not what the checkpoint has"):
        objects.fill(other, saved, objects.read(saved)[0])


# -- members --------------------------------------------------------------------------------------------------------


def same(part: CheckpointShard) -> CheckpointShard:
    return part


class Listener:
    """A client that keeps what it is told."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.said: list[Message] = []

    def send(self, message: Message) -> None:
        self.said.append(message)

    def reports(self, kind: str) -> list[dict[str, Any]]:
        return [one.fields for one in self.said if isinstance(one, Report) and one.kind == kind]

    def known(self) -> list[int]:
        return [one.step for one in self.said if isinstance(one, SavedMessage)]


class Members:
    """Some workers of a job in one process, each with its checkpoints."""

    def __init__(self, transports: Sequence[Transport], generation: int = 1) -> None:
        self.clients = [Listener(transport.worker) for transport in transports]
        clients: list[Any] = list(self.clients)
        self.checkpoints = [Checkpoints(client) for client in clients]
        ids = [transport.worker for transport in transports]
        self.groups = [Group(transport, generation, ids) for transport in transports]

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Each writes its part, to the end."""
        parts = spread(tensors, len(self.groups), 2)
        together(
            [
                partial(each.last, group, step, partial(same, part))
                for each, group, part in zip(self.checkpoints, self.groups, parts, strict=True)
            ]
        )

    def begin(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Each begins to write its part."""
        together(
            [
                partial(each.boundary, group, step, partial(same, part))
                for each, group, part in zip(
                    self.checkpoints, self.groups, spread(tensors, len(self.groups), 2), strict=True
                )
            ]
        )

    def restore(self, step: int, tensors: dict[str, Tensor]) -> list[Restored[dict[str, Tensor]]]:
        """All read all tensors."""

        def read(saved: SavedCheckpoint) -> tuple[dict[str, Tensor], int]:
            found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            wanted = {name: ChunkedTensor(each.shape, [(whole(each.shape), each)]) for name, each in found.items()}
            return found, saved.read(wanted)

        return together(
            [
                partial(each.restore, group, step, read)
                for each, group in zip(self.checkpoints, self.groups, strict=True)
            ]
        )

    def close(self) -> None:
        for each in self.checkpoints:
            each.close()


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    """Two, with a checkpoint after each step."""
    monkeypatch.setenv(checkpoints.FOLDER, str(tmp_path))
    monkeypatch.setenv(checkpoints.EVERY, "1")
    monkeypatch.setattr("elaunch.workers.checkpoints.VISIBLE_S", 0.2)
    with crew_of(2) as transports:
        found = Members(transports)
        yield found
        found.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def removed(folder: Path) -> bool:
    return not any(name.endswith(".part") for name in names(folder))


class TestGoingBack:
    def test_to_the_one_before_when_the_newest_is_damaged_for_one_member(
        self, tmp_path: Path, members: Members, capfd: pytest.CaptureFixture[str]
    ) -> None:
        newer = {name: tensor + 1 for name, tensor in LARGE.items()}
        members.save(1, LARGE)
        members.save(2, newer)
        flip(tmp_path / "step-000000002" / "__1_0.distcp", 5_000)
        found = members.restore(2, LARGE)
        assert [one.saved.step for one in found] == [1, 1]
        assert all(torch.equal(one.state[name], LARGE[name]) for one in found for name in LARGE)
        said = [line for line in capfd.readouterr().err.splitlines() if "damaged" in line]
        assert len(said) == 1
        assert f"{tmp_path}/step-000000002 is damaged, and passed over: __1_0.distcp: bytes" in said[0]
        assert said[0].endswith("It is kept as step-000000002.damaged; the job goes back to step-000000001")
        assert names(tmp_path) == {"step-000000001", "step-000000002.damaged"}
        (report,) = members.clients[0].reports("checkpoint_damaged")
        assert (report["step"], report["older"]) == (2, 1)
        assert report["path"] == f"{tmp_path}/step-000000002.damaged"
        assert not members.clients[1].reports("checkpoint_damaged")
        # The agents know where the job is, and it may write the second one again.
        assert [client.known()[-1] for client in members.clients] == [1, 1]

    def test_then_the_same_step_is_saved_anew(self, tmp_path: Path, members: Members) -> None:
        members.save(1, LARGE)
        members.save(2, LARGE)
        (tmp_path / "step-000000002" / "__0_0.distcp").unlink()
        members.restore(2, LARGE)
        again = Members([group.transport for group in members.groups])
        again.save(2, LARGE)
        assert [one.saved.step for one in again.restore(2, LARGE)] == [2, 2]
        again.save(3, LARGE)
        assert names(tmp_path) == {"step-000000002", "step-000000003"}

    def test_over_several_to_one_that_is_whole(self, tmp_path: Path, members: Members) -> None:
        members.save(1, LARGE)
        shutil.copytree(tmp_path / "step-000000001", tmp_path / "step-000000003")
        members.save(4, LARGE)
        shutil.copytree(tmp_path / "step-000000003", tmp_path / "step-000000001", dirs_exist_ok=True)
        (tmp_path / "step-000000004" / ".metadata").unlink()
        flip(tmp_path / "step-000000003" / "elaunch.json", 30)
        assert [one.saved.step for one in members.restore(4, LARGE)] == [1, 1]
        assert [one["step"] for one in members.clients[0].reports("checkpoint_damaged")] == [4, 3]

    def test_when_none_is_whole_the_job_ends_and_names_them_all(self, tmp_path: Path, members: Members) -> None:
        members.save(1, LARGE)
        members.save(2, LARGE)
        for step in (1, 2):
            flip(tmp_path / f"step-00000000{step}" / "__0_0.distcp", 5_000)
        with pytest.raises(StateError, match=r"no checkpoint is whole.*step-000000002: __0_0.*step-000000001: __0_0"):
            members.restore(2, LARGE)
        # The next start does not begin from nothing without a word; and the agents do not start the job again for it.
        assert checkpoints.complete(tmp_path) == [1]
        assert members.clients[0].known()[-1] == 0

    def test_what_is_no_damage_ends_the_job(self, tmp_path: Path, members: Members) -> None:
        members.save(1, LARGE)
        members.save(2, LARGE)
        (tmp_path / "step-000000002" / checkpoints.ABOUT).write_bytes(seal({"version": 3}))
        with pytest.raises(StateError, match="has version 3"):
            members.restore(2, LARGE)
        assert checkpoints.complete(tmp_path) == [2, 1]

    def test_what_the_first_member_finds_gone_is_passed_over(self, tmp_path: Path, members: Members) -> None:
        members.save(1, LARGE)
        assert [one.saved.step for one in members.restore(2, LARGE)] == [1, 1]

    def test_one_without_checksums_is_said_to_have_none(
        self, tmp_path: Path, members: Members, capfd: pytest.CaptureFixture[str]
    ) -> None:
        members.save(1, LARGE)
        as_version_1(tmp_path / "step-000000001")
        members.restore(1, LARGE)
        assert capfd.readouterr().err.count("has no checksums: it was read without checks") == 1

    def test_what_earlier_runs_left_incomplete_goes(self, tmp_path: Path, members: Members) -> None:
        members.save(1, LARGE)
        made(tmp_path, "step-000000009.7-ab.part")
        members.restore(1, LARGE)
        wait_until(lambda: removed(tmp_path), 10, "the end of what was left")
        assert names(tmp_path) == {"step-000000001"}

    def test_who_does_not_see_the_checkpoint_says_so(
        self, members: Members, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("elaunch.waits.WAITED_S", 0.01)
        monkeypatch.setattr("elaunch.waits.LOOK_S", 0.05)
        with pytest.raises(
            StateError, match=r"a/1#0 does not see the checkpoint .*step-000000040.* shared file system"
        ):
            members.checkpoints[1]._open(40, first=False)
        told = r"waiting for 0 s, 0 s left: the checkpoint \S*/step-000000040 to be seen by a/1#0\n"
        assert re.search(told, capfd.readouterr().err)

    def test_and_does_not_go_on_without_it(
        self, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        members.save(1, LARGE)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.setenv(checkpoints.FOLDER, str(tmp_path / "elsewhere"))
        lost: Any = Listener("a/1#0")
        members.checkpoints[1] = Checkpoints(lost)
        with pytest.raises(StateError, match=r"a/1#0 does not see the checkpoint .*step-000000001"):
            members.restore(1, LARGE)

    def test_so_does_who_has_no_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        client: Any = Listener("b/1#0")
        with pytest.raises(StateError, match="b/1#0 has no --checkpoint-dir"):
            Checkpoints(client)._open(40, first=False)


class TestFailedSaves:
    def test_a_full_disk_leaves_nothing_behind_and_the_next_one_is_complete(
        self,
        tmp_path: Path,
        members: Members,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        for member in (0, 1):
            made = partial(self.make_with_full_disk, member)
            with monkeypatch.context() as patch:
                patch.setattr("elaunch.workers.member.saving.make_folder", made)
                members.save(member + 1, LARGE)
            wait_until(lambda: removed(tmp_path), 10, "the end of what was written")
            assert names(tmp_path) == set()
            (line,) = capfd.readouterr().err.splitlines()
            what = f"a/{member}#0 could not write the checkpoint after {member + 1} steps: OSError: [Errno 28] No space"
            assert what in line
            assert re.search(
                rf"; its files were removed; {tmp_path} has [\d.]+ .?B free, and it takes \d\d\.\d kB$", line
            )
        members.save(3, LARGE)
        assert names(tmp_path) == {"step-000000003"}
        assert [one.saved.step for one in members.restore(3, LARGE)] == [3, 3]

    def make_with_full_disk(self, member: int, folder: Path) -> str:
        """For one member."""
        folder.mkdir()
        (folder / f"__{member}_0.distcp").symlink_to("/dev/full")
        return ""

    def test_a_folder_that_cannot_be_made_is_said(
        self,
        tmp_path: Path,
        members: Members,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        def fails(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            made(tmp_path, "step-000000009.7-ab.part")
            patch.setattr(Path, "mkdir", fails)
            members.save(1, LARGE)
        # What others left behind may be why.
        wait_until(lambda: removed(tmp_path), 10, "the end of what was left")
        assert capfd.readouterr().err == (
            "[elaunch] no checkpoint after 1 steps: OSError: [Errno 28] No space left on device\n"
        )
        members.save(2, LARGE)
        assert names(tmp_path) == {"step-000000002"}

    def test_nothing_is_begun_for_which_there_is_no_room_and_what_was_left_goes(
        self, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        made(tmp_path, "step-000000009.7-ab.part")
        with monkeypatch.context() as patch:
            patch.setattr("elaunch.workers.member.saving.free_bytes", lambda _: 50_000)
            members.save(1, LARGE)
        wait_until(lambda: removed(tmp_path), 10, "the end of what was left")
        said = capfd.readouterr().err
        assert re.fullmatch(
            rf"\[elaunch\] no checkpoint after 1 steps: {tmp_path} has 50 kB free, and it takes \d\d\.\d kB\n", said
        )
        assert members.checkpoints[1]._attempt is None
        members.save(2, LARGE)
        assert names(tmp_path) == {"step-000000002"}
        assert [one.saved.step for one in members.restore(2, LARGE)] == [2, 2]

    def test_what_it_takes_is_what_is_written_and_little_more(self, tmp_path: Path) -> None:
        parts = spread({**LARGE, **TENSORS}, members=2, cuts=5)
        path = written(tmp_path, parts)
        there = sum(file.stat().st_size for file in path.iterdir())
        assert there <= sum(map(bytes_on_disk, parts)) < there + 1000 * len(TENSORS) * 5

    def test_a_file_system_without_a_size_is_not_full(self, tmp_path: Path) -> None:
        assert (free_bytes(tmp_path) or 0) > 0
        assert free_bytes(Path("/proc")) is None
        assert free_bytes(tmp_path / "nowhere") is None

    def test_a_folder_that_cannot_be_read_leaves_one_out(
        self, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def fails() -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        with monkeypatch.context() as patch:
            patch.setattr(members.checkpoints[0], "newest", fails)
            members.begin(1, LARGE)
        assert (
            capfd.readouterr().err == "[elaunch] no checkpoint after 1 steps: OSError: [Errno 116] Stale file handle\n"
        )
        members.save(2, LARGE)
        assert names(tmp_path) == {"step-000000002"}

    def test_a_job_that_begins_removes_what_an_earlier_one_left(self, tmp_path: Path, members: Members) -> None:
        made(tmp_path, "step-000000009.7-ab.part")
        ids = ["a/0#0", "a/1#0"]
        members.checkpoints[1].entered(ids, begins=True)
        members.checkpoints[0].entered(ids, begins=False)
        assert not removed(tmp_path)
        members.checkpoints[0].entered(ids, begins=True)
        wait_until(lambda: removed(tmp_path), 10, "the end of what was left")

    def test_a_member_that_comes_late_does_not_make_the_folder_again(
        self, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late, original = threading.Event(), write_shard

        def write(folder: Path, member: int, *rest: Any) -> bool:
            if member == 1:
                late.wait(PATIENCE_S)
            else:
                (folder / "__0_0.distcp").symlink_to("/dev/full")
            return original(folder, member, *rest)

        monkeypatch.setattr("elaunch.workers.state.checkpoint.write_shard", write)
        members.begin(1, LARGE)
        wait_until(lambda: names(tmp_path) == set(), 10, "the end of what was written")
        late.set()
        attempt = members.checkpoints[1]._attempt
        assert attempt is not None
        assert attempt.over.wait(10)
        assert names(tmp_path) == set()

    def test_what_a_first_member_that_died_has_not_completed_goes(
        self, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(members.checkpoints[0], "_complete", lambda attempt: None)
        members.save(1, LARGE)
        assert not removed(tmp_path)
        members.checkpoints[1].entered(["a/1#0", "a/2#0"])
        wait_until(lambda: removed(tmp_path), 10, "the end of what was written")
        wait_until(
            lambda: "left incomplete: a/0#0 did not complete it; its files were" in capfd.readouterr().err, 10, ""
        )
        members.checkpoints[1].entered(["a/1#0"])

    def test_a_member_that_never_heard_of_a_save_is_not_waited_for(
        self, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(members.checkpoints[1], "_write", lambda *_: None)
            members.begin(1, LARGE)
        members.checkpoints[1]._attempt = None  # it was interrupted in the exchange
        members.begin(2, LARGE)
        wait_until(lambda: names(tmp_path) == set(), 10, "the end of what was written")
        members.save(3, LARGE)
        assert names(tmp_path) == {"step-000000003"}

    def test_what_was_left_goes_before_a_new_save(self, tmp_path: Path, members: Members) -> None:
        made(tmp_path, "step-000000009.7-ab.part")
        members.save(1, LARGE)
        assert names(tmp_path) == {"step-000000001"}

    def test_who_ends_leaves_nothing_behind(self, tmp_path: Path, members: Members) -> None:
        attempt_of = members.checkpoints[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("elaunch.workers.state.checkpoint.notes", lambda *_: {})
            members.begin(1, LARGE)
            attempt_of.close()
        assert removed(tmp_path)


def test_its_facts_are_json(tmp_path: Path) -> None:
    path = written(tmp_path, [objects.part_of(trained(1, 1), {"seed": 5}, 0, 1)])
    about = json.loads((path / checkpoints.ABOUT).read_text())
    assert (about["step"], about["kind"], about["settings"]) == (40, "objects", {"seed": 5})
