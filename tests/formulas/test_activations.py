"""The table of activations: every row's backward, and where ops and kernels take rows from."""

import numpy as np
import pytest
import reference as ref
import simt
import torch

import fusible as fz
from fusible import activations
from fusible.activations import ACTIVATIONS, GATED, UNARY
from fusible.kernels.glu import Glu
from fusible.ops import activation

VALUES = {"limit": 0.5, "alpha": 1.3, "offset": 0.25, "beta1": 0.7, "beta2": 1.5}


def subclasses(kind):
    return [kind, *[found for part in kind.__subclasses__() for found in subclasses(part)]]


def ops_by_row(kind):
    """The public ops of each row of a table, by its name."""
    public = [op for op in vars(fz).values() if isinstance(op, type)]
    return {
        op: op.activation for op in subclasses(kind) if op in public and "activation" in vars(op)
    }


def every_op():
    return ops_by_row(activation.Activation)


@pytest.mark.parametrize("name", UNARY)
def test_a_functions_backward_is_its_derivative(name):
    row, (x, dy) = UNARY[name], torch.randn(2, 7, 6, dtype=torch.float64)
    for scales in (None, torch.rand(7, dtype=torch.float64)):
        given = (x,) if scales is None else (x, scales)
        _, derivative = torch.func.vjp(row.forward, *given)
        for mine, theirs in zip(row.backward(dy, *given), derivative(dy), strict=False):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("interleave", [None, 1, 3])
@pytest.mark.parametrize("name", GATED)
def test_a_gated_units_backward_is_its_derivative(name, interleave):
    row, x = GATED[name], torch.randn(5, 12, dtype=torch.float64)
    scales, dy = torch.rand(5, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    options = {option.keyword: VALUES[option.keyword] for option in row.options}
    _, derivative = torch.func.vjp(lambda *t: row.forward(*t, interleave, **options), x, scales)
    torch.testing.assert_close(row.backward(dy, x, scales, interleave, **options), derivative(dy))


def test_every_row_has_an_op_and_every_op_a_row():
    assert {name for op, name in every_op().items() if not op.gated} == set(UNARY)
    assert set(ops_by_row(activation.GatedOp).values()) == set(GATED)
    for op, name in every_op().items():
        row = ACTIVATIONS[name]
        facts = [option.attribute for option in row.options]
        assert op.fact_names[-len(facts) - 1 :] == ("activation", *facts)
        assert op.gated == (row.sides == 2)


def test_every_row_has_a_device_function_and_rules_take_every_op():
    in_front_end = {
        "srelu": "srelu",
        "swiglu": "swiglu",
        "clamped_qgeglu": "geglu",
        "situglu": "situglu",
    }
    assert in_front_end == activations.SM100_ACTIVATIONS
    device = pytest.importorskip("fusible.kernels.device.activations")
    assert list(device.FUNCTIONS) == list(ACTIVATIONS)
    assert set(activation.Activation.pattern_types) == set(every_op())


def functions(name, constants):
    """The device function on arrays of numpy: value and slopes of operands in FP32."""
    device = pytest.importorskip("fusible.kernels.device.activations")
    constants = [np.float32(constant) for constant in constants]
    return lambda *operands: device.evaluate(name, operands, constants)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_device_functions_are_the_formula_and_its_derivative(name, monkeypatch):
    """To a tenth of what rounding to BF16 changes, of values of any size."""
    row, options = ACTIVATIONS[name], {}
    for option in row.options:
        options[option.keyword] = VALUES[option.keyword]
    sizes = torch.logspace(-20, 6, 105, base=2)
    values = torch.cat([sizes, -sizes, torch.zeros(1), torch.tensor([0.5 - 2**-20, 0.5])])
    x = values[:, None]
    if row.sides == 2:
        x = torch.cartesian_prod(values, values)
    exact = x.double()
    dy = torch.ones(len(x), 1, dtype=torch.float64)
    want = row.forward(exact, **options)
    dx, _ = row.backward(dy, exact, **options)
    simt.emulate_activations(monkeypatch)
    constants = (*options.values(), 0.0, 0.0, 0.0)[:3]
    with np.errstate(all="ignore"):
        value, slopes = functions(name, constants)(*x.numpy().T)
    assert np.asarray(value).dtype == np.float32
    for mine, theirs in zip((value, *slopes), (want[:, 0], *dx.T), strict=True):
        # Where a slope crosses zero its terms cancel, in PyTorch's FP32 as well.
        got = torch.from_numpy(np.broadcast_to(mine, len(x)).copy())
        torch.testing.assert_close(got.double(), theirs, rtol=2**-12, atol=2**-18)


def test_relu_passes_nan(monkeypatch):
    simt.emulate_activations(monkeypatch)
    for name in ("relu", "srelu"):
        value, _ = functions(name, (0.0,) * 3)(np.float32([np.nan, -np.inf, np.inf]))
        assert [*value[1:]] == [0.0, np.inf]
        assert np.isnan(value[0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_options_are_checked_by_their_row(value):
    limit, beta2 = "limit of ScaledClampedQGeGLU must ", "beta2 of SiTUGLU must "
    with pytest.raises(ValueError, match=limit + "(be positive|not be NaN)"):
        fz.ScaledClampedQGeGLU(limit=value)
    for beta in (value, float("inf")):
        with pytest.raises(ValueError, match=beta2 + "(be finite and positive|not be NaN)"):
            fz.SiTUGLU(beta2=beta)
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="glu_linear_offset of ClampedSwiGLU must be a number"):
            fz.ClampedSwiGLU(glu_linear_offset=wrong)
    with pytest.raises(ValueError, match="glu_linear_offset of ClampedSwiGLU must not be NaN"):
        fz.ClampedSwiGLU(glu_linear_offset=float("nan"))


@pytest.mark.parametrize("name", GATED)
def test_grouped_products_give_a_row_its_options_in_order(name):
    row = GATED[name]
    x, scales, dy = torch.randn(5, 12), torch.rand(5), torch.randn(5, 6)
    options = {option.keyword: VALUES[option.keyword] for option in row.options}
    glu = Glu(name, 3, *options.values())
    assert glu.sides == 2
    assert torch.equal(glu.forward(x, scales), row.forward(x, scales, 3, **options))
    ref.assert_equal(glu.backward(dy, x, scales), row.backward(dy, x, scales, 3, **options))
