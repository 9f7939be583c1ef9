"""What is computed: the op contract, the basic ops and ``Sequential``."""

from fusible.fuser.context import OperationContext
from fusible.ops.activation import GELU, ReLU, ScaledClampedQGeGLU, ScaledSwiGLU, SiLU, SwiGLU
from fusible.ops.dispatch import Combine, Dispatch
from fusible.ops.elementary import (
    AddExtraInput,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    Reshape,
    Swap,
)
from fusible.ops.grouped_linear import GroupedLinear
from fusible.ops.linear import BasicLinear, Bias, Linear
from fusible.ops.op import BasicOperation, FusedOperation, FusibleOperation
from fusible.ops.quantize import Quantize
from fusible.ops.router import TopKRouter
from fusible.ops.sequential import Sequential
from fusible.ops.weights import reuse_quantized_weights

__all__ = [
    "GELU",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "Combine",
    "ConstantScale",
    "Dispatch",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "Quantize",
    "ReLU",
    "Reshape",
    "ScaledClampedQGeGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "Swap",
    "SwiGLU",
    "TopKRouter",
    "reuse_quantized_weights",
]
