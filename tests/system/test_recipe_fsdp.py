"""Recipes under FSDP2, whose gathered weights change in place without a version."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fusible as fz

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
