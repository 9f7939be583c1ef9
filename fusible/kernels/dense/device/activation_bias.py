# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""An activation's gradient and its sums over rows in one pass over both inputs (CuTe DSL).

A thread owns eight neighbouring columns of a strip of rows, of which ``UNROLL`` are in flight, and
their sums in FP32 registers. A warp's sums are a row of the partial sums, which are added up after.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fusible.kernels.dense.spec import VECTOR
from fusible.kernels.device import bits
from fusible.kernels.device.activations import evaluate

WARPS, UNROLL = 4, 4


@cute.kernel
def _activation_bias(
    dy: Int64,
    x: Int64,
    dx: Int64,
    partial: Int64,
    rows: Int32,
    columns: Int32,
    strip_rows: Int32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    strip = (cta // chunks) * WARPS + thread // 32
    column = ((cta % chunks) * 32 + thread % 32) * VECTOR
    sums = [Float32(0) for _ in range(VECTOR)]
    first = strip * strip_rows
    for start in cutlass.range(first, first + strip_rows, UNROLL, unroll=1):
        places, loaded = [], []
        for u in cutlass.range_constexpr(UNROLL):
            row = start + u
            inside = Int32(Boolean(row < rows) & (column < columns))
            offset = (Int64(row) * Int64(columns) + Int64(column)) * 2
            places.append((offset, inside))
            loaded.append((bits.load(dy + offset, inside, 4), bits.load(x + offset, inside, 4)))
        for (offset, inside), (of_dy, of_x) in zip(places, loaded, strict=True):
            grads = []
            pairs = zip(bits.unpack(of_dy, spec.dtype), bits.unpack(of_x, spec.dtype), strict=True)
            for i, (d, v) in enumerate(pairs):
                _, (slope,) = evaluate(spec.activation, (v,), None)
                grads.append(d * slope)
                sums[i] = sums[i] + grads[i]
            bits.store(dx + offset, bits.pack(grads, spec.dtype), inside)
    at = partial + (Int64(strip) * Int64(columns) + Int64(column)) * 4
    exists = Int32(Boolean(first < rows) & (column < columns))
    bits.store(at, bits.pack(sums, "f32"), exists)


@cute.jit
def activation_bias(
    dy: Int64,
    x: Int64,
    dx: Int64,
    partial: Int64,
    rows: Int32,
    columns: Int32,
    strip_rows: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous ``[rows, columns]``; a strip of rows to a partial sum."""
    chunks = (columns + 32 * VECTOR - 1) // (32 * VECTOR)
    tall = WARPS * strip_rows
    _activation_bias(dy, x, dx, partial, rows, columns, strip_rows, chunks, spec).launch(
        grid=[chunks * ((rows + tall - 1) // tall), 1, 1], block=[32 * WARPS, 1, 1], stream=stream
    )
