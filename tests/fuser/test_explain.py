"""explain: what it prints and draws, and that it changes nothing."""

import copy
import re
import xml.etree.ElementTree as ET
from collections import OrderedDict
from itertools import combinations, pairwise

import pytest
import reference as ref
import torch
from number_formats import NV
from torch import nn

import fusible as fz
from fusible import extend


def test_tree_of_a_fused_run():
    seq = fz.Sequential(
        fz.Linear(8, 8), fz.SwiGLU(), fz.MakeExtraOutput(in_place=True), fz.BasicLinear(4, 4)
    )
    text = str(fz.explain(seq, torch.randn(3, 8)))
    head, *lines = text.splitlines()
    assert head.endswith("cpu, recipe none, float32, training")
    body = "\n".join(lines)
    for part in (
        "BasicLinear(in_features=8, out_features=8)",
        "forward as part of LinearBiasActivation (ops[0:2])",
        "backward as part of BackwardLinearAdd (ops[3:5])",
        "SwiGLU()",
    ):
        assert part in body
    assert "not fused" not in body


class Twice(extend.BasicOperation):
    def formula(self, x):
        return 2 * x


class SavesX(fz.FusedOperation):
    def fuser_forward(self, ctxs, x, **_):
        ctxs[0].save_for_backward(x)
        return 2 * x, [()]


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_formula_saves(fused, own_fusions):
    if fused:
        extend.register_forward_fusion(lambda ops, *, recipe: [SavesX(ops)])
    text = str(fz.explain(Twice(), torch.randn(3, 8, requires_grad=True)))
    assert ("saves x, parameters\n" in text) == fused
    assert ("saves what autograd keeps of its formula\n" in text) != fused
    assert "saves" not in str(fz.explain(Twice(), torch.randn(3, 8)))


def test_reasons_are_printed():
    seq = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput(), fz.SiLU())
    with torch.autocast("cpu", torch.bfloat16):
        text = str(fz.explain(seq, torch.randn(3, 8), torch.randn(3, 8)))
    assert "linear_add (forward) for ops[0:2]\n" in text
    assert (
        "linear.param_dtype must be equal to linear.dtype (which is bfloat16), got float32" in text
    )
    assert "no fusion rule covers SiLU (ops[2:3])" in text


@pytest.mark.parametrize("target", [None, "cpu", "sm90", "sm100"])
def test_grouped_mlp_on_every_target(target):
    mlp = ref.grouped_mlp(dtype=torch.bfloat16)
    x, splits, scales = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    explained = fz.explain(mlp, x, splits, scales, splits, target=target)
    text = str(explained)
    assert f"{target or 'cpu'}, recipe none, bfloat16, training" in text
    assert ("GroupedMLP by grouped_mlp_sm90, forward and backward" in text) == (target == "sm90")
    if target == "sm90":
        assert explained.fired == ("grouped_mlp_sm90",)


@pytest.mark.parametrize(
    ("dtype", "target", "synchronises"),
    [
        (torch.float64, fz.Target("cuda", 100), True),
        (torch.float32, fz.Target("cuda", 100), False),
        (torch.float32, fz.Target("cuda", 100, triton=False), True),
        (torch.bfloat16, fz.Target("cuda", 100, triton=False), False),
        (torch.bfloat16, fz.Target("cuda", 80), False),
        (torch.bfloat16, fz.Target("cuda", 120, triton=False), True),
        (torch.float64, fz.Target("cpu"), False),
    ],
)
def test_synchronisation_is_told(dtype, target, synchronises):
    mlp = ref.grouped_mlp(dtype=dtype)
    x, splits, scales = ref.grouped_mlp_inputs()
    text = str(fz.explain(mlp, x.detach().to(dtype), splits, scales, splits, target=target))
    note = f"on {target} runs a loop over groups that reads the split sizes on the host"
    assert (note in text) == ("synchronisation" in text) == synchronises


def test_a_recipe_computes_in_bf16_without_synchronising():
    mlp = ref.grouped_mlp(hidden=32, inner=32, dtype=torch.float32)
    x, splits, scales = ref.grouped_mlp_inputs(hidden=32)
    with fz.autocast(recipe=fz.recipes.MXFP8BlockScaling()):
        text = str(fz.explain(mlp, x, splits, scales, splits, target="sm100"))
    assert "synchronisation" not in text


