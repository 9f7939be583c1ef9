"""Every built-in rule and row of kernels: where it fits, why it refuses, and equal results."""

import copy
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest
import reference as ref
import torch
from every_op import randomised
from every_rule import FITS, rule_of, scope_of, used
from torch import Tensor

import fusible as fz
from fusible.fused import RULES
from fusible.fuser.conditions import Condition, Path, at_least, equal, multiple_of, one_of, this
from fusible.fuser.registry import registry
from fusible.fuser.rules import KernelRow, Rule, rule
from fusible.testing import assume_target
from fusible.versions import Version

VARIANTS = [variant for r in RULES for variant in r.variants]
ROWS = {
    f"{kind.__name__}.{row.name}": row
    for kind in (fz.GroupedLinear, fz.BasicLinear)
    for row in kind.kernel_rows
}
CHOICES = {**{r.name: r for r in VARIANTS}, **ROWS}


def test_every_rule_has_a_case():
    assert set(map(rule_of, FITS)) == set(CHOICES)


def site_of(name, monkeypatch) -> tuple[Rule | KernelRow, Any, SimpleNamespace]:
    """The rule or row, with what its ``why_not`` gets where it applies: the ops, the facts."""
    seen, kind = [], type(CHOICES[rule_of(name)])
    whole = kind.why_not

    def spy(self, bound, site):
        reasons = whole(self, bound, site)
        if self == CHOICES[rule_of(name)] and not reasons:
            seen.append((self, bound, site))
        return reasons

    monkeypatch.setattr(kind, "why_not", spy)
    make, target = FITS[name]
    module, inputs = make()
    with scope_of(name):
        plans = fz.explain(module, *inputs, target=target).plans
    assert rule_of(name) in [n for plan in plans for n in used(plan)]
    monkeypatch.undo()
    return seen[0]


def changed(site, names, value):
    """A copy of the nested facts, with one of them replaced."""
    first, *rest = names
    if rest:
        value = changed(getattr(site, first), rest, value)
    if isinstance(site, SimpleNamespace):
        return SimpleNamespace(**{**vars(site), first: value})
    return site._replace(**{first: value})


