"""Quantized tensors behave as tensors, and as parameters."""

import copy
import io
import pickle

import pytest
import reference as ref
import safetensors.torch
import torch
from number_formats import each_format
from torch import nn

from fusible import recipes
from fusible.recipes import hadamard
from fusible.recipes.formats import E4M3, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible.recipes.quantization import dequantize, quantize


def values(rows=128, columns=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.bfloat16)


def make(fmt, x=None, *, rowwise=True, columnwise=True):
    x = values() if x is None else x
    return recipes.Quantizer(fmt, rowwise=rowwise, columnwise=columnwise)(x)


@each_format
def test_values_are_those_of_the_functions(fmt):
    q = make(fmt)
    for columnwise in (False, True):
        quantized = quantize(values(), fmt, columnwise=columnwise)
        want = dequantize(quantized, torch.bfloat16)
        if columnwise and fmt.hadamard:
            want = hadamard.inverse(dequantize(quantized, torch.float32)).bfloat16()
        assert torch.equal(q.dequantize(columnwise=columnwise), want)
    assert q.fp8_dtype == fmt.element.dtype
    assert fmt.name in repr(q)
    assert str(fmt.element.dtype) in repr(q)


@each_format
def test_detach_clone_and_copy(fmt):
    q = make(fmt)
    assert q.detach().rowwise_data.data_ptr() == q.rowwise_data.data_ptr()
    twin = q.clone()
    ref.assert_same_bits(twin.pieces(), q.pieces())
    other = make(fmt, values(seed=1))
    assert twin.copy_(other) is twin
    ref.assert_same_bits(twin.pieces(), other.pieces())
    ref.assert_same_bits(q.pieces(), make(fmt).pieces())
    twin.copy_(values(seed=2))
    ref.assert_same_bits(twin.pieces(), make(fmt, values(seed=2)).pieces())
    plain = torch.empty(128, 256, dtype=torch.bfloat16)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize())
    ref.assert_same_bits(copy.deepcopy(q).pieces(), q.pieces())


def test_shared_memory():
    q = make(mxfp8())
    expected = {name: piece.clone() for name, piece in q.pieces().items()}
    assert not q.is_shared()
    assert nn.Parameter(q, requires_grad=False).share_memory_().is_shared()
    assert q.is_shared()
    ref.assert_same_bits(q.pieces(), expected)


def test_copy_between_formats_requantizes_the_values():
    q, other = make(mxfp8()), make(fp8_tensor(), values(seed=3))
    q.copy_(other)
    ref.assert_same_bits(q.pieces(), make(mxfp8(), other.dequantize()).pieces())


def test_a_failed_copy_writes_nothing():
    q = make(mxfp8())
    with pytest.raises(ValueError, match=r"shape \(128, 256\), got \(64, 256\); nothing was"):
        q.copy_(values(64))
    with pytest.raises(ValueError, match="nothing was written"):
        q.copy_(make(mxfp8(), values(64)))
    ref.assert_same_bits(q.pieces(), make(mxfp8()).pieces())


def test_to_keeps_the_format_for_nominal_dtypes_and_gives_values_for_others():
    q = make(mxfp8())
    half = q.to(torch.float16)
    assert isinstance(half, recipes.QuantizedTensor)
    assert half.dtype == torch.float16
    ref.assert_same_bits(half.pieces(), q.pieces())
    reference = q.to(device="cpu", dtype=torch.float64)
    assert type(reference) is torch.Tensor
    assert torch.equal(reference, q.dequantize().double())
    assert q.double().dtype == torch.float64
    assert q.to("meta").rowwise_data.is_meta


@pytest.mark.parametrize("fmt", [fp8_tensor(), nvfp4()])
def test_view_keeps_matrices_that_have_scales(fmt):
    x = values(256, 256).view(2, 128, 256)
    q = make(fmt, x)
    for columnwise in (False, True):
        want = torch.stack([make(fmt, m).dequantize(columnwise=columnwise) for m in x])
        assert torch.equal(q.dequantize(columnwise=columnwise), want)
        seen = q.view(2, 1, 128, 256)
        assert torch.equal(seen.dequantize(columnwise=columnwise), want.view(2, 1, 128, 256))
    assert torch.equal(q.view(256, 256), q.dequantize().view(256, 256))
    with recipes.no_implicit_dequantize(), pytest.raises(ValueError, match="keep its matrices"):
        q.view(256, 256)


