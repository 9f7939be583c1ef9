"""What a plan for Hopper accepts, its kernels take: operands that lie as callers may have them.

The kernels' launches run on the CPU, from the addresses and pitches that they are given.
"""

from contextlib import nullcontext

import pytest
import reference as ref
import torch
from sm90_launches import sm90_on_cpu

import fusible as fz
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.sm90 import checked_products
from fusible.kernels.sm90.operands import layout
from fusible.recipes import product as recipes_product
from fusible.testing import assume_target

GROUPS, HIDDEN, INNER, ROWS = 4, 16, 8, 12
SIZES = (3, 0, 5, 1)


def test_the_step_of_one_matrix_is_any():
    assert layout((1, 16, 16), (259, 16, 1)).group_pitch == 16 * 16
    assert layout((1, 16, 32), (3, 1, 24)).group_pitch == 24 * 32


def spread(t, before, after):
    """With ``before`` and ``after`` more elements beside each row."""
    wide = t.new_empty(*t.shape[:-1], before + t.shape[-1] + after)
    return wide[..., before : before + t.shape[-1]]


def apart(t, gap):
    """With ``gap`` elements from matrix to matrix, or row to row."""
    steps = torch.empty_like(t).stride()
    room = t.new_empty(t.shape[0] * (steps[0] + gap))
    return room.as_strided(t.shape, (steps[0] + gap, *steps[1:]))


LAYOUTS = {
    "a pitch": lambda t: spread(t, 8, 8),
    "an odd pitch": lambda t: spread(t, 0, 3),
    "not on 16 bytes": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape),
    "turned": lambda t: torch.empty_like(t.mT.contiguous()).mT if t.dim() > 1 else t[:],
    "apart": lambda t: apart(t, 8),
    "oddly apart": lambda t: apart(t, 3),
    "every other": lambda t: t.repeat_interleave(2, dim=0)[::2],
}
OPERANDS = ("x", "dy", "scales", "weight", "weight1", "bias", "main_grad", "main_grad1")


def laid_out(t, layout):
    """A leaf with the same values."""
    other = LAYOUTS[layout](t.detach())
    other.detach().copy_(t.detach())
    return other.requires_grad_(t.requires_grad)


