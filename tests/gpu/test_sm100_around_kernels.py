"""What the SM100 fused ops do around their kernels, on any CUDA GPU: those are emulated."""

import pytest
import reference as ref
import torch
from torch import Tensor

import fusible as fz
from fusible import recipes
from fusible.kernels import emulator_sm100
from fusible.kernels.sm100 import padding
from fusible.kernels.sm100.quantizer import quantized
from fusible.recipes.formats import mxfp8, nvfp4
from fusible.recipes.library import encode
from fusible.testing import assume_target

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SIZES = (300, 0, 20, 256, 1)
ROWS, HIDDEN, INNER = 600, 192, 128


class OnHost:
    """The emulator on copies in host memory; results go back to the device, and to buffers."""

    def __getattr__(self, name):
        function = getattr(emulator_sm100, name)

        def call(**arguments):
            given = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
            out = function(**given)
            for key, value in arguments.items():
                if key in ("d_tensor", "dprob_tensor", "wgrad_tensor"):
                    value.copy_(given[key])
            return {k: None if out[k] is None else out[k].cuda() for k in out.keys()}  # noqa: SIM118

        return call


def packed(device, fmt, x):
    ends = torch.tensor(SIZES, device=device).cumsum(0).int()
    x = x.to(device)
    places = padding.places_of(ends, ROWS, aligned=False)
    row, column = encode(x, fmt, rowwise=True, columnwise=True, ends=ends)
    made = (*padding.packed_rows(row, places), *padding.packed_columns(column, fmt, ends, places))
    return [t.view(torch.uint8).cpu() for t in (*made, places.ends, places.rows)]


@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4()], ids=["mxfp8", "nvfp4"])
def test_packed_bytes_are_those_of_the_host(fmt):
    x = torch.randn(ROWS, HIDDEN, dtype=BF16)
    for mine, theirs in zip(packed("cuda", fmt, x), packed("cpu", fmt, x), strict=True):
        assert torch.equal(mine, theirs)


ROWS_OF_GROUPS = {
    "ragged": (SIZES, ROWS),
    "whole tiles": ((256, 0, 512), 1024),
    "one group": ((31,), 31),
    "many": ((1, 0, 2, 255, 0, 257, 33) * 20, 11_000),
    "all empty": ((0, 0), 40),
}


@pytest.mark.parametrize("splits", ROWS_OF_GROUPS)
@pytest.mark.parametrize("columns", [64, 192, 1088, 2048])
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
def test_the_kernel_that_does_it_all_gives_the_same_bytes(splits, columns, uses):
    sizes, rows = ROWS_OF_GROUPS[splits]
    x = torch.randn(rows, columns, dtype=BF16) * torch.randn(rows, 1).exp().to(BF16)
    if rows > 3:
        x[1, 5], x[2, 6], x[3] = float("nan"), float("inf"), 0
    x[sum(sizes) :] = float("nan")
    made = []
    for device in ("cpu", "cuda"):
        ends = torch.tensor(sizes, device=device).cumsum(0).int()
        aligned = splits == "whole tiles"
        places = padding.places_of(ends, rows, aligned)
        # Memory that was used before must not show.
        poison = torch.full((1 << 26,), 255, dtype=torch.uint8, device=device)
        del poison
        pieces = quantized(x.to(device), ends, places, *uses)
        made.append([piece.view(torch.uint8).cpu() for piece in pieces])
        if uses[1]:
            # Padding under a scale that is NaN has the value NaN, whatever its element.
            missing = torch.ones(places.size, dtype=torch.bool)
            rows_there = torch.arange(rows) if places.rows is None else places.rows.cpu()
            missing[rows_there[: sum(sizes)]] = False
            elements = made[-1][2]
            elements[missing[:, None] & (elements == 0x7F)] = 0
    for mine, theirs in zip(*made, strict=True):
        assert torch.equal(mine, theirs)


def test_packing_waits_for_nothing_and_is_captured():
    x = torch.randn(ROWS, HIDDEN, dtype=BF16, device="cuda")
    sizes = torch.tensor(SIZES, device="cuda")

    def work():
        ends = sizes.cumsum(0).int()
        places = padding.places_of(ends, ROWS, aligned=False)
        row, column = encode(x, mxfp8(), rowwise=True, columnwise=True, ends=ends)
        return (
            *padding.packed_rows(row, places),
            *padding.packed_columns(column, mxfp8(), ends, places),
            *quantized(x, ends, places, True, True),
        )

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for new in (SIZES, (0, 599, 0, 0, 1), (0, 0, 0, 0, 0)):
        sizes.copy_(torch.tensor(new))
        graph.replay()
        for mine, theirs in zip(captured, work(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


RECIPES = [None, recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=["bf16", "mxfp8", "nvfp4"])
def test_the_fused_op_gives_on_cuda_what_it_gives_on_the_host(recipe):
    options = {"single_grouped_weight": True, "single_grouped_bias": True, "dtype": BF16}
    module = fz.Sequential(
        fz.GroupedLinear(5, HIDDEN, 2 * INNER, **options),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(5, INNER, 64, **options),
    )
    results = []
    torch.manual_seed(0)
    x, scales, dy = torch.randn(ROWS, HIDDEN), torch.rand(ROWS), torch.randn(ROWS, 64)
    for device, kernels in (("cpu", emulator_sm100), ("cuda", OnHost())):
        module.to(device)
        splits = torch.tensor(SIZES, device=device)
        leaves = [x.to(device, BF16).requires_grad_(), scales.to(device).requires_grad_()]
        with assume_target("sm100", kernels), fz.autocast(enabled=bool(recipe), recipe=recipe):
            y = module(leaves[0], splits, leaves[1], splits)
            grads = torch.autograd.grad(y, [*leaves, *module.parameters()], dy.to(device, BF16))
        assert module.plan.fired == ("grouped_mlp_sm100",)
        results.append([t.detach().cpu() for t in (y, *grads)])
    for mine, theirs in zip(*results, strict=True):
        ref.assert_accurate(mine, theirs.double(), roundings=1)
