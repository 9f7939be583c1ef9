"""transformers' expert parallelism, experts_implementation="fusible", compared with one process."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_parallel import results
from torch import Tensor, nn
from torch import distributed as dist

pytest.importorskip("transformers.distributed.expert_parallel")
import transformers
from hf_models import experts_of, make_model

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")

LAYOUTS = {
    "one batch": {"tp_size": 2, "ep_size": 2},
    "two batches": {"fsdp_size": 2, "ep_size": 2},
    "two batches of two": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
}
TWO = [
    ("mixtral", "one batch", "all_to_all"),
    ("mixtral", "one batch", "fusible"),
    ("mixtral", "two batches", "all_to_all"),
    ("mixtral", "two batches", "fusible"),
    ("qwen3_moe", "one batch", "all_reduce"),
    ("qwen3_moe", "two batches", "fusible"),
    ("gpt_oss", "one batch", "all_reduce"),
    ("gpt_oss", "two batches", "all_to_all"),
    ("gpt_oss", "two batches", "fusible"),
]
FOUR = [("mixtral", "two batches of two", "fusible")]


def batch(index: int) -> Tensor:
    """An odd number of tokens, which a tensor-parallel group cannot share evenly."""
    return torch.randint(0, 64, (1, 11), generator=torch.Generator().manual_seed(1 + index))


def step(model: nn.Module, index: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a batch, and the whole gradient of every parameter."""
    ids = batch(index)
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), {
        n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()
    }


def one_process(family: str, batches: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each batch, and the mean of their gradients, by transformers' own experts."""
    model = make_model(family)
    model.set_experts_implementation("eager")
    logits = [step(model, index)[0] for index in range(batches)]
    return logits, {n: p.grad / batches for n, p in model.named_parameters() if p.grad is not None}


def distributed(family: str, layout: str, implementation: str) -> Any:
    """The model over the processes, without ``from_pretrained``, which needs accelerate here."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config = transformers.distributed.DistributedConfig(
        **LAYOUTS[layout], ep_implementation=implementation
    )
    model = make_model(family)
    _, _, meshes = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model, config, meshes)


def compared(case: Any, group: Any, rank: int, processes: int) -> Any:
    """Of this process's batch, then of all gradients: what it computes, and one process."""
    batches = 1 if case[1] == "one batch" else 2
    index = rank // (processes // batches)
    model = distributed(*case)
    logits, grads = step(model, index)
    expected, of_one = one_process(case[0], batches)
    block = vars(experts_of(model))["_fusible_block"]
    dispatch = block.mlp[0]
    held = dispatch.num_experts, dispatch.processes, block.mlp[1].num_groups
    return held, (logits, expected[index]), (grads, of_one)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return {
        processes: results(
            processes, Path(tmp_path_factory.mktemp("meet")), cases, compared, TIMEOUT
        )
        for processes, cases in ((2, TWO), (4, FOUR))
    }


TIMEOUT = datetime.timedelta(seconds=120)


@pytest.mark.parametrize("case", TWO + FOUR, ids=str)
def test_values_are_those_of_one_process(seen: Any, case: Any) -> None:
    processes = 4 if case in FOUR else 2
    experts = 6 if case[0] == "qwen3_moe" else 4
    for rank, of_rank in enumerate(seen[processes]):
        found = of_rank[str(case)]
        assert not isinstance(found, str), f"process {rank}:\n{found}"
        (total, members, here), (logits, expected), (grads, of_one) = found
        ours = case[2] == "fusible" and case[1] != "one batch"
        assert (total, members) == ((experts, processes) if ours else (experts // processes, 1))
        assert here == experts // processes
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert grads.keys() == of_one.keys()
        for name, grad in of_one.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_ep_implementation_needs_the_experts_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fusible.integrations.transformers_ep import FusibleEP

    experts = experts_of(make_model("mixtral"))
    experts.config._experts_implementation = "eager"
    monkeypatch.setattr(FusibleEP.__bases__[0], "__init__", lambda *_: None)
    with pytest.raises(ValueError, match="experts_implementation=\"fusible\", got 'eager'"):
        FusibleEP(experts, None, None)
