"""A call of a module and its backward, as a caller may make them, and all that came of it.

The same code calls the module of the package and its references.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fusible as fz

from .build import Side, recipe
from .hooks import double_input, double_output, triple_grad_input, triple_grad_output
from .layout import Given
from .replicas import replica_of

# --- inputs ---------------------------------------------------------------------------------------


def _leaf(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random(shape, name).requires_grad_()
    return leaf, leaf


def _constant(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random(shape, name)
    return leaf, leaf


def _nonleaf(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random(shape, name).requires_grad_()
    return leaf, leaf * 1


def _view(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random((2, *shape), name).requires_grad_()
    return leaf, leaf[1]


def _expanded(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random((1, *shape[1:]), name).requires_grad_()
    return leaf, leaf.expand(shape)


def _transposed(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    if len(shape) < 2:
        return _leaf(side, shape, name)
    values = side.random(shape, name)
    leaf = values.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    return leaf, leaf


def _strided(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random((*shape[:-1], 2 * shape[-1]), name).requires_grad_()
    return leaf, leaf[..., ::2]


def _pitched(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    leaf = side.random((*shape[:-1], shape[-1] + 3), name).requires_grad_()
    return leaf, leaf[..., 1:-2]


def _odd(side: Side, shape, name: str) -> tuple[Tensor, Tensor]:
    values = side.random(shape, name)
    memory = values.new_empty(values.numel() + 1)
    leaf = memory[1:].view(shape).copy_(values).requires_grad_()
    return leaf, leaf


SOURCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "leaf": _leaf,
    "constant": _constant,
    "nonleaf": _nonleaf,
    "view": _view,
    "expanded": _expanded,
    "transposed": _transposed,
    "strided": _strided,
    "pitched": _pitched,
    "odd": _odd,
}
"""How a tensor of values comes to the call: the leaf that gets the gradient, and what is passed."""


def splits(side: Side, groups: int, rows: int, name: str) -> Tensor:
    """Sizes of groups of at most ``rows`` rows, some of none."""
    rng = random.Random(f"{side.case.seed}/{name}/{groups}/{rows}")
    used = rows if rng.random() < 0.5 else rng.randint(0, rows)
    cuts = sorted(rng.randint(0, used) for _ in range(groups - 1))
    bounds = [0, *cuts, used]
    sizes = [b - a for a, b in pairwise(bounds)]
    return torch.tensor(sizes, dtype=rng.choice([torch.int64, torch.int32]))


def expert_ids(side: Side, given: Given, name: str) -> Tensor:
    """Distinct experts for each token, now and then one of another rank."""
    rng = random.Random(f"{side.case.seed}/{name}")
    tokens, k = given.shape[:-1], given.shape[-1]
    known = range(-1 if rng.random() < 0.3 else 0, given.experts + rng.choice([0, 0, 2]))
    count = torch.Size(tokens).numel()
    ids = [rng.sample(known, k) for _ in range(count)]
    return torch.tensor(ids, dtype=torch.int64).reshape(given.shape)


@dataclass
class Inputs:
    """What is passed, and the leaves behind it."""

    passed: list[Tensor] = field(default_factory=list)
    leaves: dict[str, Tensor] = field(default_factory=dict)


def inputs_of(side: Side, step: dict[str, Any], name: str) -> Inputs:
    """The input and the extra inputs of a call."""
    made = Inputs()
    leaf, x = SOURCES[step.get("x", "leaf")](side, side.layout.shapes[0], f"{name}/x")
    made.leaves["x"] = leaf
    made.passed.append(x)
    known: dict[Any, Tensor] = {}
    kinds = step.get("extra", ())
    for k, given in enumerate(side.layout.given):
        kind = kinds[k] if k < len(kinds) else "leaf"
        if given.name == "split_sizes":
            rows = torch.Size(side.layout.shapes[given.op][:-1]).numel()
            key = given.shape[0], rows
            if key not in known:
                known[key] = splits(side, *key, f"{name}/splits")
            made.passed.append(known[key].clone() if kind == "nonleaf" else known[key])
        elif given.name == "expert_ids":
            made.passed.append(expert_ids(side, given, f"{name}/ids{k}"))
        elif kind == "same" and given.shape == x.shape and not given.in_place:
            made.passed.append(x)
        elif kind == "same" and (given.name, given.shape) in known and not given.in_place:
            made.passed.append(known[given.name, given.shape])
        else:
            kind = "nonleaf" if given.in_place else kind
            leaf, t = SOURCES[_fitting(kind, given.shape)](side, given.shape, f"{name}/{k}")
            made.leaves[f"extra{k}"] = leaf
            made.passed.append(t)
            if not given.in_place:
                known.setdefault((given.name, given.shape), t)
    return made


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    return "leaf" if kind == "same" or not shape else kind


# --- calls ----------------------------------------------------------------------------------------


def _plain(side: Side, inputs: list[Tensor]) -> Any:
    return side.model(*inputs)


def _compiled(side: Side, inputs: list[Tensor]) -> Any:
    if not side.of_package:
        return side.model(*inputs)
    torch._dynamo.reset()
    return torch.compile(side.model, fullgraph=True, backend=side.case.backend)(*inputs)


def _functional(side: Side, inputs: list[Tensor]) -> Any:
    own = {name: p * 1 for name, p in side.model.named_parameters()}
    return functional_call(side.model, own, tuple(inputs))


def _replica(side: Side, inputs: list[Tensor]) -> Any:
    return replica_of(side.model)(*inputs)


def _checkpoint(side: Side, inputs: list[Tensor]) -> Any:
    # Recomputed whole where evaluations count: PyTorch stops at the last tensor that was saved.
    counts = any(n.endswith("count") for n, _ in side.model.named_buffers())
    with set_checkpoint_early_stop(not counts):
        return checkpoint(side.model, *inputs, use_reentrant=False)


def _reentrant(side: Side, inputs: list[Tensor]) -> Any:
    return checkpoint(side.model, *inputs, use_reentrant=True)


def _saved_otherwise(side: Side, inputs: list[Tensor]) -> Any:
    """What was saved comes back in other memory, and in another layout where no kernel has its."""
    keeps = side.case.target == "sm100"

    def unpack(t: Tensor) -> Tensor:
        return t if keeps or t.dim() < 2 else t.transpose(-1, -2).contiguous().transpose(-1, -2)

    with saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        return side.model(*inputs)


def _nested(side: Side, inputs: list[Tensor]) -> Any:
    """The modules in Sequentials of Sequentials; the reference needs none."""
    if not side.of_package:
        return side.model(*inputs)
    rng, modules = random.Random(side.case.seed), list(side.model)
    for _ in range(rng.randint(1, 3)):
        start, stop = sorted(rng.choices(range(len(modules) + 1), k=2))
        modules[start:stop] = [fz.Sequential(*modules[start:stop])]
    return fz.Sequential(*modules)(*inputs)


def _under_global_hooks(side: Side, inputs: list[Tensor]) -> Any:
    """Hooks of all modules, of which those of one module change what they see."""
    rng = random.Random(side.case.seed)
    modules = list(side.model.children())
    one = rng.choice(modules)

    def of_one(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args: hook(module, *args) if module is one else None

    kinds = {
        torch_module.register_module_forward_hook: double_output,
        torch_module.register_module_forward_pre_hook: double_input,
        torch_module.register_module_full_backward_hook: triple_grad_input,
        torch_module.register_module_full_backward_pre_hook: triple_grad_output,
    }
    handles = [kind(of_one(kinds[kind])) for kind in rng.sample(list(kinds), rng.randint(1, 2))]
    try:
        return side.model(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def _saved_elsewhere(side: Side, inputs: list[Tensor]) -> Any:
    with save_on_cpu():
        return side.model(*inputs)


def _after_no_grad(side: Side, inputs: list[Tensor]) -> Any:
    with torch.no_grad():
        side.model(*inputs)
    return side.model(*inputs)


def _twice(side: Side, inputs: list[Tensor]) -> Any:
    """Two calls before a backward, the results of both summed."""
    one, two = (as_tuple(side.model(*inputs)) for _ in range(2))
    return tuple(a + b if a.is_floating_point() else a for a, b in zip(one, two, strict=True))


def _chained(side: Side, inputs: list[Tensor]) -> Any:
    """The module applied to its own output."""
    first, *_ = as_tuple(side.model(*inputs))
    if first.shape != inputs[0].shape:
        return side.model(*inputs)
    return side.model(first, *inputs[1:])


def _with_buffer(name: str, of: Callable[[Side, list[Tensor]], Tensor | None]) -> Any:
    """A call that gives the module a buffer; references need none."""

    def call(side: Side, inputs: list[Tensor]) -> Any:
        at = -1 if name == "output" else 0
        fits = side.case.ops[at].name in ("BasicLinear", "GroupedLinear")
        buffer = of(side, inputs) if side.of_package and fits else None
        if buffer is None:
            return side.model(*inputs)
        return side.model(*inputs, op_kwargs={at: {name: buffer}})

    return call


def _buffer(at: int) -> Callable[[Side, list[Tensor]], Tensor]:
    return lambda side, inputs: torch.full(side.layout.shapes[at], 5.0, dtype=side.dtype)


def _over_something(side: Side, inputs: list[Tensor]) -> Tensor | None:
    """A buffer for the output over an input or a parameter."""
    shape = side.layout.shapes[-1]
    size = torch.Size(shape).numel()
    rng = random.Random(side.case.seed)
    kept = () if side.case.stored else side.model.parameters()
    read = [t for t in (*inputs, *kept) if t.is_floating_point()]
    large = [t.detach() for t in read if t.is_contiguous() and t.numel() >= size > 0]
    return rng.choice(large).view(-1)[:size].view(shape) if large else None


CALLS: dict[str, Callable[[Side, list[Tensor]], Any]] = {
    "plain": _plain,
    "functional": _functional,
    "replica": _replica,
    "checkpoint": _checkpoint,
    "reentrant checkpoint": _reentrant,
    "saved elsewhere": _saved_elsewhere,
    "saved otherwise": _saved_otherwise,
    "nested": _nested,
    "global hooks": _under_global_hooks,
    "after no_grad": _after_no_grad,
    "twice": _twice,
    "chained": _chained,
    "output buffer": _with_buffer("output", _buffer(-1)),
    "grad_input buffer": _with_buffer("grad_input", _buffer(0)),
    "overlapping buffer": _with_buffer("output", _over_something),
}


REPEATED = ("checkpoint", "reentrant checkpoint", "after no_grad", "twice", "chained")
"""Calls that run the forward more than once, which writes to an extra input as often."""

UNAWARE = ("checkpoint", "reentrant checkpoint", "saved elsewhere", "saved otherwise")
"""Calls under which PyTorch itself does not notice writes between forward and backward."""

COPIES = ("functional", "replica")
"""Calls whose parameters lack what the module's have beside their values."""


