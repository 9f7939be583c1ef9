"""Plans: what they depend on, what they say, for any machine on this one."""

import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference as ref
import torch
from torch import nn

import fusible as fz
from fusible.extend import Condition, equal, multiple_of, register_rule, rule, this, where
from fusible.fuser.rules import Rule
from fusible.fuser.target import Target
from fusible.testing import assume_target
from fusible.versions import CUDNN_FRONTEND, CUTLASS_DSL, Version


def names(steps):
    return [type(op).__name__ for op in steps]


def covered(steps):
    return [len(op.basic_ops) for op in steps]


def dense(**options):
    return fz.Sequential(fz.Linear(8, 8), fz.SiLU(), fz.BasicLinear(8, 8), fz.Bias(8), **options)


def plans_in(module):
    """Every plan that calls of the module have made."""
    (run,) = module.parts()
    return [schedule.plan for schedule in run._schedules.values()]


# --- what a plan says -------------------------------------------------------------------------


def test_ops_are_readable():
    seq = dense()
    assert seq.plan is None
    seq(torch.randn(3, 8))
    ops = [part for op in seq for part in op.basic_ops]
    assert list(seq.plan.basic_ops) == ops
    assert names(seq.plan.forward_ops) == ["LinearBiasActivation", "LinearBiasActivation"]
    assert covered(seq.plan.forward_ops) == [3, 2]
    assert [part for op in seq.plan.forward_ops for part in op.basic_ops] == ops
    assert list(seq.plan.backward_ops) == ops
    assert seq.plan.fired == ("linear_bias_activation",) * 2


def test_of_one_op_alone():
    op = fz.Linear(4, 4)
    assert op.plan is None
    op(torch.randn(2, 4))
    assert names(op.plan.forward_ops) == ["LinearBiasActivation"]
    assert names(op.plan.backward_ops) == ["BasicLinear", "Bias"]


def test_of_a_sequential_split_by_ordinary_modules():
    seq = fz.Sequential(
        fz.Linear(8, 8), nn.Tanh(), fz.SiLU(), fz.BasicLinear(8, 8), fz.AddExtraInput(), nn.Tanh()
    )
    x = torch.randn(3, 8, requires_grad=True)
    seq(x, torch.randn(3, 8))
    plan = seq.plan
    assert names(plan.forward_ops) == ["LinearBiasActivation", "SiLU", "LinearAdd"]
    assert covered(plan.forward_ops) == [2, 1, 2]
    assert names(plan.backward_ops) == [
        "BasicLinear",
        "Bias",
        "SiLU",
        "BasicLinear",
        "AddExtraInput",
    ]
    assert [(f.start, f.stop) for f in plan.fusions] == [
        (0, 2),
        (3, 5),
    ]
    assert len(plan.grad) == len(plan.basic_ops) == 5


def test_refusals_of_later_runs_count_on():
    seq = fz.Sequential(fz.SiLU(), nn.Tanh(), fz.BasicLinear(8, 8), fz.AddExtraInput())
    with torch.autocast("cpu", torch.bfloat16):
        seq(torch.randn(3, 8), torch.randn(3, 8))
    (refusal,) = [r for r in seq.plan.refusals if isinstance(r.rule, Rule)]
    assert (refusal.rule.name, refusal.start) == ("linear_add", 1)
    assert refusal.reasons == (
        "linear.param_dtype must be equal to linear.dtype (which is bfloat16), got float32",
    )
    assert str(refusal) == f"linear_add not used for ops[1:3]: {refusal.reasons[0]}"


def test_all_reasons_of_a_refusal():
    seq = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput())
    with fz.autocast(recipe=ref.Rows()), torch.autocast("cpu", torch.bfloat16):
        seq(torch.randn(3, 8), torch.randn(3, 8))
    (refusal,) = [r for r in seq.plan.refusals if isinstance(r.rule, Rule)]
    assert refusal.reasons == (
        "recipe must be none, got rows",
        "linear.param_dtype must be equal to linear.dtype (which is bfloat16), got float32",
    )


