"""Who owns memory: sums in place, extra tensors that share memory, gradients read after a backward.

Every pipeline is compared with plain PyTorch, which writes to nothing.
"""

import copy
import random
from contextlib import nullcontext

import pytest
import reference as ref
import torch
from torch import nn

import fusible as fz
from fusible.fuser import memory
from fusible.kernels import grouped
from fusible.testing import assume_target

WIDTH, ROWS = 8, 6
SIZES = [2, 0, 3]
FP64 = torch.float64


class Square(fz.BasicOperation):
    """A user's op, which keeps what its backward is given and gives."""

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx, grad_output):
        self.kept = grad_output
        self.given = 2 * grad_output * ctx.saved_tensors[0]
        self.values = self.kept.clone(), self.given.clone()
        return self.given, ()


class Pipeline:
    """Ops at random with named branches, and the same in plain PyTorch."""

    def __init__(self, seed, delay=True, keeps=True):
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.delay, self.keeps = delay, keeps
        self.steps, self.channels, self.extra = [], [], []
        for _ in range(self.draw.randint(2, 12)):
            self.add(self.draw.choice(self.KINDS))
        self.module = fz.Sequential(*[op for _, op, _ in self.steps])

    KINDS = ("linear", "linear", "grouped", "gelu", "scale", "identity", "reshape", "square",
             "fork", "fork", "add", "add", "swap")  # fmt: skip

    def add(self, kind):
        """Append an op; what it reads beside its input is a channel's or the caller's."""
        flag = self.draw.random() < 0.7
        make = {
            "linear": lambda: fz.BasicLinear(WIDTH, WIDTH, dtype=FP64),
            "grouped": lambda: fz.GroupedLinear(
                len(SIZES), WIDTH, WIDTH, bias=False, dtype=FP64,
                delay_wgrad_compute=self.delay and self.draw.random() < 0.7,
            ),
            "gelu": fz.SiLU,
            "scale": lambda: fz.ConstantScale(0.5),
            "identity": fz.Identity,
            "reshape": lambda: fz.Reshape((-1, WIDTH)),
            "square": Square if self.keeps else fz.Identity,
            "fork": lambda: fz.MakeExtraOutput(in_place=flag),
            "add": lambda: fz.AddExtraInput(in_place=flag),
            "swap": fz.Swap,
        }  # fmt: skip
        op, source = make[kind](), None
        if kind in ("add", "swap"):
            source = self.draw.choice([*self.channels, None])
            if source is not None:
                op.set_extra_input_channel(0, source)
            elif kind == "add" and flag:
                self.extra.append("written")
            else:
                self.extra.append(self.draw.choice(["new", "x"]))
        if kind == "grouped":
            self.extra.append("splits")
        if kind in ("fork", "swap"):
            name = f"c{len(self.steps)}"
            public = self.draw.random() < 0.3
            op.set_extra_output_channel(0, name, output_to_caller=public)
            self.channels.append(name)
        self.steps.append((kind, op, source))

    def inputs(self):
        """Leaves that need gradients, and what the pipeline is given: some of them twice."""
        leaves = [torch.randn(ROWS, WIDTH, dtype=FP64, requires_grad=True)]
        given = [leaves[0] * 1 if self.draw.random() < 0.5 else leaves[0]]
        for kind in self.extra:
            if kind == "x":
                given.append(given[0])
            elif kind == "splits":
                given.append(torch.tensor(SIZES))
            else:
                leaves.append(torch.randn(ROWS, WIDTH, dtype=FP64, requires_grad=True))
                given.append(leaves[-1] * 1 if kind == "written" else leaves[-1])
        return leaves, given

    def plain(self, x, *extra):
        """The pipeline by PyTorch's ops."""
        channels, public, extra = {}, [], iter(extra)
        for kind, op, source in self.steps:
            other = None
            if kind in ("add", "swap"):
                other = next(extra) if source is None else channels[source]
            out = x
            if kind == "linear":
                x = x @ op.weight.t()
            elif kind == "grouped":
                next(extra)
                parts = x[: sum(SIZES)].split(SIZES)
                weights = op.weights()
                done = [part @ w.t() for part, w in zip(parts, weights, strict=True)]
                x = torch.cat([*done, x.new_zeros(len(x) - sum(SIZES), WIDTH)])
            elif kind == "gelu":
                x = nn.functional.silu(x)
            elif kind == "scale":
                x = x * 0.5
            elif isinstance(op, Square):
                x = x * x
            elif kind == "add":
                x = x + other
            elif kind == "swap":
                x = other
            if op.num_extra_outputs:
                name, to_caller = op.extra_output_channels[0]
                channels[name] = out
                public.extend([out] if to_caller else [])
        return [x, *public]

    def grads_of(self, outputs):
        """Gradients as others give them: new, expanded, or one tensor for several outputs."""
        one = torch.randn(ROWS, WIDTH, dtype=FP64)
        row = torch.randn(WIDTH, dtype=FP64)
        make = [
            lambda: torch.randn(ROWS, WIDTH, dtype=FP64),
            lambda: one,
            lambda: row.expand_as(one),
        ]
        return [self.draw.choice(make)() for _ in outputs]

    def backward(self, outputs, leaves, grads, **options):
        """Gradients of the leaves and of all weights, the delayed ones included."""
        params = list(self.module.parameters())
        for t in (*leaves, *params):
            t.grad = None
        before = [g.clone() for g in grads]
        with_graph = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
        torch.autograd.backward(*zip(*with_graph, strict=True), **options)
        for op in self.module:
            if isinstance(op, fz.GroupedLinear):
                op.backward_dw()
            if hasattr(op, "kept"):
                assert all(map(torch.equal, (op.kept, op.given), op.values))
        ref.assert_equal(grads, before)  # nobody writes to the caller's
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in (*leaves, *params)]


