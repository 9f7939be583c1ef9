"""What pipelines import from Transformer Engine beside its ops."""

import inspect

import pytest
import torch
import torch.distributed as dist

import fusible as te
from fusible import recipes

ASKED = ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling", "bf16")


@pytest.mark.parametrize("name", ASKED)
def test_every_format_is_available_everywhere(name):
    available = getattr(te, f"is_{name}_available")
    assert available() is True
    assert available(return_reason=True) == (True, "")


def test_the_older_scopes_are_the_newer_ones():
    op, x = te.Linear(64, 64), torch.randn(32, 64)
    recipe = recipes.NVFP4BlockScaling()
    with te.autocast(recipe=recipe):
        want = op(x)
    with te.fp8_autocast(True, False, recipe, None):
        assert torch.equal(op(x), want)
    for scope in (
        te.autocast(enabled=True, calibrating=False, recipe=recipe, amax_reduction_group=None),
        te.autocast(True, False, recipe),
    ):
        with scope:
            assert torch.equal(op(x), want)
    with te.fp8_autocast(enabled=False, fp8_recipe=recipe):
        assert torch.equal(op(x), torch.nn.functional.linear(x, op.weight, op.bias))
    with te.autocast():
        by_default = op(x)
    with te.fp8_autocast(fp8_recipe=te.get_default_recipe()):
        assert torch.equal(op(x), by_default)
    with te.fp8_model_init(recipe=recipe):
        assert isinstance(te.Linear(64, 64).weight, te.QuantizedTensor)


class Tracker:
    """As Megatron's: random states by name, of which one is in force in ``fork()``."""

    def __init__(self):
        self.states = {"own": torch.Generator().manual_seed(3).get_state()}

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = dict(states)

    def dropped(self, x):
        generator = torch.Generator()
        generator.set_state(self.states["own"])
        mask = torch.rand(x.shape, generator=generator) < 0.5
        self.states["own"] = generator.get_state()
        return x * mask


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_is_repeated_under_its_recipe_with_its_random_states(use_reentrant):
    first, second, tracker = te.Linear(64, 64), te.Linear(64, 64), Tracker()
    x = torch.randn(32, 64, requires_grad=True)
    leaves = [x, *first.parameters(), *second.parameters()]

    def block(t):
        return second(tracker.dropped(first(t)))

    results, states = [], []
    for kept in (False, True):
        tracker.states = Tracker().states
        for leaf in leaves:
            leaf.grad = None
        with te.autocast(recipe=recipes.MXFP8BlockScaling()):
            if kept:
                y = te.checkpoint(
                    *(block, x),
                    use_reentrant=use_reentrant,
                    get_rng_state_tracker=lambda: tracker,
                    distribute_saved_activations=False,
                )
            else:
                y = block(x)
        y.square().sum().backward()
        results.append([y, *[leaf.grad for leaf in leaves]])
        states.append(tracker.states["own"])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(*states)


def test_graphs_are_captured_under_the_recipe(monkeypatch):
    seen = []

    def capture(modules, sample_args, *options, pool):
        seen.append((modules(*sample_args), options, pool))
        return modules

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    op, x, recipe = te.Linear(64, 64), torch.randn(32, 64), recipes.MXFP8BlockScaling()
    with te.autocast(recipe=recipe):
        want = op(x)
    assert te.make_graphed_callables(op, (x,), enabled=True, recipe=recipe, pool=7) is op
    te.make_graphed_callables(op, (x,), 4, fp8_enabled=True, fp8_recipe=recipe, calibrating=False)
    te.make_graphed_callables(op, (x,), enabled=None, recipe=recipe)
    assert torch.equal(seen[0][0], want)
    assert torch.equal(seen[1][0], want)
    assert torch.equal(seen[2][0], op(x))
    assert [made[1:] for made in seen] == [((3, False), 7), ((4, False), None), ((3, False), None)]
    with pytest.raises(ValueError, match="must be called without sample_kwargs"):
        te.make_graphed_callables(op, (x,), sample_kwargs={"a": x})
    with pytest.raises(ValueError, match="must be the same for all modules"):
        te.make_graphed_callables((op, op), ((x,), (x,)), enabled=(True, False))