def _call(side: Side, options: dict[str, Any]) -> Callable[[Side, list[Tensor]], Any]:
    name = options.get("call", "plain")
    written = any(given.in_place for given in side.layout.given)
    between = options.get("between", "none") != "none"
    main = any(op.options.get("accumulate_into_main_grad") for op in side.case.ops)
    more = main or side.case.stored
    if (written and name in REPEATED) or (between and name in UNAWARE) or (more and name in COPIES):
        name = "plain"
    return _compiled if side.case.compiled else CALLS[name]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


# --- backward -------------------------------------------------------------------------------------


class Held:
    """Tensors that someone holds, and that a step must leave as they are."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, t: Tensor) -> Tensor:
        """Hold ``t``."""
        self._tensors[name] = t, t.detach().clone()
        return t

    def changed(self) -> set[str]:
        """Those that are not as they were."""
        return {
            name
            for name, (t, before) in self._tensors.items()
            if not torch.equal(t.detach().nan_to_num(), before.nan_to_num())
        }


Draw = Callable[[str, Any], Tensor]
"""Gives random values that the caller holds, by name and shape."""


def _gradients(outputs: list[Tensor], draw: Draw) -> list[Tensor]:
    return [draw(f"dy{i}", y.shape) for i, y in enumerate(outputs)]


def _each_its_own(outputs: list[Tensor], draw: Draw) -> None:
    torch.autograd.backward(outputs, _gradients(outputs, draw))


def _sums(outputs: list[Tensor], draw: Draw) -> None:
    """Gradients of one element expanded, the same for all outputs but for a factor."""
    sum(y.sum() * (i + 1) for i, y in enumerate(outputs)).backward()


def _one_for_all(outputs: list[Tensor], draw: Draw) -> None:
    """The very same tensor for all outputs of one shape."""
    by_shape: dict[Any, Tensor] = {}
    for y in outputs:
        if y.shape not in by_shape:
            by_shape[y.shape] = draw(f"dy of shape {tuple(y.shape)}", y.shape)
    torch.autograd.backward(outputs, [by_shape[y.shape] for y in outputs])


def _added(outputs: list[Tensor], draw: Draw) -> None:
    """Outputs of one shape are added: autograd hands one gradient to all of them."""
    total, rest = outputs[0], []
    for y in outputs[1:]:
        if y.shape == total.shape:
            total = total + y
        else:
            rest.append(y)
    _each_its_own([total, *rest], draw)


def _retained(outputs: list[Tensor], draw: Draw) -> None:
    """The same backward twice, of copies: PyTorch may keep a view of the first as ``.grad``."""
    dys = _gradients(outputs, draw)
    torch.autograd.backward(outputs, [dy.clone() for dy in dys], retain_graph=True)
    torch.autograd.backward(outputs, [dy.clone() for dy in dys])


def _pitched_gradients(outputs: list[Tensor], draw: Draw) -> None:
    """Gradients inside of larger tensors."""
    dys = []
    for i, y in enumerate(outputs):
        if y.dim():
            dys.append(draw(f"dy{i}", (*y.shape[:-1], y.shape[-1] + 3))[..., 2:-1])
        else:
            dys.append(draw(f"dy{i}", (2,))[1])
    torch.autograd.backward(outputs, dys)


def _first_only(outputs: list[Tensor], draw: Draw) -> None:
    _each_its_own(outputs[:1], draw)


def _last_only(outputs: list[Tensor], draw: Draw) -> None:
    _each_its_own(outputs[-1:], draw)


BACKWARDS: dict[str, Callable[[list[Tensor], Draw], None]] = {
    "each its own": _each_its_own,
    "sum": _sums,
    "one for all": _one_for_all,
    "added": _added,
    "retained": _retained,
    "pitched": _pitched_gradients,
    "first only": _first_only,
    "last only": _last_only,
}
"""How a backward starts."""


# --- where gradients of parameters lie ------------------------------------------------------------


def _no_grads(side: Side, name: str) -> None:
    for p in side.model.parameters():
        p.grad = None


def _kept_grads(side: Side, name: str) -> None:
    """Those of the step before are added to."""


def _flat_grads(side: Side, name: str) -> None:
    """Views of one buffer, as in a bucket, which is of one dtype."""
    params = [
        p
        for n, p in side.model.named_parameters()
        if p.requires_grad and "dtype" not in side.case.ops[int(n.partition(".")[0])].options
    ]
    flat = side.random(sum(p.numel() for p in params), f"{name}/flat")
    parts = flat.split([p.numel() for p in params])
    for p, part in zip(params, parts, strict=True):
        p.grad = part.view(p.shape)


GRADS = {"none": _no_grads, "kept": _kept_grads, "flat": _flat_grads}


def _main_grads(side: Side, name: str) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Of weights with a ``main_grad``: what is in it, and of a reference the ``.grad`` it has."""
    before = {}
    for at, (module, op) in enumerate(zip(side.model, side.case.ops, strict=False)):
        if not op.options.get("accumulate_into_main_grad"):
            continue
        for n, p in module.named_parameters(str(at), recurse=False):
            if n.split(".")[-1].startswith("weight") and p.requires_grad:
                values = side.random(p.shape, f"{name}/main {n}")
                if side.of_package:
                    p.main_grad = values
                before[n] = values, _copy(p.grad)
    return before


