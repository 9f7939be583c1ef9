"""The current recipe of a thread, also in a forward that activation checkpointing runs again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from fusible.recipes.mixed import check_recipes
from fusible.recipes.recipe import Recipe

P = ParamSpec("P")
R = TypeVar("R")


class _Autocasts(threading.local):
    # Set in __init__, not in the class body: torch.compile guards on a thread's own attributes and
    # would silently reuse a graph traced under another recipe if it read a class attribute.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.graph_task = -1
        """The backward pass in which the scope in force was entered; -1 outside of any."""
        self.outer: Any = ()
        """What to restore when that scope ends: the three of the scope around it."""


class Forward(NamedTuple):
    """The recipe of a forward, and whether gradients were enabled."""

    recipe: Recipe | None
    grad_enabled: bool


_thread = _Autocasts()


def current_recipe(runner: Any = None) -> Recipe | None:
    """Return the recipe of the innermost enabled ``autocast`` on this thread, or None.

    ``torch.utils.checkpoint`` runs a forward again inside the backward, after its ``autocast`` has
    ended and, on CUDA, on another thread. There, the result is the recipe of the earlier forwards
    of ``runner``, whose ``forwards()`` returns the set of their `Forward`. Raises RuntimeError if
    these had several recipes: nothing then tells which is being repeated; ``keep_recipe`` does.
    """
    if runner is None or torch.compiler.is_compiling():
        return _thread.recipe
    task = torch._C._current_graph_task_id()
    if task in (-1, _thread.graph_task):
        return _thread.recipe
    return _repeated(runner)


def _repeated(runner: Any) -> Recipe | None:
    """Return the one recipe that a forward repeated by the running backward pass can have had."""
    # Only the reentrant variant repeats forwards that ran without gradients, so that, say,
    # evaluation under no_grad and another recipe does not make the usual variant ambiguous.
    node = torch._C._current_autograd_node()
    reentrant = isinstance(node, CheckpointFunction._backward_cls)
    known = runner.forwards()
    forwards = [f for f in known if f.grad_enabled or reentrant]
    # Without any, a checkpoint of another library runs again what it ran without gradients.
    recipes = {f.recipe for f in forwards or known} or {_thread.recipe}
    if len(recipes) > 1:
        names = ", ".join(sorted(r.name if r else "no recipe" for r in recipes))
        raise RuntimeError(
            f"a checkpointed forward of {runner!r} must be repeated under its own recipe, but "
            f"forwards ran under several ({names}); "
            "wrap the checkpointed function, checkpoint(keep_recipe(fn), ...), or give it "
            "context_fn=fusible.recipe_context_fn"
        )
    return recipes.pop()


def _graph_task() -> int:
    """The running backward pass, -1 outside of any; in compiled code, as it was when traced."""
    return torch._C._current_graph_task_id()


# What torch.compiler.assume_constant_result sets, which would import the compiler. With a branch on
# is_compiling in __enter__, a scope that is resumed after a graph break has nothing to restore.
_graph_task._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Scope(AbstractContextManager[None]):
    """Sets the recipe of a thread; may be entered again, also inside itself."""

    def __init__(self, recipe: Recipe | None) -> None:
        self._recipe = recipe

    def __enter__(self) -> None:
        # Of the thread, not of the scope, which several threads may enter.
        _thread.outer = _thread.recipe, _thread.graph_task, _thread.outer
        _thread.recipe = self._recipe
        _thread.graph_task = _graph_task()

    def __exit__(self, *_: object) -> None:
        _thread.recipe, _thread.graph_task, _thread.outer = _thread.outer

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``function``, which then runs inside."""
        # With its attributes, which `_bound` leaves out: those of a module are its parameters.
        return functools.update_wrapper(_bound(function, self._recipe), function)


def _bound(function: Callable[P, R], recipe: Recipe | None) -> Callable[P, R]:
    @functools.wraps(function, updated=())
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Scope(recipe):  # made here: compiled code cannot enter one that is made outside it
            return function(*args, **kwargs)

    return bound


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | Mapping[Any, Recipe | None] | None = None,
    amax_reduction_group: Any = None,
) -> AbstractContextManager[None]:
    """Run the ops inside under ``recipe``; ``enabled=False`` switches an outer recipe off.

    Without ``recipe`` it is ``MXFP8BlockScaling()``, on every machine. A mapping gives recipes by
    op, ``{fusible.GroupedLinear: NVFP4BlockScaling(), model.attention: None}`` (`ByOp`).
    Thread-local; one object may be entered again and again, also inside itself, and decorates.
    The recipe is recorded with every forward, so a backward that runs after the scope has ended
    uses the recipe of its forward. ``calibrating`` and ``amax_reduction_group`` are Transformer
    Engine's, for delayed scaling, and have no effect; the order of arguments is its, too.

    Raises:
        TypeError: ``enabled`` is not a bool, or ``recipe`` is not a recipe of ``fusible.recipes``.
        ValueError: the mapping is empty.
    """
    recipe = check_recipes("autocast", enabled, recipe)
    if not isinstance(calibrating, bool):
        raise TypeError(
            f"calibrating of autocast must be a bool, got {calibrating!r:.200}; pass a recipe by "
            "name: autocast(recipe=...)"
        )
    return _Scope(recipe if enabled else None)


def keep_recipe(function: Callable[P, R]) -> Callable[P, R]:
    """Bind ``function`` to the recipe in force now, wherever and whenever it is called.

    For ``torch.utils.checkpoint.checkpoint(keep_recipe(fn), x)``, either variant, when the modules
    inside run under several recipes, and for handing work to another thread.

    Raises:
        TypeError: ``function`` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"keep_recipe takes a function or a module, got {function!r}")
    return _bound(function, _thread.recipe)


def recipe_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for the first and the repeated forward: the second has the recipe in force.

    What ``keep_recipe`` does, where PyTorch or a framework calls ``checkpoint``:
    ``checkpoint(fn, x, use_reentrant=False, context_fn=recipe_context_fn)``. Not in compiled code.
    """
    return nullcontext(), _Scope(_thread.recipe)
