"""Rules, ops and fusion functions of one's own, and those of other packages."""

import functools
import re
import types
import warnings
from dataclasses import replace

import pytest
import reference as ref
import torch

import fusible as fz
from fusible import extend
from fusible.extend import equal, multiple_of, register_rule, rule, this, unregister_rule
from fusible.fused import RULES
from fusible.fuser.plan import check_facts
from fusible.fuser.registry import check_names
from fusible.fuser.user_steps import Expected
from fusible.testing import assume_target


def double(ops, *, recipe):
    return [ref.ScalesInOne(ops)] if len(ops) == 2 else ops


@rule(equal(this.recipe, "none"))
def double_rule(a: fz.ConstantScale, b: fz.ConstantScale) -> ref.ScalesInOne:
    """One pass less."""
    return ref.ScalesInOne([a, b])


def scales():
    return fz.Sequential(fz.ConstantScale(2.0), fz.ConstantScale(3.0))


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["forward_backward", "forward", "backward"])
def test_a_function_fires_by_its_name_and_can_be_required(register, own_fusions):
    getattr(extend, f"register_{register}_fusion")(double)
    seq = fz.Sequential(*scales(), require=["double"])
    x = torch.ones(4, requires_grad=True)
    y = seq(x)
    assert seq.plan.fired == ("double",)
    assert fz.explain(seq, x).fired == ("double",)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [6.0] * 4
    longer = fz.Sequential(*scales(), fz.ConstantScale(1.0), require=["double"])
    with pytest.raises(fz.NotFused, match="double is required but did not fire"):
        longer(x)


def test_functions_of_other_kinds_have_names(own_fusions):
    class Fuse:
        def __call__(self, ops, *, recipe):
            return double(ops, recipe=recipe)

    for function, name in ((Fuse(), "Fuse"), (functools.partial(double), "double")):
        own_fusions.functions = ()
        extend.register_forward_backward_fusion(function)
        seq = fz.Sequential(*scales(), require=[name])
        seq(torch.ones(2))
        assert seq.plan.fired == (name,)


def test_required_names_that_there_are_not(own_fusions):
    extend.register_forward_fusion(double)
    with pytest.raises(ValueError, match=r"one of moe_experts, .*double, got 'doubel'.*double"):
        fz.Sequential(*scales(), require=["doubel"])


# --- rules ------------------------------------------------------------------------------------


def test_a_rule_comes_and_goes(own_fusions):
    seq, x = scales(), torch.ones(3)
    register_rule(double_rule)
    assert extend.fusion_rules()[0] is double_rule
    seq(x)
    assert seq.plan.fired == ("double_rule",)
    unregister_rule("double_rule")
    assert extend.fusion_rules() == RULES
    seq(x)
    assert seq.plan.fired == ()
    register_rule(double_rule)
    unregister_rule(double_rule)
    with pytest.raises(ValueError, match=r"must be one of .*, got 'double_rule'"):
        unregister_rule(double_rule)


@pytest.mark.parametrize("by", ["function", "name"])
def test_a_faulty_fusion_function_can_be_taken_back(by, own_fusions):
    def forgets(ops, *, recipe):
        return ops[1:]

    seq, x = scales(), torch.ones(3)
    extend.register_backward_fusion(forgets)
    with pytest.raises(RuntimeError, match="the fusion function forgets must return ops that cov"):
        seq(x)
    unregister_rule(forgets if by == "function" else "forgets")
    assert torch.equal(seq(x), torch.full((3,), 6.0))
    with pytest.raises(ValueError, match=r"must be one of .*forgets"):
        unregister_rule(forgets)


def test_a_function_is_registered_once_and_with_its_signature(own_fusions):
    for _ in range(2):
        extend.register_forward_fusion(double)
    assert [f.build for f in own_fusions.functions] == [double]
    with pytest.raises(TypeError, match=r"must be a function func\(ops, \*, recipe\) -> ops, got"):
        extend.register_forward_fusion(lambda ops: ops)


