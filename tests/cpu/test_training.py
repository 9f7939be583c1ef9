"""Trainers' tools around and inside a Sequential: memory, compilation, concurrency."""

import copy
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import reference as ref
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fusible as fz
from fusible.kernels import grouped
from fusible.testing import assume_target

SIZES, ROWS, WIDTH = (3, 0, 4, 1), 10, 64
FP32, BF16 = torch.float32, torch.bfloat16
MX = fz.recipes.MXFP8BlockScaling()
# Name: dtype of the model, recipe, machine, what must have fired.
PATHS = {
    "unfused": (FP32, None, None, ()),
    "sm90": (BF16, None, "sm90", ("grouped_mlp_sm90",)),
    "mxfp8": (FP32, MX, None, ()),
    "sm100": (BF16, MX, "sm100", ("grouped_mlp_sm100",)),
}
paths = pytest.mark.parametrize("path", PATHS)
layouts = pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])


@contextmanager
def on(path):
    _, recipe, machine, _ = PATHS[path]
    with (
        fz.autocast(enabled=recipe is not None, recipe=recipe),
        assume_target(machine) if machine else nullcontext(),
    ):
        yield


def build(path, single=True, **options):
    options = {"single_grouped_weight": single, "single_grouped_bias": single} | options
    mlp = ref.grouped_mlp(4, WIDTH, 64, dtype=PATHS[path][0], **{"bias": True, **options})
    mlp[1] = fz.ScaledSwiGLU(32)
    return mlp


def inputs(path, sizes=SIZES, rows=ROWS):
    x, splits, scales = ref.grouped_mlp_inputs(sizes, rows, WIDTH, PATHS[path][0])
    return x, splits, scales, splits


def grads(call, module, given, dy=None):
    """Output and gradients of everything."""
    leaves = [t for t in (*given[:3], *module.parameters()) if t.requires_grad]
    y = call(*given)
    dy = torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


# --- gradients that are never missing ------------------------------------------------------------


@paths
@layouts
@pytest.mark.parametrize("rows", [0, ROWS])
def test_no_rows(path, single, rows):
    module, given = build(path, single), inputs(path, [0] * 4, rows)
    with on(path):
        module(*given).sum().backward()
    assert module.plan.fired == PATHS[path][3]
    for t in (given[0], given[2], *module.parameters()):
        assert t.grad.shape == t.shape
        assert not t.grad.any()


@paths
@layouts
def test_rows_that_are_not_in_use_may_hold_anything(path, single):
    """A buffer for more rows than there are: the gradients of a buffer that fits."""
    module, given = build(path, single), inputs(path)
    fits = [t[:8].detach().requires_grad_(t.requires_grad) for t in (given[0], given[2])]
    garbage = [t.detach().clone() for t in (given[0], given[2])]
    for t in garbage:
        t[8:] = float("nan")
        t.requires_grad_()
    dy = torch.randn(ROWS, WIDTH).to(PATHS[path][0])
    with on(path):
        want = grads(module, module, (fits[0], given[1], fits[1], given[1]), dy[:8])
        dy[8:] = float("inf")
        got = grads(module, module, (garbage[0], given[1], garbage[1], given[1]), dy)
    for i in range(3):
        assert not got[i][8:].any()
    same([*(t[:8] for t in got[:3]), *got[3:]], want)


# --- memory --------------------------------------------------------------------------------------


def recomputed(module, given, **options):
    """The split sizes passed once: a reentrant checkpoint would make two tensors of them."""

    def forward(x, splits, scales):
        return module(x, splits, scales, splits)

    return checkpoint(forward, *given[:3], **{"use_reentrant": False, **options})


@paths
@layouts
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around(path, single, reentrant):
    module, given = build(path, single), inputs(path)
    with on(path):
        want = grads(module, module, given)
        if reentrant:  # its output is that of a forward without gradients
            with torch.no_grad():
                want[0] = module(*given)
        leaves = [t for t in (*given[:3], *module.parameters()) if t.requires_grad]
        y = recomputed(module, given, use_reentrant=reentrant)
        y.backward(torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype))
    same([y.detach(), *(t.grad for t in leaves)], want)


@paths
def test_checkpoint_saves_the_inputs_only(path):
    module, given = build(path), inputs(path)
    kept = []
    with on(path), saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        recomputed(module, given)
    assert {t.untyped_storage().data_ptr() for t in kept if t.numel()} <= {
        t.data_ptr() for t in given
    }


def test_checkpoint_inside():
    """A module of a Sequential, itself fused, that is recomputed."""
    plain = fz.Sequential(
        fz.Linear(16, 32), fz.Sequential(fz.Linear(32, 32), fz.SiLU()), fz.Linear(32, 8)
    )
    wrapped = copy.deepcopy(plain)
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    x = torch.randn(5, 16, requires_grad=True)
    given = (x, torch.zeros(1), torch.zeros(1))
    ran = []
    wrapped[1].register_forward_pre_hook(lambda *_: ran.append(1))
    results = [grads(lambda x, *_, m=m: m(x), m, given) for m in (wrapped, plain)]
    same(*results)
    assert "linear_bias_activation" in wrapped.plan.fired
    assert len(wrapped.segments()) == 3


