# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""An RMS norm's gradients, and a residual's added, in one pass over the inputs (CuTe DSL).

A CTA takes every so many rows. A thread owns the same columns of each: their part of the gain's
gradient stays in its registers. The sum that a row's gradient needs goes through shared memory, to
one of two places in turn, so that one barrier a row will do.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.arch import inline_ptx

from fusible.kernels.dense.spec import VECTOR
from fusible.kernels.device import bits


def _load_kept(address, inside):
    """Eight FP32 numbers that all rows share, kept in L1."""
    values = []
    for start in (0, 4):
        words = inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
            "mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
            "@p ld.global.nc.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
            write_only_types=[Float32] * 4,
            read_only_args=[address + 4 * start, inside],
        )
        values += words
    return values


def _shared(warps):
    pointer = cute.arch.alloc_smem(Float32, 2 * warps, alignment=16)
    return cute.make_tensor(pointer, cute.make_layout((2, warps), stride=(warps, 1)))


def _over_row(value, shared, turn, threads):
    """The sum of a value over a row's threads."""
    for step in range(5):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
    if threads == 32:
        return value
    # Every lane holds the sum, and writes the same.
    shared[turn, cute.arch.warp_idx()] = value
    cute.arch.sync_threads()
    total = Float32(0)
    for warp in range(threads // 32):
        total = total + shared[turn, warp]
    return total


@cute.kernel
def _rms_norm_backward(
    dy: Int64,
    x: Int64,
    rstd: Int64,
    gain: Int64,
    addend: Int64,
    dx: Int64,
    partial: Int64,
    rows: Int32,
    spec: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    columns = [(v * spec.threads + thread) * VECTOR for v in range(spec.vectors)]
    exists = [Int32(Boolean(column < spec.features)) for column in columns]
    shared = _shared(spec.threads // 32)
    sums = [Float32(0) for _ in range(spec.vectors * VECTOR)]
    turn = Int32(0)
    for row in cutlass.range(cta, rows, ctas, unroll=1):
        offsets = [(Int64(row) * spec.features + column) * 2 for column in columns]
        places = list(zip(offsets, exists, strict=True))
        of_dy = [bits.load(dy + offset, inside, 4) for offset, inside in places]
        of_x = [bits.load(x + offset, inside, 4) for offset, inside in places]
        of_addend = []
        if cutlass.const_expr(spec.add):
            of_addend = [bits.load(addend + offset, inside, 4) for offset, inside in places]
        r = bits.to_float(bits.load(rstd + Int64(row) * 4, Int32(1), 1)[0])
        inner = Float32(0)
        for v in cutlass.range_constexpr(spec.vectors):
            kept = _load_kept(gain + Int64(columns[v]) * 4, exists[v])
            ds = bits.unpack(of_dy[v], spec.dtype)
            xs = bits.unpack(of_x[v], spec.dtype)
            for i, (d, value, g) in enumerate(zip(ds, xs, kept, strict=True)):
                normal = value * r
                sums[v * VECTOR + i] = sums[v * VECTOR + i] + d * normal
                inner = inner + d * g * normal
        mean = _over_row(inner, shared, turn, spec.threads) * Float32(1.0 / spec.features)
        turn = 1 - turn
        for v, (offset, inside) in enumerate(places):
            # Loaded again, from L1, and computed again: registers are what is scarce.
            kept = _load_kept(gain + Int64(columns[v]) * 4, inside)
            ds = bits.unpack(of_dy[v], spec.dtype)
            xs = bits.unpack(of_x[v], spec.dtype)
            grads = [
                (d * g - value * r * mean) * r for d, value, g in zip(ds, xs, kept, strict=True)
            ]
            if cutlass.const_expr(spec.add):
                addends = bits.unpack(of_addend[v], spec.dtype)
                grads = [grad + one for grad, one in zip(grads, addends, strict=True)]
            bits.store(dx + offset, bits.pack(grads, spec.dtype), inside)
    for v in cutlass.range_constexpr(spec.vectors):
        at = partial + (Int64(cta) * spec.features + columns[v]) * 4
        sums_of_vector = sums[v * VECTOR : (v + 1) * VECTOR]
        bits.store(at, bits.pack(sums_of_vector, "f32"), exists[v])


@cute.jit
def rms_norm_backward(
    dy: Int64,
    x: Int64,
    rstd: Int64,
    gain: Int64,
    addend: Int64,
    dx: Int64,
    partial: Int64,
    rows: Int32,
    blocks: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous ``[rows, features]``, partial sums ``[blocks, features]``."""
    _rms_norm_backward(dy, x, rstd, gain, addend, dx, partial, rows, spec).launch(
        grid=[blocks, 1, 1], block=[spec.threads, 1, 1], stream=stream
    )
