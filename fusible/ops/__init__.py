"""What is computed: the op contract, the basic ops and ``Sequential``."""

from fusible.fuser.context import OperationContext
from fusible.ops.activation import (
    GELU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSwiGLU,
    SiLU,
    SwiGLU,
    deinterleave_glu,
    interleave_glu,
)
from fusible.ops.elementary import AddExtraInput, ConstantScale, Identity, MakeExtraOutput, Reshape
from fusible.ops.grouped_linear import GroupedLinear
from fusible.ops.linear import BasicLinear, Bias, Linear
from fusible.ops.op import BasicOperation, FusedOperation, FusibleOperation
from fusible.ops.quantize import Quantize
from fusible.ops.sequential import Sequential
from fusible.ops.weights import reuse_quantized_weights

__all__ = [
    "GELU",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ConstantScale",
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
    "SwiGLU",
    "deinterleave_glu",
    "interleave_glu",
    "reuse_quantized_weights",
]