MOST_BACKWARDS = 4
"""In one step."""


def _delayed_gradients(model: nn.Module) -> None:
    """Those that wait, the last op's first; where none waits ``backward_dw`` does nothing."""
    for module in reversed(list(model.modules())):
        if getattr(module, "delay_wgrad_compute", False):
            for _ in range(MOST_BACKWARDS):
                module.backward_dw()


# --- the step -------------------------------------------------------------------------------------


# --- writes between -------------------------------------------------------------------------------


@torch.no_grad()
def _write_parameter(side: Side, inputs: Inputs) -> None:
    """One only: what is noticed of another would hide that it is not."""
    params = dict(sorted(side.model.named_parameters()))
    if params:
        random.Random(side.case.seed).choice(list(params.values())).mul_(1.5)


@torch.no_grad()
def _write_inputs(side: Side, inputs: Inputs) -> None:
    for leaf in inputs.leaves.values():
        leaf.mul_(1.5)


@torch.no_grad()
def _write_buffer(side: Side, inputs: Inputs) -> None:
    buffers = dict(sorted(side.model.named_buffers()))
    floats = [b for b in buffers.values() if b.is_floating_point()]
    if floats:
        random.Random(side.case.seed).choice(floats).mul_(1.5)


def _replace_parameter(side: Side, inputs: Inputs) -> None:
    """Another parameter of the name; the gradient belongs to the one that was used."""
    owned = [
        (module, n)
        for module, op in zip(side.model.children(), side.case.ops, strict=False)
        for n, p in module._parameters.items()
        if p is not None and not op.options.get("accumulate_into_main_grad")
    ]
    if not owned:
        return
    module, name = random.Random(side.case.seed).choice(sorted(owned, key=lambda o: o[1]))
    inputs.leaves[f"replaced {name}"] = old = module._parameters[name]
    values = side.parameter(old, f"another {name}")
    setattr(module, name, nn.Parameter(values.to(old.dtype), old.requires_grad))


