"""The facts of each op in a run: what it declares, and dtypes of the tensors that it gets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fusible.fuser.context import OperationContext, call_fuser_forward
from fusible.fuser.fakes import restoring
from fusible.fuser.plan import Facts, GradNeeds, TensorFacts, dtype_name, facts_of_op
from fusible.fuser.plan_key import PlanKey
from fusible.fuser.registry import is_ours
from fusible.fuser.rules import Rule
from fusible.fuser.target import Target
from fusible.fuser.wiring import CALLER, Wiring

logger = logging.getLogger(__name__)

_ROWS, _FEATURES = 4, 64  # of an input, where no parameter says them


class Dtypes(NamedTuple):
    """The dtypes of an op's inputs and parameters; None where it is not known."""

    input: torch.dtype | None
    extra_inputs: tuple[torch.dtype | None, ...]
    params: tuple[torch.dtype, ...]
    autocast: torch.dtype | None  # of `torch.autocast`, None outside it


def autocast_to(dtype: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """The dtype that ops cast a tensor of ``dtype`` to under ``torch.autocast``; FP64 stays."""
    return dtype if autocast is None or dtype == torch.float64 else autocast


def facts_of_ops(
    ops: Sequence[Any],
    declared: Sequence[dict[str, Any]],
    wiring: Wiring,
    key: PlanKey,
    target: Target,
    grad: Sequence[GradNeeds],
    rules: Sequence[Rule],
) -> Facts:
    """The facts of each op for conditions: what it declares, and its tensors."""
    inputs = key.facts(target)
    device = inputs[0].device
    made: list[SimpleNamespace] = []
    # Else nothing reads them.
    derive = any(op.kernel_rows for op in ops) or any(any(rule.matches(ops)) for rule in rules)
    propagated = _infer_dtypes(ops, wiring, key, derive)
    for i, (op, facts, (given, output)) in enumerate(zip(ops, declared, propagated, strict=True)):
        extra = {}
        for slot, (producer, k) in enumerate(wiring.sources[i]):
            dtype, source = dtype_name(given.extra_inputs[slot]), f"op {producer} slot {k}"
            inside = TensorFacts(dtype, device, None, grad[i].extra_inputs[slot], source)
            extra[op.extra_input_name(slot)] = inputs[1 + k] if producer == CALLER else inside
        own = TensorFacts(dtype_name(given.input), device, None, grad[i].input, f"op {i - 1}")
        computes = dtype_name(given.input if output is None else output)
        param_dtype = dtype_name(given.params[0]) if given.params else None
        x = inputs[0] if i == 0 else own
        made.append(facts_of_op(facts, extra, grad[i], x, computes, param_dtype))
    return tuple(made)


def _infer_dtypes(
    ops: Sequence[Any], wiring: Wiring, key: PlanKey, derive: bool
) -> Iterator[tuple[Dtypes, torch.dtype | None]]:
    """The dtypes of each op's inputs, and of its output; ``derive`` those that no op declares."""
    dtypes: list[torch.dtype | None] = [dtype for dtype, *_ in key.inputs]
    x, *callers = dtypes
    params = key.of_params(key.param_dtypes)
    made: list[Sequence[torch.dtype | None]] = []
    for op, sources, own in zip(ops, wiring.sources, params, strict=True):
        extra = [callers[k] if p == CALLER else made[p][k] for p, k in sources]
        of_tensors = Dtypes(x, tuple(extra), tuple(own), key.autocast_dtype)
        if declares_dtypes(type(op)):
            x, *outputs = op.output_dtypes(of_tensors)
        elif derive:
            x, *outputs = _derived_dtypes(op, x, extra, key.autocast_dtype)
        else:
            x, *outputs = (None,) * (1 + op.num_extra_outputs)
        made.append(outputs)
        yield of_tensors, x


def _derived_dtypes(
    op: Any,
    input_dtype: torch.dtype | None,
    extra_dtypes: Sequence[torch.dtype | None],
    autocast: torch.dtype | None,
) -> tuple[torch.dtype | None, ...]:
    """The dtypes of the output and of the extra outputs of an op for inputs of these dtypes.

    Its forward runs on fake tensors of some shapes, as it would without gradients and outside of a
    recipe. All are None where that does not work, or where a tensor without
    dimensions would be promoted differently.
    """
    unknown = (None,) * (1 + op.num_extra_outputs)
    floats = {t for t in extra_dtypes if t is None or t.is_floating_point}
    if input_dtype is None or floats - {input_dtype}:
        return unknown
    stored = [*op.parameters(), *op.buffers()]
    sizes = [size for t in stored for size in reversed(t.shape)]
    device = stored[0].device if stored else torch.device("cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for size, extra_dims in product(
        dict.fromkeys([*sizes, _FEATURES]), (2, 1)[: 1 + bool(extra_dtypes)]
    ):
        try:
            with (
                _disable_current_modes(),  # such as torch.export's, which would record it
                restoring(op.modules(), mode, all_attributes=True),
                torch.no_grad(),
            ):
                x, *extra = [
                    torch.empty((_ROWS, size)[:dims], dtype=dtype, device=device)
                    for dims, dtype in ((2, input_dtype), *[(extra_dims, t) for t in extra_dtypes])
                ]
                return _forward_dtypes(op, x, extra, autocast)
        except Exception as error:  # it wants another shape, or values
            logger.debug("%s does not run on fake tensors: %r", type(op).__name__, error)
    return unknown


def _forward_dtypes(
    op: Any, x: Tensor, extra: Sequence[Tensor], autocast: torch.dtype | None
) -> tuple[torch.dtype | None, ...]:
    params = op.own_parameters()
    needs = GradNeeds(False, False, (False,) * len(params), (False,) * len(extra))
    ctx = OperationContext(needs, None, None if op.handles_autocast else autocast, params)
    with ctx.autocast(x.device.type):
        output, (outputs,) = call_fuser_forward(op, [ctx], x, [tuple(extra)])
    return (output.dtype, *[None if t is None else t.dtype for t in outputs])


def gradient_needs(ops: Sequence[Any], wiring: Wiring, key: PlanKey) -> tuple[GradNeeds, ...]:
    """The gradients that each op must compute, from what requires one."""
    upstream, *callers = [key.grad_enabled and requires for _, _, requires in key.inputs]
    needs: list[GradNeeds] = []
    params = key.of_params(key.params_require_grad)
    for op, of_op, sources in zip(ops, params, wiring.sources, strict=True):
        own = op.params_needed(tuple(key.grad_enabled and requires for requires in of_op))
        extra = tuple(callers[k] if p == CALLER else needs[p].requires_grad for p, k in sources)
        requires_grad = upstream or any(own) or any(extra)
        needs.append(GradNeeds(requires_grad, upstream, own, extra))
        upstream = requires_grad
    return tuple(needs)


def features_read(ops: Sequence[Any], wiring: Wiring, rules: Iterable[Rule]) -> tuple[int, ...]:
    """The inputs of a run whose ``features`` are read by a condition.

    Of a rule whose pattern fits, or of a row of kernels.
    """
    callers = [
        {
            **({"input": 0} if i == 0 else {}),
            **{op.extra_input_name(s): 1 + k for s, (p, k) in enumerate(of_op) if p == CALLER},
        }
        for i, (op, of_op) in enumerate(zip(ops, wiring.sources, strict=True))
    ]
    fits = [(v, *found) for rule in rules for found in rule.matches(ops) for v in rule.variants]
    rows = [(row, i, {"op": op}) for i, op in enumerate(ops) for row in op.kernel_rows]
    read: set[int] = set()
    for tried, at, bound in (*fits, *rows):
        present = [name for name, op in bound.items() if op is not None]
        for path in tried.paths:
            names, i = path.names, at
            if names and names[0] in present:
                names, i = names[1:], at + present.index(names[0])
            if not names:  # the op with all its tensors
                read.update(callers[i].values())
            elif names[0] in callers[i] and names[1:] in ((), ("features",)):
                read.add(callers[i][names[0]])
    return tuple(sorted(read))


def declares_dtypes(kind: type) -> bool:
    """Whether ``output_dtypes`` is about this class: not where a user's own computes otherwise."""
    classes = kind.__mro__
    first = next(i for i, c in enumerate(classes) if is_ours(c))
    names = {name for c in classes[:first] for name in vars(c) if not name.startswith("__")}
    if "output_dtypes" in names or "computes_as" in vars(kind):
        return True
    return not any(callable(getattr(classes[first], name, None)) for name in names)