def test_no_backward_is_planned_without_gradients():
    seq = fz.Sequential(fz.MakeExtraOutput(in_place=True), fz.BasicLinear(8, 8))
    x = torch.randn(2, 8)
    seq(x)
    assert seq.plan.fired == ("backward_linear_add",)
    with torch.no_grad():
        seq(x)
    assert seq.plan.fired == ()
    assert not any(needs.requires_grad for needs in seq.plan.grad)


def test_gradient_needs():
    seq = fz.Sequential(fz.BasicLinear(4, 4), fz.SiLU(), fz.AddExtraInput(), fz.Bias(4))
    seq[0].requires_grad_(False)
    x, addend = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)
    seq(x, addend)
    assert [n.requires_grad for n in seq.plan.grad] == [False, False, True, True]
    assert [n.input for n in seq.plan.grad] == [False, False, False, True]
    assert [n.params for n in seq.plan.grad] == [(False,), (), (), (True,)]
    assert [n.extra_inputs for n in seq.plan.grad] == [(), (), (True,), ()]


# --- what a plan depends on -------------------------------------------------------------------


def test_a_thousand_row_counts_make_one_plan():
    seq = dense().to("meta")  # where a call costs no arithmetic
    for rows in range(1000):
        seq(torch.empty(rows, 8, device="meta"))
    assert len(plans_in(seq)) == 1


@pytest.mark.parametrize("shape", [lambda n: (n,), lambda n: (3, n), lambda n: (2, n, 3)])
def test_row_counts_of_every_input_are_no_facts(shape):
    mlp = ref.grouped_mlp()
    for n in range(5):
        rows = shape(n)
        splits = torch.zeros(4, dtype=torch.int64)
        mlp(torch.randn(*rows, 16), splits, torch.rand(rows), splits)
    assert len(plans_in(mlp)) == 1


def test_split_sizes_are_no_facts():
    mlp = ref.grouped_mlp()
    for sizes in ([3, 0, 4, 1], [0, 0, 0, 0], [8, 0, 0, 0]):
        x, splits, scales = ref.grouped_mlp_inputs(sizes)
        mlp(x, splits, scales, splits)
    assert len(plans_in(mlp)) == 1


def test_a_plan_is_found_again():
    seq = dense()
    plans = []
    for x in (torch.randn(3, 8), torch.randn(5, 8)):
        seq(x)
        plans.append(seq.plan)
    assert plans[0] is plans[1]


def no_change(seq, x):
    return seq(x)


def dtype(seq, x):
    return seq.double()(x.double())


def input_needs_a_gradient(seq, x):
    return seq(x.requires_grad_())


def a_parameter_is_frozen(seq, x):
    seq[0].weight.requires_grad_(False)
    return seq(x)


def no_gradients(seq, x):
    with torch.no_grad():
        return seq(x)


def torch_autocast(seq, x):
    with torch.autocast("cpu", torch.bfloat16):
        return seq(x)


def torch_autocast_of_another_dtype(seq, x):
    with torch.autocast("cpu", torch.float16):
        return seq(x)


def recipe(seq, x):
    with fz.autocast(recipe=ref.Rows()):
        return seq(x)


def recipe_with_other_options(seq, x):
    with fz.autocast(recipe=ref.Rows(64)):
        return seq(x)


def target(seq, x):
    with assume_target("sm100"):
        return seq(x)


def target_with_an_older_package(seq, x):
    with assume_target(Target("cuda", 100, Version(1, 0))):
        return seq(x)


