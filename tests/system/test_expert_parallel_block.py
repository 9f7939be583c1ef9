"""A whole MoE block over gloo processes, from its router on, compared with one process."""

import copy
import datetime
from typing import NamedTuple

import expert_parallel as ep
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fusible as fz

TOKENS, EXPERTS, HIDDEN, INNER, MAX_NORM = 24, 8, 64, 32, 0.5


class Case(NamedTuple):
    send: str
    top_k: int
    dtype: torch.dtype

    def __str__(self):
        return f"{self.send}, top_k={self.top_k}, {self.dtype}"


CASES = [
    Case(send, top_k, dtype)
    for send in ("rows", "tokens", "all")
    for top_k in (1, 2, 4, 8)
    for dtype in (torch.float32, torch.bfloat16)
]


def block(case, mesh=None):
    """The same values on every process, of which each then keeps its experts."""
    torch.manual_seed(3)
    options = {"bias": True, "single_grouped_weight": True, "single_grouped_bias": True}
    module = fz.Sequential(
        fz.TopKRouter(HIDDEN, EXPERTS, case.top_k, dtype=case.dtype),
        fz.Dispatch(EXPERTS, process_group=mesh, send=None if mesh is None else case.send),
        fz.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, dtype=case.dtype, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(EXPERTS, INNER, HIDDEN, dtype=case.dtype, **options),
        fz.Combine(process_group=mesh),
    )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / p.shape[-1] ** 0.5)
    return module if mesh is None else fz.expert_parallel(module, mesh)


def step(module, optimizer, x, dy, group=None):
    """Output, gradients of tokens and parameters, the norm, and the parameters after a step."""
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    if group is not None:  # experts' gradients are sums over the group already
        dist.all_reduce(module[0].weight.grad, group=group)
    grads = [whole(p.grad).clone() for p in module.parameters()]
    clip = nn.utils.clip_grad_norm_ if group is None else fz.distributed.clip_grad_norm_
    norm = clip(module.parameters(), MAX_NORM)
    optimizer.step()
    values = [whole(p.detach()).clone() for p in module.parameters()]
    return y.detach(), x.grad, *grads, norm, *values


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def optimizer_of(module):
    # Its eps is not small beside gradients: the step follows their size.
    return torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-2)


def tokens(case, rank):
    g = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(TOKENS, HIDDEN, generator=g).to(case.dtype) for _ in "xy"]


def compared(case, group, rank, processes):
    """What the processes compute, beside one, and again with copies of the block."""
    mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=("ep",))["ep"]
    module, alone = block(case, mesh), block(case)
    assert isinstance(module[2].weight, DTensor)
    twin = copy.deepcopy(module)
    assert twin[1].process_group is module[1].process_group is twin[5].process_group
    x, dy = tokens(case, rank)
    made = step(module, optimizer_of(module), x.clone().requires_grad_(), dy, mesh.get_group())
    copied = step(twin, optimizer_of(twin), x.clone().requires_grad_(), dy, mesh.get_group())
    assert all(map(torch.equal, made, copied))
    assert twin[2].weight.to_local().data_ptr() != module[2].weight.to_local().data_ptr()
    every = [torch.cat(of) for of in zip(*[tokens(case, r) for r in range(processes)], strict=True)]
    wanted = list(step(alone, optimizer_of(alone), every[0].requires_grad_(), every[1]))
    wanted[:2] = [t.split(TOKENS)[rank] for t in wanted[:2]]
    return list(zip(made, wanted, strict=True))


@pytest.fixture(scope="module", params=(2, 4))
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("meet")
    return ep.results(request.param, folder, CASES, compared, datetime.timedelta(seconds=120))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_one_process(seen, case):
    for rank, results in enumerate(seen):
        pairs = results[str(case)]
        assert not isinstance(pairs, str), f"process {rank}:\n{pairs}"
        for i, (got, want) in enumerate(pairs):
            # Each of up to four partial sums is rounded, then their sum.
            bound = 5 * torch.finfo(case.dtype).eps * want.double().abs().amax()
            error = (got.double() - want.double()).abs().amax()
            assert error <= bound, (rank, i, float(error), float(bound))
