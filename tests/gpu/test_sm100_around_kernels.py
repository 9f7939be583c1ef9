"""What the SM100 fused ops do around their kernels, on any CUDA GPU: those are emulated."""

import pytest
import reference as ref
import torch
from checks import graph_of, never_waiting
from number_formats import NV
from sm100_operands import largest_of_groups
from torch import Tensor

import fusible as fz
from fusible import recipes
from fusible.kernels.sm100 import padding, products, quantizer
from fusible.kernels.sm100.quantizer import QuantizeOptions, quantize_packed
from fusible.recipes.formats import mxfp8, nvfp4
from fusible.recipes.quantize_ops import quantize_matrix
from fusible.testing import assume_target, emulator_sm100

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SIZES = (300, 0, 20, 256, 1)
FORMATS = {"mxfp8": mxfp8(), "nvfp4": nvfp4()}
ROWS, HIDDEN, INNER = 600, 192, 128


class OnHost:
    """The emulator on copies in host memory; results go back to the device, and to buffers."""

    def __getattr__(self, name):
        function = getattr(emulator_sm100, name)

        def call(**arguments):
            given = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
            out = function(**given)
            for key, value in arguments.items():
                if key in ("d_tensor", "dprob_tensor", "wgrad_tensor"):
                    value.copy_(given[key])
            return {k: None if v is None else v.cuda() for k, v in out.items()}

        return call


def packed(device, fmt, x):
    ends = torch.tensor(SIZES, device=device).cumsum(0).int()
    x = x.to(device)
    padded = padding.pad_groups(ends, ROWS, aligned=False)
    row, column = quantize_matrix(x, fmt, rowwise=True, columnwise=True, ends=ends)
    made = (*padding.packed_rows(row, padded), *padding.packed_columns(column, padded))
    return [t.view(torch.uint8).cpu() for t in (*made, padded.ends, padded.rows)]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_packed_bytes_are_those_of_the_host(fmt):
    x = torch.randn(ROWS, HIDDEN, dtype=BF16)
    ref.assert_equal(packed("cuda", fmt, x), packed("cpu", fmt, x))


ROWS_OF_GROUPS = {
    "ragged": (SIZES, ROWS),
    "whole tiles": ((256, 0, 512, 256), 1280),
    "one group": ((31,), 31),
    "many": ((1, 0, 2, 255, 0, 257, 33) * 20, 11_000),
    "all empty": ((0, 0), 40),
}


def of_groups(splits, columns, device, special=True):
    """Values of many magnitudes, end rows and padded; NaN past the groups."""
    sizes, rows = ROWS_OF_GROUPS[splits]
    torch.manual_seed(0)
    x = torch.randn(rows, columns, dtype=BF16) * torch.randn(rows, 1).exp().to(BF16)
    if special and rows > 700:
        x[300, 5], x[520, 6], x[3] = float("nan"), float("inf"), 0
    x[sum(sizes) :] = float("nan")
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    padded = padding.pad_groups(ends, rows, splits == "whole tiles")
    return x.to(device), ends, padded


def poison(device):
    """Memory that was used before must not show."""
    torch.full((1 << 26,), 255, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", ROWS_OF_GROUPS)
@pytest.mark.parametrize("columns", [64, 192, 1088, 2048])
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
def test_the_kernel_that_does_it_all_gives_the_same_bytes(fmt, splits, columns, uses):
    check_bytes(FORMATS[fmt], splits, columns, uses)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("splits", ROWS_OF_GROUPS)
@pytest.mark.parametrize("special", [True, False])
def test_largest_magnitudes_that_a_kernel_gave(splits, special, parts, monkeypatch):
    """The bytes of the host; where there is no NaN, also those of the pass that is saved."""
    check_bytes(FORMATS["nvfp4"], splits, 1088, (True, True), special, parts)
    x, *rest = of_groups(splits, 1088, "cuda", special=False)
    rest = FORMATS["nvfp4"], *rest
    own = quantize_packed(x, *rest, QuantizeOptions(True, True))
    monkeypatch.setattr(quantizer, "amax_bits", None)
    given = quantize_packed(x, *rest, QuantizeOptions(True, True, amax=given_of(x, splits, parts)))
    ref.assert_same_bits(own, given)
    with pytest.raises(TypeError):
        quantize_packed(x, *rest, QuantizeOptions(True, True))


def given_of(x, splits, parts):
    """Largest magnitudes of what would be rounded to ``x``."""
    return largest_of_groups(x.float() * (1 + 2**-10), ROWS_OF_GROUPS[splits][0], parts)


def check_bytes(fmt, splits, columns, uses, special=True, parts=0):
    """Compare what both devices make, with largest magnitudes of ``parts`` if there are any."""
    made = []
    for device in ("cpu", "cuda"):
        x, ends, padded = of_groups(splits, columns, device, special)
        amax = given_of(x, splits, parts) if parts else None
        poison(device)
        pieces = quantize_packed(x, fmt, ends, padded, QuantizeOptions(*uses, amax=amax))
        made.append([piece.cpu() for piece in pieces])
    mine, theirs = (list(pieces[:4]) for pieces in made)
    assert torch.equal(made[0][4].isnan(), made[1][4].isnan())
    assert torch.equal(made[0][4].nan_to_num(), made[1][4].nan_to_num())
    if uses[1]:
        # Padding under a scale that is NaN has the value NaN, whatever its element.
        sizes = ROWS_OF_GROUPS[splits][0]
        for elements in (mine, theirs):
            elements[2] = without_padding(elements[2], fmt, sizes, padded.ends.tolist())
    ref.assert_same_bits(mine, theirs)


def without_padding(data, fmt, sizes, ends):
    """Column-wise elements of the rows that exist, group by group."""
    flat, kept = data.view(torch.uint8).flatten(), []
    columns = data.shape[0]
    for size, start, end in zip(sizes, [0, *ends], ends, strict=False):
        if fmt.element.per_byte == 1:
            kept.append(data.view(torch.uint8)[start : start + size].flatten())
        else:
            region = flat[columns * start // 2 : columns * end // 2].view(columns, -1)
            values = torch.stack((region & 15, region >> 4), -1).flatten(1)
            kept.append(values[:, :size].flatten())
    return torch.cat(kept)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", ROWS_OF_GROUPS)
@pytest.mark.parametrize("columns", [64, 1088])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_sums_of_the_rows_on_the_way(fmt, splits, columns, scaled, dtype):
    x, ends, padded = of_groups(splits, columns, "cuda", special=False)
    scale = torch.rand(len(x), device="cuda", dtype=BF16) if scaled else None
    options = QuantizeOptions(True, True, sums=dtype, row_scale=scale)
    poison("cuda")
    first = quantize_packed(x, FORMATS[fmt], ends, padded, options)
    plain = quantize_packed(x, FORMATS[fmt], ends, padded, QuantizeOptions(True, True))
    ref.assert_same_bits(first[:5], plain[:5])
    again = quantize_packed(x, FORMATS[fmt], ends, padded, options)
    sums = first[5]
    assert torch.equal(sums, again[5])
    assert sums.dtype == dtype
    sizes = ROWS_OF_GROUPS[splits][0]
    values = x[: sum(sizes)].double()
    if scaled:
        values = values * scale[: sum(sizes), None].double()
    for mine, rows in zip(sums.double(), values.split(list(sizes)), strict=True):
        error = (mine - rows.sum(0)).abs()
        eps = 2**-8 if dtype == BF16 else 2**-20
        assert (error <= eps * rows.sum(0).abs() + 2**-20 * rows.abs().sum(0)).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(3, 128, 64), (2, 384, 1088), (256, 128)])
