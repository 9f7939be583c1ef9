# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Single PTX instructions: memory under a condition, bits, packed numbers of high precision."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.arch import inline_ptx

INF = 0x7F800000
NAN = 0x7FC00000
ONE = 0x3F800000

SIZES = {"bf16": 2, "f16": 2, "f32": 4}
"""Bytes of a number of high precision, by its PTX name."""

CUTLASS_DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
"""By the names of PyTorch's dtypes."""


def load(address, inside, count, cached=False):
    """``count`` words, in pieces of up to four, zeros where not ``inside``.

    Unless ``cached`` they are not kept in the L1 cache.
    """
    words, hint = [], "" if cached else ".L1::no_allocate"
    for start in range(0, count, 4):
        size = min(4, count - start)
        zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(size))
        names = ", ".join(f"{{$w{i}}}" for i in range(size))
        kind, names = (f"v{size}.b32", f"{{{names}}}") if size > 1 else ("b32", names)
        got = inline_ptx(
            f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} "
            f"@p ld.global{hint}.{kind} {names}, [{{$r0}}]; }}",
            write_only_types=[Uint32] * size,
            read_only_args=[address + 4 * start, inside],
        )
        words += got if size > 1 else [got]
    return words


def load_byte(address, inside):
    """One byte, zero where not ``inside``."""
    return inline_ptx(
        "{ .reg .pred p; .reg .b16 a; setp.ne.s32 p, {$r1}, 0; mov.b16 a, 0; "
        "@p ld.global.u8 a, [{$r0}]; cvt.u32.u16 {$w0}, a; }",
        write_only_types=[Uint32],
        read_only_args=[address, inside],
    )


def load_index(address, wide):
    """An integer of 64 or 32 bits, as 32."""
    if wide:
        return Int32(
            inline_ptx(
                "ld.global.s64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address]
            )
        )
    return inline_ptx(
        "ld.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_address(address):
    """An address."""
    return inline_ptx(
        "ld.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address]
    )


def prefetch(address):
    """Bring what is at an address to the L2 cache."""
    inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def store(address, words, inside):
    """Words, in pieces of up to four, where ``inside``."""
    for start in range(0, len(words), 4):
        piece = words[start : start + 4]
        names = ", ".join(f"{{$r{i + 2}}}" for i in range(len(piece)))
        kind, names = (f"v{len(piece)}.b32", f"{{{names}}}") if len(piece) > 1 else ("b32", names)
        inline_ptx(
            f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; "
            f"@p st.global.{kind} [{{$r0}}], {names}; }}",
            read_only_args=[address + 4 * start, inside, *piece],
        )


def store_byte(address, byte, inside):
    """The lowest byte of a word where ``inside``."""
    inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p st.global.b8 [{$r0}], {$r2}; }",
        read_only_args=[address, inside, byte],
    )


def load_half(address, inside):
    """Two bytes as the lower half of a word, zero where not ``inside``."""
    return inline_ptx(
        "{ .reg .pred p; .reg .b16 low, high; setp.ne.s32 p, {$r1}, 0; mov.b16 low, 0; "
        "mov.b16 high, 0; @p ld.global.b16 low, [{$r0}]; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[address, inside],
    )


def store_half(address, word, inside):
    """The lower two bytes of a word where ``inside``."""
    inline_ptx(
        "{ .reg .pred p; .reg .b16 low, high; setp.ne.s32 p, {$r1}, 0; "
        "mov.b32 {low, high}, {$r2}; @p st.global.b16 [{$r0}], low; }",
        read_only_args=[address, inside, word],
    )


def raise_to(address, word, inside):
    """Make a number in memory the larger one of it and ``word``, where ``inside``."""
    inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p red.global.max.u32 [{$r0}], {$r2}; }",
        read_only_args=[address, inside, word],
    )


def to_float(word):
    """The FP32 number of these bits."""
    return inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Uint32(word)]
    )


def to_bits(value):
    """The bits of an FP32 number."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def opaque(number):
    """The same Int32, of which the compiler knows nothing."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[number])


def select(condition, a, b):
    """``a`` if ``condition`` else ``b``, words."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Uint32],
        read_only_args=[Int32(condition), Uint32(a), Uint32(b)],
    )


def add(a, b):
    """``a + b`` in FP32, never part of a fused multiply-add."""
    return inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def mul(a, b):
    """``a * b`` in FP32, never part of a fused multiply-add."""
    return inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def divide(a, b):
    """``a / b`` in FP32, correctly rounded."""
    return inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b)],
    )


def multiply_wide(a, b):
    """The lower and the upper word of the product of two words."""
    return inline_ptx(
        "{ .reg .b64 p; mul.wide.u32 p, {$r0}, {$r1}; mov.b64 {{$w0}, {$w1}}, p; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[a, b],
    )


def smaller(a, b):
    """The smaller of two FP32 numbers; the other one of a NaN."""
    return inline_ptx(
        "min.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b)],
    )


def larger_magnitude(a, b, dtype):
    """The larger magnitudes of two words of one or two numbers, NaN if one is NaN.

    Their signs mean nothing.
    """
    packed = dtype if dtype == "f32" else f"{dtype}x2"
    return inline_ptx(
        f"max.NaN.xorsign.abs.{packed} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def unpack(words, dtype):
    """The FP32 numbers of words of ``dtype``, the lower half first."""
    if dtype == "f32":
        return [to_float(word) for word in words]
    if dtype == "bf16":
        return [to_float(half) for word in words for half in (word << 16, word & 0xFFFF0000)]
    return [value for word in words for value in unpack_f16(word)]


def unpack_f16(word):
    """The two FP32 numbers of a word of FP16."""
    return inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def pack(values, dtype):
    """Words of ``dtype`` of FP32 numbers, rounded to nearest even."""
    if dtype == "f32":
        return [to_bits(value) for value in values]
    return [
        inline_ptx(
            f"cvt.rn.{dtype}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Uint32],
            read_only_args=[low, high],
        )
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]


def magnitudes(words, dtype):
    """FP32 bits of the magnitudes in words of ``dtype``; as integers NaN is the largest."""
    return [to_bits(value) & 0x7FFFFFFF for value in unpack(words, dtype)]


def vector(address, dtype, size):
    """Numbers in global memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(size))


def load_number(address, index, inside, dtype):
    """The FP32 number at ``index`` of numbers of ``dtype``, zero where not ``inside``."""
    at = address + Int64(index) * SIZES[dtype]
    if dtype == "f32":
        return to_float(load(at, Int32(inside), 1)[0])
    return unpack([load_half(at, Int32(inside))], dtype)[0]


def store_number(address, index, value, inside, dtype):
    """Store an FP32 number at ``index`` of numbers of ``dtype``, where ``inside``."""
    at = address + Int64(index) * SIZES[dtype]
    if dtype == "f32":
        store(at, [to_bits(value)], Int32(inside))
    else:
        store_half(at, pack([value, Float32(0)], dtype)[0], Int32(inside))
