"""A format that is only a row: everything that knows its element and its kind of scale works."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import reference as ref
import torch
from number_formats import OWN

import fusible as fz
from fusible import recipes
from fusible.recipes.encoding import DECODERS, ENCODERS, SCALE_ENCODERS, decode_scale, divide
from fusible.recipes.formats import E2M1, E4M3, NumberFormat
from fusible.recipes.quantization import dequantize, quantize
from fusible.testing import assume_target

SIZES = [37, 0, 20, 5]
each_row = pytest.mark.parametrize("row", OWN.values(), ids=OWN)


@dataclass(frozen=True)
class OfRows(recipes.Recipe):
    """One row for every operand."""

    row: NumberFormat

    name: ClassVar[str] = "of_rows"

    def format(self, role):
        return self.row


def blocks_alone(x, row):
    """The values of every block by itself, from its largest magnitude."""
    encode, decode = ENCODERS[row.element], DECODERS[row.element]
    outer = divide(x.abs().amax(), row.element.max * E4M3.max) if row.has_tensor_scale else None

    def values(part):
        scale, multiplier = SCALE_ENCODERS[row.scale](part.abs().amax(), row, outer)
        scale = decode_scale(scale)
        return decode(encode(part * multiplier)) * (scale if outer is None else scale * outer)

    return torch.stack([torch.cat([values(p) for p in r.split(row.block[1])]) for r in x])


@each_row
def test_values_are_those_of_each_block_alone(row):
    x = torch.randn(24, 128)
    want = blocks_alone(x, row)
    assert torch.equal(dequantize(quantize(x, row)), want)
    assert torch.equal(dequantize(quantize(x.mT.contiguous(), row, columnwise=True)).mT, want)
    q = recipes.Quantizer(row)(x)
    assert torch.equal(q.dequantize(), want)
    assert (want - x).norm() < 0.2 * x.norm()


@each_row
def test_a_grouped_linear_multiplies_what_the_row_holds(row):
    op = fz.GroupedLinear(len(SIZES), 64, 128, bias=False, single_grouped_weight=True)
    x, dy = torch.randn(sum(SIZES), 64, requires_grad=True), torch.randn(sum(SIZES), 128)
    with fz.autocast(recipe=OfRows(row)):
        y = op(x, torch.tensor(SIZES))
    y.backward(dy)

    def held(t, columnwise):
        return dequantize(quantize(t.detach(), row, columnwise=columnwise))

    start = 0
    for group, size in enumerate(SIZES):
        of = slice(start, start + size)
        w = op.weight[group]
        if not size:
            assert not op.weight.grad[group].any()
            continue
        want = held(x[of], False) @ held(w, False).mT
        torch.testing.assert_close(y[of], want)
        torch.testing.assert_close(x.grad[of], held(dy[of], False) @ held(w, True))
        want = held(dy[of], True).mT @ held(x[of], True)
        torch.testing.assert_close(op.weight.grad[group], want)
        start += size


def mlp():
    fc1, fc2 = (
        fz.GroupedLinear(
            len(SIZES), *f, bias=False, dtype=torch.bfloat16, single_grouped_weight=True
        )
        for f in ((128, 256), (128, 128))
    )
    return fz.Sequential(fc1, fz.ScaledSwiGLU(), fc2)


def step(module, recipe, x, *extra):
    x = x.detach().requires_grad_()
    with fz.autocast(recipe=recipe):
        y = module(x, *extra)
        plan = fz.explain(module, x, *extra)
    return [y, *torch.autograd.grad(y.float().square().sum(), (x, *module.parameters()))], plan


@each_row
def test_hopper_fuses_it_as_it_does_the_others(row):
    torch.manual_seed(0)
    module, sizes = mlp(), torch.tensor(SIZES)
    given = torch.randn(sum(SIZES), 128, dtype=torch.bfloat16), sizes, torch.rand(sum(SIZES)), sizes
    want, _ = step(module, OfRows(row), *given)
    exact, _ = step(module.float(), None, given[0].float(), *given[1:])
    module.bfloat16()
    with assume_target("sm90"):
        got, plan = step(module, OfRows(row), *given)
        _, known = step(module, recipes.MXFP8BlockScaling(), *given)
    assert plan.fired == known.fired != ()
    for a, b, e in zip(got, want, exact, strict=True):
        assert (a.float() - b.float()).norm() < (b.float() - e).norm()


@each_row
def test_stored_weights_and_their_checkpoint(row):
    def build():
        with fz.quantized_model_init(recipe=OfRows(row)):
            return fz.Linear(128, 64, bias=False)

    a, b = build(), build()
    b.load_state_dict(a.state_dict())
    assert b.weight.format == row
    ref.assert_same_bits(a.weight.pieces(), b.weight.pieces())
    x = torch.randn(3, 128)
    with fz.autocast(recipe=OfRows(row)):
        assert torch.equal(a(x), b(x))


@pytest.mark.parametrize("block", [(1, 48), (2, 32), (32, 16), (1, 1), (0, 0)])
def test_blocks_that_are_none(block):
    with pytest.raises(ValueError, match=r"block of odd must be None, \(1, n\) or \(n, n\)"):
        NumberFormat("odd", E4M3, block, "fp32")
    with pytest.raises(ValueError, match="a format with tensor scales must have blocks"):
        NumberFormat("odd", E2M1, None, "e4m3")


def test_elements_and_scales_that_are_none():
    with pytest.raises(TypeError, match=r"element of odd must be an Element.*got torch.float8"):
        NumberFormat("odd", torch.float8_e4m3fn, (1, 64), "fp32")
    with pytest.raises(ValueError, match=r"scale of odd must be one of e8m0_up.*got 'float32'"):
        NumberFormat("odd", E4M3, (1, 64), "float32")
