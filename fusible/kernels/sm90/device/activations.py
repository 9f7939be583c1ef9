"""Gated activations and their gradients on FP32 registers, as plain scalar functions.

``constants`` is ``(limit, alpha, offset)``. Forward gives the activation; backward gives the
gradients of gate and linear, each to be multiplied by the incoming gradient, and the activation.
"""

from cutlass import Float32, cute

from fusible.activations import SM90

_LOG2_E = 1.4426950408889634


def _sigmoid(x):
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * -_LOG2_E, fastmath=True))


def swiglu(gate, linear, constants):
    """``silu(gate) * linear``."""
    return gate * _sigmoid(gate) * linear


def swiglu_backward(gate, linear, constants):
    """Gradients of `swiglu`, and its value."""
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    return linear * (sigmoid + silu * (Float32(1.0) - sigmoid)), silu, silu * linear


def clamped_qgeglu(gate, linear, constants):
    """``(clamp(linear) + offset) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``."""
    limit, alpha, offset = constants
    gate = cute.arch.fmin(gate, limit)
    linear = cute.arch.fmin(cute.arch.fmax(linear, -limit), limit) + offset
    return gate * _sigmoid(alpha * gate) * linear


@cute.jit
def clamped_qgeglu_backward(gate, linear, constants):
    """Gradients of `clamped_qgeglu`, and its value; a clamped operand's gradient is zero."""
    limit, alpha, offset = constants
    clamped = cute.arch.fmin(gate, limit)
    shifted = cute.arch.fmin(cute.arch.fmax(linear, -limit), limit) + offset
    sigmoid = _sigmoid(alpha * clamped)
    glu = clamped * sigmoid
    d_gate = shifted * (sigmoid + alpha * glu * (Float32(1.0) - sigmoid))
    d_gate = d_gate if gate <= limit else Float32(0.0)
    d_linear = glu if cute.arch.fmax(linear, -linear) <= limit else Float32(0.0)
    return d_gate, d_linear, glu * shifted


FORWARD = {name: globals()[name] for name in SM90}
BACKWARD = {name: globals()[f"{name}_backward"] for name in SM90}
