"""Profiles: their JSON form, what they make of a schedule, and the derivation of those in benchmarks/profiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.profiles.derive import HERE, MODELS, Model, derive, flops_per_s, measured
from elaunch.errors import ProtocolError
from elaunch.plan import Plan, PlanError, Stage, n_rows, stages, symmetric
from elaunch.plan.schedule import schedule
from elaunch.plan.timeline import timeline
from elaunch.policy.profile import LayerProfile, Profile, action_s, transfer_s

seconds = st.floats(0, 1e3)
sizes = st.integers(0, 2**40)
layer_profiles = st.builds(LayerProfile, seconds, seconds, sizes, sizes, sizes, sizes, seconds, seconds)
profiles = st.builds(
    Profile,
    name=st.text(max_size=5),
    layers=st.lists(layer_profiles | st.just(LayerProfile(1.0, 2.0, 3, 4, 5, 6)), min_size=1, max_size=6).map(tuple),
    tensor_parallel=st.integers(1, 8),
    bandwidth_bytes_per_s=st.floats(1, 1e12),
    latency_s=seconds,
    notes=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    memory_bound=st.floats(0, 1),
)

LAYERS = (
    LayerProfile(0.0, 0.0, 0, 0, 0, 100),
    LayerProfile(1.0, 2.0, 0, 0, 0, 200, fixed_forward_s=0.25, fixed_backward_s=0.5),
    LayerProfile(3.0, 5.0, 0, 0, 0, 300),
    LayerProfile(0.5, 1.0, 0, 0, 0, 400),
)
PROFILE = Profile("four", LAYERS, 1, bandwidth_bytes_per_s=100.0, latency_s=0.125)


@given(profiles)
def test_the_json_form_reads_as_the_profile_it_was_written_from(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_equal_layers_in_a_row_are_one_entry_with_a_count() -> None:
    profile = replace(PROFILE, layers=(LAYERS[1], LAYERS[1], LAYERS[2], LAYERS[1]))
    assert [entry["count"] for entry in json.loads(profile.to_json())["layers"]] == [2, 1, 1]


def test_count_notes_and_fixed_seconds_may_be_left_out() -> None:
    document = json.loads(PROFILE.to_json())
    document["layers"] = [
        {key: value for key, value in entry.items() if key != "count" and not key.startswith("fixed")}
        for entry in document["layers"]
    ]
    document.pop("notes", None)
    layers = tuple(replace(layer, fixed_forward_s=0.0, fixed_backward_s=0.0) for layer in LAYERS)
    assert Profile.from_json(json.dumps(document)) == replace(PROFILE, layers=layers)


def edited(**fields: Any) -> str:
    return json.dumps({**json.loads(PROFILE.to_json()), **fields})


def with_layer(**fields: Any) -> str:
    document = json.loads(PROFILE.to_json())
    document["layers"][1] |= fields
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json is not JSON"),
        ("[]", "p.json must be an object, got []"),
        ("{}", "p.json: version is missing; it must be 1"),
        (edited(version=2), "p.json: version must be 1, or the profile has to be written again, got 2"),
        (edited(version=2, colour="red"), "p.json: version must be 1"),
        (edited(colour="red"), "p.json: colour is unknown; expected version, name, layers"),
        (edited(name=3), "p.json: name must be a text, got 3"),
        (edited(layers=[]), "p.json: layers must be a list with an entry or more, got []"),
        (edited(layers=[7]), "p.json: layers[0] must be an object, got 7"),
        (edited(tensor_parallel=0), "p.json: tensor_parallel must be a whole number of 1 or more, got 0"),
        (edited(bandwidth_bytes_per_s=0), "p.json: bandwidth_bytes_per_s must be a number above 0, got 0"),
        (edited(latency_s=float("nan")), "p.json: latency_s must be a number of 0 or more, got nan"),
        (edited(memory_bound=1.5), "p.json: memory_bound must be a number from 0 to 1, got 1.5"),
        (edited(notes=["a", 1]), "p.json: notes must be a list of texts, got ['a', 1]"),
        (with_layer(count=0), "p.json: layers[1].count must be a number of layers, 1 to 100000, got 0"),
        (with_layer(forward_s_per_row=-1), "p.json: layers[1].forward_s_per_row must be a number of 0 or more, got -1"),
        (with_layer(parameter_bytes=True), "p.json: layers[1].parameter_bytes must be a whole number of 0 or more"),
        (with_layer(speed=1), "p.json: layers[1].speed is unknown"),
    ],
)
def test_an_error_names_the_file_the_field_and_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProtocolError) as error:
        Profile.load(path)
    assert message in str(error.value)


def test_scaling_multiplies_the_seconds_of_layers_and_nothing_else() -> None:
    scaled = PROFILE.scaled(0.5)
    assert scaled.layers[1] == LayerProfile(0.5, 1.0, 0, 0, 0, 200, fixed_forward_s=0.125, fixed_backward_s=0.25)
    assert replace(scaled, layers=LAYERS) == PROFILE


def test_an_action_costs_its_layers_for_its_rows() -> None:
    plan = symmetric(["a", "b"], 4, 6, 3, pp=2)
    cost = action_s(PROFILE, plan)
    assert cost("F", 0, 3) == 0.25 + 3 * 1.0
    assert cost("B", 0, 3) == 0.5 + 3 * 2.0
    assert cost("F", 1, 3) == 3 * 3.5
    assert cost("B", 1, 1) == 6.0


def test_a_message_costs_latency_and_the_bytes_of_its_rows() -> None:
    # The second stage has lost a replica: its one replica takes the rows of both.
    cut = [Stage(range(2), (("a",), ("b",))), Stage(range(2, 4), (("c",), ()))]
    plan = stages(4, 8, 2, cut)
    cost = transfer_s(PROFILE, plan)
    assert cost(0, 2, 2) == 0.125 + 2 * 200 / 100
    assert cost(2, 1, 2) == 0.125 + 2 * 200 / 100


def test_nothing_travels_between_tiles_of_the_same_workers() -> None:
    text = """plan layers 4 batch 2 micro-batch 2 zero interleaved
        layers 0:3 samples 0:2 workers a
        layers 3:4 samples 0:2 workers a"""
    assert transfer_s(PROFILE, Plan.parse(text))(0, 1, 2) == 0.0


@pytest.mark.parametrize("price", [action_s, transfer_s])
def test_a_profile_of_another_model_prices_nothing(price: Callable[[Profile, Plan], object]) -> None:
    with pytest.raises(PlanError, match="four has 4 layers and the plan 5"):
        price(PROFILE, symmetric(["a"], 5, 2, 1))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_a_balanced_pipeline_takes_fill_and_drain_and_its_micro_batches(pp: int, units: int, rows: int) -> None:
    # 1F1B with equal stages: units + pp - 1 times the forward and backward of a stage.
    layer = LayerProfile(0.5, 1.0, 0, 0, 0, 0)
    profile = Profile("even", (layer,) * (2 * pp), 1, 1e9, 0.0)
    plan = symmetric([f"w{place}" for place in range(pp)], 2 * pp, units * rows, rows, pp=pp)
    found = timeline(plan, schedule(plan), action_s(profile, plan), transfer_s(profile, plan))
    assert found.step_s == (units + pp - 1) * 2 * rows * 1.5


@given(st.integers(2, 3), st.integers(1, 3))
def test_the_work_of_a_step_does_not_depend_on_the_plan(replicas: int, rows: int) -> None:
    layers = tuple(replace(layer, fixed_forward_s=0.0, fixed_backward_s=0.0) for layer in LAYERS)
    profile = replace(PROFILE, layers=layers)
    batch = 4 * replicas * rows
    plan = symmetric([f"w{place}" for place in range(2 * replicas)], 4, batch, rows, dp=replicas, pp=2)
    found = timeline(plan, schedule(plan), action_s(profile, plan))
    assert sum(found.busy_s.values()) == sum(layer.forward_s(batch) + layer.backward_s(batch) for layer in layers)
    assert sum(n_rows(micro_batch) for tile in plan.tiles for micro_batch in tile.micro_batches) == 2 * batch


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_profiles_in_the_repository_are_what_the_derivation_gives(model: Model) -> None:
    derived = derive(model, measured())
    assert (HERE / f"{model.name}.json").read_text() == derived.to_json()
    assert Profile.load(HERE / f"{model.name}.json") == derived


@pytest.mark.parametrize(("model", "billions"), [*zip(MODELS, (6.74, 13.02, 33.74))], ids=["7b", "13b", "34b"])
def test_the_models_have_as_many_parameters_as_their_names_say(model: Model, billions: float) -> None:
    parameters = sum(layer.parameter_bytes for layer in derive(model, measured()).layers) // 2
    assert round(parameters / 1e9, 2) == billions


def test_the_measured_layer_gives_the_speed_that_the_readme_says() -> None:
    raw = measured()["computation_profiling_bf16_hidden4096_head32_seqlen2048"]
    per_layer = (raw["layernum[12]_bsz2"] - raw["layernum[6]_bsz2"]) / 6 / 2
    assert raw["layertype_0"] == pytest.approx(per_layer)
    assert round(flops_per_s(measured()) / 1e12, 1) == 185.9
