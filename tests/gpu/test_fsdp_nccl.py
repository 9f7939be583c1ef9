"""FSDP2 over two GPUs with NCCL: the same training as on one."""

import pytest
import torch
from sharded import Case, outcomes

WORLD, MX = 2, "MXFP8BlockScaling"
BF16 = torch.bfloat16
STORED = {"recipe": MX, "quantized": True}
# The case, and the rule that fires on Hopper.
CASES = {
    Case(dtype=BF16): "grouped_mlp_sm90",
    Case(dtype=BF16, single=False): "grouped_mlp_sm90",
    Case(dtype=BF16, delay=True): "grouped_mlp_sm90",
    Case(mixed=True): "grouped_mlp_sm90",
    Case(dtype=BF16, dispatch=True): "moe_experts_sm90",
    Case(dtype=BF16, **STORED): "grouped_mlp_sm90",
    Case(dtype=BF16, **STORED, single=False, delay=True): "grouped_mlp_sm90",
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return outcomes(WORLD, "cuda", tmp_path_factory.mktemp("fsdp"), list(CASES))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rank", range(WORLD))
def test_twenty_steps(seen, rank, case):
    outcome = seen[rank, str(case)]
    # The sum of two gradients is the same in any order, and each process computes its half alike.
    assert outcome.difference == 0.0
    assert outcome.state_difference == 0.0
    assert outcome.sharded
    assert all(outcome.moved)
    assert [way for way, same in outcome.restored.items() if not same] == []
    if torch.cuda.get_device_capability()[0] == 9:
        assert outcome.fired == (CASES[case],)
