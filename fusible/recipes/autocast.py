"""The recipe in force on this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fusible.recipes.recipe import Recipe


class _State(threading.local):
    recipe: Recipe | None = None


_state = _State()


def current_recipe() -> Recipe | None:
    """The recipe of the innermost enabled ``autocast`` on this thread, or None."""
    return _state.recipe


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    """Run the ops inside under ``recipe``; ``enabled=False`` switches an outer recipe off.

    Thread-local and re-entrant. The recipe is recorded with every forward, so a backward that runs
    after the scope has ended uses the recipe of its forward.
    """
    if enabled and not isinstance(recipe, Recipe):
        raise TypeError(
            "autocast(enabled=True) needs recipe= to be a recipe of fusible.recipes, "
            f"got {recipe!r}; pass a recipe or enabled=False"
        )
    outer = _state.recipe
    _state.recipe = recipe if enabled else None
    try:
        yield
    finally:
        _state.recipe = outer
