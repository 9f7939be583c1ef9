"""The derivative of a formula: of one evaluation, and by evaluating it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusible.fuser.tracing import hooks_hold_saved, keeps_graph

Formula = Callable[..., Tensor]


class _Kept:
    """The tensors of a formula's graph, which the op saves where ``saved_tensors_hooks`` are on.

    The graph's backward is one inside of another: in it, a checkpoint would recompute once more.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, t: Tensor) -> int:
        """Note a tensor, and give its place."""
        self.tensors.append(t if t.grad_fn is None else t.detach())
        return len(self.tensors) - 1

    def unpack(self, at: int) -> Tensor:
        """The tensor at a place."""
        return self.tensors[at]


class Derivative(NamedTuple):
    """The autograd graph of one evaluation of a formula.

    It holds edges and no tensors, so that ``saved_tensors_hooks`` (checkpointing, offloading)
    decide about all that is kept.
    """

    kept: _Kept | None
    """None if autograd keeps the tensors of the graph."""

    output: GradientEdge | None
    """None if the output depends on no input that needs a gradient."""
    inputs: tuple[GradientEdge | None, ...]
    """None for an input that needs no gradient."""
    dtype: torch.dtype
    like: tuple[torch.Size, torch.dtype, torch.device]
    """Of the first input."""

    def __call__(self, grad_output: Tensor, saved: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs, None for those that the output does not depend on.

        That of the first is then zeros, since it flows on. ``saved`` is what `evaluated` gave.
        """
        if self.kept is not None:
            self.kept.tensors = [*saved]
        grads: list[Tensor | None] = [None] * len(self.inputs)
        if self.output is not None:
            places = [i for i, edge in enumerate(self.inputs) if edge is not None]
            found = torch.autograd.grad(
                [self.output],
                [edge for edge in self.inputs if edge is not None],
                [grad_output.to(self.dtype)],
                retain_graph=keeps_graph(),
                allow_unused=True,
            )
            for i, grad in zip(places, found, strict=True):
                grads[i] = grad
        if self.kept is not None:
            self.kept.tensors = []
        if grads[0] is None and self.inputs[0] is not None:
            shape, dtype, device = self.like
            grads[0] = torch.zeros(shape, dtype=dtype, device=device)
        return grads


class _Inputs(torch.autograd.Function):
    """The inputs of a formula as outputs of one node, where their gradients are taken."""

    @staticmethod
    def forward(fctx: Any, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([t.view_as(t) for t in tensors])

    @staticmethod
    def backward(fctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("the gradients of a formula must be taken at this node")


def evaluated(
    formula: Formula, tensors: Sequence[Tensor], needs: Sequence[bool], who: str
) -> tuple[Tensor, Derivative, Sequence[Tensor]]:
    """What ``formula`` gives for ``tensors``, and its derivative in those that ``needs`` names.

    The last is what the op has to save for it.

    Raises:
        TypeError: the formula reads another tensor that requires a gradient.
    """
    operands = [t.detach() for t in tensors]
    places = [i for i, needed in enumerate(needs) if needed]
    kept = _Kept() if hooks_hold_saved() else None
    hooks = nullcontext() if kept is None else saved_tensors_hooks(kept.pack, kept.unpack)
    with torch.enable_grad(), hooks:
        root = torch.empty(0, device="cpu", requires_grad=True)
        leaves = _Inputs.apply(root, *[operands[i] for i in places])
        edges: list[GradientEdge | None] = [None] * len(operands)
        for i, leaf in zip(places, leaves, strict=True):
            operands[i], edges[i] = leaf, get_gradient_edge(leaf)
        output = formula(*operands)
    x, edge = tensors[0], None
    if isinstance(output, Tensor) and output.requires_grad:
        _refuse_other_leaves(output, leaves, who)
        edge, output = get_gradient_edge(output), output.detach()
    dtype = output.dtype if edge is not None else x.dtype
    derivative = Derivative(kept, edge, tuple(edges), dtype, (x.shape, x.dtype, x.device))
    if kept is None:
        return output, derivative, ()
    saved, kept.tensors = kept.tensors, []
    return output, derivative, saved


def _refuse_other_leaves(output: Tensor, leaves: Sequence[Tensor], who: str) -> None:
    """Refuse an output that depends on a tensor whose gradient would be lost."""
    pending: list[Node | None] = [output.grad_fn]
    seen: set[Node | None] = {None, *[leaf.grad_fn for leaf in leaves]}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        assert node is not None
        seen.add(node)
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            raise TypeError(
                f"formula of {who} must read no tensor that requires a gradient but its arguments, "
                f"got one of shape {tuple(node.variable.shape)}; make it a parameter of the op and "
                "an argument of formula, or detach it"
            )
        pending.extend([function for function, _ in node.next_functions])


def reevaluated(
    formula: Formula, tensors: Sequence[Tensor], grad_output: Tensor, who: str
) -> list[Tensor | None]:
    """The gradients of all ``tensors`` by evaluating ``formula`` once more.

    For a forward that was fused or compiled.

    Raises:
        RuntimeError: the formula draws random numbers, which would be others.
    """
    with _no_draws(who):
        output, derivative = torch.func.vjp(formula, *tensors)  # type: ignore[misc]
    return [*derivative(grad_output.to(output.dtype))]


def _no_draws(who: str) -> AbstractContextManager[Any]:
    return nullcontext() if torch.compiler.is_compiling() else _NoDraws(who)


class _NoDraws(TorchDispatchMode):
    """Refuses operations that draw random numbers."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomFormulaError(
                f"formula of {self.who} must draw no random numbers where a fusion runs its "
                "forward only, nor compiled beside fusion functions, since its backward would draw "
                "others, got one that does; define op_forward and op_backward, and save what was "
                "drawn, or call the module uncompiled"
            )
        return func(*args, **(kwargs or {}))


class RandomFormulaError(RuntimeError):
    """A formula draws random numbers where its backward evaluates it again."""


Described = tuple[tuple[int, ...], torch.dtype, torch.device]


def check_traced(formula: Formula, tensors: Sequence[Described], who: str) -> None:
    """Refuse a formula whose compiled backward would draw other random numbers than its forward.

    Raises:
        RuntimeError: it draws, or does not run on tensors of these shapes.
    """
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in tensors]
        try:
            with _NoDraws(who):
                formula(*made)
        except RandomFormulaError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"formula of {who} must run on an input of shape {tensors[0][0]} under "
                "torch.compile, to see whether it draws random numbers, got an error; call the "
                "module uncompiled"
            ) from error
