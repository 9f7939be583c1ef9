"""The backward of a gated activation, quantized in one pass: what the two of them give."""

import pytest
import reference as ref
import simt
import torch
from torch.library import opcheck
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

from fusible.activations import ACTIVATIONS
from fusible.formulas import split_glu
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import vectors
from fusible.kernels.quantize import glu_backward, k_major
from fusible.kernels.quantize.glu_backward import quantize_glu_backward, writes_activation
from fusible.kernels.quantize.k_major import ScaledMatrix, quantize_k_major
from fusible.kernels.quantize.spec import GluBackwardSpec, QuantizeSpec
from fusible.recipes.formats import E5M2, SAVED_INPUT, fp8_block, fp8_tensor

ENDS = {
    "ragged": [0, 1, 128, 256, 385, 513],  # groups of 0, 1, 127, 128, 129 and 128 rows
    "one": [600],
    "empty": [0, 0],
    "beyond": [130, 1000],
}
ROWS = 600
FORMATS = {"e4m3": fp8_block(), "e5m2": fp8_block(E5M2), "groups": fp8_tensor(E5M2)}
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_scaling = pytest.mark.parametrize(
    "fmt", [FORMATS["e4m3"], FORMATS["groups"]], ids=["blocks", "groups"]
)
each_ends = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


def operands(features, ends, scales_dtype=torch.float32, sides=2):
    """``dy``, ``preact``, scales and ends; NaN in all rows past the last group."""
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(ROWS, features, generator=generator).bfloat16()
    preact = torch.randn(ROWS, sides * features, generator=generator).bfloat16() * 2
    scales = torch.rand(ROWS, generator=generator).to(scales_dtype)
    for t in (dy, preact, scales):
        t[min(ends[-1], ROWS) :] = torch.nan
    return dy, preact, scales, torch.tensor(ends, dtype=torch.int32)


