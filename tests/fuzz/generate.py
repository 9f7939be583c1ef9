"""Random cases of each kind, from a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from . import quantizing
from .caller import BACKWARDS, CALLS, GRADS, SOURCES, WRITES
from .cases import Action, Case, InvalidError, Op
from .catalog import KINDS
from .formats import RECIPES
from .layout import of_case
from .surgery import SURGERIES

DENSE = [
    name for name in KINDS if name not in ("TopKRouter", "Dispatch", "Combine", "GroupedLinear")
]
WEIGHTS = {"MakeExtraOutput": 6, "AddExtraInput": 6, "BasicLinear": 4, "Linear": 4, "Swap": 2}


def _reads(rng: random.Random, op: Op, ops: list[Op]) -> Op:
    """The op with channels for some of its extra inputs and outputs."""
    kind = KINDS[op.name]
    channels = [c for earlier in ops for c, _ in earlier.writes if c is not None]
    reads = tuple(
        rng.choice(channels)
        if name in ("addend", "incoming") and channels and rng.random() < 0.8
        else None
        for name in kind.inputs(op.options)
    )
    writes = tuple(
        (f"c{len(ops)}", rng.random() < 0.3) if not name and rng.random() < 0.8 else (None, True)
        for name in kind.outputs(op.options)
    )
    return Op(op.name, op.options, reads, writes)


def chain(rng: random.Random, shape: tuple[int, ...], length: int, names: list[str]) -> list[Op]:
    """A valid chain of ops, drawn one by one."""
    ops: list[Op] = []
    while len(ops) < length:
        ops = _appended(rng, ops, shape, names)
    return ops


def _appended(rng: random.Random, ops: list[Op], shape, names: list[str]) -> list[Op]:
    """The chain with one more op, the first drawn that fits."""
    weights = [WEIGHTS.get(name, 1) for name in names]
    here = of_case(Case(tuple(ops), shape)).shapes[-1]
    while True:
        name = rng.choices(names, weights)[0]
        try:
            op = _reads(rng, Op(name, KINDS[name].draw(rng, here)), ops)
            of_case(Case((*ops, op), shape))
        except InvalidError:
            continue
        return [*ops, op]


def _step(rng: random.Random, extra: int) -> Action:
    options = {
        "x": _mostly(rng, SOURCES, 0.5),
        "extra": [_mostly(rng, [*SOURCES, "same"], 0.4) for _ in range(extra)],
        "call": _mostly(rng, CALLS, 0.6),
        "backward": _mostly(rng, BACKWARDS, 0.4),
        "grads": _mostly(rng, GRADS, 0.5),
        "between": _mostly(rng, WRITES, 0.85),
        "late": rng.random() < 0.5,
    }
    return Action("step", options)


def _mostly(rng: random.Random, choices, usual: float) -> str:
    first, *rest = choices
    return first if rng.random() < usual else rng.choice(rest)


STORED = [
    "set data",
    "copy to data",
    "from vector",
    "load",
    "load, assigned",
    "state dict",
    "state dict, assigned",
    "deepcopy",
    "pickle",
    "shallow copy",
    "freeze",
    "forward hook",
    "forward hook that changes",
    "backward hook that changes",
    "parameter hook",
    "replace",
    "reregister",
    "evaluate",
    "recipe by position",
]
"""Surgeries after which a stored weight is that of an ordinary one."""


def _program(
    rng: random.Random, ops: list[Op], shape, changes: int, surgeries: list[str]
) -> tuple[Action, ...]:
    extra = len(of_case(Case(tuple(ops), shape)).given)
    actions = []
    if changes == 0 or rng.random() < 0.5:
        actions.append(_step(rng, extra))
    for _ in range(changes):
        actions.append(Action(rng.choice(surgeries)))
        if rng.random() < 0.4:
            actions.append(_step(rng, extra))
    actions += [_step(rng, extra), _step(rng, extra)]
    return tuple(actions)


def _shape(rng: random.Random) -> tuple[int, ...]:
    last = rng.choice([1, 2, 4, 4, 6, 8, 8, 16])
    leading = rng.choice([(3,), (5,), (1,), (2, 3), (4, 2, 1), (7,), (0,), (), (2, 0)])
    return (*leading, last) if leading else (3, last)


MIXED = "Bias", "LayerNorm", "RMSNorm"
"""Ops whose parameters may have another dtype than the input."""


def _mixed(rng: random.Random, ops: list[Op], dtype: str) -> list[Op]:
    """The ops, now and then with wider parameters."""
    if dtype not in ("bfloat16", "float16") or rng.random() < 0.5:
        return ops
    return [
        replace(op, options={**op.options, "dtype": "float32"}) if op.name in MIXED else op
        for op in ops
    ]


def pipeline(rng: random.Random) -> Case:
    """Chains of dense ops with channels; ownership of memory is what they are about."""
    shape = _shape(rng)
    dtype = rng.choice(["float64", "float64", "float32", "bfloat16", "float16"])
    ops = _mixed(rng, chain(rng, shape, rng.randint(1, 8), DENSE), dtype)
    return Case(
        tuple(ops),
        shape,
        _program(rng, ops, shape, 0, []),
        dtype=dtype,
        seed=rng.randrange(1 << 30),
    )


def surgery(rng: random.Random) -> Case:
    """Short chains with changes of the module between the steps."""
    shape = _shape(rng)
    names = [*DENSE, "GroupedLinear", "GroupedLinear", "GroupedLinear", "Linear", "LayerNorm"]
    ops = chain(rng, shape, rng.randint(1, 3), names)
    return Case(
        tuple(ops),
        shape,
        _program(rng, ops, shape, rng.randint(1, 3), list(SURGERIES)),
        dtype=rng.choice(["float64", "float64", "float64", "float32"]),
        seed=rng.randrange(1 << 30),
    )


# --- recipes --------------------------------------------------------------------------------------

AROUND = [
    "GELU",
    "SiLU",
    "SReLU",
    "SwiGLU",
    "LayerNorm",
    "RMSNorm",
    "Bias",
    "ConstantScale",
    "Dropout",
    "MakeExtraOutput",
    "AddExtraInput",
    "L2Normalization",
]


def _quantized(rng: random.Random, multiple: int, behind: bool) -> list[Op]:
    """A linear whose sizes fit a recipe, with ``Quantize`` before it at times, or ``behind`` it."""
    out = multiple * rng.choice([1, 1, 2])
    name = rng.choice(["BasicLinear", "Linear", "GroupedLinear"])
    options = {"out": out}
    groups = {}
    if name == "Linear":
        options["bias"] = rng.random() < 0.6
    if name == "GroupedLinear":
        options.update(_grouped_options(rng))
        groups = {"num_groups": options["num_groups"]}
    ops = [Op(name, options)]
    if rng.random() < 0.3:
        ops.insert(0, Op("Quantize", groups))
    if behind:
        ops.append(Op("Quantize", {"forward": False, "backward": True, **groups}))
    return ops


def _grouped_options(rng: random.Random) -> dict:
    bias = rng.random() < 0.5
    return {
        "num_groups": rng.choice([1, 2, 4]),
        "bias": bias,
        "single_grouped_weight": rng.random() < 0.5,
        "single_grouped_bias": rng.random() < 0.5,
        "scale_bias": bias and rng.random() < 0.3,
    }


def _rows(rng: random.Random) -> tuple[int, ...]:
    return rng.choice([(1,), (3,), (16,), (33,), (40,), (128,), (130,), (2, 20), (0,)])


def recipes(rng: random.Random) -> Case:
    """Linears under a recipe, alone and between other ops."""
    recipe = rng.choice(list(RECIPES))
    multiple = RECIPES[recipe].multiple
    shape = (*_rows(rng), multiple * rng.choice([1, 2]))
    ops: list[Op] = []
    behind = rng.random() < 0.3
    for _ in range(rng.choice([1, 1, 2, 3])):
        here = of_case(Case(tuple(ops), shape)).shapes[-1]
        if here[-1] % multiple == 0:
            ops += _quantized(rng, multiple, behind and rng.random() < 0.7)
        if rng.random() < 0.5:
            ops = _appended(rng, ops, shape, AROUND)
    stored = rng.random() < 0.3
    changes = 0 if behind else rng.choice([0, 0, 0, 1, 2])
    program = _program(rng, ops, shape, changes, STORED if stored else list(SURGERIES))
    for action in program if any(op.name == "Quantize" for op in ops) else ():
        if action.options.get("call") == "global hooks":  # of quantized tensors: quantized again
            action.options["call"] = "plain"
    return Case(
        tuple(ops),
        shape,
        program,
        dtype=rng.choice(["float32", "float32", "bfloat16", "float16"]),
        recipe=recipe,
        stored=stored,
        seed=rng.randrange(1 << 30),
    )


def quantizers(rng: random.Random) -> Case:
    """Number formats by themselves."""
    shape, recipe, options = quantizing.draw(rng)
    return Case(
        (Op("Identity"),),
        shape,
        (Action("quantize", options),),
        dtype=rng.choice(["float32", "bfloat16", "float16"]),
        recipe=recipe,
        seed=rng.randrange(1 << 30),
    )


# --- mixture of experts ---------------------------------------------------------------------------


def _router(rng: random.Random, experts: int, top_k: int) -> Op:
    options = {
        "num_experts": experts,
        "top_k": top_k,
        "score_function": rng.choice(["softmax", "softmax", "sigmoid"]),
        "normalize": rng.random() < 0.7,
        "scaling_factor": rng.choice([1.0, 2.5]),
        "bias": rng.random() < 0.3,
        "expert_bias": rng.random() < 0.2,
        "load_balancing_loss": rng.random() < 0.3,
        "z_loss": rng.random() < 0.3,
    }
    if experts % 2 == 0 and top_k <= experts // 2 and rng.random() < 0.3:
        options.update(num_groups=2, top_groups=1, group_top=rng.randint(1, min(2, experts // 2)))
    return Op("TopKRouter", options)


def _activation(rng: random.Random, target: str | None, scaled: bool) -> Op:
    if not scaled:
        return Op(rng.choice(["SwiGLU", "GEGLU", "ClampedSwiGLU", "SiTUGLU"]), {})
    names = ["ScaledSwiGLU", "ScaledSwiGLU", "ScaledClampedQGeGLU"]
    name = rng.choice(names if target else [*names, "ScaledSiTUGLU"])
    options = {}
    if rng.random() < (0.9 if target == "sm100" else 0.3):
        options["glu_interleave_size"] = 32 if target == "sm100" else rng.choice([1, 2, 4])
    if name == "ScaledClampedQGeGLU" and rng.random() < 0.5:
        options["limit"] = 0.7
    return Op(name, options)


def _mlp(
    rng: random.Random, target: str | None, hidden: int, inner: int, groups: int, scaled: bool
) -> list[Op]:
    """Linear, gated activation, linear."""
    layout = _grouped_options(rng)
    if rng.random() < 0.1:
        layout["delay_wgrad_compute"] = True
    if rng.random() < 0.1:
        layout["accumulate_into_main_grad"] = True
    layout["num_groups"] = groups
    first = {**layout, "out": 2 * inner, "scale_bias": False}
    second = {**layout, "out": hidden, "scale_bias": layout["scale_bias"] and scaled}
    return [
        Op("GroupedLinear", first),
        _activation(rng, target, scaled),
        Op("GroupedLinear", second),
    ]


def _sizes(rng: random.Random, target: str | None, recipe: str | None) -> tuple[int, int]:
    multiple = RECIPES[recipe].multiple if recipe else 1
    unit = max(multiple, {None: 4, "sm90": 8, "sm100": 64}[target])
    return unit * rng.choice([1, 1, 2]), unit * rng.choice([1, 1, 2])


def experts(rng: random.Random) -> Case:
    """Grouped linears and MLPs, from the caller's rows or from tokens, for every target."""
    target = rng.choice([None, "sm90", "sm90", "sm100", "sm100"])
    allowed = {"sm100": ["mxfp8", "nvfp4", "mxfp8 hybrid"]}.get(target, list(RECIPES))
    recipe = rng.choice(allowed) if rng.random() < 0.4 else None
    hidden, inner = _sizes(rng, target, recipe)
    count, form = rng.choice([1, 2, 4, 5]), rng.choice(["rows", "tokens", "router", "shared"])
    scaled = rng.random() < 0.8
    body = _mlp(rng, target, hidden, inner, count, scaled)
    ops = {"rows": body[: rng.choice([1, 2, 3, 3, 3])]}.get(form) or _block(
        rng, body, form, hidden, count, scaled
    )
    leading = rng.choice([(3,), (9,), (40,), (2, 5), (0,), (1,), (70,)])
    shape = (*leading, hidden)
    narrow = {"sm90": ["bfloat16", "bfloat16", "float16"], "sm100": ["bfloat16"]}
    wide = ["float32", "bfloat16"] if recipe else ["float64", "float32", "bfloat16", "float16"]
    dtype = rng.choice(narrow.get(target, wide) if rng.random() < 0.9 else ["float32"])
    autocast = rng.random() < 0.15 and form in ("rows", "tokens")
    of_main_grad = any(op.options.get("accumulate_into_main_grad") for op in ops)
    return Case(
        tuple(ops),
        shape,
        _program(rng, ops, shape, 0 if of_main_grad else rng.choice([0, 0, 1]), list(SURGERIES)),
        dtype="float32" if autocast else dtype,
        target=target,
        recipe=recipe,
        autocast="bfloat16" if autocast else None,
        seed=rng.randrange(1 << 30),
    )


