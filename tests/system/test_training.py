"""Trainers' tools around and inside a Sequential: memory, compilation, concurrency."""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference as ref
import torch
from checks import saved_tensors
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from training_paths import MX, PATHS, ROWS, SIZES, WIDTH, layouts, paths, some_paths

import fusible as fz
from fusible.kernels.grouped import definitions


def needing(module, given):
    """What needs a gradient."""
    return [t for t in (*given, *module.parameters()) if t.requires_grad]


def grads(call, module, given, dy=None):
    """Output and gradients of everything."""
    leaves = needing(module, given)
    y = call(*given)
    dy = torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def backward(module, given):
    """As ``grads`` of a module, by ``.backward()``, which is all a reentrant checkpoint takes."""
    y = module(*given)
    y.backward(torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype))
    return [y.detach(), *ref.take_grads(*needing(module, given))]


def without_gradients(given):
    return tuple(t.detach() if t.requires_grad else t for t in given)


# --- gradients that are never missing ------------------------------------------------------------


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@layouts
@pytest.mark.parametrize("rows", [0, ROWS])
def test_no_rows(path, single, rows):
    module, given = path.build(single), path.inputs([0] * 4, rows)
    with path.on():
        module(*given).sum().backward()
    assert module.plan.fired + module.plan.kernels == path.fired
    for t in needing(module, given):
        assert t.grad.shape == t.shape
        assert not t.grad.any()


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@layouts
def test_rows_that_are_not_in_use_may_hold_anything(path, single):
    """A buffer for more rows than there are: the gradients of a buffer that fits."""
    module, given = path.build(single), path.inputs()
    used, dy = sum(SIZES), torch.randn(ROWS, WIDTH).to(path.dtype)

    def changed(change):
        """The inputs with those that have a row each changed, and none made two of."""
        made = {t: t for t in given}
        for t in given:
            if len(t) == ROWS:
                made[t] = change(t.detach().clone()).requires_grad_(t.requires_grad)
        return [made[t] for t in given]

    def filled(t):
        if t.is_floating_point():
            t[used:] = float("nan")
        return t

    with path.on():
        want = grads(module, module, changed(lambda t: t[:used]), dy[:used])
        dy[used:] = float("inf")
        got = grads(module, module, changed(filled), dy)
    for i in range(3):
        assert not got[i][used:].any()
    # Products of more rows may be summed in another order.
    for mine, theirs in zip([*(t[:used] for t in got[:3]), *got[3:]], want, strict=True):
        path.assert_equal_but_for_rounding(mine, theirs)


# --- memory --------------------------------------------------------------------------------------


def recomputed(module, given, **options):
    """Each tensor passed once: a reentrant checkpoint would make two of the split sizes."""
    once = {t: i for i, t in enumerate(dict.fromkeys(given))}
    places = [once[t] for t in given]
    return checkpoint(
        lambda *unique: module(*[unique[i] for i in places]),
        *once,
        **{"use_reentrant": False, **options},
    )


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around(path, reentrant):
    module, given = path.build(), path.inputs()
    with path.on():
        want = grads(module, module, given)
        if reentrant:  # its output is that of a forward without gradients
            with torch.no_grad():
                want[0] = module(*given)
        y = recomputed(module, given, use_reentrant=reentrant)
        y.backward(torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype))
    ref.assert_equal([y.detach(), *ref.take_grads(*needing(module, given))], want)


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
def test_checkpoint_saves_the_inputs_only(path):
    module, given = path.build(), path.inputs()
    with path.on(), saved_tensors() as kept:
        recomputed(module, given)
    assert {t.untyped_storage().data_ptr() for t in kept if t.numel()} <= {
        t.data_ptr() for t in given
    }


