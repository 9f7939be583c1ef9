"""The op contract, the basic ops and ``Sequential``."""

from fusible.fuser.context import OperationContext
from fusible.fuser.registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from fusible.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
    deinterleave_glu,
    interleave_glu,
)
from fusible.ops.collectives import AllGather, AllReduce, AllReduceGrad, ReduceScatter
from fusible.ops.dispatch import Combine, Dispatch
from fusible.ops.elementary import (
    AddExtraInput,
    ConstantScale,
    Dropout,
    Identity,
    MakeExtraOutput,
    Reshape,
    Swap,
)
from fusible.ops.grouped_linear import GroupedLinear
from fusible.ops.linear import BasicLinear, Bias, Linear
from fusible.ops.norms import L2Normalization, LayerNorm, RMSNorm
from fusible.ops.op import BasicOperation, FusedOperation, FusibleOperation
from fusible.ops.quantize_op import Quantize
from fusible.ops.scaled_activation import (
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
)
from fusible.ops.sequential import Sequential
from fusible.ops.top_k_router import TopKRouter
from fusible.ops.weights import quantize_, reuse_quantized_weights

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "AllReduceGrad",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "Dispatch",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "Swap",
    "SwiGLU",
    "TopKRouter",
    "deinterleave_glu",
    "interleave_glu",
    "quantize_",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "reuse_quantized_weights",
]
