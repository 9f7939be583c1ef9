"""The whole mixture-of-experts block on one GPU, against what people run today.

    python benchmarks/moe_block.py [--config NAME ...] [--out FILE.json]

Contestants: fusible's Sequential of router, dispatch, experts and combine; these four run apart, so
that no rule covers them together; plain PyTorch (linear, softmax and topk; stable argsort and
index_select; grouped_mm with a compiled activation; inverse index_select and an FP32 sum);
transformers' Qwen3MoeSparseMoeBlock (grouped_mm and eager), where transformers can be imported. All
run interleaved in one process on the same tokens and weights, in BF16, L2 flushed, CUDA events,
median. Beside the block's time: where it goes, the bandwidth of the kernels that move rows relative
to a copy, and the peak memory of forward + backward. FC1 is timed with the activation; in our
backward the activation's belongs to FC2, whose data gradient makes it. Writes the JSON and a
picture beside it.

    python benchmarks/moe_block.py --recipe fp8_block [NAME ...] [--out FILE.json]

instead measures ours in BF16 and under these recipes, with the weights quantized in every forward,
once (``reuse_quantized_weights``), and stored, and the launches that quantize rows: after they were
copied, and while they are gathered. Only this takes Llama-4's block (``llama4-scout``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import measuring
import torch
import torch.nn.functional as F
from grouped_mlp import activation, recipe_ways
from torch import Tensor

import fusible as fz
from fusible.kernels import grouped, moe
from fusible.kernels.glu import Glu
from fusible.kernels.quantize import k_major


class Shape(NamedTuple):
    """A block's sizes."""

    tokens: int
    top_k: int
    hidden: int
    inner: int
    experts: int
    scale_input: bool = False
    """As Llama-4: sigmoid scores multiply the experts' inputs."""


SHAPES = {
    "qwen3-30b": Shape(16384, 8, 2048, 768, 128),
    "mixtral-8x7b": Shape(8192, 2, 4096, 14336, 8),
    "dsv3-ep32": Shape(4096, 8, 7168, 2048, 32),
    "small": Shape(1024, 8, 1024, 512, 64),
    "llama4-scout": Shape(8192, 1, 5120, 8192, 16, scale_input=True),
}
WEIGHTED = [name for name, shape in SHAPES.items() if not shape.scale_input]
Way = Callable[[Tensor], Tensor]


def fusible_block(
    shape: Shape,
    device: torch.device | str = "cuda",
    *,
    mesh: Any = None,
    expert_bias: bool = False,
    **options: Any,
) -> fz.Sequential:
    """Ours with random weights and ``options`` of the dispatch.

    Over a mesh each process holds its experts.
    """
    _, top_k, hidden, inner, experts, scale_input = shape
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    linear = {**made, "bias": False, "single_grouped_weight": True}
    scores = {"score_function": "sigmoid", "normalize": False} if scale_input else {}
    block = fz.Sequential(
        fz.TopKRouter(hidden, experts, top_k, expert_bias=expert_bias, **scores, **made),
        fz.Dispatch(experts, process_group=mesh, scale_input=scale_input, **options),
        fz.GroupedLinear(experts, hidden, 2 * inner, **linear),
        fz.SwiGLU() if scale_input else fz.ScaledSwiGLU(),
        fz.GroupedLinear(experts, inner, hidden, **linear),
        fz.Combine(process_group=mesh, symmetric_memory=options.get("symmetric_memory", True)),
    )
    with torch.no_grad():
        for w in block.parameters():
            w.normal_(std=w.shape[-1] ** -0.5)
    return block if mesh is None else fz.expert_parallel(block, mesh)


def apart(block: fz.Sequential) -> Way:
    """The same ops as four runs."""
    router, dispatch, combine, mlp = block[0], block[1], block[5], fz.Sequential(*block[2:5])

    def call(x: Tensor) -> Tensor:
        _, probs, ids = router(x)
        rows, splits, *scales, row_map = dispatch(x, probs, ids)
        return combine(mlp(rows, splits, *scales, splits), row_map)

    return call


