"""Plans for Hopper that run as one node without contexts, compared with their ops."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import reference as ref
import torch
from sm90_launches import is_direct, ops_only, sm90_on_cpu
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible.fuser import run as fuser_run
from fusible.testing import assume_target


@contextmanager
def on_sm90(prepared=True, recipe=None) -> Iterator[None]:
    """As on Hopper; if not ``prepared``, all plans run by their ops."""
    scope = fz.autocast(enabled=recipe is not None, recipe=recipe)
    with assume_target("sm90"), sm90_on_cpu() if prepared else ops_only(), scope:
        yield


def with_biases(model):
    """``model`` with other biases than zeros."""
    for name, p in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p)
    return model


def leaves(model, given):
    """What gets a gradient."""
    return [t for t in (*given, *model.parameters()) if t.requires_grad]


def call(model, given, prepared=True, recipe=None, **kwargs):
    """The output; under a recipe that of a grouped MLP with FP8 products."""
    with on_sm90(prepared, recipe):
        y = model(*given, **kwargs)
    assert recipe is None or model.plan.fired == ("grouped_mlp_sm90_fp8",)
    return y


def gradients(model, given, y, prepared=True, **options):
    """The gradients of all leaves."""
    torch.manual_seed(4)
    with on_sm90(prepared):
        return torch.autograd.grad(y, leaves(model, given), torch.randn_like(y), **options)


def both(model, given, prepared=True, recipe=None):
    """The output and the gradients, by one node without contexts exactly if ``prepared``."""
    y = call(model, given, prepared, recipe)
    assert is_direct(y) == prepared
    return y, *gradients(model, given, y, prepared)


def assert_equals_the_ops(model, given, recipe=None):
    """And is not all zeros."""
    got = both(model, given, True, recipe)
    assert got[0].any()
    ref.assert_equal(got, both(model, given, False, recipe))


def assert_equals_the_ops_without_gradients(model, given, recipe=None):
    """By the node's forward alone."""
    taken = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        run = fuser_run.run_fast_path
        patch.setattr(fuser_run, "run_fast_path", lambda *a: taken.append(a) or run(*a))
        y = call(model, given, True, recipe)
        assert len(taken) == 1
        assert not y.requires_grad
        assert torch.equal(y, call(model, given, False, recipe))


def assert_graph_may_be_kept(model, given, recipe=None):
    """The same gradients again."""
    y = call(model, given, True, recipe)
    first, again = (gradients(model, given, y, retain_graph=keep) for keep in (True, False))
    ref.assert_equal(first, again)


def steps(model, given, prepared, use_reentrant=None, recipe=None, **options):
    """Two backwards into ``main_grad``, or delayed; gives all gradients and buffers."""
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    for t in leaves(model, given):
        t.grad = None
    if model[0].accumulate_into_main_grad:
        for i, weight in enumerate(weights):
            weight.main_grad = torch.full_like(weight, 0.5, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
            weight.overwrite_main_grad = i == 0
    with on_sm90(prepared, recipe):
        for _ in range(2):
            if use_reentrant is None:
                y = model(*given)
                assert is_direct(y) == prepared
            else:
                y = checkpoint(model, *given, use_reentrant=use_reentrant)
            y.backward(torch.ones_like(y), **options)
        for op in model:
            if getattr(op, "delay_wgrad_compute", False):
                op.backward_dw()
                op.backward_dw()
    buffers = [getattr(w, "main_grad", None) for w in weights]
    # Of the parameters in main_grad, dummy gradients.
    grads = [t.grad for t in leaves(model, given) if not hasattr(t, "main_grad")]
    added = [getattr(w, "grad_added_to_main_grad", None) for w in weights]
    return [t for t in (*buffers, *grads) if t is not None], added
