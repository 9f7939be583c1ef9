"""The ``torch.library`` ops of the kernels: ``fusible::...``, with what they equal in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusible.kernels.flops import Formula, count_flops

# Kept alive for the life of the process: the registrations end with it.
_library = torch.library.Library("fusible", "DEF")


def define(
    schema: str,
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    flops: Formula | None = None,
) -> None:
    """Add the op ``fusible::<schema>`` with its implementations, of which some may come later.

    ``flops`` gives the number of floating-point operations from the arguments, if it multiplies.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key, implementation in (("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            _library.impl(name, implementation, key)
    torch.library.register_fake(f"fusible::{name}", fake, lib=_library)
    if flops is not None:
        count_flops(name, flops)
