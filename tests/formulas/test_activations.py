"""The table of activations: every row's backward, and where ops and kernels take rows from."""

import pytest
import torch

import fusible as fz
from fusible import activations
from fusible.activations import GATED, UNARY
from fusible.kernels.glu import Glu
from fusible.kernels.sm90 import limits

VALUES = {"limit": 0.5, "alpha": 1.3, "offset": 0.25, "beta1": 0.7, "beta2": 1.5}


def subclasses(kind):
    return [kind, *[found for part in kind.__subclasses__() for found in subclasses(part)]]


def ops_by_row(kind):
    """The public ops of each row of a table, by its name."""
    public = [op for op in vars(fz).values() if isinstance(op, type)]
    return {op: op.activation for op in subclasses(kind) if op in public}


@pytest.mark.parametrize("name", UNARY)
def test_a_functions_backward_is_its_derivative(name):
    row, x, dy = UNARY[name], *torch.randn(2, 7, 6, dtype=torch.float64)
    _, derivative = torch.func.vjp(row.value, x)
    torch.testing.assert_close(row.backward(dy, x), *derivative(dy))


@pytest.mark.parametrize("interleave", [None, 1, 3])
@pytest.mark.parametrize("name", GATED)
def test_a_gated_units_backward_is_its_derivative(name, interleave):
    row, x = GATED[name], torch.randn(5, 12, dtype=torch.float64)
    scales, dy = torch.rand(5, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    options = {option.keyword: VALUES[option.keyword] for option in row.options}
    _, derivative = torch.func.vjp(lambda *t: row.forward(*t, interleave, **options), x, scales)
    torch.testing.assert_close(row.backward(dy, x, scales, interleave, **options), derivative(dy))


def test_every_row_has_an_op_and_every_op_a_row():
    from fusible.ops import activation

    assert set(ops_by_row(activation._Unary).values()) == set(UNARY)
    gated = ops_by_row(activation.GatedOp)
    assert set(gated.values()) == set(GATED)
    for op, name in gated.items():
        facts = [option.attribute for option in GATED[name].options]
        assert op.fact_names[-len(facts) - 1 :] == ("activation", *facts)


def test_kernels_take_what_their_rows_say():
    assert limits.ACTIVATIONS == activations.SM90 == ("swiglu", "clamped_qgeglu")
    assert activations.SM100 == {"swiglu": "swiglu", "clamped_qgeglu": "geglu"}
    device = pytest.importorskip("fusible.kernels.sm90.device.activations")
    assert device.FORWARD.keys() == device.BACKWARD.keys() == set(activations.SM90)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_options_are_checked_by_their_row(value):
    with pytest.raises(ValueError, match="limit of ScaledClampedQGeGLU must be positive, got"):
        fz.ScaledClampedQGeGLU(limit=value)
    for beta in (value, float("inf")):
        with pytest.raises(ValueError, match="beta2 of SiTUGLU must be finite and positive, got"):
            fz.SiTUGLU(beta2=beta)
    with pytest.raises(TypeError, match="glu_linear_offset of ClampedSwiGLU must be a number"):
        fz.ClampedSwiGLU(glu_linear_offset="1")


@pytest.mark.parametrize("name", GATED)
def test_grouped_products_give_a_row_its_options_in_order(name):
    row = GATED[name]
    x, scales, dy = torch.randn(5, 12), torch.rand(5), torch.randn(5, 6)
    options = {option.keyword: VALUES[option.keyword] for option in row.options}
    glu = Glu(name, 3, *options.values())
    assert torch.equal(glu.forward(x, scales), row.forward(x, scales, 3, **options))
    for mine, theirs in zip(
        glu.backward(dy, x, scales), row.backward(dy, x, scales, 3, **options), strict=True
    ):
        assert torch.equal(mine, theirs)
