"""Which tile a problem gets: a table, read from sizes that the host knows.

Rows are counted through their mean over the groups; how they are really spread is known only to
the device.
"""

from fusible.kernels.sm90.spec import Tile

TILES = {
    "store": (
        Tile(128, 128, True, 1, 2),
        Tile(128, 192, True, 2, 1),
        Tile(128, 256, False, 2, 1),
        Tile(256, 128, False, 1, 2),
    ),
    "glu": (Tile(128, 128, True, 1, 2), Tile(128, 256, False, 2, 1)),
    "dglu": (Tile(128, 128, True, 1, 2),),
    "wgrad": (
        Tile(128, 128, True, 2, 1),
        Tile(128, 192, True, 2, 1),
        Tile(128, 256, False, 2, 1),
    ),
}


def choose(kind: str, rows: int, groups: int, columns: int, depth: int) -> Tile:
    """The tile for a problem with ``rows`` rows in ``groups`` groups."""
    return TILES[kind][0]
