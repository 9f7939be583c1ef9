"""Saved rows in a pool on CUDA: the bits of the definitions, no waiting, and graphs."""

import pytest
import reference as ref
import torch
from checks import graph_of, never_waiting

import fusible as fz
from fusible.kernels.saved_rows import header_size, restore, save

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (37, 24), (5000, 264)], ids=str)
@pytest.mark.parametrize("room", [1.0, 0.9])
def test_copies_have_the_bits_of_the_definition(shape, dtype, room):
    counts = [0, 1, shape[0] // 3, shape[0], 2 * shape[0]]
    lines = sum(-(-min(n, shape[0]) * shape[1] * dtype.itemsize // 128) for n in counts)
    memory = torch.zeros(header_size(5) + (int(lines * room) + 1) * 128, dtype=torch.uint8)
    ends = [torch.tensor([n // 2, n], dtype=torch.int32) for n in counts]
    rows = [torch.randn(shape).to(dtype) for _ in counts]
    on_gpu = memory.cuda()
    for i in range(5):
        save(memory, rows[i], ends[i], i, 5)
        given = rows[i].cuda(), ends[i].cuda()
        with never_waiting():
            save(on_gpu, *given, i, 5)
    size = header_size(5)
    assert torch.equal(on_gpu[:size].cpu(), memory[:size])
    for i in range(5):
        want = restore(memory, ends[i], i, 5, shape, dtype).view(torch.uint8)
        got = restore(on_gpu, ends[i].cuda(), i, 5, shape, dtype)
        assert torch.equal(got.view(torch.uint8).cpu(), want)


def stack(layers, groups, hidden, inner):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": BF16, "bias": False, "single_grouped_weight": True}
    return [
        fz.Sequential(
            fz.GroupedLinear(groups, hidden, 2 * inner, **options),
            fz.SwiGLU(),
            fz.GroupedLinear(groups, inner, hidden, **options),
        )
        for _ in range(layers)
    ]


def test_a_captured_step_of_several_layers():
    """Replays with other splits, and the memory of the rows that there are."""
    layers, rows, hidden, inner = stack(6, 8, 256, 512), 16384, 256, 512
    x = torch.randn(rows, hidden, device="cuda", dtype=BF16).requires_grad_()
    splits = torch.empty(8, dtype=torch.int64, device="cuda")
    dy = torch.randn_like(x)
    params = [p for layer in layers for p in layer.parameters()]
    pool = fz.SavedRowsPool(6 * rows // 4 * (hidden + 2 * inner) * 2)

    def step(pool=None):
        def forward():
            y = x
            for layer in layers:
                y = layer(y, splits, splits)
            return y

        if pool is None:
            y = forward()
        else:
            with pool:
                y = forward()
        return [y.detach(), *torch.autograd.grad(y, [x, *params], dy)]

    def uneven(seed, total):
        torch.manual_seed(seed)
        cut = torch.randint(total + 1, (7,)).sort().values
        return torch.diff(cut, prepend=torch.tensor([0]), append=torch.tensor([total]))

    splits.copy_(uneven(0, rows // 4))
    wanted = step()
    before = torch.cuda.memory_allocated()
    y = x
    for layer in layers:
        y = layer(y, splits, splits)
    plain = torch.cuda.memory_allocated() - before
    del y
    with pool:
        y = x
        for layer in layers:
            y = layer(y, splits, splits)
    pooled = torch.cuda.memory_allocated() - before
    del y
    assert plain > 6 * rows * (hidden + 2 * inner) * 2
    assert pooled < rows * hidden * 2 * 2
    graph, captured = graph_of(lambda: step(pool))
    for seed, total in enumerate((rows // 4, 0, rows // 8, rows // 4)):
        splits.copy_(uneven(seed, total))
        wanted = step()
        graph.replay()
        ref.assert_equal(captured, wanted)
    assert not pool.overflowed()
    splits.copy_(uneven(9, rows // 2))
    graph.replay()
    assert pool.overflowed()
    assert captured[2].isnan().any()


def test_nothing_waits():
    (layer,), pool = stack(1, 8, 256, 512), fz.SavedRowsPool(1 << 24)
    x = torch.randn(512, 256, device="cuda", dtype=BF16).requires_grad_()
    splits = torch.full((8,), 60, device="cuda")
    for _ in range(2):
        with never_waiting(), pool:
            y = layer(x, splits, splits)
            torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
