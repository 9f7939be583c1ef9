"""What a plan for Hopper accepts, its kernels take: operands that lie as callers may have them.

The kernels' entries check what they are given, as on a GPU; the reference computes.
"""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import reference as ref
import torch

import fusible as fz
from fusible.kernels import reference, sm90
from fusible.kernels.sm90 import ops
from fusible.testing import assume_target

GROUPS, HIDDEN, INNER, ROWS = 4, 16, 8, 12
SIZES = (3, 0, 5, 1)
ENTRIES = {
    **{name: getattr(sm90, name) for name in ("grouped_gemm", "grouped_gemm_glu")},
    **{name: getattr(sm90, name) for name in ("grouped_gemm_dglu", "grouped_wgrad")},
    "grouped_wgrad_": ops.grouped_wgrad_,  # not through PyTorch's dispatcher
}


@pytest.fixture
def strict(monkeypatch):
    """The reference's functions behind the checks of the entries, which start nothing."""
    for name in ("_multiply", "launch_tile_sums"):
        monkeypatch.setattr(ops, name, lambda *_, **__: None)
    monkeypatch.setattr(ops, "launch_of", lambda *_, **__: lambda *_, **__: None)
    monkeypatch.setattr(ops, "pointer_table", lambda *_: torch.empty(0))

    def checked(name, entry):
        def call(*args, **options):
            with patch.object(torch.Tensor, "is_cuda", True), torch.no_grad():
                entry(*args, **options)
            return getattr(reference, name)(*args, **options)

        return call

    functions = {name: checked(name, entry) for name, entry in ENTRIES.items()}
    of_layouts = {name: getattr(sm90, name) for name in ("has_matrix_layout", "takes_wgrad")}
    return SimpleNamespace(**{**vars(reference), **functions, **of_layouts})


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


def outcome(kernels, operand, layout, parts):
    """Output and gradients, those of the weights where they are."""
    mlp = build(operand, layout)
    x = torch.randn(ROWS, HIDDEN).bfloat16().requires_grad_()
    dy, scales = torch.randn(ROWS, HIDDEN).bfloat16(), torch.rand(ROWS).requires_grad_()
    given = {"x": x, "dy": dy, "scales": scales}
    if layout and operand in given:
        given[operand] = laid_out(given[operand], layout)
    x, dy, scales = given.values()
    sizes = torch.tensor(SIZES)
    with assume_target("sm90", kernels):
        y = mlp(x, sizes, scales, sizes.clone() if parts else sizes, scales)
        assert all("sm90" in name for name in mlp.plan.fired)
        y.backward(dy)
    ours = [p.main_grad if p.grad is None else p.grad for p in mlp.parameters()]
    return [y.detach(), x.grad, scales.grad, *ours]


