"""experts_implementation="fusible" against transformers' eager experts, on small models."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import reference as ref
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusible as fz
from fusible.integrations import transformers as integration
from fusible.integrations import transformers_experts as blocks
from fusible.testing import assume_target

pytest.importorskip("transformers")
from hf_models import (
    FAMILIES,
    assert_same,
    experts_of,
    forward_backward,
    logits_and_grads,
    make_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_are_eagers(family: str) -> None:
    model = make_model(family)
    expected = logits_and_grads(model, "eager")
    assert_same(logits_and_grads(model, "fusible"), expected)
    block = experts_of(model)._fusible_block
    act = "none" if block.mlp is None else type(block.mlp[2]).__name__
    assert act == FAMILIES[family][2]
    # Nothing of ours is part of the model.
    assert not any("fusible" in name for name in model.state_dict())
    assert not any(isinstance(m, fz.GroupedLinear) for m in model.modules())


def test_weights_are_used_where_they_lie() -> None:
    for family in ("mixtral", "gpt_oss"):
        model = make_model(family)
        logits_and_grads(model, "fusible")
        experts = experts_of(model)
        (weight,) = experts._fusible_block.mlp[1].weights()
        assert weight.data_ptr() == experts.gate_up_proj.data_ptr()
        assert weight.is_contiguous() != experts.is_transposed
        # A new parameter is seen, as after load_state_dict(assign=True).
        experts.gate_up_proj = nn.Parameter(torch.zeros_like(experts.gate_up_proj))
        assert not experts._fusible_block.mlp[1].weights()[0].any()


def test_llama4_is_one_fused_run() -> None:
    """Its router's scores multiply the rows on their way to the experts."""
    model = make_model("llama4", num_experts_per_tok=1).bfloat16()
    with assume_target("sm90"):
        logits_and_grads(model, "fusible")
    block = experts_of(model)._fusible_block.mlp
    assert block.plan.fired == ("moe_experts_sm90",)
    assert block[0].scale_input
    assert not block[-1].weighted


def test_llama4_models_made_before_they_were_adapted() -> None:
    """They get their configuration late; without one they run as transformers' own."""
    model = make_model("llama4")
    expected = logits_and_grads(model, "eager")
    layers = [m for m in model.modules() if type(m).__name__ == "Llama4TextMoe"]
    for layer in layers:
        del layer.config, layer.experts.config
    assert_same(logits_and_grads(model, "fusible"), expected)
    assert not any(hasattr(layer.experts, "_fusible_block") for layer in layers)
    module = importlib.import_module("transformers.models.llama4.modeling_llama4")
    importlib.import_module("fusible.integrations.transformers_llama4").configure_models(module)
    assert_same(logits_and_grads(model, "fusible"), expected)
    assert all(hasattr(layer.experts, "_fusible_block") for layer in layers)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_replaced_weights_are_checked(family: str, compiled: bool, fresh_compiler: None) -> None:
    experts = experts_of(make_model(family))
    x, ids, weights = torch.randn(5, 32), torch.randint(4, (5, 2)), torch.rand(5, 2)
    call = torch.compile(experts, backend="aot_eager") if compiled else experts
    call(x, ids, weights)
    whole = experts.down_proj
    experts.down_proj = nn.Parameter(whole.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"down_proj of .* must be a floating 3-D .* torch.int8"):
        call(x, ids, weights)
    if not compiled:  # which falls back to the above after an error
        experts.down_proj = nn.Parameter(whole.detach()[:, :8])
        with pytest.raises(ValueError, match=r"down_proj of \w+ must be of \(4, 32, \d+\)"):
            call(x, ids, weights)
    experts.down_proj = nn.Parameter(whole.detach() * 2)
    y = call(x, ids, weights)
    torch.testing.assert_close(y, eager(experts, x, ids, weights, experts.down_proj))


def eager(experts: Any, x: Tensor, ids: Tensor, weights: Tensor, down: nn.Parameter) -> Tensor:
    """What transformers' own code gives with another second weight."""
    other = copy.deepcopy(experts)
    other.down_proj = down
    other.config._experts_implementation = "eager"
    return other(x, ids, weights)


