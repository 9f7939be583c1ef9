"""FSDP2 over two processes: the same training as in one process, step for step."""

import copy
import inspect

import pytest
import torch
from sharded import Case, build, outcomes
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible.recipes import QuantizedTensor

WORLD, MX, BF16 = 2, "MXFP8BlockScaling", torch.bfloat16
STORED = {"recipe": MX, "quantized": True}
# The case, and the rule that fires.
CASES = {
    Case(): None,
    Case(single=False): None,
    Case(single=False, delay=True): None,
    Case(mixed=True): None,
    Case(**STORED): None,
    Case(**STORED, single=False): None,
    Case(dtype=BF16, machine="sm90"): "grouped_mlp_sm90",
    Case(dtype=BF16, machine="sm90", dispatch=True): "moe_experts_sm90",
    Case(dtype=BF16, machine="sm90", **STORED): "grouped_mlp_sm90",
    Case(dtype=BF16, machine="sm100", **STORED, single=False): "grouped_mlp_sm100",
}
REPLICATED = Case(replicas=2, delay=True, **STORED)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return outcomes(WORLD, "cpu", tmp_path_factory.mktemp("fsdp"), list(CASES))


def check(outcome, tolerance=0.0):
    assert outcome.difference <= tolerance
    assert outcome.state_difference <= tolerance
    assert outcome.sharded
    assert all(outcome.moved)
    assert [way for way, same in outcome.restored.items() if not same] == []


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rank", range(WORLD))
def test_twenty_steps(seen, rank, case):
    outcome = seen[rank, str(case)]
    check(outcome)  # two gradients have one sum, whatever their order
    assert outcome.fired == ((CASES[case],) if CASES[case] else ())


def test_shards_in_replicas(tmp_path):
    """HSDP: two replicas of two shards. Four gradients are summed in another order."""
    seen = outcomes(4, "cpu", tmp_path, [REPLICATED])
    assert len(seen) == 4
    for outcome in seen.values():
        check(outcome, 1e-5)


@pytest.mark.filterwarnings("ignore")
def test_main_grads_are_refused(mesh):
    """fully_shard makes new parameters, and reduces what autograd gives them."""
    op = fz.GroupedLinear(2, 8, 8, accumulate_into_main_grad=True, single_grouped_weight=True)
    op.weight.main_grad = torch.zeros(op.weight.shape)
    fully_shard(op, mesh=mesh)
    assert not hasattr(op.weight, "main_grad")
    op.weight.main_grad = torch.zeros(op.weight.shape)
    with pytest.raises(ValueError, match=r"got none; .* give gradients to autograd under fully_sh"):
        op(torch.randn(4, 8), torch.tensor([1, 3])).sum().backward()


class Gate(fz.BasicOperation):
    """``x * sigmoid(w * x)``, by its formula."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8))

    def formula(self, x, w):
        return x * torch.sigmoid(w * x)


@pytest.mark.filterwarnings("ignore")
def test_checkpointed_formulas_with_every_op_sharded(mesh):
    module = fz.Sequential(Gate(), fz.Linear(8, 8), fz.GELU(), fz.Linear(8, 8), Gate())
    whole, x = copy.deepcopy(module), torch.randn(6, 8, requires_grad=True)
    whole(x).square().mean().backward()
    for op in module:
        if [*op.parameters()]:
            fully_shard(op, mesh=mesh)
    fully_shard(module, mesh=mesh)
    checkpoint(module, x, use_reentrant=False).square().mean().backward()
    for name, p in whole.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad)


@pytest.mark.filterwarnings("ignore")
def test_what_is_gathered_is_what_is_stored(mesh, monkeypatch):
    """Bytes of FP8 and of scales, not values."""
    module = build(Case(recipe=MX, quantized=True), "cpu")
    stored = sum(t.nbytes for op in module[::2] for t in op.weight.pieces().values())
    whole = copy.deepcopy(module)
    fully_shard(module, mesh=mesh)
    sent = []
    pre = QuantizedTensor.fsdp_pre_all_gather

    def counted(self, *args):
        inputs, metadata = pre(self, *args)
        sent.extend(inputs)
        return inputs, metadata

    counted.__signature__ = inspect.signature(pre)  # torch counts the parameters
    monkeypatch.setattr(QuantizedTensor, "fsdp_pre_all_gather", counted)
    with fz.autocast(recipe=fz.recipes.MXFP8BlockScaling()):
        splits = torch.tensor([2, 0, 1, 1])
        x, scales = torch.randn(4, 64), torch.rand(4)
        y = module(x, splits, scales, splits)
        assert torch.equal(y, whole(x, splits, scales, splits))
    assert {t.dtype for t in sent} == {torch.uint8}
    assert sum(t.nbytes for t in sent) == stored


def test_shards_of_quantized_tensors():
    fmt = fz.recipes.formats.mxfp8()
    q = QuantizedTensor.quantize(torch.randn(4, 64, 32), fmt, columnwise=True)
    for got, want in zip(q.chunk(2), q.dequantize().chunk(2), strict=True):
        assert torch.equal(got.dequantize(), want)
    matrix = QuantizedTensor.quantize(torch.randn(64, 32), fmt, columnwise=True)
    for columnwise in (False, True):
        for got, want in zip(
            matrix.chunk(2), matrix.dequantize(columnwise=columnwise).chunk(2), strict=True
        ):
            assert torch.equal(got.dequantize(columnwise=columnwise), want)
    zeros = matrix.new_zeros(32, 32)
    assert not zeros.dequantize().any()
    zeros.copy_(matrix[32:])
    assert torch.equal(zeros.dequantize(columnwise=True), matrix[32:].dequantize(columnwise=True))
    assert torch.equal(q.view(-1).dequantize(), q.dequantize().view(-1))
    flat = matrix.clone().view(-1)
    flat.mul_(2)
    assert torch.equal(flat.dequantize(), 2 * matrix.dequantize().view(-1))


@pytest.mark.parametrize(
    "cut",
    [
        lambda q: q.chunk(4)[1],
        lambda q: q[:, :8],
        lambda q: q[::2],
        lambda q: q.as_strided((32, 64), (64, 1)),
        lambda q: q.new_zeros(16, 32),
    ],
)
def test_shards_that_the_format_cannot_hold_are_of_values(cut):
    fmt = fz.recipes.formats.mxfp8()
    q = QuantizedTensor.quantize(torch.randn(64, 32), fmt, columnwise=True)
    assert not isinstance(cut(q), QuantizedTensor)
    assert torch.equal(cut(q), cut(q.dequantize()))
    flat = q.view(-1)
    assert torch.equal(flat.view(32, 64).dequantize(), q.dequantize().view(32, 64))
    with pytest.raises(ValueError, match="sharded evenly"):
        q.fsdp_pre_all_gather(Ranks(3), (64, 32), None, None, None)


def test_rows_that_share_a_scale_are_cut_as_values():
    fmt = fz.recipes.Float8CurrentScaling().format("weight")
    matrix = QuantizedTensor.quantize(torch.randn(64, 32), fmt)
    assert type(matrix.new_zeros(32, 32)) is torch.Tensor  # as the shards, which it is to pad
    for got, want in zip(matrix.chunk(2), matrix.dequantize().chunk(2), strict=True):
        assert not isinstance(got, QuantizedTensor)
        assert torch.equal(got, want)
    groups = QuantizedTensor.quantize(torch.randn(4, 64, 32), fmt)
    for got, want in zip(groups.chunk(2), groups.dequantize().chunk(2), strict=True):
        assert torch.equal(got.dequantize(), want)


class Ranks:
    """A mesh of some ranks."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks
