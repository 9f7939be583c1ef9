"""The CUDA quantizer gives the bits of the formulas, which run on the CPU here."""

import pytest
import torch

import fusible.kernels.quantize as kernel
from fusible.recipes.library import quantize_mxfp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

USES = [(True, True), (True, False), (False, True)]
ENDS = {
    "dense": None,
    "one": [96],
    "ragged": [0, 1, 33, 33, 64, 95],
    "tail": [5, 5, 40],
    "empty": [0, 0],
    "beyond": [32, 1000],
    "many": [3 * i for i in range(1, 33)],
    "more than a warp": sorted([i % 97 for i in range(100)]),
}


def hostile(rows, columns, seed=0):
    """BF16 of every magnitude, with NaN, Inf, zero blocks and denormals."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * 2.0 ** torch.randint(
        -140, 127, (rows, columns), generator=g
    )
    mode = torch.randint(0, 8, (rows, columns), generator=g)
    x = torch.where(mode < 6, torch.randn(rows, columns, generator=g), x).to(torch.bfloat16)
    if rows and columns >= 160:
        x[rows // 2, 40] = float("nan")
        x[rows // 3, 70] = float("inf")
        x[rows // 4, 71] = -float("inf")
        x[:, 96:128] = 0
        x[:, 128:160] = x[:, 128:160] * 1e-38
    return x


def compare(x, ends, *, e5m2=False, round_up=True, uses=(True, True)):
    args = (e5m2, round_up, *uses)
    cuda_ends = None if ends is None else ends.cuda()
    assert kernel.why_not(x.cuda(), cuda_ends) is None
    got = torch.ops.fusible.quantize_mxfp8(x.cuda(), cuda_ends, *args)
    want = quantize_mxfp8(x, ends, *args)
    for name, on_gpu, b in zip(("row", "row scale", "col", "col scale"), got, want, strict=True):
        a, b = on_gpu.cpu().view(torch.uint8), b.view(torch.uint8)  # noqa: PLW2901
        assert a.shape == b.shape, name
        wrong = (a != b).nonzero()
        assert not len(wrong), (name, len(wrong), wrong[0].tolist())


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("ends", ENDS)
def test_bits_of_groups(ends, uses):
    offsets = None if ENDS[ends] is None else torch.tensor(ENDS[ends], dtype=torch.int32)
    compare(hostile(96, 1056), offsets, uses=uses)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 127, 300])
@pytest.mark.parametrize("columns", [32, 992, 1024, 2080])
def test_bits_at_tile_edges(rows, columns):
    compare(hostile(rows, columns, rows), None)


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("round_up", [False, True])
def test_bits_of_every_bf16(e5m2, round_up):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(65536, 32, dtype=torch.bfloat16)
    x[:, 0] = every
    x[:, 1] = every.flip(0)
    compare(x, None, e5m2=e5m2, round_up=round_up)
    compare(every.view(256, 256), None, e5m2=e5m2, round_up=round_up)


def test_bits_of_int64_ends_and_row_pitch():
    compare(hostile(96, 512)[:, :256], torch.tensor([7, 60, 60, 90]))


def test_a_captured_graph_follows_new_ends():
    x = hostile(256, 512).cuda()
    ends = torch.tensor([64, 128, 256], dtype=torch.int32, device="cuda")
    torch.ops.fusible.quantize_mxfp8(x, ends, False, True, True, True)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.fusible.quantize_mxfp8(x, ends, False, True, True, True)
    for sizes in ([64, 128, 256], [1, 2, 3], [33, 33, 250]):
        ends.copy_(torch.tensor(sizes))
        graph.replay()
        want = quantize_mxfp8(x.cpu(), torch.tensor(sizes), False, True, True, True)
        for a, b in zip(got, want, strict=True):
            assert (a.cpu().view(torch.uint8) == b.view(torch.uint8)).all()


def test_no_host_synchronisation():
    x, ends = hostile(256, 512).cuda(), torch.tensor([64, 256], dtype=torch.int32).cuda()
    torch.ops.fusible.quantize_mxfp8(x, ends, False, True, True, True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.fusible.quantize_mxfp8(x, ends, False, True, True, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
