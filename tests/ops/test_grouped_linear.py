"""GroupedLinear: forms of parameters, of splits, and what happens to unused rows."""

import contextlib
import itertools

import pytest
import reference as ref
import torch
from torch import nn

import fusible as fz
from fusible.kernels import grouped
from fusible.kernels.stacking import stacked

FORMS = [
    {"single_grouped_weight": w, "single_grouped_bias": b}
    for w, b in itertools.product((False, True), repeat=2)
]
SIZES, ROWS = [3, 0, 4, 1], 10


def grouped_linear(**options):
    op = fz.GroupedLinear(4, 8, 6, **options)
    with torch.no_grad():
        for bias in op.biases():
            bias.copy_(torch.randn(bias.shape))
    return op


@pytest.mark.parametrize("dtype", [torch.float64, *ref.DTYPES])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_and_gradients(form, scaled, dtype):
    op = grouped_linear(scale_bias=scaled, dtype=dtype, **form)
    x = torch.randn(ROWS, 8).to(dtype).requires_grad_()
    scales = [torch.rand(ROWS).to(dtype).requires_grad_()] if scaled else []
    tensors = [x, *scales, *op.parameters()]
    dy = torch.randn(ROWS, 6).to(dtype)

    def plain(x, *rest):
        weights, sizes, biases = ref.matrices(op, rest[len(scales) :], SIZES)
        return ref.grouped_linear(x, weights, sizes, biases, *rest[: len(scales)])

    exact_y, exact = ref.gradients(plain, tensors, dy)
    y = op(x, torch.tensor(SIZES), *scales)
    ref.assert_accurate(y.detach(), exact_y)
    for t, grad, theirs in zip(tensors, torch.autograd.grad(y, tensors, dy), exact, strict=True):
        assert grad.dtype == t.dtype
        ref.assert_accurate(grad, theirs)


def test_gradcheck():
    op = grouped_linear(scale_bias=True, dtype=torch.float64)
    x = torch.randn(ROWS, 8, dtype=torch.float64, requires_grad=True)
    scales = torch.rand(ROWS, dtype=torch.float64, requires_grad=True)
    splits = torch.tensor(SIZES)
    assert torch.autograd.gradcheck(
        lambda x, s, *_: op(x, splits, s), (x, scales, *op.parameters())
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_unused_rows_and_empty_groups(form):
    op = grouped_linear(**form)
    x = torch.randn(ROWS, 8)
    x[8:] = float("nan")
    x.requires_grad_()
    y = op(x, torch.tensor(SIZES))
    assert torch.equal(y[8:], torch.zeros(2, 6))
    # A gradient of the unused rows goes nowhere.
    y.backward(torch.cat((torch.ones(8, 6), torch.full((2, 6), float("inf")))))
    assert torch.equal(x.grad[8:], torch.zeros(2, 8))
    for p in op.parameters():
        assert p.grad.isfinite().all()
    empty = [p.grad[1] for p in op.parameters() if p.dim() == (3 if p.shape[0] == 4 else 9)]
    empty += [p.grad for name, p in op.named_parameters() if name.endswith("1")]
    for grad in empty:
        assert torch.equal(grad, torch.zeros_like(grad))
    assert empty or form == {"single_grouped_weight": True, "single_grouped_bias": True}


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 1, 5, 8)])
def test_rows_in_more_than_one_dimension(shape):
    op = grouped_linear(scale_bias=True)
    x = torch.randn(shape, requires_grad=True)
    scales = torch.rand(shape[:-1], requires_grad=True)
    flat, flat_scales = (t.detach().flatten(0, -2 if t is x else -1) for t in (x, scales))
    flat.requires_grad_()
    flat_scales.requires_grad_()
    dy = torch.randn(*shape[:-1], 6)
    y, expected = op(x, SIZES, scales), op(flat, SIZES, flat_scales)
    assert torch.equal(y, expected.view(*shape[:-1], 6))
    y.backward(dy)
    expected.backward(dy.view(-1, 6))
    assert torch.equal(x.grad, flat.grad.view(shape))
    assert torch.equal(scales.grad, flat_scales.grad.view(shape[:-1]))


def test_no_rows():
    op = grouped_linear(scale_bias=True)
    x, scales = torch.empty(0, 8, requires_grad=True), torch.empty(0, requires_grad=True)
    y = op(x, [0, 0, 0, 0], scales)
    assert y.shape == (0, 6)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
    assert scales.grad.shape == (0,)
    for p in op.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