def outputs_of(module, given):
    outputs = module(*given)
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def check(seed, call=None, **options):
    pipeline = Pipeline(seed, **options)
    state = pipeline.draw.getstate()
    leaves, given = pipeline.inputs()
    want = pipeline.plain(*given)
    grads = pipeline.grads_of(want)
    exact = pipeline.backward(want, leaves, grads)
    # The same values once more, since some are written to.
    pipeline.draw.setstate(state)
    given = [t if t.is_leaf else next(s * 1 for s in leaves if torch.equal(s, t)) for t in given]
    if "x" in pipeline.extra:
        given = [given[0] if torch.equal(t, given[0]) else t for t in given]
    outputs = outputs_of(call(pipeline.module) if call else pipeline.module, given)
    assert_same(outputs, want)
    for keep in (True, False):
        assert_same(pipeline.backward(outputs, leaves, grads, retain_graph=keep), exact)


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_pipelines_equal_pytorch(first):
    for seed in range(first, first + 50):
        check(seed)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("seed", [5, 7, 9, 10])
def test_compiled_pipelines_equal_pytorch(seed):
    def compiled(module):
        return torch.compile(module, fullgraph=True, backend="aot_eager")

    check(seed, compiled, delay=False, keeps=False)


# --- sums of gradients in place ------------------------------------------------------------------


def hidden(op, name="r"):
    return op.set_extra_output_channel(0, name, output_to_caller=False)


def reading(op, name="r"):
    return op.set_extra_input_channel(0, name)


def linear():
    return fz.BasicLinear(WIDTH, WIDTH, dtype=FP64)


def new(*shape):
    return torch.randn(*shape or (ROWS, WIDTH), dtype=FP64)


def spy(monkeypatch, kind, method, note):
    """Tell ``note`` of every call of a method: its tensors and what it returned."""
    real = getattr(kind, method)

    def call(self, ctxs, x, extra):
        returned = real(self, ctxs, x, extra)
        note(x, extra, returned)
        return returned

    monkeypatch.setattr(kind, method, call)


