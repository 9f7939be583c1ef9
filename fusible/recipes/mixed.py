"""Several recipes at once: one for the forward and one for the backward, or one for each op."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from fusible.recipes.formats import NumberFormat
from fusible.recipes.recipe import Recipe, Role, check_scope, check_transforms


@dataclass(frozen=True)
class ByPass(Recipe):
    """One recipe for the products of the forward and another one for those of the backward.

    The forward reads the input and the weight in the formats of ``forward``. The data gradient
    reads the weight, the weight gradient the input, and both the output's gradient in the formats
    of ``backward``; each is quantized from the original values. With ``backward=None`` the backward
    multiplies the original operands and quantizes nothing, as under
    ``backward_override="high_precision"``.

    Raises:
        TypeError: ``forward`` or ``backward`` is no recipe of one format for each operand.
        ValueError: one of them has a ``backward_override``.
    """

    forward: Recipe
    backward: Recipe | None

    name: ClassVar[str] = "by_pass"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pass("forward", self.forward, "; for one in high precision use no recipe")
        mixed: tuple[Role, ...] = ()
        if self.backward is not None:
            _check_pass("backward", self.backward, " or None")
            operands: tuple[Role, ...] = ("input", "weight")
            mixed = tuple([r for r in operands if self.format(r) != self.backward_format(r)])
        object.__setattr__(self, "mixed_roles", mixed)
        backward = None if self.backward is None else self.backward.of_fp8_products
        own = self.forward.of_fp8_products, backward
        same = own == (self.forward, self.backward)
        object.__setattr__(self, "_of_fp8_products", self if same else ByPass(*own))

    @property
    def backward_override(self) -> str | None:  # type: ignore[override]
        """``"high_precision"`` without a recipe of the backward."""
        return "high_precision" if self.backward is None else None

    @property
    def fp8_products(self) -> bool:  # type: ignore[override]
        """Whether both recipes allow them."""
        both = self.forward, self.forward if self.backward is None else self.backward
        return all(recipe.fp8_products for recipe in both)

    @property
    def of_fp8_products(self) -> Recipe:
        """Return the same of the recipes by which FP8 products quantize."""
        return self._of_fp8_products  # type: ignore[attr-defined]

    def format(self, role: Role) -> NumberFormat | None:
        """Return the format of the forward's recipe; of gradients that of the backward's."""
        if role != "grad":
            return self.forward.format(role)
        return self.backward_format(role)

    def backward_format(self, role: Role) -> NumberFormat | None:
        """Return the format of the backward's recipe; None without one."""
        return None if self.backward is None else self.backward.format(role)


def _check_pass(which: str, recipe: object, also: str) -> None:
    if not isinstance(recipe, Recipe) or isinstance(recipe, ByPass | ByOp | PerOp):
        raise TypeError(
            f"{which} of ByPass must be a recipe of fusible.recipes{also}, got {recipe!r:.200}"
        )
    if recipe.backward_override is not None:
        raise ValueError(
            f"{which} of ByPass must have no backward_override, since ByPass says what the "
            f"backward multiplies, got {recipe!r}; pass backward=None"
        )


@dataclass(frozen=True)
class PerOp(Recipe):
    """The recipe of each op of a run, None in high precision; what a `ByOp` is there."""

    recipes: tuple[Recipe | None, ...]

    is_mixed: ClassVar[bool] = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The names of all."""
        names = dict.fromkeys("none" if r is None else r.name for r in self.recipes)
        return " and ".join(names)

    def over(self, start: int, stop: int) -> Recipe | None:
        """The one recipe of ops ``start`` to ``stop``, or those of each if they differ."""
        own = self.recipes[start:stop]
        return own[0] if len(set(own)) == 1 else replace(self, recipes=own)


class ByOp(Recipe):
    """A recipe for each op: that of the first key that fits it, high precision without one.

    Keys are types of ops, which fit instances, and modules, which fit the ops inside. An op without
    weights that no key fits runs as the op before it, the first ones as the first that has a
    recipe. ``autocast(recipe={...})`` makes one of a mapping.

    Raises:
        TypeError: a key is neither, or a value neither a recipe nor None.
        ValueError: there are no keys, or a recipe transforms one operand of a product alone.
    """

    name: ClassVar[str] = "by_op"
    recipes: tuple[tuple[Any, Recipe | None], ...]
    """Types, weak references to modules, and their recipes, in order."""
    _constants: tuple[Any, ...]
    """For ``torch.compile``, to which a module is no constant: its number is."""

    def __init__(self, recipes: Mapping[Any, Recipe | None]) -> None:
        if not recipes:
            raise ValueError("recipes by op must have keys, got none; pass enabled=False")
        for key, recipe in recipes.items():
            of_ops = isinstance(key, type) and hasattr(key, "basic_ops")
            if not (of_ops or isinstance(key, nn.Module)):
                raise TypeError(
                    "keys of recipes by op must be types of ops of fusible, such as GroupedLinear, "
                    f"or modules, got {key!r:.200}"
                )
            if recipe is None:
                continue
            if not isinstance(recipe, Recipe) or isinstance(recipe, ByOp | PerOp):
                raise TypeError(
                    f"values of recipes by op must be recipes of fusible.recipes or None, got "
                    f"{recipe!r:.200}"
                )
            check_transforms(recipe)
        given = tuple(
            (key if isinstance(key, type) else weakref.ref(key), recipe)
            for key, recipe in recipes.items()
        )
        object.__setattr__(self, "recipes", given)
        numbered = [
            (
                key if isinstance(key, type) else _numbers.setdefault(key, str(next(_next_number))),
                recipe and recipe.as_constants(),
            )
            for key, recipe in recipes.items()
        ]
        object.__setattr__(self, "_constants", (ByOp, *numbered))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByOp) and self.recipes == other.recipes

    def __hash__(self) -> int:
        return hash((ByOp, self.recipes))

    def __repr__(self) -> str:
        items = [(key() if isinstance(key, weakref.ref) else key, r) for key, r in self.recipes]
        kinds = [(k.__name__ if isinstance(k, type) else type(k).__name__, r) for k, r in items]
        return f"ByOp({{{', '.join(f'{kind}: {recipe!r}' for kind, recipe in kinds)}}})"

    def as_constants(self) -> tuple[Any, ...]:
        """The class, and types, or numbers of modules, with the constants of their recipes."""
        return self._constants

    @classmethod
    def of_constants(cls, values: tuple[Any, ...]) -> Recipe:
        """Undo `as_constants`."""
        live = [module for ref in _numbers.keyrefs() if (module := ref()) is not None]
        keys = {_numbers[module]: module for module in live}
        if any([not isinstance(key, type) and key not in keys for key, _ in values]):
            raise RuntimeError(
                "a mapping of recipes with modules as keys must have been made outside of compiled "
                "code, and its modules must exist, when compiled code uses it, got none such; call "
                "autocast(recipe=...) with an equal one before"
            )
        return ByOp({keys.get(key, key): Recipe.from_constants(recipe) for key, recipe in values})


_numbers: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Of modules that are keys of mappings; as words, which compiled code never takes for variables."""
_next_number = itertools.count()


def check_recipes(function: str, enabled: object, recipe: object) -> Recipe:
    """The recipe of a scope, of a mapping a `ByOp`; raises as ``check_scope`` and `ByOp`."""
    if isinstance(recipe, Mapping):
        recipe = ByOp(recipe)
    return check_scope(function, enabled, recipe)
