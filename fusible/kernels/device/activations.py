# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Activations and their derivatives on FP32 registers, a row each of `fusible.activations`.

``constants`` are the options of a row, in order, and 0 for those that it lacks.
"""

from cutlass import Float32, cute, select_

_LOG2_E = 1.4426950408889634
_GELU, _CUBIC = 1.5957691216057308, 0.044715  # 2 sqrt(2 / pi)


def evaluate(activation, operands, constants):
    """The activation, and its derivative by each operand: one, or a gate and its linear half."""
    function, of_linear = FUNCTIONS[activation]
    value, slope = function(operands[0], constants)
    if len(operands) == 1:
        return value, (slope,)
    linear, of_gate = operands[1], value
    if of_linear is not None:
        linear, slope_of_linear = of_linear(linear, constants)
        of_gate = value * slope_of_linear
    return value * linear, (linear * slope, of_gate)


# --- functions of one element: value and slope ----------------------------------------------------


def _sigmoid(x, constants=None):
    value = cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * -_LOG2_E, fastmath=True))
    return value, value * (Float32(1.0) - value)


def _swish(x, alpha):
    """``x sigmoid(alpha x)``."""
    sigmoid, _ = _sigmoid(alpha * x)
    value = x * sigmoid
    return value, sigmoid + alpha * value * (Float32(1.0) - sigmoid)


def _silu(x, constants):
    return _swish(x, Float32(1.0))


def _qgelu(x, constants):
    return _swish(x, Float32(1.702))


def _gelu(x, constants):
    # (1 + tanh(y / 2)) / 2 is sigmoid(y).
    square = x * x
    sigmoid, _ = _sigmoid(_GELU * x * (Float32(1.0) + _CUBIC * square))
    value = x * sigmoid
    inner = _GELU * (Float32(1.0) + 3 * _CUBIC * square)
    return value, sigmoid + value * (Float32(1.0) - sigmoid) * inner


def _relu(x, constants):
    # A NaN passes, as in torch.
    value = cute.arch.fmax(x, Float32(0.0), nan=True)
    return value, select_(x <= Float32(0.0), Float32(0.0), Float32(1.0))


def _srelu(x, constants):
    value, _ = _relu(x, constants)
    return value * value, value + value


def _tanh(x):
    """By sigmoid; where that would cancel, by its series, to 1e-5 of the value."""
    sigmoid, _ = _sigmoid(x + x)
    square = x * x
    series = Float32(17 / 315) - Float32(62 / 2835) * square
    series = Float32(1 / 3) - square * (Float32(2 / 15) - square * series)
    near = cute.arch.fmax(x, -x) < Float32(0.5)
    return select_(near, x - x * square * series, sigmoid + sigmoid - Float32(1.0))


def _soft_capped_gate(x, constants):
    """``beta tanh(x / beta) sigmoid(x)``."""
    beta, *_ = constants
    tanh, (sigmoid, _) = _tanh(x * cute.arch.rcp_approx(beta)), _sigmoid(x)
    value = beta * tanh * sigmoid
    return value, sigmoid * (Float32(1.0) - tanh * tanh) + value * (Float32(1.0) - sigmoid)


def _soft_capped_linear(x, constants):
    _, beta, *_ = constants
    tanh = _tanh(x * cute.arch.rcp_approx(beta))
    return beta * tanh, Float32(1.0) - tanh * tanh


def _clamped_gate(x, constants):
    """``g sigmoid(alpha g)`` of ``g = min(x, limit)``; a clamped operand's slope is zero."""
    limit, alpha, _ = constants
    value, slope = _swish(cute.arch.fmin(x, limit), alpha)
    return value, select_(x <= limit, slope, Float32(0.0))


def _clamped_linear(x, constants):
    limit, _, offset = constants
    inside = cute.arch.fmax(x, -x) <= limit
    value = cute.arch.fmin(cute.arch.fmax(x, -limit), limit) + offset
    return value, select_(inside, Float32(1.0), Float32(0.0))


FUNCTIONS = {
    "gelu": (_gelu, None),
    "qgelu": (_qgelu, None),
    "relu": (_relu, None),
    "srelu": (_srelu, None),
    "silu": (_silu, None),
    "glu": (_sigmoid, None),
    "geglu": (_gelu, None),
    "qgeglu": (_qgelu, None),
    "reglu": (_relu, None),
    "sreglu": (_srelu, None),
    "swiglu": (_silu, None),
    "clamped_qgeglu": (_clamped_gate, _clamped_linear),
    "situglu": (_soft_capped_gate, _soft_capped_linear),
}
"""Functions of an activation's operand, or of its gate and linear half (None: as it is)."""