def _other_attribute(side: Side, inputs: Inputs) -> None:
    for module in side.model.children():
        if hasattr(module, "factor"):
            module.factor *= 1.5


def _other_mode(side: Side, inputs: Inputs) -> None:
    side.model.train(not side.model.training)


REPLACES: dict[str, Callable[[Side, Inputs], None]] = {
    "replaced": _replace_parameter,
    "other attribute": _other_attribute,
    "other mode": _other_mode,
}
"""What changes on every side between a forward and its backward, which it is nothing to."""

WRITES: dict[str, Callable[[Side, Inputs], None]] = {
    "none": lambda side, inputs: None,
    "parameters": _write_parameter,
    "inputs": _write_inputs,
    "buffers": _write_buffer,
    **REPLACES,
}
"""What is written between a forward and its backward, or before ``backward_dw``.

The package must notice, or compute with what there was; the references are written to afterwards.
"""


@dataclass
class Result:
    """All that a step gave, by name."""

    values: dict[str, Tensor | None]
    changed: set[str]
    """What must stay as it is, and did not."""
    live: list[int]
    """The outputs that a backward started from."""


def step(side: Side, options: dict[str, Any], name: str, live: list[int] | None = None) -> Result:
    """One call and its backward; the gradients of parameters stay where they are.

    ``live`` are the outputs that the reference has gradients for; None in a reference.
    """
    inputs, held = inputs_of(side, options, name), Held()
    GRADS[options.get("grads", "none")](side, name)
    places = {n: p.grad for n, p in side.model.named_parameters() if p.grad is not None}
    main = _main_grads(side, name)
    for i, t in enumerate(inputs.passed):
        if i == 0 or not side.layout.given[i - 1].in_place:
            held.add(f"input {i}", t)
    for n, p in side.model.named_parameters():
        held.add(f"parameter {n}", p)
        p.grad_before = _copy(p.grad)  # for hooks
    torch.manual_seed(side.case.seed)
    with _autocast(side):
        outputs = as_tuple(_call(side, options)(side, inputs.passed))
    values = {f"output {i}": _comparable(y) for i, y in enumerate(outputs)}
    if live is None:
        live = [i for i, y in enumerate(outputs) if y.requires_grad]
    if live:
        _backward(side, options, name, [outputs[i] for i in live], inputs, held)
    changed = held.changed() if options.get("between", "none") == "none" else set()
    values.update(_gradients_of(side, inputs, main))
    values.update({f"buffer {n}": _copy(b) for n, b in side.model.named_buffers()})
    for n, p in side.model.named_parameters():
        if n in places and (p.grad is None or p.grad.data_ptr() != places[n].data_ptr()):
            changed.add(f"place of the gradient of {n}")
    return Result(values, changed, live)