def keeping_products():
    """A selective checkpoint's contexts: the library's products kept, the rest recomputed."""

    def policy(ctx, op, *args, **kwargs):
        kept = op in (torch.ops.fusible.grouped_mm.default, torch.ops.fusible.grouped_glu.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


INSIDE = {
    "all": {},
    "reentrant": {"checkpoint_impl": CheckpointImpl.REENTRANT},
    "selective": {"context_fn": keeping_products},
}


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@pytest.mark.parametrize("how", INSIDE.values(), ids=INSIDE)
def test_checkpoint_inside(path, how):
    """A module of a Sequential, itself fused, that is recomputed."""
    plain = fz.Sequential(
        fz.Linear(WIDTH, WIDTH, dtype=path.dtype), path.build(), fz.RMSNorm(WIDTH, dtype=path.dtype)
    )
    wrapped = copy.deepcopy(plain)
    wrapped[1] = checkpoint_wrapper(wrapped[1], **how)
    x, *extra = path.inputs(rows=32)
    if "checkpoint_impl" in how and len(set(extra)) < len(extra):
        extra = [t.clone() if not t.requires_grad else t for t in extra]  # as it does
    ran = []
    wrapped[1].register_forward_pre_hook(lambda *_: ran.append(1))
    with path.on():
        results = [backward(m, (x, *extra)) for m in (wrapped, plain)]
    ref.assert_equal(*results)
    assert ran
    assert len(wrapped.parts()) == 3


def test_a_selective_checkpoint_that_saves_all_of_a_block_with_a_loss():
    def save_all(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    block = fz.Sequential(
        fz.TopKRouter(16, 4, 2, load_balancing_loss=True, z_loss=True),
        fz.Dispatch(4),
        fz.GroupedLinear(4, 16, 16),
        fz.Combine(weighted=True),
    )
    x = torch.randn(6, 16)
    found = []
    for saved in (False, True):
        leaf = x.clone().requires_grad_()
        contexts = functools.partial(create_selective_checkpoint_contexts, save_all)
        options = {"use_reentrant": False, "context_fn": contexts}
        outputs = checkpoint(block, leaf, **options) if saved else block(leaf)
        sum(t.sum() for t in outputs).backward()
        found.append([*outputs, leaf.grad, *[p.grad for p in block.parameters()]])
        block.zero_grad()
    ref.assert_equal(*found)


@some_paths("unfused", "sm90", "sm90 experts", "unfused mxfp8", "sm90 mxfp8")
def test_selective_checkpoint(path, monkeypatch):
    """Products kept, the rest recomputed: the library's ops are what a policy can name."""
    module, given = path.build(), path.inputs()
    products = []
    of_groups = definitions._sizes

    def counted(ends):
        products.append(1)
        return of_groups(ends)

    monkeypatch.setattr(definitions, "_sizes", counted)
    counts = []
    with path.on():
        for call in (
            module,
            lambda *a: recomputed(module, a),
            lambda *a: recomputed(module, a, context_fn=keeping_products),
        ):
            products.clear()
            results = grads(call, module, given)
            counts.append(len(products))
            if call is module:
                want = results
            ref.assert_equal(results, want)
    assert counts == [6, 8, 6]


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
def test_offload(path):
    """Everything that is saved goes through autograd's hooks, weights included."""
    module, given = path.build(), path.inputs()
    moved = []

    def away(t):
        moved.append(t)
        return t.clone()

    with path.on():
        want = grads(module, module, given)

        def offloaded(*args):
            with saved_tensors_hooks(away, lambda t: t.clone()), save_on_cpu():
                return module(*args)

        ref.assert_equal(grads(offloaded, module, given), want)


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
def test_what_is_saved_is_all_that_is_kept(path):
    """Saved tensors that come back as others are what the backward reads: nothing is held aside."""
    module, given = path.build(), path.inputs()
    doubled = []

    def doubling(t):
        doubled.append(t)
        return 2 * t if t.dtype == path.dtype and t.dim() == 2 and len(t) == ROWS else t

    with path.on():
        want = grads(module, module, given)
        with saved_tensors_hooks(lambda t: t, doubling):
            y = module(*given)
        got = torch.autograd.grad(y, list(module.parameters()), torch.ones_like(y))
    assert doubled
    assert any(not torch.equal(a, b) for a, b in zip(got, want[3:], strict=True))


# --- compiled ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with a Sequential inside."""

    def __init__(self, path):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=path.dtype)
        self.experts = path.build()

    def forward(self, x, *extra):
        return x + self.experts(self.norm(x), *extra)


# Every fused op once; other recipes are compiled by tests/recipes/test_recipe_ops.py.
COMPILED = (
    "unfused",
    "unfused mxfp8",
    "sm90",
    "sm90 parts",
    "sm90 experts",
    "sm90 mxfp8",
    "sm90 mxfp8 parts",
    "sm100 mxfp8",
    "sm100 mxfp8 parts",
)
STATIC_AND_DYNAMIC = pytest.mark.parametrize(
    ("name", "dynamic"),
    [("unfused", False), ("sm90", False), *((name, True) for name in COMPILED)],
)


def compilations(counter):
    """Graphs with something in them."""
    return sum(len(graph.graph.nodes) > 0 for graph in counter.graphs)


@pytest.mark.usefixtures("cpu_or_hopper", "fresh_compiler")
class TestCompiled:
    @STATIC_AND_DYNAMIC
    def test_a_module_with_a_sequential(self, name, dynamic):
        path = PATHS[name]
        block, counter = Block(path), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=dynamic)
        with path.on():
            for sizes, rows in [
                (SIZES, 10),
                ((0, 0, 0, 0), 10),
                ((10, 0, 0, 0), 10),
                ((1, 2, 3, 4), 10),
                *([((5, 0, 6, 1), 12), ((0, 30, 0, 3), 40)] if dynamic else []),
            ]:
                given = path.inputs(sizes, rows)
                results = [grads(call, block, given) for call in (compiled, block)]
                torch.testing.assert_close(*results)
            assert block.experts.plan.fired + block.experts.plan.kernels == path.fired
        assert compilations(counter) == 1

    @some_paths("unfused", "sm90 mxfp8")
    def test_no_rows_and_one_row_may_specialise_once(self, path):
        module, counter = path.build(), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
        with path.on():
            for rows in (7, 0, 1, 9, 1, 0, 30):
                given = path.inputs((0, rows, 0, 0), rows)
                results = [grads(call, module, given) for call in (compiled, module)]
                torch.testing.assert_close(*results)
        assert compilations(counter) <= 3

    @STATIC_AND_DYNAMIC
    def test_export_of_the_forward(self, name, dynamic):
        path = PATHS[name]
        module = path.build()
        given = without_gradients(path.inputs())
        rows = torch.export.Dim("rows", min=2, max=4096)
        of_rows = [{0: rows} if len(t) == ROWS else None for t in given]
        shapes = {"input": of_rows[0], "extra_inputs": tuple(of_rows[1:])}
        with path.on(), torch.no_grad():
            exported = torch.export.export(
                module, given, dynamic_shapes=shapes if dynamic else None
            )
            if dynamic:
                given = without_gradients(path.inputs((20, 1, 0, 9), 33))
            torch.testing.assert_close(exported.module()(*given), module(*given))
            wanted = tuple(n for n in path.fired if "backward" not in n)
            assert module.plan.fired + module.plan.kernels == wanted