def build(operand, layout):
    """Of which one operand, or all weights, biases or main grads, or those of one expert."""
    torch.manual_seed(0)
    single = not operand.endswith("1")
    options = {"dtype": torch.bfloat16, "single_grouped_weight": single}
    options |= {"single_grouped_bias": single, "accumulate_into_main_grad": "main" in operand}
    mlp = fz.Sequential(
        fz.GroupedLinear(GROUPS, HIDDEN, 2 * INNER, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(GROUPS, INNER, HIDDEN, scale_bias=True, **options),
    )
    for fc in (mlp[0], mlp[2]):
        for name, p in list(fc.named_parameters()):
            torch.nn.init.normal_(p)
            if layout and name == operand:
                setattr(fc, name, torch.nn.Parameter(laid_out(p, layout)))
        for i, w in enumerate(fc.weights()):
            w.main_grad = torch.zeros(w.shape)
            if layout and operand in ("main_grad", f"main_grad{i}"):
                w.main_grad = laid_out(w.main_grad, layout)
    return mlp


def outcome(operand, layout, parts):
    """Output and gradients, those of the weights where they are."""
    mlp = build(operand, layout)
    x = torch.randn(ROWS, HIDDEN).bfloat16().requires_grad_()
    dy, scales = torch.randn(ROWS, HIDDEN).bfloat16(), torch.rand(ROWS).requires_grad_()
    given = {"x": x, "dy": dy, "scales": scales}
    if layout and operand in given:
        given[operand] = laid_out(given[operand], layout)
    x, dy, scales = given.values()
    sizes = torch.tensor(SIZES)
    with assume_target("sm90"):
        y = mlp(x, sizes, scales, sizes.clone() if parts else sizes, scales)
        assert all("sm90" in name for name in mlp.plan.fired + mlp.plan.kernels)
        y.backward(dy)
    ours = [p.main_grad if p.grad is None else p.grad for p in mlp.parameters()]
    return [y.detach(), x.grad, scales.grad, *ours]


@pytest.mark.parametrize("parts", [False, True], ids=["mlp", "parts"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_the_same_in_any_layout(operand, layout, parts):
    with sm90_on_cpu() as loaded:
        got = outcome(operand, layout, parts)
    assert {spec.kind for spec in loaded} >= {"store", "glu", "wgrad"}
    for mine, theirs in zip(got, outcome(operand, None, parts), strict=True):
        # FC1, the activation and FC2 forward; FC2, the activation and FC1 backward.
        ref.assert_equal_but_for_rounding(mine, theirs, roundings=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("gap", [0, 4, 8])
def test_main_grads_in_one_buffer(gap):
    """Slices of a flat buffer, evenly spaced by what may be no multiple of 32 bytes."""
    results = []
    for kernels in (sm90_on_cpu, nullcontext):
        mlp = build("main_grad1", None)
        for fc in (mlp[0], mlp[2]):
            size = fc.weights()[0].numel()
            flat = torch.zeros(GROUPS, size + gap)
            for w, part in zip(fc.weights(), flat, strict=True):
                w.main_grad = part[:size].view(w.shape)
        torch.manual_seed(1)
        x, sizes, scales = (
            torch.randn(ROWS, HIDDEN).bfloat16(),
            torch.tensor(SIZES),
            torch.rand(ROWS),
        )
        with assume_target("sm90"), kernels():
            mlp(x, sizes, scales, sizes, scales).sum().backward()
        results.append([w.main_grad for fc in (mlp[0], mlp[2]) for w in fc.weights()])
    for mine, theirs in zip(*results, strict=True):
        ref.assert_equal_but_for_rounding(mine, theirs, roundings=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_anywhere(rows):
    """A single row is contiguous wherever it starts."""
    torch.manual_seed(0)
    x = torch.randn(rows * HIDDEN + 1).bfloat16()[1:].view(rows, HIDDEN)
    sizes, scales = torch.tensor([0, rows, 0, 0]), torch.rand(rows)
    results = []
    for kernels, given in ((sm90_on_cpu, x), (nullcontext, x.clone())):
        with assume_target("sm90"), kernels():
            results.append(build("x", None)(given, sizes, scales, sizes, scales))
    ref.assert_equal_but_for_rounding(*results, roundings=3)


# --- operands of the ops themselves ---------------------------------------------------------------


def good():
    """Arguments that the entries take."""
    torch.manual_seed(0)
    x, preact = torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(ROWS, 2 * INNER).bfloat16()
    w1 = torch.randn(GROUPS, 2 * INNER, HIDDEN).bfloat16()
    w2 = torch.randn(GROUPS, HIDDEN, INNER).bfloat16()
    bias, dw = torch.randn(GROUPS, 2 * INNER).bfloat16(), torch.zeros(w1.shape)
    rows = {"x": x, "w": [w1], "ends": torch.tensor(SIZES).cumsum(0).int()}
    scales, ends = torch.rand(ROWS), rows["ends"]
    of_grads = {"dy": x, "w": [w2], "ends": ends, "preact": preact, "scales": scales}
    return {
        "grouped_mm": {**rows, "bias": bias, "row_scale": scales, "out": preact.clone()},
        "grouped_glu": {**rows, "scales": scales, "glu": Glu(interleave=8), "bias": bias},
        "grouped_dglu": {**of_grads, "glu": Glu("clamped_qgeglu", 1, 7.0, 1.702, 1.0)},
        "grouped_wgrad_": {"out": [dw], "dy": preact, "x": x, "ends": ends, "accumulate": True},
    }


def layouts_of(value):
    """Of a tensor or of weights, one of which has a layout of its own where they are separate."""
    for name in LAYOUTS:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, lambda t, name=name: laid_out(t, name)
        elif isinstance(value, list):
            yield name, lambda w, name=name: [laid_out(w[0], name)]
            yield (
                f"one {name}",
                lambda w, name=name: [
                    laid_out(t, name) if i == 1 else t.clone() for i, t in enumerate(w[0])
                ],
            )


def test_an_activation_without_scales():
    given = good()["grouped_glu"] | {"scales": None}
    want = grouped.grouped_glu(**given)
    with sm90_on_cpu() as loaded:
        got = grouped.grouped_glu(**given)
    assert [spec.row_scale for spec in loaded] == [""]
    ref.assert_equal(got, want)


CASES = [
    pytest.param(entry, argument, change, id=f"{entry}-{argument}-{name}")
    for entry, arguments in good().items()
    for argument, value in arguments.items()
    for name, change in layouts_of(value)
]


@pytest.mark.parametrize(("entry", "argument", "change"), CASES)
def test_an_operand_in_any_layout(entry, argument, change):
    """Or what is written to."""
    want, given = good()[entry], good()[entry]
    given[argument] = change(given[argument])

    def results(arguments):
        made = getattr(grouped, entry)(**arguments)
        made = arguments["out"] if made is None else made
        made = made if isinstance(made, list | tuple) else [made]
        return [torch.stack([*made])] if made[0].dim() == 2 and len(made) == GROUPS else made

    with sm90_on_cpu():
        got = results(given)
    for mine, theirs in zip(got, results(want), strict=True):
        ref.assert_equal_but_for_rounding(mine, theirs, roundings=3, dtype=torch.bfloat16)


UNSUPPORTED = None  # other kernels run it, or the definition
MATRIX = {
    "a device": (lambda t: t.to("meta"), "must|got meta"),
    "a dtype": (lambda t: t.float(), "must have|must be a|must share dtype"),
    "a row less": (lambda t: t[:-1], "rows|shape"),
    "odd columns": (lambda t: t[:, :-3].contiguous(), "multiples of 8|shape|share the reduced"),
    "three dimensions": (lambda t: t[None], "2 dimensions|shape"),
}
VECTOR = {
    "a dtype": (lambda t: t.to(torch.int16), "must be a"),
    "a value less": (lambda t: t[:-1], "one value for each"),
}
WEIGHTS = {
    "none": (lambda w: [], "at least one group"),
    "a dtype": (lambda w: [w[0].half()], "must"),
    "a group less": (lambda w: [w[0][1:]], "one value for each"),
    "other features": (lambda w: [torch.cat((w[0], w[0]), 2)], "share the reduced|of shape"),
    "odd features": (lambda w: [w[0][:, :-3]], UNSUPPORTED),
    "uneven": (lambda w: [w[0][0], *w[0][1:, :-8]], "must share shape and dtype"),
    "vectors": (lambda w: list(w[0][:, 0]), "1 dimensions"),
}
ROLES = {
    **dict.fromkeys(("x", "dy", "preact"), MATRIX),
    **dict.fromkeys(("row_scale", "scales", "ends"), VECTOR),
    "w": WEIGHTS,
    "out": {
        **{what: case for what, case in WEIGHTS.items() if what not in ("none", "a dtype")},
        "odd features": (WEIGHTS["odd features"][0], "of shape"),
    },
    "bias": {
        "a dtype": (lambda t: t.float(), "bias must be a"),
        "a column less": (lambda t: t[:, 1:], "bias must be a"),
    },
    "glu": {
        "another": (lambda _: Glu("another"), UNSUPPORTED),
        "not gated": (lambda _: Glu("gelu", interleave=8), UNSUPPORTED),
        "no power of two": (lambda _: Glu(interleave=3), UNSUPPORTED),
        "too wide": (lambda _: Glu(interleave=16), UNSUPPORTED),
    },
}
# Of what the kernels have no product: other kernels or the definition, which say what is wrong.
OTHERS = {
    *[(entry, name, "a dtype") for entry in good() for name in ("x", "dy")],
    *[("grouped_wgrad_", name, what) for name in ("x", "dy")
      for what in ("odd columns", "three dimensions")],
} - {("grouped_wgrad_", "dy", "a dtype")}  # fmt: skip
BAD = [
    pytest.param(
        entry,
        argument,
        case[0],
        UNSUPPORTED if (entry, argument, what) in OTHERS else case[1],
        id=f"{entry}-{argument}-{what}",
    )
    for entry, arguments in good().items()
    for argument, value in arguments.items()
    if argument in ROLES
    for what, case in (
        MATRIX if argument == "out" and isinstance(value, torch.Tensor) else ROLES[argument]
    ).items()
]


@pytest.mark.parametrize(("entry", "argument", "change", "said"), BAD)
def test_what_the_entries_refuse(entry, argument, change, said):
    """Each argument alone, before anything starts."""
    arguments = good()[entry]
    call = getattr(checked_products, entry)
    with sm90_on_cpu() as loaded:
        call(**arguments)
        loaded.clear()
        arguments[argument] = change(arguments[argument])
        if said is UNSUPPORTED:
            assert call(**arguments) is NotImplemented
        else:
            with pytest.raises(ValueError, match=said):
                call(**arguments)
        assert loaded == []


@pytest.mark.parametrize("one", [False, True], ids=["one by one", "one"])
def test_a_quantized_weight_is_read_by_its_values(one):
    """The kernels read addresses, which a wrapper of other tensors does not have."""
    torch.manual_seed(0)
    quantizer = fz.recipes.Quantizer(fz.recipes.MXFP8BlockScaling().format("weight"))
    values = torch.randn(2, 32, 64).bfloat16()
    w = [quantizer(values)] if one else [quantizer(values[0]), values[1]]
    x, ends = torch.randn(6, 64).bfloat16(), torch.tensor([2, 6], dtype=torch.int32)
    want = grouped.grouped_mm(x, [recipes_product.values(t) for t in w], ends)
    with torch.no_grad(), sm90_on_cpu() as loaded:
        assert checked_products.grouped_mm(x, w, ends) is NotImplemented
        torch.testing.assert_close(grouped.grouped_mm(x, w, ends), want)
    assert not loaded
