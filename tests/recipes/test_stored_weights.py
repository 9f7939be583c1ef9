"""What users write to a weight takes effect on one that is stored quantized, or raises."""

import copy
from contextlib import nullcontext

import pytest
import reference as ref
import torch
from number_formats import each_recipe
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fusible as fz
from fusible import recipes
from fusible.recipes import QuantizedTensor
from fusible.testing import assume_target

NEW = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))


def stored(recipe=None):
    """A linear whose weight is stored quantized, and PyTorch's with the same values."""
    with fz.quantized_model_init(recipe=recipe):
        op = fz.BasicLinear(256, 128)
    plain = nn.Linear(256, 128, bias=False)
    plain.weight.data = op.weight.dequantize().detach()
    return op, plain


def rounded(values, op, columnwise=False):
    """Values as the format of the op's weight stores them."""
    made = QuantizedTensor.quantize(values.float(), op.weight.format, columnwise=True)
    return made.dequantize(columnwise=columnwise)


def assign(m):
    m.weight.data = NEW.clone()


def assign_bf16(m):
    m.weight.data = NEW.bfloat16()


def assign_other_shape(m):
    m.weight.data = NEW[:, :128]


def assign_to_alias(m):
    m.weight.data.data = NEW
    m.weight.detach().data = NEW


def set_all(m):
    m.weight[:] = NEW


def set_rows(m):
    m.weight[:128] = NEW[:128]


def set_number(m):
    m.weight[...] = 0.3


def set_row_of_all(m):
    m.weight.copy_(NEW[0])


def multiply_data(m):
    m.weight.data *= 0.3


def from_vector(m):
    vector_to_parameters(NEW.flatten(), m.parameters())


def average(m):
    torch.optim.swa_utils.get_ema_multi_avg_fn(0.25)(list(m.parameters()), [NEW], None)


def step(kind, **options):
    def update(m):
        m.weight.grad = NEW.clone()
        with torch.enable_grad():
            kind(m.parameters(), 0.1, **options).step()

    return update


def seeded(function, *args):
    def write(m):
        torch.manual_seed(7)
        function(m.weight, *args)

    return write


# All under no_grad.
WRITES = {
    "data =": assign,
    "data = BF16": assign_bf16,
    "data = another shape": assign_other_shape,
    "data = no whole blocks": lambda m: setattr(m.weight, "data", NEW[:-1, :-1]),
    "data =, of a parameter": lambda m: setattr(m.weight, "data", nn.Parameter(NEW).data),
    "vector_to_parameters": from_vector,
    "data.copy_": lambda m: m.weight.data.copy_(NEW),
    "copy_": lambda m: m.weight.copy_(NEW),
    "copy_ that broadcasts": set_row_of_all,
    "detach().copy_": lambda m: m.weight.detach().copy_(NEW),
    "view(-1).copy_": lambda m: m.weight.view(-1).copy_(NEW.view(-1)),
    "chunk(1)[0].copy_": lambda m: m.weight.chunk(1)[0].copy_(NEW),
    "[:] =": set_all,
    "[:128] =": set_rows,
    "[...] = number": set_number,
    "a row =": lambda m: m.weight.__setitem__(3, 0.0),
    "the last row =": lambda m: m.weight.__setitem__(-1, NEW[0]),
    "columns =": lambda m: m.weight.__setitem__((slice(None), slice(0, 32)), 0.0),
    "view_as": lambda m: m.weight.view_as(torch.empty(64, 512)).mul_(0.3),
    "data *=": multiply_data,
    "lerp_": lambda m: m.weight.lerp_(NEW, 0.25),
    "zero_": lambda m: m.weight.zero_(),
    "masked_fill_": lambda m: m.weight.masked_fill_(NEW > 0, 0),
    "clamp_": lambda m: m.weight.clamp_(-0.01, 0.01),
    "index_copy_": lambda m: m.weight.index_copy_(0, torch.tensor([3]), NEW[:1]),
    "mask =": lambda m: m.weight.__setitem__(NEW > 0, 0.5),
    "out=": lambda m: torch.mul(NEW, 2, out=m.weight),
    "_foreach_copy_": lambda m: torch._foreach_copy_([m.weight], [NEW]),
    "_foreach_lerp_": lambda m: torch._foreach_lerp_([m.weight], [NEW], 0.25),
    "moving average": average,
    "apply": lambda m: m.apply(lambda k: k.weight.data.fill_(0.5)),
    "_apply": lambda m: m._apply(lambda t: t * 2),
    "load_state_dict": lambda m: m.load_state_dict({"weight": NEW}),
    "SGD": step(torch.optim.SGD),
    "SGD, foreach": step(torch.optim.SGD, foreach=True),
    "AdamW, foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW, fused": step(torch.optim.AdamW, fused=True),
    "normal_": seeded(nn.init.normal_),
    "uniform_": seeded(nn.init.uniform_),
    "xavier_uniform_": seeded(nn.init.xavier_uniform_),
    "constant_": seeded(nn.init.constant_, 0.3),
    "eye_": seeded(nn.init.eye_),
}


