"""An architecture of its own: the methods of `GroupedKernels`, and a row that selects it."""

from dataclasses import replace

import pytest
import reference as ref
import torch
from torch import Tensor

import fusible as fz
from fusible.extend import KernelRow, equal, this
from fusible.fused.grouped_mlp import grouped_mlp
from fusible.ops.grouped_kernels import Activated, ActivationGrads, GroupedKernels, GroupedOperand
from fusible.ops.kernel_rows import GroupedKernelsRow
from fusible.ops.wgrad import WeightGradient
from fusible.testing import assume_target


class Batched(GroupedKernels):
    """Reads ``[E, rows, features]``, of which each matrix has the rows of its group, else zeros."""

    def groups(self, linear, ends, num_rows):
        row, starts = torch.arange(num_rows), torch.cat([ends.new_zeros(1), ends[:-1]])
        return (row >= starts[:, None]) & (row < ends[:, None])

    def prepare_rows(self, call, x, role, uses, row_scale=None):
        batch = x * call.groups[..., None]
        return GroupedOperand(batch, batch)

    def weights(self, call):
        weights = call.linear.weights_in(call.ctx, call.ctx.dtype)  # E, or one of all groups
        return ([weights[0] if len(weights) == 1 else torch.stack(weights)],) * 2

    def product(self, call, x, weights, row_scale, output):
        y, bias = (x @ weights[0].mT).sum(0), call.linear.stacked_bias(call.ctx, x.dtype)
        return y if bias is None else y + (call.groups[..., None] * bias[:, None]).sum(0)

    def data_grad(self, call, dy, weights, output):
        return (dy @ weights[0]).sum(0)

    def weight_grad(self, call, dy, x):
        return WeightGradient(lambda out, accumulate: dy.mT @ x, (dy, x))

    def saves_activation(self, ctx, act):
        return True

    def glu(self, call, act, x, weights, scales, save_preact):
        preact = self.product(call, x, weights, None, None)
        return Activated(preact, act.value(preact, scales))

    def dglu(self, first, second, act, dy, preact, scales, overwrite):
        dy = self.data_grad(second.call, dy, second.weights, None)
        d, dscales = act.grads(dy, preact, scales)
        return ActivationGrads(d, None, dscales, None)


BATCHED = GroupedKernelsRow(
    "batched", Batched(), lambda *linears: (equal(this.sm, 70),), (), "Only an example."
)


def results(module, inputs) -> list[Tensor]:
    """The output and all gradients."""
    leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    y = module(*inputs)
    return [y, *torch.autograd.grad(y, leaves, torch.cos(torch.arange(y.numel())).view_as(y))]


@pytest.mark.parametrize("single", [True, False])
def test_a_new_architecture(own_fusions, monkeypatch, single):
    own_fusions.install([replace(grouped_mlp, kernels=(BATCHED.for_mlp, *grouped_mlp.kernels))])
    rows = (BATCHED.for_linear, *fz.GroupedLinear.kernel_rows)
    monkeypatch.setattr(fz.GroupedLinear, "kernel_rows", rows)
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    options["dtype"] = torch.float64
    mlp = fz.Sequential(
        fz.GroupedLinear(4, 8, 32, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 16, 24, **options),
        fz.GroupedLinear(4, 24, 8, **options),
    )
    for name, parameter in mlp.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    x, splits = torch.randn(12, 8, dtype=torch.float64), torch.tensor([5, 0, 4, 2])
    scales = torch.rand(12, dtype=torch.float64)
    inputs = x.requires_grad_(), splits, scales.requires_grad_(), splits, splits
    with assume_target("sm70"):
        got = results(mlp, inputs)
    assert (mlp.plan.fired, mlp.plan.kernels) == (("grouped_mlp_batched",), ("batched",))
    want = results(mlp, inputs)
    assert mlp.plan.fired == mlp.plan.kernels == ()
    torch.testing.assert_close(got, want)
    text = str(fz.explain(mlp, *inputs, target="sm70"))
    assert "GroupedMLP by grouped_mlp_batched, forward and backward" in text
    assert text.endswith("kernels: batched")


def test_its_kernels_need_not_read_a_pre_activation_that_was_saved_in_fp8(own_fusions):
    own_fusions.install([replace(grouped_mlp, kernels=(BATCHED.for_mlp,))])
    mlp = fz.Sequential(
        fz.GroupedLinear(4, 8, 32),
        fz.ScaledSwiGLU(cache_quantized_input=True),
        fz.GroupedLinear(4, 16, 24),
    )
    x, splits, scales = torch.randn(12, 8), torch.tensor([5, 0, 4, 2]), torch.rand(12)
    inputs = x.requires_grad_(), splits, scales.requires_grad_(), splits

    def pack(t):
        return ref.in_fp8(t) if t.dim() == 2 and t.shape[1] == 32 else t

    with assume_target("sm70"):
        got = results(mlp, inputs)
        assert mlp.plan.fired == ("grouped_mlp_batched",)
        mlp[1] = fz.ScaledSwiGLU()
        plain = results(mlp, inputs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            ref.assert_equal(got, results(mlp, inputs))
    assert not torch.equal(got[1], plain[1])


def test_kernels_that_are_falsy_run(monkeypatch):
    class Empty(Batched):
        def __len__(self):
            return 0

        def product(self, *given):
            return 2 * super().product(*given)

    row = KernelRow("twice", Empty(), (equal(this.sm, 70),), "")
    monkeypatch.setattr(fz.GroupedLinear, "kernel_rows", (row,))
    linear = fz.GroupedLinear(2, 8, 8, bias=False, single_grouped_weight=True)
    x, splits = torch.randn(5, 8), torch.tensor([3, 2])
    want = 2 * linear(x, splits)
    with assume_target("sm70"):
        torch.testing.assert_close(linear(x, splits), want)
