"""Every kernel once on small ragged groups, for ``compute-sanitizer``.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool TOOL python tests/gpu/sanitize.py

for each TOOL of memcheck, racecheck, synccheck and initcheck. Without the variable, PyTorch's
segments hide what lies beside a tensor. A run without the tool compiles all kernels beforehand.
``--part K N`` runs every N-th tile and kernel from the K-th on, so that N processes share the work.

initcheck takes what TMA has stored for uninitialised, so nothing here copies an output of a grouped
product; that they write every element is for `test_sm90_grouped_gemm`, where outputs begin as NaN.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fusible import formulas
from fusible.activations import UNARY
from fusible.kernels import grouped, moe
from fusible.kernels.dense import activation_bias_backward, rms_norm_backward
from fusible.kernels.glu import Glu
from fusible.kernels.moe import cuda as moe_kernels
from fusible.kernels.moe.cuda import PeerRows
from fusible.kernels.quantize.glu_backward import quantize_glu_backward
from fusible.kernels.quantize.k_major import quantize_k_major, transposed
from fusible.kernels.runtime.gpu import has_cutlass
from fusible.kernels.sm90 import checked_products as ops
from fusible.kernels.sm90 import tiles
from fusible.recipes.formats import SAVED_INPUT, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible.recipes.matrix import Uses
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_for
from fusible.recipes.stored import StoredWeights
from fusible.recipes.tensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from sm90_in_tile import in_tile

if not has_cutlass():
    sys.exit("there are no kernels to check without nvidia-cutlass-dsl")

SIZES = (127, 0, 128, 129, 1, 190, 0, 40)
PART = 0, 1
GROUPS, ROWS, HIDDEN, INNER = len(SIZES), sum(SIZES) + 30, 136, 264
# A column of tiles past the last, in a cluster of two across: 264 / 128 is odd.


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers on the GPU."""
    return torch.randn(*shape, device="cuda").to(dtype)


def own(items: Iterable[Any]) -> list[Any]:
    """Those of this process."""
    return list(items)[PART[0] :: PART[1]]


def separate(weight: torch.Tensor) -> list[torch.Tensor]:
    """Its matrices, each allocated by itself."""
    return [matrix.clone() for matrix in weight]


def products() -> int:  # noqa: PLR0912 (one branch for each kind of kernel)
    """Every tile of every kernel of `fusible.kernels.sm90`; how many launches that were."""
    for dtype in (torch.int32, torch.int64):
        ends = grouped.group_ends(torch.tensor(SIZES, device="cuda", dtype=dtype), ROWS)
    x, dy, scales = random(ROWS, HIDDEN), random(ROWS, HIDDEN), torch.rand(ROWS, device="cuda")
    bias, w1 = random(GROUPS, 2 * INNER), random(GROUPS, 2 * INNER, HIDDEN)
    preact, d_preact, act = (random(ROWS, n) for n in (2 * INNER, 2 * INNER, INNER))
    w2, launches = random(GROUPS, HIDDEN, INNER), 0
    columns_first = w1.mT.contiguous().mT
    for interleave, activation in ((0, "swiglu"), (8, "clamped_qgeglu")):
        glu = Glu(activation, interleave, 1.0, 1.7, 1.0)
        for tile in own(tiles.TILES["glu"]):
            for w, b, major in (
                ([w1], None, "k"),
                (separate(w1), bias, "k"),
                (separate(w1), None, "k"),
                ([columns_first], None, "n"),
            ):
                if not tiles.supports_tile("glu", tile, major, interleave, b is not None):
                    continue
                for keep in (False, True):
                    with in_tile(tile):
                        ops.grouped_glu(x, w, ends, scales, glu, b, keep)
                    launches += 1
        for tile in own(tiles.TILES["dglu"]):
            if not tiles.supports_tile("dglu", tile, "n", interleave, False, activation):
                continue
            for w in ([w2], separate(w2)):
                for overwrite in (False, True):
                    with in_tile(tile):
                        ops.grouped_dglu(
                            dy, w, ends, preact.clone(), scales, glu, overwrite=overwrite
                        )
                    launches += 2
    for tile in own(tiles.TILES["store"]):
        with in_tile(tile):
            for w in ([w2], separate(w2)):
                ops.grouped_mm(act, w, ends)
                ops.grouped_mm(act, w, ends, reads_ahead=True)
            for w in ([w1], separate(w1)):
                ops.grouped_mm(d_preact, w, ends, None, None, True)
        launches += 6
    for tile in own(tiles.TILES["wgrad"]):
        for dtype in (torch.bfloat16, torch.float32):
            grad = torch.zeros(GROUPS, 2 * INNER, HIDDEN, device="cuda", dtype=dtype)
            for out, accumulate in (([grad], False), ([grad], True), (separate(grad), True)):
                with in_tile(tile):
                    ops.grouped_wgrad_(out, d_preact, x, ends, accumulate)
                launches += 1
    return launches


