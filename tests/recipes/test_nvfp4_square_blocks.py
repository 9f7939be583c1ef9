"""NVFP4 weights with one scale per 16x16: bits by plain loops, products, storage, compilation."""

import numpy as np
import pytest
import reference as ref
import torch
from number_formats import NV, PLAIN

import fusible as fz
from fusible import recipes
from fusible.recipes.formats import nvfp4
from fusible.recipes.quantization import dequantize, quantize

SQUARE = recipes.NVFP4BlockScaling(**PLAIN | {"disable_2d_quantization": False})
F = np.float32
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [m * 2.0**-9 for m in range(8)]
E4M3 += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]  # the last is NaN


def nearest(value, table):
    """The code of the nearest number of a table, of two the even code."""
    return min(range(len(table)), key=lambda code: (abs(value - table[code]), code % 2))


def codes_by_loops(x):
    """Codes of elements and scales, and the tensor's scale, from the description of the format."""
    rows, columns = x.shape
    outer = F(F(np.abs(x).max()) / F(6 * 448))
    elements = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((-(-rows // 16), -(-columns // 16)), np.uint8)
    for i in range(0, rows, 16):
        for j in range(0, columns, 16):
            tile = x[i : i + 16, j : j + 16]
            code = nearest(float(F(F(np.abs(tile).max() / F(6)) / outer)), E4M3)
            scales[i // 16, j // 16] = code
            inverse = F(1) / F(F(E4M3[code]) * outer) if code else F(0)
            for row in range(tile.shape[0]):
                for column in range(tile.shape[1]):
                    value = F(tile[row, column] * inverse)
                    sign = 8 * int(np.signbit(value))
                    elements[i + row, j + column] = sign + nearest(abs(float(value)), E2M1)
    return elements, scales, outer


@pytest.mark.parametrize("shape", [(16, 16), (48, 32), (35, 22), (1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_every_bit_is_that_of_plain_loops(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x[: shape[0] // 2] *= 1e-3
    elements, scales, outer = codes_by_loops(x.numpy())
    for columnwise in (False, True):
        got = quantize(x, nvfp4((16, 16)), columnwise=columnwise)
        codes = torch.stack((got.data & 15, got.data >> 4), -1).flatten(-2)
        assert torch.equal(codes, torch.from_numpy(elements))
        assert torch.equal(got.scale.view(torch.uint8), torch.from_numpy(scales))
        assert got.tensor_scale.item() == outer
        assert not got.columnwise  # one matrix serves both uses


def run(layer, x, dy, recipe=SQUARE):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with fz.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad.clone()


def test_products_read_the_same_weight():
    layer, x, dy = fz.Linear(48, 80, bias=False), torch.randn(64, 48), torch.randn(64, 80)
    got = run(layer, x, dy)
    w = dequantize(quantize(layer.weight.detach(), nvfp4((16, 16)))).double()

    def values(t, columnwise):
        return dequantize(quantize(t, nvfp4(), columnwise=columnwise)).double()

    want = (
        values(x, False) @ w.T,
        values(dy, False) @ w,
        values(dy, True).T @ values(x, True),
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    plain = run(layer, x, dy, NV)
    assert not torch.equal(plain[0], got[0])
    assert torch.equal(plain[2], got[2])


def test_a_stored_weight_takes_half_a_byte_and_one_256th():
    with fz.quantized_model_init(recipe=SQUARE):
        layer = fz.Linear(512, 512, bias=False)
    pieces = [t for name, t in layer.state_dict().items() if not name.endswith("format")]
    assert sum(t.nbytes for t in pieces) == 512 * 512 // 2 + 32 * 32 + 4
    x = torch.randn(32, 512, requires_grad=True)
    with fz.autocast(recipe=SQUARE):
        y = layer(x)
    w = layer.weight.dequantize().double()
    want = dequantize(quantize(x.detach(), nvfp4())).double() @ w.T
    torch.testing.assert_close(y.detach().double(), want, rtol=1e-5, atol=1e-5)
    dy = torch.randn(32, 512)
    y.backward(dy)
    want = dequantize(quantize(dy, nvfp4())).double() @ w
    torch.testing.assert_close(x.grad.double(), want, rtol=1e-5, atol=1e-5)
    other = fz.Linear(512, 512, bias=False)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight.detach(), layer.weight.dequantize())


def test_compiled_repeated_and_reused_as_eager():
    layer, x, dy = fz.Linear(48, 80), torch.randn(64, 48), torch.randn(64, 80)
    want = run(layer, x, dy)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = run(layer, x, dy)
    with fz.reuse_quantized_weights(layer):
        run(layer, x, dy)
        reused = run(layer, x, dy)
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    with fz.autocast(recipe=SQUARE):
        y = compiled(leaf)
    y.backward(dy)
    in_graph = y.detach(), leaf.grad, layer.weight.grad
    for other in (again, reused, in_graph):
        ref.assert_equal(other, want)


def test_grouped_weights():
    def mlp():
        return fz.Sequential(
            fz.GroupedLinear(2, 256, 512, bias=False, single_grouped_weight=True),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(2, 256, 256, bias=False, single_grouped_weight=True),
        )

    sizes, x = torch.tensor([256, 256]), torch.randn(512, 256)
    extra = sizes, torch.rand(512), sizes
    module = mlp()
    with fz.autocast(recipe=SQUARE):
        y = module(x, *extra)

    def product(op, rows):
        weights = [dequantize(quantize(w, nvfp4((16, 16)))).double() for w in op.weight.detach()]
        parts = zip(rows.split(256), weights, strict=True)
        return torch.cat([dequantize(quantize(part, nvfp4())).double() @ w.T for part, w in parts])

    gate, linear = product(module[0], x).chunk(2, -1)
    activation = gate.sigmoid() * gate * linear * extra[1].double()[:, None]
    out = product(module[2], activation.float())
    # Rounding of the activation may turn few elements.
    close = (y.detach().double() - out).abs() <= 1e-4 * out.abs().max()
    assert close.float().mean() > 0.99
