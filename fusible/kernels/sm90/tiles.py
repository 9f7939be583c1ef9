"""Which tile a problem gets: a table, read from sizes that the host knows.

Rows are counted through their mean over the groups; how they are really spread is known only to
the device. The tables come from ``benchmarks/grouped_gemm_sm90.py`` on an H200.
"""

from fusible.kernels.sm90.spec import Tile

# Every tile that a kernel may get; tests compile and run each.
TILES = {
    "store": (Tile(128, 128, True, 1, 2),),
    "glu": (Tile(128, 128, True, 1, 2), Tile(128, 192, True, 1, 2)),
    "dglu": (Tile(128, 128, True, 1, 2),),
    "wgrad": (Tile(128, 128, True, 2, 1, True), Tile(192, 128, True, 1, 2, True)),
}
_MANY_ROWS = 256  # of a group, on average


def choose(kind: str, rows: int, groups: int, wide: bool = True) -> Tile:
    """The tile for ``rows`` rows in ``groups`` groups; ``wide``: whether 192 columns serve."""
    choices = TILES[kind]
    return choices[-1] if wide and rows >= _MANY_ROWS * groups else choices[0]
