"""How many floating-point operations the library ops take, for PyTorch's ``FlopCounterMode``.

As PyTorch counts: two for each multiplication of a matrix product, none for what is elementwise,
and by the sizes of the operands, so that rows past the last group count too (the values of ``ends``
are on the device). So does padding: operands of the SM100 kernels have groups of whole 256 rows,
those of FP8 weight gradients of whole 128.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., int]

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[str, Formula] = {}  # one an op


def count_flops(op: str, formula: Formula) -> None:
    """Let PyTorch count ``formula(*arguments)`` for each call of ``fusible::<op>``."""
    _formulas[op] = formula
    if _COUNTER in sys.modules:
        _register(op)


def _register(op: str) -> None:
    formula = _formulas[op]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(*args, **kwargs)

    register = sys.modules[_COUNTER].register_flop_formula
    register(getattr(torch.ops.fusible, op), get_raw=True)(flops)


class _WhenImported(MetaPathFinder):
    """Registers the formulas once PyTorch's counter is imported, which imports triton."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, whose loader registers the formulas after it."""
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: Any) -> None:
            load(module)
            for op in _formulas:
                _register(op)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenImported())


# --- formulas that ops share ----------------------------------------------------------------------


def product(x: Tensor, w: list[Tensor], *_: Any) -> int:
    """Operations of rows ``[M, K]`` times a matrix of their group, ``[N, K]`` or ``[K, N]``."""
    shape = w[0].shape
    return 2 * x.shape[0] * shape[-2] * shape[-1]


def stored_product(x: Tensor, w: list[Tensor], *_: Any) -> int:
    """The same with weights as they are stored, of which a byte may hold two numbers."""
    return 2 * x.numel() * w[0].shape[-2]


def wgrad(dy: Tensor, x: Tensor, *_: Any) -> int:
    """Operations of ``dy[rows of e].T @ x[rows of e]`` for each group e."""
    return 2 * dy.numel() * x.shape[1]