@each_ends
@each_format
def test_it_is_the_backward_then_the_quantization(ends, fmt):
    dy, preact, scales, given = operands(144, ends)
    glu = Glu("swiglu", 8)
    made = quantize_glu_backward(
        dy, preact, scales, given, glu, fmt, rowwise=True, columnwise=True, values=True
    )
    live = min(ends[-1], ROWS)
    leaves = [t[:live].double().requires_grad_() for t in (preact, scales)]
    gates, linears = [leaves[0].unflatten(1, (-1, 2, 8))[:, :, i].flatten(1) for i in (0, 1)]
    y = torch.nn.functional.silu(gates) * linears * leaves[1][:, None]
    dpreact, dscales = torch.autograd.grad(y, leaves, dy[:live].double())
    assert not made.values[live:].any()
    assert not made.scales[live:].any()
    torch.testing.assert_close(made.values[:live].double(), dpreact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(made.scales[:live].double(), dscales, rtol=1e-4, atol=1e-4)
    want = quantize_k_major(made.values, fmt, rowwise=True, columnwise=True, ends=given)
    ref.assert_same_bits(made.operands.row[:2], want.row[:2])
    ref.assert_same_bits(made.operands.column, want.column)


@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("values", [True, False])
@each_scaling
def test_the_op_passes_opcheck(uses, values, fmt):
    assert_passes_opcheck(Glu(), uses, values, fmt)


def test_the_op_without_scales_passes_opcheck():
    assert_passes_opcheck(Glu("srelu"), (True, False), True, fp8_block(), scaled=False)


@each_scaling
def test_the_op_with_the_activation_passes_opcheck(fmt):
    assert_passes_opcheck(Glu(), (True, False), False, fmt, activation=True)


@each_scaling
def test_the_op_of_a_quantized_pre_activation_passes_opcheck(fmt):
    assert_passes_opcheck(Glu(), (True, True), True, fmt, quantized=True)


def assert_passes_opcheck(glu, uses, values, fmt, scaled=True, activation=False, quantized=False):
    dy, preact, scales, ends = operands(80, [130, 600], sides=glu.sides)
    constants, wanted = fmt.as_constants() * 2, (activation, *uses, values)
    preact, preact_scale = stored(preact) if quantized else (preact, None)
    given = dy, preact, scales if scaled else None, ends, preact_scale
    tests = ["test_faketensor"] if quantized else ALL_TEST_UTILS  # others multiply FP8 numbers
    op = torch.ops.fusible.quantize_glu_backward
    opcheck(op, (*given, *glu, *constants, *wanted), test_utils=[*tests])


@each_ends
@pytest.mark.parametrize(
    ("features", "interleave"),
    [(384, 0), (512, 128), (512, 256), (72, 0), (320, 32), (208, 8), (208, 4), (80, 2), (144, 1)],
)
@each_scaling
def test_the_kernels_code_is_the_definition(ends, features, interleave, fmt, monkeypatch):
    assert_as_defined(monkeypatch, ends, features, Glu("swiglu", interleave), fmt)


@pytest.mark.parametrize("scaled", [True, False], ids=["scales", "no scales"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_code_of_every_activation(activation, scaled, monkeypatch):
    options = (1.5, 1.702, 1.0)[: len(ACTIVATIONS[activation].options)]
    glu = Glu(activation, 0, *options)
    assert_as_defined(monkeypatch, ENDS["ragged"], 136, glu, fp8_block(), scaled)


@each_ends
@pytest.mark.parametrize(
    ("features", "glu"),
    [(384, Glu()), (512, Glu("swiglu", 128)), (200, Glu("gelu"))],
    ids=["halves", "stripes", "plain"],
)
@each_scaling
def test_the_kernels_code_of_a_quantized_pre_activation(ends, features, glu, fmt, monkeypatch):
    assert_as_defined(monkeypatch, ends, features, glu, fmt, quantized=True)


@each_ends
@each_format
def test_of_a_quantized_pre_activation_it_is_that_of_its_values(ends, fmt):
    dy, preact, scales, given = operands(200, ends)
    row = quantize_k_major(preact, SAVED_INPUT, rowwise=True, columnwise=False).row
    values = row.data.float() * row.scale.repeat_interleave(128, -1)[:, :400]
    uses = {"rowwise": True, "columnwise": True, "values": True, "act_format": fmt}
    made = quantize_glu_backward(dy, row, scales, given, Glu(), fmt, **uses)
    want = quantize_glu_backward(dy, values.bfloat16(), scales, given, Glu(), fmt, **uses)
    ref.assert_same_bits(made.operands.row[:2], want.operands.row[:2])
    ref.assert_same_bits(made.operands.column, want.operands.column)
    ref.assert_same_bits(
        [made.values, made.scales, *made.activation], [want.values, want.scales, *want.activation]
    )


def stored(preact):
    """Elements and scales of a pre-activation that was saved quantized, as they are stored."""
    row = quantize_k_major(preact, SAVED_INPUT, rowwise=True, columnwise=False).row
    return row.data, row.scale.t()


def assert_as_defined(monkeypatch, ends, features, glu, fmt, scaled=True, quantized=False):
    dy, preact, scales, given = operands(features, ends, sides=glu.sides)
    scales = scales if scaled else None
    flags = {"rowwise": True, "columnwise": True, "values": True}
    if quantized:
        row = quantize_k_major(preact, SAVED_INPUT, rowwise=True, columnwise=False).row
        preact = ScaledMatrix(*row[:2])
    want = quantize_glu_backward(dy, preact, scales, given, glu, fmt, **flags)
    results = made_by_the_kernels_code(monkeypatch, (dy, preact, scales, given), glu, fmt)
    pieces, (partials, values) = results[:5], results[5:7]
    live = int(given[-1].clamp(max=ROWS))
    assert not values[live:].any()
    torch.testing.assert_close(values, want.values, rtol=2**-7, atol=2e-5)  # FP32 cancels
    assert (values == want.values).float().mean() > 0.98  # another exponential
    if scaled:
        torch.testing.assert_close(partials.sum(0), want.scales, rtol=1e-4, atol=1e-4)
    # What it quantized are these values.
    again = torch.ops.fusible.quantize_k_major(values, given, None, *fmt.as_constants(), True, True)
    ref.assert_same_bits(pieces[:2], again[:2])
    end = int(again[4][-1])
    ref.assert_same_bits(*[[t[2][:, :end], t[3][: end // 128]] for t in (pieces, again)])


def made_by_the_kernels_code(monkeypatch, operands, glu, fmt, uses=(True, True), act=None):
    """What the op gives, with the partial sums of the scales' gradient, as the kernel writes it."""
    pytest.importorskip("cutlass")
    dy, preact, scales, ends = operands
    quantized, scale = isinstance(preact, ScaledMatrix), None
    if quantized:
        preact, scale = preact.data, preact.scale.t()
    columns, interleave = preact.shape[1], glu.interleave
    constants = *fmt.as_constants(), *(act or fmt).as_constants()
    wanted = act is not None, *uses, True
    given = dy, preact, scales, ends, scale, *glu, *constants, *wanted
    results = [*torch.ops.fusible.quantize_glu_backward(*given)]
    both_sides = glu.sides == 2 and (interleave or columns // 2) % 128 == 0
    results[5] = torch.empty(-(-columns // 128) >> both_sides, ROWS)
    for t in results:
        t.flatten().view(torch.uint8).fill_(0xA5)
    quantize = QuantizeSpec(fmt, "bf16", True, False, *uses, k_major=True)
    stripe = interleave if interleave < 8 else 0
    options = scales is not None, stripe, True, both_sides, act, quantized
    spec = GluBackwardSpec(quantize, glu.activation, *options)
    inside = ends.clamp(max=ROWS).tolist()
    preact = (preact, scale) if quantized else preact
    simt.quantize_glu_backward(monkeypatch, dy, preact, scales, inside, glu, results, spec)
    return results


def test_values_between_two_launches_are_bf16(monkeypatch):
    """Of a quantized pre-activation too, where the first finds the scales of groups."""
    launched = {}
    for module in (glu_backward, k_major, vectors):
        monkeypatch.setattr(module, "launch", lambda path, *given: launched.update({path: given}))
    dy, preact, scales, ends = operands(256, ENDS["ragged"])
    data, scale = stored(preact)
    inputs = glu_backward.GluBackwardInputs(dy, data, scales, ends, scale)
    uses = False, True, True, False
    options = glu_backward.GluBackwardOptions(Glu(), *[FORMATS["groups"]] * 2, *uses)
    glu_backward.launch_glu_backward(inputs, options)
    values = launched["quantize.glu_backward.quantize"][2 + 12]
    assert (values.dtype, values.shape) == (torch.bfloat16, preact.shape)
    assert launched["quantize.k_major.quantize"][2] is values


# --- the activation -------------------------------------------------------------------------------


@each_ends
@each_format
@pytest.mark.parametrize("glu", [Glu("swiglu", 8), Glu("srelu")], ids=["swiglu", "srelu"])
def test_the_activation_is_the_forward_then_the_quantization(ends, fmt, glu):
    dy, preact, scales, given = operands(144, ends, sides=glu.sides)
    gradients = {"rowwise": True, "columnwise": False}
    made = quantize_glu_backward(
        dy, preact, scales, given, glu, FORMATS["e5m2"], **gradients, act_format=fmt
    )
    act = glu.forward(preact, scales)
    want = quantize_k_major(act, fmt, rowwise=False, columnwise=True, ends=given).column
    ref.assert_same_bits(made.activation, want)
    alone = quantize_glu_backward(dy, preact, scales, given, glu, FORMATS["e5m2"], **gradients)
    assert alone.activation is None
    ref.assert_same_bits(made.operands.row[:2], alone.operands.row[:2])


@each_ends
@pytest.mark.parametrize("uses", [(True, True), (False, False)], ids=["both", "none"])
@pytest.mark.parametrize(
    ("glu", "features"),
    [
        (Glu("swiglu"), 384),
        (Glu("swiglu", 128), 512),
        (Glu("reglu", 256), 512),
        (Glu("srelu"), 72),
        (Glu("silu"), 136),
    ],
    ids=lambda value: "-".join(map(str, value[:2])) if isinstance(value, Glu) else str(value),
)
def test_the_kernels_code_writes_the_activation(ends, uses, glu, features, monkeypatch):
    assert_activation_as_defined(monkeypatch, ends, features, glu, uses)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_code_writes_every_activation_without_scales(activation, monkeypatch):
    options = (1.5, 1.702, 1.0)[: len(ACTIVATIONS[activation].options)]
    glu = Glu(activation, 0, *options)
    assert_activation_as_defined(monkeypatch, ENDS["ragged"], 128, glu, (True, True), False)


def assert_activation_as_defined(monkeypatch, ends, features, glu, uses, scaled=True):
    dy, preact, scales, given = operands(features, ends, sides=glu.sides)
    scales = scales if scaled else None
    assert writes_activation(glu, preact.shape[1], fp8_block())
    which = (dy, preact, scales, given), glu, fp8_block(E5M2), uses
    results = made_by_the_kernels_code(monkeypatch, *which, fp8_block())
    ref.assert_same_bits(results[:7], made_by_the_kernels_code(monkeypatch, *which)[:7])
    live = min(ends[-1], ROWS)
    act, near = kernels_forward(monkeypatch, preact, scales, glu), glu.forward(preact, scales)
    torch.testing.assert_close(act[:live], near[:live], rtol=2**-7, atol=2e-5)
    assert (act[:live] == near[:live]).float().mean() > 0.98 or live == 0  # another exponential
    want = quantize_k_major(act, fp8_block(), rowwise=False, columnwise=True, ends=given).column
    end = int(want.ends[-1])
    ref.assert_same_bits(results[7].t()[:end], want.data[:end])
    ref.assert_same_bits(results[8][: end // 128], want.scale[: end // 128])


def kernels_forward(monkeypatch, preact, scales, glu):
    """``glu.forward(preact, scales)``, with the kernels' functions."""
    from fusible.kernels.device.activations import evaluate

    halves = [preact.float()]
    if glu.sides == 2:
        halves = split_glu(preact.float(), glu.interleave or None)
    with monkeypatch.context() as patch:
        simt.emulate_activations(patch)
        constants = [simt.f32(option) for option in glu[2:]]
        value, _ = evaluate(glu.activation, [half.numpy() for half in halves], constants)
    value = torch.from_numpy(value)
    return (value if scales is None else value * scales[:, None]).bfloat16()


@pytest.mark.parametrize("which", ["dy", "scales"])
def test_operands_of_other_sizes_are_refused(which):
    dy, preact, scales, ends = operands(80, [130, 600])
    given = {"dy": dy, "preact": preact, "scales": scales, which: torch.ones(3, 80)}
    with pytest.raises(ValueError, match=r"dy must be \(600, 80\) and scales \(600,\)"):
        quantize_glu_backward(
            **given, ends=ends, glu=Glu(), fmt=fp8_block(), rowwise=True, columnwise=True
        )
