"""``fusible.integrations.torchtitan`` compared with torchtitan's own experts.

torchtitan's requirements do not go with those of other tests: ``make torchtitan`` runs these in an
environment of its own.
"""

import copy
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import fusible as fz

# Of torchtitan and of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

OVERRIDE = "fusible.integrations.torchtitan.routed_experts"
TOKENS = 32


def overridden(config, **arguments):
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = copy.deepcopy(config)
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, arguments)]), config)
    return config


def model_config(name):
    """The first two layers with experts of a debug model, of fewer features each."""
    if name == "qwen3":
        from torchtitan.models.qwen3 import qwen3_configs

        config = qwen3_configs["debugmodel_moe"](attn_backend="flex")
    else:
        from torchtitan.models.deepseek_v3 import deepseekv3_configs

        config = deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard")
    config.layers = [layer for layer in config.layers if layer.moe is not None][:2]
    for layer in config.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
    return config


def made(config):
    module = config.build()
    module.init_states()
    return module


def exact(moe, x, dy):
    """Output and gradients of the routed experts in FP64, expert by expert, as ``moe`` routes."""
    scores, ids, _ = moe.router(x, moe.expert_bias_E)
    state = moe.routed_experts.inner_experts.state_dict()
    weights = [state[f"w{i}"].double() for i in ("1_EFD", "3_EFD", "2_EDF")]
    leaves = [t.detach().double().requires_grad_() for t in (x, scores, *weights)]
    x, scores, w1, w3, w2 = leaves
    flat, y = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
    for e in range(len(w1)):
        token, j = (ids.flatten(0, 1) == e).nonzero(as_tuple=True)
        made = (torch.nn.functional.silu(flat[token] @ w1[e].T) * (flat[token] @ w3[e].T)) @ w2[e].T
        y = y.index_add(0, token, made * scores.flatten(0, 1)[token, j, None])
    y = y.view_as(x)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def routed(moe, x, dy):
    """The same of ``moe``."""
    scores, ids, routing = moe.router(x, moe.expert_bias_E)
    counts = torch.zeros_like(routing).scatter_(-1, ids, 1.0).sum((0, 1)).long()
    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    y = moe.routed_experts(x, scores, ids, counts)
    y.backward(dy)
    return [y.detach(), x.grad, scores.grad, *gradients(moe)]


def gradients(moe):
    """Of w1, w3 and w2, also where w1 and w3 are one."""
    inner = moe.routed_experts.inner_experts
    grads = {n: getattr(p.grad, "_local_tensor", p.grad) for n, p in inner.named_parameters()}
    if "w13" in grads:
        halves = grads.pop("w13").unbind(2)
        grads["w1_EFD"], grads["w3_EFD"] = (t.flatten(1, 2) for t in halves)
    return [grads[n] for n in ("w1_EFD", "w3_EFD", "w2_EDF")]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("arguments", [{}, {"recompute_rows": True}], ids=str)
def test_values_and_gradients_are_as_near_to_exact_ones_as_torchtitans(model, arguments):
    config = model_config(model).layers[0].moe
    stock, ours = made(config), made(overridden(config, **arguments))
    missing = ours.load_state_dict(stock.state_dict())
    assert not missing.missing_keys
    x, dy = (torch.randn(2, TOKENS, config.router.gate.in_features) for _ in "xy")
    want = exact(stock, x, dy)
    pairs = zip(routed(ours, x, dy), routed(stock, x, dy), want, strict=True)
    for got, theirs, wanted in pairs:
        assert got.dtype == theirs.dtype
        assert got.shape == theirs.shape
        assert error(got, wanted) <= 1.2 * error(theirs, wanted)
    whole = [moe(x) for moe in (ours, stock)]  # with shared experts, where there are any
    assert error(*whole) < 0.01


def test_state_dicts_are_torchtitans():
    config = model_config("qwen3").layers[0].moe
    stock, ours = made(config), made(overridden(config))
    state = stock.state_dict()
    ours.load_state_dict(state)
    assert set(ours.state_dict()) == set(state)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, state[name]), name
    stock.load_state_dict(ours.state_dict())