@each_recipe
@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect(recipe, write):
    op, plain = stored(recipe)
    for m in (op, plain):
        with torch.no_grad():
            WRITES[write](m)
    weight = op.weight
    assert isinstance(weight, QuantizedTensor)
    assert (weight.dtype, weight.shape) == (plain.weight.dtype, plain.weight.shape)
    expected = rounded(plain.weight, op).to(weight.dtype)
    assert torch.equal(weight.dequantize(), expected)
    column = rounded(plain.weight, op, columnwise=True).to(weight.dtype)
    assert torch.equal(weight.dequantize(columnwise=True), column)
    if weight.shape == (128, 256):
        x = torch.randn(4, 256, dtype=weight.dtype)
        assert torch.equal(op(x), nn.functional.linear(x, expected))


REFUSED = {
    "set_": lambda w: w.set_(NEW),
    "data.set_": lambda w: w.data.set_(NEW),
    "erfinv_": lambda w: w.erfinv_(),
    "numpy": lambda w: w.detach().numpy().fill(0),
    "data = FP64": lambda w: setattr(w, "data", NEW.double()),
    "data = on another kind of device": lambda w: setattr(w, "data", NEW.to("meta")),
}


@each_recipe
@pytest.mark.parametrize("write", REFUSED)
def test_what_cannot_take_effect_raises_and_changes_nothing(recipe, write):
    op, _ = stored(recipe)
    before = {name: piece.clone() for name, piece in op.weight.pieces().items()}
    errors = NotImplementedError, TypeError, ValueError, RuntimeError
    with torch.no_grad(), pytest.raises(errors):
        REFUSED[write](op.weight)
    assert op.weight.shape == (128, 256)
    ref.assert_same_bits(op.weight.pieces(), before)


VIEWS_OF_VALUES = {
    "unbound rows": lambda w: w.unbind(0)[0],
    "a transposed view": lambda w: w.t(),
    "a diagonal": lambda w: w.diagonal(),
    "a row": lambda w: w[3],
    "as_strided": lambda w: w.as_strided((8,), (1,)),
    "columns": lambda w: w[:, 32:64],
    "another view": lambda w: w.view(64, 512),
    "bits": lambda w: w.view(torch.int32),
}


@each_recipe
@pytest.mark.parametrize("view", VIEWS_OF_VALUES)
def test_views_that_break_blocks_are_of_the_values(recipe, view):
    op, plain = stored(recipe)
    with torch.no_grad():
        part = VIEWS_OF_VALUES[view](op.weight)
        assert not isinstance(part, QuantizedTensor)
        assert torch.equal(part, VIEWS_OF_VALUES[view](plain.weight))
        part.zero_()
        VIEWS_OF_VALUES[view](plain.weight).zero_()
    want = op.weight.stored_alike(plain.weight.detach())
    assert torch.equal(op.weight.dequantize(), want.dequantize())


@each_recipe
def test_data_of_a_quantized_tensor_is_taken_as_it_is(recipe):
    op, _ = stored(recipe)
    other = QuantizedTensor.quantize(NEW, op.weight.format, columnwise=True)
    weight, alias = op.weight, op.weight.detach()
    weight.data = other
    for name, piece in weight.pieces().items():
        assert piece is other.pieces()[name]
    assert op.weight is weight
    assert not torch.equal(alias.dequantize(), weight.dequantize())  # as with ordinary tensors
    weight.data = weight.data.clone()
    assert torch.equal(weight.dequantize(), other.dequantize())