# --- at the same time ----------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_or_hopper")
def test_threads_with_different_recipes():
    """One module, eight threads, four recipes, forward and backward: each gets its own numbers."""
    recipes = [
        None,
        MX,
        fz.recipes.Float8CurrentScaling(),
        fz.recipes.MXFP8BlockScaling(fz.recipes.Format.HYBRID),
    ]
    module, (x, splits, scales, _) = PATHS["unfused"].build(), PATHS["unfused"].inputs()

    def outcome(recipe):
        mine = [t.detach().clone().requires_grad_() for t in (x, scales)]
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(mine[0], splits, mine[1], splits)
        return [y.detach(), *torch.autograd.grad(y.sum(), [*mine, *module.parameters()])]

    want = [outcome(recipe) for recipe in recipes]
    assert len({float(w[0].sum()) for w in want}) == 4 - 1  # HYBRID differs in the backward only
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        wrong = []
        for turn in range(6):
            which = (i + turn) % len(recipes)
            got = outcome(recipes[which])
            if any(not torch.equal(a, b) for a, b in zip(got, want[which], strict=True)):
                wrong.append(turn)
        return wrong

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [[]] * 8


class Twice(fz.BasicOperation):
    """An op that runs the Sequential that it is part of, once more, inside its own forward."""

    def __init__(self):
        super().__init__()
        self.depth, self.inner = 0, []

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        if self.depth == 0:
            self.depth = 1
            with torch.enable_grad(), fz.autocast(recipe=MX):
                leaf = input_.detach().requires_grad_()
                self.inner.append(torch.autograd.grad(self.outer[0](leaf).sum(), leaf)[0])
            self.depth = 0
        return input_.clone()

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


@pytest.mark.usefixtures("cpu_or_hopper")
def test_re_entrant_use():
    """A run inside a run, under another recipe, disturbs neither."""
    twice = Twice()
    module = fz.Sequential(twice, fz.Linear(WIDTH, WIDTH), fz.SiLU())
    twice.outer = (module,)  # in a tuple, so that it is no submodule
    plain = fz.Sequential(*module[1:])
    x = torch.randn(32, WIDTH, requires_grad=True)
    results = []
    for call in (module, plain):
        y = call(x)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *module.parameters()])])
    ref.assert_equal(*results)
    leaf = x.detach().requires_grad_()
    with fz.autocast(recipe=MX):
        y = plain(leaf)
    assert torch.equal(twice.inner[0], torch.autograd.grad(y.sum(), leaf)[0])


@pytest.mark.usefixtures("cpu_or_hopper")
def test_modules_in_each_others_backward():
    """A backward that runs another forward and backward (a checkpoint inside a checkpoint)."""
    module, given = PATHS["unfused"].build(), PATHS["unfused"].inputs()

    def nested(*args):
        return recomputed(lambda *inner: recomputed(module, inner), args)

    ref.assert_equal(grads(nested, module, given), grads(module, module, given))