def candidates(value):
    """Other values of a fact, some of which violate any condition that reads it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 3 * value, value + 8, value + 4, 1, 3, 12, 48, 1025, value + 2**20]
    if isinstance(value, Version):
        return [Version(1, 31)]
    return [3, 48] if value is None else ["something else"]


def violations(need, site):
    """The facts with one value changed so that ``need`` is false."""
    for path in need.paths:
        for value in candidates(Path(path.names).read(site)):
            other = changed(site, path.names, value)
            if need.why_not(other) is not None:
                yield path, other
    if need.only_where:
        where = site
        for fact, value in need.only_where:
            where = changed(where, fact.names, value)
        for value in candidates(need.subject.read(where)):
            other = changed(where, need.subject.names, value)
            if need.why_not(other) is not None:
                yield need.subject, other


NEEDS = [
    pytest.param(name, i, id=f"{name}: {n}")
    for name, choice in CHOICES.items()
    for i, n in enumerate(choice.needs)
]


@pytest.mark.parametrize(("name", "index"), NEEDS)
def test_a_violated_condition_is_the_reason(name, index, monkeypatch):
    found, bound, site = site_of(name, monkeypatch)
    need = found.needs[index]
    assert found.why_not(bound, site) == ()
    broken = [(path, found.why_not(bound, s), s) for path, s in violations(need, site)]
    assert broken
    path, reasons, facts = min(broken, key=lambda b: len(b[1]))
    mine = need.why_not(facts)
    assert reasons.count(mine) == 1
    assert str(need.subject) in mine
    # Alone, unless another condition reads the very fact that had to change.
    reading = [n for n in found.needs if path.names in [p.names for p in n.paths]]
    assert 1 <= len(reasons) <= len(reading)
    if len(reading) == 1:
        assert reasons == (mine,)


@pytest.mark.parametrize("name", FITS)
def test_all_false_sentences_are_reported(name, monkeypatch):
    found, bound, site = site_of(name, monkeypatch)

    def false_at(site):
        return sum(n.why_not(site) is not None for n in found.needs)

    for need in found.needs:
        worse = [s for _, s in violations(need, site) if false_at(s) > false_at(site)]
        site = worse[0] if worse else site
    expected = [reason for n in found.needs if (reason := n.why_not(site))]
    assert len(expected) > 1 or len(found.needs) == 1
    assert list(found.why_not(bound, site)) == expected


@pytest.mark.parametrize("name", FITS)
def test_subclasses_are_refused(name, monkeypatch):
    """A subclass may compute something else."""
    found, bound, site = site_of(name, monkeypatch)
    for part in bound if isinstance(found, Rule) else ("op",):
        whole = bound[part] if isinstance(found, Rule) else bound
        op = copy.copy(whole)
        given = {**bound, part: op} if isinstance(found, Rule) else op
        op.__class__ = type("Mine", (type(whole),), {})
        (reason,) = found.why_not(given, site)
        assert reason.startswith(f"{part} must be ")
        assert "subclass Mine" in reason
        # One that says it computes the same is taken; its own subclasses have to say it again.
        same = type("Same", (type(whole),), {"computes_as": type(whole)})
        op.__class__ = same
        assert not found.why_not(given, site)
        op.__class__ = type("Mine", (same,), {})
        assert found.why_not(given, site) == (reason,)


# --- equal to the ops one by one --------------------------------------------------------------


def run(module, inputs, target):
    """Outputs and gradients of everything that needs one."""
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    with assume_target(target):
        out = module(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(1)
        dys = [torch.randn(o.shape).to(o.dtype) for o in outs]
        return [*(o.detach() for o in outs), *torch.autograd.grad(outs, wanted, dys)]


def doubled(inputs):
    return [ref.double(t) if t.is_floating_point() else t for t in inputs]


def unfused(own_fusions, module, inputs):
    """The ops one by one."""
    own_fusions.install(())
    alone = copy.deepcopy(module)
    result = run(alone, inputs, "cpu")
    assert used(alone.plan) == ()
    own_fusions.install(RULES)
    return result


@pytest.mark.parametrize("name", FITS)
def test_values_and_gradients_no_worse_than_unfused(name, own_fusions):
    make, target = FITS[name]
    module, inputs = make()
    randomised(module, 1 / 3)
    exact = unfused(own_fusions, copy.deepcopy(module).double(), doubled(inputs))
    with scope_of(name):
        plain = unfused(own_fusions, module, inputs)
        fused = run(module, inputs, target)
    assert rule_of(name) in used(module.plan)
    for mine, theirs, right in zip(fused, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        errors = [(t.double() - right).abs().max() for t in (mine, theirs)]
        assert errors[0] <= 1.25 * errors[1] + torch.finfo(mine.dtype).eps * right.abs().max() / 2


@pytest.mark.parametrize("shape", [(16,), (6, 16), (2, 3, 16), (0, 16)])
@pytest.mark.parametrize(
    "name",
    ["linear_bias_activation", "linear_add", "backward_linear_add", "backward_linear_scale"],
)
def test_dense_fusions_in_fp64(name, shape, own_fusions):
    module, _ = FITS[name][0]()
    randomised(module, 1 / 3).double()
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True)]
    if name == "linear_add":
        inputs.append(torch.randn(*shape[:-1], 8, dtype=torch.float64, requires_grad=True))
    plain = unfused(own_fusions, module, inputs)
    fused = run(module, inputs, "cpu")
    assert name in module.plan.fired
    torch.testing.assert_close(fused, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("activation", [None, fz.GELU, fz.ReLU, fz.SiLU])
def test_linear_bias_activation_takes_each_activation(activation, own_fusions):
    module = fz.Sequential(fz.Linear(8, 4), *([activation()] if activation else [])).double()
    randomised(module, 1 / 3)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    plain = unfused(own_fusions, module, [x])
    torch.testing.assert_close(run(module, [x], "cpu"), plain, rtol=1e-13, atol=1e-13)
    assert [len(op.basic_ops) for op in module.plan.forward_ops] == [2 + bool(activation)]


def test_backward_linear_add_with_only_one_gradient(own_fusions):
    """Of x's two uses, only one is differentiated."""
    module, (x,) = FITS["backward_linear_add"][0]()
    for i in (0, 1):
        out = module(x)[i]
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        w = module[1].weight
        expected = torch.ones_like(x) if i else torch.ones(6, 8, dtype=w.dtype) @ w
        torch.testing.assert_close(dx, expected)
    assert module.plan.fired == ("backward_linear_add",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["backward_linear_add", "backward_add_rms_norm"])
