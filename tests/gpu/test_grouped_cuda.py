"""Grouped products of PyTorch and in Triton on CUDA: values, graphs, no synchronisation."""

from __future__ import annotations

import math

import pytest
import reference as ref
import torch
from checks import graph_of, never_waiting
from torch import Tensor

import fusible as fz
from fusible.kernels import grouped
from fusible.kernels.grouped import portable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

SIZES = (33, 0, 128, 1, 0, 70)
TAIL = 24
# Relative error of a product rounded to the dtype, against FP64.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-3}


def ends_of(sizes) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to("cuda", torch.int32)


def rows_with_nan_tail(columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(sum(SIZES) + TAIL, columns, device="cuda").to(dtype)
    x[sum(SIZES) :] = math.nan
    return x


def assert_near(got: Tensor, want: Tensor) -> None:
    got, want = got.double().cpu(), want.double()
    assert got.shape == want.shape
    assert not got.isnan().any()
    assert (got - want).norm() <= TOLERANCE[torch.bfloat16] * want.norm().clamp_min(1e-30)


def on_cpu(op, *args):
    """The same op in FP64 on the CPU, the oracle; NaN in the tail counts for nothing."""

    def move(a):
        if isinstance(a, list):
            return [move(t) for t in a]
        if not isinstance(a, Tensor):
            return a
        return a.cpu() if a.dtype == torch.int32 else a.double().cpu().nan_to_num()

    return op(*[move(a) for a in args])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("features", [(64, 96), (60, 52), (7, 9)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("with_bias", [None, "bias", "scaled bias"])
def test_grouped_mm(dtype, features, transpose, with_bias):
    k, n = features
    x = rows_with_nan_tail(n if transpose else k, dtype)
    w = torch.randn(len(SIZES), n, k, device="cuda").to(dtype)
    bias = row_scale = None
    if with_bias:
        bias = torch.randn(len(SIZES), k if transpose else n, device="cuda").to(dtype)
        row_scale = torch.rand(len(x), device="cuda") if "scaled" in with_bias else None
    for weights in ([w], list(w.unbind(0)), [t.clone() for t in w.unbind(0)]):
        args = (x, weights, ends_of(SIZES), bias, row_scale, transpose)
        y = grouped.grouped_mm(*args)
        assert_near(y, on_cpu(grouped.grouped_mm, *args))
        assert (y[sum(SIZES) :] == 0).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("features", [(64, 96), (7, 9)], ids=str)
def test_grouped_wgrad(dtype, features):
    x, dy = (rows_with_nan_tail(f, dtype) for f in features)
    ends = ends_of(SIZES)
    want = on_cpu(grouped.grouped_wgrad, dy, x, ends)
    dw = grouped.grouped_wgrad(dy, x, ends)
    assert_near(dw, want)
    assert all((dw[e] == 0).all() for e, size in enumerate(SIZES) if size == 0)
    for accumulate in (False, True):
        start = torch.ones_like(dw, dtype=torch.float32)
        if not accumulate:
            start.fill_(math.nan)
        grouped.grouped_wgrad_([start], dy, x, ends, accumulate)
        assert_near(start, want + accumulate)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("features", [(64, 96), (520, 9)], ids=str)
def test_products_in_triton(dtype, features):
    """In the dtypes that other kernels have here, too; without a synchronisation."""
    ends, (k, n) = ends_of(SIZES), features
    x, dy = rows_with_nan_tail(k, dtype), rows_with_nan_tail(n, dtype)
    w = torch.randn(len(SIZES), n, k, device="cuda").to(dtype)
    bias = torch.randn(len(SIZES), n, device="cuda").to(dtype)
    scale = torch.rand(len(x), device="cuda")
    calls = [
        (portable.grouped_mm, grouped.grouped_mm, (x, [w], ends, bias, scale)),
        (portable.grouped_mm, grouped.grouped_mm, (dy, [w], ends, None, None, True)),
        (portable.grouped_wgrad, grouped.grouped_wgrad, (dy, x, ends)),
    ]
    for call, op, args in calls:
        call(*args)
        with never_waiting():
            got = call(*args)
        assert_near(got, on_cpu(op, *args))
        assert torch.equal(got, call(*args))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("features", [8, 520, 9])
@pytest.mark.parametrize("sizes", [SIZES, (3000, 0, 1)], ids=str)
def test_gradients_of_a_bias(sizes, features, dtype):
    ends = ends_of(sizes)
    dy = torch.randn(sum(sizes) + 5, features, device="cuda").to(dtype)
    dy[sum(sizes) :] = math.nan
    bias = torch.randn(len(sizes), features, device="cuda").to(dtype)
    scales = torch.rand(len(dy), device="cuda")
    for scale in (None, scales, scales.to(dtype)):
        args = (dy, ends, scale)
        sums = grouped.grouped_sum(*args)
        assert_near(sums, on_cpu(grouped.grouped_sum, *args))
        assert torch.equal(sums, grouped.grouped_sum(*args))
    dots = grouped.grouped_dots(dy, bias, ends)
    assert_near(dots, on_cpu(grouped.grouped_dots, dy, bias, ends))
    assert (dots[sum(sizes) :] == 0).all()
    order = torch.randperm(len(dy), device="cuda")
    index = order.argsort().int()
    index[sum(sizes) :] = 2**31 - 1
    assert torch.equal(grouped.grouped_sum(dy[order], ends, scale, index), sums)
    assert torch.equal(grouped.grouped_dots(dy[order], bias, ends, index), dots)
    expanded = torch.ones((), device="cuda", dtype=dtype).expand(sum(sizes), features)
    assert_near(
        grouped.grouped_sum(expanded, ends, None), on_cpu(grouped.grouped_sum, expanded, ends, None)
    )


def test_strides_that_pytorch_refuses():
    ends, w = ends_of(SIZES), torch.randn(len(SIZES), 32, 48, device="cuda").bfloat16()
    rows = sum(SIZES)
    expanded = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(rows, 32)
    pitched = torch.randn(rows, 50, device="cuda").bfloat16()[:, 1:49]
    for x, weights, transpose in ((expanded, w, True), (pitched, w, False)):
        args = (x, [weights], ends, None, None, transpose)
        assert_near(grouped.grouped_mm(*args), on_cpu(grouped.grouped_mm, *args))
    assert_near(
        grouped.grouped_wgrad(expanded, pitched, ends),
        on_cpu(grouped.grouped_wgrad, expanded, pitched, ends),
    )


def mlp_and_inputs(rows: int = 256, dtype: torch.dtype = torch.bfloat16):
    options = {"device": "cuda", "dtype": dtype, "single_grouped_weight": True}
    options |= {"single_grouped_bias": True}
    mlp = fz.Sequential(
        fz.GroupedLinear(4, 64, 128, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 64, 64, **options, scale_bias=True),
    )
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x = torch.randn(rows, 64, device="cuda").to(dtype).requires_grad_()
    scales = torch.rand(rows, device="cuda").requires_grad_()
    return mlp, x, scales, torch.tensor([100, 0, 80, 30], device="cuda")


def step(mlp, x, scales, splits):
    """One forward and backward; gives the output and every gradient."""
    y = mlp(x, splits, scales, splits, scales)
    grads = torch.autograd.grad(y, (x, scales, *mlp.parameters()), torch.ones_like(y))
    return y, *grads


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_grouped_mlp_never_synchronises_and_repeats_bitwise(dtype):
    mlp, x, scales, splits = mlp_and_inputs(dtype=dtype)
    first = step(mlp, x, scales, splits)
    with never_waiting():
        again = step(mlp, x, scales, splits)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
        assert not a.isnan().any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_cuda_graph_replay_with_other_splits(dtype):
    mlp, x, scales, splits = mlp_and_inputs(dtype=dtype)
    graph, captured = graph_of(lambda: step(mlp, x, scales, splits))
    for sizes in ([256, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0], [64, 64, 64, 64]):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        ref.assert_equal(captured, step(mlp, x, scales, splits))


def test_device_splits_are_clamped_and_verified_on_request():
    mlp, x, scales, splits = mlp_and_inputs()
    splits.copy_(torch.tensor([200, 100, 50, 10]))
    cut = step(mlp, x, scales, splits)
    splits.copy_(torch.tensor([200, 56, 0, 0]))
    ref.assert_equal(cut, step(mlp, x, scales, splits))
    splits.copy_(torch.tensor([200, 100, 50, 10]))
    with fz.checking(), pytest.raises(ValueError, match="must sum to at most the 256 rows"):
        step(mlp, x, scales, splits)