def test_strided_rows():
    op = grouped_linear()
    wide = torch.randn(ROWS, 12)
    for x in (wide[:, 2:10], torch.randn(8, ROWS).t(), torch.randn(1, 8).expand(ROWS, 8)):
        assert not x.is_contiguous()
        torch.testing.assert_close(op(x, SIZES), op(x.contiguous(), SIZES), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("splits", [SIZES, tuple(SIZES), torch.tensor(SIZES, dtype=torch.int32)])
def test_forms_of_split_sizes(splits):
    op, x = grouped_linear(), torch.randn(ROWS, 8)
    assert torch.equal(op(x, splits), op(x, torch.tensor(SIZES)))


def test_a_list_is_converted_once(monkeypatch):
    mlp = ref.grouped_mlp()
    x, splits, scales = ref.grouped_mlp_inputs()
    expected = mlp(x, splits, scales, splits)
    calls = []
    whole = torch.ops.fusible.group_ends.default

    def counted(*args):
        calls.append(args)
        return whole(*args)

    monkeypatch.setattr(grouped, "group_ends", counted)
    sizes = splits.tolist()
    assert torch.equal(mlp(x, sizes, scales, sizes), expected)
    assert len(calls) == 1


def test_initialisation():
    seen = []
    op = fz.GroupedLinear(3, 4, 5, init_method=lambda w: (seen.append(w.shape), w.fill_(2.0)))
    assert seen == [(5, 4)] * 3
    assert all(torch.equal(w, torch.full((5, 4), 2.0)) for w in op.weights())
    single = fz.GroupedLinear(
        3, 4, 5, init_method=lambda w: w.fill_(3.0), single_grouped_weight=True
    )
    assert torch.equal(single.weight, torch.full((3, 5, 4), 3.0))
    assert all(torch.equal(b, torch.zeros(5)) for b in op.biases())

    # By default each expert is initialised as an nn.Linear of its own.
    for options in ({}, {"single_grouped_weight": True}):
        torch.manual_seed(3)
        ours = stacked(fz.GroupedLinear(3, 4, 5, bias=False, **options).weights())
        torch.manual_seed(3)
        theirs = [nn.Linear(4, 5, bias=False).weight for _ in range(3)]
        assert torch.equal(ours, torch.stack(theirs))


def test_names_and_shapes_of_parameters():
    def shapes(**options):
        op = fz.GroupedLinear(2, 3, 4, **options)
        return {name: tuple(p.shape) for name, p in op.named_parameters()}

    one = {"single_grouped_weight": True, "single_grouped_bias": True}
    assert shapes(**one) == {"weight": (2, 4, 3), "bias": (2, 4)}
    assert shapes(bias=False, **one) == {"weight": (2, 4, 3)}
    assert shapes() == {"weight0": (4, 3), "weight1": (4, 3), "bias0": (4,), "bias1": (4,)}


@pytest.mark.parametrize("frozen", ["weight", "bias", "weight and bias", "input", "scales"])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=str)
def test_frozen_parts(form, frozen):
    op = grouped_linear(scale_bias=True, dtype=torch.float64, **form)
    x = torch.randn(ROWS, 8, dtype=torch.float64, requires_grad="input" not in frozen)
    scales = torch.rand(ROWS, dtype=torch.float64, requires_grad="scales" not in frozen)
    for name, p in op.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen.split(" and ")))
    dy = torch.randn(ROWS, 6, dtype=torch.float64)
    op(x, SIZES, scales).backward(dy)

    def plain(x, scales, *params):
        weights, sizes, biases = ref.matrices(op, params, SIZES)
        return ref.grouped_linear(x, weights, sizes, biases, scales)

    tensors = [x, scales, *op.parameters()]
    _, exact = ref.gradients(plain, tensors, dy)
    for t, expected in zip(tensors, exact, strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.requires_grad:
            torch.testing.assert_close(t.grad, expected, rtol=1e-11, atol=1e-12)


def test_two_ops_share_split_sizes_only_if_they_agree_on_them():
    """The end rows are computed once a call; what is cached is checked for each op."""
    x, splits = torch.randn(4, 8), torch.tensor([1, 3])
    for groups in (1, 3):
        mlp = fz.Sequential(fz.GroupedLinear(2, 8, 8), fz.GroupedLinear(groups, 8, 8))
        with pytest.raises(ValueError, match=rf"shape \({groups},\)"):
            mlp(x, splits, splits)
    shorter = fz.Sequential(
        fz.GroupedLinear(2, 8, 8), fz.Reshape((2, 16)), fz.GroupedLinear(2, 16, 8)
    )
    with pytest.raises(ValueError, match="at most the 2 rows"):
        shorter(x, splits, splits)


@pytest.mark.parametrize("groups", [None, 3], ids=["GroupedLinear", "Quantize"])
def test_splits_on_the_host_while_a_graph_is_captured(groups, monkeypatch):
    """Recorded, the copy would read the host's memory at every replay."""
    linear = fz.GroupedLinear(3, 32, 32, device="meta")
    recipe = fz.recipes.MXFP8BlockScaling()
    module = linear if groups is None else fz.Sequential(fz.Quantize(num_groups=groups), linear)
    x, splits = torch.randn(8, 32, device="meta"), torch.tensor([3, 0, 5])
    given = [splits] * (1 if groups is None else 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=captured: now)
        scope = (
            pytest.raises(RuntimeError, match="on meta while a CUDA graph is captured, got cpu")
            if captured
            else contextlib.nullcontext()
        )
        with scope, fz.autocast(enabled=groups is not None, recipe=recipe):
            module(x, *given)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_replaced_parameter_of_another_shape(form, which):
    """Refused in every call, whatever the plan: numbers came out of it, of other rows."""
    op, sizes = grouped_linear(**form), torch.tensor(SIZES)
    op(torch.randn(ROWS, 8), sizes)
    name = which if form[f"single_grouped_{which}"] else f"{which}2"
    shape = tuple(getattr(op, name).shape)
    for other in ((shape[0] + 2, *shape[1:]), (*shape[:-1], shape[-1] + 8), (*shape[:-1], 1)):
        setattr(op, name, nn.Parameter(torch.ones(other)))
        with pytest.raises(ValueError, match=rf"{name} of GroupedLinear must have shape .*, got"):
            op(torch.randn(ROWS, 8), sizes)


@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        (fz.BasicLinear(8, 4), "weight", (6, 8)),
        (fz.Bias(8), "bias", (1,)),
        (fz.TopKRouter(8, 4, 2), "weight", (6, 8)),
    ],
    ids=lambda of: type(of).__name__ if isinstance(of, nn.Module) else None,
)
def test_so_of_other_ops(op, name, shape):
    setattr(op, name, nn.Parameter(torch.ones(shape)))
    with pytest.raises(ValueError, match=rf"{name} of \w+ must have shape .*, got"):
        op(torch.randn(3, 8))
