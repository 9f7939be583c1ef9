"""NVFP4 as it is trained with: the Hadamard transform and stochastic rounding, by definition."""

import io
import math

import numpy as np
import pytest
import reference as ref
import torch
from number_formats import PLAIN
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes
from fusible.recipes import hadamard, philox
from fusible.recipes.formats import nvfp4
from fusible.recipes.quantization import dequantize, quantize
from fusible.recipes.quantize_ops import quantize_matrix, random_key

FULL = recipes.NVFP4BlockScaling()
ROUNDED = recipes.NVFP4BlockScaling(**PLAIN | {"disable_stochastic_rounding": False})
RHT, SR = nvfp4(hadamard=True), nvfp4(stochastic=True)
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
"""Of Transformer Engine, get_wgrad_sign_vector."""
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def matrix():
    """Transformer Engine's: the signs times the Hadamard matrix, times 1/4."""
    rows = [[(-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    return torch.tensor(SIGNS, dtype=torch.float64)[:, None] * torch.tensor(rows).double()


# --- the Hadamard transform -----------------------------------------------------------------------


def test_the_transform_is_that_of_transformer_engine():
    x = torch.randn(64, 24)
    want = (x.double().view(4, 16, 24).mT @ matrix()).mT.reshape(64, 24)
    torch.testing.assert_close(hadamard.transform(x).double(), want, rtol=0, atol=1e-6)
    whole = torch.randint(-8, 9, (2, 32, 6))  # sums are exact
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        got = hadamard.transform(whole.to(dtype))
        assert got.dtype == (torch.float32 if dtype == torch.float32 else torch.bfloat16)
        exact = (whole.double().view(2, 2, 16, 6).mT @ matrix()).mT.reshape(2, 32, 6)
        assert torch.equal(got.double(), exact)
        torch.testing.assert_close(hadamard.inverse(got), whole.float(), rtol=0, atol=1e-5)


def test_blocks_start_anew_at_every_group_and_short_ones_stay():
    x, ends = torch.randn(100, 8), [0, 5, 37, 37, 69, 90]
    got = hadamard.transform(x, torch.tensor(ends))
    start = 0
    for end in ends:
        assert torch.equal(got[start:end], hadamard.transform(x[start:end]))
        short = end - (end - start) % 16
        assert torch.equal(got[short:end], x[short:end])
        start = end
    assert torch.equal(got[90:], x[90:])
    torch.testing.assert_close(hadamard.inverse(got, torch.tensor(ends)), x)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_column_wise_form_is_that_of_the_transformed_values(grouped):
    x = torch.randn(75, 40, dtype=torch.bfloat16)
    ends = torch.tensor([3, 60, 60]) if grouped else None
    row, column = quantize_matrix(x, RHT, rowwise=True, columnwise=True, ends=ends)
    assert_same(row, quantize(x, nvfp4(), ends=ends))
    transformed = hadamard.transform(x, ends)
    assert_same(column, quantize(transformed, nvfp4(), columnwise=True, ends=ends))
    live = 75 if ends is None else 60
    if not grouped:  # its scale is that of the transformed values
        amax = transformed.float().abs().max()
        assert column.tensor_scale.item() == np.float32(amax.item()) / np.float32(2688)
    error = (dequantize(column) - transformed.float())[:live].norm() / transformed[:live].norm()
    assert error < 0.12


def assert_same(a, b):
    ref.assert_same_bits(list(a[:3]), list(b[:3]))


def test_values_of_tensors_are_those_before_the_transform():
    x = torch.randn(70, 64)
    q = recipes.NVFP4Quantizer(with_rht=True)(x)
    for columnwise in (False, True):
        error = (q.dequantize(columnwise=columnwise) - x).norm() / x.norm()
        assert error < 0.12
    sizes = torch.tensor([33, 0, 20])
    grouped = recipes.group_quantize(x, recipes.Quantizer(RHT), 3, sizes)
    error = (grouped.dequantize(columnwise=True) - x)[:53].norm() / x[:53].norm()
    assert error < 0.12
    assert not grouped.dequantize(columnwise=True)[53:].any()
    parts = (
        grouped.split_into_quantized_tensors()
        if hasattr(grouped, "split_into_quantized_tensors")
        else grouped.split()
    )
    for part, rows in zip(parts, x[:53].split([33, 0, 20]), strict=True):
        assert (part.dequantize(columnwise=True) - rows).norm() <= 0.12 * rows.norm()


def test_the_transform_spreads_an_outlier():
    """What it is for: beside one large number of a block, the others are not rounded to zero."""
    x = torch.randn(256, 64)
    x[::16] *= 50
    others = torch.arange(256) % 16 != 0
    plain = dequantize(quantize(x, nvfp4(), columnwise=True))
    spread = hadamard.inverse(dequantize(quantize(x, RHT, columnwise=True)))
    assert (plain[others] == 0).float().mean() > 0.6
    assert (spread[others] == 0).float().mean() < 0.4


# --- stochastic rounding --------------------------------------------------------------------------


def words(*numbers):
    return [torch.tensor(number) for number in numbers]


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, want):
    """kat_vectors of Random123, philox4x32 of 10 rounds."""
    assert [int(w) for w in philox.philox(words(*counter), words(*key))] == [*want]


def test_bytes_are_those_of_places():
    key = torch.tensor([-5, 2**40 + 3])
    for columnwise in (False, True):
        whole = philox.random_bytes(key, 40, 50, columnwise)
        assert torch.equal(whole[:7, :18], philox.random_bytes(key, 7, 18, columnwise))
        seed, offset = int(key[0]) % 2**64, int(key[1])
        halves = seed % 2**32, seed >> 32
        got = philox.philox(words(33 // 8, 21, offset % 2**32, offset >> 32), words(*halves))
        assert int(whole[21, 33]) == int(got[2 * columnwise + 33 % 8 // 4]) >> 8 * (33 % 4) & 255
    other = philox.random_bytes(key + 1, 40, 50, True)
    assert not torch.equal(other, whole)


def test_rounding_is_unbiased_and_keeps_what_the_format_has():
    # A column of 6 in each block and a block of 2688 make all scales one.
    numbers = torch.linspace(-6, 6, 15 * 25).view(25, 15)
    numbers[0, :8], numbers[1, :8] = torch.tensor(E2M1), -torch.tensor(E2M1)
    x = torch.cat((numbers, torch.full((25, 1), 6.0)), 1)
    x = torch.cat((x, torch.full((1, 16), 2688.0)))
    draws, total, square = 1200, torch.zeros_like(x), torch.zeros_like(x)
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws // 600):
        key = torch.randint(2**62, (2,), generator=generator)
        many = x.expand(600, *x.shape)
        values = dequantize(quantize(many, SR, key=key))
        total += values.sum(0)
        square += values.square().sum(0)
    lower = torch.tensor(E2M1)[
        torch.searchsorted(torch.tensor(E2M1), x.abs().clamp(max=6), right=True).clamp(1, 7) - 1
    ]
    index = torch.searchsorted(torch.tensor(E2M1), x.abs().clamp(max=6), right=True).clamp(1, 7)
    step = torch.tensor(E2M1)[index] - lower
    # 5 standard deviations of the mean of numbers that differ by a step, and 1/512 of one.
    bound = step * (5 * 0.5 / math.sqrt(draws) + 1 / 512)
    mean = total / draws
    assert ((mean - x).abs() <= bound)[:-1].all()
    exact = x[:2, :8]
    assert torch.equal(mean[:2, :8], exact)
    variance = square / draws - mean.square()
    p = (x.abs() - lower) / step
    assert ((variance - p * (1 - p) * step.square()).abs() <= 0.1 * step.square())[:-1].all()
    assert torch.equal(mean[-1], x[-1])


def test_signs_specials_and_the_tail():
    x = torch.randn(40, 32)
    x[3, 4], x[20, 7], x[30] = float("nan"), -float("inf"), 0
    key, ends = torch.tensor([1, 2]), torch.tensor([10, 19, 35])
    got = quantize(x, SR, ends=ends, key=key)
    values = dequantize(got)
    assert values[:10].isnan().all()
    assert values[19:35].isnan().all()
    assert (values[10:19] * x[10:19] >= 0).all()
    assert not values[35:].any()
    assert not got.data[35:].any()
    assert torch.equal(
        got.scale.view(torch.uint8), quantize(x, nvfp4(), ends=ends).scale.view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (None, "nvfp4_sr rounds by a key, got None"),
        (torch.zeros(2), r"key must be int64 of shape \(2,\) on cpu, .*, got torch.float32"),
        (torch.zeros(3, dtype=torch.int64), r"of shape \(3,\)"),
    ],
)
def test_keys(key, sentence):
    with pytest.raises(ValueError, match=sentence):
        quantize(torch.randn(4, 16), SR, key=key)
    with pytest.raises(ValueError, match=sentence):
        torch.ops.fusible.quantize(torch.randn(4, 16), None, key, *SR.as_constants(), True, False)


def test_library_ops():
    x, key = torch.randn(20, 32), torch.tensor([3, 4])
    for fmt in (SR, nvfp4(hadamard=True, stochastic=True)):
        arguments = x, torch.tensor([7, 20]), key, *fmt.as_constants(), True, True
        torch.library.opcheck(torch.ops.fusible.quantize.default, arguments)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.fusible.random_key.default, (x,), test_utils=tests)


# --- training -------------------------------------------------------------------------------------


def step(module, x, dy, recipe=FULL, seed=3):
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(seed)
    with fz.autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.parametrize("sizes", [None, [16, 5, 0, 43]])
def test_products(sizes):
    """Of operands quantized by the formats, the gradient by the key that is drawn."""
    options = {"bias": False}
    if sizes is None:
        module, call = fz.BasicLinear(48, 80), lambda m: m
    else:
        module = fz.GroupedLinear(4, 48, 80, single_grouped_weight=True, **options)
        call = None
    x, dy = torch.randn(64, 48), torch.randn(64, 80)
    run = module if call else lambda t: module(t, torch.tensor(sizes))
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    with fz.autocast(recipe=FULL):
        y = run(leaf)
    y.backward(dy)
    torch.manual_seed(3)
    key = random_key(dy)
    ends = None if sizes is None else torch.tensor(sizes).cumsum(0)
    fmt = FULL.format("grad")
    dy_row, dy_column = (
        dequantize(quantize(dy, fmt, columnwise=c, ends=ends, key=key)).double()
        for c in (False, True)
    )
    x_row, x_column = (
        dequantize(quantize(x, RHT, columnwise=c, ends=ends)).double() for c in (False, True)
    )
    weights = module.weight.detach().view(-1, 80, 48)
    w = [dequantize(quantize(w, nvfp4((16, 16)))).double() for w in weights]
    start = 0
    dw = module.weight.grad.view(-1, 80, 48)
    for group, size in enumerate([64] if sizes is None else sizes):
        of = slice(start, start + size)
        start += size
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(y.detach()[of].double(), x_row[of] @ w[group].T, **close)
        torch.testing.assert_close(leaf.grad[of].double(), dy_row[of] @ w[group], **close)
        torch.testing.assert_close(dw[group].double(), dy_column[of].T @ x_column[of], **close)


def test_seeds_repeat_a_step_and_others_do_not():
    module, x, dy = fz.Linear(48, 80), torch.randn(64, 48), torch.randn(64, 80)
    first = step(module, x, dy)
    ref.assert_equal(step(module, x, dy), first)
    other = step(module, x, dy, seed=4)
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_round_as_the_first(reentrant):
    """Dropout before the layer draws from the same generator."""
    module = fz.Sequential(fz.Linear(48, 64), torch.nn.Dropout(0.5), fz.Linear(64, 80))
    x, dy = torch.randn(64, 48), torch.randn(64, 80)

    def recomputed(t):
        return checkpoint(module, t, use_reentrant=reentrant)

    recomputed.zero_grad, recomputed.parameters = module.zero_grad, module.parameters
    ref.assert_equal(step(recomputed, x, dy), step(module, x, dy))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_draws_the_same():
    module = fz.Sequential(fz.BasicLinear(48, 64), fz.BasicLinear(64, 80))
    x, dy = torch.randn(64, 48), torch.randn(64, 80)
    compiled = torch.compile(module, fullgraph=True)
    ref.assert_equal(step(compiled, x, dy), step(module, x, dy))


@pytest.mark.parametrize(
    "module",
    [fz.Linear(48, 80), fz.Sequential(fz.RMSNorm(48), fz.Linear(48, 80, bias=False), fz.GELU())],
    ids=["bias", "norm and activation"],
)
def test_rows_of_three_dimensions(module):
    """Blocks of 16 rows begin where they do in all rows, also where matrices have 40 rows."""
    x, dy = torch.randn(4, 40, 48), torch.randn(4, 40, 80)
    recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    got = step(module, x, dy, recipe)
    want = step(module, x.flatten(0, 1), dy.flatten(0, 1), recipe)
    for t, expected in zip(got, want, strict=True):
        torch.testing.assert_close(t.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_draws_a_key_for_each_use_of_a_gradient():
    """PyTorch merges equal calls in a graph."""
    a, b = fz.BasicLinear(64, 64), fz.BasicLinear(64, 64)
    b.load_state_dict(a.state_dict())
    both, x, dy = nn.ModuleList([a, b]), torch.randn(64, 64), torch.randn(64, 64)
    both.forward = lambda x: a(x) + b(x)
    _, _, *grads = step(torch.compile(both, backend="aot_eager"), x, dy)
    assert not torch.equal(*grads)
    ref.assert_equal(grads, step(both, x, dy)[2:])


def test_stored_weights_and_state():
    with fz.quantized_model_init(recipe=FULL):
        module = fz.Linear(64, 32)
    assert module.weight.format == nvfp4((16, 16))
    x, dy = torch.randn(40, 64), torch.randn(40, 32)
    with fz.autocast(recipe=FULL):
        module(x.requires_grad_()).backward(dy)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = fz.Linear(64, 32)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.weight.detach(), module.weight.dequantize())
    for fmt in (RHT, nvfp4(hadamard=True, stochastic=True)):
        q = recipes.QuantizedTensor.quantize(x.detach(), fmt, columnwise=True)
        again = recipes.tensor_from_state(recipes.tensor_state(q))
        assert again.format == fmt
        ref.assert_same_bits([*again.pieces().values()], [*q.pieces().values()])


def test_what_the_backward_reads_without_quantizing():
    for override in ("high_precision", "dequantized"):
        recipe = recipes.NVFP4BlockScaling(backward_override=override)
        module, x, dy = fz.Linear(48, 80), torch.randn(64, 48), torch.randn(64, 80)
        first = step(module, x, dy, recipe)
        ref.assert_equal(step(module, x, dy, recipe, seed=9), first)
        torch.testing.assert_close(
            first[2], dy.T @ x, rtol=0, atol=0.3 * float((dy.T @ x).abs().max())
        )