def test_rules_for_other_machines_and_recipes_are_counted():
    mlp = ref.grouped_mlp()
    x, splits, scales = ref.grouped_mlp_inputs()
    explained = fz.explain(mlp, x, splits, scales, splits, target="sm90")
    short, long = str(explained), explained.to_text(every_rule=True)
    assert "kernels not selected:\n  sm90 for ops[0:1], ops[2:3]\n" in short
    assert "dtype must be one of bfloat16, float16 where quantizes is False, got float32" in short
    assert (
        "4 more rules or kernels are for other machines or recipes (to_text(every_rule=True))"
        in short
    )
    for of_others in ("grouped_mlp_sm100", "  sm100 for ops[0:1]", "sm must be"):
        assert of_others not in short
        assert of_others in long
    assert "more rules" not in long
    assert {r.rule.name for r in explained.refusals if r.other_target} == {
        "grouped_mlp_sm90_fp8",
        "sm90_fp8",
        "grouped_mlp_sm100",
        "sm100",
    }


def test_inference():
    with torch.no_grad():
        text = str(fz.explain(fz.Linear(4, 4), torch.randn(2, 4)))
    assert "inference" in text.splitlines()[0]
    assert "saves" not in text


def test_any_module_with_ops_inside():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = fz.Sequential(fz.Linear(8, 16), fz.SiLU())
            self.norm = nn.LayerNorm(16)
            self.down = fz.Linear(16, 8)

        def forward(self, x):
            return self.down(self.norm(self.up(x)))

    explained = fz.explain(Block(), torch.randn(2, 8))
    assert len(explained.plans) == 2
    assert explained.fired == ("linear_bias_activation",) * 2


def test_explaining_changes_nothing():
    seq = fz.Sequential(fz.Linear(8, 4), fz.SiLU())
    x = torch.randn(3, 8, requires_grad=True)
    expected = seq(x)
    plan = seq.plan
    for target in (None, "sm90"):
        fz.explain(seq, x, target=target)
    assert seq.plan is plan
    assert torch.equal(seq(x), expected)
    assert x.grad is None
    never_run = fz.Linear(8, 4)
    fz.explain(never_run, x)
    assert never_run.plan is None


def test_a_sum_in_place():
    seq = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput(in_place=True))
    addend = torch.zeros(4, 8)
    assert fz.explain(seq, torch.randn(4, 8), addend).fired == ("linear_add",)
    assert torch.equal(addend, torch.zeros(4, 8))


def test_runs_are_named_after_their_first_module():
    block = nn.ModuleDict(
        {"up": fz.Sequential(fz.Linear(8, 4), fz.SiLU()), "down": fz.Linear(4, 4)}
    )
    block.forward = lambda x: block["down"](block["up"](x))
    explained = fz.explain(block, torch.randn(2, 8))
    assert [p.name for p in explained.planned] == [
        "ModuleDict.up.0 to ModuleDict.up.1",
        "ModuleDict.down",
    ]


def test_an_intermediate_tensor_as_input():
    h = torch.randn(3, 8, requires_grad=True) * 2
    assert "training" in str(fz.explain(fz.SiLU(), h))


def test_lists_of_split_sizes():
    mlp = ref.grouped_mlp()
    x, splits, scales = ref.grouped_mlp_inputs()
    sizes = splits.tolist()
    (plan,) = fz.explain(mlp, x, sizes, scales, sizes).plans
    mlp(x, sizes, scales, sizes)
    assert plan.facts == mlp.plan.facts


class Repeated(nn.Module):
    """Counts its calls, alone among its buffers, and takes keyword arguments."""

    def __init__(self):
        super().__init__()
        self.ops = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int64))

    def forward(self, x, *, times=1, scale=None):
        self.calls.add_(1)
        for _ in range(times):
            x = self.ops(x)
        return x if scale is None else x * scale


def test_keyword_arguments():
    module, x = Repeated(), torch.randn(2, 8)
    explained = fz.explain(module, x, times=2, scale=torch.ones(8))
    assert explained.fired == ("linear_bias_activation",) * 2
    buffer = torch.zeros(2, 8)
    seq = fz.Sequential(fz.BasicLinear(8, 8))
    explained = fz.explain(seq, x, op_kwargs={-1: {"output": buffer}})
    assert len(explained.plans) == 1
    assert torch.equal(buffer, torch.zeros(2, 8))


