"""Changes of a module by PyTorch's own machinery, done alike to an op and to its reference."""

from __future__ import annotations

import copy
import io
import pickle
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)

import fusible as fz

from .build import Side, recipe
from .hooks import (
    double_input,
    double_output,
    triple_grad_input,
    triple_grad_output,
    watch,
)

Surgery = Callable[[Side, random.Random, str], None]
"""Takes a side, choices that are the same on every side, and a name that values are drawn by."""


def _owners(side: Side) -> list[tuple[nn.Module, str]]:
    """Every parameter, as the module and the name in it; not those of parametrizations."""
    return [
        (module, name)
        for module in side.model.children()
        for name in sorted(n for n, p in module._parameters.items() if p is not None)
    ]


def _chosen(side: Side, rng: random.Random, dims: int = 0) -> tuple[nn.Module, str] | None:
    """One parameter, at random, of at least so many dimensions."""
    fitting = [(m, n) for m, n in _owners(side) if m._parameters[n].dim() >= dims]
    return rng.choice(fitting) if fitting else None


def _module(side: Side, rng: random.Random) -> nn.Module | None:
    modules = list(side.model.children())
    return rng.choice(modules) if modules else None


# --- parameters -----------------------------------------------------------------------------------


def reregister(side: Side, rng: random.Random, name: str) -> None:
    """``del m.w; m.w = ...``: the order of the parameters changes."""
    if (chosen := _chosen(side, rng)) is None:
        return
    module, n = chosen
    p = module._parameters[n]
    values = side.parameter(p, name) if rng.random() < 0.5 else p.detach().clone()
    delattr(module, n)
    setattr(module, n, nn.Parameter(values, p.requires_grad))


def replace(side: Side, rng: random.Random, name: str) -> None:
    """``m.w = nn.Parameter(...)``."""
    if (chosen := _chosen(side, rng)) is not None:
        module, n = chosen
        p = module._parameters[n]
        setattr(module, n, nn.Parameter(side.parameter(p, name), p.requires_grad))


def transposed(side: Side, rng: random.Random, name: str) -> None:
    """A parameter of the same values in another layout."""
    if (chosen := _chosen(side, rng, 2)) is not None:
        module, n = chosen
        p = module._parameters[n]
        values = p.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
        setattr(module, n, nn.Parameter(values, p.requires_grad))


def set_data(side: Side, rng: random.Random, name: str) -> None:
    """``p.data = values``."""
    if (chosen := _chosen(side, rng)) is not None:
        p = chosen[0]._parameters[chosen[1]]
        p.data = side.parameter(p, name)


def copy_to_data(side: Side, rng: random.Random, name: str) -> None:
    """``p.data.copy_(values)``."""
    if (chosen := _chosen(side, rng)) is not None:
        p = chosen[0]._parameters[chosen[1]]
        p.data.copy_(side.parameter(p, name))


def write_in_place(side: Side, rng: random.Random, name: str) -> None:
    """``p.mul_(0.5)`` without grad, as an optimizer does."""
    with torch.no_grad():
        for p in side.model.parameters():
            p.mul_(0.5)


def from_vector(side: Side, rng: random.Random, name: str) -> None:
    """``vector_to_parameters``."""
    params = list(dict(sorted(side.model.named_parameters())).values())
    if params:
        size = sum(p.numel() for p in params)
        vector_to_parameters(side.random(size, name, 0.4), params)


def flat_data(side: Side, rng: random.Random, name: str) -> None:
    """All parameters become views of one buffer, at addresses that are not aligned."""
    params = [p for p in side.model.parameters() if p.numel()]
    if not params:
        return
    flat = torch.cat([torch.zeros(1, dtype=side.dtype), *[p.detach().reshape(-1) for p in params]])
    start = 1
    for p in params:
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()