def test_a_residuals_backward_keeps_a_wider_branch(name, dtype, own_fusions):
    """Under autocast the branch may be FP32 where the op is not: its gradient stays so."""
    make, target = FITS[name]
    seq, _ = make()
    x = torch.randn(4, 16, dtype=dtype, requires_grad=True)
    with assume_target(target), torch.autocast("cpu", torch.bfloat16):
        y, branch = seq(x)
    tiny = torch.full_like(branch, 1 + 2**-12)
    (dx,) = torch.autograd.grad((y, branch), x, (torch.zeros_like(y), tiny))
    assert name in seq.plan.fired
    assert torch.equal(dx, tiny)


@pytest.mark.parametrize("frozen", ["fc1 and all before", "fc2", "all but fc2's bias", "nothing"])
def test_frozen_parts_of_the_grouped_mlp(frozen, own_fusions):
    module, (x, splits, scales, _) = FITS["grouped_mlp_sm90"][0]()
    randomised(module, 1 / 3)
    if frozen == "fc1 and all before":
        x, scales = x.detach(), scales.detach()
        module[0].requires_grad_(False)
    elif frozen == "fc2":
        module[2].requires_grad_(False)
    elif frozen == "all but fc2's bias":
        x, scales = x.detach(), scales.detach()
        module.requires_grad_(False)
        module[2].bias.requires_grad_(True)
    inputs = [x, splits, scales, splits]
    exact = unfused(own_fusions, copy.deepcopy(module).double(), doubled(inputs))
    for mine, right in zip(run(module, inputs, "sm90"), exact, strict=True):
        ref.assert_accurate(mine.bfloat16(), right, roundings=8)


# --- rules as such ----------------------------------------------------------------------------


@rule(equal(this.a.size, 4))
def example(a: fz.Bias, b: fz.GELU | fz.ReLU, c: fz.SiLU | None) -> fz.FusedOperation:
    """Only an example."""
    return fz.FusedOperation([op for op in (a, b, c) if op is not None])


def test_patterns():
    bias, gelu, relu, silu = fz.Bias(4), fz.GELU(), fz.ReLU(), fz.SiLU()
    assert str(example) == "Bias + GELU | ReLU + [SiLU]"
    assert example.worth == "Only an example."
    assert example.phase == "joint"
    assert example.fit([bias, relu, silu], 0) == {"a": bias, "b": relu, "c": silu}
    assert example.fit([silu, bias, gelu], 1) == {"a": bias, "b": gelu, "c": None}
    assert example.fit([bias, gelu, bias], 0) == {"a": bias, "b": gelu, "c": None}
    assert example.fit([bias, silu], 0) is None
    assert example.fit([bias], 0) is None


@pytest.mark.parametrize(
    ("need", "good", "bad", "sentence"),
    [
        (equal(this.n, 4), 4, 5, "n must be 4, got 5"),
        (one_of(this.n, 4, "x"), "x", 5, "n must be one of 4, x, got 5"),
        (at_least(this.n, 90), 100, 80, "n must be at least 90, got 80"),
        (at_least(this.n, 90), 90, None, "n must be at least 90, got None"),
        (multiple_of(this.n, 8), 16, 12, "n must be a multiple of 8, got 12"),
        (equal(this.n, 2 * this.m), 6, 7, "n must be equal to 2 * m (which is 6), got 7"),
    ],
)
def test_conditions(need, good, bad, sentence):
    assert need.why_not(SimpleNamespace(n=good, m=3)) is None
    assert need.why_not(SimpleNamespace(n=bad, m=3)) == sentence
    assert isinstance(need, Condition)