def test_buffers_stay_as_they_are():
    module = Repeated()
    fz.explain(module, torch.randn(2, 8))
    assert module.calls.tolist() == [0, 0, 0]
    module(torch.randn(2, 8))
    assert module.calls.tolist() == [1, 1, 1]


class Counted(nn.Module):
    """A parametrization that counts its calls in both ways, and draws."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("bound", torch.zeros(()))

    def forward(self, w):
        self.calls += 1
        self.added += 1
        self.bound = self.bound + 1
        return w * (torch.rand_like(w) > 0.5)


class Keeping(fz.BasicOperation):
    """Clips its weight, draws, and keeps what it made."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.last = None

    def op_forward(self, ctx, input_, **_):
        with torch.no_grad():
            ctx.parameters[0].normal_().clamp_(max=0.5)
        self.last, self.first = [input_ * ctx.parameters[0]], input_
        return self.last[0]


def counted():
    linear = fz.BasicLinear(8, 8)
    nn.utils.parametrize.register_parametrization(linear, "weight", Counted(), unsafe=True)
    return linear


CHANGING = {
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(fz.Linear(8, 8)),
    "in a run": lambda: fz.Sequential(
        nn.utils.parametrizations.spectral_norm(fz.Linear(8, 8)), fz.SiLU()
    ),
    "spectral_norm by a hook": lambda: nn.utils.spectral_norm(fz.BasicLinear(8, 8)),
    "of a user's": counted,
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(8), fz.Linear(8, 8)),
    "an own op": Keeping,
}


@pytest.mark.parametrize("name", CHANGING)
def test_nothing_in_the_module_changes(name):
    module = CHANGING[name]()
    assert module.training

    def tensors():
        return [
            (name, value)
            for part in module.modules()
            for held in (vars(part), part._parameters, part._buffers)
            for name, value in held.items()
            if name in ("last", "first") or isinstance(value, torch.Tensor)
        ]

    def calls():
        return [part.calls for part in module.modules() if isinstance(part, Counted)]

    before, values = tensors(), copy.deepcopy([value for _, value in tensors()])
    generator, counts = torch.get_rng_state(), calls()
    fz.explain(module, torch.randn(4, 8))
    torch.set_rng_state(generator)
    fz.explain(module, torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), generator)
    for (attribute, now), (then_attribute, then), value in zip(
        tensors(), before, values, strict=True
    ):
        assert attribute == then_attribute
        assert now is then
        assert value is None or torch.equal(now, value)
    assert calls() == [count + 2 for count in counts]  # one evaluation each


class Caching(nn.Module):
    """Keeps tensors in a dictionary and a list, and renormalizes its weight's data."""

    def __init__(self):
        super().__init__()
        self.ops = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
        self.cached, self.seen = {"of": {}}, []

    def forward(self, x):
        if x.shape[0] not in self.cached["of"]:
            self.cached["of"][x.shape[0]] = torch.arange(8.0)
        self.seen.append(x)
        y = self.ops(x) + self.cached["of"][x.shape[0]]
        weight = self.ops[0].weight
        weight.data = torch.renorm(weight.data, 2, 0, 0.1)
        return y


def test_dictionaries_lists_and_data_stay_as_they_are():
    module = Caching()
    weight = module.ops[0].weight
    values = weight.detach().clone()
    fz.explain(module, torch.randn(4, 8))
    assert module.cached == {"of": {}}
    assert module.seen == []
    assert torch.equal(weight, values)
    expected = torch.nn.functional.silu(module.ops[0](x := torch.randn(4, 8))) + torch.arange(8.0)
    torch.testing.assert_close(module(x), expected)


def test_uninitialized_parameters():
    module = nn.Sequential(nn.LazyLinear(8), fz.SiLU())
    with pytest.raises(ValueError, match=r"uninitialized Sequential\.0\.weight, which its first"):
        fz.explain(module, torch.randn(4, 8))
    assert isinstance(module[0], nn.LazyLinear)
    assert module(torch.randn(4, 8)).shape == (4, 8)


def test_a_module_that_decides_by_values():
    class Deciding(Repeated):
        def forward(self, x):
            return self.ops(x) if x.sum() > 0 else x

    with pytest.raises(ValueError, match=r"without data-dependent control flow.* got Deciding"):
        fz.explain(Deciding(), torch.ones(2, 8))


class Masked(nn.Module):
    def forward(self, x):
        return x[x.sum(-1) > 0]