def tie(side: Side, rng: random.Random, name: str) -> None:
    """Two ops share one parameter."""
    owners = _owners(side)
    pairs = [
        (a, b)
        for i, a in enumerate(owners)
        for b in owners[i + 1 :]
        if a[0] is not b[0]
        and a[0]._parameters[a[1]].shape == b[0]._parameters[b[1]].shape
        and a[0]._parameters[a[1]].requires_grad == b[0]._parameters[b[1]].requires_grad
    ]
    if pairs:
        (one, n), (other, m) = rng.choice(pairs)
        setattr(other, m, one._parameters[n])


def freeze(side: Side, rng: random.Random, name: str) -> None:
    """``requires_grad_`` of all parameters of some ops; of groups all weights or none."""
    for module in side.model.children():
        for kind in ("weight", "bias", ""):
            keep = rng.random() < 0.6
            for n, p in module.named_parameters():
                if kind and n.split(".")[-1].startswith(kind):
                    p.requires_grad_(keep)


# --- pruning and parametrization ------------------------------------------------------------------


def prune_identity(side: Side, rng: random.Random, name: str) -> None:
    if (chosen := _chosen(side, rng)) is not None and not parametrize.is_parametrized(chosen[0]):
        prune.identity(*chosen)


def prune_by_mask(side: Side, rng: random.Random, name: str) -> None:
    if (chosen := _chosen(side, rng)) is not None and not parametrize.is_parametrized(chosen[0]):
        module, n = chosen
        prune.custom_from_mask(module, n, side.random(module._parameters[n].shape, name) > 0)