def test_weights_start_as_torchtitans():
    config = model_config("qwen3").layers[0].moe
    stock, ours = made(config).state_dict(), made(overridden(config)).state_dict()
    for name, value in stock.items():
        if value.numel() > 1000:
            assert ours[name].std().item() == pytest.approx(value.std().item(), rel=0.02), name


def test_the_trainers_config():
    """Every layer of its model, by the option of its command line, with arguments."""
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug()
    imports = parse_cli_imports([f'{OVERRIDE}={{"send": "all", "receive_factor": 1.5}}'])
    config.override = OverrideConfig(imports=imports)
    layers = config.model_spec.model.layers
    assert len(apply_overrides(config.override, config)) == len(layers)
    assert "FusibleExperts" in type(layers[-1].moe.routed_experts.inner_experts).__qualname__
    config.to_dict()
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()


def test_a_recipe_and_what_runs():
    config = model_config("qwen3").layers[0].moe
    plain, mxfp8 = (
        made(overridden(config, **arguments)) for arguments in ({}, {"recipe": "MXFP8BlockScaling"})
    )
    mxfp8.load_state_dict(plain.state_dict())
    x = torch.randn(1, TOKENS, 256)
    assert 0.01 < error(mxfp8(x), plain(x)) < 0.1
    inner = plain.routed_experts.inner_experts
    given = [t.flatten(0, 1) for t in (x, *plain.router(x, None)[:2])]
    explanation = fz.explain(inner, *given, target="sm90")
    assert explanation.fired == ("moe_experts_sm90",)


def test_refusals():
    from torchtitan.models.gpt_oss import gptoss_configs

    config = model_config("qwen3").layers[0].moe
    for name in ("MXFP9", "ByPass", "autocast"):
        with pytest.raises(ValueError, match="recipe must be the name of a class"):
            overridden(config, recipe=name)
    with pytest.raises(ValueError, match="must be torchtitan's GroupedExperts"):
        overridden(gptoss_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard"))


# --- two processes --------------------------------------------------------------------------------


def parallel(rank, backend, folder):
    """Experts of one layer over two processes, beside all of them in one."""
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    parallel_dims.device_type = "cpu"  # "cuda" where there is no device
    set_spmd_backend(backend)
    sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2}
    dims = parallel_dims.ParallelDims(**sizes, world_size=2, spmd_backend=backend)
    dims.build_mesh()
    config = model_config("qwen3")
    torch.manual_seed(0)
    alone = made(overridden(config.layers[0].moe))
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    moe = overridden(config, send="rows").layers[0].moe.build()
    moe.load_state_dict(alone.state_dict())
    moe.parallelize(dims)
    x, dy = (torch.randn(2, TOKENS, 256) for _ in "xy")
    want = [t.chunk(2)[rank] for t in routed(alone, x, dy)]
    with get_spmd_context(parallel_dims=dims)():
        got = routed(moe, x[rank : rank + 1], dy[rank : rank + 1])
    same = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    state = moe.routed_experts.inner_experts.state_dict()
    if backend == "partial_dtensor":  # with spmd_types FSDP makes DTensors of the parts
        dcp.save(state, checkpoint_id=folder)
        stock = made(model_config("qwen3").layers[0].moe).routed_experts.inner_experts
        loaded = stock.state_dict()
        dcp.load(loaded, checkpoint_id=folder)
        wanted = alone.routed_experts.inner_experts.state_dict()
        same += [torch.equal(loaded[name], value) for name, value in wanted.items()]
    return same


def worker(rank, backend, folder):
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    try:
        found = parallel(rank, backend, f"{folder}/saved")
    except Exception:
        found = traceback.format_exc()
    torch.save(found, Path(folder) / f"found{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_two_processes_have_the_bits_of_one(tmp_path, backend):
    """Outputs and gradients; and a checkpoint of both loads into torchtitan's own experts."""
    mp.spawn(worker, (backend, str(tmp_path)), 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}")
        assert not isinstance(found, str), found
        assert len(found) >= 6
        assert all(found)