def test_a_condition_that_cannot_be_evaluated_is_a_refusal():
    got = at_least(this.n, 90).why_not(SimpleNamespace(n="cpu"))
    assert got.startswith("n must be at least 90, got cpu, which cannot be compared (TypeError: ")


def test_another_error_of_a_condition_is_raised():
    with pytest.raises(ZeroDivisionError):
        Condition(this.n, "a divisor of 8", lambda n, _: 8 % n == 0).why_not(SimpleNamespace(n=0))


def test_an_unknown_fact_names_those_there_are():
    with pytest.raises(AttributeError, match=r"'depth' among height, width"):
        equal(this.depth, 1).why_not(SimpleNamespace(width=1, height=2))


def test_the_table_of_rules_has_a_row_for_every_rule(monkeypatch):
    monkeypatch.syspath_prepend(FilePath(__file__).parents[2] / "docs")
    import tables

    lines = tables.support_table(RULES).splitlines()
    rows = [row for r in RULES for row in (r, *r.kernels)]
    names = [name for r in RULES for name in (r.name, *[f"{r.name}_{k.name}" for k in r.kernels])]
    for line, name, row in zip(lines[2:], names, rows, strict=True):
        assert line.startswith(f"| `{name}` | {getattr(row, 'phase', '')} | ")
        assert line.replace("\\|", "").count("|") == 6
        for need in row.needs:
            assert str(need) in line
    *_, table = tables.kernels_table(fz.GroupedLinear, fz.BasicLinear).partition("---|\n")
    for line, (name, row) in zip(table.splitlines(), ROWS.items(), strict=True):
        kind, kernels = name.split(".")
        assert line.startswith(f"| {kind} | `{kernels}` | ")
        assert all(str(need) in line for need in row.needs)


def test_rules_have_distinct_names_and_say_what_they_are_worth():
    assert len({r.name for r in VARIANTS}) == len(VARIANTS)
    assert all(r.worth for r in (*RULES, *CHOICES.values()))
    assert registry.rules == RULES


def test_rules_fuse_several_ops():
    """Kernels of one op are rows of the op."""
    assert all(len(r.pattern) > 1 for r in RULES)


def test_facts_are_never_tensors(monkeypatch):
    def leaves(value):
        if isinstance(value, SimpleNamespace):
            value = vars(value)
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, tuple):
            return [value]
        return [leaf for v in value for leaf in leaves(v)]

    for name in FITS:
        _, _, site = site_of(name, monkeypatch)
        found = leaves(site)
        assert found
        assert not any(isinstance(leaf, Tensor) for leaf in found)


def test_an_activation_that_kernels_lack_is_a_reason():
    options = {"dtype": torch.bfloat16, "bias": False, "single_grouped_weight": True}
    mlp = fz.Sequential(
        fz.GroupedLinear(2, 64, 256, **options),
        fz.ScaledSiTUGLU(glu_interleave_size=32),
        fz.GroupedLinear(2, 128, 64, **options),
    )
    x, splits = torch.randn(8, 64, dtype=torch.bfloat16), torch.tensor([4, 4])
    explained = fz.explain(mlp, x, splits, torch.rand(8), splits, target="sm100")
    of_bf16 = "act.activation must be one of swiglu, clamped_qgeglu where format.input is none, got"
    assert f"{of_bf16} situglu" in str(explained)
    plain = fz.Sequential(fz.GroupedLinear(2, 64, 128, **options), fz.SReLU(), mlp[2])
    assert f"{of_bf16} srelu" in str(fz.explain(plain, x, splits, splits, target="sm100"))
    explained = fz.explain(mlp, x, splits, torch.rand(8), splits, target="sm90")
    assert explained.fired == ("grouped_mlp_sm90",)
