"""The grouped products in Triton against their definitions: run by `test_portable_products.py`."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from fusible.kernels.grouped import definitions, portable

SIZES = (5, 0, 70, 1, 64, 20)
TAIL = 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _wide(operand):
    """BF16, which the interpreter keeps as the bits that it then multiplies, in FP32."""
    if operand.dtype != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch):
    dot = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: dot(self, _wide(a), _wide(b), *rest),
    )


def operands(dtype, columns=72, depth=40):
    torch.manual_seed(0)
    rows = sum(SIZES) + TAIL
    x, dy = torch.randn(rows, depth).to(dtype), torch.randn(rows, columns).to(dtype)
    x[sum(SIZES) :], dy[sum(SIZES) :] = torch.nan, torch.nan
    w = (torch.randn(len(SIZES), columns, depth) / depth**0.5).to(dtype)
    return x, dy, w, torch.tensor(SIZES).cumsum(0).int()


def assert_near(got, want, dtype):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose", [False, True])
def test_products_of_rows(dtype, transpose):
    x, dy, w, ends = operands(dtype)
    rows = dy if transpose else x
    got = portable.grouped_mm(rows, [w], ends, transpose_w=transpose)
    assert_near(got, definitions.grouped_mm(rows, [w], ends, transpose_w=transpose), dtype)
    assert (got[sum(SIZES) :] == 0).all()
    separate = portable.grouped_mm(rows, list(w.unbind(0)), ends, transpose_w=transpose)
    assert torch.equal(separate, got)


@pytest.mark.parametrize("scaled", [False, True])
def test_biases_and_any_strides(scaled):
    x, _, w, ends = operands(torch.float32)
    bias, scale = torch.randn(len(SIZES), w.shape[1]), torch.rand(x.shape[0])
    given = (bias, scale if scaled else None)
    want = definitions.grouped_mm(x, [w], ends, *given)
    out = torch.full((w.shape[1], x.shape[0]), torch.nan).t()
    pitched = torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]
    assert portable.grouped_mm(pitched, [w.mT.contiguous().mT], ends, *given, out=out) is out
    assert_near(out, want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradients(dtype):
    x, dy, _, ends = operands(dtype)
    got = portable.grouped_wgrad(dy, x, ends)
    assert_near(got, definitions.grouped_wgrad(dy, x, ends), dtype)
    assert (got[1] == 0).all()
    for wide in (torch.float32, torch.float64):
        want = definitions.grouped_wgrad(dy.float(), x.float(), ends, wide)
        assert_near(portable.grouped_wgrad(dy, x, ends, wide), want, torch.float32)
    start = torch.randn(len(SIZES), dy.shape[1], x.shape[1])
    outs = [one.clone() for one in start.unbind(0)]
    assert (
        definitions.grouped_wgrad_(outs, dy, x, ends, True, product=portable.grouped_wgrad) is None
    )
    want = start + definitions.grouped_wgrad(dy.float(), x.float(), ends)
    assert_near(torch.stack(outs), want, torch.float32)


def test_rows_of_no_group_and_no_rows():
    x, dy, w, _ = operands(torch.float32)
    ends = torch.zeros(len(SIZES), dtype=torch.int32)
    assert (portable.grouped_mm(x, [w], ends) == 0).all()
    assert (portable.grouped_wgrad(dy, x, ends) == 0).all()
    assert portable.grouped_mm(x[:0], [w], ends).shape == (0, w.shape[1])


def test_other_operands_are_left_to_others():
    x, dy, w, ends = operands(torch.float64)
    assert portable.grouped_mm(x, [w], ends) is NotImplemented
    assert portable.grouped_wgrad(dy, x, ends) is NotImplemented
    assert (
        definitions.grouped_wgrad_([w], dy, x, ends, product=portable.grouped_wgrad)
        is NotImplemented
    )
