"""How long FP8 products take on an H200, compared with BF16's: a model from measured rates.

Each row of a group costs its products and what quantizes it, each group what quantizes its weight.
The rates are those of whole steps (``benchmarks/results/grouped_mlp_fp8_h200.json``), the same for
all shapes, so an estimate may be off by a twentieth. No rule reads it: a recipe decides what is
quantized, and products of dequantized operands take longer than BF16's as well.
"""

from collections.abc import Sequence

_BF16 = 710e12  # floating-point operations a second, of all products
_FP8_ROWS, _FP8_WGRAD = 1050e12, 860e12
_BYTES = 3.75e12  # a second, of the quantizers


def step_times(linears: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Seconds of a forward and backward: of a row in BF16 and in FP8, of a group's weights in FP8.

    Args:
        linears: in and out features of each, in order; between two is a gated activation.
    """
    elements = sum([k * n for k, n in linears])
    # An operand is read in BF16 and written in FP8 for two products.
    moved = sum([4 * (k + n) for k, n in linears])
    if len(linears) > 1:
        # The pre-activation is read instead of its gradient, which is computed from that of the
        # activation: this one is written and read besides. The activation is not read.
        moved += 2 * linears[1][0]
    fp8 = 4 * elements / _FP8_ROWS + 2 * elements / _FP8_WGRAD + moved / _BYTES
    return 6 * elements / _BF16, fp8, 4 * elements / _BYTES


def speed_note(linears: Sequence[tuple[int, int]]) -> str:
    """A sentence on these times, for ``explain``."""
    bf16, fp8, weights = step_times(linears)
    text = f"forward and backward on an H200, estimated: {fp8 / bf16:.2f} of BF16's time"
    if fp8 >= bf16:
        return f"{text}, more with weights that are quantized in every forward"
    rows = weights / (bf16 - fp8)
    return (
        f"{text} with weights stored or reused; with weights quantized in every forward, less than "
        f"BF16's from {rows:.0f} rows a group"
    )