@pytest.mark.parametrize("path", ["unfused", "sm90", "mxfp8"])
def test_selective_checkpoint(path, monkeypatch):
    """Products kept, the rest recomputed: the library's ops are what a policy can name."""
    module, given = build(path), inputs(path)
    products = []
    of_groups = grouped._sizes

    def counted(ends):
        products.append(1)
        return of_groups(ends)

    monkeypatch.setattr(grouped, "_sizes", counted)

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.fusible.grouped_mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    counts = []
    with on(path):
        for call in (
            module,
            lambda *a: recomputed(module, a),
            lambda *a: recomputed(module, a, **contexts),
        ):
            products.clear()
            results = grads(call, module, given)
            counts.append(len(products))
            if call is module:
                want = results
            same(results, want)
    assert counts == [6, 8, 6]


@paths
def test_offload(path):
    """Everything that is saved goes through autograd's hooks, weights included."""
    module, given = build(path), inputs(path)
    moved = []

    def away(t):
        moved.append(t)
        return t.clone()

    with on(path):
        want = grads(module, module, given)

        def offloaded(*args):
            with saved_tensors_hooks(away, lambda t: t.clone()), save_on_cpu():
                return module(*args)

        same(grads(offloaded, module, given), want)


@paths
def test_what_is_saved_is_all_that_is_kept(path):
    """Saved tensors that come back as others are what the backward reads: nothing is held aside."""
    module, given = build(path), inputs(path)
    doubled = []

    def doubling(t):
        doubled.append(t)
        return 2 * t if t.dtype == PATHS[path][0] and t.dim() == 2 and len(t) == ROWS else t

    with on(path):
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
        self.norm = nn.LayerNorm(WIDTH, dtype=PATHS[path][0])
        self.experts = build(path)

    def forward(self, x, splits, scales, again):
        return x + self.experts(self.norm(x), splits, scales.sigmoid(), again)


def compilations(counter):
    """Graphs with something in them."""
    return sum(len(graph.graph.nodes) > 0 for graph in counter.graphs)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning")
class TestCompiled:
    @pytest.mark.parametrize(
        ("path", "dynamic"),
        [("unfused", False), ("sm90", False), *((path, True) for path in PATHS)],
    )
    def test_a_module_with_a_sequential(self, path, dynamic):
        if PATHS[path][1] is not None and torch.__version__ < "2.13":
            pytest.skip("refused: tests/cpu/test_compile.py")
        block, counter = Block(path), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=dynamic)
        with on(path):
            for sizes, rows in [
                (SIZES, 10),
                ((0, 0, 0, 0), 10),
                ((10, 0, 0, 0), 10),
                ((1, 2, 3, 4), 10),
                *([((5, 0, 6, 1), 12), ((0, 30, 0, 3), 40)] if dynamic else []),
            ]:
                given = inputs(path, sizes, rows)
                results = [grads(call, block, given) for call in (compiled, block)]
                torch.testing.assert_close(*results)
            assert block.experts.plan.fired == PATHS[path][3]
        assert compilations(counter) == 1

    def test_no_rows_and_one_row_may_specialise_once(self):
        path = "unfused"
        module, counter = build(path), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
        with on(path):
            for rows in (7, 0, 1, 9, 1, 0, 30):
                given = inputs(path, (0, rows, 0, 0), rows)
                results = [grads(call, module, given) for call in (compiled, module)]
                torch.testing.assert_close(*results)
        assert compilations(counter) <= 3

    @pytest.mark.parametrize("path", ["unfused", "sm90"])
    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_export_of_the_forward(self, path, dynamic):
        module = build(path)
        given = tuple(t.detach() for t in inputs(path))
        rows = torch.export.Dim("rows", min=2, max=4096)
        shapes = {"input": {0: rows}, "extra_inputs": (None, {0: rows}, None)}
        with on(path), torch.no_grad():
            exported = torch.export.export(
                module, given, dynamic_shapes=shapes if dynamic else None
            )
            if dynamic:
                given = tuple(t.detach() for t in inputs(path, (20, 1, 0, 9), 33))
            torch.testing.assert_close(exported.module()(*given), module(*given))
            assert bool(module.plan.fired) == (path == "sm90")


# --- at the same time ----------------------------------------------------------------------------


def test_threads_with_different_recipes():
    """One module, eight threads, four recipes, forward and backward: each gets its own numbers."""
    recipes = [
        None,
        MX,
        fz.recipes.Float8CurrentScaling(),
        fz.recipes.MXFP8BlockScaling(fz.recipes.Format.HYBRID),
    ]
    module, (x, splits, scales, _) = build("unfused"), inputs("unfused")

    def outcome(recipe):
        mine = [t.detach().clone().requires_grad_() for t in (x, scales)]
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(mine[0], splits, mine[1], splits)
        return [y.detach(), *torch.autograd.grad(y.sum(), [*mine, *module.parameters()])]

    want = [outcome(recipe) for recipe in recipes]
    assert len({float(w[0].sum()) for w in want}) == 4 - 1  # HYBRID differs in the backward only
    start, wrong, done = threading.Barrier(8), [], []

    def work(i):
        start.wait()
        for turn in range(6):
            which = (i + turn) % len(recipes)
            got = outcome(recipes[which])
            if any(not torch.equal(a, b) for a, b in zip(got, want[which], strict=True)):
                wrong.append((i, turn))
        done.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(done) == 8


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
    same(*results)
    leaf = x.detach().requires_grad_()
    with fz.autocast(recipe=MX):
        y = plain(leaf)
    assert torch.equal(twice.inner[0], torch.autograd.grad(y.sum(), leaf)[0])


def test_modules_in_each_others_backward():
    """A backward that runs another forward and backward (a checkpoint inside a checkpoint)."""
    module, given = build("unfused"), inputs("unfused")

    def nested(*args):
        return recomputed(lambda *inner: recomputed(module, inner), args)

    same(grads(nested, module, given), grads(module, module, given))