KEPT = {
    "data = of an alias": assign_to_alias,
    "data = itself": lambda m: setattr(m.weight, "data", m.weight),
    "data = its data": lambda m: setattr(m.weight, "data", m.weight.data),
    "half": lambda m: m.half(),
    "to(device)": lambda m: m.to("cpu"),
    "share_memory": lambda m: m.share_memory(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "a copy's values": lambda m: copy.deepcopy(m).weight.data.zero_(),
}


@each_recipe
@pytest.mark.parametrize("change", KEPT)
def test_what_leaves_the_values_keeps_the_bits(recipe, change):
    op, _ = stored(recipe)
    weight = op.weight
    before = {name: piece.clone() for name, piece in weight.pieces().items()}
    KEPT[change](op)
    assert op.weight is weight
    ref.assert_same_bits(weight.pieces(), before)


def test_data_may_change_the_format():
    op, _ = stored(recipes.MXFP8BlockScaling())
    nvfp4 = recipes.NVFP4BlockScaling()
    op.weight.data = QuantizedTensor.quantize(NEW, nvfp4.format("weight"), columnwise=True)
    assert op.weight.format == nvfp4.format("weight")
    assert list(op.state_dict()) != list(stored(recipes.MXFP8BlockScaling())[0].state_dict())
    x = torch.randn(16, 256)
    plain = fz.BasicLinear(256, 128)  # of the values, which another recipe quantizes
    plain.weight.data = op.weight.dequantize().detach()
    with fz.autocast():
        assert torch.equal(op(x), plain(x))
    with fz.autocast(recipe=nvfp4):
        assert op(x).isfinite().all()


def test_gradients_of_a_forward_before_data_was_assigned_are_of_the_values_then():
    op, plain = stored()
    x = torch.randn(4, 256, requires_grad=True)
    y = op(x)
    values = plain.weight.detach().clone()
    op.weight.data = NEW
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, values.sum(0).expand(4, -1))


def test_compiled_code_reads_assigned_data():
    op, _ = stored()
    compiled = torch.compile(op, fullgraph=True, backend="eager")
    x = torch.randn(4, 256)
    with torch.no_grad():
        compiled(x)
        op.weight.data = NEW
        torch.testing.assert_close(compiled(x), nn.functional.linear(x, rounded(NEW, op)))


@pytest.mark.parametrize("name", ["orthogonal_", "sparse_", "dirac_"])
@pytest.mark.parametrize("shape", [(64, 64), (4, 64, 64)])
def test_initializers_of_several_steps_write_what_ordinary_tensors_get(name, shape):
    refused = {("dirac_", 2), ("sparse_", 3)}  # by PyTorch, for these dimensions
    if (name, len(shape)) in refused:
        pytest.skip("not an initializer for this number of dimensions")
    fmt = fz.recipes.MXFP8BlockScaling().format("weight")
    weight = nn.Parameter(QuantizedTensor.quantize(torch.ones(shape), fmt, columnwise=True))
    value = torch.ones(shape)
    args = (0.1,) if name == "sparse_" else ()
    for t in (weight, value):
        torch.manual_seed(3)
        getattr(nn.init, name)(t, *args)
    # Each step is rounded to three bits, with the scale of its block.
    bound = value.abs().amax(-1, keepdim=True) / 8
    assert ((weight.dequantize() - value).abs() <= bound).all()
    assert torch.equal(weight == 0, value == 0) or name != "sparse_"


@pytest.mark.parametrize(("a", "b"), [(-2.0, 2.0), (2.0, 3.0)])
def test_a_truncated_normal_is_truncated_or_refused(a, b):
    fmt = fz.recipes.MXFP8BlockScaling().format("weight")
    weight = nn.Parameter(QuantizedTensor.quantize(torch.ones(256, 256), fmt, columnwise=True))
    torch.manual_seed(3)
    if torch.__version__ < "2.13":  # it writes uniform numbers first
        with pytest.raises(NotImplementedError, match="erfinv_"):
            nn.init.trunc_normal_(weight, a=a, b=b)
        return
    nn.init.trunc_normal_(weight, a=a, b=b)
    value = nn.init.trunc_normal_(torch.empty(256, 256), a=a, b=b)
    assert a <= weight.min()
    assert weight.max() <= b
    # The mean of 65536 numbers, and their rounding to three bits.
    assert (weight.mean() - value.mean()).abs() < 6 * value.std() / 256 + value.abs().mean() / 16


@each_recipe
@pytest.mark.parametrize("init_method", [None, nn.init.orthogonal_, nn.init.trunc_normal_])
def test_parameters_are_reset_in_high_precision(recipe, init_method):
    """Methods of several steps, and ones for matrices of a stack, too."""
    for make in (
        lambda: fz.BasicLinear(128, 128, init_method=init_method),
        lambda: fz.GroupedLinear(
            2, 128, 128, bias=False, init_method=init_method, single_grouped_weight=True
        ),
    ):
        torch.manual_seed(5)
        plain = make()
        torch.manual_seed(5)
        with fz.quantized_model_init(recipe=recipe):
            built = make()
        reset = copy.deepcopy(built)
        with torch.no_grad():
            reset.weight.zero_()
        torch.manual_seed(5)
        reset.reset_parameters()
        assert torch.equal(built.weight.dequantize(), rounded(plain.weight, built))
        assert torch.equal(reset.weight.dequantize(), built.weight.dequantize())


