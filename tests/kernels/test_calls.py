"""Ops are called directly where nothing is there to see the call, and through PyTorch elsewhere."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import reference as ref
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusible as fz
from fusible import calls, recipes
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.library import define
from fusible.recipes import quantize_ops
from fusible.recipes.formats import fp8_block, mxfp8, nvfp4
from fusible.recipes.matrix import Uses
from fusible.recipes.quantize_ops import Implementation, dequantize_matrix, quantize_matrix
from fusible.testing import assume_target

FORMAT = mxfp8()
OPS = ["fusible::quantize", "fusible::dequantize"]


class Dispatched(TorchDispatchMode):
    """Notes the ops of this library that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        note(self.seen, func)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes the ops of this library that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        note(self.seen, func)
        return func(*args, **(kwargs or {}))


def note(seen, func):
    if isinstance(func, torch._ops.OpOverload) and func.namespace == "fusible":
        seen.append(func._schema.name)


@pytest.fixture
def direct(monkeypatch):
    """Names of the direct calls, of tensors that say they are on CUDA."""
    made = []

    def noted(function):
        return lambda *given: made.append(function.__name__) or function(*given)

    stand_in = Implementation(*[noted(function) for function in quantize_ops._by_formulas])
    monkeypatch.setattr(quantize_ops, "_on_cuda", stand_in)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    return made


def round_trip(x):
    row, _ = quantize_matrix(x, FORMAT, rowwise=True, columnwise=False)
    return dequantize_matrix(row)


PREDICATES = ("is_traced", "is_intercepted", "is_fake", "is_direct", "may_cache")
_, _LINES = calls.__doc__.split(f"{'':30}{PREDICATES[0]}")
TABLE = dict(re.findall(r"^ {4}(\S.*?) {2,}(.*)$", _LINES, re.MULTILINE))
"""What each predicate gives, by where it is called."""
SCOPES = {
    "eager": nullcontext,
    "eager, gradients enabled": torch.enable_grad,
    "CUDA graph capture": lambda: patch.object(calls, "capturing", lambda: True),
    "torch function mode": Called,
    "forward AD": forward_ad.dual_level,
    "dispatch mode": Dispatched,
    "fake mode": FakeTensorMode,
}


def answers(x, names):
    return ["yes" if getattr(calls, n)(*[x] * (n == "is_direct")) else "no" for n in names]


def test_the_table_of_predicates_is_right(direct):
    x = torch.randn(4)
    *scopes, compiled = TABLE
    scopes.remove("torch.func")
    assert scopes == [*SCOPES]
    with torch.no_grad():
        for where in scopes:
            with SCOPES[where]():
                assert answers(x, PREDICATES) == TABLE[where].split(), where
        found = []
        torch.func.vmap(lambda t: found.append(answers(x, PREDICATES)) or t)(torch.ones(2))
        assert found == [TABLE["torch.func"].split()]
        names = [name for name in PREDICATES if name != "is_fake"]
        # Dynamo makes constants of the answers.
        torch.compile(lambda t: (t + 1, found.append(answers(t, names))), backend="eager")(x)
    want = TABLE[compiled].split()
    assert want.pop(2) == "-"
    assert found[1:] == [want]


def test_nothing_stands_between(direct):
    x = torch.randn(4, 64)
    want = round_trip(x)
    assert direct == []  # gradients are enabled
    with torch.no_grad():
        got = round_trip(x)
    assert direct == ["quantize_by_formulas", "dequantize_by_formulas"]
    assert torch.equal(got, want)


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_modes_see_the_ops(direct, mode):
    with torch.no_grad(), mode() as noting:
        round_trip(torch.randn(4, 64))
    assert noting.seen == OPS
    assert direct == []


def test_fake_tensors_go_to_the_ops(direct):
    fake = FakeTensorMode()
    for scope in (fake, nullcontext()):
        with torch.no_grad(), fake:
            x = torch.empty(4, 64)
        with torch.no_grad(), scope:
            got = round_trip(x)
        assert got.shape == (4, 64)
        assert got.fake_mode is fake
    assert direct == []


def test_what_is_compiled_has_the_ops(direct):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    x = torch.randn(4, 64)
    with torch.no_grad():
        got = torch.compile(round_trip, fullgraph=True, backend=backend)(x)
        assert direct == []
        assert torch.equal(got, round_trip(x))
    (graph,) = graphs
    seen = []
    for node in graph.graph.nodes:
        note(seen, node.target)
    assert seen == OPS


def test_transforms_go_to_the_ops(direct):
    with torch.no_grad():
        torch.func.vjp(lambda t: t + round_trip(torch.randn(4, 64)), torch.randn(4, 64))
    assert direct == []


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_bad_input_is_refused_as_by_the_op(direct, scope):
    with scope(), pytest.raises(ValueError, match="columns must be a multiple of 2"):
        quantize_matrix(torch.randn(4, 47), nvfp4(), rowwise=True, columnwise=False)
    assert direct == []


class Pair(NamedTuple):
    """Stands for two arguments of an op."""

    first: int
    second: float