def test_a_rule_for_an_op_of_several_names_its_parts():
    def of_linear(linear: fz.Linear, act: fz.ReLU) -> extend.FusedOperation: ...

    with pytest.raises(TypeError, match=r"Linear is BasicLinear \+ Bias"):
        rule()(of_linear)


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [
        (this.a.dtype, torch.float32, "names of dtypes .*, got torch.float32; .*'float32"),
        (this.input.dtype, "fp32", r"dtypes \(float32, .*, got 'fp32'"),
        (this.a.param_dtype, "half", "compare a.param_dtype with names of .*, got 'half'"),
    ],
)
def test_a_condition_that_never_applies(fact, value, message, own_fusions):
    def own(a: fz.ConstantScale) -> extend.FusedOperation: ...

    with pytest.raises(ValueError, match=message):
        register_rule(rule(extend.where(fact, value, equal(this.device, "cpu")))(own))


def test_a_constant_that_no_fact_equals_is_a_refusal(own_fusions):
    @rule(equal(this.a.dtype, torch.float32), equal(this.recipe, "mxfp"))
    def own(a: fz.ConstantScale) -> extend.FusedOperation: ...

    register_rule(own)
    (refusal,) = fz.explain(fz.Sequential(fz.ConstantScale(2.0)), torch.ones(2)).refusals
    assert refusal.reasons == (
        "a.dtype must be torch.float32, got float32",
        "recipe must be mxfp, got none",
    )


def test_a_condition_on_an_unknown_recipe_is_a_warning(own_fusions):
    def own(a: fz.ConstantScale) -> extend.FusedOperation: ...

    need = extend.where(this.recipe, "mxfp", equal(this.device, "cpu"))
    says = "own compares recipe with 'mxfp', .* none, .*'mxfp8'"
    with pytest.warns(UserWarning, match=says) as warned:
        register_rule(rule(need)(own))
    assert not re.search("property|_Scaling", str(warned[0].message))
    assert extend.fusion_rules()[0].name == "own"


def test_conditions_on_derived_recipes_and_on_facts_called_recipe(own_fusions):
    class Derived(fz.recipes.MXFP8BlockScaling):
        name = "derived"

    class Cooked(fz.ConstantScale):
        fact_names = ("recipe",)
        recipe = "soup"

    def own(a: Cooked) -> extend.FusedOperation: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_cpu = equal(this.device, "cpu")
        needs = [extend.where(this.recipe, "derived", on_cpu)]
        needs.append(extend.where(this.a.recipe, "soup", on_cpu))
        register_rule(rule(*needs)(own))


def test_built_in_rules_compare_with_names_that_there_are():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in [variant for r in RULES for variant in r.variants]:
            check_names(each)


def test_places_among_the_rules(own_fusions):
    names = [r.name for r in RULES]
    register_rule(double_rule, before="linear_add")
    assert [r.name for r in extend.fusion_rules()] == [
        *names[: names.index("linear_add")],
        "double_rule",
        *names[names.index("linear_add") :],
    ]
    unregister_rule(double_rule)
    register_rule(double_rule, after=names[-1])
    assert extend.fusion_rules()[-1] is double_rule
    with pytest.raises(ValueError, match="new"):
        register_rule(double_rule)
    unregister_rule(double_rule)
    with pytest.raises(ValueError, match="'linear_ad'; did you mean 'linear_add'"):
        register_rule(double_rule, before="linear_ad")
    with pytest.raises(ValueError, match="before another or after one"):
        register_rule(double_rule, before="linear_add", after="linear_add")


def test_a_built_in_rule_can_be_taken_away(own_fusions):
    unregister_rule("linear_bias_activation")
    seq = fz.Sequential(fz.Linear(4, 4), fz.GELU())
    seq(torch.ones(2, 4))
    assert seq.plan.fired == ()


