"""Gradients that go to ``main_grad`` or wait for ``backward_dw()``: when there are none to add."""

import pytest
import torch

import fusible as fz

SIZES = torch.tensor([2, 2])


def linear(**options):
    """A grouped linear in FP64 and its weight."""
    op = fz.GroupedLinear(2, 8, 8, bias=False, single_grouped_weight=True, **options).double()
    return fz.Sequential(op), op.weight


def rows(**options):
    return torch.randn(4, 8, dtype=torch.float64, **options)


def gradient(x, weight):
    """The weight's gradient of the sum of the output."""
    w = weight.detach().clone().requires_grad_()
    torch.cat([x[:2] @ w[0].T, x[2:] @ w[1].T]).sum().backward()
    return w.grad


def by_inputs(y, x):
    y.sum().backward(inputs=[x])


def by_grad(y, x):
    torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("differentiate", [by_inputs, by_grad])
def test_a_backward_for_the_input_alone_adds_no_weight_gradient(differentiate):
    x = rows(requires_grad=True)
    model, weight = linear(accumulate_into_main_grad=True)
    weight.main_grad = torch.zeros_like(weight)
    differentiate(model(x, SIZES), x)
    assert not weight.main_grad.any()
    model(x, SIZES).sum().backward()
    assert torch.allclose(weight.main_grad, gradient(x.detach(), weight))


@pytest.mark.parametrize("differentiate", [by_inputs, by_grad])
def test_nor_does_it_delay_one(differentiate):
    model, weight = linear(delay_wgrad_compute=True)
    differentiate(model(x := rows(requires_grad=True), SIZES), x)
    x = rows()
    model(x, SIZES).sum().backward()
    model[0].backward_dw()
    assert torch.allclose(weight.grad, gradient(x, weight))
    model[0].backward_dw()
    assert torch.allclose(weight.grad, gradient(x, weight))


def test_a_backward_that_failed_does_not_wait():
    model, weight = linear(delay_wgrad_compute=True)

    def fail(_):
        raise MemoryError

    h = rows(requires_grad=True) * 1
    h.register_hook(fail)
    with pytest.raises(MemoryError):
        model(h, SIZES).sum().backward()
    for _ in range(2):
        weight.grad = None
        x = rows()
        model(x, SIZES).sum().backward()
        model[0].backward_dw()
        assert torch.allclose(weight.grad, gradient(x, weight))


def test_backward_dw_inside_a_backward():
    model, weight = linear(delay_wgrad_compute=True)
    x = rows()
    h = x.clone().requires_grad_() * 1
    h.register_hook(lambda _: model[0].backward_dw())
    model(h, SIZES).sum().backward()
    assert torch.allclose(weight.grad, gradient(x, weight))


def test_two_uses_of_a_weight_overwrite_main_grad_once():
    model, weight = linear(accumulate_into_main_grad=True)
    weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight, torch.nan), True
    twice = fz.Sequential(model[0], fz.SiLU(), model[0])
    for _ in range(2):
        x, w = rows(), weight.detach().clone().requires_grad_()
        twice(x, SIZES, SIZES).sum().backward()
        h = torch.nn.functional.silu(torch.cat([x[:2] @ w[0].T, x[2:] @ w[1].T]))
        torch.cat([h[:2] @ w[0].T, h[2:] @ w[1].T]).sum().backward()
        assert torch.allclose(weight.main_grad, w.grad)