CHANGES = [
    dtype,
    input_needs_a_gradient,
    a_parameter_is_frozen,
    no_gradients,
    torch_autocast,
    torch_autocast_of_another_dtype,
    recipe,
    recipe_with_other_options,
    target,
    target_with_an_older_package,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_plan(change):
    seq, x = dense(), torch.randn(3, 8)
    no_change(seq, x)
    no_change(seq, x)
    assert len(plans_in(seq)) == 1
    change(seq, x.clone())
    assert len(plans_in(seq)) == 2


def test_every_change_makes_a_plan_of_its_own():
    seq, x = dense(), torch.randn(3, 8)
    for _ in range(2):
        for change in CHANGES[3:]:
            change(seq, x)
    assert len(plans_in(seq)) == len(CHANGES[3:])


def test_which_extra_inputs_are_the_same_tensor_is_a_fact():
    mlp = ref.grouped_mlp()
    x, splits, scales = ref.grouped_mlp_inputs()
    mlp(x, splits, scales, splits)
    same = mlp.plan.facts
    mlp(x, splits, scales, splits.clone())
    other = mlp.plan.facts
    first, last = (op.split_sizes.source for op in (same[0], same[2]))
    assert first == last
    first, last = (op.split_sizes.source for op in (other[0], other[2]))
    assert first != last


# --- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "sm90", "sm100", "sm103", "sm120"])
def test_plans_for_any_target_on_this_machine(name):
    mlp = ref.grouped_mlp(dtype=torch.bfloat16)
    x, splits, scales = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    (plan,) = fz.explain(mlp, x, splits, scales, splits, target=name).plans
    assert str(plan.target) == name
    assert ("grouped_mlp_sm90" in plan.fired) == (name == "sm90")
    assert sum(covered(plan.forward_ops)) == 3
    reasons = [r.reasons for r in plan.refusals if r.rule.name == "grouped_mlp_sm90"]
    got = None if name == "cpu" else int(name[2:])
    assert reasons == ([] if name == "sm90" else [(f"sm must be 90, got {got}",)])
    assert mlp.plan is None  # nothing ran


@pytest.mark.parametrize("spec", ["gpu", "sm9", "hopper", "", "SM90", "sm90a"])
def test_bad_targets(spec):
    with pytest.raises(ValueError, match='target must be an SM version such as "sm90"'):
        fz.explain(fz.SiLU(), torch.randn(2), target=spec)


def test_target_is_read_from_its_name():
    assert Target.parse("sm100") == Target("cuda", 100)
    assert Target.parse(Target("cpu")) == Target("cpu")
    assert str(Target.parse("cpu")) == "cpu"


# --- required fusions -------------------------------------------------------------------------


def test_required_and_fired():
    seq = dense(require=["linear_bias_activation"])
    seq(torch.randn(2, 8))
    assert seq.plan.fired == ("linear_bias_activation",) * 2


def test_required_and_refused_says_why():
    seq = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput(), require=["linear_add"])
    x = torch.randn(3, 8)
    seq(x, x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fz.NotFused) as error:
        seq(x, x)
    assert str(error.value) == (
        "linear_add is required but did not fire for cpu:\n"
        "linear_add not used for ops[0:2]: "
        "linear.param_dtype must be equal to linear.dtype (which is bfloat16), got float32"
    )
    with (
        fz.autocast(recipe=ref.Rows()),
        pytest.raises(fz.NotFused, match="recipe must be none, got rows"),
    ):
        seq(x, x)
    seq(x, x)


def test_required_of_another_machine():
    mlp = ref.grouped_mlp(dtype=torch.bfloat16)
    needy = fz.Sequential(*mlp, require=["grouped_mlp_sm90"])
    x, splits, scales = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    with pytest.raises(fz.NotFused, match=r"for cpu:\n.*sm must be 90, got None"):
        needy(x, splits, scales, splits)
    with assume_target("sm90"):
        needy(x, splits, scales, splits)
    assert needy.plan.fired == ("grouped_mlp_sm90",)