def test_a_part_that_decides_by_values_is_named():
    ops = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
    with pytest.raises(
        ValueError,
        match=r"got Sequential\.1 \(Masked\).*last fusible ops before were Sequential\.0\.",
    ):
        fz.explain(nn.Sequential(ops, Masked()), torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"got Sequential\.0 \(Masked\).*no fusible op ran before"):
        fz.explain(nn.Sequential(Masked(), ops), torch.randn(4, 8))


def test_errors_on_fake_tensors_say_so():
    class Raises(nn.Module):
        def forward(self, x):
            raise RuntimeError("its own")

    model = nn.Sequential(fz.SiLU(), Raises())
    with pytest.raises(RuntimeError, match="its own") as caught:
        fz.explain(model, torch.randn(4, 8))
    (note,) = caught.value.__notes__
    assert note.startswith("explain called Sequential.1 (Raises) with fake tensors; the last")


def test_features_that_a_recipe_cannot_quantize():
    model = fz.Sequential(fz.Linear(64, 41), fz.GELU(), fz.Linear(41, 64))
    x = torch.randn(4, 64, requires_grad=True)
    must = "of Linear must be a multiple of 2 for nvfp4"
    with fz.autocast(recipe=NV):
        first, second = fz.explain(model, x).errors
        with pytest.raises(ValueError, match=f"in_features {must}, .* got 41") as caught:
            model(x)
    assert first.startswith(
        f"Sequential.0 (BasicLinear): out_features {must}, the format of its gr"
    )
    assert second.startswith(
        f"Sequential.2 (BasicLinear): in_features {must}, the format of its in"
    )
    assert caught.value.__notes__ == ["raised in Sequential.2 (BasicLinear)"]
    with (
        fz.quantized_model_init(recipe=NV),
        pytest.raises(ValueError, match="in_features of BasicLinear must be a multiple of 2"),
    ):
        fz.Linear(63, 256)


def test_a_target_that_is_none():
    for target in ("hopper", 90):
        with pytest.raises(ValueError, match=r'must be an SM version such as "sm90" .*, got'):
            fz.explain(fz.SiLU(), torch.ones(2), target=target)


def test_errors_are_the_modules_own():
    with pytest.raises(ValueError, match="extra inputs must number 1"):
        fz.explain(fz.AddExtraInput(), torch.randn(3))


def test_a_module_without_ops():
    with pytest.raises(ValueError, match="forward runs fusible ops, got Tanh, which ran none"):
        fz.explain(nn.Tanh(), torch.randn(3))


