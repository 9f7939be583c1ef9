"""NVFP4 as it is trained with, on a GPU: the bits of the CPU, graphs that draw anew, no waiting."""

import pytest
import reference as ref
import torch
from checks import never_waiting

import fusible as fz
from fusible import recipes
from fusible.recipes.formats import nvfp4
from fusible.recipes.matrix import Uses, as_bytes
from fusible.recipes.quantize_ops import quantize_for, random_key

pytestmark = pytest.mark.gpu

FORMATS = [nvfp4(hadamard=h, stochastic=s) for h in (False, True) for s in (False, True)]
ENDS = {"none": None, "ragged": [0, 1, 33, 49, 49, 300, 995], "tail": [5, 5, 640]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_bits_are_those_of_the_cpu(fmt, uses, ends, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 1096, generator=g) * 2.0 ** torch.randint(-9, 3, (1, 1096), generator=g)
    x = x.to(dtype)
    key = torch.tensor([-(2**40) - 17, 2**35 + 5])
    groups = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    want = quantize_for(x, fmt, Uses(*uses), groups, key)
    on_gpu = [None if t is None else t.cuda() for t in (groups, key)]
    with torch.no_grad():  # directly
        got = quantize_for(x.cuda(), fmt, Uses(*uses), *on_gpu)
    by_dispatcher = quantize_for(x.cuda(), fmt, Uses(*uses), *on_gpu)
    for made in (got, by_dispatcher):
        for a, b in zip(made[:2], want[:2], strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                pieces = [[as_bytes(t) for t in m[:3]] for m in (a, b)]
                ref.assert_same_bits(*pieces)


def test_values_are_those_of_the_elements():
    x, key = torch.randn(500, 256, device="cuda").bfloat16(), torch.tensor([3, 4], device="cuda")
    fmt, ends = nvfp4(hadamard=True, stochastic=True), torch.tensor([77, 500], device="cuda")
    with torch.no_grad():
        values = quantize_for(x, fmt, Uses(False, False, True, True), ends, key)
        matrices = quantize_for(x, fmt, Uses(True, True), ends, key)
    from fusible.recipes.quantize_ops import dequantize_matrix

    for made, matrix in zip(values[2:], matrices[:2], strict=True):
        assert torch.equal(made, dequantize_matrix(matrix, torch.bfloat16))


def test_a_replayed_graph_draws_anew():
    x = torch.randn(256, 128, device="cuda")
    random_key(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        key = random_key(x)
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(key.clone())
    assert len({tuple(k.tolist()) for k in drawn}) == 3


def test_a_step_waits_for_nothing_and_the_seed_repeats_it():
    module = fz.GroupedLinear(3, 256, 128, single_grouped_weight=True, device="cuda")
    x = torch.randn(200, 256, device="cuda", requires_grad=True)
    sizes = torch.tensor([70, 0, 100], device="cuda")
    dy = torch.randn(200, 128, device="cuda")

    def step():
        torch.manual_seed(0)
        x.grad, module.weight.grad = None, None
        with fz.autocast(recipe=recipes.NVFP4BlockScaling()):
            y = module(x.bfloat16(), sizes)
        y.backward(dy.to(y.dtype))
        return [y.detach(), x.grad, module.weight.grad]

    first = step()
    with never_waiting():
        again = step()
    ref.assert_equal(again, first)