def test_required_but_taken_by_a_users_fusion(own_fusions):
    class Mine(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            raise AssertionError("never run")

    def mine(ops, *, recipe):
        return [Mine(ops)]

    fz.register_forward_fusion(mine)
    seq = fz.Sequential(fz.Linear(8, 8), require=["linear_bias_activation"])
    with pytest.raises(fz.NotFused, match="other fusions took its ops; fired: mine"):
        seq(torch.randn(2, 8))


def test_a_required_backward_needs_a_backward():
    """Evaluation without gradients has no backward that could be fused."""
    seq = fz.Sequential(
        fz.MakeExtraOutput(in_place=True), fz.BasicLinear(8, 8), require=["backward_linear_add"]
    )
    x = torch.randn(2, 8)
    seq(x)
    with torch.no_grad():
        y, extra = seq(x)
    torch.testing.assert_close(y, x @ seq[1].weight.T)
    assert torch.equal(extra, x)


def test_required_in_a_nested_sequential():
    inner = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput(), require=["linear_add"])
    outer = fz.Sequential(fz.SiLU(), inner)
    x = torch.randn(3, 8)
    outer(x, x)
    with fz.autocast(recipe=ref.Rows()), pytest.raises(fz.NotFused, match="linear_add"):
        outer(x, x)


# --- installed packages -----------------------------------------------------------------------


def test_a_machine_without_the_kernels_compiler_fuses_nothing_with_it():
    grouped = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
    experts = fz.Sequential(
        fz.GroupedLinear(2, 64, 128, **grouped),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(2, 64, 64, **grouped),
    )
    splits = torch.tensor([3, 5])
    inputs = torch.randn(8, 64, dtype=torch.bfloat16), splits, torch.rand(8), splits
    assert fz.explain(experts, *inputs, target="sm90").fired == ("grouped_mlp_sm90",)
    for version in (None, Version(4, 6)):
        for sm in (90, 100):
            target = Target("cuda", sm, cutlass_dsl=version)
            plan = fz.explain(experts, *inputs, target=target)
            assert plan.fired == ()
            assert (
                f"cutlass_dsl must be at least 4.8, got {version}; "
                "pip install 'nvidia-cutlass-dsl[cu13]>=4.8'"
            ) in str(plan)


def test_floors_of_packages_are_those_of_the_installation():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = " ".join(project["dependencies"])
    assert f"nvidia-cutlass-dsl[cu13]>={CUTLASS_DSL};" in asked
    assert f"nvidia-cudnn-frontend>={CUDNN_FRONTEND};" in asked


def rule_that_needs(*needs):
    @rule(*needs)
    def scales_in_one(a: fz.ConstantScale, b: fz.ConstantScale) -> ref.ScalesInOne:
        """One pass less."""
        return ref.ScalesInOne([a, b])

    return scales_in_one


def test_no_plan_depends_on_the_last_dimension_unless_a_rule_reads_it(own_fusions):
    """Attention's dropout while generating has another last dimension at every call."""
    seq = fz.Sequential(fz.ConstantScale(2.0), fz.ConstantScale(3.0))
    for features in range(1, 9):
        seq(torch.randn(4, features))
    assert len(plans_in(seq)) == 1
    register_rule(rule_that_needs(equal(this.a.scale, 2.0)))
    for features in range(1, 9):
        seq(torch.randn(4, features))
    assert len(plans_in(seq)) == 2
    assert seq.plan.fired == ("scales_in_one",)


@pytest.mark.parametrize(
    "need",
    [
        multiple_of(this.input.features, 2),
        multiple_of(this.a.input.features, 2),
        where(this.input.features, 3, equal(this.recipe, "mxfp8")),
        Condition(this.input, "even", lambda t, _: t.features % 2 == 0),
        Condition(this.a, "even", lambda op, _: op.input.features % 2 == 0),
        Condition(this, "even", lambda site, _: site.a.input.features % 2 == 0),
    ],
    ids=["first", "named", "where", "tensor", "op", "site"],
)
def test_a_rule_that_reads_the_last_dimension_gets_it(need, own_fusions):
    register_rule(rule_that_needs(need))
    seq, inside = (
        fz.Sequential(*before, fz.ConstantScale(2.0), fz.ConstantScale(3.0))
        for before in ((), (fz.SiLU(),))
    )
    for features in (4, 3, 4, 3):
        x = torch.randn(2, features)
        assert torch.equal(seq(x), x * 2 * 3)
        assert seq.plan.fired == (("scales_in_one",) if features == 4 else ())
        assert fz.explain(seq, x, target="sm90").fired == seq.plan.fired
    assert len(plans_in(seq)) == 2
    apart = fz.Sequential(fz.ConstantScale(2.0), fz.SiLU(), fz.ConstantScale(3.0))
    for features in (4, 3):
        apart(torch.randn(2, features))
        if need.subject.names[1:] == ("input", "features"):
            inside(torch.randn(2, features))  # the rule's tensor is not the caller's
    assert len(plans_in(apart)) == 1
    assert len(plans_in(inside)) <= 1


