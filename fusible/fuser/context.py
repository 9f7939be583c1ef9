"""What an op's forward leaves for its backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusible.fuser.plan import GradNeeds

_ALL = GradNeeds(True, True, (), ())


class OperationContext:
    """State of one basic op between its forward and its backward.

    Ops save tensors with :meth:`save_for_backward` and plain Python values as attributes (for
    instance ``ctx.dtype``); tensors as attributes are not supported. The backward gets a new
    context with the same values and ``saved_tensors``.

    Attributes:
        requires_grad: whether the op's backward will run.
        needs: which gradients it has to give (input, parameters, extra inputs); it may return
            None for the others.
        recipe: the recipe in force in the forward, None in high precision.
        saved_tensors: in the backward, what the forward saved.
        to_save: in the forward, what it has saved so far.
        memo: in the forward, values that the ops of this one call share, by what they derive from.
    """

    requires_grad: bool
    needs: GradNeeds
    recipe: Any
    to_save: tuple[Tensor | None, ...]
    saved_tensors: tuple[Tensor | None, ...]
    memo: dict[Any, Tensor]

    def __init__(
        self,
        needs: GradNeeds = _ALL,
        recipe: Any = None,
        memo: dict[Any, Tensor] | None = None,
    ) -> None:
        self.requires_grad = needs.requires_grad
        self.needs = needs
        self.recipe = recipe
        self.to_save = ()
        self.memo = {} if memo is None else memo

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward; called in the forward, the last call counts."""
        self.to_save = tensors

    def own_values(self) -> dict[str, Any]:
        """The plain values that the op has set as attributes."""
        return {name: value for name, value in vars(self).items() if name not in _FIXED}

    @classmethod
    def restored(
        cls,
        needs: GradNeeds,
        recipe: Any,
        saved_tensors: tuple[Tensor | None, ...],
        own_values: dict[str, Any],
    ) -> OperationContext:
        """A new context for the backward."""
        context = cls(needs, recipe)
        context.saved_tensors = saved_tensors
        for name, value in own_values.items():
            setattr(context, name, value)
        return context


_FIXED = frozenset(("requires_grad", "needs", "recipe", "to_save", "memo"))
