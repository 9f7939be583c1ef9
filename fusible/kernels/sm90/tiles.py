"""The tile of each product: the one that a model of the kernels expects to take the least time.

The model knows what the host knows without waiting for the device: the number of rows, of groups,
of features, and of multiprocessors. `microseconds` is the model, `TILES` are those it
compares, `Constants` what was fitted to measurements (``benchmarks/sm90_grid.py --fit``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fusible.kernels.sm90.spec import BACKWARD, FORWARD, WARPGROUP_ROWS, Tile

_SMALL = Tile(128, 128, True, 1, 2)
_DRAWN = _SMALL._replace(dynamic=True)
_BAND = Tile(128, 128, True, 2, 1, dynamic=True)
_WIDE = Tile(128, 192, True, 1, 2, dynamic=True)
_WIDE_BAND = Tile(128, 192, True, 2, 1, dynamic=True)
_TALL = Tile(192, 128, True, 1, 2)
_LOW = Tile(64, 64, True, 1, 1), Tile(64, 128, True, 1, 1), Tile(64, 128, True, 1, 2)
_LARGE = tuple(
    Tile(m, n, False, cluster_m, cluster_n, dynamic=True)
    for m, n in ((128, 256), (256, 128))
    for cluster_m, cluster_n in ((1, 2), (2, 1))
)
# By kind, every tile that may be chosen; tests compile and run each.
TILES = {
    "store": (*_LOW, _SMALL, _DRAWN, _BAND, _TALL, _TALL._replace(dynamic=True), *_LARGE[:2]),
    "glu": (
        *_LOW,
        Tile(64, 256, True, 1, 2, dynamic=True),
        *(_SMALL, _DRAWN, _BAND, _WIDE, _WIDE_BAND),
        *_LARGE[:2],
    ),
    # Shared memory goes to pre-activations where products are short, else to pipeline stages.
    "dglu": (
        Tile(64, 64, True, 1, 2, dynamic=True, ahead=4),
        Tile(64, 128, True, 1, 2, ahead=5),
        Tile(64, 128, True, 1, 2, dynamic=True, ahead=5),
        _SMALL._replace(ahead=5),
        _DRAWN,
        _DRAWN._replace(ahead=5),
        _BAND,
        _BAND._replace(ahead=5),
        _WIDE._replace(ahead=2),
    ),
    "wgrad": (
        _DRAWN,
        _BAND,
        _TALL._replace(dynamic=True),
        _WIDE,
        _WIDE_BAND,
        *_LARGE,
    ),
    # Of activations that are not gated.
    "act": (*_LOW[:3:2], _SMALL, _DRAWN, _BAND),
    "dact": (
        Tile(64, 64, True, 1, 1, ahead=4),
        Tile(64, 128, True, 1, 2, ahead=5),
        _SMALL._replace(ahead=5),
        _DRAWN,
        _BAND,
    ),
}
# Of FP8 operands.
FP8_TILES = {
    "store": (_SMALL, _DRAWN, _BAND),
    "glu": (_SMALL, _DRAWN, _BAND),
    "act": (_SMALL, _DRAWN, _BAND),
    "wgrad": (_DRAWN, _BAND),
}


def rows_bucket(rows: int, groups: int) -> int:
    """The number of rows for which the tiles of ``rows`` rows in ``groups`` groups are chosen.

    Rows of a group, or all rows if there are fewer than groups, rounded up to three binary digits:
    so that few tiles, and launches, are made for many numbers of rows.
    """
    unit = groups if rows > groups > 0 else 1
    each = max(-(-rows // unit), 1)
    step = 1 << max(each.bit_length() - 3, 0)
    return -(-each // step) * step * unit


def supports_tile(kind: str, tile: Tile, major: str, interleave: int, bias: bool) -> bool:
    """Whether a kernel of ``kind`` can have a tile, for a weight of that ``major``.

    More than 128 sums a thread leave no registers for biases and, of a gated one, transposed
    weights and narrow stripes. A gated one has columns of whole stripes. Where its gate and linear
    columns lie apart, each half of a transposed weight's columns fills a row of shared memory, 64.
    """
    spacious = tile.slabs * tile.n <= 256
    if kind != "glu":
        return kind != "store" or spacious or not bias
    width = tile.n // 2
    paired = interleave % width == 0
    if not (paired or width % interleave == 0) or (paired and major == "n" and width < 64):
        return False
    return spacious or (major == "k" and not bias and interleave not in (1, 2, 4))


class Constants(NamedTuple):
    """Constants fitted to measurements: nanoseconds of one multiprocessor, unless said."""

    multiply: float = 0.977  # 64 rows by one column, by 64 of the reduction
    load: float = 0.912  # 64 of the reduction of one row or column of a tile, from the L2 cache
    begin: float = 239  # a tile: the first stage's latency
    store: float = 10.4  # epilogues: 64 rows by one column
    glu: float = 15.5
    dglu: float = 43.7
    wgrad: float = 6.09
    apart: float = 0.69  # share of an epilogue that cooperating warpgroups do not hide
    low: float = 1.17  # products in tiles of 64 rows, relative to those in 128 x 128
    tall: float = 1.1  # of 192 rows
    wide: float = 1.05  # of more than 128 columns
    shared: float = 0.95  # of cooperating warpgroups
    assigned: float = 0.154  # tiles by which the last block is late where they are not drawn
    drawn: float = 0.0295  # and where they are
    # Share of a weight's bytes that each further tile down its group reads again.
    again: float = 0.108
    memory: float = 3372  # bytes that the GPU reads or writes in a nanosecond
    # By which an activation's backward takes longer with the other share of slots.
    ahead: float = 0.0444
    sharpness: float = 4.77  # exponent of the norm that joins overlapping times


MEASURED = Constants()
_SHORT = 384  # rows of groups for which more slots of pre-activations pay, with fewer stages
# Sizes of groups, relative to their mean, for which the model averages: often all are equal, else
# no multiples of a tile.
_SPREAD = (0.41, 0.67, 0.87, 1.0, 1.0, 1.0, 1.14, 1.33, 1.58)


def microseconds(
    kind: str,
    tile: Tile,
    rows: int,
    groups: int,
    columns: int,
    depth: int,
    sms: int,
    constants: Constants = MEASURED,
) -> float:
    """The time that a product is expected to take, in microseconds, without its launch.

    Rows grouped: ``columns`` of the output, of activations if it is gated, and ``depth`` of the
    reduction. Weight gradients: matrices ``[columns, depth]``, of which each has ``rows / groups``
    of the reduction.

    A tile takes the longer of its products and of its loads from the L2 cache, and its epilogue,
    which in ping-pong runs under the other warpgroup's products; a column of tiles as many of these
    as groups of about this size have. The GPU takes as many rounds of tiles as its clusters need,
    but no less than reading and writing every matrix once. An activation's backward was measured to
    want more slots of pre-activations where groups are short, and more stages where they are not.
    """
    c, used = constants, min(groups, rows)
    sizes = [max(rows / used * factor, 1.0) for factor in _SPREAD]
    work = _grouped_rows if kind != "wgrad" else _grouped_reduction
    of_group = [work(kind, tile, size, depth, c) for size in sizes]
    tiles_down, time, epilogue = (sum(v) / len(v) for v in zip(*of_group, strict=True))
    width = tile.n // 2 if kind == "glu" else tile.n
    if kind == "wgrad":
        down = _ceil_div(columns, tile.m * tile.cluster_m)
        across = down * _ceil_div(depth, width * tile.cluster_n)
        values = groups * columns * depth + rows * (columns + depth)
    else:
        across = _ceil_div(columns, width * tile.cluster_n)
        side = (2 if kind == "glu" else 1) * columns
        out = {"store": 1, "act": 2, "glu": 3, "dact": 3, "dglu": 5}[kind] * columns
        weights = used * side * depth * (1 + c.again * (tiles_down - 1))
        values = weights + rows * (depth + out)
    tiles = used * tiles_down * across
    rounds = tiles / (sms // (tile.cluster_m * tile.cluster_n))
    late = c.drawn if tile.dynamic else c.assigned
    computing = (time * (rounds + math.ceil(rounds) + late) / 2 + epilogue) / tiles_down
    if kind in BACKWARD and (tile.ahead > 3) != (rows <= _SHORT * used):
        computing *= 1 + c.ahead
    return _overlapped_time(computing, 2 * values / c.memory, c) / 1000


def _grouped_rows(
    kind: str, tile: Tile, rows: float, depth: int, c: Constants
) -> tuple[float, float, float]:
    """Of one group of ``rows`` rows: tiles down a column, for one block of a cluster; their time;
    and the time of their epilogues.
    """
    height = tile.m * tile.cluster_m
    tiles = _ceil_div(rows, height)
    last = min(rows - (tiles - 1) * height, tile.m)
    slabs = tiles * tile.m / WARPGROUP_ROWS
    if tile.pingpong:  # 64 rows behind a group's end are not multiplied
        slabs += _ceil_div(last, WARPGROUP_ROWS) - tile.m / WARPGROUP_ROWS
    steps = _ceil_div(depth, 64)
    multiplying = slabs * steps * _products(tile, c)
    loading = tiles * steps * (tile.m / tile.cluster_n + tile.n / tile.cluster_m) * c.load
    backward = c.dglu if kind in BACKWARD else c.store
    epilogue = slabs * tile.n * (c.glu if kind in FORWARD else backward)
    return tiles, _with_epilogue(tile, multiplying, loading, tiles * c.begin, epilogue, c), epilogue


def _grouped_reduction(
    kind: str, tile: Tile, rows: float, depth: int, c: Constants
) -> tuple[float, float, float]:
    """The same of one tile of a weight gradient of a group of ``rows`` rows."""
    slabs = tile.m / WARPGROUP_ROWS
    multiplying = slabs * _ceil_div(rows, 16) / 4 * _products(tile, c)
    loading = rows / 64 * (tile.m / tile.cluster_n + tile.n / tile.cluster_m) * c.load
    epilogue = slabs * tile.n * c.wgrad
    return 1, _with_epilogue(tile, multiplying, loading, c.begin, epilogue, c), epilogue


def _products(tile: Tile, c: Constants) -> float:
    """The time of the products of 64 rows of a tile, of 64 of the reduction."""
    relative = 1.0
    if not tile.pingpong:
        relative = c.shared
    elif tile.m != 2 * WARPGROUP_ROWS:
        relative = c.low if tile.m == WARPGROUP_ROWS else c.tall
    elif tile.n > 128:
        relative = c.wide
    return relative * tile.n * c.multiply


def _with_epilogue(
    tile: Tile, multiplying: float, loading: float, begin: float, epilogue: float, c: Constants
) -> float:
    """The time of tiles."""
    mainloop = _overlapped_time(multiplying, loading, c) + begin
    if tile.pingpong:
        return _overlapped_time(mainloop, (mainloop + epilogue) / 2, c)
    return mainloop + epilogue / 2 * c.apart


def _overlapped_time(one: float, other: float, c: Constants) -> float:
    """The longer of two times that overlap, and a little of the other."""
    return float((one**c.sharpness + other**c.sharpness) ** (1 / c.sharpness))


def _ceil_div(size: float, step: float) -> float:
    return -(-size // step)


def choose(
    kind: str,
    rows: int,
    groups: int,
    columns: int,
    depth: int,
    sms: int,
    major: str = "k",
    interleave: int = 0,
    bias: bool = False,
    scaled: bool = False,
) -> Tile:
    """The tile of a product, see `microseconds`; ``scaled``: of FP8 operands."""
    candidates = (FP8_TILES if scaled else TILES)[kind]
    return min(
        (tile for tile in candidates if supports_tile(kind, tile, major, interleave, bias)),
        key=lambda tile: microseconds(kind, tile, rows, groups, columns, depth, sms),
    )