def test_what_is_not_offered_says_so():
    for name in ("DelayedScaling", "CustomRecipe", "Float8Quantizer"):
        with pytest.raises(TypeError, match=f"{name} is not offered: "):
            getattr(recipes, name)(margin=0)
    for name, why in (
        ("initialize_ub", "userbuffers"),
        ("TransformerLayer", "whole layers are not; put ops"),
        ("Fp8Padding", "rows of groups need no padding"),
        ("moe_permute", "Dispatch sends"),
        ("MXFP8Tensor", "QuantizedTensor has every format"),
        ("basic", "every op is fusible.X"),
        ("optimizers", "use PyTorch's"),
        ("DelayedScaling", "its scales come from earlier calls"),
    ):
        with pytest.raises(AttributeError, match=f"fusible.{name} is not offered: {why}"):
            getattr(te, name)
    with pytest.raises(AttributeError, match=r"NVFP4BlockScaling is fusible.recipes.NVFP4BlockSca"):
        _ = te.NVFP4BlockScaling
    with pytest.raises(ValueError, match="userbuffers_options of BasicLinear must be None"):
        te.BasicLinear(8, 8, userbuffers_options={"comm_name": "qkv"})
    with pytest.raises(ValueError, match=r"use Linear\(..., bias=False\)"):
        te.BasicLinear(8, 8, tensor_parallel_mode="row")


def test_the_first_dimension_is_interleaved():
    weight = torch.randn(128, 8)
    blocks = te.interleave_glu_tensor(weight, 32)
    order = [0, 2, 1, 3]  # blocks of gate, linear, gate, linear
    assert torch.equal(blocks, torch.cat([weight.split(32)[block] for block in order]))
    assert torch.equal(te.deinterleave_glu_tensor(blocks, 32), weight)


def test_arguments_without_effect_change_no_value():
    x = torch.randn(4, 8)
    for plain, given in (
        (te.LayerNorm(8), te.LayerNorm(8, sm_margin={"forward": 2})),
        (te.RMSNorm(8), te.RMSNorm(8, sm_margin=2)),
        (te.L2Normalization(), te.L2Normalization(seq_length=4, micro_batch_size=1)),
    ):
        assert torch.equal(plain(x), given(x))
    for act in (te.ScaledSwiGLU, te.ScaledClampedQGeGLU, te.ScaledSiTUGLU):
        assert act().activation_recompute_in_mlp is False
        with pytest.raises(ValueError, match="activation_recompute_in_mlp must be False"):
            act(activation_recompute_in_mlp=True)
    assert te.ScaledSReLU().activation_recompute_in_mlp is False
    assert te.ScaledSReLU(activation_recompute_in_mlp=True).activation_recompute_in_mlp is True
    op = te.GroupedLinear(2, 8, 8, bias=False, scale_bias=True)
    plain = te.GroupedLinear(2, 8, 8, bias=False)
    plain.load_state_dict(op.state_dict())
    assert torch.equal(op(x, [1, 3]), plain(x, [1, 3]))


def test_a_bias_of_part_of_the_features(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        op = te.Bias(8, tensor_parallel=True)
        torch.nn.init.ones_(op.bias)
        assert torch.equal(op(torch.zeros(2, 8)), torch.ones(2, 8))
        assert te.AllReduce(None, reduce_in_backward=True).process_group is None
    finally:
        dist.destroy_process_group()


def test_constructors_show_their_arguments():
    """In ``help()`` and in editors."""
    for name in te.__all__:
        what = getattr(te, name)
        if not isinstance(what, type) or not issubclass(what, torch.nn.Module):
            continue
        parameters = [*inspect.signature(what).parameters]
        assert parameters == [*inspect.signature(what.__init__).parameters][1:], name
