"""Names of modules and ops, also of ops that replace a module of another project.

Such ops are not submodules of the module whose forward they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

ATTRIBUTE = "_fusible_block"
"""The attribute of a module that ops replace; in ``__dict__``, since it is no state of it."""


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()``, and after each module the ops that replace it, under its name."""
    for name, part in module.named_modules():
        yield name, part
        replacement = vars(part).get(ATTRIBUTE)
        if replacement is not None:
            yield from replacement.named_modules(prefix=name)


# Where modules that wrap another one hold it.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def path(root: str, name: str) -> str:
    """The name of a part of ``root``, without the names of wrappers."""
    return ".".join([root, *[part for part in name.split(".") if part and part not in _WRAPPED]])


def op_names(module: nn.Module) -> dict[Any, str]:
    """The path of each basic op in ``module``, which starts with the type of ``module``.

    Without the names of wrappers such as those of ``torch.compile`` and of checkpoints.
    """
    root = type(getattr(module, "_orig_mod", module)).__name__
    return {
        op: path(root, name)
        for name, part in named_modules(module)
        for op in getattr(part, "basic_ops", ())
    }
