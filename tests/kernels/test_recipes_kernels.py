"""The quantizers' kernels compile for Hopper and Blackwell on a machine with no GPU."""

import re

import pytest
from checks import assert_no_spills

pytest.importorskip("cutlass")

from fusible.kernels.quantize.spec import DequantizeSpec, GluBackwardSpec, QuantizeSpec
from fusible.kernels.runtime.launch import compile_kernel
from fusible.recipes.formats import (
    E2M1,
    E4M3,
    E5M2,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
    nvfp4,
)

# Every format with every input type, and every use and grouping of each at least once.
ENCODERS = [
    QuantizeSpec(mxfp8(), "bf16", False, False, True, True),
    QuantizeSpec(mxfp8(E5M2), "f16", True, True, True, True),
    QuantizeSpec(mxfp8(E4M3, "floor"), "f32", True, False, False, True),
    QuantizeSpec(fp8_block(), "bf16", True, False, True, True),
    QuantizeSpec(fp8_block(power_of_two=False), "f16", False, False, True, False),
    QuantizeSpec(fp8_block(), "f32", False, False, False, True),
    QuantizeSpec(fp8_block(block=(128, 128)), "bf16", False, False, True, False),
    QuantizeSpec(fp8_block(block=(128, 128)), "f32", False, False, True, False),
    QuantizeSpec(fp8_tensor(), "bf16", True, False, True, False),
    QuantizeSpec(fp8_tensor(E5M2), "f32", False, False, True, False),
    QuantizeSpec(nvfp4(), "bf16", True, False, True, True),
    QuantizeSpec(nvfp4(), "f16", False, False, True, False),
    QuantizeSpec(nvfp4(), "f32", False, False, False, True),
    QuantizeSpec(nvfp4((16, 16)), "bf16", False, False, True, False),
    # Formats of one's own, of the smallest block and of others.
    QuantizeSpec(NumberFormat("own", E5M2, (1, 16), "e8m0_up"), "bf16", True, False, True, True),
    QuantizeSpec(NumberFormat("own", E4M3, (1, 64), "fp32"), "f32", True, False, True, True),
    QuantizeSpec(NumberFormat("own", E2M1, (1, 32), "e4m3"), "bf16", True, False, True, True),
    QuantizeSpec(NumberFormat("own", E4M3, (64, 64), "e8m0_up"), "f16", False, False, True, False),
    # With values, of one use and of both.
    QuantizeSpec(mxfp8(), "bf16", True, False, False, True, True, False),
    QuantizeSpec(mxfp8(E5M2), "bf16", True, False, False, False, True, True),
    QuantizeSpec(fp8_block(power_of_two=False), "f16", True, False, False, False, True, True),
    QuantizeSpec(fp8_block(block=(128, 128)), "bf16", False, False, True, False, True, False),
    QuantizeSpec(fp8_tensor(), "bf16", True, False, True, False, True, False),
    QuantizeSpec(nvfp4(), "f32", True, True, True, True, True, True),
]
K_MAJOR = [
    QuantizeSpec(fp8_block(), "bf16", True, False, True, True, k_major=True),
    QuantizeSpec(fp8_block(E5M2), "f16", True, True, False, True, k_major=True),
    QuantizeSpec(fp8_block(power_of_two=False), "f32", False, False, True, True, k_major=True),
    QuantizeSpec(fp8_block(power_of_two=False), "bf16", True, False, True, False, k_major=True),
    QuantizeSpec(fp8_block(), "bf16", True, False, True, True, k_major=True, gathered=True),
    QuantizeSpec(fp8_block(), "bf16", True, False, True, False, k_major=True, gathered=True),
    QuantizeSpec(fp8_block(E5M2), "f16", True, True, False, True, k_major=True, gathered=True),
    QuantizeSpec(fp8_block(), "f32", True, False, True, True, k_major=True, gathered=True),
    QuantizeSpec(fp8_block(), "f32", False, False, True, True, k_major=True, gathered=True),
    QuantizeSpec(fp8_block(block=(128, 128)), "bf16", False, False, True, True, k_major=True),
    QuantizeSpec(fp8_block(block=(128, 128)), "f32", False, False, False, True, k_major=True),
    *[
        QuantizeSpec(fp8_tensor(), dtype, grouped, wide, *uses, k_major=True, gathered=gathered)
        for dtype, grouped, wide, uses, gathered in (
            ("bf16", True, False, (True, True), False),
            ("bf16", True, False, (True, False), True),
            ("bf16", True, True, (False, True), True),
            ("bf16", False, False, (True, True), False),
            ("f16", True, False, (True, True), True),
            ("f32", True, False, (True, True), True),
            ("f32", False, False, (True, False), False),
        )
    ],
]
GLU_BACKWARD = [
    *[
        GluBackwardSpec(K_MAJOR[0], name, scaled, 0, True)
        for name, scaled in (("srelu", True), ("gelu", False), ("situglu", True), ("geglu", False))
    ],
    GluBackwardSpec(K_MAJOR[0], "swiglu", True, 0, False),
    GluBackwardSpec(K_MAJOR[0], "swiglu", True, 1, False),
    GluBackwardSpec(K_MAJOR[0], "swiglu", True, 0, True),
    GluBackwardSpec(K_MAJOR[0], "swiglu", True, 0, False, both_sides=True),
    GluBackwardSpec(K_MAJOR[0], "situglu", True, 0, True, both_sides=True),
    GluBackwardSpec(K_MAJOR[0], "clamped_qgeglu", True, 0, False),
    GluBackwardSpec(K_MAJOR[0]._replace(wide_ends=True), "clamped_qgeglu", True, 4, True),
    # Of a quantized pre-activation.
    *[
        GluBackwardSpec(K_MAJOR[0], name, scaled, stripe, values, both_sides, act, True)
        for name, scaled, stripe, values, both_sides, act in (
            ("swiglu", True, 0, False, True, fp8_block()),
            ("swiglu", False, 0, True, True, None),
            ("situglu", True, 0, True, True, fp8_block()),
            ("gelu", True, 0, False, False, fp8_block()),
        )
    ],
    # With the activation.
    *[
        GluBackwardSpec(K_MAJOR[0], name, scaled, 0, values, both_sides, fp8_block())
        for name, scaled, values, both_sides in (
            ("swiglu", True, False, True),
            ("swiglu", False, True, True),
            ("clamped_qgeglu", True, False, True),
            ("situglu", True, True, True),
            ("gelu", True, False, False),
            ("srelu", False, True, False),
        )
    ],
]
# For one use, where the input or the weight has no gradient, and for none, by another launch.
FOR_NONE = QuantizeSpec(fp8_tensor(E5M2), "bf16", True, False, False, False, k_major=True)
GLU_BACKWARD_THAT_SPILLS = {
    "rows": GluBackwardSpec(K_MAJOR[0]._replace(columnwise=False), "swiglu", True, 0, True),
    "columns": GluBackwardSpec(
        K_MAJOR[0]._replace(rowwise=False), "clamped_qgeglu", True, 0, False
    ),
    "none": GluBackwardSpec(FOR_NONE, "swiglu", True, 0, True),
    "none, stripes": GluBackwardSpec(FOR_NONE, "clamped_qgeglu", True, 1, True),
    "none, plain": GluBackwardSpec(FOR_NONE, "srelu", True, 0, True),
    "none, situglu": GluBackwardSpec(FOR_NONE, "situglu", True, 0, True),
    "none, both sides": GluBackwardSpec(FOR_NONE, "swiglu", True, 0, True, both_sides=True),
    "columns, activation": GluBackwardSpec(
        K_MAJOR[0]._replace(rowwise=False), "clamped_qgeglu", True, 0, False, True, fp8_block()
    ),
}
MAXIMA = [
    QuantizeSpec(fp8_tensor(), "bf16", True, False, True, True),
    QuantizeSpec(fp8_tensor(), "bf16", True, False, True, True, k_major=True, gathered=True),
    QuantizeSpec(nvfp4(), "f32", False, False, True, True),
    QuantizeSpec(nvfp4(hadamard=True), "bf16", True, False, True, True),
]
DECODERS = [
    DequantizeSpec(mxfp8(), "bf16", True, False, True),
    DequantizeSpec(mxfp8(E5M2), "f16", False, False, False),
    DequantizeSpec(fp8_block(), "bf16", True, True, True),
    DequantizeSpec(fp8_block(block=(128, 128)), "f32", False, False, False),
    DequantizeSpec(fp8_tensor(), "bf16", True, False, False),
    DequantizeSpec(nvfp4(), "bf16", True, False, True),
    DequantizeSpec(nvfp4(), "f32", False, False, False),
    DequantizeSpec(NumberFormat("own", E5M2, (1, 16), "e8m0_up"), "bf16", True, False, True),
    DequantizeSpec(NumberFormat("own", E4M3, (64, 64), "e8m0_up"), "bf16", False, False, False),
]
FOR_HOPPER = "quantize.k_major", "quantize.glu_backward"
"""Kernels that make operands of its FP8 products alone."""
KERNELS = [
    *[("quantize.quantize.quantize", spec) for spec in ENCODERS],
    *[("quantize.k_major.quantize", spec) for spec in K_MAJOR],
    *[("quantize.glu_backward.quantize", spec) for spec in GLU_BACKWARD],
    *[("quantize.quantize.amax", spec) for spec in MAXIMA],
    *[("quantize.dequantize.dequantize", spec) for spec in DECODERS],
]


