"""Quantized and grouped tensors on CUDA have the bits that they have on the CPU."""

import pytest
import reference as ref
import torch
from checks import never_waiting
from number_formats import each_format, each_grouped_format, is_square
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes

pytestmark = pytest.mark.gpu

SIZES = [5, 0, 130, 64, 1]


def rows(dtype, count=256):
    generator = torch.Generator().manual_seed(0)
    scale = 2.0 ** torch.randint(-20, 20, (count, 1), generator=generator)
    x = (torch.randn(count, 256, generator=generator) * scale).to(dtype)
    x[7, 9] = 0.0
    x[:, 128:] *= 0.01
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each_format
def test_bits_of_tensors(fmt, dtype):
    x, quantizer = rows(dtype), recipes.Quantizer(fmt)
    on_cpu, on_gpu = quantizer(x), quantizer(x.cuda())
    ref.assert_same_bits(on_gpu.pieces(), on_cpu.pieces())
    for columnwise in (False, True):
        a, b = (q.dequantize(columnwise=columnwise).cpu() for q in (on_gpu, on_cpu))
        # FP16 overflows here, so that some blocks are NaN on either side.
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@each_grouped_format
def test_bits_of_groups(fmt):
    x, quantizer = rows(torch.bfloat16), recipes.Quantizer(fmt)
    dims = torch.tensor(SIZES)
    on_cpu = recipes.group_quantize(x, quantizer, len(SIZES), dims)
    on_gpu = recipes.group_quantize(x.cuda(), quantizer, len(SIZES), dims.cuda())
    ref.assert_same_bits(on_gpu.pieces(), on_cpu.pieces())
    for columnwise in (False, True):
        a, b = (g.dequantize(columnwise=columnwise).cpu() for g in (on_gpu, on_cpu))
        assert torch.equal(a, b)


@each_format
def test_grouping_and_quantizing_read_nothing_on_the_host(fmt):
    x, dims = rows(torch.bfloat16).cuda(), torch.tensor(SIZES).cuda()
    quantizer = recipes.Quantizer(fmt)

    def step():
        if is_square(fmt):
            quantizer(x).dequantize()
            return
        g = recipes.group_quantize(x, quantizer, len(SIZES), dims)
        for columnwise in (False, True):
            g.dequantize(columnwise=columnwise)

    step()
    torch.cuda.synchronize()
    with never_waiting():
        step()


def test_an_optimizer_updates_a_quantized_parameter():
    weight = nn.Parameter(recipes.MXFP8Quantizer()(rows(torch.bfloat16).cuda()))
    for foreach in (False, True):
        before = weight.dequantize().detach()
        weight.grad = torch.ones_like(before)
        torch.optim.AdamW([weight], lr=0.1, foreach=foreach).step()
        assert isinstance(weight, recipes.QuantizedTensor)
        assert not torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_under_the_recipe_on_the_threads_of_cuda(reentrant):
    grads = []
    linear = fz.Linear(256, 64, bias=False, device="cuda", dtype=torch.bfloat16)
    for call in (lambda m, x: m(x), lambda m, x: checkpoint(m, x, use_reentrant=reentrant)):
        x = rows(torch.bfloat16).cuda().requires_grad_()
        with recipes.autocast(recipe=recipes.MXFP8BlockScaling()):
            y = call(linear, x)
        y.sum().backward()
        assert linear.plan.recipe == recipes.MXFP8BlockScaling()
        grads += [x.grad, linear.weight.grad]
        linear.weight.grad = None
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])
