"""The recipe of each op of a run, where a scope gives recipes by op."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from fusible.fuser.module_names import named_modules
from fusible.recipes.autocast import current_recipe
from fusible.recipes.mixed import ByOp, PerOp
from fusible.recipes.recipe import Recipe


def own_recipe(op: Any) -> Recipe | None:
    """The recipe of one op in the scope in force."""
    recipe = current_recipe()
    return recipe_of_ops(recipe, (op,)) if isinstance(recipe, ByOp) else recipe


def recipe_of_ops(recipe: ByOp, ops: Sequence[Any]) -> Recipe | None:
    """The recipe of these consecutive ops, or those of each if they differ."""
    keys = [(key, _inside(key), own) for key, own in recipe.recipes]
    found: list[tuple[Recipe | None] | None] = [_of(op, keys) for op in ops]
    last = next((own for own in found if own is not None), (None,))
    recipes = []
    for own in found:
        last = last if own is None else own
        recipes.append(last[0])
    return PerOp(tuple(recipes)).over(0, len(ops))


def _of(op: Any, keys: Sequence[tuple[Any, set[int], Any]]) -> tuple[Recipe | None] | None:
    """The recipe of an op, in a tuple; None if it runs as the op before it."""
    # A part of a Linear is what the Linear is.
    same = [one for one in (op, op._holder and op._holder()) if one is not None]
    for key, inside, recipe in keys:
        fits = isinstance(key, type) and any([isinstance(one, key) for one in same])
        if fits or any([id(one) in inside for one in same]):
            return (recipe,)
    return (None,) if getattr(op, "num_weights", 0) else None


def _inside(key: Any) -> set[int]:
    """The identities of the modules inside of one that is a key."""
    module = key() if isinstance(key, weakref.ref) else None
    return set() if module is None else {id(part) for _, part in named_modules(module)}
