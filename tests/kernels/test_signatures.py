"""Launches have the number and kinds of arguments that the compiled kernels take.

As `test_sm90_signatures` for products: without a GPU, a call fails for want of a driver, which is
after its arguments have been looked at.
"""

from dataclasses import replace

import pytest
import torch

from fusible.kernels.glu import Glu
from fusible.kernels.grouped import bias_gradients
from fusible.kernels.moe import cuda as moe_cuda
from fusible.kernels.quantize import cuda, glu_backward, k_major
from fusible.kernels.quantize.k_major import RowsToQuantize
from fusible.kernels.runtime import gpu, launch
from fusible.recipes.formats import fp8_block, fp8_tensor, mxfp8
from fusible.recipes.matrix import Uses

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would run the kernels")

ENDS = torch.tensor([100, 100, 230], dtype=torch.int32)
ROWS, COLUMNS, FORMAT = 256, 128, fp8_block()
GRADIENTS = True, True, True  # row-wise, column-wise and in high precision


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The kernels that were called, each compiled for a GPU that is not there."""
    names = []

    def call(index, function, arguments):
        with pytest.raises(RuntimeError, match=r"(?i)cuda"):
            function(*arguments)
        names.append(function)

    for module in (gpu, moe_cuda):
        monkeypatch.setattr(module, "capability", lambda _: (9, 0))
    forget_devices()
    monkeypatch.setattr(launch, "call_on_device", call)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    yield names
    forget_devices()


def forget_devices():
    """Facts of the CPU as a device, which here is a GPU."""
    gpu.architecture.cache_clear()
    gpu.runs_kernels.cache_clear()


@pytest.mark.parametrize("ends", [None, ENDS, ENDS.long()], ids=["", "int32", "int64"])
@pytest.mark.parametrize("gathered", [False, True])
def test_rows(ends, gathered, called):
    rows = torch.zeros(ROWS, dtype=torch.int32) if gathered else None
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    assert k_major._cuda(RowsToQuantize(x, ends, rows), FORMAT, True, True) is not NotImplemented
    assert len(called) == 1


def test_weights(called):
    w = torch.zeros(2, 128, COLUMNS, dtype=torch.bfloat16)
    k_major._cuda(RowsToQuantize(w), fp8_block(block=(128, 128)), True, True)
    assert len(called) == 1


@pytest.mark.parametrize(
    ("glu", "launches"),
    [(Glu(), 1), (Glu("clamped_qgeglu", 1, 7, 1.702, 1), 2)],
    ids=["", "sums of two blocks"],
)
def test_the_backward_of_an_activation(glu, launches, called):
    dy = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    preact, scales = torch.zeros(ROWS, 2 * COLUMNS).bfloat16(), torch.ones(ROWS)
    inputs = glu_backward.GluBackwardInputs(dy, preact, scales, ENDS)
    made = glu_backward._cuda(inputs, glu, FORMAT, FORMAT, False, *GRADIENTS)
    assert made is not NotImplemented
    assert len(called) == launches


@pytest.mark.parametrize(
    ("glu", "fmt", "act", "launches"),
    [
        (Glu(), FORMAT, FORMAT, 1),
        (Glu("gelu"), FORMAT, FORMAT, 1),
        (Glu("swiglu", 8), FORMAT, FORMAT, 0),
        (Glu(), FORMAT, fp8_tensor(), 0),
        (Glu(), fp8_tensor(), FORMAT, 0),
    ],
    ids=["both sides", "only operand", "stripes", "whole activation", "whole gradients"],
)
def test_the_backward_of_an_activation_that_is_written(glu, fmt, act, launches, called):
    dy = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    preact = torch.zeros(ROWS, glu.sides * COLUMNS, dtype=torch.bfloat16)
    given = glu_backward.GluBackwardInputs(dy, preact, torch.ones(ROWS), ENDS), glu, fmt, act
    made = glu_backward._cuda(*given, True, *GRADIENTS)
    assert (made is not NotImplemented) == (launches > 0)
    assert len(called) == launches


def test_blocks_that_no_product_reads_are_refused(called):
    fmt = replace(FORMAT, block=(1, 32))
    dy = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    preact, scales = torch.zeros(ROWS, 2 * COLUMNS).bfloat16(), torch.ones(ROWS)
    given = glu_backward.GluBackwardInputs(dy, preact, scales, ENDS), Glu()
    with pytest.raises(ValueError, match="operands of FP8 products must be of FP8 elements"):
        glu_backward._cuda(*given, fmt, FORMAT, False, *GRADIENTS)
    with pytest.raises(ValueError, match="operands of FP8 products must be of FP8 elements"):
        glu_backward._cuda(*given, FORMAT, fmt, True, *GRADIENTS)
    assert not called


@pytest.mark.parametrize(("fmt", "launches"), [(mxfp8(), 1), (fp8_tensor(), 2)], ids=str)
def test_quantized_and_dequantized_matrices(fmt, launches, called):
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    row, *_ = cuda._quantize(x, ENDS, fmt, Uses(True, True, True, False), None)
    assert len(called) == launches
    cuda._dequantize(row, torch.bfloat16)
    assert len(called) == launches + 1


@pytest.mark.parametrize("index", [None, torch.zeros(ROWS, dtype=torch.int32)], ids=["", "index"])
def test_gradients_of_biases(index, called):
    dy, bias = torch.zeros(ROWS, COLUMNS).bfloat16(), torch.zeros(3, COLUMNS).bfloat16()
    for row_scale in (None, torch.ones(ROWS)):
        assert bias_gradients.grouped_sum_cuda(dy, ENDS, row_scale, index) is not NotImplemented
    assert bias_gradients.grouped_dots_cuda(dy, bias, ENDS, index) is not NotImplemented
    assert len(called) == 3


def test_rows_that_are_moved(called, monkeypatch):
    x, logits = torch.zeros(64, COLUMNS).bfloat16(), torch.zeros(64, 8)
    ids, probs = torch.zeros(64, 2, dtype=torch.int64), torch.ones(64, 2)
    probs_of = moe_cuda.route(logits, None, 2, "softmax", True, 1.0, [1, 1, 1])
    row_map, *_ = moe_cuda.permutation(ids, 8, None)
    row_map = row_map.zero_()
    monkeypatch.setattr(moe_cuda, "zeroed_counter", lambda *_: 0)
    weight, bias = torch.zeros(8, COLUMNS).bfloat16(), torch.zeros(8).bfloat16()
    choice = 2, "softmax", True, 1.0, [1, 1, 1]
    results = [
        probs_of,
        moe_cuda.route_tokens(x[:8], weight, bias, None, *choice),
        moe_cuda.route_tokens(x[:1], weight, None, bias, *choice),
        moe_cuda.route_backward(probs, logits, ids, "softmax", True, 1.0),
        moe_cuda.row_sources(row_map, probs, 128),
        moe_cuda.scatter_rows(x, row_map, probs, 128, True),
        moe_cuda.permute_rows(x, probs, ids, 8, None, 128, False),
        moe_cuda.permute_rows_quantized(x, probs, ids, 8, None, 128, fp8_block()),
        moe_cuda.gather_sum(torch.zeros(128, COLUMNS).bfloat16(), row_map, probs, torch.ones(128)),
        moe_cuda.row_dots(torch.zeros(128, COLUMNS).bfloat16(), x, row_map, False),
    ]
    assert not any(result is NotImplemented for result in results)
    assert len(called) == 11


@pytest.mark.parametrize(
    "case", ["tokens", "features", "dtype", "weight", "experts", "top_k", "bias", "subclass"]
)
def test_a_router_that_is_not_one_launch(case, called):
    """PyTorch's product comes first, or says what is wrong."""
    tokens, features, experts, top_k, dtype = 8, 64, 40, 4, torch.bfloat16
    tokens = 9 if case == "tokens" else tokens
    features = 60 if case == "features" else features
    experts = 1025 if case == "experts" else experts
    top_k = 33 if case == "top_k" else top_k
    x = torch.zeros(tokens, features, dtype=torch.float64 if case == "dtype" else dtype)
    weight = torch.zeros(experts, features, dtype=torch.float16 if case == "weight" else x.dtype)
    bias = torch.zeros(experts - (case == "bias"))
    if case == "subclass":
        weight = weight.as_subclass(type("Wrapped", (torch.Tensor,), {}))
    choice = top_k, "softmax", True, 1.0, [1, 1, 1]
    result = moe_cuda.route_tokens(x, weight, bias, None, *choice)
    assert result is NotImplemented
    assert not called
