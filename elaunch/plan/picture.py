"""Drawings of a plan for people: layers downward, samples to the right. An invalid plan can be drawn, too."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from html import escape
from itertools import chain, groupby
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TYPE_CHECKING, NamedTuple

from elaunch.plan.coverage import bands

if TYPE_CHECKING:
    from elaunch.plan.tiling import Plan

_SYMBOLS = ascii_uppercase + ascii_lowercase + digits
_GAP, _OVERLAP = ".", "!"
_NOBODY, _SEVERAL = -1, -2
_WRONG = "red"

_MOST_RECTANGLES = 2000
_GRID_COLUMNS, _GRID_ROWS = 96, 40
_MOST_LEGEND = 64

_WIDTH, _LEFT, _RIGHT, _TOP, _LINE = 960, 60, 20, 56, 18
_MOST_HEIGHT = 640


class Rectangle(NamedTuple):
    """A part of a picture: what these workers do, or, if there are none, what is not done exactly once."""

    layers: range
    samples: range
    workers: tuple[str, ...]
    what: str
    has_outline: bool = True


def draw(plan: Plan, columns: int = 96, rows: int = 40) -> str:
    """Returns a drawing for a terminal, with one symbol per tensor-parallel group and a legend.

    A plan of more than `columns` samples or `rows` layers is drawn with several in a cell: it shows the first group in
    it, unless there is a gap or an overlap anywhere in it.
    """
    if plan.n_layers < 1 or plan.global_batch_size < 1:
        return "(nothing to draw)"
    per_row, per_column = -(-plan.n_layers // rows), -(-plan.global_batch_size // columns)
    names = list(dict.fromkeys(tile.workers for tile in plan.tiles))
    numbers = {name: number for number, name in enumerate(names)}
    symbols = {_NOBODY: _GAP, _SEVERAL: _OVERLAP}
    for index, tile in enumerate(plan.tiles):
        symbols[index] = _SYMBOLS[numbers[tile.workers] % len(_SYMBOLS)]
    layers = [_label(range(first, min(first + per_row, plan.n_layers))) for first in range(0, plan.n_layers, per_row)]
    width = max(len("layer"), *map(len, layers))
    lines = [f"{'layer':>{width}}  samples 0:{plan.global_batch_size}, {per_column} in a column"]
    for label, cells in zip(layers, _grid(plan, per_column, per_row)):
        lines.append(f"{label:>{width}}  {''.join(symbols[cell] for cell in cells)}")
    lines += [f"{_SYMBOLS[number]:>{width}}  {','.join(name)}" for number, name in enumerate(names[: len(_SYMBOLS)])]
    if len(names) > len(_SYMBOLS):
        lines.append(f"{'':{width}}  and {len(names) - len(_SYMBOLS)} more, with the same symbols again")
    seen = {symbol for line in lines[1 : 1 + len(layers)] for symbol in line[width:]}
    wrong = {_GAP: "nobody", _OVERLAP: "more than one"}
    lines += [f"{symbol:>{width}}  {who}" for symbol, who in wrong.items() if symbol in seen]
    return "\n".join(lines)


def to_svg(plan: Plan) -> str:
    """Returns a self-contained SVG: a rectangle per run of a tile, a colour per tensor-parallel group, and a legend.

    Beyond 2,000 runs the rectangles are those of a grid of at most 96 × 40 cells, so the file stays small
    however large the plan. What is not done exactly once is outlined in red.
    """
    n_layers, batch = max(1, plan.n_layers), max(1, plan.global_batch_size)
    height = n_layers * min(24.0, _MOST_HEIGHT / n_layers)
    per_sample, per_layer = (_WIDTH - _LEFT - _RIGHT) / batch, height / n_layers
    title = f"{n_layers} layers × {batch} samples, micro-batches of {plan.micro_batch_size}"
    body = [
        _text(_LEFT, 16, title, 'font-weight="bold"'),
        _text(_LEFT, _TOP - 22, "samples"),
        _text(0, 0, "layers", f'text-anchor="middle" transform="translate(14 {_TOP + height / 2:.2f}) rotate(-90)"'),
        *(_text(_LEFT - 6, _TOP + layer * per_layer + 4, layer, 'text-anchor="end"') for layer in _ticks(n_layers)),
        *(_text(_LEFT + sample * per_sample, _TOP - 6, sample, 'text-anchor="middle"') for sample in _ticks(batch)),
        _box(_LEFT, _TOP, batch * per_sample, height, "none", "black"),
    ]
    for layers, samples, workers, what, has_outline in rectangles(plan):
        x, y = _LEFT + samples.start * per_sample, _TOP + layers.start * per_layer
        colour, outline = (_colour(workers), "black" if has_outline else "none") if workers else ("none", _WRONG)
        body.append(_box(x, y, len(samples) * per_sample, len(layers) * per_layer, colour, outline, what))
    line = _TOP + height + 2 * _LINE
    names = list(dict.fromkeys(tile.workers for tile in plan.tiles))
    for name in names[:_MOST_LEGEND]:
        body += [_box(_LEFT, line - 10, 12, 12, _colour(name), "black"), _text(_LEFT + 20, line, ",".join(name))]
        line += _LINE
    notes = [f"and {len(names) - _MOST_LEGEND} more"] if len(names) > _MOST_LEGEND else []
    notes += [f"idle: {_listed(plan.idle)}"] if plan.idle else []
    for note in notes:
        body.append(_text(_LEFT, line, note))
        line += _LINE
    size = f'viewBox="0 0 {_WIDTH} {line:.0f}" width="{_WIDTH}" height="{line:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, _box(0, 0, _WIDTH, round(line), "white", "none"), *body, "</svg>", ""])


def _text(x: float, y: float, what: object, style: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(str(what))}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, outline: str, what: str = "") -> str:
    where = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    how = f'fill="{colour}" stroke="{outline}" stroke-width="{3 if outline == _WRONG else 1}"'
    return f"<rect {where} {how}><title>{escape(what)}</title></rect>" if what else f"<rect {where} {how}/>"


def _grid(plan: Plan, per_column: int, per_row: int) -> list[list[int]]:
    """Returns [row][column] -> the first tile in the cell, or _NOBODY or _SEVERAL if that holds anywhere in it."""
    n_rows, n_columns = -(-plan.n_layers // per_row), -(-plan.global_batch_size // per_column)
    empty = len(plan.tiles)
    grid = [[empty] * n_columns for _ in range(n_rows)]
    for layers, patches in bands(plan):
        cells = [empty] * n_columns
        for start, stop, tiles in patches:
            kind = tiles[0] if len(tiles) == 1 else _SEVERAL if tiles else _NOBODY
            for column in range(start // per_column, -(-stop // per_column)):
                cells[column] = _stronger(cells[column], kind, empty)
        for row in range(layers.start // per_row, -(-layers.stop // per_row)):
            grid[row] = [_stronger(old, new, empty) for old, new in zip(grid[row], cells)]
    return grid


def _stronger(old: int, new: int, empty: int) -> int:
    """Returns what a cell shows: an overlap rather than a gap, and a gap rather than the tile that was there first."""
    return min(old, new) if old < 0 or new < 0 or old == empty else old


def has_many_runs(plan: Plan) -> bool:
    """Returns whether a picture of the plan shows cells of a grid."""
    return sum(map(len, chain.from_iterable(tile.micro_batches for tile in plan.tiles))) > _MOST_RECTANGLES


def rectangles(plan: Plan) -> Iterator[Rectangle]:
    """Yields the rectangles of a picture, with errors last so that they are on top."""
    if plan.n_layers < 1 or plan.global_batch_size < 1:
        return
    if has_many_runs(plan):
        yield from _cells(plan)
        return
    for index, tile in enumerate(plan.tiles):
        for number, micro_batch in enumerate(tile.micro_batches):
            for samples in micro_batch:
                what = f"tile {index}, micro-batch {number}: {_where(tile.layers, samples)}: {','.join(tile.workers)}"
                layers = _clipped(tile.layers, plan.n_layers)
                yield Rectangle(layers, _clipped(samples, plan.global_batch_size), tile.workers, what)
    for layers, patches in bands(plan):
        for start, stop, tiles in patches:
            if len(tiles) != 1:
                what = f"{_where(layers, range(start, stop))}: {'more than one' if tiles else 'nobody'}"
                yield Rectangle(layers, range(start, stop), (), what)


def _cells(plan: Plan) -> Iterator[Rectangle]:
    per_row, per_column = -(-plan.n_layers // _GRID_ROWS), -(-plan.global_batch_size // _GRID_COLUMNS)
    for row, cells in enumerate(_grid(plan, per_column, per_row)):
        layers = _clipped(range(row * per_row, (row + 1) * per_row), plan.n_layers)
        column = 0
        for cell, same in groupby(cells):
            end = column + len(list(same))
            samples = _clipped(range(column * per_column, end * per_column), plan.global_batch_size)
            column = end
            workers = () if cell < 0 else plan.tiles[cell].workers
            nobody = "more than one" if cell == _SEVERAL else "nobody"
            who = f"{','.join(workers)} and perhaps others" if workers else nobody
            yield Rectangle(layers, samples, workers, f"{_where(layers, samples)}: {who}", has_outline=False)


def _clipped(run: range, size: int) -> range:
    start = min(max(0, run.start), size)
    return range(start, max(start, min(run.stop, size)))


def _label(run: range) -> str:
    return str(run.start) if len(run) == 1 else f"{run.start}:{run.stop}"


def _where(layers: range, samples: range) -> str:
    return f"layers {layers.start}:{layers.stop}, samples {samples.start}:{samples.stop}"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_LEGEND} more" if len(names) > _MOST_LEGEND else ""
    return ", ".join(names[:_MOST_LEGEND]) + more


def _ticks(size: int) -> range:
    return range(0, size + 1, -(-size // 16))


def _colour(workers: tuple[str, ...]) -> str:
    """Returns a colour that depends on the names alone, so that a worker keeps it from plan to plan."""
    number = zlib.crc32(",".join(workers).encode())
    return f"hsl({number % 360},{45 + number // 360 % 40}%,{55 + number // 14400 % 25}%)"