@pytest.mark.parametrize("fmt", [mxfp8(), fp8_block(), fp8_block(E4M3, (128, 128))])
def test_view_of_whole_blocks(fmt):
    x = values(256, 256)
    q = make(fmt, x)
    for shape in [(2, 128, 256), (-1, 256), (256, 256), (2, -1, 256)]:
        seen = q.view(shape)
        want = x.view(shape)
        assert seen.shape == want.shape
        for columnwise in (False, True):
            got = seen.dequantize(columnwise=columnwise)
            assert torch.equal(got.view(256, 256), q.dequantize(columnwise=columnwise))
    for shape in [(512, 128), (128, 512), (32, 8, 256)]:
        assert not isinstance(q.view(shape), recipes.QuantizedTensor)
        assert torch.equal(q.view(shape), q.dequantize().view(shape))
        with recipes.no_implicit_dequantize(), pytest.raises(ValueError, match="whole blocks"):
            q.view(shape)


def test_flatten_and_unflatten():
    q = make(nvfp4())
    names, meta = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    again = recipes.QuantizedTensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())
    ref.assert_same_bits(again.pieces(), q.pieces())
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(q)


def test_a_quantized_tensor_crosses_compile():
    def scaled(q, x):
        return q.dequantize(torch.float32) * 2 + x

    q, x = make(mxfp8()), torch.ones(128, 256)
    got = torch.compile(scaled, fullgraph=True, backend="aot_eager")(q, x)
    assert torch.equal(got, scaled(q, x))


@pytest.mark.parametrize(
    "update",
    [
        lambda q: q.mul_(0.5),
        lambda q: q.add_(values(seed=5), alpha=-0.1),
        lambda q: q.addcdiv_(values(seed=5), values(seed=6).abs() + 1, value=-0.1),
        lambda q: q.lerp_(values(seed=5), 0.3),
        lambda q: q.zero_(),
        lambda q: q.fill_(3.0),
        lambda q: q.clamp_(-1, 1),
        lambda q: q.normal_(generator=torch.Generator().manual_seed(1)),
    ],
)
@each_format
def test_in_place_operations_requantize_and_return_the_tensor(fmt, update):
    q = make(fmt)
    plain = q.dequantize()
    pointer = q.rowwise_data.data_ptr()
    assert update(q) is q
    update(plain)
    assert q.rowwise_data.data_ptr() == pointer
    ref.assert_same_bits(q.pieces(), make(fmt, plain).pieces())


def test_elementwise_operations_and_reductions_read_values():
    q = make(mxfp8())
    plain = q.dequantize()
    for function in (
        lambda t: t + 1,
        lambda t: 2 * t,
        lambda t: t.abs().amax(),
        lambda t: t.sum(),
        torch.linalg.vector_norm,
        lambda t: t.isfinite().all(),
        lambda t: torch.ones(128, 256).add_(t),
    ):
        got = function(q)
        assert type(got) is torch.Tensor
        assert torch.equal(got, function(plain))


def test_implicit_dequantizing_is_counted_and_can_be_forbidden():
    q = make(mxfp8())
    plain = q.dequantize()
    for function in (
        lambda t: t @ values().mT,
        lambda t: t[0],
        lambda t: torch.cat((t, t)),
        lambda t: t.t(),
    ):
        before = recipes.implicit_dequantizes()
        with torch.profiler.profile() as profile:
            assert torch.equal(function(q), function(plain))
        assert recipes.implicit_dequantizes() > before
        assert any(e.key.startswith("implicit_dequantize(aten.") for e in profile.key_averages())
        with (
            recipes.no_implicit_dequantize(),
            pytest.raises(NotImplementedError, match=r"call \.dequantize\(\) first"),
        ):
            function(q)
    before = recipes.implicit_dequantizes()
    with recipes.no_implicit_dequantize():
        for function in (
            lambda t: t.clone(),
            lambda t: t.detach(),
            lambda t: t.view(2, 64, 256),
            lambda t: t.to(torch.float16),
            lambda t: t.dequantize(),
            lambda t: t[:64],
            torch.zeros_like,
            lambda t: t.copy_(values()),
            lambda t: t.fill_(2),
            lambda t: t.new_empty_strided((4, 2), (2, 1)),
        ):
            function(q)
    assert recipes.implicit_dequantizes() == before