def remove_pruning(side: Side, rng: random.Random, name: str) -> None:
    for module in side.model.children():
        for n in [n for n in module._parameters if n.endswith("_orig")]:
            if f"{n[:-5]}_mask" in module._buffers and rng.random() < 0.7:
                prune.remove(module, n[:-5])


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Counted(nn.Module):
    """Each evaluation gives another value, as DropConnect's do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        self.count += 1
        at = torch.arange(w.numel()).reshape(w.shape)
        return w * ((at + int(self.count)) % 3 != 0)


def _parametrized(make: Callable[[nn.Module, str], None], dims: int = 0) -> Surgery:
    def surgery(side: Side, rng: random.Random, name: str) -> None:
        chosen = _chosen(side, rng, dims)
        if chosen is None or any(n.endswith("_orig") for n in chosen[0]._parameters):
            return
        module, n = chosen
        make(module, n)
        for path, buffer in module.parametrizations[n].named_buffers():
            if path.endswith(("_u", "_v")):
                values = side.random(buffer.shape, f"{name}/{path}")
                buffer.copy_(values / values.norm())

    return surgery


def _register(kind: Callable[[], nn.Module]) -> Callable[[nn.Module, str], None]:
    return lambda module, n: parametrize.register_parametrization(module, n, kind())


def remove_parametrization(side: Side, rng: random.Random, name: str) -> None:
    for module in side.model.children():
        if parametrize.is_parametrized(module) and rng.random() < 0.7:
            n = sorted(module.parametrizations)[0]
            kinds = {type(p) for p in module.parametrizations[n]}
            if kinds <= {Doubled}:  # others change what they hold where they are left
                parametrize.remove_parametrizations(module, n)


# --- hooks ----------------------------------------------------------------------------------------


def _hook(register: str, hook: Callable[..., Any], at: int) -> Surgery:
    """On an op, or on the part of it that sees the same (``at``): the first or the last."""

    def surgery(side: Side, rng: random.Random, name: str) -> None:
        if (module := _module(side, rng)) is not None:
            on_part = rng.random() < 0.5
            parts = getattr(module, "basic_ops", ()) if on_part else ()
            getattr(parts[at] if parts else module, register)(hook)

    return surgery


def _through_autograd(side: Side, rng: random.Random) -> Tensor | None:
    """One parameter, at random, whose gradient comes by autograd."""
    elsewhere = "accumulate_into_main_grad", "delay_wgrad_compute"
    fitting = [
        p
        for module, op in zip(side.model.children(), side.case.ops, strict=False)
        if not any(op.options.get(option) for option in elsewhere)
        for _, p in sorted(module.named_parameters(recurse=False))
        if p.requires_grad
    ]
    return rng.choice(fitting) if fitting else None


def parameter_hook(side: Side, rng: random.Random, name: str) -> None:
    """``p.register_hook`` with a factor."""
    if (p := _through_autograd(side, rng)) is not None:
        p.register_hook(triple)


def triple(grad: Tensor) -> Tensor:
    return grad * 3


def accumulated_hook(side: Side, rng: random.Random, name: str) -> None:
    """``register_post_accumulate_grad_hook`` that changes the gradient."""
    if (p := _through_autograd(side, rng)) is not None:
        p.register_post_accumulate_grad_hook(halve)


def halve(p: Tensor) -> None:
    """Of a gradient that was added to.

    A run is one autograd function, which gives zeros, and so calls hooks, where nothing flows back
    from the loss; PyTorch's modules give nothing there.
    """
    before = getattr(p, "grad_before", None)
    if before is None or not torch.equal(p.grad, before):
        p.grad.mul_(0.5)
    p.grad_before = p.grad.clone()


# --- copies ---------------------------------------------------------------------------------------


def deep_copy(side: Side, rng: random.Random, name: str) -> None:
    """The copy goes on, with other values than the original has from then on."""
    original, side.model = side.model, copy.deepcopy(side.model)
    _spoil(original)


def shallow_copies(side: Side, rng: random.Random, name: str) -> None:
    """``copy.copy`` of one op, in the place of the op, with a parameter of its own."""
    names = [n for n, m in side.model.named_children() if m._parameters]
    if not names:
        return
    at = rng.choice(names)
    module = copy.copy(getattr(side.model, at))
    module._parameters = dict(module._parameters)
    setattr(side.model, at, module)


def pickled(side: Side, rng: random.Random, name: str) -> None:
    original, side.model = side.model, pickle.loads(pickle.dumps(side.model))
    _spoil(original)


def through_state_dict(assign: bool) -> Surgery:
    def surgery(side: Side, rng: random.Random, name: str) -> None:
        """A new module takes the state of the old one."""
        if any(parametrize.is_parametrized(m) or _is_pruned(m) for m in side.model.children()):
            return
        memory = io.BytesIO()
        torch.save(side.model.state_dict(), memory)
        memory.seek(0)
        needs = {n: p.requires_grad for n, p in side.model.named_parameters()}
        side.model = side.fresh()
        side.model.load_state_dict(torch.load(memory, weights_only=True), assign=assign)
        for n, p in side.model.named_parameters():
            p.requires_grad_(needs[n])

    return surgery


def load_into(assign: bool) -> Surgery:
    def surgery(side: Side, rng: random.Random, name: str) -> None:
        """The module that has run takes other values."""
        state = {n: side.parameter(p, f"{name}/{n}") for n, p in side.model.named_parameters()} | {
            n: b.clone() for n, b in side.model.named_buffers()
        }
        side.model.load_state_dict(state, assign=assign)

    return surgery


def broken_state(side: Side, rng: random.Random, name: str) -> None:
    """A piece of a stored weight is missing or has another form: refused, with nothing changed."""
    if not (side.of_package and side.case.stored):
        return
    state = side.model.state_dict()
    pieces = sorted(n for n in state if n.rpartition(".")[0].split(".")[-1].startswith("weight"))
    if not pieces:
        return
    at, how = rng.choice(pieces), rng.choice(["missing", "one row", "dtype", "longer", "bytes"])
    piece = state[at]
    if how == "missing":
        del state[at]
    else:
        state[at] = {
            "one row": piece[:1],
            "dtype": piece.view(torch.uint8).to(torch.int32),
            "longer": torch.cat([piece.view(torch.uint8)] * 2).view(piece.dtype),
            "bytes": piece.view(torch.uint8).reshape(-1).clone().fill_(123),
        }[how]
    if how != "missing" and state[at].shape == piece.shape and state[at].dtype == piece.dtype:
        return
    try:
        side.model.load_state_dict(state, assign=rng.random() < 0.3)
    except (RuntimeError, ValueError, TypeError) as error:
        if not re.search(r"must .*got|Missing key|Unexpected key", str(error), re.DOTALL):
            raise
    else:
        raise AssertionError(f"{at} {how} was loaded")


def _is_pruned(module: nn.Module) -> bool:
    return any(n.endswith("_orig") for n in module._parameters)


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)


# --- conversions ----------------------------------------------------------------------------------


def there_and_back(side: Side, rng: random.Random, name: str) -> None:
    """To a wider dtype and back, which makes no new parameters but other memory."""
    side.model.to(torch.float64).to(side.dtype)


def swapped_conversion(side: Side, rng: random.Random, name: str) -> None:
    """The same where conversions make new parameters."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        side.model.to(torch.float64).to(side.dtype)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def evaluate(side: Side, rng: random.Random, name: str) -> None:
    side.model.train(not side.model.training)


