"""Weight gradients of operands that arrive quantized, if both are transformed by blocks of rows."""

import pytest
import torch

import fusible as fz
from fusible.recipes import NVFP4BlockScaling, group_quantize

RECIPE = NVFP4BlockScaling()
SIZES = torch.tensor([10, 0, 38])
QUANTIZER = fz.NVFP4Quantizer(with_rht=True)
BETWEEN = torch.nn.Identity  # ends a run of ops


def error(op, x, dy, *extra):
    """The relative error of a weight gradient, in norm."""
    linear = next(m for m in op.modules() if isinstance(m, fz.Linear | fz.GroupedLinear))
    with fz.autocast(recipe=RECIPE):
        y = op(x, *extra)
    y.backward(dy)
    values = x.dequantize() if hasattr(x, "dequantize") else x
    rows, grads = values.flatten(0, -2), dy.flatten(0, -2)
    if extra:
        sizes = SIZES.tolist()
        parts = zip(rows.split(sizes), grads.split(sizes), strict=True)
        want = torch.stack([b.T @ a for a, b in parts])
    else:
        want = grads.T @ rows
    return ((linear.weight.grad - want).norm() / want.norm()).item()


@pytest.mark.parametrize(
    "case", ["input in a run before", "gradient of a run after", "tensor", "row-wise tensor"]
)
def test_a_grouped_linear_of_rows_quantized_as_a_whole(case):
    torch.manual_seed(0)
    x, dy = torch.randn(48, 64), torch.randn(48, 32)
    op = fz.GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=True)
    if case == "input in a run before":
        op = fz.Sequential(fz.Quantize(), BETWEEN(), op)
    elif case == "gradient of a run after":
        op = fz.Sequential(op, BETWEEN(), fz.Quantize(False, True))
    else:
        x = fz.NVFP4Quantizer(with_rht=True, columnwise=case == "tensor")(x)
    assert error(op, x, dy, SIZES) < 0.3


@pytest.mark.parametrize("uses", [{}, {"columnwise": False}, {"rowwise": False}])
@pytest.mark.parametrize("rows", [8, 24, 32])
def test_a_linear_of_matrices(uses, rows):
    torch.manual_seed(0)
    x, dy = torch.randn(3, rows, 64), torch.randn(3, rows, 32)
    linear = fz.Linear(64, 32, bias=False)
    assert error(linear, fz.NVFP4Quantizer(with_rht=True, **uses)(x), dy) < 0.3


@pytest.mark.parametrize("rows", [8, 24, 32])
@pytest.mark.parametrize("quantizer", [fz.NVFP4Quantizer(), fz.MXFP8Quantizer()])
def test_a_linear_of_matrices_in_another_format(quantizer, rows):
    torch.manual_seed(0)
    x, dy = torch.randn(3, rows, 64), torch.randn(3, rows, 32)
    assert error(fz.Linear(64, 32, bias=False), quantizer(x), dy) < 0.3
    linear, values = fz.Linear(64, 32, bias=False), x.clone()
    with fz.autocast(recipe=RECIPE):
        y = linear(values)
    y.backward(quantizer(dy))
    want = quantizer(dy).dequantize().flatten(0, 1).T @ values.flatten(0, 1)
    assert (linear.weight.grad - want).norm() < 0.3 * want.norm()


def test_a_linear_of_groups():
    torch.manual_seed(0)
    x = group_quantize(torch.randn(48, 64), QUANTIZER, 3, SIZES)
    assert error(fz.Linear(64, 32, bias=False), x, torch.randn(48, 32)) < 0.3


def test_other_groups_are_refused():
    x = group_quantize(torch.randn(48, 64), QUANTIZER, 3, torch.tensor([20, 20, 8]))
    op = fz.GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=True)
    with pytest.raises(ValueError, match="groups of a quantized operand must be those of"):
        error(op, x, torch.randn(48, 32), SIZES)