def rows_of(*sms):
    """Numbers for kernels, each for one machine."""
    return [extend.KernelRow(f"sm{sm}", sm, (equal(this.sm, sm),), "a number") for sm in sms]


def scaled_by_kernels(name, *sms):
    def build(kernels, a: fz.ConstantScale, b: fz.ConstantScale) -> ref.ScalesInOne:
        """Two scales at once."""
        made.append(kernels)
        return ref.ScalesInOne([a, b])

    made = []
    build.__name__ = name
    return rule(equal(this.b.requires_grad, False), kernels=rows_of(*sms))(build), made


def test_a_rule_runs_on_the_kernels_of_the_first_row_that_applies(own_fusions):
    scaled, made = scaled_by_kernels("scaled", 70, 80)
    register_rule(scaled)
    assert [slot.name for slot in scaled.pattern] == ["a", "b"]
    seq = fz.Sequential(*scales(), require=["scaled"])
    for sm in (80, 70):
        assert fz.explain(seq, torch.ones(3), target=f"sm{sm}").fired == (f"scaled_sm{sm}",)
    assert made == [80, 70]
    explained = fz.explain(seq, torch.ones(3, requires_grad=True), target="sm80").plans[0]
    assert [(r.rule.name, len(r.reasons)) for r in explained.refusals] == [
        ("scaled_sm70", 2),  # those of the row and of the rule
        ("scaled_sm80", 1),
    ]
    with pytest.raises(fz.NotFused, match=r"(?s)scaled is required .*scaled_sm70 .*scaled_sm80 "):
        seq(torch.ones(3))
    with assume_target("sm70"):
        seq(torch.ones(3))
    assert fz.Sequential(*scales(), require=["scaled_sm80"]).require == ("scaled_sm80",)
    with assume_target("sm70"), pytest.raises(fz.NotFused, match="scaled_sm80 is required"):
        fz.Sequential(*scales(), require=["scaled_sm80"])(torch.ones(3))


def test_a_row_of_kernels_comes_and_goes_by_its_name(own_fusions):
    scaled, _ = scaled_by_kernels("scaled", 70, 80)
    register_rule(scaled)
    other, _ = scaled_by_kernels("other", 70)
    register_rule(other, before="scaled_sm80")
    assert [r.name for r in extend.fusion_rules()[:2]] == ["other", "scaled"]
    with pytest.raises(ValueError, match="name must be new, got 'scaled_sm70'"):
        register_rule(replace(double_rule, name="scaled_sm70"))
    unregister_rule("scaled_sm70")
    assert extend.fusion_rules()[1].kernels == scaled.kernels[1:]
    unregister_rule("scaled_sm80")
    assert [r.name for r in extend.fusion_rules()[:2]] == ["other", RULES[0].name]
    unregister_rule(other)
    assert extend.fusion_rules() == RULES


def test_a_rows_conditions_are_checked(own_fusions):
    row = extend.KernelRow("sm70", 1, (equal(this.a.scael, 1.0),), "")

    @rule(kernels=[row])
    def mine(kernels, a: fz.ConstantScale) -> extend.FusedOperation: ...

    with pytest.raises(ValueError, match=r"of the rule mine_sm70 must .*no 'scael' among"):
        register_rule(mine)
    with pytest.raises(TypeError, match=r"needs of kernels sm70 must be a tuple of .*, got True"):
        rule(kernels=[replace(row, needs=(True,))])


