"""Stored FP8 weights: what of them is copied for the data gradient, and when."""

import copy
import gc
import weakref

import pytest
import torch
from checks import Recorded
from number_formats import BLOCK_FP8, each_fp8_recipe
from torch.autograd.graph import increment_version

import fusible as fz
from fusible.ops import operand_cache
from fusible.recipes.wrapper import UnseenWrites
from fusible.testing import assume_target

SPLITS = torch.tensor([20, 0, 28])
pytestmark = pytest.mark.usefixtures("nothing_captured")
BF16 = torch.bfloat16


@pytest.fixture
def nothing_captured(monkeypatch):
    """Whatever tests have run before in this process."""
    monkeypatch.setattr(UnseenWrites, "captured", False)


def of_weights(func, args):
    """The transposed copies of weights, and the stacks of their elements."""
    if func is torch.ops.fusible.transposed_fp8.default:
        yield "transposed"
    if func is torch.ops.aten.stack.default and args[0][0].dtype == torch.float8_e4m3fn:
        yield "stacked"


def stored(single, recipe=BLOCK_FP8):
    torch.manual_seed(0)
    with fz.quantized_model_init(recipe=recipe):
        return fz.GroupedLinear(3, 128, 256, bias=False, single_grouped_weight=single, dtype=BF16)


def step(op, recipe=BLOCK_FP8):
    """Output and input's gradient, and what was copied."""
    torch.manual_seed(1)
    x = torch.randn(50, 128, dtype=BF16, requires_grad=True)
    with assume_target("sm90"), fz.autocast(recipe=recipe), Recorded(of_weights) as copies:
        y = op(x, SPLITS)
    y.backward(torch.randn_like(y))
    for p in op.parameters():
        p.grad = None
    return [y.detach(), x.grad], copies.made


def fresh(op):
    """What a copy of the op gives, which has kept nothing."""
    return step(copy.deepcopy(op))[0]


def equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("single", [True, False])
def test_a_stored_weight_is_transposed_once_and_never_stacked(single):
    op = stored(single)
    want, copied = step(op)
    assert copied == ["transposed"]
    for _ in range(2):
        got, copied = step(op)
        assert copied == []
        assert equal(got, want)
    assert equal(fresh(op), want)


@pytest.mark.parametrize("single", [True, False])
def test_nothing_is_copied_without_gradients(single):
    op, x = stored(single), torch.ones(50, 128, dtype=BF16)
    copies = Recorded(of_weights)
    with torch.no_grad(), assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8), copies:
        op(x, SPLITS)
    assert copies.made == []


@torch.no_grad()
def changed_view(w):
    w[2:].mul_(3) if w.dim() == 3 else w[128:].mul_(3)


def stepped(**options):
    def update(w):
        w.grad = torch.ones(w.shape, dtype=w.dtype)
        torch.optim.AdamW([w], lr=0.5, **options).step()

    return update


def compiled(w):
    with torch.no_grad():
        torch.compile(lambda w: w.mul_(3), backend="aot_eager")(w)


