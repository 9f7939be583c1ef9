"""Which tile a problem gets: a table, read from sizes that the host knows.

Rows are counted through their mean over the groups; how they are really spread is known only to
the device. The table comes from measurements on an H200 (``benchmarks/grouped_gemm_sm90.py``):
two blocks that share rows beat two that share weights, ping-pong beats cooperation nearly
everywhere, and drawing tiles from a counter pays once a group has a few rows of tiles.
"""

from fusible.kernels.sm90.spec import Tile

_MANY_ROWS = 256  # of a group, on average

# By kind: for groups of few rows, of many rows, and where two blocks side by side would leave
# too many without columns.
_ROWS_SHARED = (
    Tile(128, 128, True, 1, 2),
    Tile(128, 128, True, 1, 2, dynamic=True),
    Tile(128, 128, True, 2, 1),
)
_TABLE = {
    "store": _ROWS_SHARED,
    "glu": _ROWS_SHARED,
    "dglu": _ROWS_SHARED,
    "wgrad": (
        Tile(128, 128, True, 2, 1),
        Tile(128, 128, True, 1, 2, dynamic=True),
        Tile(128, 128, True, 2, 1),
    ),
}
# More to write for each product: wider tiles.
_WIDE = {"glu": Tile(128, 192, True, 1, 2, dynamic=True)}

# Every tile that a kernel may get; tests compile and run each.
TILES = {
    kind: tuple(dict.fromkeys(choices + ((_WIDE[kind],) if kind in _WIDE else ())))
    for kind, choices in _TABLE.items()
}


def choose(kind: str, rows: int, groups: int, columns: int, wide: bool = False) -> Tile:
    """The tile for ``rows`` rows in ``groups`` groups and ``columns`` output columns.

    ``wide``: the problem can take, and may profit from, 192 columns.
    """
    few, many, lone = _TABLE[kind]
    width = few.n // 2 if kind == "glu" else few.n
    across = -(-columns // width)
    if across % 2 and across < 12:  # the idle block would cost more than sharing rows brings
        return lone
    if rows < _MANY_ROWS * groups:
        return few
    return _WIDE[kind] if wide and kind in _WIDE else many
