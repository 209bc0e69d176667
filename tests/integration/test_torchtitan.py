"""torchtitan's Trainer: workers lost under FSDP, HSDP and tensor parallelism; checkpoints of one size read by another.

CI does not install torchtitan, which imports triton (200 MB) where there is no GPU, too; by hand:

    .venv/bin/python -m pip install -c constraints.txt torchtitan==0.2.2 triton
    .venv/bin/python -m pytest --soak tests/integration/test_torchtitan.py
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.helpers import ROOT, Spawner
from tests.jobs.watch import Node, elaunch

SCRIPT = ROOT / "tests" / "jobs" / "titan.py"
STEPS = 14

SETTINGS = """
[job]
dump_folder = "{folder}/{name}"
[model]
name = "llama3"
flavor = "tiny"
hf_assets_path = "{folder}"
[optimizer]
implementation = "foreach"
[lr_scheduler]
warmup_steps = 2
total_steps = {steps}
[training]
local_batch_size = 2
seq_len = 64
steps = {steps}
dataset = "c4_test"
dataset_path = "{folder}/texts"
mixed_precision_param = "float32"
[metrics]
log_freq = 1
disable_color_printing = true
[checkpoint]
enable = true
interval = 5
last_save_model_only = false
[debug]
seed = 1
"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="needs pip install torchtitan==0.2.2 triton"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes, and texts of different lengths."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|begin|>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(letters + special)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    texts = [text for path in sorted((ROOT / "docs").glob("*.md")) for text in path.read_text().split("\n\n")]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "data.json").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return tmp_path


def arguments(folder: Path, name: str, flags: Sequence[str]) -> list[str]:
    settings = folder / f"{name}.toml"
    settings.write_text(SETTINGS.format(folder=folder, name=name, steps=STEPS))
    return [str(SCRIPT), "--job.config_file", str(settings), *flags]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **more}


def train(spawn: Spawner, folder: Path, name: str, *flags: str, workers: int, restarts: int = 0, **more: str) -> Node:
    command = ("--standalone", f"--nproc-per-node={workers}", f"--max-restarts={restarts}")
    script = arguments(folder, name, flags)
    node = elaunch(
        spawn, folder, *command, script=script, name=name, warm=False, environment=environment(folder, **more)
    )
    assert node.agent.wait(200) == 0, node.agent.tail()
    return node


def losses(node: Node) -> dict[int, float]:
    return {event["step"] + 1: event["loss"] for event in node.events("step")}


def assert_same_end(folder: Path, name: str, other: str) -> None:
    """The last checkpoints agree: the model, the optimizer, tokens that were seen, where loaders are."""
    one, two = (read_checkpoint(folder / which / "checkpoint" / f"step-{STEPS}") for which in (name, other))
    assert one.keys() == two.keys()
    assert {key for key in one if key.startswith("dataloader.dp_rank_")}, "loaders are in it"
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(value, two[key], rtol=1e-4, atol=1e-6), key
        elif isinstance(value, bytes):
            assert_same_place(pickle.loads(value), pickle.loads(two[key]))
        else:
            assert value == two[key], key


def assert_same_place(one: dict[str, Any], two: dict[str, Any]) -> None:
    """The same tokens follow in two loaders. One that goes on from a state reads a text more than it needs at once."""
    less, more = sorted(
        (one.pop("dataset_state"), two.pop("dataset_state")), key=lambda state: len(state["token_buffer"])
    )
    buffer = less["token_buffer"]
    assert more["token_buffer"][: len(buffer)] == buffer
    assert (more["sample_idx"] > less["sample_idx"]) == (len(more["token_buffer"]) > len(buffer))
    assert one == two


def read_checkpoint(path: Path) -> dict[str, Any]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(what.size, dtype=what.properties.dtype) if isinstance(what, TensorStorageMetadata) else None
        for name, what in metadata.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize(
    ("flags", "workers", "deaths", "restarts"),
    [
        pytest.param((), 3, "1:4,0:9", 0, id="FSDP"),
        pytest.param((), 3, "2:6", 2, id="FSDP, replaced"),
        pytest.param(("--parallelism.data_parallel_replicate_degree=2",), 4, "3:4,0:9", 0, id="HSDP"),
        pytest.param(
            ("--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=8"), 4, "2:5", 2, id="FSDP and TP"
        ),
    ],
)
def test_workers_are_lost_and_losses_stay_as_they_are(
    spawn: Spawner, folder: Path, flags: tuple[str, ...], workers: int, deaths: str, restarts: int
) -> None:
    calm = train(spawn, folder, "calm", *flags, workers=workers)
    all_from = {"ALL_FROM": f"10:{workers}"} if restarts else {}
    node = train(spawn, folder, "deaths", *flags, workers=workers, restarts=restarts, DIE=deaths, **all_from)
    n_deaths = len(deaths.split(","))
    assert sum(event.get("exitcode") != 0 for event in node.events("worker_exited")) == n_deaths
    assert "failed:" not in node.agent.text(), "a change of members is told as the cause of a death"
    assert list(losses(node)) == list(losses(calm)) == list(range(1, STEPS + 1))
    assert losses(node) == pytest.approx(losses(calm), rel=1e-6)
    assert losses(calm)[STEPS] < losses(calm)[1] - 0.1, "something was learned that could be lost"
    assert_same_end(folder, "calm", "deaths")
    if "--parallelism.tensor_parallel_degree=2" in flags:
        assert "3 members cannot be divided into groups of 2: waiting for other members" in node.agent.text()


def test_it_trains_as_under_torchrun_and_goes_on_from_a_checkpoint_with_fewer_workers(
    spawn: Spawner, folder: Path
) -> None:
    calm = train(spawn, folder, "calm", workers=3)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    plain = spawn([*torchrun, *arguments(folder, "plain", ())], name="plain", env=environment(folder))
    assert plain.wait(200) == 0, plain.tail()
    printed = {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", plain.text())}
    assert printed == pytest.approx(losses(calm), abs=1e-5)
    assert_same_end(folder, "calm", "plain")

    train(spawn, folder, "parts", "--training.steps=5", workers=3)
    rest = train(spawn, folder, "parts", workers=2)
    assert len(rest.events("step")) == STEPS, "both jobs have the same log: no step was done twice"
    assert losses(rest) == pytest.approx(losses(calm), rel=1e-6)
    assert_same_end(folder, "calm", "parts")