# --- facts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "says"),
    [
        (equal(this.a.scael, 1.0), r"no 'scael' among .*; did you mean 'scale'"),
        (equal(this.c.scale, 1.0), "c.scale is not a fact: there is no 'c' among a, b?"),
        (equal(this.recipee, "none"), "no 'recipee' among .*; did you mean 'recipe'"),
        (equal(this.format.inputs, "none"), "no 'inputs' among grad, input, weight"),
        (equal(this.input.shape, 3), "no 'shape' among device, dtype, features"),
        (equal(this.a.scale.value, 1), "no 'value' among none"),
        (equal(this.sm, this.b.size), "no 'size' among "),
        (multiple_of(this.sm, this.b.size), "no 'size' among "),
        (equal(2 * this.a.scales, 3), "no 'scales' among "),
    ],
)
def test_what_is_no_fact_is_refused_at_registration(need, says, own_fusions):
    @rule(need)
    def mine(a: fz.ConstantScale, b: fz.ConstantScale) -> ref.ScalesInOne:
        return ref.ScalesInOne([a, b])

    with pytest.raises(ValueError, match=f"conditions of the rule mine must read facts: .*{says}"):
        register_rule(mine)
    assert mine not in extend.fusion_rules()


def test_facts_of_alternatives_and_of_optional_ops(own_fusions):
    @rule(equal(this.act.clamp, None))
    def every(act: fz.ScaledSwiGLU | fz.ScaledClampedQGeGLU) -> ref.ScalesInOne:
        return ref.ScalesInOne([act])

    check_facts(every)

    @rule(equal(this.act.scale, 1.0))
    def some(act: fz.ConstantScale | fz.GELU) -> ref.ScalesInOne:
        return ref.ScalesInOne([act])

    @rule(equal(this.scale.scale, 1.0))
    def optional(act: fz.GELU, scale: fz.ConstantScale | None) -> ref.ScalesInOne:
        return ref.ScalesInOne([act])

    for mine, name in ((some, "scale"), (optional, "scale")):
        with pytest.raises(ValueError, match=f"there is no '{name}' among"):
            register_rule(mine)

    @rule()
    def hidden(dtype: fz.GELU) -> ref.ScalesInOne:
        return ref.ScalesInOne([dtype])

    with pytest.raises(ValueError, match=r"must not be called as what conditions read .*'dtype'"):
        register_rule(hidden)


@pytest.mark.parametrize("found", [v for r in RULES for v in r.variants], ids=lambda r: r.name)
def test_built_in_rules_read_facts(found):
    check_facts(found)


# --- what fused ops give ----------------------------------------------------------------------


class Wrong(fz.FusedOperation):
    made = staticmethod(lambda y: y)
    saved = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        linear = self.basic_ops[0]
        h = torch.nn.functional.linear(input_, linear.weight)
        basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        basic_op_ctxs[0].dtype = h.dtype
        if self.saved:
            basic_op_ctxs[1].save_for_backward(h)
            basic_op_ctxs[1].dtype = h.dtype
        return self.made(torch.relu(h)), [(), ()]


def wrong(made=lambda y: y, saved=1):
    kind = type("Mine", (Wrong,), {"made": staticmethod(made), "saved": saved})
    return lambda ops, *, recipe: [kind(ops)]


def linear_relu():
    return fz.Sequential(fz.BasicLinear(4, 6), fz.ReLU())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda y: y[:, :3], r"torch.float32 of shape \(5, 6\) on cpu, got .* \(5, 3\)"),
        (lambda y: y.double(), r"torch.float32 of .*, got torch.float64 of shape \(5, 6\)"),
        (lambda y: y.t(), r"got torch.float32 of shape \(6, 5\)"),
        (lambda y: y.to("meta"), "on cpu, got .* on meta"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_fused_op_that_returns_something_else_is_named(made, says, grad, own_fusions):
    extend.register_forward_fusion(wrong(made))
    seq = linear_relu()
    for _ in range(2):  # every call
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match=f"Mine must return what BasicLinear . ReLU.*{says}"),
        ):
            seq(torch.ones(5, 4))


def test_a_forward_fusion_that_saves_nothing_is_named(own_fusions):
    extend.register_forward_fusion(wrong(saved=0))
    with pytest.raises(RuntimeError, match=r"Mine must save .* \[2, 1\] .*ReLU: x.*got \[2, 0\]"):
        linear_relu()(torch.ones(5, 4))