@pytest.mark.parametrize("after", [[linear], []], ids=["own", "handed over"])
@pytest.mark.parametrize("inside", [fz.SiLU, linear], ids=["basic", "fused"])
def test_a_sum_is_written_where_the_run_owns_a_gradient(monkeypatch, inside, after):
    """Into the branch's gradient; where that is autograd's, into what came through the op."""
    fork = hidden(fz.MakeExtraOutput(in_place=True))
    body = [fork, fz.ConstantScale(2.0), inside(), fz.SiLU(), reading(fz.AddExtraInput())]
    if inside is linear:
        del body[1]
    seq = fz.Sequential(linear(), *body, *[make() for make in after])
    x = new().requires_grad_()
    seq(x).sum().backward()
    op = next(op for op in seq.plan.backward_ops if fork in op.basic_ops)
    wrote = []
    spy(
        monkeypatch, type(op), "backward_impl" if op.is_fused_op else "run_backward",
        lambda dy, extra, got: wrote.append([
            got[0].data_ptr() == t.data_ptr()
            for t in (extra[0][0], dy)
        ]),
    )  # fmt: skip
    copy.deepcopy(seq)(x).backward(new())
    assert wrote == [[bool(after), not after and inside is not linear]]


@pytest.mark.parametrize("in_place", [False, True])
def test_nested_residuals(in_place):
    """Both branches carry one gradient, which the run still reads when the inner sum is made."""
    seq = fz.Sequential(
        hidden(fz.MakeExtraOutput(in_place=in_place), "outer"),
        hidden(fz.MakeExtraOutput(in_place=in_place), "inner"),
        fz.ConstantScale(4.0),
        reading(fz.AddExtraInput(), "inner"),
        reading(fz.AddExtraInput(), "outer"),
        fz.ConstantScale(2.0),
    )
    x = new().requires_grad_()
    seq(x).backward(torch.ones(ROWS, WIDTH, dtype=FP64))
    assert torch.equal(x.grad, torch.full_like(x, 12.0))


def test_what_is_returned_to_the_caller_is_not_written_to():
    seq = fz.Sequential(
        fz.ConstantScale(1.0),
        hidden(fz.MakeExtraOutput(in_place=True)),
        fz.ConstantScale(3.0),
        reading(fz.AddExtraInput()),
        fz.AddExtraInput(),
        fz.ConstantScale(1.0),
    )
    x, extra = new().requires_grad_(), new().requires_grad_()
    seq(x, extra).backward(torch.ones(ROWS, WIDTH, dtype=FP64))
    assert torch.equal(extra.grad, torch.ones_like(extra))
    assert torch.equal(x.grad, torch.full_like(x, 4.0))


def test_a_sum_keeps_the_wider_dtype():
    """Under autocast: the gradient of a branch in BF16 does not take one in FP32."""
    results = []
    for in_place in (False, True):
        torch.manual_seed(0)
        seq = fz.Sequential(
            fz.BasicLinear(WIDTH, WIDTH),
            hidden(fz.MakeExtraOutput(in_place=in_place)),
            fz.BasicLinear(WIDTH, WIDTH),
            fz.RMSNorm(WIDTH),
            reading(fz.AddExtraInput()),
            fz.BasicLinear(WIDTH, WIDTH),
        )
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = seq(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, *[p.grad for p in seq.parameters()]))
    for plain, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("owner", ["run", "autograd", "caller"])
