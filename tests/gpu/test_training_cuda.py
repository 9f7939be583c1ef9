"""Training on CUDA: main grads, delayed weight gradients, buffers, graphs, streams and threads.

Every way of running: fused on Hopper, unfused by PyTorch's grouped products, and under recipes.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import reference as ref
import torch
import training_paths
from checks import graph_of, hopper, never_waiting
from number_formats import BLOCK
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fusible as fz
from fusible.testing import assume_target

pytestmark = hopper

DOCS = Path(__file__).parents[2] / "docs"
HIDDEN, INNER, SIZES, TAIL = 128, 128, (127, 0, 128, 129, 1, 256, 0, 300), 60
ROWS = sum(SIZES) + TAIL
PATHS = {
    name: path
    for name, path in training_paths.PATHS.items()
    if "sm100" not in name and path.dtype == torch.bfloat16 and not path.stored
} | {"unfused fp8_block": training_paths.Path(recipe=BLOCK)}
paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def build(path=PATHS["sm90"], single=True, **options):
    torch.manual_seed(0)
    options |= {"device": "cuda", "dtype": torch.bfloat16}
    options |= {"single_grouped_weight": single, "single_grouped_bias": single}
    experts = [
        fz.GroupedLinear(len(SIZES), HIDDEN, 2 * INNER, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(len(SIZES), INNER, HIDDEN, **options),
    ]
    if path.form == "experts":
        experts = [fz.Dispatch(len(SIZES)), *experts, fz.Combine()]
    mlp = fz.Sequential(*experts)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return mlp


def inputs(path=PATHS["sm90"], seed=1, sizes=SIZES):
    """x, whose last rows are not in use; split sizes or experts of the rows; scales; dy."""
    torch.manual_seed(seed)
    x = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16().requires_grad_()
    scales, splits = torch.rand(ROWS), torch.tensor(sizes)
    if path.form == "experts":
        ids = torch.full((ROWS, 1), -1)
        ids[: sum(sizes), 0] = torch.arange(len(sizes)).repeat_interleave(splits)
        scales, splits = scales[:, None], ids
    return x, splits.cuda(), scales.cuda().requires_grad_(), torch.randn_like(x.detach())


def arguments(mlp, x, splits, scales, parts=False):
    if len(mlp) == 5:
        return x, scales, splits
    return x, splits, scales, splits.clone() if parts else splits


def on(path):
    """The recipe and the rules of a path, for forward and backward."""
    return path.on("cuda")


def step(mlp, x, splits, scales, dy, parts=False, **options):
    """Output and gradients of the inputs; parameters' accumulate."""
    y = mlp(*arguments(mlp, x, splits, scales, parts), **options)
    y.backward(dy)
    grads = x.grad, scales.grad
    x.grad = scales.grad = None
    return y.detach(), *grads


def run(path, mlp, given, **options):
    with on(path):
        out = step(mlp, *given, path.form == "parts", **options)
    assert mlp.plan.fired + mlp.plan.kernels == path.fired
    return out


def linears(mlp):
    return [op for op in mlp if isinstance(op, fz.GroupedLinear)]


def weights(mlp):
    return [w for fc in linears(mlp) for w in fc.weights()]


def biases(mlp):
    return [b for fc in linears(mlp) for b in fc.biases()]


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    with never_waiting():
        yield


# --- weight gradients ----------------------------------------------------------------------------