class Backward(ref.ScalesInOne):
    gives = staticmethod(lambda dy, ctx: dy)

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return self.gives(grad_output, basic_op_ctxs[0]), [(), ()], [(), ()]


def test_a_backward_of_another_shape_is_named(own_fusions):
    kind = type("Mine", (Backward,), {"gives": staticmethod(lambda dy, ctx: dy[:2])})
    extend.register_forward_backward_fusion(lambda ops, *, recipe: [kind(ops)])
    y = scales()(torch.ones(4, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"backward of Mine .* input, \(4, 3\), got \(2, 3\)"):
        y.sum().backward()


def test_a_backward_that_misses_what_was_not_saved_is_named(own_fusions):
    kind = type("Mine", (Backward,), {"gives": staticmethod(lambda dy, ctx: ctx.saved_tensors[0])})
    extend.register_forward_backward_fusion(lambda ops, *, recipe: [kind(ops)])
    y = scales()(torch.ones(4, 3, requires_grad=True))
    with pytest.raises(IndexError) as caught:
        y.sum().backward()
    assert caught.value.__notes__ == [
        "raised in Sequential.0 to Sequential.1 (Mine), backward, for whose basic ops the forward "
        "saved [0, 0] tensors"
    ]


def test_what_is_right_runs_and_is_checked_once(own_fusions, monkeypatch):
    extend.register_forward_fusion(wrong())
    seq = linear_relu()
    x = torch.randn(5, 4, requires_grad=True)
    y = seq(x)
    torch.testing.assert_close(y, torch.relu(x @ seq[0].weight.T))
    y.sum().backward()
    (run,) = seq.parts()
    (schedule,) = run._schedules.values()
    assert [step.run.expected for step in schedule.forward if step.is_users] == [None]
    monkeypatch.setattr("fusible.fuser.run.expect_outputs", None)
    seq(x)


@torch.no_grad()
def test_a_call_that_another_thread_checks_first(own_fusions, monkeypatch):
    extend.register_forward_fusion(wrong())
    seq, x, results = linear_relu(), torch.randn(5, 4), []
    checks = []

    def interrupted(self, *args):
        checks.append(args)
        if len(checks) == 1:
            raise MemoryError
        if len(checks) == 2:  # what a second thread does meanwhile
            results.append(seq(x))

    monkeypatch.setattr(Expected, "check", interrupted)
    with pytest.raises(MemoryError):
        seq(x)
    results.append(seq(x))
    assert len(checks) >= 2
    for y in results:
        torch.testing.assert_close(y, torch.relu(x @ seq[0].weight.T))


def test_the_check_of_a_users_fused_op_changes_nothing_in_the_basic_ops(own_fusions):
    class Noisy(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.register_buffer("added", torch.zeros(()))
            self.register_buffer("bound", torch.zeros(()))

        def op_forward(self, ctx, input_, **_):
            self.added += 1
            self.bound = self.bound + self.added.normal_()
            return input_

    class Fused(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_ * 1, [(), ()]

    extend.register_forward_fusion(lambda ops, *, recipe: [Fused(ops)])
    seq = fz.Sequential(Noisy(), Noisy())
    held = [*seq.buffers()]
    generator = torch.get_rng_state()
    with torch.no_grad():
        seq(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(now is then and now == 0 for now, then in zip(seq.buffers(), held, strict=True))


class Powered(fz.BasicOperation):
    """x to the power that the selected kernels give."""

    kernel_rows = (
        extend.KernelRow(
            "cube",
            types.SimpleNamespace(power=3),
            (multiple_of(this.op.input.features, 3),),
            "As a cube.",
        ),
        extend.KernelRow("square", types.SimpleNamespace(power=2), (equal(this.sm, None),), ""),
    )

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ ** (1 if ctx.kernels is None else ctx.kernels.power)


def test_an_op_runs_on_the_kernels_of_its_first_row_that_applies():
    op = fz.Sequential(Powered())
    for features, power, name in ((6, 3, "cube"), (4, 2, "square")):
        x = torch.randn(2, features)
        torch.testing.assert_close(op(x), x**power)
        assert (op.plan.fired, op.plan.kernels) == ((), (name,))
    explained = fz.explain(op, x.requires_grad_())
    assert explained.kernels == ("square",)
    assert "kernels: square" in str(explained)
    assert "saves x, parameters" in str(explained)
    assert "  cube for ops[0:1]\n    op.input.features must be a multiple of 3, got 4" in str(
        explained
    )
    with assume_target("sm90"):
        torch.testing.assert_close(op(x), x)
    assert op.plan.kernels == ()
    text = str(fz.explain(op, x, target="sm90"))
    assert "kernels: the op's default\n" in text


def test_rows_may_be_set_on_an_op():
    op = Powered()
    op.kernel_rows = (extend.KernelRow("fourth", types.SimpleNamespace(power=4), ()),)
    x = torch.randn(2, 4)
    torch.testing.assert_close(fz.Sequential(op)(x), x**4)


def test_a_formula_has_no_kernels():
    class Tripled(fz.BasicOperation):
        kernel_rows = (extend.KernelRow("fast", object(), ()),)

        def formula(self, x):
            return 3 * x

    explained = fz.explain(fz.Sequential(Tripled()), torch.ones(2, 4))
    assert explained.kernels == ()
    (refusal,) = explained.refusals
    assert refusal.reasons == (
        "op must define op_forward or fuser_forward, which read ctx.kernels, got Tripled, which is "
        "a formula alone",
    )


@pytest.mark.parametrize("needs", [equal(this.op.dtype, "float32"), (True,), [equal(this.sm, 90)]])
def test_needs_of_kernels_are_a_tuple_of_conditions(needs):
    with pytest.raises(TypeError, match="needs of kernels fast must be a tuple of conditions made"):
        extend.KernelRow("fast", object(), needs)


def test_an_unknown_fact_names_the_kernels_and_the_op():
    op = Powered()
    op.kernel_rows = (extend.KernelRow("fast", object(), (equal(this.op.power, 3),)),)
    with pytest.raises(AttributeError, match=r"op\.power is not a fact") as raised:
        fz.Sequential(op)(torch.ones(2, 4))
    assert "in the needs of kernels fast of Powered" in raised.value.__notes__


def test_rows_of_kernels_are_of_the_op_itself():
    """A subclass may compute something else."""

    class Mine(Powered):
        pass

    class Same(Powered):
        computes_as = Powered

    class Own(Powered):
        kernel_rows = Powered.kernel_rows[1:]

    x = torch.randn(2, 4)
    plans = [fz.explain(kind(), x).plans[0] for kind in (Mine, Same, Own)]
    assert [plan.kernels for plan in plans] == [(), ("square",), ("square",)]
    why = "op must be Powered itself, got its subclass Mine, whose math may differ"
    assert [why in refusal.reasons for refusal in plans[0].refusals] == [True, True]


def test_a_row_of_kernels_that_reads_no_fact():
    class Reads(fz.BasicOperation):
        kernel_rows = (extend.KernelRow("own", None, (equal(this.op.scael, 1.0),), ""),)

        def op_forward(self, ctx, input_, **_):
            return input_

    with pytest.raises(AttributeError, match=r"op\.scael is not a fact: there is no 'scael' among"):
        Reads()(torch.ones(3))


def test_ops_that_read_values_are_not_checked(own_fusions):
    class Reads(fz.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_ * input_.sum().item()

    class Fused(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_[:1], [(), ()]

    extend.register_forward_fusion(lambda ops, *, recipe: [Fused(ops)])
    with torch.no_grad():
        assert fz.Sequential(Reads(), Reads())(torch.ones(3)).shape == (1,)


def test_channels_across_a_users_fused_op(own_fusions):
    class Fused(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
            (_, (addend,)) = basic_op_extra_inputs
            return input_ * self.basic_ops[0].scale + addend, [(), ()]

    extend.register_forward_fusion(lambda ops, *, recipe: [ops[0], Fused(ops[1:])])
    seq = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        fz.ConstantScale(2.0),
        fz.AddExtraInput().set_extra_input_channel(0, "r"),
    )
    x = torch.ones(3, requires_grad=True)
    y = seq(x)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [3.0] * 3


# --- conditions -----------------------------------------------------------------------------------


class Sized(fz.BasicOperation):
    fact_names = ("size",)

    @property
    def size(self):
        raise RuntimeError("there is no size yet")

    def formula(self, x):
        return 2 * x


class Named(fz.BasicOperation):
    fact_names = ("dtype",)
    dtype = 3

    def formula(self, x):
        return 2 * x


@pytest.mark.parametrize("call", [lambda module, x: module(x), fz.explain])
def test_a_fact_that_raises_is_named(call):
    with pytest.raises(RuntimeError, match="there is no size yet") as raised:
        call(fz.Sequential(Sized()), torch.ones(2, 2))
    assert raised.value.__notes__[0] == "raised by size of Sized, one of its fact_names"


def test_a_fact_of_a_name_that_all_ops_have_is_refused():
    @rule(equal(this.op.dtype, "float32"))
    def of_dtype(op: Named) -> fz.FusedOperation:
        """Never fires."""
        return fz.FusedOperation([op])

    with pytest.raises(ValueError, match="must have names of their own"):
        register_rule(of_dtype)


def test_a_condition_between_two_facts_holds_where_a_third_has_a_value():
    need = extend.where(this.a, 3, extend.where(this.d, 4, equal(this.b, this.c)))

    def why_not(**facts):
        return need.why_not(types.SimpleNamespace(**facts))

    assert why_not(a=3, b=1, c=1, d=4) is None
    assert why_not(a=2, b=1, c=2, d=4) is None
    assert why_not(a=3, b=1, c=2, d=5) is None
    assert why_not(a=3, b=1, c=2, d=4) == (
        "b must be equal to c (which is 2) where d is 4 and a is 3, got 1"
    )
    assert {path.names for path in need.paths} == {("a",), ("b",), ("c",), ("d",)}


# --- names of the package -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("autocost", "autocast"),
        ("LayerNom", "LayerNorm"),
    ],
)
def test_names_that_the_package_has_not(name, near):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{near}'"):
        getattr(fz, name)


def test_explain_of_no_module():
    with pytest.raises(TypeError, match=r"explain needs a module, .* got int"):
        fz.explain(5)


def test_a_bias_set_to_none():
    linear = fz.Linear(4, 4)
    linear.bias = None
    with pytest.raises(AttributeError, match="bias of Bias must be a tensor, got None; make an op"):
        linear(torch.ones(2, 4))


class GroupedFormula(extend.BasicOperation):
    """A formula of a library op, which autograd cannot follow."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 8, 8))

    def formula(self, x, weight):
        return extend.grouped_mm(x, [weight], torch.tensor([3, 5], dtype=torch.int32))


# Dynamo, of what it goes on with after the error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("alone", [True, False])
def test_a_formula_of_library_ops_is_refused_where_it_needs_gradients(alone, compiled):
    op = GroupedFormula()
    module = op if alone else fz.Sequential(fz.Linear(8, 8), op)
    if compiled:
        module = torch.compile(module, backend="aot_eager")
    with pytest.raises(RuntimeError, match="inputs of grouped_mm must not require gradients"):
        module(torch.randn(5, 8))
    torch._dynamo.reset()  # it would not compile the code that raised in later tests
    x = torch.randn(5, 8)
    with torch.no_grad():
        y = op(x)
    torch.testing.assert_close(y, torch.cat([x[:3] @ op.weight[0].T, x[3:] @ op.weight[1].T]))
