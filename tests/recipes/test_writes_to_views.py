"""A write to a view of a quantized tensor reaches the tensor, as with ordinary tensors."""

import copy
import io

import pytest
import torch
from number_formats import KINDS
from torch import nn

from fusible import recipes
from fusible.recipes.tensor import QuantizedTensor

VIEWS = {
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "mT": lambda t: t.mT,
    "permute": lambda t: t.permute(1, 0),
    "view": lambda t: t.view(32, 128),
    "reshape": lambda t: t.reshape(16, 4, 64),
    "flatten": lambda t: t.flatten()[3:70],
    "unbind": lambda t: t.unbind(0)[3],
    "split": lambda t: t.split([10, 54], 1)[1],
    "chunk": lambda t: t.chunk(3)[1],
    "select": lambda t: t[3],
    "slice": lambda t: t[:, 3:7],
    "slice with a step": lambda t: t[::2],
    "rows and columns": lambda t: t[2, 3:9],
    "narrow": lambda t: t.narrow(1, 3, 5),
    "expand": lambda t: t[:, :, None].expand(64, 64, 1),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "diagonal": lambda t: t.diagonal(),
    "as_strided": lambda t: t.as_strided((5, 5), (64, 2), 3),
    "unfold": lambda t: t.unfold(0, 4, 4),
    "view of a view": lambda t: t.t()[3:5].t(),
    "detach": lambda t: t.detach().t(),
    "detach of a view": lambda t: t.t().detach(),
    "dtype": lambda t: t.detach().view(torch.int32).view(torch.float32)[3],
    "whole blocks": lambda t: t[:32],
    "whole": lambda t: t.view(64, 64),
}


def like(v):
    return torch.linspace(-1, 1, v.numel()).view(v.shape)


WRITES = {
    "mul_": lambda v: v.mul_(2),
    "mul_ by a tensor": lambda v: v.mul_(like(v)),
    "addcmul_": lambda v: v.addcmul_(like(v), like(v)),
    "exp_": lambda v: v.exp_(),
    "copy_": lambda v: v.copy_(like(v)),
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(3.0),
    "index_fill_": lambda v: v.index_fill_(0, torch.tensor([0]), 2.0),
    "v[0] =": lambda v: v.__setitem__(0, 0.5),
    "v[...] =": lambda v: v.__setitem__(..., like(v)),
    "v[mask] =": lambda v: v.__setitem__(like(v) > 0, 0.5),
    "+=": lambda v: v.__iadd__(1),
    "out=": lambda v: torch.add(like(v), 1, out=v),
    "_foreach_mul_": lambda v: torch._foreach_mul_([v, like(v)], 2.0),
    ".data": lambda v: v.data.mul_(2),
}


