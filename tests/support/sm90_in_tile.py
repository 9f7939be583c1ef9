"""Grouped products on SM90 in a given tile, instead of the one that the table chooses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from fusible.kernels.sm90 import checked_products, tiles
from fusible.kernels.sm90.spec import Tile

_choose, _products = tiles.choose, checked_products.cached_products


@contextmanager
def in_tile(tile: Tile | None) -> Iterator[None]:
    """Compute every product of `checked_products` in ``tile``; None: as the table chooses."""
    tiles.choose, checked_products.cached_products = launches_of(tile)  # type: ignore[assignment]
    try:
        yield
    finally:
        tiles.choose, checked_products.cached_products = _choose, _products


@functools.cache
def launches_of(tile: Tile | None) -> tuple[object, object]:
    """`tiles.choose` and the cache of launches of one tile."""
    if tile is None:
        return _choose, _products
    return (lambda *_, **__: tile), functools.cache(_products.__wrapped__)