def test_a_router_adds_to_a_gradient_that_the_run_owns(monkeypatch, owner):
    """And to no other: the caller may read the gradient that it gives."""
    seq = fz.Sequential(fz.TopKRouter(WIDTH, 4, 2, dtype=FP64), fz.SiLU())
    ops = {"run": seq, "autograd": fz.Sequential(seq[0]), "caller": fz.Sequential(seq[0])}[owner]
    x, dy, dprobs = new().requires_grad_(), new(), torch.randn(ROWS, 2, dtype=FP64)
    y, probs, _ = ops(x)
    given = dy.clone()
    wrote = []
    real = fz.TopKRouter.backward_impl

    def call(self, ctx, grad_output, *extra):
        got = real(self, ctx, grad_output, *extra)
        wrote.append(got[0].data_ptr() == grad_output.data_ptr())
        return got

    monkeypatch.setattr(fz.TopKRouter, "backward_impl", call)
    if owner == "autograd":
        y = y.sin()
    torch.autograd.backward([y, probs], [dy, dprobs])
    assert wrote == [owner == "run"]
    assert torch.equal(dy, given)
    leaf = x.detach().clone().requires_grad_()
    logits = leaf @ seq[0].weight.t()
    top = logits.softmax(-1).topk(2).values
    out = {"run": nn.functional.silu, "autograd": torch.sin, "caller": torch.clone}[owner](leaf)
    torch.autograd.backward([out, top / top.sum(-1, keepdim=True)], [dy, dprobs])
    torch.testing.assert_close(x.grad, leaf.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch's tracing
@pytest.mark.parametrize("kind", ["router", "fork"])
def test_compiled_autograd_writes_to_no_gradient(kind):
    """It traces the backward in one graph, in which no address tells what shares memory."""
    torch.manual_seed(0)
    if kind == "router":
        ops = [fz.TopKRouter(WIDTH, 4, 2, dtype=FP64), Square()]
    else:
        fork, add = hidden(fz.MakeExtraOutput(in_place=True)), reading(fz.AddExtraInput())
        ops = [linear(), fork, fz.SiLU(), add, fz.SiLU()]
    seq, x = fz.Sequential(*ops), new().requires_grad_()

    def grads(context):
        results = seq(x)
        parts = [results] if kind == "fork" else results[:2]
        loss = sum([t.sin().sum() for t in parts])
        with context:
            loss.backward()
        found = [t.grad for t in (x, *seq.parameters())]
        x.grad = None
        seq.zero_grad()
        return found

    compiler = torch.compile(backend="eager", fullgraph=True)
    compiled = grads(torch._dynamo.compiled_autograd._enable(compiler))
    for got, want in zip(compiled, grads(nullcontext()), strict=True):
        torch.testing.assert_close(got, want)


# --- extra inputs in place -----------------------------------------------------------------------


def test_a_sum_into_a_channel_nobody_reads(monkeypatch):
    """In the place of what the run made; never of what the caller gave, nor of what it saved."""
    wrote = []
    spy(
        monkeypatch, fz.AddExtraInput, "run_forward",
        lambda x, extra, got: wrote.append(got[0].data_ptr() == extra[0][0].data_ptr()),
    )  # fmt: skip
    fork, add = hidden(fz.MakeExtraOutput()), reading(fz.AddExtraInput(in_place=True))
    inner, outer = (
        fz.Sequential(linear(), fork, fz.SiLU(), add),
        fz.Sequential(fork, fz.SiLU(), add),
    )
    x = new()
    before = x.clone()
    h = inner[0](x).detach()
    with torch.no_grad():
        torch.testing.assert_close(inner(x), h + nn.functional.silu(h))
        torch.testing.assert_close(outer(x), x + nn.functional.silu(x))
    torch.testing.assert_close(inner(x).detach(), h + nn.functional.silu(h))  # SiLU saved it
    assert wrote == [True, False, False]
    assert torch.equal(x, before)


def test_a_channel_that_another_op_reads_later():
    """Two sums of one branch."""
    seq = fz.Sequential(
        linear(),
        hidden(fz.MakeExtraOutput()),
        fz.ConstantScale(3.0),
        reading(fz.AddExtraInput(in_place=True)),
        reading(fz.AddExtraInput(in_place=True)),
    )
    with torch.no_grad():
        x = new()
        torch.testing.assert_close(seq(x), 5 * seq[0](x))


def test_a_branch_that_the_caller_gets():
    seq = fz.Sequential(
        linear(),
        fz.MakeExtraOutput().set_extra_output_channel(0, "r"),
        fz.ConstantScale(3.0),
        reading(fz.AddExtraInput(in_place=True)),
    )
    with torch.no_grad():
        x = new()
        y, branch = seq(x)
        h = seq[0](x)
    torch.testing.assert_close(branch, h)
    torch.testing.assert_close(y, 4 * h)


READ_ELSEWHERE = {
    "a later op": (
        lambda: fz.Sequential(fz.AddExtraInput(in_place=True), fz.AddExtraInput()),
        lambda x, t, seq: (x, t, t),
    ),
    "an extra output": (
        lambda: fz.Sequential(fz.MakeExtraOutput(), linear(), fz.AddExtraInput(in_place=True)),
        lambda x, t, seq: (x, x),
    ),
    "a weight": (
        lambda: fz.Sequential(linear(), fz.AddExtraInput(in_place=True)),
        lambda x, t, seq: (x[:1].expand(WIDTH, -1), seq[0].weight),
    ),
    "a part of a weight": (
        lambda: fz.Sequential(linear(), fz.AddExtraInput(in_place=True)),
        lambda x, t, seq: (x, seq[0].weight.detach()[:ROWS]),
    ),
    "its other elements": (
        lambda: fz.Sequential(linear(), fz.AddExtraInput(in_place=True)),
        lambda x, t, seq: (x, t[:1].expand(ROWS, -1)),
    ),
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_a_tensor_of_the_caller_that_is_read_later(name):
    """The sum is a new tensor, with the values of a sum that is not in place."""
    make, inputs = READ_ELSEWHERE[name]
    seq = make()
    given = inputs(new(), new(), seq)
    before = [t.clone() for t in given]
    apart = copy.deepcopy(seq)
    for op in apart:
        if isinstance(op, fz.AddExtraInput):
            op.in_place = False
    with torch.no_grad():
        got, want = ([*y] if isinstance(y, tuple) else [y] for y in (seq(*given), apart(*given)))
    ref.assert_equal(given, before)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[:], lambda t: t.view(-1).view_as(t)])
