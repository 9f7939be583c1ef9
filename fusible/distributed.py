"""Expert parameters shared among processes, and what training with them needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fusible.ops.collectives import all_gather
from fusible.ops.grouped_linear import GroupedLinear
from fusible.recipes.sharding import is_sharded, local


def expert_parallel(module: nn.Module, mesh: Any) -> nn.Module:
    """Give each process of a mesh its part of the experts of every ``GroupedLinear`` in a module.

    Process r keeps the experts from ``r * E / P`` to ``(r + 1) * E / P``. Weights and biases, of
    all E experts and with the same values on every process, become ``DTensor`` parameters
    ``Shard(0)`` of shape ``[E, ...]``, so checkpoints, ``fully_shard`` over another dimension of
    the mesh and gradient norms see whole parameters. ``num_groups`` and the ``split_sizes`` that
    the op takes are then those of the E / P experts here. The gradient of an expert is the sum
    over the rows that it got, of whichever process they came.

    Separate parameters of each expert (``weight0`` ...) become one (``weight``); checkpoints of
    either form load. Call it before ``fully_shard``, and make the optimizer after both.

    Args:
        module: built with all experts, on any device; on the meta device call ``to_empty`` and
            ``reset_parameters`` afterwards.
        mesh: one-dimensional ``DeviceMesh`` of the P processes.

    Returns:
        The module.

    Raises:
        ValueError: ``mesh`` is no mesh of one dimension; there is no ``GroupedLinear``; the experts
            of one cannot be shared evenly, are shared already, some alone are frozen, or its
            gradients do not go to autograd (``accumulate_into_main_grad``,
            ``delay_wgrad_compute``).
    """
    if getattr(mesh, "ndim", None) != 1:
        got = getattr(mesh, "ndim", type(mesh).__name__)
        raise ValueError(
            f"mesh of expert_parallel must be a DeviceMesh of one dimension, got {got}; make one "
            'by init_device_mesh, or give it one dimension of a larger one, as mesh["ep"]'
        )
    linears = [op for op in module.modules() if isinstance(op, GroupedLinear)]
    if not linears:
        raise ValueError(
            "module of expert_parallel must contain a GroupedLinear, got none; call it on the "
            "block that holds the experts"
        )
    for op in linears:
        op.check_shardable(mesh)
    for op in linears:
        op.shard_experts(mesh)
    return module


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters that are sharded over several meshes.

    The norm is taken of each process's parts, of these in order of rank, then over the meshes; so
    it has the same bits on all processes. All gradients are scaled by one factor. A gradient that
    is no ``DTensor`` is taken to be the same on all processes. All processes of the meshes call it.

    Args:
        parameters: whose ``.grad`` is scaled; those without one are left out.
        max_norm: the largest norm of all gradients together.
        norm_type: p of the norm, not 0; infinity is allowed.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before, a scalar that is no ``DTensor``.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        ValueError: ``norm_type`` is 0, or a gradient is a ``DTensor`` of partial sums.
    """
    if norm_type == 0:
        raise ValueError(
            "norm_type of clip_grad_norm_ must not be 0, got 0: counts of values do not combine as "
            "norms do; use 1, 2 or math.inf"
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    alike: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            grad: Any = p.grad
            placed = (grad.device_mesh, tuple(grad.placements)) if is_sharded(grad) else None
            alike.setdefault(placed, []).append(p)
    norms = [_norm(placed, [p.grad for p in some], norm_type) for placed, some in alike.items()]
    total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
    for some in alike.values():
        nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total


def _norm(placed: Any, grads: list[Any], norm_type: float) -> Tensor:
    """The norm of gradients with one mesh and placements, or of those that are no ``DTensor``."""
    parts = [local(grad) for grad in grads]
    filled = [part for part in parts if part.numel()]
    norm = nn.utils.get_total_norm(filled, norm_type) if filled else parts[0].new_zeros(())
    if placed is not None:
        mesh, placements = placed
        for dim, placement in enumerate(placements):
            if placement.is_partial():
                raise ValueError(
                    f"gradients of clip_grad_norm_ must be sharded or replicated, got {placements}"
                    "; redistribute them first"
                )
            if not placement.is_replicate():
                norms = all_gather(norm.view(1), mesh.get_group(dim))
                norm = torch.linalg.vector_norm(norms, norm_type)
    return norm