def test_weights_in_one_pass_are_those_of_the_host(fmt, shape):
    w = torch.randn(shape, dtype=BF16)
    mine, theirs = (
        products.quantize_packed_weights(w.to(d), FORMATS[fmt], True) for d in ("cuda", "cpu")
    )
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        for x, y in ((a.data, b.data), (a.scale, b.scale)):
            assert torch.equal(x.view(torch.uint8).cpu(), y.view(torch.uint8))
        assert b.tensor_scale is None or torch.equal(a.tensor_scale.cpu(), b.tensor_scale)


def test_packing_waits_for_nothing_and_is_captured():
    x = torch.randn(ROWS, HIDDEN, dtype=BF16, device="cuda")
    sizes = torch.tensor(SIZES, device="cuda")
    everything = QuantizeOptions(True, True, sums=BF16)
    amax = torch.full((len(SIZES), 2), 6.0, device="cuda")

    def work():
        ends = sizes.cumsum(0).int()
        padded = padding.pad_groups(ends, ROWS, aligned=False)
        row, column = quantize_matrix(x, mxfp8(), rowwise=True, columnwise=True, ends=ends)
        return (
            *padding.packed_rows(row, padded),
            *padding.packed_columns(column, padded),
            *quantize_packed(x, mxfp8(), ends, padded, everything),
            *quantize_packed(x, nvfp4(), ends, padded, everything),
            *quantize_packed(x, nvfp4(), ends, padded, everything._replace(amax=amax)),
        )

    work()
    with never_waiting():
        work()
    graph, captured = graph_of(work)
    for new in (SIZES, (0, 599, 0, 0, 1), (0, 0, 0, 0, 0)):
        sizes.copy_(torch.tensor(new))
        graph.replay()
        ref.assert_same_bits(captured, work())


RECIPES = [None, recipes.MXFP8BlockScaling(), NV]


@pytest.mark.parametrize("recipe", RECIPES, ids=["bf16", "mxfp8", "nvfp4"])
def test_the_fused_op_gives_on_cuda_what_it_gives_on_the_host(recipe):
    options = {"single_grouped_weight": True, "single_grouped_bias": True, "dtype": BF16}
    module = fz.Sequential(
        fz.GroupedLinear(5, HIDDEN, 2 * INNER, **options),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(5, INNER, 64, **options),
    )
    results = []
    torch.manual_seed(0)
    x, scales, dy = torch.randn(ROWS, HIDDEN), torch.rand(ROWS), torch.randn(ROWS, 64)
    for device, kernels in (("cpu", emulator_sm100), ("cuda", OnHost())):
        module.to(device)
        splits = torch.tensor(SIZES, device=device)
        leaves = [x.to(device, BF16).requires_grad_(), scales.to(device).requires_grad_()]
        with assume_target("sm100", kernels), fz.autocast(enabled=bool(recipe), recipe=recipe):
            y = module(leaves[0], splits, leaves[1], splits)
            grads = torch.autograd.grad(y, [*leaves, *module.parameters()], dy.to(device, BF16))
        assert module.plan.fired == ("grouped_mlp_sm100",)
        results.append([t.detach().cpu() for t in (y, *grads)])
    for mine, theirs in zip(*results, strict=True):
        ref.assert_accurate(mine, theirs.double(), roundings=1)
