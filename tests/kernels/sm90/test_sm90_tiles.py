"""The tile table: large tiles where the output fills them."""

import pytest

from fusible.kernels.sm90.tiles import TILES, choose, takes_wide

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
    beside, above = (choose("wgrad", True, columns=128, rows=rows) for rows in (128, 2048))
    assert (beside.cluster_m, beside.cluster_n) == (1, 2)
    assert (above.cluster_m, above.cluster_n) == (2, 1)


def test_a_gated_product_gets_a_wide_tile_only_where_it_takes_it():
    columns = 768  # of qwen3-30b: 8 tiles of 96 gate columns
    assert choose("glu", True, columns).n == 192
    assert choose("glu", True, columns, wide=False).n == 128
    assert choose("glu", False, columns).n == 128  # groups of few rows
    assert choose("glu", True, 512).n == 128  # 96 does not divide it
    assert takes_wide("k", 0, bias=False)
    assert takes_wide("k", 32, bias=False)
    for refused in (("n", 0, False), ("k", 0, True), ("k", 64, False), ("k", 4, False)):
        assert not takes_wide(*refused)


def test_the_activations_backward_gets_a_wide_tile_where_little_lies_beside_it():
    widths = {columns: choose("dglu", True, columns).n for columns in (512, 768, 2048, 14336)}
    assert widths == {512: 128, 768: 192, 2048: 128, 14336: 192}
    assert choose("dglu", False, 768).n == 128  # groups of few rows
