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

    def saved_state(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """What outlives the forward: the saved tensors (none without a backward), and the rest."""
        state = dict(vars(self))
        tensors = state.pop("to_save")
        del state["memo"]
        return (tensors if self.requires_grad else ()), state

    @classmethod
    def restored(
        cls, saved_tensors: tuple[Tensor | None, ...], state: dict[str, Any]
    ) -> OperationContext:
        """A new context for the backward."""
        context = cls(state["needs"])
        for name, value in state.items():
            setattr(context, name, value)
        context.saved_tensors = saved_tensors
        return context
