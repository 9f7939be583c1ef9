"""Recipes under FSDP2, whose gathered weights change in place without a version."""

import copy

import process_groups
import pytest
import torch
from number_formats import RECIPES
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import fusible as fz
from fusible.recipes.tensor import QuantizedTensor

MX = fz.recipes.MXFP8BlockScaling()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_the_optimizer_is_seen_by_the_next_forward(mesh, reuse):
    sharded, plain = (fz.Sequential(fz.Linear(64, 64), fz.GELU(), fz.Linear(64, 32)) for _ in "ab")
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (sharded, plain)]
    x = torch.randn(16, 64)
    outputs = []
    for _ in range(3):
        results = []
        for module, optimizer in zip((sharded, plain), optimizers, strict=True):
            scope = fz.reuse_quantized_weights(module) if reuse and module is sharded else None
            with scope or torch.enable_grad(), fz.autocast(recipe=MX):
                for _ in range(2):  # two micro-batches
                    y = module(x)
                    y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(y.detach())
        assert torch.equal(*results)
        outputs.append(results[0])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def model(recipe, rows=64):
    with fz.quantized_model_init(recipe=recipe):
        return fz.Sequential(
            fz.Linear(64, rows),
            fz.GELU(),
            fz.GroupedLinear(2, rows, 64, bias=False, single_grouped_weight=True),
        )


def difference_of_uneven_shards(rank, folder):
    """Train a step on shards of 48 rows, which cut blocks, and on the whole model."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    found = {}
    for name, recipe in RECIPES.items():
        torch.manual_seed(0)
        sharded = model(recipe, 96)
        whole, x = copy.deepcopy(sharded), torch.randn(8, 64)
        fully_shard(sharded, mesh=mesh)
        kinds = [isinstance(p.to_local(), QuantizedTensor) for p in sharded.parameters()]
        results = []
        for module in (sharded, whole):
            with fz.autocast(recipe=recipe):
                y = module(x, torch.tensor([3, 5]))
            y.square().mean().backward()
            grads = [p.grad for p in module.parameters()]
            if module is sharded:
                grads = [g.full_tensor() for g in grads]
            results.append([y, *grads])
        same = all(torch.allclose(a, b) for a, b in zip(*results, strict=True))
        found[name] = (kinds, same)
    return found


@pytest.mark.filterwarnings("ignore")
def test_shards_that_cut_blocks_are_values_and_train_as_the_whole(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch with gloo")
    found, _ = process_groups.results(difference_of_uneven_shards, (), 2, tmp_path)
    assert found.keys() == RECIPES.keys()
    for kinds, same in found.values():
        assert kinds == [False, False, True]  # the rows of a stack's matrices are not cut
        assert same


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_from_the_meta_device_when_sharded(mesh, recipe):
    torch.manual_seed(0)
    want = model(recipe)
    with torch.device("meta"):
        got = model(recipe)
    fully_shard(got, mesh=mesh)
    got.to_empty(device="cpu")
    torch.manual_seed(0)
    for op in (got[0], got[2]):
        op.reset_parameters()
    for mine, theirs in zip(got.parameters(), want.parameters(), strict=True):
        part = mine.to_local()
        assert isinstance(part, QuantizedTensor) == isinstance(theirs, QuantizedTensor)
        assert torch.equal(part * 1, theirs.detach() * 1)
