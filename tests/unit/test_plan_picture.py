"""Drawings of plans."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.plan import Plan, Tile, draw, share, symmetric, to_svg
from tests.unit.plan_strategies import valid_plans, well_formed_plans

repeatable = settings(deadline=None, derandomize=True)

SVG = "{http://www.w3.org/2000/svg}"
PLAN = """\
plan layers 3 batch 6 micro-batch 2 zero interleaved
layers 0:2 samples 0:2 2:4 workers n0/0#0,n0/1#0
layers 0:2 samples 4:6 workers <&>
layers 2:3 samples 0:6/2 workers "x"
idle n1/0#0"""


def large() -> Plan:
    names = [f"node-{index // 8}/{index % 8}#0" for index in range(1024)]
    return symmetric(names, 100, 4096, 4, dp=64, pp=16)


def rectangles(svg: str) -> list[ElementTree.Element]:
    """Those of the plan: the ones that describe themselves."""
    return [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def descriptions(svg: str) -> list[str]:
    return [rect.findtext(f"{SVG}title", "") for rect in rectangles(svg)]


def test_a_drawing_has_a_symbol_per_tuple_and_a_legend() -> None:
    assert draw(Plan.parse(PLAN)).splitlines() == [
        "layer  samples 0:6, 1 in a column",
        "    0  AAAABB",
        "    1  AAAABB",
        "    2  CCCCCC",
        "    A  n0/0#0,n0/1#0",
        "    B  <&>",
        '    C  "x"',
    ]


@repeatable
@given(valid_plans(tp=(1, 2)))
def test_each_cell_shows_who_does_it(plan: Plan) -> None:
    lines = draw(plan).splitlines()
    rows = [line.split()[1] for line in lines[1 : 1 + plan.n_layers]]
    names = {symbol: tuple(name.split(",")) for symbol, name in (line.split() for line in lines[1 + plan.n_layers :])}
    for tile in plan.tiles:
        for layer in tile.layers:
            for sample in (sample for micro_batch in tile.micro_batches for run in micro_batch for sample in run):
                assert names[rows[layer][sample]] == tile.workers


@repeatable
@given(plan=well_formed_plans(), columns=st.integers(1, 9), rows=st.integers(1, 9))
def test_gaps_and_overlaps_are_seen_at_any_size(plan: Plan, columns: int, rows: int) -> None:
    lines = [line.split() for line in draw(plan, 9, 9).splitlines()]
    small = [line.split() for line in draw(plan, columns, rows).splitlines()]
    for symbol, who in (("!", "more than one"), (".", "nobody")):
        whole = "".join(line[1] for line in lines[1 : 1 + plan.n_layers])
        if symbol in whole and (symbol == "!" or "!" not in whole):
            assert [symbol, *who.split()] in small
    layers_in_a_row = -(-plan.n_layers // rows) or 1
    n_rows = -(-plan.n_layers // layers_in_a_row)
    assert all(len(line[1]) <= columns for line in small[1 : 1 + n_rows] if plan.global_batch_size)


def test_a_large_plan_is_drawn_in_a_small_space() -> None:
    lines = draw(large()).splitlines()
    assert lines[0] == "layer  samples 0:4096, 43 in a column"
    assert lines[1].startswith("  0:3  AABCCD")
    assert lines[-1] == "       and 962 more, with the same symbols again"
    assert len(lines) < 110
    assert max(map(len, lines)) <= 110


def test_an_empty_rectangle_is_not_drawn() -> None:
    assert draw(Plan(0, 4, 2, ())) == "(nothing to draw)"
    assert rectangles(to_svg(Plan(3, 0, 2, ()))) == []


def test_the_svg_has_a_rectangle_per_run_with_a_colour_per_tuple_and_escapes_names() -> None:
    plan = Plan.parse(PLAN)
    svg = plan.to_svg()
    assert descriptions(svg) == [
        "tile 0, micro-batch 0: layers 0:2, samples 0:2: n0/0#0,n0/1#0",
        "tile 0, micro-batch 1: layers 0:2, samples 2:4: n0/0#0,n0/1#0",
        "tile 1, micro-batch 0: layers 0:2, samples 4:6: <&>",
        'tile 2, micro-batch 0: layers 2:3, samples 0:2: "x"',
        'tile 2, micro-batch 1: layers 2:3, samples 2:4: "x"',
        'tile 2, micro-batch 2: layers 2:3, samples 4:6: "x"',
    ]
    colours = [rect.get("fill") for rect in rectangles(svg)]
    assert len(set(colours)) == 3
    assert colours[0] == colours[1]
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    for text in ("3 layers × 6 samples, micro-batches of 2", "layers", "samples", "<&>", "idle: n1/0#0"):
        assert text in texts


def test_a_tuple_keeps_its_colour_from_plan_to_plan() -> None:
    plan = Plan.parse(PLAN)
    others = replace(plan, tiles=tuple(reversed(plan.tiles)))

    def colours(drawn: Plan) -> set[tuple[str, str | None]]:
        svg = drawn.to_svg()
        whats = (what.rpartition(": ")[2] for what in descriptions(svg))
        return set(zip(whats, (rect.get("fill") for rect in rectangles(svg))))

    assert colours(plan) == colours(others)


@repeatable
@given(well_formed_plans())
def test_any_plan_can_be_drawn_as_svg_within_its_frame(plan: Plan) -> None:
    svg = to_svg(plan)
    frame = ElementTree.fromstring(svg)
    width, height = float(frame.get("width", 0)), float(frame.get("height", 0))
    for rect in frame.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x <= x + float(rect.get("width", 0)) <= width
        assert 0 <= y <= y + float(rect.get("height", 0)) <= height


def test_what_is_wrong_is_outlined_in_red() -> None:
    plan = Plan.parse(PLAN.replace("2:4 workers", "1:3 workers"))
    svg = plan.to_svg()
    red = [what for what, rect in zip(descriptions(svg), rectangles(svg)) if rect.get("stroke") == "red"]
    assert red == ["layers 0:2, samples 1:2: more than one", "layers 0:2, samples 3:4: nobody"]


def test_the_svg_of_a_large_plan_stays_small() -> None:
    plan = large()
    svg = to_svg(plan)
    assert len(rectangles(svg)) <= 96 * 40
    assert "and 960 more" in svg
    holes = tuple(Tile(tile.layers, tile.micro_batches[1:], tile.workers) for tile in plan.tiles[::5])
    red = [rect for rect in rectangles(to_svg(replace(plan, tiles=holes))) if rect.get("stroke") == "red"]
    assert red


def test_a_plan_of_many_layers_and_one_slot_can_be_drawn() -> None:
    names = [f"n{index}" for index in range(200)]
    plan = symmetric(names, 500, 1, 1, pp=200)
    assert len(rectangles(plan.to_svg())) == 200
    assert draw(plan).splitlines()[1].split() == ["0:13", "A"]
    assert plan.tiles[0].layers == share(500, 200, 0)