@pytest.mark.parametrize("parts", [False, True], ids=["mlp", "parts"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_the_same_in_any_layout(strict, operand, layout, parts):
    got = outcome(strict, operand, layout, parts)
    for mine, theirs in zip(got, outcome(reference, operand, None, parts), strict=True):
        # FC1, the activation and FC2 forward; FC2, the activation and FC1 backward.
        ref.assert_equal_but_for_rounding(mine, theirs, roundings=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("gap", [0, 4, 8])
def test_main_grads_in_one_buffer(strict, gap):
    """Slices of a flat buffer, evenly spaced by what may be no multiple of 32 bytes."""
    results = []
    for kernels in (strict, reference):
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
        with assume_target("sm90", kernels):
            mlp(x, sizes, scales, sizes, scales).sum().backward()
        results.append([w.main_grad for fc in (mlp[0], mlp[2]) for w in fc.weights()])
    for mine, theirs in zip(*results, strict=True):
        ref.assert_equal_but_for_rounding(mine, theirs, roundings=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_anywhere(strict, rows):
    """A single row is contiguous wherever it starts."""
    mlp = build("x", None)
    x = torch.randn(rows * HIDDEN + 1).bfloat16()[1:].view(rows, HIDDEN)
    sizes, scales = torch.tensor([0, rows, 0, 0]), torch.rand(rows)
    results = []
    for kernels, given in ((strict, x), (reference, x.clone())):
        with assume_target("sm90", kernels):
            results.append(mlp(given, sizes, scales, sizes, scales))
    ref.assert_equal_but_for_rounding(*results, roundings=3)


# --- what no plan gives them ----------------------------------------------------------------------


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
        "grouped_gemm": {**rows, "bias": bias, "row_scale": scales, "out": preact.clone()},
        "grouped_gemm_glu": {**rows, "scales": scales, "bias": bias, "interleave": 8},
        "grouped_gemm_dglu": {**of_grads, "activation": "clamped_qgeglu", "interleave": 1},
        "grouped_wgrad_": {"out": [dw], "dy": preact, "x": x, "ends": ends, "accumulate": True},
    }


MATRIX = {
    "a device": (lambda t: t.to("meta"), "must|got meta"),
    "a dtype": (lambda t: t.float(), "BF16|bfloat16"),
    "a row less": (lambda t: t[:-1], "rows|shape"),
    "odd columns": (lambda t: t[:, :-3].contiguous(), "multiple of 8|shape|the last dimension"),
    "features first": (LAYOUTS["turned"], "contiguous"),
    "three dimensions": (lambda t: t[None], "2 dimensions|shape"),
}
VECTOR = {
    "a dtype": (lambda t: t.to(torch.int16), "must be a"),
    "a value less": (lambda t: t[:-1], "one value for each"),
    "a stride": (lambda t: t.repeat_interleave(2)[::2], "contiguous"),
}
WEIGHTS = {
    "none": (lambda w: [], "at least one group"),
    "a dtype": (lambda w: [w[0].half()], "must"),
    "a group less": (lambda w: [w[0][1:]], "one value for each"),
    "other features": (lambda w: [torch.cat((w[0], w[0]), 2)], "share the reduced|of shape"),
    "odd features": (lambda w: [w[0][:, :-3]], "multiples of 8"),
    "an odd pitch": (lambda w: [spread(w[0], 0, 3)], "multiples of 8"),
    "oddly apart": (lambda w: [apart(w[0], 3)], "start at a multiple of 16 bytes"),
    "an odd address": (lambda w: [LAYOUTS["not on 16 bytes"](w[0])], "multiple of 16 bytes"),
    "uneven": (lambda w: [w[0][0], *w[0][1:, :-8]], "must share shape, strides and dtype"),
    "vectors": (lambda w: list(w[0][:, 0]), "1 dimensions"),
}
ROLES = {
    **dict.fromkeys(("x", "dy", "preact"), MATRIX),
    **dict.fromkeys(("row_scale", "scales", "ends"), VECTOR),
    **dict.fromkeys(("w", "out"), WEIGHTS),
    "bias": {
        "a dtype": (lambda t: t.float(), "bias must be a contiguous"),
        "a column less": (lambda t: t[:, 1:], "bias must be a contiguous"),
    },
    "activation": {"another": (lambda _: "gelu", "activation must be one of")},
    "interleave": {
        "no power of two": (lambda _: 3, "a power of two that divides"),
        "too wide": (lambda _: 16, "divides the 8 activation columns"),
    },
}
BAD = [
    pytest.param(entry, argument, *case, id=f"{entry}-{argument}-{what}")
    for entry, arguments in good().items()
    for argument, value in arguments.items()
    if argument in ROLES
    for what, case in (
        MATRIX if argument == "out" and isinstance(value, torch.Tensor) else ROLES[argument]
    ).items()
]


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("entry", "argument", "change", "said"), BAD)
def test_what_the_entries_refuse(entry, argument, change, said):
    """Each argument alone, before anything starts."""
    arguments = good()[entry]

    def call():
        with patch.object(torch.Tensor, "is_cuda", True), torch.no_grad():
            ENTRIES[entry](**arguments)

    call()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=said):
        call()