def test_conversions_go_through_the_nominal_dtype():
    x = values(16, 32).clamp(-1, 1)
    x[0, 0] = 1  # the scale is 1 / 448, which no BF16 is
    q = make(fp8_tensor(), x)
    assert not torch.equal(q.dequantize(torch.float32), q.dequantize().float())
    for dtype in (torch.float64, torch.complex64, torch.int32, torch.bool):
        assert torch.equal(q.to(dtype), q.dequantize().to(dtype))


@each_format
def test_quantizing_records_nothing_for_autograd(fmt):
    q = make(fmt, values().requires_grad_())
    assert not any(piece.requires_grad for piece in q.pieces().values())
    assert not q.requires_grad


def test_a_missing_use_raises():
    q = make(mxfp8(), rowwise=True, columnwise=False)
    with pytest.raises(ValueError, match="column-wise use needs column-wise data"):
        q.dequantize(columnwise=True)
    with pytest.raises(ValueError, match="got neither"):
        make(mxfp8(), rowwise=False, columnwise=False)
    saved = make(mxfp8(), rowwise=False, columnwise=True)
    assert torch.equal(saved.dequantize(), saved.dequantize(columnwise=True))


# --- As a parameter ------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, fmt=None):
        super().__init__()
        if fmt is None:
            self.weight = nn.Parameter(values())
        else:
            self.weight = nn.Parameter(make(fmt))
        recipes.register_state_hooks(self)

    def forward(self, x):
        weight = self.weight
        if isinstance(weight, recipes.QuantizedTensor):
            weight = weight.dequantize()
        return x @ weight.mT


def test_gradients_reach_a_quantized_parameter():
    layer, x = Layer(mxfp8()), values(4)
    layer(x).sum().backward()
    layer(x).sum().backward()
    plain = nn.Parameter(layer.weight.dequantize().detach())
    (x @ plain.mT).sum().backward()
    (x @ plain.mT).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16
    assert torch.equal(layer.weight.grad, plain.grad)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, recipes.QuantizedTensor)


def test_a_quantized_gradient_survives_into_grad():
    plain = nn.Parameter(values())
    plain.grad = make(mxfp8(), values(seed=1))
    assert isinstance(plain.grad, recipes.QuantizedTensor)
    (plain * 1.0).sum().backward()
    # Autograd accumulates in place, so the sum is in the format of the gradient it found.
    total = make(mxfp8(), values(seed=1)).dequantize() + 1
    ref.assert_same_bits(plain.grad.pieces(), make(mxfp8(), total).pieces())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_updates_requantize(optimizer):
    layer = Layer(mxfp8())
    plain = nn.Parameter(layer.weight.dequantize().detach())
    ours, theirs = OPTIMIZERS[optimizer]([layer.weight]), OPTIMIZERS[optimizer]([plain])
    for step in range(3):
        layer.weight.grad = values(seed=step + 10)
        plain.grad = values(seed=step + 10)
        before = layer.weight
        ours.step()
        theirs.step()
        assert layer.weight is before
    # The plain weight is not rounded between the updates: equal within the format's resolution.
    error = (layer.weight.dequantize() - plain).float().norm() / plain.float().norm()
    assert error < 0.05
    assert not torch.equal(layer.weight.dequantize(), make(mxfp8()).dequantize())


def test_an_update_through_data_reaches_the_parameter():
    layer = Layer(mxfp8())
    layer.weight.data.copy_(values(seed=9))
    ref.assert_same_bits(layer.weight.pieces(), make(mxfp8(), values(seed=9)).pieces())
    layer.weight.data.mul_(2)
    assert torch.equal(layer.weight.dequantize(), make(mxfp8(), values(seed=9)).dequantize() * 2)


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [(nn.Module.half, torch.float16), (nn.Module.float, torch.float32)],
)
def test_module_conversion_keeps_the_format(convert, dtype):
    layer = Layer(mxfp8())
    convert(layer)
    assert isinstance(layer.weight, recipes.QuantizedTensor)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.dtype == dtype
    assert layer.weight.fp8_dtype == torch.float8_e4m3fn
    ref.assert_same_bits(layer.weight.pieces(), make(mxfp8()).pieces())
    layer(values(4).to(dtype)).sum().backward()
    assert layer.weight.grad.dtype == dtype


