"""The tile of each product: the one that a model of the kernels expects to take the least time.

The model knows what the host knows without waiting for the device: the number of rows, of groups,
of features, and of multiprocessors. `microseconds` is the model, `TILES` are those it compares;
their costs and `Constants` were fitted to measurements (``benchmarks/sm90_grid.py --fit``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fusible.kernels.glu import Glu
from fusible.kernels.sm90.limits import fits_256_columns
from fusible.kernels.sm90.spec import BACKWARD, FORWARD, WARPGROUP_ROWS, Tile
from fusible.recipes.blocks import padded_size
from fusible.recipes.formats import FP8_BLOCK

_SMALL = Tile(128, 128, True, 1, 2)
_SMALL_DYNAMIC = _SMALL._replace(dynamic=True)
_SMALL_2X1 = Tile(128, 128, True, 2, 1, dynamic=True)
_WIDE_160 = Tile(128, 160, True, 1, 2, dynamic=True)
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
        _ROWS_16[0]: Cost(112, 817, 8060),
        _ROWS_16[1]: Cost(238, 255, 8100),
        _LOW[0]: Cost(180, 489, 7940),
        _LOW[1]: Cost(280, 2160, 5770),
        _SMALL: Cost(387, 294, 8400),
        _SMALL_DYNAMIC: Cost(326, 428, 8600),
        _SMALL_2X1: Cost(351, 512, 5530),
        _TALL: Cost(498, 119, 12900),
        _WIDE_160: Cost(428, 162, 9890),
    },
    "glu": {
        _ROWS_16[0]: Cost(71.8, 2020, 11700),
        _ROWS_16[1]: Cost(202, 20.3, 6530),
        _LOW[0]: Cost(196, 348, 9640),
        _LOW[2]: Cost(313, 1410, 4530),
        _SMALL: Cost(382, 921, 9240),
        _SMALL_DYNAMIC: Cost(320, 421, 13400),
        _SMALL_2X1: Cost(345, 268, 10600),
        _TALL: Cost(493, 376, 15100),
    },
    # Shared memory goes to pre-activations where products are short, else to pipeline stages.
    "dglu": {
        _LOW[2]._replace(ahead=5): Cost(266, 2310, 2190),
        _LOW_DYNAMIC._replace(ahead=5): Cost(246, 1640, 4540),
        _SMALL._replace(ahead=5): Cost(417, 2550, 549),
        _SMALL_DYNAMIC: Cost(382, 2290, 2890),
        _SMALL_DYNAMIC._replace(ahead=5): Cost(359, 850, 28100),
        _SMALL_2X1: Cost(319, 1890, 15400),
        _WIDE_2X1._replace(ahead=2): Cost(417, 4220, 19300),
    },
    "wgrad": {
        _SMALL_DYNAMIC: Cost(322, 708, 3160),
        _SMALL_2X1: Cost(373, 442, 1980),
        _TALL: Cost(476, 793, 4050),
        _WIDE: Cost(483, 655, 3850),
        _WIDE_2X1: Cost(478, 705, 1760),
    },
}
# Activations that are not gated take the time of gated ones.
_GLU, _DGLU = TILES["glu"], TILES["dglu"]
TILES["act"] = {
    tile: _GLU[tile]
    for tile in (*_ROWS_16[:2], _LOW[0], _LOW[2], _SMALL, _SMALL_DYNAMIC, _SMALL_2X1)
}
TILES["dact"] = {
    _LOW[0]._replace(ahead=4): Cost(164, 1620, 1670),
    **{
        tile: _DGLU[tile]
        for tile in (
            _LOW[2]._replace(ahead=5),
            _SMALL._replace(ahead=5),
            _SMALL_DYNAMIC,
            _SMALL_2X1,
        )
    },
}
# The same of FP8 operands.
FP8_TILES: dict[str, dict[Tile, Cost]] = {
    "store": {
        _ROWS_16[0]: Cost(96.2, 661, 8750),
        _ROWS_16[1]: Cost(179, 1370, 6260),
        _LOW[0]: Cost(193, 413, 7130),
        _LOW[1]: Cost(317, 559, 5020),
        _SMALL_DYNAMIC: Cost(470, 1830, 5630),
        _LOW_WIDE: Cost(440, 1570, 9350),
        _LARGE[0]: Cost(412, 1010, 4410),
        _LARGE[1]: Cost(431, 969, 4930),
    },
    "glu": {
        _ROWS_16[0]: Cost(122, 2570, 5150),
        _ROWS_16[1]: Cost(204, 472, 8610),
        _ROWS_16[2]: Cost(458, 5820, 707),
        _LOW[0]: Cost(162, 2940, 3590),
        _LOW_DYNAMIC: Cost(232, 2000, 6140),
        _SMALL_DYNAMIC: Cost(447, 2360, 11000),
        _LOW_WIDE: Cost(424, 3500, 7580),
        _LARGE[0]: Cost(369, 3100, 3040),
        _LARGE[1]: Cost(372, 4200, 814),
    },
    "wgrad": {
        _SMALL_DYNAMIC: Cost(463, 970, 582),
        _LARGE[0]: Cost(516, 13.7, 11500),
        _LARGE[2]: Cost(456, 505, 3920),
        _LARGE[3]: Cost(473, 481, 4890),
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
    registers, are FP8 tiles (``fp8``) of 256 columns unless `fits_256_columns`; and, of
    tiles of more than 128 accumulators a thread (`Tile.is_register_bound`):

    - a plain product: biases;
    - a gated activation: biases, transposed weights, stripes of 1, 2 and 4, and in three slabs of
      64 rows SiTUGLU, and in stripes of 8 a clamped QGEGLU;
    - its backward: stripes of 16, and in clusters of two rows GEGLU.

    A gated activation has columns of whole stripes. Where its gate and linear columns lie apart,
    each half of a transposed weight's columns fills a row of shared memory, 64.
    """
    width = tile.width(kind)
    unfit = fp8 and tile.n > 192 and not fits_256_columns(activation, bias)
    if unfit or (quantized and width != FP8_BLOCK):
        return False
    if kind == "dglu":
        fits = interleave != 16 and (tile.cluster_m == 1 or activation != "geglu")
        return fits or not tile.is_register_bound
    if kind != "glu":
        return kind != "store" or not (tile.is_register_bound and bias)
    paired = interleave % width == 0
    if not (paired or width % interleave == 0) or (paired and major == "n" and width < 64):
        return False
    if not tile.is_register_bound:
        return True
    fits = tile.slabs < 3 or (
        activation != "situglu" and (activation, interleave) != ("clamped_qgeglu", 8)
    )
    return fits and major == "k" and not bias and interleave not in (1, 2, 4)


