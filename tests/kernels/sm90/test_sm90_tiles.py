"""The tile that a product gets: a function of sizes that the host knows."""

import pytest

from fusible.kernels.sm90.spec import Spec
from fusible.kernels.sm90.tiles import FP8_TILES, TILES, choose, rows_class, takes

SMS = 132
KINDS = list(TILES)


def chosen(kind, rows, groups, columns, depth, sms=SMS, **options):
    return choose(kind, rows_class(rows, groups), groups, columns, depth, sms, **options)


@pytest.mark.parametrize("groups", [1, 3, 8, 512])
def test_rows_of_a_class_are_alike(groups):
    classes = set()
    for rows in [*range(600), *range(600, 600 * groups, 97 * groups)]:
        stands_for = rows_class(rows, groups)
        assert rows <= stands_for
        # A group has at most a quarter more, and one more where the rows are no multiple.
        unit = groups if rows > groups else 1
        assert stands_for <= 1.25 * (rows + unit)
        assert rows_class(stands_for, groups) == stands_for
        classes.add(stands_for)
    assert len(classes) < 60


def test_no_rows_and_no_groups_are_a_class_too():
    assert rows_class(0, 8) == rows_class(0, 0) == 1
    assert rows_class(100, 0) == rows_class(100, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 1000, 10**6])
@pytest.mark.parametrize("groups", [1, 8, 512])
@pytest.mark.parametrize("columns", [8, 136, 7168])
@pytest.mark.parametrize("sms", [16, 78, 132])
def test_every_product_gets_one_of_the_tiles(kind, rows, groups, columns, sms):
    assert chosen(kind, rows, groups, columns, 64, sms) in TILES[kind]
    if kind in FP8_TILES:
        assert chosen(kind, rows, groups, columns, 64, sms, scaled=True) in FP8_TILES[kind]


@pytest.mark.parametrize("kind", ["store", "glu", "dglu"])
def test_groups_of_few_rows_get_low_tiles(kind):
    assert chosen(kind, 160 * 256, 256, 1024, 2048).m in (64, 192)
    assert chosen(kind, 8, 128, 1024, 2048).m == 64
    assert chosen(kind, 1024 * 64, 64, 1024, 2048).m == 128


def test_short_reductions_of_weight_gradients_get_large_tiles():
    short, long = (chosen("wgrad", rows * 128, 128, 4096, 4096) for rows in (64, 4096))
    assert short.m * short.n > 128 * 128
    assert long.m * long.n <= short.m * short.n


def test_a_gated_product_gets_only_tiles_that_take_it():
    for interleave in (0, 1, 4, 8, 16, 32, 64, 256):
        for major, bias in (("k", False), ("n", False), ("k", True)):
            tiles = [tile for tile in TILES["glu"] if takes("glu", tile, major, interleave, bias)]
            assert tiles
            for tile in tiles:
                width = Spec("glu", tile).width
                assert interleave == 0 or max(width, interleave) % min(width, interleave) == 0
                if major == "n" or bias or interleave in (1, 4):
                    assert tile.slabs * tile.n <= 256