@paths
@training_paths.layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_main_grads(path, single, dtype, delay):
    """Added to, or overwritten where it holds garbage, each weight by its own flag."""
    plain, given = build(path, single), inputs(path)
    want = run(path, plain, given)
    mlp = build(path, single, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    before = []
    for i, w in enumerate(weights(mlp)):
        w.overwrite_main_grad = i % 3 == 0
        w.main_grad = torch.randn(w.shape, device="cuda").to(dtype)
        if w.overwrite_main_grad:
            w.main_grad.fill_(float("nan"))
        before.append(w.main_grad.clone())
    run(path, mlp, given)  # compiles kernels
    for w, old in zip(weights(mlp), before, strict=True):
        w.main_grad.copy_(old)
    mlp.zero_grad()
    fc1, fc2 = linears(mlp)
    for fc in (fc1, fc2):
        fc._delayed.clear()
    with on(path), no_synchronisation():
        got = run(path, mlp, given)
        for fc in (fc2, fc1, fc2):
            fc.backward_dw()
    ref.assert_equal(got, want)
    ref.assert_equal([b.grad for b in biases(mlp)], [b.grad for b in biases(plain)])
    for w, old, other in zip(weights(mlp), before, weights(plain), strict=True):
        assert w.grad is None
        grad = other.grad.double()
        total = grad + (0 if w.overwrite_main_grad else old.double())
        bound = 4 * torch.finfo(torch.bfloat16).eps * total.abs().max() + 1e-30
        assert (w.main_grad.double() - total).abs().max() <= bound
    for fc in (fc1, fc2):
        for group, size in enumerate(SIZES):
            if size == 0:
                w = fc.weights()[0 if single else group]
                first = 0 if fc is fc1 else len(fc1.weights())
                old = before[first + (0 if single else group)]
                mine, old = (t[group] if single else t for t in (w.main_grad, old))
                assert torch.equal(mine, torch.zeros_like(old) if w.overwrite_main_grad else old)


@training_paths.layouts
def test_products_reach_fp32_main_grads_unrounded(single):
    options = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    op = fz.GroupedLinear(
        len(SIZES),
        HIDDEN,
        INNER,
        accumulate_into_main_grad=True,
        single_grouped_weight=single,
        **options,
    )
    start = [torch.randn(w.shape, device="cuda") for w in op.weights()]
    for w, old in zip(op.weights(), start, strict=True):
        w.main_grad = old.clone()
    x, splits, _, _ = inputs()
    dy = torch.randn(ROWS, INNER, device="cuda").bfloat16()
    op(x, splits).backward(dy)
    assert op.plan.kernels == ("sm90",)
    got = torch.stack([w.main_grad for w in op.weights()]).view(-1, INNER, HIDDEN)
    old = torch.stack(start).view(-1, INNER, HIDDEN)
    at = 0
    for group, size in enumerate(SIZES):
        rows = slice(at, at + size)
        at += size
        want = old[group].double() + dy[rows].double().t() @ x[rows].detach().double()
        assert (got[group] - want).abs().max() <= 1e-5 * want.abs().max()


@paths
def test_delayed_weight_gradients(path):
    plain, mlp, given = build(path), build(path, delay_wgrad_compute=True), inputs(path)
    ref.assert_equal(run(path, mlp, given), run(path, plain, given))
    assert all(w.grad is None for w in weights(mlp))
    fc1, fc2 = linears(mlp)
    for fc in (fc2, fc1, fc1):
        fc.backward_dw()
    ref.assert_equal([p.grad for p in mlp.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_main_grad(dtype):
    op = fz.BasicLinear(
        256, 512, dtype=torch.bfloat16, device="cuda", accumulate_into_main_grad=True
    )
    old = torch.randn(512, 256, device="cuda").to(dtype)
    op.weight.main_grad = old.clone()
    x, dy = (torch.randn(300, n, device="cuda").bfloat16() for n in (256, 512))
    op(x).backward(dy)
    want = old.double() + dy.double().t() @ x.double()
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert (op.weight.main_grad - want).abs().max() <= bound * want.abs().max()


@paths
@training_paths.layouts
def test_no_rows_and_no_rows_in_use(path, single):
    """Zero gradients, not none."""
    mlp = build(path, single)
    for rows in (ROWS, 0):
        x, splits, scales, dy = (
            t[:rows].detach() if len(t) == ROWS else t for t in inputs(path, sizes=[0] * len(SIZES))
        )
        given = x.requires_grad_(), splits, scales.requires_grad_(), dy
        y, dx, dscales = run(path, mlp, given)
        for t in (y, dx, dscales, *(p.grad for p in mlp.parameters())):
            assert not t.any()
        mlp.zero_grad()


# --- the caller's buffers ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PATHS if PATHS[name].form != "experts"])
def test_buffers(name):
    path = PATHS[name]
    mlp, given = build(path), inputs(path)
    want = run(path, mlp, given)
    output, grad_input = (torch.full_like(want[0], float("nan")) for _ in "ab")
    kwargs = {0: {"grad_input": grad_input}, 2: {"output": output}}
    with no_synchronisation():
        got = run(path, mlp, given, op_kwargs=kwargs)
    ref.assert_equal((*got[:2], output, grad_input), (*want[:2], *want[:2]))
    assert got[0].data_ptr() == output.data_ptr()


# --- CUDA graphs ---------------------------------------------------------------------------------

OTHERS = ([ROWS, *[0] * 7], [0] * 8, [1] * 8, [ROWS // 8] * 8, SIZES)


@pytest.mark.parametrize("splits", [list(SIZES), torch.tensor(SIZES)], ids=["list", "on the host"])
def test_splits_on_the_host_are_not_captured(splits):
    """A replay would copy what then lies in their place."""
    module = fz.GroupedLinear(len(SIZES), HIDDEN, INNER, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        module(x, splits)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="while a CUDA graph is captured, got cpu"),
        torch.cuda.graph(graph),
    ):
        module(x, splits)
    assert torch.isfinite(module(x, splits)).all()


def made_graphed(path, mlp):
    """A copy of ``mlp`` whose forward and backward are graphs."""
    graphed, (x, splits, scales, _) = copy.deepcopy(mlp), inputs(path)
    with on(path):
        torch.cuda.make_graphed_callables(
            graphed, arguments(mlp, x, splits, scales, path.form == "parts")
        )
    return graphed


@paths
@training_paths.layouts
def test_make_graphed_callables(path, single):
    """Forward and backward as graphs of their own, replayed with other splits and other rows."""
    mlp = build(path, single)
    graphed = made_graphed(path, mlp)
    assert graphed.plan.fired + graphed.plan.kernels == path.fired
    for seed, sizes in enumerate(OTHERS):
        given = inputs(path, seed, sizes)
        with torch.no_grad():
            given[0][sum(sizes) :] = float("nan")  # rows of a padded buffer that are not in use
            given[3][sum(sizes) :] = float("nan")
        with no_synchronisation():
            got = [t.clone() for t in step(graphed, *given, path.form == "parts")]
        ref.assert_equal(got, run(path, mlp, given))
        ref.assert_equal([p.grad for p in graphed.parameters()], [p.grad for p in mlp.parameters()])
        mlp.zero_grad()
        graphed.zero_grad()


@paths
def test_micro_batches_of_a_graphed_module(path):
    """``.grad`` keeps its memory, which is not that of the graph's results."""
    mlp = build(path)
    graphed = made_graphed(path, mlp)
    for module in (mlp, graphed):
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
    for seed in (3, 4):
        step(graphed, *inputs(path, seed), path.form == "parts")
        run(path, mlp, inputs(path, seed))
    ref.assert_equal([p.grad for p in graphed.parameters()], [p.grad for p in mlp.parameters()])


@paths
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_a_whole_step_in_one_graph(path, accumulate):
    """Forward, backward, weight gradients and optimizer; replayed with other splits."""

    def make():
        mlp = build(path, accumulate_into_main_grad=accumulate, delay_wgrad_compute=accumulate)
        for w in weights(mlp) if accumulate else ():
            w.main_grad = torch.zeros(w.shape, device="cuda")
            w.overwrite_main_grad = True
        return mlp, torch.optim.AdamW(mlp.parameters(), lr=1e-2, capturable=True)

    def train(mlp, optimizer, given):
        y = mlp(*arguments(mlp, *given[:3], path.form == "parts"))
        y.backward(given[3])
        for fc in linears(mlp) if accumulate else ():
            fc.backward_dw()
        for w in weights(mlp) if accumulate else ():
            w.grad = w.main_grad.to(w.dtype)
        optimizer.step()
        optimizer.zero_grad()
        given[0].grad = given[2].grad = None

    captured, eager = make(), make()
    given = inputs(path)
    with on(path):
        graph, _ = graph_of(lambda: train(*captured, given))
    for _ in range(3):
        with on(path):
            train(*eager, given)
    for seed, sizes in enumerate(OTHERS):
        other = inputs(path, seed, sizes)
        with torch.no_grad():
            for mine, theirs in zip(given, other, strict=True):
                mine.copy_(theirs)
        graph.replay()
        with on(path):
            train(*eager, other)
        ref.assert_equal(captured[0].parameters(), eager[0].parameters())


# --- memory --------------------------------------------------------------------------------------


def keeping_products():
    """A selective checkpoint's contexts: what the library computes is kept."""

    def policy(ctx, op, *args, **kwargs):
        kept = op.namespace == "fusible"
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@paths
def test_offload_and_checkpoint(path):
    mlp, given = build(path), inputs(path)
    x, splits, scales, dy = given
    want = run(path, mlp, given)
    grads = [p.grad.clone() for p in mlp.parameters()]
    args = arguments(mlp, x, splits, scales, path.form == "parts")

    def offloaded():
        with save_on_cpu(pin_memory=True):
            return mlp(*args)

    def recomputed(**options):
        return checkpoint(mlp, *args, use_reentrant=False, **options)

    def selectively():
        return recomputed(context_fn=keeping_products)

    for forward in (offloaded, recomputed, selectively):
        mlp.zero_grad()
        with on(path):
            y = forward()
            y.backward(dy)
        ref.assert_equal((y.detach(), x.grad, scales.grad), want)
        ref.assert_equal([p.grad for p in mlp.parameters()], grads)
        x.grad = scales.grad = None


# --- at the same time ----------------------------------------------------------------------------


@paths
def test_two_streams(path):
    """Two modules at once, many times: nothing is shared that either writes."""
    modules, given = [build(path), build(path, False)], [inputs(path, 1), inputs(path, 2)]
    want = [run(path, m, g) for m, g in zip(modules, given, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream, module, each in zip(streams, modules, given, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(path, module, each))
    torch.cuda.synchronize()
    for i, got in enumerate(results):
        ref.assert_equal(got, want[i % 2])


def test_two_threads_with_different_recipes():
    recipes = [None, fz.recipes.MXFP8BlockScaling(), fz.recipes.Float8BlockScaling()]
    mlp, given = build(), [inputs() for _ in recipes]

    def outputs(i):
        x, splits, scales, dy = given[i]
        with fz.autocast(enabled=recipes[i] is not None, recipe=recipes[i]):
            y = mlp(x, splits, scales, splits)
        return y, *torch.autograd.grad(y, [x, scales], dy)

    want = [outputs(i) for i in range(len(recipes))]
    assert not torch.equal(want[0][0], want[1][0])
    seen = {}

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            seen[i] = [outputs(i) for _ in range(5)]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(recipes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == len(recipes)
    for i, results in seen.items():
        for got in results:
            ref.assert_equal(got, want[i])


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dynamic", "accumulate"),
    [
        *itertools.product(["sm90"], [False, True], [False, True]),
        ("sm90 experts", True, False),
        ("sm90 mxfp8", True, True),
        ("unfused bf16", True, True),
    ],
)
def test_compiled(name, dynamic, accumulate):
    path = PATHS[name]
    mlp, given = build(path, accumulate_into_main_grad=accumulate), inputs(path)
    for w in weights(mlp) if accumulate else ():
        w.main_grad, w.overwrite_main_grad = torch.zeros(w.shape, device="cuda"), True

    def results(call):
        mlp.zero_grad()
        with on(path):
            y = call(*arguments(mlp, *given[:3]))
            y.backward(given[3])
        where = "main_grad" if accumulate else "grad"
        return [
            y.detach(),
            *(t.grad.clone() for t in (given[0], given[2], *biases(mlp))),
            *(getattr(w, where).clone() for w in weights(mlp)),
        ]

    want = results(mlp)
    assert mlp.plan.fired + mlp.plan.kernels == path.fired
    given[0].grad = given[2].grad = None
    for mine, theirs in zip(
        results(torch.compile(mlp, fullgraph=True, dynamic=dynamic)), want, strict=True
    ):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
        assert error < 1e-5


# --- the page ------------------------------------------------------------------------------------


def test_the_code_for_cuda_on_the_page():
    """docs/training.md: its blocks for a GPU, after those that they build on."""
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"```(python(?: cuda)?)\n(.*?)```", text, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "python cuda"}
    for _, block in blocks:
        exec(block, names)


@pytest.mark.parametrize("machine", ["sm80", None], ids=["unfused", "fused"])
def test_what_the_page_says_is_saved(machine, monkeypatch):
    """Its table is made on the CPU."""
    monkeypatch.syspath_prepend(str(DOCS))
    import saved_bytes

    page = saved_bytes.PAGE.read_text(encoding="utf-8")
    for name, recipe in saved_bytes.RECIPES.items():
        module = saved_bytes.grouped_mlp("cuda")
        with assume_target(machine) if machine else nullcontext():
            per_token, _ = saved_bytes.per_token_and_fixed(module, recipe)
        how = f"`{module.plan.fired[0]}`" if machine is None else "unfused"
        assert f"| {name} | {how} | {per_token:,.0f} |" in page
