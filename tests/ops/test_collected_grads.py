"""Gradients that go to ``main_grad`` or wait for ``backward_dw()``: when there are none to add."""

import gc
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


def test_the_memory_of_a_failed_backward_is_freed_by_the_next_backward():
    model, _ = linear(delay_wgrad_compute=True)

    def fail(_):
        raise MemoryError

    x = rows()
    kept = weakref.ref(x)
    h = x.requires_grad_() * 1
    h.register_hook(fail)
    with pytest.raises(MemoryError):
        model(h, SIZES).sum().backward()
    del x, h
    model(rows(), SIZES).sum().backward()
    gc.collect()
    assert kept() is None
    assert len(model[0]._delayed) == 1


def test_backward_dw_of_another_thread_while_the_backward_runs():
    model, weight = linear(delay_wgrad_compute=True)
    x, reached, go = rows(), threading.Event(), threading.Event()
    h = x.clone().requires_grad_() * 1

    def wait(_):
        reached.set()
        go.wait()

    h.register_hook(wait)
    thread = threading.Thread(target=lambda: model(h, SIZES).sum().backward())
    thread.start()
    reached.wait()
    model[0].backward_dw()
    go.set()
    thread.join()
    assert torch.allclose(weight.grad, gradient(x, weight))


def test_backward_dw_in_a_nested_backward():
    model, weight = linear(delay_wgrad_compute=True)

    def inner(h):
        h = h * 1
        if h.requires_grad:
            h.register_hook(lambda _: model[0].backward_dw())
        return h * 1

    x = rows()
    h = checkpoint(inner, x.clone().requires_grad_(), use_reentrant=True)
    model(h, SIZES).sum().backward()
    assert torch.allclose(weight.grad, gradient(x, weight))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_uses_under_checkpoints_overwrite_main_grad_once(use_reentrant):
    model, weight = linear(accumulate_into_main_grad=True)
    weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight, torch.nan), True
    for _ in range(2):
        x, w = rows(requires_grad=True), weight.detach().clone().requires_grad_()
        h = x
        for _ in range(2):
            h = checkpoint(lambda t: model(t, SIZES), h, use_reentrant=use_reentrant)
        h.sum().backward()
        h = torch.cat([x[:2] @ w[0].T, x[2:] @ w[1].T])
        torch.cat([h[:2] @ w[0].T, h[2:] @ w[1].T]).sum().backward()
        assert torch.allclose(weight.main_grad, w.grad)


def test_a_gradient_of_the_bias_alone():
    op = fz.GroupedLinear(2, 8, 8, accumulate_into_main_grad=True).double()
    weights = op.weight0, op.weight1
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    x = rows()
    op(x, SIZES).sum().backward(inputs=[op.bias0])
    assert op.bias0.grad.eq(2).all()
    assert not any(weight.main_grad.any() for weight in weights)


def test_nothing_is_left_on_a_weight():
    model, weight = linear(accumulate_into_main_grad=True)
    weight.main_grad, weight.overwrite_main_grad = torch.zeros_like(weight), True
    model(rows(), SIZES).sum().backward()
    assert set(vars(weight)) == {"main_grad", "overwrite_main_grad"}
