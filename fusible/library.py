"""The ``torch.library`` ops ``fusible::...``, with what they equal in PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import islice
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusible.calls import is_direct, refuse_derivatives
from fusible.flops import Formula, count_flops

P = ParamSpec("P")
R = TypeVar("R")

# Kept alive for the life of the process: the registrations end with it.
_library = torch.library.Library("fusible", "DEF")
_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", Sequence[Tensor]: "Tensor[]", bool: "bool",
    int: "SymInt", int | None: "SymInt?", Sequence[int]: "int[]", torch.Size: "SymInt[]",
    float: "float", str: "str", torch.dtype: "ScalarType", torch.dtype | None: "ScalarType?",
}  # fmt: skip
_implementations: dict[str, list[Callable[..., Any]]] = {}  # one an op, for CUDA, the best first


def define(
    definition: Callable[P, R],
    fake: Callable[..., Any] | None = None,
    cuda: Sequence[Callable[..., Any]] = (),
    flops: Formula | None = None,
    name: str = "",
    tags: Sequence[torch.Tag] = (),
) -> Callable[P, R]:
    """Register ``definition`` as the op ``fusible::<name>``, by default its own; return its caller.

    The op has the signature of its definition: a NamedTuple stands for its fields, a `NumberFormat`
    for its constants, ``out`` is written to, and keyword-only arguments, which only a direct call
    uses, are left out. ``fake`` gives the results' shapes; an op without results has none. ``cuda``
    are the implementations for CUDA, the preferred one first (`implement` adds one). Each returns
    NotImplemented for arguments that it does not support; if none does, the definition runs, as it
    does on every other device. ``flops`` gives the number of floating-point operations from the
    arguments of the op, if it multiplies. ``tags`` tell the compiler what the op is.

    The function runs the implementation itself where PyTorch's dispatcher would run nothing else,
    as `is_direct` finds from the first tensor.
    """
    name, types = name or definition.__name__, get_type_hints(definition)
    parameters = [
        (p.name, p.default, types[p.name])
        for p in inspect.signature(definition).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    structs = [kind if _parts_of(kind) else None for *_, kind in parameters]
    known = tuple(inspect.signature(definition).parameters)
    nested = structs[0] is not None or parameters[0][2] == Sequence[Tensor]
    implementations = _implementations[name] = [*cuda, definition]

    def on_cuda(*args: Any) -> Any:
        results = (implementation(*args) for implementation in implementations)
        return next(result for result in results if result is not NotImplemented)

    @wraps(definition)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := [key for key in kwargs if key not in known]:
            raise TypeError(f"{name} has no argument {', '.join(unknown)}")
        if len(args) > len(parameters):
            raise TypeError(f"{name} takes {len(parameters)} arguments, got {len(args)}")
        first = args[0] if args else kwargs[parameters[0][0]]
        if is_direct(first[0] if nested else first):
            for implementation in implementations:
                result = implementation(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        values = [*args, *[kwargs.get(name, value) for name, value, _ in parameters[len(args) :]]]
        flat = _flattened(structs, values)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            refuse_derivatives(name, flat)
        return op(*flat)

    _library.define(_schema(name, parameters, types["return"]), tags=tuple(tags))
    _library.impl(name, _of_fields(definition, structs), "CompositeExplicitAutograd")
    _library.impl(name, _of_fields(on_cuda, structs), "CUDA")
    of_fakes = _of_fields(fake or _nothing, structs)
    torch.library.register_fake(f"fusible::{name}", of_fakes, lib=_library)
    if flops is not None:
        count_flops(name, flops)
    op = getattr(torch.ops.fusible, name).default
    return call


def _nothing(*_: object) -> None:
    """The fake of an op that only writes to its arguments, or only checks them."""


def implement(name: str, function: Callable[..., Any]) -> None:
    """Prefer ``function`` on CUDA to the other implementations of the op ``fusible::<name>``."""
    _implementations[name].insert(0, function)


def _parts_of(kind: Any) -> dict[str, Any]:
    """The names and types of what stands for an argument of this type; none if it does itself."""
    if hasattr(kind, "from_constants"):
        hints = get_type_hints(kind.from_constants)
        return {name: hint for name, hint in hints.items() if name != "return"}
    return get_type_hints(kind) if hasattr(kind, "_fields") else {}


def _flattened(structs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The arguments of the op: each value, or the fields of what stands for several."""
    flat: list[Any] = []
    for struct, value in zip(structs, values, strict=True):
        if struct is None:
            flat.append(value)
        else:
            flat.extend(value.as_constants() if hasattr(struct, "as_constants") else value)
    return flat


def _of_fields(function: Callable[..., Any], structs: Sequence[Any]) -> Callable[..., Any]:
    """``function``, of the arguments that the op takes."""
    made = [(getattr(kind, "from_constants", kind), len(_parts_of(kind))) for kind in structs]

    def run(*flat: Any) -> Any:
        given = iter(flat)
        return function(
            *[make(*islice(given, parts)) if parts else next(given) for make, parts in made]
        )

    return run if any(structs) else function


def _schema(name: str, parameters: Sequence[tuple[str, Any, Any]], returns: Any) -> str:
    arguments = []
    for argument, _, kind in parameters:
        parts = _parts_of(kind)
        arguments += [f"{_TYPES[of_part]} {argument}_{part}" for part, of_part in parts.items()]
        if not parts:
            written = "Tensor(a!)" if argument == "out" else "Tensor"
            arguments.append(f"{_TYPES[kind].replace('Tensor', written)} {argument}")
    kinds = get_type_hints(returns).values() if hasattr(returns, "_fields") else get_args(returns)
    results = "Tensor" if returns is Tensor else f"({', '.join(_TYPES[kind] for kind in kinds)})"
    return f"{name}({', '.join(arguments)}) -> {results}"