def quantized(kind="mxfp8", shape=(64, 64)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return QuantizedTensor.quantize(x, KINDS[kind].format("weight"), columnwise=True)


def without_history(leaf, view, write):
    base = leaf.detach().clone()
    seen = view(base)
    write(seen)
    return base, seen


def with_history(leaf, view, write):
    base = leaf.clone()
    seen = view(base)
    write(seen)
    return base, seen


def of_a_parameter(leaf, view, write):
    with torch.no_grad():
        seen = view(leaf)
        write(seen)
    return leaf, seen


BEYOND = {
    "as_strided": lambda v: v.as_strided((4, 64), (64, 1), 64),
    "between": lambda v: v.view(64)[::2].as_strided((20,), (1,)),
    "as_strided_": lambda v: v.as_strided_((4, 64), (64, 1), 64),
    "resize_": lambda v: v.resize_(4, 64),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_view_beyond_a_view_is_refused_with_gradients(name):
    """Whose elements autograd would not count, after a write, in the gradient of the tensor."""
    with pytest.raises(RuntimeError, match=r"(as_strided|resize)_? of a view .* must stay inside"):
        BEYOND[name](quantized().clone()[2])
    with torch.no_grad():
        q = quantized()
        plain = q.dequantize()
        for t in (q, plain):
            BEYOND[name](t[2]).mul_(2)
    assert torch.equal(q.dequantize(), plain)


@pytest.mark.parametrize("write", [lambda t, v: v.mul_(2), lambda t, v: t.mul_(2)])
def test_a_strided_view_inside_a_view_has_the_gradients_of_pytorch(write):
    results = []
    leaf = nn.Parameter(quantized())
    for parameter in (leaf, nn.Parameter(leaf.detach().dequantize())):
        base = parameter.clone()
        inside = base[2:7].as_strided((3, 30), (128, 2), 130)
        write(base, inside)
        (inside * like(inside)).sum().backward()
        results.append((inside.detach() * 1, parameter.grad))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def run(how, leaf, view, write):
    """The tensor, the view as it is read, and the gradient, or the type of what was raised."""
    try:
        base, seen = how(leaf, view, write)
        read = seen * 1
        if how is with_history:
            (base * like(base)).sum().backward(retain_graph=True)
            (read * 3).sum().backward()
        return base.detach(), read.detach(), leaf.grad
    except RuntimeError as error:  # such as for a view of a leaf, or one of several views
        return type(error)


@pytest.mark.parametrize("how", [without_history, with_history, of_a_parameter])
@pytest.mark.parametrize("name", VIEWS)
def test_values_and_gradients(name, how):
    for write in WRITES.values():
        leaf = nn.Parameter(quantized())
        plain = nn.Parameter(leaf.dequantize().detach())
        got, want = (run(how, t, VIEWS[name], write) for t in (leaf, plain))
        if want is RuntimeError:
            assert got is want
            continue
        assert torch.equal(got[0].dequantize(), leaf.stored_alike(want[0]).dequantize())
        read = leaf.stored_alike(want[0]).dequantize()
        assert torch.equal(got[1], VIEWS[name](read) * 1)
        if how is with_history:
            torch.testing.assert_close(got[2], want[2], rtol=2**-4, atol=2**-6)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
def test_every_format_and_both_uses(kind):
    q = quantized(kind)
    plain = q.dequantize()
    for t in (q, plain):
        t.t()[3] = 0.7
    for columnwise in (False, True):
        want = q.stored_alike(plain).dequantize(columnwise=columnwise)
        assert torch.equal(q.dequantize(columnwise=columnwise), want)


def test_of_grouped_tensors():
    x, sizes = torch.randn(64, 32), torch.tensor([20, 30])
    for g in (
        recipes.group_quantize(x, recipes.MXFP8Quantizer(), 2, sizes),
        recipes.group(x.clone(), 2, sizes),
    ):
        plain = g.dequantize()
        pointer = g.rowwise_data.data_ptr()
        for t in (g, plain):
            t.t()[3] = 5.0
            t[1] = 3.0
            t[2:4, 1] = 2.0
        assert torch.equal(g.dequantize()[:50], plain[:50])
        assert g.rowwise_data.data_ptr() == pointer


def test_a_write_to_the_tensor_changes_its_views():
    q = quantized()
    views = q.t(), q[3], q[:, 2]
    for write in (
        lambda: q.mul_(2),
        q.detach()[5].zero_,
        lambda: q.quantize_(torch.randn(64, 64)),
        views[0].neg_,
    ):
        write()
        values = q.dequantize()
        for view, want in zip(views, (values.t(), values[3], values[:, 2]), strict=True):
            assert torch.equal(view, want)


def test_views_of_parts_see_each_other_s_writes():
    """A part of whole blocks is a quantized tensor of the same memory."""
    q = quantized(shape=(4, 64, 64))
    plain = q.dequantize()
    parts = {
        "slice": lambda t: t[1:3].mT,
        "split": lambda t: t.split(2)[0].transpose(0, 1),
        "rows": lambda t: t.view(256, 64).t(),
        "all": lambda t: t.transpose(0, 2),
    }
    views = [[part(t) for part in parts.values()] for t in (q, plain)]
    for i in range(len(parts)):
        for of in views:
            of[i].mul_(2)
        for got, want in zip(*views, strict=True):
            assert torch.equal(got, want)
    for t in (q, plain):
        t[1:2].fill_(3.0)
    for got, want in zip(*views, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(q.dequantize(), plain)


def test_views_that_one_operation_writes():
    q = quantized(shape=(4, 64, 64))
    plain = q.dequantize()
    for t in (q, plain):
        torch._foreach_mul_([t[0], t[1], t[2].t()], 2.0)
        torch._foreach_add_(list(t.unbind()), 1.0)
    assert torch.equal(q.dequantize(), q.stored_alike(plain).dequantize())


def test_a_tensor_changed_before_its_backward():
    """As with ordinary tensors: of another version than the graph has saved."""
    for write in (lambda q: q.quantize_(torch.ones(64, 64)), lambda q: q.zero_()):
        q, x = quantized(), torch.randn(3, 64, requires_grad=True)
        y = x @ q.t()
        write(q)
        with pytest.raises(RuntimeError, match=r"must not be written to|modified by an inplace"):
            y.sum().backward()


def test_in_inference_mode():
    with torch.inference_mode():
        q = quantized()
        view = q.t()
        q.t()[2] = 7.0
        assert torch.equal(q.dequantize()[:, 2], torch.full((64,), 7.0))
        q.mul_(2)
        assert torch.equal(view, q.dequantize().t())


def test_copies_are_ordinary_tensors():
    q = quantized()
    view, want = q.t(), q.dequantize().t()
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    for made in (copy.deepcopy(view), torch.load(file), view.clone()):
        assert type(made) is torch.Tensor
        assert torch.equal(made, want)
    assert view[0].tolist() == want[0].tolist() == view[0].numpy().tolist()
    part = view[:10]
    part.t_()
    assert part.shape == (part * 1).shape == (64, 10)


def test_copies_of_a_parameter_are_parameters():
    layer = nn.Linear(64, 2, bias=False)
    layer.weight = nn.Parameter(quantized()[:, :2].t())
    want = layer.weight * 1
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    for made in (copy.deepcopy(layer).weight, torch.load(file)):
        assert type(made) is nn.Parameter
        assert made.requires_grad
        assert made.is_leaf
        assert torch.equal(made, want)


def test_padding_of_an_embedding():
    table = nn.Embedding(64, 64, padding_idx=3)
    table.weight = nn.Parameter(quantized())
    table._fill_padding_idx_with_zero()
    assert not table.weight[3].any()
    table(torch.tensor([3, 5])).sum().backward()
    want = torch.zeros(64, 64)
    want[5] = 1.0
    assert torch.equal(table.weight.grad, want)


def write_and_read(leaf):
    tensor = leaf.clone()
    view, row = tensor.t(), tensor[3]
    view.mul_(2)
    tensor[:, 1] = 2.0
    row.add_(1)
    tensor.neg_()
    return tensor.dequantize() + view * 3, row * 2, view


def write_to_a_parameter(leaf):
    with torch.no_grad():
        leaf.t().mul_(2)
        leaf[3] = 1.0
    return (leaf.t() * 2,)


@pytest.mark.parametrize("function", [write_and_read, write_to_a_parameter])
def test_compiled(function):
    results = []
    torch._dynamo.reset()
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaf = nn.Parameter(quantized())
        outputs = f(leaf)
        sum((y * like(y)).sum() for y in outputs).backward()
        results.append([*outputs, leaf.dequantize(), leaf.grad])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, check_device=False)