@pytest.mark.parametrize("inside", [fz.SiLU, linear], ids=["basic", "fused"])
def test_a_leaf_that_requires_a_gradient_is_not_written_to(inside, view):
    """Nor a view of one, as with PyTorch's operations in place; where gradients are off, it is."""
    seq = fz.Sequential(inside(), fz.AddExtraInput(in_place=True))
    x, leaf = new(), new().requires_grad_()
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        view(leaf).add_(x)
    torch.testing.assert_close(seq(x, view(leaf)), before + seq[0](x))
    assert torch.equal(leaf, before)
    seq(x, leaf * 1).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
    with torch.no_grad():
        seq(x, view(leaf))
        torch.testing.assert_close(leaf, before + seq[0](x))


def test_a_tensor_that_another_run_reads_later():
    """As within one run, where a hook makes two of it."""
    seq = fz.Sequential(fz.AddExtraInput(in_place=True), fz.SiLU(), fz.AddExtraInput())
    x, t = new(), new()
    before = t.clone()
    for _ in range(2):
        for extra in ((t, t), (t, t[:])):
            want = torch.nn.functional.silu(x + t) + t
            torch.testing.assert_close(seq(x, *extra), want)
        seq[1].register_forward_hook(lambda *_: None)
    assert torch.equal(t, before)


@pytest.mark.parametrize("inside", [fz.SiLU, linear], ids=["basic", "fused"])
def test_a_residual_in_the_inputs_place(inside):
    """Without gradients nothing reads the input any more when the sum is written."""
    seq = fz.Sequential(inside(), fz.AddExtraInput(in_place=True))
    x = new()
    want = x + inside()(x) if inside is fz.SiLU else x + x @ seq[0].weight.t()
    with torch.no_grad():
        y = seq(x, x)
    assert y.data_ptr() == x.data_ptr()
    torch.testing.assert_close(y, want)


