"""Weights quantized once for every update: values, and how often they are quantized."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference as ref
import torch
from checks import Recorded
from number_formats import BLOCK, BLOCK_FP8, CURRENT, MX, each_recipe
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_hooks
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible.testing import assume_target

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}
SIZES = [20, 0, 28]


def of_weights(func, args):
    """The quantizations of what has 64 rows, as the weights, or the stacks of them."""
    if func is torch.ops.fusible.quantize.default and args[0].shape[-2] == 64:
        yield func
    if func is torch.ops.fusible.quantize_k_major.default and args[0].dim() == 3:
        yield func


def linear(dtype=torch.float32):
    return fz.Linear(32, 64, dtype=dtype)


def kept(module):
    (op,) = [op for op in module.basic_ops if hasattr(op, "_operand_cache")]
    return op._operand_cache._cached.operands


def mlp(kind, dtype=torch.float32, inner=32):
    """A dense linear and a grouped MLP, by default with weights of 64 rows, and a call of 48."""
    single = kind == "single"
    torch.manual_seed(0)
    module = fz.Sequential(
        linear(dtype),
        fz.GroupedLinear(3, 64, 2 * inner, single_grouped_weight=single, dtype=dtype),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(3, inner, 64, single_grouped_weight=single, dtype=dtype),
    )
    splits, scales = torch.tensor(SIZES), torch.rand(48)
    return module, lambda m, x: m(x, splits, scales, splits)


def output(op, x, recipe=MX):
    with fz.autocast(recipe=recipe), torch.no_grad():
        return op(x)


def train(module, call, recipe, optimizer, dtype=torch.float32, steps=5):
    """Outputs and final parameters of ``steps`` of two micro-batches, and the quantizations."""
    torch.manual_seed(1)
    steps = [[torch.randn(48, 32, dtype=dtype) for _ in range(2)] for _ in range(steps)]
    optimizer, outputs = optimizer(module.parameters()), []
    with Recorded(of_weights) as weights:
        for batches in steps:
            for x in batches:
                x.requires_grad_()
                with fz.autocast(recipe=recipe):
                    y = call(module, x)
                y.square().mean().backward()
                outputs += [y.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
    return [*outputs, *[p.detach().clone() for p in module.parameters()]], len(weights.made)


def trained_both_ways(module, call, *given):
    """How often weights are quantized: in every forward, and once for every update."""
    other = copy.deepcopy(module)
    want, in_every_forward = train(module, call, *given)
    with fz.reuse_quantized_weights(other, until_updated=True):
        got, once = train(other, call, *given)
    ref.assert_equal(got, want)
    return in_every_forward, once


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", ["single", "separate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_has_the_bits_of_quantizing_in_every_forward(make, kind, dtype):
    assert trained_both_ways(*mlp(kind, dtype), MX, make, dtype) == (2 * 5 * 3, 5 * 3)


@pytest.mark.parametrize("recipe", [MX, BLOCK_FP8], ids=str)
@pytest.mark.parametrize("trained_first", [True, False])
def test_forwards_with_and_without_gradients_share_one_copy(recipe, trained_first):
    op, x = linear(), torch.randn(48, 32, requires_grad=True)
    with fz.reuse_quantized_weights(op, until_updated=True), Recorded(of_weights) as weights:
        outputs = []
        for trains in (trained_first, not trained_first) * 2:
            with torch.set_grad_enabled(trains), fz.autocast(recipe=recipe):
                outputs.append(op(x))
        assert len(weights.made) == (1 if trained_first else 2)  # no transposed copy before
        assert len(kept(op)) == 1
    assert all(torch.equal(y, outputs[0]) for y in outputs)


@each_recipe
def test_every_recipe_trains_to_the_same_bits(recipe):
    trained_both_ways(*mlp("single"), recipe, OPTIMIZERS["adamw_fused"])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", ["single", "separate"])
def test_fp8_products_train_to_the_same_bits(make, kind):
    module, call = mlp(kind, torch.bfloat16, inner=64)
    with assume_target("sm90"):
        counts = trained_both_ways(module, call, BLOCK_FP8, make, torch.bfloat16)
    assert "grouped_mlp_sm90_fp8" in module.plan.fired
    assert counts == (2 * 5 * 3, 5 * 3)


def master_weights(op):
    """A fused step of FP32 copies, and a copy of these to the weights that no version sees."""
    masters = [p.detach().clone() for p in op.parameters()]
    for master in masters:
        master.grad = torch.ones_like(master)
    torch.optim.SGD(masters, lr=1, fused=True).step()
    for p, master in zip(op.parameters(), masters, strict=True):
        p.data.copy_(master)


@torch.no_grad()
def changed_view(op):
    op.weight[3:5].mul_(3)


def loaded(op):
    op.load_state_dict(linear().state_dict())


def replaced(op):
    op.weight = nn.Parameter(op.weight.detach() + 1)


def changed_in_inference_mode(op):
    with torch.inference_mode():
        op.weight.add_(1)


def compiled_step(op):
    for p in op.parameters():
        p.grad = torch.ones_like(p)
    torch.compile(torch.optim.AdamW(op.parameters(), fused=True).step, backend="aot_eager")()


def assigned(op):
    op.weight.data = op.weight.data + 1


def assigned_where_the_first_was(op):
    value = (op.weight.data + 1).to(torch.bfloat16)
    op.weight.data = value
    op.weight.data = value.float()


def assigned_in_the_same_memory(op):
    op.weight.data = op.weight.data.view(32, 64).t()


@torch.no_grad()
def of_a_vector(op):
    vector_to_parameters(2 * parameters_to_vector(op.parameters()), op.parameters())


UPDATES = [
    changed_view, loaded, replaced, changed_in_inference_mode, master_weights, compiled_step,
    assigned, assigned_where_the_first_was, assigned_in_the_same_memory, of_a_vector,
    lambda op: nn.init.normal_(op.weight),
    lambda op: nn.init.normal_(op.weight.detach()),
    lambda op: op.reset_parameters(),
    lambda op: op.to(torch.bfloat16),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("stored", [False, True])
def test_an_update_is_seen_by_the_next_forward(update, stored):
    with fz.quantized_model_init(stored, recipe=MX):
        op = linear()
    x = torch.randn(48, 32)
    with fz.reuse_quantized_weights(op, until_updated=True):
        before = output(op, x)
        with Recorded(of_weights) as weights:
            assert torch.equal(output(op, x), before)
        assert len(weights.made) == 0
        update(op)
        dtype = op.weight.dtype
        after = output(op, x.to(dtype))
    assert torch.equal(after, output(op, x.to(dtype)))
    assert dtype == torch.bfloat16 or not torch.equal(after, before)


@pytest.mark.parametrize("until_updated", [False, True])
def test_parameters_can_be_swapped(until_updated):
    op, x = linear(), torch.randn(48, 32)
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with fz.reuse_quantized_weights(op, until_updated=until_updated):
            before = output(op, x)
            op.load_state_dict(linear().state_dict())
            after = output(op, x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    assert torch.equal(after, output(op, x)) == until_updated
    assert not torch.equal(output(op, x), before)


def test_writing_the_pieces_of_a_stored_weight_is_seen():
    with fz.quantized_model_init(recipe=BLOCK):
        op = linear()
    x = torch.randn(48, 32)
    with fz.reuse_quantized_weights(op, until_updated=True):
        before = output(op, x, BLOCK)
        op.weight.quantize_(2 * op.weight.dequantize())
        assert torch.equal(output(op, x, BLOCK) - op.bias, 2 * (before - op.bias))


def test_a_write_that_breaks_the_promise_is_not_seen():
    op, x = linear(), torch.randn(48, 32)
    with fz.reuse_quantized_weights(op, until_updated=True):
        before = output(op, x)
        op.weight.data.add_(1)
        assert torch.equal(output(op, x), before)
    assert not torch.equal(output(op, x), before)


def test_other_recipes_keep_operands_of_their_own():
    op, x = linear(), torch.randn(48, 32)
    want = {recipe: output(op, x, recipe) for recipe in (MX, BLOCK, CURRENT)}
    with fz.reuse_quantized_weights(op, until_updated=True), Recorded(of_weights) as weights:
        for _ in range(2):
            assert all(torch.equal(output(op, x, recipe), y) for recipe, y in want.items())
        assert len(weights.made) == 3
        with torch.no_grad():
            op.weight.mul_(2)
        assert torch.equal(output(op, x) - op.bias, 2 * (want[MX] - op.bias))
        assert len(kept(op)) == 1  # those of the old values are freed


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [MX, BLOCK])
def test_a_repeated_forward_has_the_operands_of_the_first(use_reentrant, recipe):
    def step(module, call, x, scope):
        with scope, Recorded(of_weights) as weights:
            for _ in range(2):
                with fz.autocast(recipe=recipe):
                    y = checkpoint(call, module, x, use_reentrant=use_reentrant)
                y.square().mean().backward()
        return len(weights.made)

    results = []
    for kept in (True, False):
        module, call = mlp("single")
        x = torch.randn(48, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        scope = fz.reuse_quantized_weights(module if kept else nn.Identity(), until_updated=True)
        count = step(module, call, x, scope)
        # A reentrant checkpoint runs first without gradients, for the forward use alone.
        assert count == (3 * (1 + use_reentrant) if kept else 4 * 3)
        results.append([x.grad, *[p.grad for p in module.parameters()]])
    ref.assert_equal(*results)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_computed_weight_is_quantized_in_every_forward_and_not_kept():
    op, x = linear(), torch.randn(48, 32, requires_grad=True)
    parametrize.register_parametrization(op, "weight", Doubled())
    with fz.reuse_quantized_weights(op, until_updated=True), Recorded(of_weights) as weights:
        for _ in range(2):
            with fz.autocast(recipe=MX):
                y = op(x)
            op.parametrizations.weight.original.data.add_(1)  # no promise about this one
        assert len(weights.made) == 2
        assert not kept(op)
    with torch.no_grad():
        op.parametrizations.weight.original.sub_(1)
    assert torch.equal(y, output(op, x))


def test_a_weight_without_a_version_is_quantized_in_every_forward():
    with torch.inference_mode():
        op = linear()
        x = torch.randn(48, 32)
        with fz.reuse_quantized_weights(op, until_updated=True):
            before = output(op, x)
            op.weight.add_(1)
            assert not torch.equal(output(op, x), before)


def test_compiled_code_ignores_the_scope(fresh_compiler):
    op, x = linear(), torch.randn(48, 32)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    with fz.reuse_quantized_weights(op, until_updated=True):
        output(op, x)
        output(compiled, x)
        op.weight.data.zero_()
        assert torch.equal(output(compiled, x), op.bias.expand(48, 64))


def test_a_capture_ignores_the_scope(monkeypatch):
    op, x = linear(), torch.randn(48, 32)
    with fz.reuse_quantized_weights(op, until_updated=True):
        output(op, x)
        op.weight.data.zero_()
        monkeypatch.setattr("fusible.calls.capturing", lambda: True)
        assert torch.equal(output(op, x), op.bias.expand(48, 64))


def test_a_copy_made_inside_is_outside_of_the_scope():
    op, x = linear(), torch.randn(48, 32)
    with fz.reuse_quantized_weights(op, until_updated=True):
        output(op, x)
        other = copy.deepcopy(op)
    other.weight.data.zero_()
    assert torch.equal(output(other, x), other.bias.expand(48, 64))


def test_scopes_inside_share_what_is_kept_and_steps_count_until_the_last_ends():
    op, x = linear(), torch.randn(48, 32)
    optimizer = torch.optim.SGD(op.parameters(), lr=1, fused=True)
    with fz.reuse_quantized_weights(op, until_updated=True), Recorded(of_weights) as weights:
        for scope in (False, True):
            with fz.reuse_quantized_weights(op, until_updated=scope):
                output(op, x)
        assert len(weights.made) == 1
        op.weight.grad = torch.ones_like(op.weight)
        before = output(op, x)
        optimizer.step()
        after = output(op, x)
    assert not torch.equal(after, before)
    assert torch.equal(after, output(op, x))
    assert not optimizer_hooks


def test_threads_of_several_recipes_read_their_own_operands():
    op, x = linear(), torch.randn(48, 32)
    want = {recipe: output(op, x, recipe) for recipe in (MX, BLOCK, CURRENT)}

    def work(recipe):
        for _ in range(50):
            assert torch.equal(output(op, x, recipe), want[recipe])
            if recipe is MX:
                with torch.no_grad():
                    op.bias.add_(0)  # any version
                    op.weight.mul_(1)

    with (
        fz.reuse_quantized_weights(op, until_updated=True),
        ThreadPoolExecutor(len(want)) as threads,
    ):
        list(threads.map(work, want))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("make", ["sgd", "adamw_foreach", "adamw_fused"])
def test_fsdp2_gathers_new_values_after_a_step_and_after_a_load(mesh, reshard, stored, make):
    """A gathered weight is filled again without another version."""
    with fz.quantized_model_init(stored, recipe=MX):
        sharded, call = mlp("single")
    plain = copy.deepcopy(sharded)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
    want, in_every_forward = train(plain, call, MX, OPTIMIZERS[make], steps=3)
    with fz.reuse_quantized_weights(sharded, until_updated=True):
        got, once = train(sharded, call, MX, OPTIMIZERS[make], steps=3)
        ref.assert_equal(got[:12], want[:12])
        assert once <= in_every_forward // 2
        x = torch.randn(48, 32)

        def gathered():
            y = output(lambda x: call(sharded, x), x)
            sharded.reshard()
            return y

        sharded.reshard()
        before = gathered()
        state = {name: t.clone() for name, t in sharded.state_dict().items()}
        with torch.no_grad():
            for op in (sharded[0], sharded[1], sharded[3]):
                op.weight.mul_(0.5)
        assert not torch.equal(gathered(), before)
        sharded.load_state_dict(state)
        assert torch.equal(gathered(), before)


def test_explain_says_when_weights_are_quantized():
    op, x = linear(), torch.randn(48, 32)

    def said():
        with fz.autocast(recipe=MX):
            return str(fz.explain(op, x))

    assert "quantized once" not in said()
    with fz.reuse_quantized_weights(op):
        assert "weights are quantized once: reuse_quantized_weights" in said()
    with fz.reuse_quantized_weights(op, until_updated=True):
        assert "quantized once, and again after an update: reuse_quantized_weights" in said()


def test_the_option_is_a_bool():
    with (
        pytest.raises(TypeError, match="until_updated"),
        fz.reuse_quantized_weights(linear(), until_updated=1),
    ):
        pass


@pytest.mark.parametrize("until_updated", [False, True])
@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
@each_recipe
def test_explain_leaves_no_fake_weights_to_later_forwards(recipe, target, until_updated):
    module, _ = mlp("single", torch.bfloat16)
    x, splits, scales = torch.randn(48, 32).bfloat16(), torch.tensor(SIZES), torch.rand(48)
    with assume_target(target), fz.autocast(recipe=recipe), torch.no_grad():
        expected = module(x, splits, scales, splits)
        with fz.reuse_quantized_weights(module, until_updated=until_updated):
            fz.explain(module, x, splits, scales, splits)
            assert torch.equal(module(x, splits, scales, splits), expected)


@pytest.mark.parametrize("until_updated", [False, True])
def test_weights_inside_of_vmap_are_quantized_in_every_forward(until_updated):
    op, x = linear().requires_grad_(False), torch.randn(48, 32)
    batches = {name: torch.stack([p, 2 * p]) for name, p in op.named_parameters()}

    def call(weights):
        with fz.autocast(recipe=MX):
            return functional_call(op, weights, (x,))

    with torch.no_grad():
        want = [call({name: t[i] for name, t in batches.items()}) for i in range(2)]
        with fz.reuse_quantized_weights(op, until_updated=until_updated):
            for _ in range(2):
                ref.assert_equal(list(torch.vmap(call)(batches)), want)


def test_memory_of_computed_weights_is_not_kept():
    op, x = linear(), torch.randn(48, 32)
    with fz.reuse_quantized_weights(op), fz.autocast(recipe=MX), torch.no_grad():
        weights = {name: p.detach() * 2 for name, p in op.named_parameters()}
        memory = weakref.ref(weights["weight"].untyped_storage())
        functional_call(op, weights, (x,))
        del weights
        gc.collect()
        assert memory() is None
