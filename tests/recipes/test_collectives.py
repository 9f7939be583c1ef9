"""Collectives of torch.distributed on quantized tensors: what they write is quantized."""

import process_groups
import pytest
import torch
from number_formats import RECIPES
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusible as fz
from fusible.recipes import MXFP8Quantizer, group_quantize


def full(value, *shape, device="cpu"):
    return MXFP8Quantizer()(torch.full(shape or (32, 32), float(value), device=device))


FIVE = torch.full((32, 32), 5.0)
ONE_PROCESS = {
    "broadcast": lambda q: dist.broadcast(q, 0),
    "scatter": lambda q: dist.scatter(q, [FIVE], 0),
    "reduce_scatter": lambda q: dist.reduce_scatter(q, [FIVE]),
    "reduce_scatter_tensor": lambda q: dist.reduce_scatter_tensor(q, FIVE),
    "all_gather": lambda q: dist.all_gather([q], full(5)),
    "all_gather_into_tensor": lambda q: dist.all_gather_into_tensor(q, FIVE),
    "all_to_all_single": lambda q: dist.all_to_all_single(q, FIVE),
    "gather": lambda q: dist.gather(full(5), [q], 0),
}


@pytest.mark.filterwarnings("ignore")  # torch 2.13 has other names for some
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_what_is_written_is_quantized(mesh, name):
    q, wanted = full(3), 3 if name == "broadcast" else 5
    ONE_PROCESS[name](q)
    assert torch.equal(q.dequantize(), torch.full((32, 32), float(wanted)))


def collectives(rank, folder, device):
    """Values after collectives over two processes, and the weights of a replica of each recipe."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what PyTorch deprecates

    found, own = {}, rank + 1
    q = full(own, device=device)
    dist.broadcast(q, 0)
    found["broadcast"] = q.dequantize()[0, 0].item()
    q = full(own, device=device)
    dist.all_reduce(q)
    found["all_reduce"] = q.dequantize()[0, 0].item()
    q = full(own, device=device)
    dist.all_reduce(q, async_op=True).wait()
    found["asynchronous"] = q.dequantize()[0, 0].item()
    q = full(own, 2, 32, 32, device=device)
    view = q[0, 0]
    dist.broadcast(view, 0)
    found["view"] = view[0].item(), q.dequantize()[0, 0, 0].item(), q.dequantize()[1, 0, 0].item()
    q = full(own, device=device).dequantize()
    q = group_quantize(q, MXFP8Quantizer(), 1, torch.tensor([32], device=device))
    dist.broadcast(q, 0)
    found["grouped"] = q.dequantize()[0, 0].item()
    mesh = dist.device_mesh.init_device_mesh(device, (2,))
    replicated = dist.tensor.distribute_tensor(
        full(own, device=device), mesh, [dist.tensor.Replicate()]
    )
    found["replicated"] = replicated.to_local().dequantize()[0, 0].item()
    for name, recipe in RECIPES.items():
        torch.manual_seed(0)
        with fz.quantized_model_init(recipe=recipe):
            module = fz.Sequential(
                fz.Linear(32, 64, bias=False, device=device),
                fz.GELU(),
                fz.Linear(64, 32, device=device),
            )
        replica = DistributedDataParallel(module)
        optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            replica(torch.randn(8, 32, device=device)).square().mean().backward()
            optimizer.step()
        found[name] = [torch.empty(p.shape) for p in module.parameters()]
        for mine, p in zip(found[name], module.parameters(), strict=True):
            mine.copy_(p)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)]
)
def test_over_two_processes(backend, device, tmp_path):
    if not dist.is_available() or not dist.is_backend_available(backend):
        pytest.skip(f"needs torch with {backend}")
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = process_groups.results(collectives, (device,), 2, tmp_path, backend)
    assert second["broadcast"] == second["grouped"] == second["replicated"] == 1
    assert second["all_reduce"] == second["asynchronous"] == 3
    assert second["view"] == (1, 1, 2)
    for name in RECIPES:
        assert all(map(torch.equal, first[name], second[name])), name


def test_receiving_is_refused(mesh):
    for tensor in (full(1), full(1, 2, 32, 32)[0, 0]):
        for source in (0, None):
            with pytest.raises(NotImplementedError, match="receive into an ordinary tensor"):
                dist.recv(tensor, source)


def test_an_alias_in_the_same_operation_sees_what_is_written():
    q = full(0)
    torch._foreach_add_([q, q.detach()], 1.0)
    assert torch.equal(q.dequantize(), torch.full((32, 32), 2.0))