def name(case):
    kernel, spec = case
    if kernel == "quantize.glu_backward.quantize":
        act = "" if spec.act_format is None else f"-{spec.act_format.name}"
        act += "-quantized" * spec.quantized_preact
        return f"{kernel}-{spec.activation}-{spec.stripe}-{spec.values}-{spec.both_sides}{act}"
    uses = "".join(letter for letter, on in zip("gwrcvu", spec[2:], strict=False) if on)
    return f"{kernel}-{spec.format.name}-{spec.dtype}-{uses}"


# Of each kernel and format one: the code is that for Hopper, which is compiled in every form.
ON_BLACKWELL = {
    (kernel, spec.format): (kernel, spec)
    for kernel, spec in KERNELS
    if not kernel.startswith(FOR_HOPPER)
}


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        *[(case, "sm_90a") for case in KERNELS],
        *[(case, "sm_100a") for case in ON_BLACKWELL.values()],
    ],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_kernels_compile_without_spills(case, architecture, capfd):
    kernel, spec = case
    compile_kernel(kernel, (spec,), f"--gpu-arch {architecture} remarks{{ptx}}")
    assert_no_spills("".join(capfd.readouterr()), architecture)


@pytest.mark.parametrize(
    ("architecture", "uses"),
    [("sm_90a", (False, False, True, True)), ("sm_100a", (True, True, False, False))],
    ids=["sm_90a-values", "sm_100a-elements"],
)
def test_transformed_and_stochastically_rounded_spills_at_most_few_words(architecture, uses, capfd):
    """As the products of each architecture read gradients."""
    spec = QuantizeSpec(nvfp4(hadamard=True, stochastic=True), "bf16", True, False, *uses)
    options = f"--gpu-arch {architecture} remarks{{ptx}}"
    compile_kernel("quantize.quantize.quantize", (spec,), options)
    spilled = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spilled
    assert max(map(int, spilled)) <= 32


@pytest.mark.parametrize("spec", GLU_BACKWARD_THAT_SPILLS.values(), ids=GLU_BACKWARD_THAT_SPILLS)
def test_backward_for_one_use_or_none_spills_little(spec, capfd):
    """The assembler holds more at once than it has registers for, up to a few words."""
    compile_kernel("quantize.glu_backward.quantize", (spec,), "--gpu-arch sm_90a remarks{ptx}")
    spilled = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spilled
    assert max(map(int, spilled)) <= 200