def test_what_changes_after_the_first_call_counts() -> None:
    """Another gate, and fewer experts."""
    experts = experts_of(make_model("mixtral"))
    x, ids, weights = torch.randn(5, 32), torch.randint(2, (5, 2)), torch.rand(5, 2)
    experts(x, ids, weights)
    assert type(experts._fusible_block.mlp[2]) is fz.ScaledSwiGLU
    experts.act_fn = nn.GELU()
    y = experts(x, ids, weights)
    assert experts._fusible_block.mlp is None
    torch.testing.assert_close(y, eager(experts, x, ids, weights, experts.down_proj))
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[:2]))
    experts.num_experts = 2
    y = experts(x, ids, weights)
    torch.testing.assert_close(y, eager(experts, x, ids, weights, experts.down_proj))


class Swish(nn.Module):
    """SiLU at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def test_an_activation_of_its_own_is_called() -> None:
    """It has hooks, then a parameter; then the gate is replaced."""
    experts, given = experts_of(make_model("mixtral")), (torch.randn(5, 32), torch.rand(5, 2))
    x, ids, weights = given[0], torch.randint(4, (5, 2)), given[1]

    def check() -> None:
        want = copy.deepcopy(experts)
        want.config._experts_implementation = "grouped_mm"
        torch.testing.assert_close(experts(x, ids, weights), want(x, ids, weights))

    check()
    seen: list[int] = []
    hook = experts.act_fn.register_forward_hook(lambda m, i, o: (seen.append(len(o)), o / 2)[1])
    check()
    assert seen == [10, 10]
    hook.remove()
    check()
    assert experts._fusible_block.mlp is not None
    experts.act_fn = Swish()
    check()
    experts(x, ids, weights).sum().backward()
    assert experts.act_fn.beta.grad != 0
    with torch.no_grad():
        experts.act_fn.beta.fill_(2)
    check()
    experts.act_fn = nn.SiLU()
    experts._apply_gate = types.MethodType(lambda m, x: x.chunk(2, -1)[0].relu(), experts)
    check()


class Scaled(nn.Module):
    """SiLU at its start, without parameters or buffers."""

    beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def test_what_an_activation_depends_on_later_counts() -> None:
    """Its mode, its attributes, those of a gate of the user's."""
    experts = experts_of(make_model("mixtral"))
    x, ids, weights = torch.randn(50, 32), torch.randint(4, (50, 2)), torch.rand(50, 2)

    def check() -> None:
        want = copy.deepcopy(experts)
        want.config._experts_implementation = "grouped_mm"
        given = x, ids, weights
        with torch.random.fork_rng():
            got = experts(*given)
        torch.testing.assert_close(got, want(*given))

    experts.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    for training in (False, True):
        experts.train(training)
        y = experts(x, ids, weights)
        assert torch.equal(y, experts(x, ids, weights)) != training
    experts.act_fn = Scaled()
    check()
    experts.act_fn.beta = 2.0
    check()
    experts.act_fn = nn.GELU("tanh")
    check()
    assert experts._fusible_block.mlp is not None
    experts.act_fn.approximate = "none"
    check()
    experts.act_fn, experts.slope = nn.SiLU(), 1.0

    def gate(module: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        slope = module.slope if module.training else 1.0
        return gate * torch.sigmoid(slope * gate) * up

    experts._apply_gate = types.MethodType(gate, experts)
    check()
    assert experts._fusible_block.mlp is not None
    experts.slope = 3.0
    for training in (True, False, True):
        experts.train(training)
        check()


@pytest.mark.parametrize("limit", [10.0, 40.0, 2000.0])
def test_limits_of_any_size(limit: float) -> None:
    def clamped(m: Any, g: Tensor, u: Tensor) -> Tensor:
        return nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)

    found = blocks.activation_of(Experts(clamped))  # whose own limit is another
    assert found is None
    experts = Experts(clamped)
    experts.limit = limit
    found = blocks.activation_of(experts)
    assert type(found) is fz.ScaledClampedQGeGLU
    assert found.limit == limit


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gates_are_told_on_the_cpu(device: str, default_device: Any) -> None:
    """Whatever the default device is when a model is first called."""
    experts = experts_of(make_model("gpt_oss"))
    default_device(device)
    assert type(blocks.activation_of(experts)) is fz.ScaledClampedQGeGLU


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_ids_of_other_ranks_give_nothing(family: str) -> None:
    experts = experts_of(make_model(family)).double()
    count = experts.num_experts
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, count], [count + 5, 1], [count, count + 1]] * 3)
    y = experts(x, ids, weights)
    y.sum().backward()
    mine = ids < count
    # The same with every foreign choice's weight zero, at any expert of ours.
    experts.config._experts_implementation = "eager"
    x2 = x.detach().clone().requires_grad_()
    expected = experts(x2, ids.clamp(max=count - 1), (weights * mine).detach())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, torch.autograd.grad(expected.sum(), x2)[0])
    assert not y[2::3].any()
    assert not x.grad[2::3].any()
    assert not weights.grad[~mine].any()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_compiled_models(family: str, fresh_compiler: None) -> None:
    model = make_model(family)
    expected = logits_and_grads(model, "eager")
    model.set_experts_implementation("fusible")
    # The block is made while the model is traced.
    assert "_fusible_block" not in vars(experts_of(model))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(forward_backward(model, compiled), expected)


