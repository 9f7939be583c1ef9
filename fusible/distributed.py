"""Expert parameters shared among processes, and what training with them needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fusible.ops.grouped_linear import GroupedLinear
from fusible.recipes.sharding import is_sharded


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
        ValueError: the mesh has more dimensions; there is no ``GroupedLinear``; the experts of one
            cannot be shared evenly, are shared already, some alone are frozen, or its gradients do
            not go to autograd (``accumulate_into_main_grad``, ``delay_wgrad_compute``).
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh of expert_parallel must have one dimension, got {mesh.ndim}; give it one of "
            'them, as mesh["ep"]'
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

    The norm is taken by mesh, then of these norms; all gradients are scaled by one factor. A
    gradient that is no ``DTensor`` is taken to be the same on all processes. All processes of the
    meshes call it.

    Args:
        parameters: whose ``.grad`` is scaled; those without one are left out.
        max_norm: the largest norm of all gradients together.
        norm_type: p of the norm; infinity is allowed.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before, a scalar that is no ``DTensor``.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            mesh = p.grad.device_mesh if is_sharded(p.grad) else None  # type: ignore[attr-defined]
            by_mesh.setdefault(mesh, []).append(p)
    norms = []
    for of_mesh in by_mesh.values():
        grads = [p.grad for p in of_mesh if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(grads, norm_type)
        norms.append(norm.full_tensor() if is_sharded(norm) else norm)
    total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, max_norm, total)
    return total
