"""The tile of each product: a table, looked up by sizes that the host knows.

Rows count by their mean over the groups, as only the device knows the size of each. The table
comes from measurements on an H200 (``benchmarks/sm90_tiles.py``): a larger tile reads less for
each product, which pays with an activation in the epilogue; columns of a tile past the output cost
as much as others. Clusters of two blocks that share rows are faster than those that share weights,
ping-pong is faster than cooperation, and drawing tiles from a counter pays once a group has a few
rows of tiles.
"""

import functools

from fusible.kernels.sm90.spec import Tile

_MANY_ROWS = 256  # of a group, on average

# By kind, for groups of few rows and of many: tiles, and their time for equal output relative to
# the first one's.
_SMALL, _ODD = Tile(128, 128, True, 1, 2), Tile(128, 128, True, 2, 1)
_FEW = ((_SMALL, 1.0), (_ODD, 1.08))
_MANY = ((_SMALL._replace(dynamic=True), 1.0), (_ODD, 1.08))
_TABLE = {
    "store": (_FEW, _MANY),
    "glu": (_FEW, (*_MANY, (Tile(128, 192, True, 1, 2, dynamic=True), 0.98))),
    # Shared memory goes to pre-activations where products are short, else to pipeline stages.
    "dglu": (
        ((_SMALL._replace(ahead=5), 1.0), (_ODD, 1.08)),
        (*_MANY, (Tile(128, 192, True, 1, 2, dynamic=True, ahead=2), 0.97)),
    ),
    "wgrad": (_MANY, _MANY),
}
# Of FP8 operands.
_FP8_TABLE = {"store": (_FEW, _MANY), "glu": (_FEW, _MANY), "wgrad": (_MANY, _MANY)}


def _tiles_of(table: dict[str, tuple]) -> dict[str, tuple[Tile, ...]]:
    return {
        kind: tuple(dict.fromkeys(tile for choices in by_rows for tile, _ in choices))
        for kind, by_rows in table.items()
    }


# Every tile in the tables; tests compile and run each.
TILES, FP8_TILES = _tiles_of(_TABLE), _tiles_of(_FP8_TABLE)


def has_many_rows(rows: int, groups: int) -> bool:
    """Whether groups have many rows, on average."""
    return rows >= _MANY_ROWS * groups


def takes_wide(major: str, interleave: int, bias: bool) -> bool:
    """Whether a gated product may use a tile of 192 columns, which leaves few registers.

    The interleaves are those whose stripes fill its 96 gate columns exactly.
    """
    return major == "k" and interleave in (0, 8, 16, 32) and not bias


@functools.lru_cache(maxsize=4096)
def choose(
    kind: str,
    many_rows: bool,
    columns: int,
    rows: int = 0,
    wide: bool = True,
    scaled: bool = False,
) -> Tile:
    """The tile for groups of many rows or few, and ``columns`` output columns.

    ``rows`` are those of the output where the host knows them (wgrad), else 0. Without ``wide``,
    no tile has more than 128 columns. ``scaled``: of FP8 operands.
    """

    def time(choice: tuple[Tile, float]) -> float:
        tile, relative = choice
        width = tile.n // 2 if kind == "glu" else tile.n
        relative *= _padded(columns, width * tile.cluster_n)
        return relative * _padded(rows, tile.m * tile.cluster_m) if rows else relative

    choices = (_FP8_TABLE if scaled else _TABLE)[kind][many_rows]
    return min((choice for choice in choices if wide or scaled or choice[0].n <= 128), key=time)[0]


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