def test_compiled_once_for_any_number_of_tokens(fresh_compiler: None) -> None:
    model = make_model("mixtral", num_hidden_layers=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (11, 13, 29, 17):  # the second makes the number of tokens symbolic
        ids = torch.randint(0, 64, (2, length))
        got = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(got, model(ids, use_cache=False).logits)
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_compiled_one_by_one_share_their_code(fresh_compiler: None) -> None:
    model = make_model("mixtral", num_hidden_layers=3)
    ids = torch.randint(0, 64, (2, 11))
    expected = copy.deepcopy(model)(ids, use_cache=False).logits
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert counter.frame_count == 1


def test_bf16_training_step_and_copies() -> None:
    model = make_model("mixtral").to(torch.bfloat16)
    first = logits_and_grads(model, "fusible")
    again = logits_and_grads(copy.deepcopy(model), "fusible")
    assert torch.equal(first[0], again[0])
    eager = logits_and_grads(model, "eager")
    torch.testing.assert_close(first[0], eager[0], rtol=0.02, atol=0.02)
    # A copy's block reads the copy's parameters.
    other = copy.deepcopy(model)
    experts = experts_of(other)
    assert experts._fusible_block.mlp[1].weights()[0] is experts.gate_up_proj


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_pickled_with_their_blocks(family: str) -> None:
    model = make_model(family)
    expected = logits_and_grads(model, "fusible")
    loaded = pickle.loads(pickle.dumps(model))
    assert_same(logits_and_grads(loaded, "fusible"), expected)


def test_saved_and_checkpointed_models(tmp_path: Path) -> None:
    model = make_model("gpt_oss")
    expected = logits_and_grads(model, "fusible")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="fusible")
    # Its weights lie where the file has them, not where PyTorch allocates. Two layers of ten
    # results in a row, of sums of 32 to 64 terms.
    got = forward_backward(loaded, loaded)[0]
    ref.assert_equal_but_for_rounding(got, expected[0], roundings=20 * 64**0.5)
    model.train()
    newer = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
    (newer or model.gradient_checkpointing_enable)()
    assert_same(logits_and_grads(model, "fusible"), expected)


def test_autocast_and_recipes() -> None:
    model = make_model("mixtral", hidden_size=64, intermediate_size=64)
    expected = logits_and_grads(model, "fusible")[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = logits_and_grads(model, "fusible")[0]
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)
    with fz.autocast(recipe=fz.recipes.MXFP8BlockScaling()):
        quantized = logits_and_grads(model, "fusible")[0]
    assert not torch.equal(quantized, expected)
    torch.testing.assert_close(quantized, expected, rtol=0.2, atol=0.2)


def test_quantized_weights_are_reused() -> None:
    model = make_model("mixtral", hidden_size=64, intermediate_size=64)
    with fz.autocast(recipe=fz.recipes.MXFP8BlockScaling()):
        expected = logits_and_grads(model, "fusible")
        with fz.reuse_quantized_weights(model):
            for _ in range(2):
                assert torch.equal(logits_and_grads(model, "fusible")[0], expected[0])
            linears = [experts_of(model)._fusible_block.mlp[i] for i in (1, 3)]
            assert all(len(linear._operand_cache._cached.operands) == 1 for linear in linears)