def descend(side: Side, rng: random.Random, name: str) -> None:
    """A step of an optimizer."""
    if any(op.options.get("accumulate_into_main_grad") for op in side.case.ops):
        return
    params = [p for p in side.model.parameters() if p.grad is not None]
    if params:
        torch.optim.SGD(params, lr=0.1, foreach=rng.random() < 0.5).step()


def by_position(side: Side, rng: random.Random, name: str) -> None:
    """A recipe that is given by position, where a flag is: refused."""
    if not side.of_package or side.case.recipe is None:
        return
    given = rng.choice([recipe(side.case), side.case.recipe])
    for scope in (fz.autocast, fz.quantized_model_init):
        try:
            with scope(given):
                pass
        except TypeError as error:
            if "recipe=" not in str(error):
                raise
        else:
            raise AssertionError(f"{scope.__name__}({given!r}) took it for a flag")


SURGERIES: dict[str, Surgery] = {
    "reregister": reregister,
    "replace": replace,
    "transposed": transposed,
    "set data": set_data,
    "copy to data": copy_to_data,
    "write in place": write_in_place,
    "from vector": from_vector,
    "flat data": flat_data,
    "tie": tie,
    "freeze": freeze,
    "prune identity": prune_identity,
    "prune by mask": prune_by_mask,
    "remove pruning": remove_pruning,
    "doubled": _parametrized(_register(Doubled)),
    "counted": _parametrized(_register(Counted)),
    "spectral norm": _parametrized(parametrizations.spectral_norm, 2),
    "weight norm": _parametrized(parametrizations.weight_norm, 2),
    "remove parametrization": remove_parametrization,
    "forward hook": _hook("register_forward_hook", watch, 0),
    "forward hook that changes": _hook("register_forward_hook", double_output, -1),
    "forward pre-hook that changes": _hook("register_forward_pre_hook", double_input, 0),
    "backward hook": _hook("register_full_backward_hook", watch, 0),
    "backward hook that changes": _hook("register_full_backward_hook", triple_grad_input, 0),
    "backward pre-hook that changes": _hook(
        "register_full_backward_pre_hook", triple_grad_output, -1
    ),
    "parameter hook": parameter_hook,
    "accumulated hook": accumulated_hook,
    "deepcopy": deep_copy,
    "shallow copy": shallow_copies,
    "pickle": pickled,
    "state dict": through_state_dict(False),
    "state dict, assigned": through_state_dict(True),
    "load": load_into(False),
    "load, assigned": load_into(True),
    "broken state": broken_state,
    "there and back": there_and_back,
    "there and back, new parameters": swapped_conversion,
    "evaluate": evaluate,
    "descend": descend,
    "recipe by position": by_position,
}


def names() -> Iterator[str]:
    return iter(SURGERIES)
