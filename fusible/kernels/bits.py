# mypy: ignore-errors
# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Single PTX instructions: memory under a condition, packed numbers, arithmetic as it is written.

``dtype`` is PTX's name: ``"bf16"``, ``"f16"`` or ``"f32"``.
"""

from cutlass import Float32, Uint32
from cutlass.cute.arch import inline_ptx


def load(address, inside, count):
    """``count`` words (1, 2 or 4), zeros where not ``inside``; not kept in L1."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    kind, names = (f"v{count}.b32", f"{{{names}}}") if count > 1 else ("b32", names)
    got = inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} "
        f"@p ld.global.L1::no_allocate.{kind} {names}, [{{$r0}}]; }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, inside],
    )
    return list(got) if count > 1 else [got]


def store(address, words, inside):
    """Words (1, 2 or 4) where ``inside``."""
    names = ", ".join(f"{{$r{i + 2}}}" for i in range(len(words)))
    kind, names = (f"v{len(words)}.b32", f"{{{names}}}") if len(words) > 1 else ("b32", names)
    inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p st.global.{kind} [{{$r0}}], {names}; }}",
        read_only_args=[address, inside, *words],
    )


def store_half(address, word, inside):
    """The lower two bytes of a word where ``inside``."""
    inline_ptx(
        "{ .reg .pred p; .reg .b16 low, high; setp.ne.s32 p, {$r1}, 0; "
        "mov.b32 {low, high}, {$r2}; @p st.global.b16 [{$r0}], low; }",
        read_only_args=[address, inside, word],
    )


def load_half(address, inside):
    """Two bytes as the lower half of a word, zero where not ``inside``."""
    return inline_ptx(
        "{ .reg .pred p; .reg .b16 low, high; setp.ne.s32 p, {$r1}, 0; mov.b16 low, 0; "
        "mov.b16 high, 0; @p ld.global.b16 low, [{$r0}]; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[address, inside],
    )


def to_float(word):
    """The FP32 number of these bits."""
    return inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Uint32(word)]
    )


def to_bits(value):
    """The bits of an FP32 number."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


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


def unpack(words, dtype):
    """The FP32 numbers of words of ``dtype``, the lower half first."""
    if dtype == "f32":
        return [to_float(word) for word in words]
    if dtype == "bf16":
        return [to_float(half) for word in words for half in (word << 16, word & 0xFFFF0000)]
    return [value for word in words for value in _unpack_f16(word)]


def _unpack_f16(word):
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
