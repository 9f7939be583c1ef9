"""The tile table: large tiles where the output fills them."""

import pytest

from fusible.kernels.sm90.tiles import TILES, choose

KINDS = list(TILES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many_rows", [False, True])
@pytest.mark.parametrize("columns", [8, 128, 136, 512, 768, 1000, 2048, 7168])
def test_little_is_computed_beside_the_output(kind, many_rows, columns):
    """No tile of 128 columns would compute much less."""

    def beside(tile):
        width = (tile.n // 2 if kind == "glu" else tile.n) * tile.cluster_n
        return -(-columns // width) * width / columns

    chosen = choose(kind, many_rows, columns)
    assert chosen in TILES[kind]
    assert beside(chosen) <= 1.09 * min(beside(tile) for tile in TILES[kind] if tile.n == 128)


def test_the_rows_of_a_weight_gradient_count_too():
    wide = choose("wgrad", True, columns=768, rows=2048)
    high = choose("wgrad", True, columns=2048, rows=1536)
    assert (wide.m, wide.n) == (128, 192)
    assert (high.m, high.n) == (192, 128)