def test_columns_of_one_matrix():
    seq = fz.Sequential(fz.SiLU(), fz.AddExtraInput(in_place=True))
    both = new(ROWS, 2 * WIDTH)
    x, addend = both.split(WIDTH, 1)
    want = nn.functional.silu(x) + addend
    x.requires_grad_()
    y = seq(x, addend)
    assert y.data_ptr() == addend.data_ptr()
    torch.testing.assert_close(y, want)
    addend = both[:, WIDTH // 2 : WIDTH // 2 + WIDTH]
    before = both.clone()
    torch.testing.assert_close(seq(x, addend), nn.functional.silu(x) + addend)
    assert torch.equal(both, before)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("inside", [fz.SiLU, lambda: fz.BasicLinear(WIDTH, WIDTH)])
def test_a_sum_in_place_has_the_extra_inputs_dtype(inside):
    seq = fz.Sequential(inside(), fz.AddExtraInput(in_place=True))
    compiled = torch.compile(seq, fullgraph=True, backend="aot_eager")
    x, addend = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH).bfloat16()
    with torch.no_grad():
        mine, traced = (call(x, addend.clone()) for call in (seq, compiled))
    assert mine.dtype == traced.dtype == torch.bfloat16
    assert torch.equal(mine, traced)


# --- which bytes ---------------------------------------------------------------------------------


def test_overlap_is_that_of_the_elements():
    """Against the sets of the elements' places, for views of one small tensor."""
    draw = random.Random(0)
    base = torch.arange(64)
    missed = 0
    for _ in range(3000):
        views = []
        for _ in range(2):
            dims = draw.randint(0, 3)
            shape = [draw.randint(0, 4) for _ in range(dims)]
            strides = [draw.choice([0, 1, 2, 3, 4, 8, 16]) for _ in range(dims)]
            span = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
            if span >= 64:
                break
            views.append(base.as_strided(shape, strides, draw.randint(0, 63 - span)))
        if len(views) < 2:
            continue
        a, b = ({*view.reshape(-1).tolist()} for view in views)
        assert memory.overlap(*views) >= bool(a & b)
        missed += memory.overlap(*views) > bool(a & b)
        for view, places in zip(views, (a, b), strict=True):
            assert memory.repeats_elements(view) >= (len(places) < view.numel())
    assert missed < 300
    for columns in (3, 4):
        left, right = torch.zeros(2, 4, 8)[..., :columns], torch.zeros(2, 4, 8)[..., 4:]
        assert not memory.overlap(left, right)
    rows = torch.zeros(4, 8)
    assert not memory.overlap(rows[:2], rows[2:])
    assert not memory.overlap(rows[:, ::2], rows[:, 1::2])
    assert memory.overlap(rows[:, :4], rows[:, 3:])
    assert not memory.overlap(rows[:0], rows)


# --- what is read after a backward ---------------------------------------------------------------


def delayed(**options):
    options = {"bias": False, "dtype": FP64, **options}
    return fz.GroupedLinear(len(SIZES), WIDTH, WIDTH, delay_wgrad_compute=True, **options)


def weight_grads_of(op, x, dy):
    """By PyTorch."""
    parts = [(t[: sum(SIZES)].split(SIZES)) for t in (dy, x)]
    return [a.t() @ b for a, b in zip(*parts, strict=True)]


def assert_weight_grads(op, want):
    for w, grad in zip(op.weights(), want, strict=True):
        torch.testing.assert_close(w.grad, grad)


def test_a_delayed_gradient_is_added_to_a_flat_buffer():
    """``.grad`` stays the view that it was, as autograd leaves it; also where gradients are off."""
    op, x = delayed(), new()
    flat = new(len(SIZES) * WIDTH * WIDTH)
    before = flat.clone().view(-1, WIDTH, WIDTH)
    for w, view in zip(op.weights(), flat.view(-1, WIDTH, WIDTH), strict=True):
        w.grad = view
    addresses = [w.grad.data_ptr() for w in op.weights()]
    dy = new()
    want = weight_grads_of(op, x, dy)
    op(x, SIZES).backward(dy)
    with torch.no_grad():
        op.backward_dw()
    assert [w.grad.data_ptr() for w in op.weights()] == addresses
    assert_weight_grads(op, [old + grad for old, grad in zip(before, want, strict=True)])
    torch.testing.assert_close(flat.view_as(before), before + torch.stack(want))


