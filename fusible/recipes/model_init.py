"""``quantized_model_init``: modules built inside store their weights quantized."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fusible.arguments import check_bools
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.recipe import Recipe, check_scope
from fusible.recipes.tensor import QuantizedTensor, are_alike, stack, unstack

Usage = Literal["training", "inference"]
"""The use of stored weights: all products, or the forward alone."""


@dataclass(frozen=True)
class ModelInit:
    """How weights are stored by modules built now."""

    recipe: Recipe
    preserve_high_precision_init_val: bool
    usage: Usage


class _ModelInits(threading.local):
    init: ModelInit | None = None


_thread = _ModelInits()


def current_model_init() -> ModelInit | None:
    """Return the innermost enabled ``quantized_model_init`` of this thread, or None."""
    return _thread.init


def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
    *,
    usage: Usage = "training",
) -> AbstractContextManager[None]:
    """Store the weights of modules built inside in the recipe's weight format.

    Without ``recipe`` it is ``MXFP8BlockScaling()``. ``preserve_high_precision_init_val`` keeps the
    value before quantization, on the CPU, for an optimizer's master weights:
    ``weight.get_high_precision_init_val()``, ``weight.clear_high_precision_init_val()``.

    Where row-wise and column-wise use need numbers of their own (1x32 and 1x16 blocks),
    ``usage="inference"`` stores the row-wise ones alone, which the forward reads: half the memory.
    A forward whose input needs a gradient then quantizes the column-wise ones from the stored
    values, in every call.

    Raises:
        TypeError: a recipe that is none of ``fusible.recipes``, or given as ``enabled``.
        ValueError: a ``usage`` that is neither ``"training"`` nor ``"inference"``.
    """
    recipe = check_scope("quantized_model_init", enabled, recipe)
    preserve = preserve_high_precision_init_val
    check_bools("quantized_model_init", preserve_high_precision_init_val=preserve)
    check_usage("quantized_model_init", usage)
    return _scope(ModelInit(recipe, preserve, usage) if enabled else None)


def check_usage(function: str, usage: object) -> None:
    """Raise ValueError unless ``usage`` is one."""
    if usage not in get_args(Usage):
        raise ValueError(f'usage of {function} must be "training" or "inference", got {usage!r}')


@contextmanager
def _scope(init: ModelInit | None) -> Iterator[None]:
    outer = _thread.init
    _thread.init = init
    try:
        yield
    finally:
        _thread.init = outer


def weight_parameter(value: Tensor) -> nn.Parameter:
    """Return ``value`` as a parameter, quantized if modules are built quantized now.

    For row-wise use, which the forward reads, and, unless it is for inference, column-wise use,
    which the data gradient reads.
    """
    init = _thread.init
    fmt = init.recipe.format("weight") if init else None
    if init is None or fmt is None:
        return nn.Parameter(value)
    with torch.no_grad():
        # A backward in another format reads a column-wise form of that one.
        both = init.usage == "training" and init.recipe.backward_format("weight") in (fmt, None)
        held = value.detach()
        if isinstance(held, QuantizedTensor) and held.format == fmt and held.has_rowwise:
            quantized = held.for_uses(columnwise=both)
        else:
            quantized = Quantizer(fmt, columnwise=both)(held)
    parameter = nn.Parameter(quantized)
    if init.preserve_high_precision_init_val:
        parameter.keep_high_precision_init_val(value)  # type: ignore[attr-defined]
    return parameter


def weight_parameters(values: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return each of ``values`` as ``weight_parameter`` does; quantized ones lie side by side.

    So that kernels can view them as one tensor; each has versions of its own.
    """
    parameters = [weight_parameter(value) for value in values]
    quantized = [p for p in parameters if isinstance(p, QuantizedTensor)]
    if len(quantized) > 1 and are_alike(quantized):
        with torch.no_grad():
            members = unstack(stack(quantized))
        for parameter, member in zip(quantized, members, strict=True):
            pieces = member.pieces()  # type: ignore[attr-defined]
            parameter.store({name: piece.data for name, piece in pieces.items()})
    return parameters