class Stack(nn.Module):
    """Blocks in an ordinary module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [fz.Sequential(fz.Linear(8, 8), fz.SiLU(), fz.Linear(8, 8)) for _ in range(2)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model):
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def submodules(model):
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    model.blocks[1] = wrapped(model.blocks[1])
    return model


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("compiled", [wrapped, in_place, submodules])
def test_compiled_modules(compiled, called):
    x, plain = torch.randn(3, 8), Stack()
    model = compiled(Stack())
    model.load_state_dict(dict(zip(model.state_dict(), plain.state_dict().values(), strict=True)))
    if called:
        model(x)
    explained = fz.explain(model, x)
    assert str(explained) == str(fz.explain(plain, x))
    assert [p.name for p in explained.planned] == [
        f"Stack.blocks.{i}.0 to Stack.blocks.{i}.2" for i in range(2)
    ]
    with torch.compiler.set_stance("fail_on_recompile" if called else "default"):
        torch.testing.assert_close(model(x), plain(x))


def test_svg_is_well_formed(tmp_path):
    seq = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "branch", output_to_caller=False),
        fz.Linear(8, 8),
        fz.SiLU(),
        fz.AddExtraInput().set_extra_input_channel(0, "branch"),
        fz.AddExtraInput(),
    )
    explained = fz.explain(seq, torch.randn(3, 8), torch.randn(3, 8))
    path = tmp_path / "graph.svg"
    drawing = explained.to_svg(path)
    assert path.read_text(encoding="utf-8") == drawing
    root = ET.fromstring(drawing)
    texts = [t.text for t in root.iter() if t.text]
    assert root.tag.endswith("svg")
    assert sum(e.get("class") == "channel" for e in root.iter()) == 1
    for part in ("BasicLinear", "LinearBiasActivation", "branch", "addend", "as written"):
        assert any(part in t for t in texts), part


def test_svg_keeps_channels_and_their_names_apart():
    grouped = {"bias": False, "single_grouped_weight": True}
    block = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        fz.TopKRouter(8, 4, top_k=2),
        fz.Dispatch(4),
        fz.GroupedLinear(4, 8, 16, **grouped),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 8, 8, **grouped),
        fz.Combine(),
        fz.AddExtraInput().set_extra_input_channel(0, "tokens"),
    )
    root = ET.fromstring(fz.explain(block, torch.randn(5, 8)).to_svg())
    paths = [e.get("d") for e in root.iter() if e.get("class") == "channel"]
    ends = [
        tuple(map(int, re.fullmatch(r"M\d+ (\d+)H(-?\d+)V(\d+)H\d+", d).groups())) for d in paths
    ]
    assert len(ends) == 7  # split_sizes goes to two ops, by one lane
    for (start, lane, end), (other_start, other_lane, other_end) in combinations(ends, 2):
        assert (lane == other_lane) == (start == other_start)
        assert len({start, end, other_start, other_end}) == 4 - (start == other_start)
    names = [e for e in root.iter() if "channelname" in e.get("class", "")]
    assert sorted(e.text for e in names) == sorted(
        ["probs", "expert_ids", "split_sizes", "scales", "split_sizes", "row_map", "tokens"]
    )
    heights = sorted(int(e.get("y")) for e in names)
    assert min(b - a for a, b in pairwise(heights)) >= 10
    # Each name stands on its own arrow, right of all lanes.
    assert heights == sorted(end - 3 for _, _, end in ends)
    for e in names:
        assert int(e.get("x")) - 6 * len(e.text) > max(lane for _, lane, _ in ends)


def test_svg_lists_the_ops_of_a_fused_one():
    seq = fz.Sequential(fz.Linear(8, 8), fz.GELU(), fz.Bias(8))
    root = ET.fromstring(fz.explain(seq, torch.randn(5, 8)).to_svg())
    named = [(int(e.get("x")), int(e.get("y")), e.text) for e in root.iter() if e.get("y")
             and "name" in e.get("class", "").split()]  # fmt: skip
    columns = [[t for at, _, t in sorted(named) if at == x] for x in sorted({n[0] for n in named})]
    assert columns == [
        ["BasicLinear", "Bias", "GELU", "Bias"],
        ["LinearBiasActivation", "BasicLinear", "Bias", "GELU", "Bias"],
        ["BasicLinear", "Bias", "GELU", "Bias"],
    ]


def test_a_notebook_shows_what_print_does():
    seq = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput(), fz.GELU())
    x = torch.randn(3, 8)
    explained = fz.explain(seq, x, x.bfloat16(), target="cpu")
    assert repr(explained) == str(explained) == explained.to_text()
    seq(x, x)
    assert repr(seq.plan) == (
        "Plan(cpu, recipe none, forward: LinearAdd, GELU; backward: BasicLinear, AddExtraInput, "
        "GELU)"
    )
    refusals = fz.explain(fz.GroupedLinear(2, 8, 8), x, [1, 2], target="sm90").refusals
    assert (
        "sm90 not used for ops[0:1]: op.dtype must be one of bfloat16, "
        "float16 where quantizes is False, got float32"
    ) in [repr(refusal) for refusal in refusals]


def test_equal_runs_are_shown_once():
    layers = [fz.Sequential(fz.Linear(8, 8), fz.SiLU()) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Tanh(), fz.GELU(), fz.Linear(8, 8))
    explained = fz.explain(model, torch.randn(3, 8))
    assert len(explained.plans) == 7
    assert explained.fired == ("linear_bias_activation",) * 6
    text = str(explained)
    assert text.count("SiLU()") == 1
    more = "4 equal runs: Sequential.1.0 to Sequential.1.1; ...; Sequential.4.0 to Sequential.4.1"
    assert more in text.splitlines()
    assert "Sequential.6: cpu" in text
    drawing = explained.to_svg()
    assert drawing.count(">as written<") == 3
    assert "Sequential.0.0 to Sequential.0.1 and 4 equal runs: cpu" in drawing


def test_what_ended_a_run_is_named():
    ops = [fz.Linear(8, 8), fz.GELU(), nn.Dropout(), fz.Linear(8, 8), fz.SiLU()]
    model = nn.Sequential(OrderedDict(mlp=fz.Sequential(*ops)))
    explained = fz.explain(model, torch.randn(3, 8))
    dropout = "Dropout at Sequential.mlp.2 is an ordinary module, which ends a run of ops"
    assert explained.run_ends == (dropout,)
    assert str(explained).endswith(dropout)
    ops[1].register_forward_hook(lambda *_: None)
    explained = fz.explain(model, torch.randn(3, 8))
    hook = "GELU at Sequential.mlp.1 has a forward hook, which ends a run of ops; rules not tried"
    assert explained.run_ends[0].startswith(f"{hook} for that: linear_bias_activation")
    assert explained.run_ends[1:] == (dropout,)
    assert fz.explain(fz.Sequential(fz.Linear(8, 8), fz.SiLU()), torch.randn(3, 8)).run_ends == ()


def test_all_ops_that_refuse_are_listed():
    model = fz.Sequential(
        fz.Linear(8, 16), fz.SwiGLU(), fz.Linear(5, 40), fz.SiLU(), fz.Linear(32, 8)
    )
    explained = fz.explain(model, torch.randn(3, 7))
    wrong = [(0, 8, (3, 7)), (2, 5, (3, 8)), (4, 32, (3, 40))]
    for (at, features, shape), said in zip(wrong, explained.errors, strict=True):
        assert said.startswith(f"Sequential.{at} (BasicLinear): input of Linear must have")
        assert f"{features} features" in said
        assert said.endswith(f"got shape {shape}")
        assert f"does not run: {said}" in str(explained)


def test_layers_that_do_not_fit_a_recipe_are_listed():
    model = fz.Sequential(fz.Linear(32, 41), fz.SiLU(), fz.Linear(41, 64), fz.Linear(64, 32))
    with fz.autocast(recipe=fz.recipes.NVFP4BlockScaling()):
        explained = fz.explain(model, torch.randn(32, 32, requires_grad=True))
        with pytest.raises(ValueError, match="multiple of 2"):
            model(torch.randn(32, 32))
    refused = [said.partition(" ")[0] for said in explained.errors]
    assert refused == ["Sequential.0", "Sequential.2"]
    assert all("multiple of 2" in said for said in explained.errors)


def test_runs_with_other_options_are_not_equal():
    """What changes numbers is shown: two blocks that compute different things are two plans."""

    def block(router=None, **options):
        return fz.Sequential(
            fz.TopKRouter(32, 4, 2, **router or {}),
            fz.Dispatch(4, **options),
            fz.GroupedLinear(4, 32, 64, bias=False),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(4, 32, 32, bias=False),
            fz.Combine(),
        )

    same = [block(), block()]
    others = [
        block(capacity_factor=1.0),
        block(recompute_rows=True),
        block({"bias": True}),
        block({"expert_bias": True}),
    ]
    explanation = fz.explain(
        nn.Sequential(*same, *others).bfloat16(), torch.randn(8, 32).bfloat16()
    )
    text = str(explanation)
    assert text.count("[0] TopKRouter(") == 1 + len(others)
    assert text.count("1 equal run: Sequential.1.0 to Sequential.1.5") == 1
    for option in (
        "capacity_factor=1.0",
        "recompute_rows=True",
        "1.0, bias=True",
        "expert_bias=True",
    ):
        assert text.count(option) == 1
    given = block({"z_loss": True, "load_balancing_loss": True})[0]
    assert str(given).endswith("load_balancing_loss=True, z_loss=True)")


@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_what_a_recipe_does_is_said_of_fused_ops_too(target):
    options = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
    mlp = fz.Sequential(
        fz.GroupedLinear(4, 64, 64, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 32, 64, **options),
    )
    recipe, splits = fz.recipes.MXFP8BlockScaling(), torch.full((4,), 4)
    fz.quantize_(mlp, recipe, usage="inference")
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    given = x, splits, torch.rand(16), splits
    with fz.autocast(recipe=recipe):
        text = str(fz.explain(mlp, *given, target=target))
        with torch.no_grad():
            inference = str(fz.explain(mlp, *given, target=target))
    assert ("GroupedMLP by grouped_mlp_sm90, forward and backward\n" in text) == (target == "sm90")
    assert ("GroupedMLP by grouped_mlp_sm90, forward\n" in inference) == (target == "sm90")
    for said in (text, inference):
        assert said.count("weights are stored for inference: a forward whose input needs a") == 2
        assert said.count("products of quantized operands: input mxfp8_e4m3") == 2
