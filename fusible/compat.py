"""Names of Transformer Engine besides its ops: dtypes, checkpointing, CUDA graphs, availability."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from fusible.arguments import check_bools
from fusible.ops.activation import deinterleave_glu, interleave_glu
from fusible.recipes.autocast import autocast, keep_recipe
from fusible.recipes.recipe import Recipe

__all__ = [
    "DType",
    "checkpoint",
    "deinterleave_glu_tensor",
    "fp8_autocast",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
]


class DType:
    """PyTorch's dtypes under Transformer Engine's names, as arguments of quantizers."""

    kByte = torch.uint8
    kInt32 = torch.int32
    kFloat32 = torch.float32
    kFloat16 = torch.float16
    kBFloat16 = torch.bfloat16
    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2
    kFloat4E2M1 = torch.float4_e2m1fn_x2


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Return ``interleave_glu`` of the first dimension."""
    return interleave_glu(tensor, interleave_size, dim=0)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Return ``deinterleave_glu`` of the first dimension."""
    return deinterleave_glu(tensor, interleave_size, dim=0)


def _available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True, or ``(True, "")`` with ``return_reason``: every format runs on every machine.

    ``fusible.explain`` says what has kernels of its own.
    """
    check_bools("an availability check", return_reason=return_reason)
    return (True, "") if return_reason else True


is_fp8_available = is_mxfp8_available = is_nvfp4_available = _available
is_fp8_block_scaling_available = is_bf16_available = _available


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> AbstractContextManager[None]:
    """``autocast`` with the older names of its arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` of a function, which is repeated under its recipe.

    Args:
        function: what is computed again in the backward.
        *args: its arguments.
        use_reentrant: as PyTorch's.
        get_rng_state_tracker: returns an object with ``get_states()`` and ``set_states(states)``,
            whose random states the repetition finds as the forward did.
        distribute_saved_activations: has no effect: every process keeps its input whole.
        tp_group: has no effect.
        **kwargs: other arguments, of PyTorch's function and of ``function``.
    """
    check_bools(
        "checkpoint",
        use_reentrant=use_reentrant,
        distribute_saved_activations=distribute_saved_activations,
    )
    repeated = keep_recipe(function)
    if get_rng_state_tracker is not None:
        repeated = _with_states(repeated, get_rng_state_tracker())
    return torch_checkpoint.checkpoint(repeated, *args, use_reentrant=use_reentrant, **kwargs)


def _with_states(function: Callable[..., Any], tracker: Any) -> Callable[..., Any]:
    """``function``, for which each call finds the random states that the first one did."""
    first: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        states = tracker.get_states()
        if not first:
            first.append(states)
            return function(*args, **kwargs)
        tracker.set_states(first[0])
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(states)

    return call


def make_graphed_callables(
    modules: Any,
    sample_args: tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    *,
    enabled: bool | tuple[bool, ...] | None = None,
    recipe: Recipe | None = None,
    pool: Any = None,
    **options: Any,
) -> Any:
    """``torch.cuda.make_graphed_callables`` of modules that run under a recipe.

    Args:
        modules: a module or a tuple of them.
        sample_args: their arguments, a tuple for each.
        num_warmup_iters: as PyTorch's.
        allow_unused_input: as PyTorch's.
        pool: as PyTorch's.
        enabled: whether they run under the recipe; they do not by default.
        recipe: the recipe, by default that of ``autocast``.
        **options: Transformer Engine's others; ``fp8_enabled`` and ``fp8_recipe`` are ``enabled``
            and ``recipe``. Those that are off, or of recipes with a history, have no effect.

    Raises:
        ValueError: an option that would have an effect, or modules of which some are enabled.
    """
    check_bools("make_graphed_callables", allow_unused_input=allow_unused_input)
    enabled = options.pop("fp8_enabled", enabled)
    enabled = False if enabled is None else enabled
    recipe = options.pop("fp8_recipe", recipe)
    without_effect = (
        "calibrating",
        "fp8_calibrating",
        "amax_reduction_group",
        "fp8_group",
        "clone_param_grads_on_return",
    )
    if asked := [name for name, value in options.items() if value and name not in without_effect]:
        raise ValueError(
            f"make_graphed_callables must be called without {', '.join(asked)}, which PyTorch's "
            "has not; call it without, or capture with torch.cuda.graph"
        )
    given = enabled if isinstance(enabled, tuple) else (enabled,)
    if len(set(given)) != 1:
        raise ValueError(
            f"enabled of make_graphed_callables must be the same for all modules, got {enabled}; "
            "call it once for those under the recipe, and once for the others"
        )
    with autocast(given[0], recipe=recipe):
        return torch.cuda.make_graphed_callables(
            modules, sample_args, num_warmup_iters, allow_unused_input, pool=pool
        )
