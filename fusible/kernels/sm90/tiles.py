"""Which tile a problem gets: a table, read from sizes that the host knows.

Rows are counted through their mean over the groups; how they are really spread is known only to
the device. The table comes from measurements on an H200 (``benchmarks/sm90_tiles.py``). A larger
tile reads less for each product, which pays beside an activation; what it computes beside the
output costs as if it were output.
Two blocks that share rows beat two that share weights, ping-pong beats cooperation, and drawing
tiles from a counter pays once a group has a few rows of tiles.
"""

import functools

from fusible.kernels.sm90.spec import Tile

_MANY_ROWS = 256  # of a group, on average

# By kind, for groups of few rows and of many: tiles, and their time for as much output relative to
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

# Every tile that a kernel may get; tests compile and run each.
TILES = {
    kind: tuple(dict.fromkeys(tile for choices in by_rows for tile, _ in choices))
    for kind, by_rows in _TABLE.items()
}


def has_many_rows(rows: int, groups: int) -> bool:
    """Whether groups have many rows, on average."""
    return rows >= _MANY_ROWS * groups


def takes_wide(major: str, interleave: int, bias: bool) -> bool:
    """Whether a gated product may get a tile of 192 columns, which leaves few registers.

    Its 96 gate columns hold whole stripes, and as a box of their own weights that are K-major.
    """
    return major == "k" and interleave in (0, 8, 16, 32) and not bias


@functools.lru_cache(maxsize=4096)
def choose(kind: str, many_rows: bool, columns: int, rows: int = 0, wide: bool = True) -> Tile:
    """The tile for groups of many rows or few, and ``columns`` output columns.

    ``rows`` of the output, where the host knows them (wgrad); not a ``wide`` one, of more than 128
    columns, where the product does not take it.
    """

    def time(choice: tuple[Tile, float]) -> float:
        tile, relative = choice
        width = tile.n // 2 if kind == "glu" else tile.n
        relative *= _padded(columns, width * tile.cluster_n)
        return relative * _padded(rows, tile.m * tile.cluster_m) if rows else relative

    choices = _TABLE[kind][many_rows]
    return min((choice for choice in choices if wide or choice[0].n <= 128), key=time)[0]


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