def test_library_ops_call_their_cuda_implementations(monkeypatch):
    """The first that supports the arguments; as an op where anything else would see the call."""

    def called_directly(
        x: torch.Tensor, pair: Pair, flag: bool = True, *, more: int = 0
    ) -> torch.Tensor:
        return x + pair.second if flag else x - pair.second

    def large(x, pair, flag=True, *, more=0):
        return NotImplemented if pair.first < 5 else x + 100 + more

    def even(x, pair, flag=True, *, more=0):
        return NotImplemented if pair.first % 2 else x + 10 + more

    op = define(called_directly, lambda x, *_: torch.empty_like(x), [large, even])
    schema = torch.ops.fusible.called_directly.default._schema
    assert str(schema) == (
        "fusible::called_directly(Tensor x, SymInt pair_first, float pair_second, bool flag) "
        "-> Tensor"
    )
    x = torch.zeros(2)
    with torch.no_grad():
        assert op(x, Pair(6, 0.5), more=2).tolist() == [0.5, 0.5]  # on the CPU
        assert op(x, pair=Pair(6, 0.5), flag=False).tolist() == [-0.5, -0.5]
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        assert op(x, Pair(6, 0.5)).tolist() == [100, 100]
        assert op(x, Pair(2, 0.5), more=3).tolist() == [13, 13]
        assert op(x, Pair(1, 0.5), flag=False).tolist() == [-0.5, -0.5]
        assert op(x=x, pair=Pair(6, 0.5)).tolist() == [100, 100]
        assert op(nn.Parameter(x), Pair(6, 0.5)).tolist() == [0.5, 0.5]
        with Dispatched() as noting:
            assert op(x, Pair(6, 0.5), more=2).tolist() == [0.5, 0.5]
    assert noting.seen == ["fusible::called_directly"]
    assert op(x, Pair(6, 0.5)).tolist() == [0.5, 0.5]
    torch.library.opcheck(torch.ops.fusible.called_directly.default, (x, 1, 0.5, True))


def test_a_list_that_is_written_to_is_found_direct(monkeypatch):
    """By its first tensor."""

    def written_directly(out: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        out[0].copy_(x)

    op = define(written_directly, lambda *_: None, [lambda out, x: out[0].copy_(x + 1) and None])
    schema = str(torch.ops.fusible.written_directly.default._schema)
    assert schema == "fusible::written_directly(Tensor(a!)[] out, Tensor x) -> ()"
    x = torch.zeros(1)
    with torch.no_grad():
        for cuda, written in ((False, 0), (True, 1)):
            monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _, cuda=cuda: cuda))
            out = torch.full((1,), 7.0)
            op([out], x)
            assert out.item() == written


# What is saved, column-wise of inputs and weights, is quantized; products read values.
SAVED_AND_MULTIPLIED = Uses(False, True, row_values=True, column_values=False)
MULTIPLIED_TWICE = Uses(False, False, row_values=True, column_values=True)


@pytest.fixture
def wanted(monkeypatch):
    """The uses for which the quantizer is called directly, where the context has no gradients."""
    wanted = []

    def quantize(*given):
        wanted.append(given[3])
        return quantize_ops.quantize_by_formulas(*given)

    stand_in = Implementation(quantize, quantize_ops.dequantize_by_formulas)
    monkeypatch.setattr(quantize_ops, "_on_cuda", stand_in)
    return wanted


@pytest.mark.parametrize("build", [fz.BasicLinear, partial(fz.GroupedLinear, 2, bias=False)])
def test_values_that_products_read_come_from_the_launch_that_quantizes(monkeypatch, wanted, build):
    op, recipe = build(64, 96), recipes.MXFP8BlockScaling()
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    sizes = [torch.tensor([20, 12])] * op.num_extra_inputs

    def step():
        with fz.autocast(recipe=recipe):
            y = op(x, *sizes)
        return y, *torch.autograd.grad(y, (x, *op.parameters()), dy)

    want = step()
    monkeypatch.setattr(quantize_ops, "is_direct", lambda _: not torch.is_grad_enabled())
    ref.assert_equal(step(), want)
    assert wanted == [SAVED_AND_MULTIPLIED, SAVED_AND_MULTIPLIED, MULTIPLIED_TWICE]
    with fz.ops.reuse_quantized_weights(op):  # quantized for every use
        step()
    assert wanted[3:] == [SAVED_AND_MULTIPLIED, Uses(True, True), MULTIPLIED_TWICE]


def test_an_activation_that_is_computed_again_is_quantized_for_the_weight_gradient_alone(
    monkeypatch, wanted
):
    mlp = fz.Sequential(
        fz.GroupedLinear(2, 64, 64, bias=False, dtype=torch.bfloat16),
        fz.ScaledSReLU(activation_recompute_in_mlp=True),
        fz.GroupedLinear(2, 64, 64, bias=False, dtype=torch.bfloat16),
    )
    x, scales = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), torch.rand(32)
    sizes = torch.tensor([20, 12])
    monkeypatch.setattr(quantize_ops, "is_direct", lambda _: not torch.is_grad_enabled())
    with assume_target("sm90"), fz.autocast(recipe=recipes.MXFP8BlockScaling()):
        mlp(x, sizes, scales, sizes).sum().backward()
    assert mlp.plan.fired == ("grouped_mlp_sm90",)
    fc1 = [SAVED_AND_MULTIPLIED, SAVED_AND_MULTIPLIED]  # its input and weights
    fc2 = [Uses(row_values=True), SAVED_AND_MULTIPLIED]
    grads_and_activation = [MULTIPLIED_TWICE, Uses(column=True), MULTIPLIED_TWICE]
    assert wanted == [*fc1, *fc2, *grads_and_activation]


def test_an_argument_that_an_op_does_not_have_is_refused():
    x, w = torch.randn(4, 8), torch.randn(1, 8, 8)
    ends = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(TypeError, match="grouped_glu takes 9 arguments, got 10"):
        grouped.grouped_glu(x, [w], ends, None, Glu(), None, True, None, None, fp8_block())
    with pytest.raises(TypeError, match="grouped_wgrad has no argument out_type"):
        grouped.grouped_wgrad(x, x, ends, out_type=w.dtype)