class Plain:
    """The block as PyTorch's users write it, in parts."""

    def __init__(self, shape: Shape, router: Tensor, w1: Tensor, w2: Tensor) -> None:
        self.shape, self.router, self.w1, self.w2 = shape, router, w1, w2

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts chosen."""
        probs = F.softmax(F.linear(x, self.router).float(), -1)
        probs, ids = probs.topk(self.shape.top_k, -1)
        return probs / probs.sum(-1, keepdim=True), ids

    def dispatch(self, x: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Rows by expert, their weights, their ends, and the order."""
        order = ids.flatten().argsort(stable=True)
        rows = x.index_select(0, order // self.shape.top_k)
        counts = torch.bincount(ids.flatten(), minlength=self.shape.experts)
        return rows, probs.flatten()[order], counts.cumsum(0).int(), order

    def fc1(self, rows: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
        """The first linear and the activation."""
        return activation(F.grouped_mm(rows, self.w1.mT, offs=ends), scales)

    def fc2(self, hidden: Tensor, ends: Tensor) -> Tensor:
        """The second linear."""
        return F.grouped_mm(hidden, self.w2.mT, offs=ends)

    def combine(self, y: Tensor, order: Tensor) -> Tensor:
        """Each token's sum."""
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        y = y.index_select(0, inverse).view(-1, self.shape.top_k, y.shape[1])
        return y.float().sum(1).to(y.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The block."""
        rows, scales, ends, order = self.dispatch(x, *self.route(x))
        return self.combine(self.fc2(self.fc1(rows, scales, ends), ends), order)


def transformers_block(shape: Shape, way: str, *weights: Tensor) -> Way:
    """``Qwen3MoeSparseMoeBlock`` on the same weights; ImportError where there is none."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = way
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = weights

    def call(x: Tensor) -> Tensor:
        y = block(x[None])
        return (y[0] if isinstance(y, tuple) else y)[0]

    return call


class Problem:
    """One block with its tokens, and the ways to run it."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape, self.block = shape, fusible_block(shape)
        self.router, self.w1, self.w2 = (self.block[i].weight for i in (0, 2, 4))
        self.x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.ways: dict[str, Callable[[], Tensor]] = {}
        self.leaves: dict[str, list[Tensor]] = {}

    def add(self, who: str, way: Way, weights: Iterable[Tensor], recipe: Any = None) -> None:
        """Add a way to run the block, with these weights and under a recipe."""

        def forward() -> Tensor:
            with measuring.under(recipe):
                return way(self.x)

        self.ways[who], self.leaves[who] = forward, [self.x, *weights]

    def add_peers(self, peers: Sequence[str]) -> None:
        """Add ours, whole and apart, plain PyTorch and implementations of transformers."""
        weights = self.router, self.w1, self.w2
        lean = fusible_block(self.shape, recompute_rows=True)
        for i, w in zip((0, 2, 4), weights, strict=True):
            lean[i].weight = w
        self.plain = Plain(self.shape, *weights)
        ways = {
            "fusible": self.block,
            "fusible, recompute": lean,
            "fusible, apart": apart(self.block),
            "torch": self.plain,
        }
        for way in peers:
            try:
                ways[f"transformers {way}"] = transformers_block(self.shape, way, *weights)
            except (ImportError, AttributeError) as error:
                print(f"transformers {way} left out: {error}")
        for who, call in ways.items():
            self.add(who, call, weights)

    def add_recipes(self, names: Sequence[str]) -> None:
        """Add ours in BF16 and under recipes."""
        for who, (module, recipe) in recipe_ways(self.block, names).items():
            ways: dict[str, Way] = {who: module}
            if recipe is not None and who.endswith("stored"):
                ways[f"{who}, apart"] = apart(module)
                lean = fz.Dispatch(
                    self.shape.experts, scale_input=self.shape.scale_input, recompute_rows=True
                )
                ways[f"{who}, recompute"] = fz.Sequential(module[0], lean, *module[2:])
                act = type(module[3])(cache_quantized_input=True)
                ways[f"{who}, FP8 pre-activation"] = fz.Sequential(*module[:3], act, *module[4:])
                least = module[0], lean, module[2], act, *module[4:]
                ways[f"{who}, FP8 pre-activation, recompute"] = fz.Sequential(*least)
            for name, way in ways.items():
                self.add(name, way, module.parameters(), recipe)
            module(self.x)
            with measuring.under(recipe):
                plan = fz.explain(module, self.x)
            print(f"{who}: {', '.join(plan.fired + plan.kernels)}", flush=True)

    def step(self, who: str) -> tuple[Tensor, ...]:
        """Output and every gradient."""
        y = self.ways[who]()
        return (y, *torch.autograd.grad(y, self.leaves[who], self.dy))

    def passes(self) -> dict[str, measuring.Calls]:
        """Inference, forward, forward + backward of every contestant."""
        return {
            "inference": {who: torch.no_grad()(way) for who, way in self.ways.items()},
            "forward": dict(self.ways),
            "forward + backward": {who: partial(self.step, who) for who in self.ways},
        }

    def peaks(self) -> dict[str, float]:
        """Peak MB of forward + backward, beyond tokens and weights."""
        return {who: measuring.peak_mb(partial(self.step, who)) for who in self.ways}

    def errors(self, want: Sequence[Tensor]) -> dict[str, list[float]]:
        """Relative errors of the output and of the gradients of tokens and weights."""
        return {who: measuring.relative_errors(self.step(who), want) for who in self.ways}


def exact_step(problem: Problem) -> list[Tensor]:
    """Output and gradients of plain PyTorch in FP32."""
    exact = [t.detach().float().requires_grad_() for t in problem.leaves["fusible"]]
    y = exact_block(problem.shape.top_k, *exact)
    return [y.detach(), *torch.autograd.grad(y, exact, problem.dy.float())]


def exact_block(top_k: int, x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The block in FP32, expert by expert."""
    probs, ids = (x @ router.T).softmax(-1).topk(top_k, -1)
    probs = probs / probs.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, j = (ids == e).nonzero(as_tuple=True)
        gate, linear = (x[token] @ w1[e].T).chunk(2, -1)
        y = (F.silu(gate) * linear * probs[token, j, None]) @ w2[e].T
        out = out.index_add(0, token, y)
    return out


# --- under recipes --------------------------------------------------------------------------------


_MAX_ERROR = 0.5  # of any recipe, NVFP4 included


def check_errors(errors: dict[str, list[float]]) -> None:
    """Raise AssertionError for results that are not near BF16's."""
    for who, found in errors.items():
        if not all(error < _MAX_ERROR for error in found):  # NaN is not
            raise AssertionError(f"{who} must be within {_MAX_ERROR} of BF16, got {found}")


def quantizing_calls(shape: Shape) -> measuring.Calls:
    """Rows copied, quantized for both uses, and both in one launch.

    That is measured for each number of 128 columns that are gathered before the next ones.
    """
    x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
    ids = torch.rand(shape.tokens, shape.experts, device="cuda").topk(shape.top_k).indices
    row_map, _, ends = moe.permutation(ids, shape.experts, None)
    probs, count = torch.rand(ids.shape, device="cuda"), ids.numel()
    index, _ = moe.row_sources(row_map, probs, count)
    rows, _ = moe.scatter_rows(x, row_map, None, count, False)
    chunks, fmt = -(-shape.hidden // 128), measuring.RECIPES["fp8_block"].format("input")
    chosen = k_major.chunks_per_pass(*x.shape, x.itemsize)

    def quantize(
        source: Tensor, index: Tensor | None, columnwise: bool = True, together: int = chosen
    ) -> None:
        uses = {"rowwise": True, "columnwise": columnwise}
        with patch.object(k_major, "chunks_per_pass", lambda *_: together):
            k_major.quantize_k_major(source, fmt, **uses, ends=ends, index=index)

    return {
        "row sources": lambda: moe.row_sources(row_map, probs, count),
        "copy": lambda: moe.scatter_rows(x, row_map, probs, count, False),
        "quantize": partial(quantize, rows, None),
        "quantize, row-wise": partial(quantize, rows, None, False),
        "gather": partial(quantize, x, index),
        "gather, row-wise": partial(quantize, x, index, False),
        **{
            f"gather, {n} of {chunks} together": partial(quantize, x, index, True, n)
            for n in range(1, chunks + 1)
            if chunks % n == 0
        },
    }


def run_recipes(names: Sequence[str], recipes: Sequence[str]) -> dict[str, Any]:
    """Measure every shape under recipes, with the times relative to BF16."""
    report: dict[str, Any] = {"environment": measuring.environment(), "shapes": {}}
    for name in names:
        problem = Problem(SHAPES[name])
        problem.add_recipes(recipes)
        cell: dict[str, Any] = {"sizes": problem.shape._asdict(), "passes": {}}
        errors = problem.errors(problem.step("bf16"))
        check_errors(errors)
        cell["errors"] = {who: found for who, found in errors.items() if who != "bf16"}
        passes = problem.passes()
        del passes["forward"]
        for what, calls in passes.items():
            ms = measuring.measure(calls, runs=12)
            faster = {who: ms["bf16"] / t for who, t in ms.items()}
            cell["passes"][what] = {"ms": ms, "faster": faster}
            for who, t in ms.items():
                print(f"{name:13s} {what:19s} {who:36s} {t:8.4f} ms {faster[who]:.3f}x", flush=True)
        cell["saved_mb"] = {  # beside the tokens and the experts' weights
            who: measuring.saved_mb(way, [problem.x], lambda t: t.dim() < 3)
            for who, way in problem.ways.items()
        }
        cell["peak_mb"] = problem.peaks()
        cell["quantizers_ms"] = measuring.measure(quantizing_calls(problem.shape), runs=12)
        for key in ("saved_mb", "peak_mb", "errors", "quantizers_ms"):
            print(name, key, json.dumps(cell[key], indent=1), flush=True)
        report["shapes"][name] = cell
        del problem, passes, calls
        torch.cuda.empty_cache()
    return report


# --- parts ----------------------------------------------------------------------------------------


def own_parts(problem: Problem) -> dict[str, measuring.Calls]:
    """The parts of our block, on tensors as they occur in it: forward, backward.

    The linears' are the launches that the fused op makes.
    """
    block, x = problem.block, problem.x.detach()
    router, dispatch, combine = block[0], block[1], block[5]
    w1, w2 = [problem.w1.detach()], [problem.w2.detach()]
    with torch.no_grad():
        _, probs, ids = router(x)
        rows, splits, scales, row_map = dispatch(x, probs, ids)
        ends = grouped.group_ends(splits, rows.shape[0])
        preact, hidden = grouped.grouped_glu(rows, w1, ends, scales, Glu())
        y = grouped.grouped_mm(hidden, w2, ends)
        dy, dpreact = torch.randn_like(y), torch.randn_like(preact)
    fc1 = {
        "forward": lambda: grouped.grouped_glu(rows, w1, ends, scales, Glu()),
        "backward": lambda: (
            grouped.grouped_mm(dpreact, w1, ends, transpose_w=True),
            grouped.grouped_wgrad(dpreact, rows, ends),
        ),
    }
    fc2 = {
        "forward": lambda: grouped.grouped_mm(hidden, w2, ends),
        "backward": lambda: (
            grouped.grouped_dglu(dy, w2, ends, preact, scales, Glu()),
            grouped.grouped_wgrad(dy, hidden, ends),
        ),
    }
    return {
        "router": both(lambda x: router(x)[:2], x, params=list(router.parameters())),
        "dispatch": both(lambda x, p: dispatch(x, p, ids)[::2], x, probs),
        "FC1": {what: torch.no_grad()(call) for what, call in fc1.items()},
        "FC2": {what: torch.no_grad()(call) for what, call in fc2.items()},
        "combine": both(lambda y: combine(y, row_map), y),
    }


def plain_parts(problem: Problem) -> dict[str, measuring.Calls]:
    """The same of plain PyTorch."""
    plain, x = problem.plain, problem.x.detach()
    with torch.no_grad():
        probs, ids = plain.route(x)
        rows, scales, ends, order = plain.dispatch(x, probs, ids)
        hidden = plain.fc1(rows, scales, ends)
        y = plain.fc2(hidden, ends)
    return {
        "router": both(lambda x: (x * 1, plain.route(x)[0]), x, params=[plain.router]),
        "dispatch": both(lambda x, p: plain.dispatch(x, p, ids)[:2], x, probs),
        "FC1": both(lambda r, s: plain.fc1(r, s, ends), rows, scales, params=[plain.w1]),
        "FC2": both(lambda h: plain.fc2(h, ends), hidden, params=[plain.w2]),
        "combine": both(lambda y: plain.combine(y, order), y),
    }


def both(
    function: Callable[..., Any], *tensors: Tensor, params: list[Tensor] | None = None
) -> measuring.Calls:
    """Forward, and backward of a forward done once."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    dys = [torch.randn_like(t) for t in outs]
    wanted = [*leaves, *(params or [])]
    return {
        "forward": lambda: function(*leaves),
        "backward": lambda: torch.autograd.grad(outs, wanted, dys, retain_graph=True),
    }


def bandwidth(problem: Problem) -> dict[str, dict[str, float]]:
    """Milliseconds of each launch that moves rows, and its bandwidth relative to a copy's."""
    shape, x, dy = problem.shape, problem.x.detach(), problem.dy
    router = x, problem.router.detach(), None
    logits = moe.definitions.router_logits(*router)
    options = shape.top_k, "softmax", True, 1.0
    probs, ids = moe.route(logits, None, *options, [1, 1, 2])
    row_map, *_ = moe.permutation(ids, shape.experts, None)
    count = ids.numel()
    y, _ = moe.scatter_rows(x, row_map, None, count, False)
    other, scales = torch.empty_like(y), torch.rand(count, device="cuda")
    many = y.nbytes
    moved = x.nbytes + row_map.nbytes + many
    calls = {
        "copy": (lambda: other.copy_(y), 2 * many),
        "row map": (lambda: moe.permutation(ids, shape.experts, None), 0),
        "route": (partial(moe.route, logits, None, *options, [1, 1, 2]), 0),
        "route backward": (
            partial(moe.route_backward, probs, logits, ids, *options[1:]),
            0,
        ),
        "logits": (lambda: moe.definitions.router_logits(*router), 0),
        "dispatch forward": (partial(moe.scatter_rows, x, row_map, probs, count, False), moved),
        "dispatch backward": (partial(moe.gather_sum, y, row_map, None, scales), moved),
        "combine forward": (partial(moe.gather_sum, y, row_map, None, None), moved),
        "combine backward": (partial(moe.scatter_rows, dy, row_map, None, count, False), moved),
        "dot products": (partial(moe.row_dots, y, dy, row_map, True), moved),
    }
    ms = measuring.measure({name: call for name, (call, _) in calls.items()})
    speed = {name: nbytes / ms[name] / 1e9 for name, (_, nbytes) in calls.items()}
    return {
        name: {"ms": ms[name], "TB/s": speed[name], "of a copy": speed[name] / speed["copy"]}
        for name in calls
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """Where the time of a block goes, ours beside plain PyTorch's."""
    plt = measuring.pyplot()
    shapes = report["parts"]
    figure, all_axes = plt.subplots(
        1, len(shapes), figsize=(4.6 * len(shapes), 4.6), layout="constrained", squeeze=False
    )
    for axes, (name, parts) in zip(all_axes[0], shapes.items(), strict=True):
        bars = [(who, what) for what in ("forward", "backward") for who in parts]
        bottom = [0.0] * len(bars)
        for part in ("router", "dispatch", "FC1", "FC2", "combine"):
            heights = [parts[who][part][what] for who, what in bars]
            axes.bar(range(len(bars)), heights, 0.6, bottom=bottom, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(bars)), [f"{who}\n{what}" for who, what in bars], fontsize=8)
        axes.set_title(name)
        axes.set_ylabel("ms")
    all_axes[0][0].legend(fontsize=8)
    figure.suptitle("Where the time of an MoE block goes, BF16, one NVIDIA H200")
    figure.savefig(path, dpi=130)


def run(names: list[str], eager: bool) -> dict[str, Any]:
    """Measure every shape."""
    report: dict[str, Any] = {"environment": measuring.environment(), "shapes": {}, "parts": {}}
    for name in names:
        shape = SHAPES[name]
        problem = Problem(shape)
        problem.add_peers(("grouped_mm", "eager") if eager else ("grouped_mm",))
        cell: dict[str, Any] = {"sizes": shape._asdict(), "passes": {}}
        for what, calls in problem.passes().items():
            ms = measuring.measure(calls, runs=12)
            cell["passes"][what] = {
                "ms": ms,
                "ratio": {who: t / ms["fusible"] for who, t in ms.items() if who != "fusible"},
            }
            print(name, what, json.dumps(cell["passes"][what]), flush=True)
        if name == "small":
            graph = measuring.graph_of(partial(problem.step, "fusible"))
            cell["graph_ms"] = measuring.measure({"fusible": graph.replay})
            del graph
        cell["peak_mb"] = problem.peaks()
        cell["saved_mb"] = {
            who: measuring.saved_mb(way, problem.leaves[who]) for who, way in problem.ways.items()
        }
        errors = problem.errors(exact_step(problem))
        cell["errors"] = {who: max(found) for who, found in errors.items()}
        cell["bandwidth"] = bandwidth(problem)
        for key in ("peak_mb", "saved_mb", "errors", "bandwidth"):
            print(name, key, json.dumps(cell[key], indent=1), flush=True)
        parts = {"fusible": own_parts(problem), "torch": plain_parts(problem)}
        flat = {
            (who, part, what): call
            for who, of_way in parts.items()
            for part, calls in of_way.items()
            for what, call in calls.items()
        }
        ms = measuring.measure(flat, runs=10)
        report["parts"][name] = {
            who: {part: {w: ms[who, part, w] for w in ("forward", "backward")} for part in of_way}
            for who, of_way in parts.items()
        }
        print(name, "parts", json.dumps(report["parts"][name], indent=1), flush=True)
        report["shapes"][name] = cell
        del problem, calls, parts, flat
        torch.cuda.empty_cache()
    return report


def main() -> None:
    """Measure, print, write and draw."""
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--config", nargs="*", choices=list(SHAPES))
    parser.add_argument("--eager", action="store_true", help="transformers' eager experts too")
    parser.add_argument("--recipe", nargs="+", default=[], choices=list(measuring.RECIPES))
    options = parser.parse_args()
    if options.recipe:
        report = run_recipes(options.config or list(SHAPES), options.recipe)
        measuring.write(options.out or measuring.RESULTS / "moe_block_recipes.json", report)
        return
    # The others run blocks whose activations are weighted.
    report = run([n for n in options.config or WEIGHTED if n in WEIGHTED], options.eager)
    out = options.out or measuring.RESULTS / "moe_block.json"
    measuring.write(out, report)
    draw(report, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