class AddMean(fz.BasicOperation):
    """Adds the mean of a table of any size."""

    num_extra_inputs = 1
    extra_input_names = ("table",)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        return input_ + basic_op_extra_inputs[0][0].mean(), [()]


def test_only_the_inputs_are_in_the_key_that_a_rule_reads(own_fusions):
    @rule(multiple_of(this.add.table.features, 2))
    def never(add: AddMean, scale: fz.ConstantScale) -> ref.ScalesInOne:
        """Nothing."""
        raise AssertionError("3 is odd")

    register_rule(never)
    seq = fz.Sequential(AddMean(), fz.ConstantScale(2.0))
    for features in (1, 3, 5, 7):
        assert (seq(torch.ones(2, features), torch.ones(2, 1)) == 4).all()
    assert len(plans_in(seq)) == 1
    for features in (1, 3, 5, 7):
        seq(torch.ones(2, 1), torch.ones(2, features))
    assert len(plans_in(seq)) == 4


@pytest.fixture
def features_read(own_fusions):
    """A rule that reads the last dimension of every op's input, and never fires."""
    never = Condition(this.input.features, "of no size", lambda *_: False)

    @rule(never)
    def dropout_of_no_features(op: fz.Dropout | fz.SiLU) -> ref.ScalesInOne:
        """Nothing."""
        raise AssertionError("there is no such size")

    register_rule(dropout_of_no_features)


@pytest.mark.usefixtures("features_read")
def test_plans_of_a_run_are_bounded(monkeypatch):
    monkeypatch.setattr("fusible.fuser.run.MOST_PLANS", 8)
    op = fz.Dropout(0.5)
    kept = torch.randn(4, 1, requires_grad=True)
    for features in range(1, 40):
        x = kept.expand(4, features)
        torch.manual_seed(features)
        y = op(x)
        torch.manual_seed(features)
        assert torch.equal(y, torch.nn.functional.dropout(x, 0.5))
        assert len(op._run._schedules) <= 8
    # A plan that was dropped meanwhile has run the forward of this backward.
    torch.manual_seed(0)
    first = op(kept)
    for features in range(50, 70):
        op(torch.randn(4, features))
    (grad,) = torch.autograd.grad(first.sum(), kept)
    assert torch.equal(grad, (first != 0) * 2.0)
    torch.manual_seed(0)
    assert torch.equal(op(kept), first)


@pytest.mark.usefixtures("features_read")
def test_threads_fill_the_plans_of_one_run(monkeypatch):
    monkeypatch.setattr("fusible.fuser.run.MOST_PLANS", 4)
    op = fz.SiLU()

    def call(features):
        x = torch.full((2, features), 0.5)
        assert torch.equal(op(x), torch.nn.functional.silu(x))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, [*range(1, 60)] * 3))
    assert len(op._run._schedules) <= 4


def test_recipes_of_forwards_are_known_after_their_plans_were_dropped(monkeypatch):
    monkeypatch.setattr("fusible.fuser.run.MOST_PLANS", 2)
    op = fz.BasicLinear(32, 32)
    with fz.autocast():
        op(torch.randn(32, 32))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for x in (torch.randn(2, 32), torch.randn(2, 32, requires_grad=True)):
                op(x)
    assert len(op._run._schedules) == 2
    assert len(op._run.forwards()) == 3
