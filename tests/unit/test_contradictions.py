"""What is said of a measured profile that disagrees with itself."""

from __future__ import annotations

from typing import Any

from elaunch.policy.measuring.contradictions import Contradiction, changed, contradictions
from elaunch.policy.profile import LinkProfile
from elaunch.policy.sample import Sample


def sample(*turns: tuple[int, int, float, float], **more: Any) -> Sample:
    """Of (layer, rows, forward, backward) turns."""
    spent = {(layer, rows, 1): (forward_s, backward_s, 0.0) for layer, rows, forward_s, backward_s in turns}
    return Sample(spent, **more)


def texts(samples: dict[str, Sample], **more: Any) -> dict[str, str]:
    given: dict[str, Any] = {"speeds": {}, "links": {}, "carried": {}, **more}
    return {one.kind: one.text for one in contradictions(samples, **given)}


def test_figures_that_agree_are_no_news() -> None:
    alike = {"a/0": sample((0, 2, 1.0, 2.0), (0, 4, 1.9, 3.9)), "b/0": sample((0, 2, 1.1, 2.1), (0, 4, 2.0, 4.1))}
    assert texts(alike, step=(1.0, 0.95)) == {}


def test_a_step_that_is_shorter_than_its_parts_is_told_with_both() -> None:
    (text,) = texts({}, step=(0.8, 0.95)).values()
    assert "takes 800 ms" in text
    assert "950 ms" in text
    assert "too slow" in text


def test_a_step_with_much_that_was_not_measured_is_told_with_what_is_left() -> None:
    (text,) = texts({}, step=(1.2, 1.0)).values()
    assert "takes 1.2 s" in text
    assert "other 200 ms" in text
    assert texts({}, step=(1.05, 1.0)) == {}
    assert texts({}, step=(2e-4, 1.2e-4)) == {}, "less than a clock tells apart"


def test_workers_that_differ_on_a_layer_are_named_if_neither_is_slow() -> None:
    apart = {"a/0": sample((3, 4, 0.1, 0.2)), "b/1": sample((3, 4, 0.2, 0.25))}
    text = texts(apart)["layer"]
    assert text.startswith("layers[3]: forward and backward, 4 rows take 300 ms on a/0 and 450 ms on b/1")
    assert texts(apart, speeds={"b/1": 0.67}) == {}
    assert texts({"a/0": sample((3, 4, 0.1, 0.2)), "b/1": sample((3, 8, 0.2, 0.4))}) == {}, "other rows"


def test_rows_that_take_less_than_fewer_are_told() -> None:
    text = texts({"a/0": sample((1, 4, 0.2, 0.2), (1, 8, 0.1, 0.2))})["rows"]
    assert "4 rows take 400 ms on a/0 and 8 300 ms" in text
    assert "mean" in text


def test_rows_that_take_more_than_their_share_are_told() -> None:
    text = texts({"a/0": sample((1, 1, 0.05, 0.05), (1, 8, 0.6, 0.6))})["rows"]
    assert "1 row takes 100 ms on a/0 and 8 1.2 s" in text
    assert "longer among more" in text


def test_kept_bytes_that_differ_are_told() -> None:
    text = texts({"a/0": sample(kept_bytes={2: 1000.0}), "b/0": sample(kept_bytes={2: 1500.0})})["kept"]
    assert "1,000 bytes" in text
    assert "1,500 on b/0" in text


def test_a_link_that_carries_more_than_its_bandwidth_is_told() -> None:
    links = {("a/0", "b/0"): LinkProfile(1e9, 1e-4)}
    text = texts({}, links=links, carried={("a/0", "b/0"): 2e9})["link"]
    assert "2 GB/s" in text
    assert "1 GB/s" in text
    assert texts({}, links=links, carried={("a/0", "b/0"): 0.5e9, ("b/0", "a/0"): 9e9}) == {}


def test_the_worst_of_a_kind_is_told_with_the_number_of_the_others() -> None:
    apart = {
        "a/0": sample((0, 1, 1.0, 1.0), (1, 1, 1.0, 1.0), (2, 1, 1.0, 1.0)),
        "b/0": sample((0, 1, 1.5, 1.5), (1, 1, 2.0, 2.0), (2, 1, 1.0, 1.0)),
    }
    text = texts(apart)["layer"]
    assert text.startswith("layers[1]")
    assert text.endswith("(1 more like this)")


def test_other_values_of_the_same_kinds_are_no_change() -> None:
    one, other = Contradiction("step", "1"), Contradiction("step", "2")
    assert not changed([one], [other])
    assert changed([], [one])
    assert changed([one], [])
