"""Which tile a problem gets: a table, read from sizes that the host knows.

Rows are counted through their mean over the groups; how they are really spread is known only to
the device. The table comes from measurements on an H200 (``benchmarks/sm90_tiles.py``): two blocks
that share rows beat two that share weights, ping-pong beats cooperation, and drawing tiles from a
counter pays once a group has a few rows of tiles. In 51 of 52 cells the choice is within 4 % of the
best of 28 to 32 tiles; what gains 6 % in the other, a weight gradient of few rows, loses 12 % there
when groups differ.
"""

from fusible.kernels.sm90.spec import Tile

_MANY_ROWS = 256  # of a group, on average
_FEW_COLUMNS = 12  # tiles: below, an idle block in a row of clusters costs more than sharing brings

# By kind: for groups of few rows, of many rows, and for few and odd columns of tiles.
_CHOICES = (
    Tile(128, 128, True, 1, 2),
    Tile(128, 128, True, 1, 2, dynamic=True),
    Tile(128, 128, True, 2, 1),
)
_TABLE = {
    "store": _CHOICES,
    "glu": _CHOICES,
    # Shared memory goes to pre-activations where products are short, else to pipeline stages.
    "dglu": (
        Tile(128, 128, True, 1, 2, ahead=5),
        Tile(128, 128, True, 1, 2, dynamic=True),
        Tile(128, 128, True, 2, 1),
    ),
    "wgrad": _CHOICES,
}

# Every tile that a kernel may get; tests compile and run each.
TILES = {kind: tuple(dict.fromkeys(choices)) for kind, choices in _TABLE.items()}


def has_many_rows(rows: int, groups: int) -> bool:
    """Whether groups have many rows, on average."""
    return rows >= _MANY_ROWS * groups


def choose(kind: str, many_rows: bool, columns: int) -> Tile:
    """The tile for groups of many rows or few, and ``columns`` output columns."""
    few, many, odd = _TABLE[kind]
    across = -(-columns // (few.n // 2 if kind == "glu" else few.n))
    if across % 2 and across < _FEW_COLUMNS:
        return odd
    return many if many_rows else few