@each_recipe
def test_from_and_to_the_meta_device(recipe):
    with torch.device("meta"), fz.quantized_model_init(recipe=recipe):
        op = fz.BasicLinear(256, 128)
    op.weight.main_grad = "kept"
    op.to_empty(device="cpu")
    assert isinstance(op.weight, QuantizedTensor)
    assert all(piece.device.type == "cpu" for piece in op.weight.pieces().values())
    assert op.weight.main_grad == "kept"
    op.load_state_dict({"weight": NEW})
    assert torch.equal(op.weight.dequantize(), rounded(NEW, op))
    op.to("meta")
    assert all(piece.is_meta for piece in op.weight.pieces().values())


@each_recipe
def test_double_leaves_values_and_gradients(recipe):
    op, plain = stored(recipe)
    weight = op.weight
    weight.grad = NEW.clone()
    op.double()
    assert not isinstance(op.weight, QuantizedTensor)
    assert torch.equal(op.weight, plain.weight.double())
    assert torch.equal(op.weight.grad, NEW.double())
    assert isinstance(weight, QuantizedTensor)


def test_a_gradient_goes_where_its_weight_goes():
    op, _ = stored()
    op.weight.grad = NEW.clone()
    weight = op.weight
    op.bfloat16()
    assert op.weight is weight
    assert torch.equal(weight.grad, NEW.bfloat16())


def test_values_as_a_vector():
    op, plain = stored()
    assert torch.equal(parameters_to_vector(op.parameters()), plain.weight.flatten())
    vector_to_parameters(2 * plain.weight.detach().flatten(), op.parameters())
    assert torch.equal(op.weight.dequantize(), 2 * plain.weight)


@each_recipe
@pytest.mark.parametrize("meta", [False, True])
def test_assigned_high_precision_weights_are_quantized(recipe, meta):
    def made():
        with torch.device("meta" if meta else "cpu"), fz.quantized_model_init(recipe=recipe):
            return fz.Sequential(fz.Linear(256, 128))

    plain = {"0.weight": NEW.bfloat16(), "0.bias": torch.zeros(128)}
    module = made()
    module.load_state_dict(plain, assign=True)
    weight = module[0].weight
    assert isinstance(weight, QuantizedTensor)
    assert isinstance(weight, nn.Parameter)
    assert (weight.dtype, weight.device.type) == (torch.bfloat16, "cpu")
    assert torch.equal(weight.dequantize(), weight.stored_alike(NEW.bfloat16()).dequantize())
    again = made()
    again.load_state_dict(module.state_dict(), assign=True)
    assert isinstance(again[0].weight, QuantizedTensor)
    ref.assert_same_bits(again[0].weight.pieces(), weight.pieces())


@each_recipe
def test_from_the_meta_device_to_first_values(recipe):
    """The storage format stays, in any module; the first values are kept as without meta."""

    def made(device):
        with (
            torch.device(device),
            fz.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True),
        ):
            return fz.Sequential(fz.Linear(256, 128), fz.GroupedLinear(2, 128, 256, bias=False))

    torch.manual_seed(4)
    want = made("cpu")
    got = made("meta").to_empty(device="cpu")
    torch.manual_seed(4)
    for op in got:
        op.reset_parameters()
    for (name, mine), theirs in zip(got.named_parameters(), want.parameters(), strict=True):
        assert type(mine) is type(theirs), name
        assert torch.equal(torch.as_tensor(mine.detach() * 1), theirs.detach() * 1)
        if isinstance(mine, QuantizedTensor):
            kept = mine.get_high_precision_init_val()
            assert torch.equal(kept, theirs.get_high_precision_init_val())
    holder = nn.Module()
    holder.weight = nn.Parameter(want[0].weight.detach().to("meta"))
    holder.to_empty(device="cpu")
    assert isinstance(holder.weight, QuantizedTensor)
    assert holder.weight.format == want[0].weight.format


@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
def test_a_weight_among_stored_ones_may_be_an_ordinary_one(target):
    """Either the first or the last: all are read by their values."""
    recipe = recipes.MXFP8BlockScaling()
    with fz.quantized_model_init(recipe=recipe):
        op = fz.GroupedLinear(3, 64, 64, bias=False, dtype=torch.bfloat16)
    x, splits = torch.randn(12, 64).bfloat16(), torch.tensor([4, 3, 5])
    for replaced in ("weight0", "weight2"):
        other = copy.deepcopy(op)
        plain = torch.nn.Parameter(getattr(op, replaced).dequantize().detach())
        setattr(other, replaced, plain)
        for scope in (fz.autocast(recipe=recipe), nullcontext()):
            with scope, assume_target(target) if target != "cpu" else nullcontext():
                want, got = op(x, splits), other(x, splits)
            torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-7)