def _block(
    rng: random.Random, body: list[Op], form: str, hidden: int, count: int, scaled: bool
) -> list[Op]:
    top_k = rng.randint(1, min(count, 3))
    moved = {"num_experts": count, "top_k": top_k}
    if rng.random() < 0.3:
        moved["capacity_factor"] = rng.choice([0.5, 1.0, 1.25, 4.0])
    if rng.random() < 0.2:
        moved["recompute_rows"] = True
    if not scaled and rng.random() < 0.5:
        moved["scale_input"] = True
    weighted = not scaled and "scale_input" not in moved
    ops = [Op("Dispatch", moved), *body, Op("Combine", {"weighted": weighted})]
    if form != "tokens":
        ops.insert(0, _router(rng, count, top_k))
    if form == "shared":
        ops = [
            Op("MakeExtraOutput", {"in_place": rng.random() < 0.5}, (), (("x", False),)),
            *ops,
            Op("Swap", {}, ("x",), (("routed", False),)),
            Op("Linear", {"out": 2 * hidden, "bias": False}),
            Op("SwiGLU", {}),
            Op("Linear", {"out": hidden, "bias": False}),
            Op("AddExtraInput", {"in_place": rng.random() < 0.5}, ("routed",)),
        ]
    return ops


def compiled(rng: random.Random) -> Case:
    """Any of the above under ``torch.compile``."""
    case = rng.choice([pipeline, recipes, experts])(rng)
    steps = [
        Action("step", {k: v for k, v in a.options.items() if k in COMPILED})
        for a in case.program
        if a.name == "step"
    ]
    ops = tuple(
        replace(op, options={k: v for k, v in op.options.items() if k != "delay_wgrad_compute"})
        for op in case.ops
    )
    return replace(case, ops=ops, program=tuple(steps[:1]), compiled=True)


def inductor(rng: random.Random) -> Case:
    """The same with PyTorch's own code generator, which takes seconds a case."""
    return replace(compiled(rng), backend="inductor")


COMPILED = ("x", "extra", "backward", "grads")
"""What of a step makes sense under ``torch.compile``."""

GENERATORS: dict[str, Callable[[random.Random], Case]] = {
    "pipeline": pipeline,
    "surgery": surgery,
    "quantizers": quantizers,
    "recipes": recipes,
    "experts": experts,
    "compiled": compiled,
    "inductor": inductor,
}
USUAL = [kind for kind in GENERATORS if kind != "inductor"]
"""Those that take turns."""


def case_of(seed: int, number: int, kinds: list[str] | None = None) -> tuple[str, Case]:
    """The case of a seed and a number; kinds take turns."""
    kinds = kinds or USUAL
    kind = kinds[number % len(kinds)]
    return kind, GENERATORS[kind](random.Random(f"{seed}/{number}/{kind}"))
