"""Calls of an op's forward and backward by Transformer Engine's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.fuser.context import OperationContext, Tensors


def call_fuser_forward(
    op: Any, contexts: list[OperationContext], x: Tensor, extra_inputs: Sequence[Tensors]
) -> Any:
    """Call ``op.fuser_forward`` with quantizers and keyword arguments of the contexts."""
    return op.fuser_forward(
        contexts,
        x,
        basic_op_extra_inputs=extra_inputs,
        prev_op_grad_output_quantizer=contexts[0].grad_quantizer,
        next_op_input_quantizer=contexts[-1].next_quantizer,
        basic_op_kwargs=[context.kwargs for context in contexts],
    )


def call_fuser_backward(
    op: Any, contexts: list[OperationContext], grad_output: Tensor, grad_extra: Sequence[Tensors]
) -> Any:
    """Call ``op.fuser_backward``."""
    return op.fuser_backward(contexts, grad_output, basic_op_grad_extra_outputs=grad_extra)
