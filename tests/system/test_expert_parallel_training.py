"""Experts shared among processes train, save and load as in one process."""

import pytest
from expert_ranks import EXPERTS, HIDDEN, INNER, outcomes
from torch import distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
PARALLEL = [(2, 2), (4, 2), (4, 4)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return {world: outcomes(world, tmp_path_factory.mktemp(f"ep{world}")) for world in (2, 4)}


@pytest.mark.parametrize("name", ["single", "separate", "quantized"])
@pytest.mark.parametrize(("world", "ep"), PARALLEL)
def test_twenty_steps(seen, world, ep, name):
    for found in [of_rank[ep, name] for of_rank in seen[world]]:
        # Gradients are sums in another order; AdamW divides small ones by their own size. One that
        # rounds to a neighbour in MXFP8 differs by 2^-4.
        assert found["grads"] < 1e-6
        assert found["norms"] < (2**-4 if name == "quantized" else 1e-6)
        assert found["difference"] < (2**-2 if name == "quantized" else 1e-4)
        assert found["moved"]
        assert found["states"] == {True}
        assert found["local"] == (EXPERTS // world, 2 * INNER, HIDDEN)
        assert [way for way, same in found["same"].items() if not same] == []


@pytest.mark.parametrize(("world", "ep"), PARALLEL)
def test_construction_and_plans(seen, world, ep):
    for found in seen[world]:
        assert found[ep, "meta"]
        whole, part = found[ep, "plans"]
        assert whole == part == ("moe_experts_sm90",)


def test_refusals(seen):
    said = seen[2][0]["refused"]
    parts = {
        "two dimensions": "must be a DeviceMesh of one dimension, got 2",
        "no experts": "must contain a GroupedLinear",
        "uneven": "must be a multiple of the 2 processes",
        "twice": "got a second time",
        "delayed": "must go to autograd",
        "outside": "after fully_shard call the module",
    }
    assert {name for name, part in parts.items() if part not in said.get(name, "")} == set()
