"""The parts of examples/train_gpt.py."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import ROOT


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_samples_are_windows_of_the_corpus_and_their_successors(gpt: ModuleType) -> None:
    data = gpt.Sources(corpus_bytes=10_000, context=16)
    assert len(data) == 9_999 // 16
    joined = torch.cat([data[index][0] for index in range(len(data))])
    assert torch.equal(joined, data.bytes[: len(joined)].long())
    for context, following in (data[0], data[len(data) - 1]):
        assert context.shape == following.shape == (16,)
        assert torch.equal(context[1:], following[:-1])


def test_the_corpus_is_the_same_each_time(gpt: ModuleType) -> None:
    assert torch.equal(gpt.Sources(100_000, 8).bytes, gpt.Sources(100_000, 8).bytes)


def test_a_corpus_that_is_too_short_is_a_clear_error(gpt: ModuleType) -> None:
    with pytest.raises(SystemExit, match="too short for --context 64"):
        gpt.Sources(corpus_bytes=64, context=64)


def build(gpt: ModuleType, seed: int, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model: torch.nn.Module = gpt.GPT(layers=2, width=16, heads=2, context=8, dropout=dropout)
    return model


def test_the_first_weights_depend_on_the_seed_only(gpt: ModuleType) -> None:
    first, second, other = (build(gpt, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_no_position_sees_what_comes_after_it(gpt: ModuleType) -> None:
    model = build(gpt, 0)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 99
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_dropout_works_while_training_only(gpt: ModuleType) -> None:
    model, tokens = build(gpt, 0, dropout=0.5), torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_model_learns_in_every_dtype(gpt: ModuleType, dtype: torch.dtype) -> None:
    model = build(gpt, 0).to(dtype)
    data = gpt.Sources(2_000, 8)
    context, following = (torch.stack(part) for part in zip(*(data[index] for index in range(8))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(context).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(gpt: ModuleType) -> None:
    rates = [gpt.learning_rate(step, steps=200) for step in range(260)]
    assert rates[:20] == sorted(rates[:20])
    assert max(rates) == rates[20] == 1.0
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[200:] == pytest.approx([0.1] * 60)
    assert min(gpt.learning_rate(step, steps=1) for step in range(30)) > 0


def test_the_defaults_are_a_model_of_about_a_million_parameters(gpt: ModuleType) -> None:
    args = gpt.parse([])
    model = gpt.GPT(args.layers, args.width, args.heads, args.context, args.dropout)
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert (args.global_batch_size, args.micro_batch_size) == (64, 8)


class FixedJob:
    """As much of a job as the log asks for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.size = 3


def test_the_log_prints_the_mean_of_a_due_step_once_on_the_first_worker(
    gpt: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        log = gpt.Log(FixedJob(rank), every=2)
        for step in range(5):
            for loss in (1.0, 2.0 + step):
                log.add(step, torch.tensor(loss))
        log.print()
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit("  ", 1)[0] for line in lines] == [
        "step     0  loss 1.5000  members 3",
        "step     2  loss 2.5000  members 3",
        "step     4  loss 3.5000  members 3",
    ]
    assert all(line.endswith("ms/step") for line in lines)
