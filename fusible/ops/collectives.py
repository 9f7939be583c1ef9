"""Collectives over the process groups of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusible.arguments import check_bools
from fusible.fuser.context import OperationContext
from fusible.ops.op import BasicOperation
from fusible.recipes.product import values

# Named anew in torch 2.13, where the old names warn.
_names = vars(dist)
_all_gather: Any = _names.get("all_gather_single") or _names.get("all_gather_into_tensor")
_reduce_scatter: Any = _names.get("reduce_scatter_single") or _names.get("reduce_scatter_tensor")


def check_initialized(op_name: str) -> None:
    """Raise RuntimeError unless ``torch.distributed`` is initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{op_name} needs torch.distributed, which is not initialized; call "
            "torch.distributed.init_process_group first"
        )


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum of ``x`` over the processes of a group, as a new tensor unless it has one process."""
    if dist.get_world_size(group) == 1:
        return x
    total = values(x).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: Tensor, group: Any) -> Tensor:
    """``[n, ...]`` of each process of a group as ``[processes * n, ...]``, in order of rank."""
    return begin_all_gather(x, group, False)[0]


def begin_all_gather(x: Tensor, group: Any, begin: bool) -> tuple[Tensor, Any]:
    """:func:`all_gather`, and with ``begin`` what to wait for before it is there."""
    processes = dist.get_world_size(group)
    if processes == 1:
        return x, None
    if x.dim() == 0:
        raise ValueError(
            "input of AllGather must have a first dimension, along which the processes' tensors "
            "are joined, got a tensor without dimensions; give it x.unsqueeze(0)"
        )
    x = values(x).contiguous()
    gathered = x.new_empty(processes * x.shape[0], *x.shape[1:])
    return gathered, _all_gather(gathered, x, group=group, async_op=begin)


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """The own part ``[n, ...]`` of the sum over a group of x ``[processes * n, ...]``."""
    processes = dist.get_world_size(group)
    if processes == 1:
        return x
    if x.dim() == 0 or x.shape[0] % processes:
        raise ValueError(
            "first dimension of the input of ReduceScatter must be a multiple of the group's "
            f"{processes} processes, got shape {tuple(x.shape)}"
        )
    x = values(x).contiguous()
    part = x.new_empty(x.shape[0] // processes, *x.shape[1:])
    _reduce_scatter(part, x, group=group)
    return part


def _unchanged(x: Tensor, group: Any) -> Tensor:
    return x


class _Collective(BasicOperation):
    """An op over a process group; arguments as in :class:`AllGather`."""

    saves = "nothing"
    functions: ClassVar[tuple[Callable[[Tensor, Any], Tensor], Callable[[Tensor, Any], Tensor]]]
    """The collective of the input, and its adjoint, of the gradient."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        check_initialized(type(self).__name__)
        self.process_group = process_group

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The collective."""
        return self.functions[0](input_, self.process_group)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor | None:
        """Its adjoint."""
        return self.functions[1](grad_output, self.process_group) if ctx.needs.input else None

    def extra_repr(self) -> str:
        """The number of processes."""
        return f"processes={dist.get_world_size(self.process_group)}"


class AllReduce(_Collective):
    """The sum of the input over all processes; the gradient passes unchanged.

    All processes are assumed to compute the same from the sum, and so to have the same gradient of
    it; ``reduce_in_backward`` changes nothing. Sums are in the tensor's dtype. Saves nothing. Other
    argument and RuntimeError as in :class:`AllGather`.
    """

    functions = all_reduce, _unchanged

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        check_bools("AllReduce", reduce_in_backward=reduce_in_backward)
        super().__init__(process_group)
        self.reduce_in_backward = reduce_in_backward


class AllReduceGrad(_Collective):
    """The input as it is; its gradient is summed over all processes: :class:`AllReduce`'s adjoint.

    For an input that all processes share and of which each uses a part, as in a column-parallel
    ``Linear``. Saves nothing. Argument and RuntimeError as in :class:`AllGather`.
    """

    functions = _unchanged, all_reduce


class AllGather(_Collective):
    """The inputs ``[n, ...]`` of all processes as ``[processes * n, ...]``, in order of rank.

    The gradient is summed over the processes, of which each gets its part. Saves nothing.

    Args:
        process_group: of ``torch.distributed``; all processes if None.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError: in a call, the input has no dimensions.
    """

    functions = all_gather, reduce_scatter


class ReduceScatter(_Collective):
    """The own part ``[n, ...]`` of the sum of the inputs ``[processes * n, ...]``.

    The gradients of all parts are gathered. Saves nothing. Argument and RuntimeError as in
    :class:`AllGather`, and:

    Raises:
        ValueError: in a call, the input's first dimension cannot be divided among the processes.
    """

    functions = reduce_scatter, all_gather