@each_format
def test_save_and_load_as_plain_tensors(fmt, tmp_path):
    layer = Layer(fmt)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(type(t) is torch.Tensor for t in state.values())
    assert {"weight.values", "weight.scale", "weight.format"} <= state.keys()
    for target in (Layer(fmt), Layer(mxfp8()), Layer()):
        target.load_state_dict(dict(state))
        if target.weight.shape and isinstance(target.weight, recipes.QuantizedTensor):
            if target.weight.format == fmt:
                ref.assert_same_bits(target.weight.pieces(), layer.weight.pieces())
        else:
            assert torch.equal(target.weight, layer.weight.dequantize())
    assigned = Layer()
    assigned.load_state_dict(dict(state), assign=True)
    ref.assert_same_bits(assigned.weight.pieces(), layer.weight.pieces())


def test_a_high_precision_state_loads_into_a_quantized_parameter():
    layer, plain = Layer(mxfp8()), Layer()
    with torch.no_grad():
        plain.weight.copy_(values(seed=7))
    layer.load_state_dict(plain.state_dict())
    ref.assert_same_bits(layer.weight.pieces(), make(mxfp8(), values(seed=7)).pieces())


@each_format
def test_safetensors(fmt, tmp_path):
    layer = Layer(fmt)
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "state.safetensors")
    state = safetensors.torch.load_file(tmp_path / "state.safetensors")
    target = Layer(fmt)
    with torch.no_grad():
        target.weight.zero_()
    target.load_state_dict(dict(state))
    ref.assert_same_bits(target.weight.pieces(), layer.weight.pieces())
    plain = Layer()
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, layer.weight.dequantize())


@pytest.mark.parametrize("saved", [False, True], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("fmt", [mxfp8(), fp8_block(E4M3, (128, 128)), nvfp4()], ids=str)
def test_pickled(fmt, saved):
    """With what others have set on a parameter, and what two of them share."""
    parameter = nn.Parameter(make(fmt))
    parameter.main_grad = torch.ones(3)
    grouped = recipes.group_quantize(values(), recipes.MXFP8Quantizer(), 2)
    given = [parameter, parameter, make(fmt), grouped]
    if saved:
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        first, second, plain, groups = torch.load(file, weights_only=False)
    else:
        first, second, plain, groups = pickle.loads(pickle.dumps(given))
    assert first is second
    assert isinstance(first, nn.Parameter)
    assert first.requires_grad
    assert torch.equal(first.main_grad, torch.ones(3))
    for got, want in ((first, parameter), (plain, make(fmt)), (groups, grouped)):
        assert type(got) is type(want)
        assert (got.format, got.shape, got.dtype) == (want.format, want.shape, want.dtype)
        ref.assert_same_bits(got.pieces(), want.pieces())
        assert torch.equal(got.dequantize(), want.dequantize())
    assert not plain.requires_grad
    assert groups.uniform == grouped.uniform


def test_unknown_formats_are_refused():
    state = recipes.tensor_state(make(mxfp8()))
    text = bytes(state["format"].tolist()).replace(b"e8m0_up", b"e9m9_up")
    state["format"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(ValueError, match="this version of fusible"):
        recipes.tensor_from_state(state)


def test_quantized_model_init():
    with recipes.quantized_model_init(preserve_high_precision_init_val=True):
        kept = recipes.weight_parameter(values())
        with recipes.quantized_model_init(enabled=False):
            plain = recipes.weight_parameter(values())
    with recipes.quantized_model_init(recipe=recipes.Float8BlockScaling()):
        block = recipes.weight_parameter(values())
    outside = recipes.weight_parameter(values())
    assert torch.equal(kept.get_high_precision_init_val(), values())
    kept.clear_high_precision_init_val()
    assert kept.get_high_precision_init_val() is None
    assert block.get_high_precision_init_val() is None
    ref.assert_same_bits(kept.pieces(), make(mxfp8()).pieces())
    ref.assert_same_bits(block.pieces(), make(fp8_block(E4M3, (128, 128))).pieces())
    for parameter in (plain, outside):
        assert not isinstance(parameter, recipes.QuantizedTensor)
    assert all(isinstance(p, nn.Parameter) for p in (kept, plain, block, outside))