class Constants(NamedTuple):
    """What all tiles share, fitted to measurements."""

    started: float = 0.531  # share of its time that the last round takes if it is not full
    started_dynamic: float = 0.521  # the same of dynamic tiles, which blocks take from a counter
    late: float = 0.412  # rounds by which the last block is late
    late_dynamic: float = 0.482
    again: float = 0.0011  # share of a weight's bytes that each further tile down reads again
    memory: float = 4640  # bytes that the GPU reads or writes in a nanosecond
    sharpness: float = 2.66  # exponent of the norm that joins computing and memory


MEASURED = Constants()
_FEW_ROWS = 8
"""Rows a group for which BF16 products get only tiles of 16 rows, where there are any.

The model chooses no others in the cells that were measured, but smaller weights were not."""
_LARGEST_GROUP = 1.5
"""Rows of a large group over the average, assumed for tiles of 16 rows.

By hand, of BF16 products: of the cells with such tiles, what is chosen is 0.6 % behind the best on
average with 1, 0.4 % with 1.25 and 1.5, and 0.5 % with 2."""


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
    glu: Glu | None = None,
    bias: bool = False,
    fp8: bool = False,
    quantized: bool = False,
) -> Tile:
    """The tile of a product, see `microseconds`.

    ``glu`` is the activation of its epilogue, forward or backward. ``fp8``: of FP8 operands,
    ``quantized``: of an output that is quantized.
    """
    activation, interleave = ("", 0) if glu is None else glu[:2]
    needed = major, interleave, bias, activation, fp8, quantized
    table = (FP8_TILES if fp8 else TILES)[kind]
    candidates = [tile for tile in table if supports_tile(kind, tile, *needed)]
    if not fp8 and rows <= _FEW_ROWS * groups:
        candidates = [tile for tile in candidates if tile.m < WARPGROUP_ROWS] or candidates
    return min(
        candidates,
        key=lambda tile: microseconds(kind, tile, rows, groups, columns, depth, sms, fp8),
    )


def of_linear(
    linear: Any,
    rows: int,
    sms: int,
    act: Glu | None = None,
    dact: Glu | None = None,
    fp8: bool = False,
    quantized: bool = False,
) -> tuple[Tile, Tile, Tile]:
    """The tiles of a grouped linear's forward, data gradient and weight gradient, for ``explain``.

    Of ``rows`` rows and row-major weights. The epilogue of the forward has the activation ``act``,
    ``quantized`` or not, that of the data gradient the backward of ``dact``.
    """
    groups, n, k = linear.num_groups, linear.out_features, linear.in_features
    kind, columns = ("store", n) if act is None else (FORWARD[act.sides - 1], n // act.sides)
    dkind = "store" if dact is None else BACKWARD[dact.sides - 1]
    # FP8 weights are transposed in memory, FP8 rows of a weight gradient padded by group.
    major, reduced = ("k", padded_size(rows, groups, FP8_BLOCK)) if fp8 else ("n", rows)
    rows, reduced = rows_bucket(rows, groups), rows_bucket(reduced, groups)
    return (
        choose(kind, rows, groups, columns, k, sms, "k", act, linear.has_bias, fp8, quantized),
        choose(dkind, rows, groups, k, n, sms, major, dact, fp8=fp8),
        choose("wgrad", reduced, groups, n, k, sms, fp8=fp8),
    )
