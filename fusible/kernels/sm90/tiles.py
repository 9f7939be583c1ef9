"""The tile of each product: the one that a model of the kernels expects to take the least time.

The model knows what the host knows without waiting for the device: the number of rows, of groups,
of features, and of multiprocessors. `microseconds` is the model, `TILES` are those it compares;
their costs and `Constants` were fitted to measurements (``benchmarks/sm90_grid.py --fit``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fusible.kernels.sm90.limits import fits_256_columns
from fusible.kernels.sm90.spec import WARPGROUP_ROWS, Tile
from fusible.recipes.formats import FP8_BLOCK

_SMALL = Tile(128, 128, True, 1, 2)
_SMALL_DYNAMIC = _SMALL._replace(dynamic=True)
_SMALL_2X1 = Tile(128, 128, True, 2, 1, dynamic=True)
_WIDE = Tile(128, 192, True, 1, 2, dynamic=True)
_WIDE_2X1 = Tile(128, 192, True, 2, 1, dynamic=True)
_TALL = Tile(192, 128, True, 1, 2, dynamic=True)
_ROWS_16 = Tile(16, 64), Tile(16, 128), Tile(16, 256)
_LOW = Tile(64, 64, True, 1, 1), Tile(64, 128, True, 1, 1), Tile(64, 128, True, 1, 2)
_LOW_DYNAMIC = _LOW[2]._replace(dynamic=True)
_LOW_WIDE = Tile(64, 256, True, 1, 2, dynamic=True)
_LARGE = tuple(
    Tile(m, n, False, cluster_m, cluster_n, dynamic=True)
    for m, n in ((128, 256), (256, 128))
    for cluster_m, cluster_n in ((1, 2), (2, 1))
)


class Cost(NamedTuple):
    """The time of tiles on one multiprocessor, in nanoseconds, fitted to measurements."""

    step: float
    """Of a tile, for 64 of the reduction."""
    tile: float
    """Of a tile besides: what of its first loads and its epilogue other tiles do not hide."""
    end: float
    """Of a product besides: what nothing hides at its end."""


# By kind, every tile that may be chosen, with its fitted costs; tests compile and run each.
TILES: dict[str, dict[Tile, Cost]] = {
    "store": {
        _ROWS_16[0]: Cost(115, 1880, 555),
        _ROWS_16[1]: Cost(156, 1470, 1620),
        _LOW[0]: Cost(258, 354, 2080),
        _LOW[1]: Cost(263, 1390, 3350),
        _SMALL: Cost(392, 817, 3580),
        _SMALL_DYNAMIC: Cost(357, 235, 7220),
        _SMALL_2X1: Cost(295, 1200, 2830),
        _WIDE: Cost(489, 1750, 2240),
        _WIDE_2X1: Cost(385, 2310, 1320),
        _TALL: Cost(359, 2230, 5880),
        _LARGE[0]: Cost(662, 2550, 1790),
        _LARGE[1]: Cost(453, 5600, 1190),
    },
    "glu": {
        _ROWS_16[0]: Cost(108, 2400, 956),
        _ROWS_16[1]: Cost(195, 20.2, 2780),
        _LOW[0]: Cost(186, 1150, 1600),
        _LOW[1]: Cost(225, 3080, 2310),
        _LOW[2]: Cost(202, 4080, 2960),
        _LOW_WIDE: Cost(484, 4990, 1450),
        _SMALL: Cost(347, 2300, 1600),
        _SMALL_DYNAMIC: Cost(318, 751, 3470),
        _SMALL_2X1: Cost(322, 1610, 1730),
        _WIDE_2X1: Cost(420, 1560, 1120),
        _TALL._replace(dynamic=False): Cost(413, 5270, 2960),
        _TALL: Cost(386, 4490, 5150),
        _LARGE[1]: Cost(590, 3220, 1300),
    },
    # Shared memory goes to pre-activations where products are short, else to pipeline stages.
    "dglu": {
        Tile(64, 64, True, 1, 2, dynamic=True, ahead=4): Cost(128, 1440, 3020),
        Tile(64, 128, True, 1, 2, ahead=5): Cost(279, 3640, 1530),
        Tile(64, 128, True, 1, 2, dynamic=True, ahead=5): Cost(239, 3650, 1590),
        _SMALL._replace(ahead=5): Cost(368, 3950, 850),
        _SMALL_DYNAMIC: Cost(351, 4580, 1560),
        _SMALL_DYNAMIC._replace(ahead=5): Cost(290, 4220, 1970),
        _SMALL_2X1: Cost(334, 1850, 6950),
        _SMALL_2X1._replace(ahead=5): Cost(307, 4510, 1880),
        _WIDE_2X1._replace(ahead=2): Cost(374, 7770, 598),
    },
    "wgrad": {
        _SMALL_DYNAMIC: Cost(329, 483, 2980),
        _SMALL_2X1: Cost(359, 445, 1440),
        _TALL: Cost(467, 914, 6850),
        _WIDE: Cost(464, 913, 905),
        _WIDE_2X1: Cost(459, 858, 7010),
        _LARGE[1]: Cost(609, 1680, 1250),
        _LARGE[3]: Cost(643, 1450, 1460),
    },
}
# Activations that are not gated take the time of gated ones.
_GLU, _DGLU = TILES["glu"], TILES["dglu"]
TILES["act"] = {
    tile: _GLU[tile]
    for tile in (*_ROWS_16[:2], _LOW[0], _LOW[2], _SMALL, _SMALL_DYNAMIC, _SMALL_2X1)
}
TILES["dact"] = {
    Tile(64, 64, True, 1, 1, ahead=4): Cost(185, 2270, 1520),
    **{
        tile: _DGLU[tile]
        for tile in (
            Tile(64, 128, True, 1, 2, ahead=5),
            _SMALL._replace(ahead=5),
            _SMALL_DYNAMIC,
            _SMALL_2X1,
        )
    },
}
# The same of FP8 operands.
FP8_TILES: dict[str, dict[Tile, Cost]] = {
    "store": {
        _ROWS_16[0]: Cost(71, 666, 7870),
        _ROWS_16[1]: Cost(116, 1130, 6500),
        _LOW[0]: Cost(194, 353, 5800),
        _LOW[1]: Cost(299, 412, 4360),
        _SMALL_DYNAMIC: Cost(410, 1380, 3890),
        _LOW_WIDE: Cost(364, 1200, 6480),
        _LARGE[0]: Cost(347, 802, 3360),
        _LARGE[1]: Cost(379, 708, 3830),
    },
    "glu": {
        _ROWS_16[0]: Cost(90.9, 1790, 7460),
        _ROWS_16[1]: Cost(148, 393, 8000),
        _ROWS_16[2]: Cost(404, 4160, 2560),
        _LOW[0]: Cost(110, 4270, 3510),
        _LOW_DYNAMIC: Cost(173, 2360, 3720),
        _SMALL_DYNAMIC: Cost(424, 1690, 6430),
        _LOW_WIDE: Cost(296, 3370, 6900),
        _LARGE[0]: Cost(257, 3800, 272),
        _LARGE[1]: Cost(301, 3400, 545),
    },
    "wgrad": {
        _SMALL_DYNAMIC: Cost(410, 834, 606),
        _LARGE[0]: Cost(454, 14.2, 9920),
        _LARGE[2]: Cost(405, 425, 3530),
        _LARGE[3]: Cost(419, 449, 3990),
    },
}
FP8_TILES["act"] = FP8_TILES["glu"]


def rows_bucket(rows: int, groups: int) -> int:
    """The number of rows for which the tiles of ``rows`` rows in ``groups`` groups are chosen.

    Rows of a group, or all rows if there are fewer than groups, rounded up to three binary digits:
    so that few tiles, and launches, are made for many numbers of rows.
    """
    unit = groups if rows > groups > 0 else 1
    each = max(-(-rows // unit), 1)
    step = 1 << max(each.bit_length() - 3, 0)
    return -(-each // step) * step * unit


def supports_tile(
    kind: str,
    tile: Tile,
    major: str,
    interleave: int,
    bias: bool,
    activation: str = "",
    fp8: bool = False,
    quantized: bool = False,
) -> bool:
    """Whether a kernel of ``kind`` can have a tile, for a weight of that ``major``.

    A ``quantized`` output needs tiles with `FP8_BLOCK` of its columns. Not supported, for want of
    registers, are FP8 tiles (``fp8``) of 256 columns unless `fits_256_columns`; and, with more than
    128 accumulator values a thread:

    - a plain product: biases;
    - a gated activation: biases, transposed weights, stripes of 1, 2 and 4, and in three slabs of
      64 rows SiTUGLU, and in stripes of 8 a clamped QGEGLU;
    - its backward: stripes of 16, and in clusters of two rows GEGLU.

    A gated activation has columns of whole stripes. Where its gate and linear columns lie apart,
    each half of a transposed weight's columns fills a row of shared memory, 64.
    """
    width = tile.width(kind)
    crowded = fp8 and tile.n > 192 and not fits_256_columns(activation, bias)
    if crowded or (quantized and width != FP8_BLOCK):
        return False
    spacious = tile.slabs * tile.n <= 256
    if kind == "dglu":
        return spacious or (interleave != 16 and (tile.cluster_m == 1 or activation != "geglu"))
    if kind != "glu":
        return kind != "store" or spacious or not bias
    paired = interleave % width == 0
    if not (paired or width % interleave == 0) or (paired and major == "n" and width < 64):
        return False
    if spacious:
        return True
    fits = tile.slabs < 3 or (
        activation != "situglu" and (activation, interleave) != ("clamped_qgeglu", 8)
    )
    return fits and major == "k" and not bias and interleave not in (1, 2, 4)


class Constants(NamedTuple):
    """What all tiles share, fitted to measurements."""

    started: float = 0.252  # share of its time that the last round takes if it is not full
    started_dynamic: float = 0.318  # the same of dynamic tiles, which blocks take from a counter
    late: float = 0.599  # rounds by which the last block is late
    late_dynamic: float = 0.947
    again: float = 0.0254  # share of a weight's bytes that each further tile down reads again
    memory: float = 3292  # bytes that the GPU reads or writes in a nanosecond
    sharpness: float = 2.41  # exponent of the norm that joins computing and memory


MEASURED = Constants()
_LARGEST_GROUP = 1.5
"""Rows of a large group over the average, assumed for tiles of 16 rows.

