"""``Sequential``: a list of modules in which runs of fusible ops execute through the fuser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fusible.fuser.plan import NotFused, Plan, joined
from fusible.fuser.registry import registry
from fusible.fuser.rules import Rule
from fusible.fuser.run import Run
from fusible.fuser.tracing import Alike, constant_when_traced
from fusible.ops import buffers
from fusible.ops.op import BasicOperation, FusibleOperation, channels, check_kwargs

OpKwargs = Mapping[nn.Module | int, dict[str, Any]]
Segment = Run | nn.Module


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` whose runs of fusible ops are planned, fused and run as one.

    Takes modules, one list (or another iterable) of modules, or one dict of them. Ordinary modules
    split the runs; nested Sequentials do not. An op (or nested Sequential) that carries forward or
    backward hooks runs by itself, so that they fire.

    Args:
        *modules: fusible ops and ordinary modules, a list of them, or a mapping from names to
            them.
        require: names of fusion rules that must fire; a plan without one raises ``NotFused`` with
            the reasons.

    Raises:
        TypeError: what is given is no module, or ``require`` is one name, not a list of them.
        ValueError: ``require`` names no rule.
    """

    # A slot, so that what copies ``__dict__`` (replicas) does not run the original's ops.
    __slots__ = ("_captured",)
    _captured: _Captured | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object with nothing in its slot."""
        made = super().__new__(cls)
        object.__setattr__(made, "_captured", None)
        return made

    def __init__(self, *modules: Any, require: Iterable[str] = ()) -> None:
        super().__init__()
        for name, module in _named(modules):
            self.add_module(name, module)
        if isinstance(require, str):
            raise TypeError(f"require must be a list of rules' names, got the string {require!r}")
        self.require = tuple(registry.rule(name).name for name in require)
        _sequentials.add(Sequential, self)

    # --- calling ---------------------------------------------------------------------------------

    def forward(self, input: Tensor, *extra_inputs: Any, op_kwargs: OpKwargs | None = None) -> Any:
        """Run the modules in order.

        Args:
            input: input of the first module.
            *extra_inputs: the ops' extra inputs, in order, less those fed by earlier ops, through
                channels or by name.
            op_kwargs: keyword arguments for single ops, by op or by index. A linear op that is the
                last of its run takes ``"output"``, one that is the first ``"grad_input"``: the
                tensor to write its output, or its input's gradient, to.

        Returns:
            The output, or a tuple of it and the extra outputs that the caller gets.

        Raises:
            TypeError: ``op_kwargs`` that are no mapping.
            ValueError: a wrong number of extra inputs, ``op_kwargs`` for no op of this module or
                that an op does not take, or a buffer for an op whose result may stay inside of a
                fusion.
        """
        x, rest = input, extra_inputs
        extra_outputs: list[Tensor] = []
        segments = self.segments()
        kwargs = None if op_kwargs is None else _by_op(self, segments, op_kwargs)
        if len(segments) == 1 and isinstance(run := segments[0], Run):
            of_ops = None if kwargs is None else [kwargs.get(op, {}) for op in run.ops]
            return run(x, *rest, kwargs=of_ops)
        wanted = sum(map(_num_extra_inputs, segments))
        if len(rest) != wanted:
            between = [type(module).__name__ for module in segments if not isinstance(module, Run)]
            raise ValueError(
                f"extra inputs must number {wanted}, got {len(rest)}; what ops hand to later ones "
                "does not pass other modules, nor ops with hooks, between them: here "
                f"{', '.join(between) or 'none'}"
            )
        for segment in segments:
            if isinstance(segment, Run):
                taken = segment.num_extra_inputs
                mine = None if kwargs is None else [kwargs.get(op, {}) for op in segment.ops]
                x = segment(x, *rest[:taken], kwargs=mine)
            else:
                taken = _num_extra_inputs(segment)
                x = segment(x, *rest[:taken], **(kwargs or {}).get(segment, {}))
            rest = rest[taken:]
            if isinstance(x, tuple) and hasattr(segment, "num_extra_inputs"):
                x, *more = x
                extra_outputs.extend(more)
        return (x, *extra_outputs) if extra_outputs else x

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs the caller passes."""
        return sum(_num_extra_inputs(segment) for segment in self.segments())

    @property
    def plan(self) -> Plan | None:
        """What the last call ran as, over all runs of ops; None before the first call."""
        plans = [getattr(segment, "plan", None) for segment in self.segments()]
        return joined([p for p in plans if isinstance(p, Plan)])

    # --- runs of ops -----------------------------------------------------------------------------

    def segments(self) -> tuple[Segment, ...]:
        """The runs of ops and the other modules, in order."""
        if torch.compiler.is_compiling():
            _flat(self)  # reads, and so guards, all that the segments depend on
            self._trace_capture()
        elif self._captured is None or not self._captured.holds():
            self._captured = _capture(self)
        return self._captured.segments  # type: ignore[union-attr]

    @constant_when_traced
    def _trace_capture(self) -> None:
        if self._captured is None or not self._captured.holds():
            self._captured = _capture(self)
        for other in _sequentials.others(Sequential, self):
            if other._captured is None and _form(other) == _form(self):
                other._captured = _capture(other)

    # --- list ------------------------------------------------------------------------------------

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return type(self)(*self, *other)

    def __mul__(self, times: int) -> Sequential:
        return type(self)(*super().__mul__(times))

    def __getstate__(self) -> dict[str, Any]:
        # Not the runs: a copy makes its own, of its own ops.
        return {**self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _sequentials.add(Sequential, self)


_sequentials: Alike[Sequential] = Alike()


def _named(modules: tuple[Any, ...]) -> Iterable[tuple[str, nn.Module]]:
    """The modules that a Sequential was given, with their names."""
    if len(modules) == 1 and not isinstance(modules[0], nn.Module):
        (given,) = modules
        if isinstance(given, Mapping):
            return given.items()
        if isinstance(given, Iterable):
            modules = tuple(given)
    for module in modules:
        if not isinstance(module, nn.Module):
            kind = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
            raise TypeError(
                "Sequential must be given modules, one list of modules, or one dict of modules, "
                f"got {kind:.80}"
            )
    return ((str(i), module) for i, module in enumerate(modules))


def _form(sequential: Sequential) -> tuple[Any, ...]:
    """What Sequentials that have the same segments share."""
    modules = [module for module, _ in _flat(sequential)]
    wires = [channels(module) for module in modules if isinstance(module, FusibleOperation)]
    return sequential.require, [type(module) for module in modules], wires


class _Captured(NamedTuple):
    """The segments of a Sequential, and what they were made from."""

    segments: tuple[Segment, ...]
    containers: tuple[tuple[Sequential, tuple[nn.Module, ...]], ...]
    hooks: tuple[Any, ...]
    hooked: tuple[bool, ...]

    def holds(self) -> bool:
        """Whether modules and the presence of hooks are as they were."""
        for m, then in self.containers:
            if tuple(m._modules.values()) != then:
                return False
        hooked = any(self.hooks) or any(self.hooked)
        return not hooked or tuple(map(bool, self.hooks)) == self.hooked


def _capture(sequential: Sequential) -> _Captured:
    containers = [m for m in sequential.modules() if isinstance(m, Sequential)]
    hooks = tuple(h for m in containers for child in m for h in _hooks(child))
    segments = _segments(_flat(sequential), sequential.require)
    _name_places(sequential, segments)
    return _Captured(
        segments,
        tuple((m, tuple(m)) for m in containers),
        hooks,
        tuple(map(bool, hooks)),
    )


def _name_places(sequential: Sequential, segments: Iterable[Segment]) -> None:
    """Tell the runs where their ops are in a Sequential."""
    paths = {
        op: name
        for name, module in sequential.named_modules()
        for op in getattr(module, "basic_ops", ())
    }
    for segment in segments:
        if isinstance(segment, Run):
            segment.paths = tuple(paths[op] for op in segment.ops)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """The dictionaries of hooks that a call of ``module`` would fire."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _flat(sequential: Sequential) -> list[tuple[nn.Module, bool]]:
    """The modules with nested Sequentials unfolded, each with whether it can be part of a run."""
    flat: list[tuple[nn.Module, bool]] = []
    for module in sequential:
        hooked = any([bool(hooks) for hooks in _hooks(module)])
        if type(module) is Sequential and not hooked and not module.require:
            flat.extend(_flat(module))
        else:
            flat.append((module, isinstance(module, FusibleOperation) and not hooked))
    return flat


def _segments(modules: list[tuple[nn.Module, bool]], require: Sequence[str]) -> tuple[Segment, ...]:
    """Consecutive fusible ops as runs, the other modules as they are."""
    grouped: list[list[BasicOperation] | nn.Module] = []
    for module, fusible in modules:
        if not (fusible and isinstance(module, FusibleOperation)):
            grouped.append(module)
            continue
        _check_owns_parameters(module)
        if grouped and isinstance(grouped[-1], list):
            grouped[-1].extend(module.basic_ops)
        else:
            grouped.append(list(module.basic_ops))
    rules = [registry.rule(name) for name in require]
    segments = tuple(Run(g, _fitting(g, rules)) if isinstance(g, list) else g for g in grouped)
    for rule in rules:
        if not any(isinstance(s, Run) and rule in s.require for s in segments):
            names = ", ".join(type(module).__name__ for module, _ in modules)
            raise NotFused(
                f"{rule.name} is required but no run of ops fits its pattern {rule}; the "
                f"modules are {names}"
            )
    return segments


def _fitting(ops: Sequence[BasicOperation], rules: Sequence[Rule]) -> list[Rule]:
    """The rules whose pattern fits somewhere in a run of ops."""
    return [rule for rule in rules if any(rule.fit(ops, at) for at in range(len(ops)))]


def _check_owns_parameters(op: FusibleOperation) -> None:
    """Refuse a fused op whose parameters no optimizer would find."""
    if not op.is_fused_op:
        return
    owned = {id(p) for p in op.parameters()}
    for part in op.basic_ops:
        if any(p is not None and id(p) not in owned for p in part._parameters.values()):
            raise ValueError(
                f"a Sequential must hold the basic ops of {type(op).__name__} themselves, which "
                "own the parameters, got the fused op; fused ops are made by the fuser"
            )


def _num_extra_inputs(segment: Segment) -> int:
    """Of a run, an op, a Sequential, or a module that wraps one, as a checkpoint does."""
    return getattr(segment, "num_extra_inputs", 0)


def _types(t: Any) -> str:
    """What ``t`` is, and what a mapping holds."""
    inside = f" of {sorted({type(v).__name__ for v in t.values()})}" if isinstance(t, dict) else ""
    return f"a {type(t).__name__}{inside}"


def _by_op(
    sequential: Sequential, segments: Sequence[Segment], op_kwargs: OpKwargs
) -> dict[nn.Module, dict[str, Any]]:
    """``op_kwargs`` by op, refused for what is no basic op of this module or takes no such."""
    if not isinstance(op_kwargs, Mapping) or not all(
        isinstance(kwargs, Mapping) for kwargs in op_kwargs.values()
    ):
        raise TypeError(
            "op_kwargs must map basic ops, or their indices, to their keyword arguments, such as "
            f'{{-1: {{"output": t}}}}, got {_types(op_kwargs)}'
        )
    ops: set[nn.Module] = set()
    for segment in segments:
        ops.update(segment.ops if isinstance(segment, Run) else (segment,))
    by_op: dict[nn.Module, dict[str, Any]] = {}
    for key, kwargs in op_kwargs.items():
        op = sequential[key] if isinstance(key, int) else key
        if isinstance(op, FusibleOperation) and len(op.basic_ops) == 1:
            (op,) = op.basic_ops
        if op not in ops or not isinstance(op, BasicOperation):
            parts = ""
            if isinstance(op, FusibleOperation) and op.is_fused_op:
                parts = f", which is {' + '.join(type(part).__name__ for part in op.basic_ops)}"
            raise ValueError(
                f"op_kwargs must be keyed by a basic op of this Sequential or its index, got "
                f"{f'index {key}, ' if isinstance(key, int) else ''}{type(op).__name__}{parts}"
            )
        check_kwargs(op, kwargs)
        by_op[op] = kwargs
    for segment in segments:
        run = segment.ops if isinstance(segment, Run) else (segment,)
        for name, at in zip(buffers.NAMES, (run[-1], run[0]), strict=True):
            if any(name in by_op.get(op, {}) for op in run if op is not at):
                raise ValueError(
                    f"op_kwargs must give {name!r} to the {'last' if at is run[-1] else 'first'} "
                    f"op of a run, here {type(at).__name__}, got it for another: what lies inside "
                    "of a run may not be computed as such"
                )
    return by_op