def test_a_delayed_gradient_goes_through_the_weights_hooks():
    op, x, dy = delayed(single_grouped_weight=True), new(), new()
    (w,) = op.weights()
    accumulated = []
    op(x, SIZES).backward(dy)
    w.register_hook(lambda grad: 2 * grad)
    w.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    op.backward_dw()
    torch.testing.assert_close(w.grad, 2 * torch.stack(weight_grads_of(op, x, dy)))
    assert len(accumulated) == 1
    assert torch.equal(accumulated[0], w.grad)


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_what_a_delayed_gradient_reads_must_not_change(which, main):
    op = delayed(accumulate_into_main_grad=main)
    for w in op.weights():
        w.main_grad = torch.zeros_like(w)
    given = {"x": new(), "dy": new()}
    op(given["x"], SIZES).backward(given["dy"])
    given[which].add_(1)
    with pytest.raises(
        RuntimeError, match=r"backward_dw\(\) of GroupedLinear\(num_groups=3.*inplac"
    ):
        op.backward_dw()
    assert all(w.grad is None and not w.main_grad.any() for w in op.weights())


@pytest.mark.parametrize("recipe", [None, fz.recipes.MXFP8BlockScaling()])
def test_what_a_recipe_has_quantized_may_change(recipe):
    """What is read then is a copy, of x and of dy."""
    results = []
    for change in (False, True):
        torch.manual_seed(0)
        op = fz.GroupedLinear(2, 32, 32, bias=False, delay_wgrad_compute=True)
        x, dy = torch.randn(64, 32), torch.randn(64, 32)
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            op(x, [32, 32]).backward(dy)
        if change and recipe is None:
            x.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                op.backward_dw()
            return
        if change:
            x.zero_()
            dy.zero_()
        op.backward_dw()
        results.append([w.grad for w in op.weights()])
    ref.assert_equal(*results)


def test_a_delayed_gradient_of_a_parametrized_weight_is_refused():
    op = delayed(single_grouped_weight=True)
    nn.utils.parametrize.register_parametrization(op, "weight", nn.Tanh())
    with pytest.raises(ValueError, match=r"weights of .*GroupedLinear must be leaf tensors"):
        op(new(), SIZES).sum().backward()


def test_what_an_op_hands_across_modules_is_not_written_to():
    """The fork's output is the caller's tensor, which a later run adds to and a last one reads."""
    seq = fz.Sequential(
        hidden(fz.MakeExtraOutput()),
        nn.Tanh(),
        fz.AddExtraInput(in_place=True),
        nn.Tanh(),
        reading(fz.AddExtraInput()),
    )
    x = torch.randn(4, 8)
    assert torch.equal(seq(x, x.clone()), (x.tanh() + x).tanh() + x)
    before = x.clone()
    torch.testing.assert_close(seq(x, x), (x.tanh() + x).tanh() + x)
    assert torch.equal(x, before)


# --- what was saved ------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(ROWS,), (2, ROWS // 2)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_saved_pre_activation_is_written_to_unless_hooks_hold_it(hooked, leading, monkeypatch):
    """The gradient takes its place where autograd frees it after the backward."""
    mlp = ref.grouped_mlp(4, 32, 64, dtype=torch.bfloat16)
    x, splits, scales = ref.grouped_mlp_inputs((3, 0, 2, 1), ROWS, 32, torch.bfloat16)
    x, scales = (t.detach().reshape(*leading, *t.shape[1:]).requires_grad_() for t in (x, scales))
    held, overwritten = [], []

    own = grouped.grouped_dglu

    def dglu(*args, overwrite, zero_tail):
        overwritten.append(overwrite)
        return own(*args)

    monkeypatch.setattr(grouped, "grouped_dglu", dglu)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t)
    with assume_target("sm90"):
        with hooks if hooked else nullcontext():
            y = mlp(x, splits, scales, splits)
        assert mlp.plan.fired == ("grouped_mlp_sm90",)
        y.sum().backward()
    assert overwritten == [not hooked]
    assert bool(held) == hooked