By hand, of BF16 products: of the cells with such tiles, what is chosen is 2.3 % behind the best on
average with 1, 1.8 % with 1.25, and 1.4 % with 1.5 and with 2."""


def microseconds(
    kind: str,
    tile: Tile,
    rows: Any,
    groups: Any,
    columns: Any,
    depth: Any,
    sms: int,
    fp8: bool = False,
    cost: Any = None,
    constants: Any = MEASURED,
) -> Any:
    """The time that a product of at least one row is expected to take, in microseconds.

    Without its launch. Rows grouped: ``columns`` of the output, of activations if it is gated, and
    ``depth`` of the reduction. Weight gradients: matrices ``[columns, depth]``, of which each has
    ``rows / groups`` of the reduction. ``fp8``: of FP8 operands. ``cost`` is that of the tile,
    by default of the table.

    All groups are taken to have the same number of rows: other sizes are not known on the host, and
    models that averaged over some were no better. For tiles of 16 rows they are taken to have
    `_LARGEST_GROUP` times as many, so that groups somewhat above the average still fit one tile.
    The GPU takes as many rounds of tiles as its clusters need, of which the last may not be full.
    Reading and writing every matrix once, and weights a little more often, overlaps with that. Of
    FP8 operands, a group's last tile is counted by its slabs of 64 rows that hold rows of the
    group; of others a model with this was no better. In ping-pong a multiprocessor works at two
    tiles of FP8 operands at once, since a warpgroup multiplies nothing while it scales its sums; a
    tile by itself is no faster.

    Sizes and costs may be tensors, for a fit (``benchmarks/sm90_grid.py --fit``).
    """
    c, cost = constants, (FP8_TILES if fp8 else TILES)[kind][tile] if cost is None else cost
    size = 1 if fp8 else 2  # bytes of an element of an operand
    used = _larger(groups + rows - _larger(groups, rows), 1)  # groups that have rows
    of_group = rows / used
    height, width = tile.m * tile.cluster_m, tile.width(kind) * tile.cluster_n
    if kind == "wgrad":
        down, reduction = 1, of_group / 64
        across = _ceil_div(columns, height) * _ceil_div(depth, width)
        moved = 2 * groups * columns * depth + size * rows * (columns + depth)
    else:
        largest = of_group
        if tile.m < WARPGROUP_ROWS:
            largest = -_larger(-_LARGEST_GROUP * of_group, -rows)
        down, reduction = _ceil_div(largest, height), _ceil_div(depth, 64)
        if fp8:
            unit = height // tile.slabs
            reduction *= unit * _ceil_div(of_group, unit) / (down * height)
        across = _ceil_div(columns, width)
        weights = (2 if kind == "glu" else 1) * columns * depth
        out = {"store": 1, "act": 2, "glu": 3, "dact": 3, "dglu": 5}[kind] * columns
        moved = size * used * weights * (1 + c.again * (down - 1)) + rows * (size * depth + 2 * out)
    at_once = 2 if fp8 and tile.pingpong else 1
    full = used * down * across / (sms // (tile.cluster_m * tile.cluster_n) * at_once)
    started, late = (c.started_dynamic, c.late_dynamic) if tile.dynamic else (c.started, c.late)
    rounds = _larger(full + started * (_ceil_div(full, 1) - full) + late, 1)
    computing = rounds * (cost.step * reduction + cost.tile) + cost.end
    moving = moved / c.memory
    joined = (computing**c.sharpness + moving**c.sharpness) ** (1 / c.sharpness)
    return joined / 1000


def _larger(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2


def _ceil_div(size: Any, step: Any) -> Any:
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
    activation: str = "",
    fp8: bool = False,
    quantized: bool = False,
) -> Tile:
    """The tile of a product, see `microseconds`.

    ``fp8``: of FP8 operands, ``quantized``: of an output that is quantized.
    """
    needed = major, interleave, bias, activation, fp8, quantized
    candidates = (FP8_TILES if fp8 else TILES)[kind]
    return min(
        [tile for tile in candidates if supports_tile(kind, tile, *needed)],
        key=lambda tile: microseconds(kind, tile, rows, groups, columns, depth, sms, fp8),
    )