def plain_activations() -> int:
    """The same of an activation that is not gated, and of none's scales."""
    ends = torch.tensor(SIZES, device="cuda").cumsum(0).int()
    x, dy, scales = random(ROWS, HIDDEN), random(ROWS, HIDDEN), torch.rand(ROWS, device="cuda")
    w1, w2, bias = (
        random(GROUPS, INNER, HIDDEN),
        random(GROUPS, HIDDEN, INNER),
        random(GROUPS, INNER),
    )
    glu, preact, launches = Glu("srelu"), random(ROWS, INNER), 0
    for of_rows in (scales, None):
        for tile in own(tiles.TILES["act"]):
            for keep in (False, True):
                with in_tile(tile):
                    ops.grouped_glu(x, [w1], ends, of_rows, glu, bias, keep)
                launches += 1
        for tile in own(tiles.TILES["dact"]):
            with in_tile(tile):
                ops.grouped_dglu(dy, [w2], ends, preact.clone(), of_rows, glu, overwrite=True)
            launches += 1 + (of_rows is not None)
    return launches


def fp8_products() -> int:
    """The same of FP8 operands; how many launches that were."""
    kinds = torch.float8_e4m3fn, torch.float8_e5m2
    # Reductions of six stages: more than those whose scales are loaded at once.
    hidden, inner, sizes = 656, 272, (*SIZES[:-1], 656)
    rows, padded = sum(sizes) + 30, 128 * (GROUPS + 8)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    padded_ends = torch.tensor([-(-size // 128) for size in sizes], device="cuda").cumsum(0) * 128

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device="cuda")

    launches = 0
    for kind in kinds:
        x, w = random(rows, hidden, dtype=kind), [random(GROUPS, inner, hidden, dtype=kinds[0])]
        scales = {"x_scale": ones(6, rows).t(), "w_scale": ones(GROUPS, 3, 6)}
        dy = random(hidden, padded, dtype=kind).t()
        dy_scale, x_scale = ones(padded // 128, hidden), ones(padded // 128, inner)
        columns = random(inner, padded, dtype=kinds[0]).t()
        for tile in own(dict.fromkeys(t for kind in tiles.FP8_TILES.values() for t in kind)):
            with in_tile(tile):
                ops.grouped_mm(x, w, ends, **scales)
                for keep in (False, True):
                    glu = Glu("swiglu", 8)
                    ops.grouped_glu(x, w, ends, ones(rows), glu, None, keep, **scales)
                    act, b = (glu, None) if tile.n == 256 else (Glu("gelu"), random(GROUPS, inner))
                    if tile.width("act" if tile.n == 128 else "glu") == 128:
                        options = act, b, keep, *scales.values(), fp8_block()
                        ops.grouped_glu(x, w, ends, ones(rows), *options)
                        launches += 1
            launches += 3
        given = dy, columns, padded_ends.int()
        grad = torch.zeros(GROUPS, hidden, inner, device="cuda")
        for tile in own(tiles.FP8_TILES["wgrad"]):
            with in_tile(tile):
                ops.grouped_wgrad(*given, None, dy_scale, x_scale)
                ops.grouped_wgrad_([grad], *given, True, dy_scale, x_scale)
            launches += 2
    return launches


def in_seven_memories(x: torch.Tensor) -> PeerRows:
    """As many rows in each."""
    parts = [part.clone() for part in x.chunk(7)]
    table = torch.tensor([part.data_ptr() for part in parts], device="cuda")
    return PeerRows(parts, table.data_ptr(), 0, 1, lambda keep=table: None)


def rows() -> None:
    """`fusible.kernels.moe`: router, permutation, movement of rows and its gradients."""
    for function in ("softmax", "sigmoid"):
        logits = random(77, 60, dtype=torch.float32)
        probs, ids = moe.route(logits, None, 4, function, True, 2.5, [1, 1, 2])
        moe.route_backward(torch.rand_like(probs), logits, ids, function, True, 2.5)
        biases = torch.rand(2, 60, device="cuda")
        moe.route_tokens(random(7, 40), random(60, 40), *biases, 4, function, True, 2.5, [1, 1, 2])
    moe.permutation(torch.randint(-9, 70, (5000, 4), device="cuda"), 60, 300)  # every CTA
    for capacity in (None, 3):
        row_map, _, ends = moe.permutation(ids, 60, capacity)
        moved = 77 * 4 if capacity is None else min(77 * 4, 60 * capacity)
        x, y, per_row = random(77, 40), random(moved, 40), torch.rand(moved, device="cuda")
        index, _ = moe.row_sources(row_map, probs, moved)
        for zero_tail in (True, False):
            moe.scatter_rows(x, row_map, probs, moved, True, zero_tail=zero_tail)
            few = x[:64], probs[:64], ids[:64], 60, capacity, min(moved, 64 * 4), True
            moe.permute_rows(*few, zero_tail=zero_tail)
            moe.permute_rows_quantized(x[:64].bfloat16(), *few[1:-1], fp8_block())
        moe.gather_sum(y, row_map, probs, per_row)
        moe.gather_sum(y, row_map[:64], probs[:64], None, reads_ahead=True)
        apart = in_seven_memories(x)
        moe_kernels.scatter_rows(apart, row_map, probs, moved, True)
        moe_kernels.gather_sum(y, row_map, probs, per_row, apart)
        for by_row in (False, True):
            moe.row_dots(y, x, row_map, by_row)
        bias = random(60, 40)
        for given, named in ((y, None), (x, index)):
            grouped.grouped_sum(given, ends, per_row, named)
            grouped.grouped_dots(given, bias, ends, named)
            uses = {"rowwise": True, "columnwise": True}
            for fmt in (fp8_block(), fp8_tensor()):
                quantize_k_major(given, fmt, **uses, ends=ends, index=named)


def dense() -> None:
    """`fusible.kernels.dense`."""
    dy, x, gain = random(129, 264), random(129, 264), random(264, dtype=torch.float32)
    for activation in UNARY:
        activation_bias_backward(dy, x, activation)
    _, rstd = formulas.rms_norm(x, gain, 1e-5)
    for addend in (None, dy):
        rms_norm_backward(dy, x, rstd, gain, addend)


def quantize() -> None:
    """`fusible.kernels.quantize`."""
    x, ends = random(128, 384), torch.tensor([0, 1, 33, 33, 64, 127], device="cuda")
    square = fp8_block(block=(128, 128))
    for fmt in (mxfp8(), fp8_block(), square, fp8_tensor(), nvfp4()):
        for given in (None, ends) if fmt != square else (None,):
            row, column, *_ = quantize_for(x, fmt, Uses(True, True, True, True), given)
            for matrix in (row, column):
                dequantize_matrix(matrix, torch.bfloat16)
    whole = (fp8_tensor(), ends), (fp8_tensor(), None)
    for fmt, of_groups in ((fp8_block(), ends), (fp8_block(), None), (square, None), *whole):
        quantize_k_major(x, fmt, rowwise=True, columnwise=True, ends=of_groups)
    uses = {"rowwise": True, "columnwise": True, "values": True}
    for features, interleave in ((192, 1), (192, 0), (256, 0), (256, 128)):
        dy, preact = random(128, features), random(128, 2 * features)
        scales, glu = torch.rand(128, device="cuda"), Glu("swiglu", interleave)
        for fmt in (fp8_block(), fp8_tensor()):
            quantize_glu_backward(dy, preact, scales, ends, glu, fmt, **uses)
    quantize_glu_backward(dy, preact[:, :256], None, ends, Glu("gelu"), fp8_block(), **uses)
    for glu, of_both in ((Glu("swiglu", 128), preact), (Glu("gelu"), preact[:, :256])):
        given = dy, of_both, scales, ends, glu, fp8_block()
        quantize_glu_backward(*given, **uses, act_format=fp8_block())
        kept = quantize_k_major(of_both, SAVED_INPUT, rowwise=True, columnwise=False).row
        given = dy, kept, scales, ends, glu, fp8_block()
        quantize_glu_backward(*given, **uses, act_format=fp8_block())
    transposed(x.to(torch.float8_e4m3fn))


def few_rows() -> None:
    """`fusible.kernels.few_rows`: each kind of scale, whole and separate weights, a tail."""
    for fmt in (mxfp8(), nvfp4((16, 16)), fp8_block(block=(128, 128)), fp8_tensor()):
        for sizes in ((3, 0, 2, 1), (17, 0, 40, 9)):
            for whole in (True, False):
                w = random(4, 72, 96)
                parts = [QuantizedTensor.quantize(t, fmt) for t in ([w] if whole else separate(w))]
                stored = StoredWeights.of([part.matrix() for part in parts])
                x, ends = random(sum(sizes) + 2, 96), torch.tensor(sizes, device="cuda").cumsum(0)
                bias, scales = random(4, 72), torch.rand(len(x), device="cuda")
                grouped.grouped_mm_stored(x, stored, fmt, ends.int(), bias, scales)
                grouped.grouped_glu_stored(x, stored, fmt, ends.int(), scales, Glu("srelu"), bias)
                w = random(4, 80, 96)
                stored = StoredWeights.of([QuantizedTensor.quantize(w, fmt).matrix()])
                grouped.grouped_glu_stored(x, stored, fmt, ends.int(), None, Glu("swiglu", 8))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs=2, type=int, default=PART, metavar=("K", "N"))
    PART = tuple(parser.parse_args().part)
    torch.manual_seed(0)
    with torch.no_grad():
        launches = products() + plain_activations() + fp8_products()
        for function in own((rows, dense, quantize, few_rows)):
            function()
    torch.cuda.synchronize()
    print(f"{launches} launches of grouped products, and every other kernel")  # noqa: T201
