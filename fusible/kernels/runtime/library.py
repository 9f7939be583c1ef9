"""The ``torch.library`` ops of the kernels: ``fusible::...``, with what they equal in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusible.calls import is_direct
from fusible.kernels.runtime.flops import Formula, count_flops

# Kept alive for the life of the process: the registrations end with it.
_library = torch.library.Library("fusible", "DEF")


def define(
    schema: str,
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    flops: Formula | None = None,
) -> Callable[..., Any]:
    """Register the op ``fusible::<schema>`` and return the function that calls it.

    The function calls ``cuda`` itself where PyTorch's dispatcher would run nothing else, as
    `is_direct` finds from the first argument. Its keyword arguments are for such calls alone: what
    a schema cannot express, which the op goes without. ``flops`` gives the number of floating-point
    operations from the arguments, if the op multiplies.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key, implementation in (("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            _library.impl(name, implementation, key)
    torch.library.register_fake(f"fusible::{name}", fake, lib=_library)
    if flops is not None:
        count_flops(name, flops)
    op = getattr(torch.ops.fusible, name).default

    if cuda is None:
        return op

    def call(*args: Any, **direct_only: Any) -> Any:
        return cuda(*args, **direct_only) if is_direct(args[0]) else op(*args)

    return call