def compiled_by_inductor(w):
    """Which writes the pieces without another version of theirs."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(w.pieces().values())):
        w.quantize_(3 * w.dequantize())
    increment_version(w)


def gathered(w):
    """As FSDP2 does, which fills the memory of an earlier gather."""
    pieces = tuple(w.pieces().values())
    with torch.autograd._unsafe_preserve_version_counter(pieces):
        w.quantize_(3 * w.dequantize())
    w.fsdp_post_all_gather([p.view(torch.uint8) for p in pieces], None, w.dtype, out=w)


def new_data(w):
    w.data = 3 * w.dequantize()


WRITES = [
    changed_view, compiled, compiled_by_inductor, gathered, new_data,
    stepped(foreach=False), stepped(foreach=True), stepped(fused=True),
    lambda w: w.quantize_(3 * w.dequantize()),
    lambda w: w.data.mul_(3),
    lambda w: w.detach().mul_(3),
    lambda w: w.rowwise_data.view(torch.uint8).bitwise_xor_(128),
    torch.nn.init.normal_,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("single", [True, False])
def test_every_write_is_seen_without_a_promise(write, single, fresh_compiler):
    op = stored(single)
    before, _ = step(op)
    write(op.weight if single else op.weight2)
    after, copied = step(op)
    assert copied.count("transposed") == 1
    assert not torch.equal(after[1], before[1])
    assert equal(after, fresh(op))


def test_a_graph_that_writes_weights_ends_caching(monkeypatch):
    op = stored(True)
    step(op)
    with monkeypatch.context() as patch:
        patch.setattr("fusible.recipes.wrapper.capturing", lambda: True)
        with torch.no_grad():
            op.weight.mul_(1)
    assert UnseenWrites.captured
    for _ in range(2):  # a replay may come at any time
        assert step(op)[1] == ["transposed"]


def test_a_capture_makes_copies_of_its_own(monkeypatch):
    op = stored(True)
    step(op)
    monkeypatch.setattr("fusible.calls.capturing", lambda: True)
    assert step(op)[1] == ["transposed"]


def test_weights_apart_in_memory_are_stacked_once():
    op = stored(False)
    for name, w in list(op.named_parameters()):
        setattr(op, name, torch.nn.Parameter(w.detach().clone()))
    want, copied = step(op)
    assert copied == ["stacked", "transposed"]
    got, copied = step(op)
    assert copied == []
    assert equal(got, want)
    with torch.no_grad():
        op.weight1.mul_(2)
    assert step(op)[1] == ["stacked", "transposed"]
    assert equal(step(op)[0], fresh(op))


@pytest.mark.parametrize("single", [True, False])
def test_a_weight_takes_two_bytes_per_value_and_frees_its_copy(single):
    op = stored(single)
    step(op)
    weights = list(op.parameters())
    cached = operand_cache._copies[id(weights[0].rowwise_data)]._cached.operands.values()
    ((_, operands),) = cached
    kept = [t for use in operands for t in use[:2]]
    tensors = [*kept, *[piece for w in weights for piece in w.pieces().values()]]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(memory.values()) <= 2.1 * sum(w.numel() for w in weights)
    made, anchor = weakref.ref(operands.column.data), id(weights[0].rowwise_data)
    del cached, operands, kept, tensors
    op.to(torch.device("meta"))  # as .cpu() frees memory of the GPU
    del weights
    gc.collect()
    assert made() is None
    assert anchor not in operand_cache._copies


def test_separate_weights_lie_side_by_side_with_versions_of_their_own():
    op = stored(False)
    weights = list(op.parameters())
    addresses = [w.rowwise_data.data_ptr() for w in weights]
    assert addresses == [addresses[0] + i * 256 * 128 for i in range(3)]
    with torch.no_grad():
        weights[1].mul_(2)
    assert [w.rowwise_data._version for w in weights] == [0, 1, 0]
    torch.manual_seed(0)
    plain = fz.GroupedLinear(3, 128, 256, bias=False, dtype=BF16)
    for name, w in plain.named_parameters():
        want = fz.recipes.QuantizedTensor.quantize(w.detach(), weights[0].format)
        factor = 2 if name == "weight1" else 1
        assert torch.equal(getattr(op, name).dequantize(), factor * want.dequantize())
    other = copy.deepcopy(op)
    assert all(
        torch.equal(a.dequantize(), b.dequantize())
        for a, b in zip(other.parameters(), op.parameters(), strict=True)
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("single", [True, False])
@each_fp8_recipe
def test_compiles_whole(single, recipe):
    """Compiled code compares no ids, and reads no addresses."""
    op = stored(single, recipe)
    want, _ = step(op, recipe)
    torch.manual_seed(1)
    x = torch.randn(50, 128, dtype=BF16, requires_grad=True)
    with assume_target("sm90"), fz.autocast(recipe=recipe):
        y = torch.compile(op, fullgraph=True, backend="aot_eager")(x, SPLITS)
    y.backward(torch.randn_like(y))
    assert equal([y, x.grad], want)