@pytest.mark.parametrize(
    ("family", "name"), [("mixtral", "Mixtral"), ("gpt_oss", "GptOss")], ids=["mixtral", "gpt_oss"]
)
def test_explain_takes_a_whole_model(family: str, name: str) -> None:
    model = make_model(family, num_hidden_layers=1).to(torch.bfloat16)
    explanation = fz.explain(model, torch.zeros(2, 11, dtype=torch.int64), target="sm90")
    assert explanation.fired == ("moe_experts_sm90",)
    place = f"{name}ForCausalLM.model.layers.0.mlp.experts.mlp"
    assert str(explanation).startswith(f"{place}.0 to {place}.4: sm90")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_fused_ops_of_hopper_give_the_same(family: str) -> None:
    model = make_model(family).to(torch.bfloat16)
    expected = logits_and_grads(model, "fusible")
    with assume_target("sm90"):
        got = logits_and_grads(model, "fusible")
        block = experts_of(model)._fusible_block
    assert block.mlp.plan.fired == ("moe_experts_sm90",)
    torch.testing.assert_close(got[0], expected[0], rtol=0.02, atol=0.02)
    for name, grad in expected[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=0.05, atol=0.02, msg=name)


# What an experts module says of itself, with gates that no model here has.


class Experts(nn.Module):
    """An experts module as transformers' decorator leaves one."""

    def __init__(self, gate: Any = None, *, norm: bool = False, **weights: Tensor) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, False, False
        self.has_post_expert_norm = norm
        shapes = {"gate_up_proj": (3, 16, 8), "down_proj": (3, 8, 8)}
        for name, shape in shapes.items():
            weight = weights.get(name, torch.randn(shape, dtype=torch.float64))
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        self.gate, self.limit, self.alpha = gate, 2.0, 1.3
        self.post_expert_norm = nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)

    def _apply_gate(self, x: Tensor) -> Tensor:
        return self.gate(self, *x.chunk(2, dim=-1))


def reference(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for t, choices in enumerate(ids.tolist()):
        for j, e in enumerate(choices):
            h = experts._apply_gate(x[t : t + 1] @ experts.gate_up_proj[e].t())
            h = h @ experts.down_proj[e].t()
            if experts.has_post_expert_norm:
                h = experts.post_expert_norm(h)
            y[t] += weights[t, j] * h[0]
    return y


GATES = {
    "silu": (lambda m, g, u: nn.functional.silu(g) * u, "ScaledSwiGLU"),
    "gelu": (lambda m, g, u: nn.functional.gelu(g) * u, None),
    "clamped silu": (
        lambda m, g, u: nn.functional.silu(g.clamp(max=m.limit)) * u.clamp(-m.limit, m.limit),
        "ScaledClampedQGeGLU",
    ),
    "clamped after": (lambda m, g, u: nn.functional.silu(g).clamp(max=m.limit) * u, None),
    "gpt-oss": (
        lambda m, g, u: (u.clamp(-m.limit, m.limit) + 1) * g.clamp(max=m.limit)
        * torch.sigmoid(m.alpha * g.clamp(max=m.limit)),
        "ScaledClampedQGeGLU",
    ),
}  # fmt: skip


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_gates_are_told_by_their_values(gate: str, norm: bool) -> None:
    torch.manual_seed(0)
    function, act = GATES[gate]
    experts = Experts(function, norm=norm)
    found = blocks.activation_of(experts)
    assert (None if found is None else type(found).__name__) == (None if norm else act)
    x = 3 * torch.randn(7, 8, dtype=torch.float64)
    ids, weights = torch.randint(0, 3, (7, 2)), torch.rand(7, 2, dtype=torch.float64)
    y = integration.experts_forward(experts, x, ids, weights)
    torch.testing.assert_close(y, reference(experts, x, ids, weights))


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (torch.ones(16, 8), r"torch.float32 of shape \(16, 8\) on cpu"),
        (torch.ones(3, 16, 8).to(torch.int8), r"torch.int8 of shape \(3, 16, 8\) on cpu"),
    ],
)
def test_other_weights_are_refused(weight: Tensor, got: str) -> None:
    experts = Experts(gate_up_proj=weight)
    with pytest.raises(ValueError, match=f"gate_up_proj of Experts .* got {got}; use experts_imp"):
        blocks.ExpertsBlock(experts)
    del experts.gate_up_proj
    with pytest.raises(ValueError, match="got None; use"):
        blocks.ExpertsBlock(experts)


def test_transformers_too_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17"):
        integration.register()


def test_import_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert importlib.reload(integration).NAME == "fusible"


def test_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("transformers_moe")
    before, after = example.main(["--steps", "6"])
    assert after < before - 0.3
