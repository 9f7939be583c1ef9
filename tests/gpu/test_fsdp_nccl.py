"""FSDP2 over two GPUs with NCCL: the same training as on one."""

import pytest
import torch
from sharded import Case, outcomes

WORLD, MX = 2, "MXFP8BlockScaling"
BF16 = torch.bfloat16
CASES = [
    Case(single=True, dtype=BF16),
    Case(single=False, dtype=BF16),
    Case(single=True, dtype=BF16, recipe=MX, quantized=True),
    Case(single=False, dtype=BF16, recipe=MX, quantized=True),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return outcomes(WORLD, "cuda", tmp_path_factory.mktemp("fsdp"), CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rank", range(WORLD))
def test_twenty_steps(seen, rank, case):
    outcome = seen[rank, str(case)]
    # The sum of two gradients is the same in any order, and each process computes its half alike.
    assert outcome.difference == 0.0
    assert outcome.state_difference == 0.0
    assert outcome.sharded
    assert all(outcome.moved)
    assert outcome.restored == {"sharded": True, "unsharded": True, "optimizer": True}
    if torch.cuda.get_device_capability()[0] == 9:
        assert outcome.fired == ("recipe_mlp_sm90" if case.recipe else "grouped_mlp_sm90",)