def _backward(
    side: Side, options: dict, name: str, outputs: list[Tensor], inputs: Inputs, held: Held
) -> None:
    """The backward with its delayed part, and what is written in between."""
    between = options.get("between", "none")
    # A stored weight multiplied is another one than its values multiplied and stored.
    write = WRITES["none" if side.case.stored and between == "parameters" else between]
    late = options.get("late", False)
    if between in REPLACES or (side.of_package and not late):
        write(side, inputs)
    backward = BACKWARDS[options.get("backward", "each its own")]
    backward(outputs, lambda n, shape: held.add(n, side.random(shape, f"{name}/{n}")))
    if side.of_package and late and between not in REPLACES:
        write(side, inputs)
    _delayed_gradients(side.model)
    if not side.of_package and between not in REPLACES:
        write(side, inputs)


def _gradients_of(
    side: Side, inputs: Inputs, main: dict[str, tuple[Tensor, Tensor | None]]
) -> dict[str, Tensor | None]:
    values = {f"gradient of {n}": _copy(leaf.grad) for n, leaf in inputs.leaves.items()}
    for n, p in side.model.named_parameters():
        grad = p.grad
        if n in main:
            start, before = main[n]
            new = grad if before is None or grad is None else grad - before
            grad = p.main_grad if side.of_package else start if new is None else start + new
        values[f"gradient of {n}"] = _copy(grad)
    return values


@contextmanager
def _autocast(side: Side) -> Iterator[None]:
    """PyTorch's, for the package and the reference that is to be as inexact; the recipe's."""
    with ExitStack() as stack:
        if side.case.autocast is not None and (side.of_package or side.dtype != torch.float64):
            dtype = getattr(torch, side.case.autocast)
            stack.enter_context(torch.autocast("cpu", dtype))
        if side.of_package and side.case.recipe is not None:
            stack.enter_context(fz.autocast(recipe=recipe(side.case)))
        yield


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def _comparable(y: Tensor) -> Tensor:
    """Integers below -1 are one and the same: the row of a choice that is not computed."""
    y = y.detach().clone()
    return y if y.is_floating_point() else y.clamp(min=-1)
