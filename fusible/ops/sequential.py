"""``Sequential``: a list of modules in which runs of fusible ops execute through the fuser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fusible.fuser.memory import check_buffers
from fusible.fuser.partition import Part, Partition, run_parts
from fusible.fuser.plan import Plan, joined
from fusible.fuser.registry import registry
from fusible.fuser.run import Run
from fusible.fuser.tracing import WeakGroups, constant_when_traced
from fusible.fuser.user_steps import kind_of
from fusible.fuser.wiring import by_name
from fusible.ops import buffers
from fusible.ops.channels import channels
from fusible.ops.hooks import HOOKS, PatchesCounted, patches, why_called
from fusible.ops.linear import Linear
from fusible.ops.op import BasicOperation, FusibleOperation, check_kwargs
from fusible.ops.sequential_partition import ForeignModule, Member, partition_of, run_boundaries

OpKwargs = Mapping[nn.Module | int, dict[str, Any]]


class Sequential(PatchesCounted, nn.Sequential):
    """``torch.nn.Sequential`` whose runs of fusible ops are planned, fused and run as one.

    Takes modules, one list (or another iterable) of modules, or one dict of them. Ordinary modules
    split the runs; nested Sequentials do not. An op (or nested Sequential) that has hooks, is
    compiled by itself or has another ``forward`` is called, so that these take effect. Channels and
    names of extra tensors pass whatever splits the runs: the extra inputs and outputs of a
    Sequential do not depend on it.

    A call takes extra inputs in order, or by name: in ``mlp(x, split_sizes=s, scales=p)`` each
    feeds all extra inputs of its name.

    Args:
        *modules: fusible ops and ordinary modules, a list of them, or a mapping from names to
            them.
        require: names of fusion rules that must fire; a plan without one raises ``NotFused`` with
            the reasons.

    Raises:
        TypeError: what is given is no module, or ``require`` is one name, not a list of them.
        ValueError: ``require`` names no rule.
    """

    __slots__ = ("_captured", "_known")
    slot_values: ClassVar[Mapping[str, Any]] = {"_captured": None, "_known": ()}
    _captured: _Captured | None
    _known: tuple[_Captured, ...]

    def __init__(self, *modules: Any, require: Iterable[str] = ()) -> None:
        super().__init__()
        for name, module in _named(modules):
            self.add_module(name, module)
        if isinstance(require, str):
            raise TypeError(f"require must be a list of rules' names, got the string {require!r}")
        self.require = tuple(dict.fromkeys(registry.rule(name).name for name in require))
        _sequentials.add([Sequential], self)

    # --- calling ---------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Any,
        op_kwargs: OpKwargs | None = None,
        _partition: Partition | None = None,
        **named: Any,
    ) -> Any:
        """Run the modules in order.

        Args:
            input: input of the first module.
            *extra_inputs: the ops' extra inputs, in order, less those fed by earlier ops, through
                channels or by name.
            op_kwargs: keyword arguments for single ops, by op or by index. A linear op that is the
                last of its run takes ``"output"``, one that is the first ``"grad_input"``: the
                tensor to write its output, or its input's gradient, to.
            **named: extra inputs by name, each for all extra inputs of its name, where they are not
                given in order.

        Returns:
            The output, or a tuple of it and the extra outputs that the caller gets.

        Raises:
            TypeError: ``op_kwargs`` that are no mapping.
            ValueError: extra inputs that are missing, too many, unknown or given twice,
                ``op_kwargs`` for no op of this module or that an op does not take, or a buffer for
                an op whose result may stay inside of a fusion.
        """
        partition = self._current_partition() if _partition is None else _partition
        if named:
            op_name = type(self).__name__
            extra_inputs = by_name(partition.wiring.names, extra_inputs, named, op_name)
        kwargs = None if op_kwargs is None else _by_op(self, partition, op_kwargs)
        if partition.single_run is not None:
            of_ops = None if kwargs is None else [kwargs.get(op, {}) for op in partition.ops]
            return partition.single_run(input, *extra_inputs, kwargs=of_ops)
        if len(extra_inputs) != len(partition.wiring.names):
            partition.wiring.check_number(partition.ops, len(extra_inputs))
        modules = tuple(self) if kwargs or partition.written else ()
        if kwargs and not torch.compiler.is_compiling():
            check_buffers(tuple(kwargs), (input, *extra_inputs), tuple(kwargs.values()), modules)
        call = partial(_call_part, partition, kwargs)
        return run_parts(partition, (input, *extra_inputs), call, modules)

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs the caller passes."""
        return len(self._current_partition().wiring.names)

    @property
    def num_extra_outputs(self) -> int:
        """How many extra outputs the caller gets."""
        return len(self._current_partition().wiring.public)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call, over all runs of ops; None before the first call."""
        plans = _plans(self._current_partition())
        return joined([p for p in plans if isinstance(p, Plan)])

    # --- runs of ops -----------------------------------------------------------------------------

    def parts(self) -> tuple[Run | nn.Module, ...]:
        """The runs of ops and the other modules, in order."""
        return tuple(part.call for part in self._current_partition().parts)

    @property
    def as_sequential(self) -> Sequential:
        """The module itself, also where it is asked of a wrapper that passes attributes on."""
        return self

    def run_boundaries(self) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
        """Modules between runs in the last call, why each was called, and the rules it blocked."""
        return [] if self._captured is None else run_boundaries(self._captured.partition)

    def _current_partition(self) -> Partition:
        if torch.compiler.is_compiling():
            self._trace_capture()  # which makes a copy's parts, as no tracer can
            _read_hooks(self)  # and so guards them
        elif self._captured is None or not self._captured.holds():
            self._capture()
        return self._captured.partition  # type: ignore[union-attr]

    @constant_when_traced
    def _trace_capture(self) -> None:
        if self._captured is None or not self._captured.holds():
            self._capture()
        form = self._captured.form  # type: ignore[union-attr]
        for other in _sequentials.others([Sequential], self):
            if other._captured is None and _form(other) == form:
                other._capture()

    def _capture(self) -> None:
        """Divide this Sequential, as before if it was so before.

        Plans outlive a hook, and so do the recipes of forwards, which a checkpoint that runs one
        again asks its runs for.
        """
        form = _form(self)
        known = [c for c in self._known if c.has_same_modules()]
        partition = next((c.partition for c in known if c.form == form), None)
        if partition is None:
            partition = partition_of(_members(self), self.require)
            _name_places(self, partition)
        containers = [m for m in self.modules() if isinstance(m, Sequential)]
        called = [module for m in containers for child in m for module in _with_parts(child)]
        hooks = [getattr(module, name) for module in called for name in HOOKS]
        hooks.extend(held for held, _ in _GLOBAL_HOOKS)
        self._captured = _Captured(
            partition,
            form,
            tuple((m, tuple(m)) for m in containers),
            tuple(hooks),
            tuple(map(bool, hooks)),
            patches.count,
        )
        self._known = (*[c for c in known if c.form != form][-_MAX_KNOWN:], self._captured)

    # --- list ------------------------------------------------------------------------------------

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        require = (*self.require, *getattr(other, "require", ()))
        return type(self)(*self, *other, require=require)

    def __iadd__(self, other: Iterable[nn.Module]) -> Self:
        self.extend(other)
        return self

    def __mul__(self, times: int) -> Sequential:
        return type(self)(*super().__mul__(times), require=self.require)

    def __getstate__(self) -> dict[str, Any]:
        # Not the runs: a copy makes its own, of its own ops.
        return {**self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _sequentials.add([Sequential], self)


_sequentials: WeakGroups[Sequential] = WeakGroups()


def _named(modules: tuple[Any, ...]) -> Iterable[tuple[str, nn.Module]]:
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


# --- capture -------------------------------------------------------------------------------------

# What a call of any module fires.
_GLOBAL_HOOKS = [(vars(torch_module)[f"_global{name}"], words) for name, words in HOOKS.items()]


class _Captured(NamedTuple):
    """How a Sequential divides, and what that was made from."""

    partition: Partition
    form: tuple[Any, ...]
    containers: tuple[tuple[Sequential, tuple[nn.Module, ...]], ...]
    hooks: tuple[Any, ...]
    hooked: tuple[bool, ...]
    patches: int

    def holds(self) -> bool:
        """Whether modules, the presence of hooks and what is called are as they were."""
        if not self.has_same_modules():
            return False
        hooked = any(self.hooks) or any(self.hooked)
        if hooked and tuple(map(bool, self.hooks)) != self.hooked:
            return False
        return self.patches == patches.count

    def has_same_modules(self) -> bool:
        """Whether all Sequentials contain what they did."""
        return all([tuple(m._modules.values()) == then for m, then in self.containers])


# How many divisions of a Sequential are cached besides the one in use: for other hooks.
_MAX_KNOWN = 7


def _name_places(sequential: Sequential, partition: Partition) -> None:
    """Tell the runs where their ops are in a Sequential."""
    paths = {
        op: name
        for name, module in sequential.named_modules()
        for op in getattr(module, "basic_ops", ())
    }
    for part in partition.parts:
        if isinstance(part.call, Run):
            part.call.op_names = tuple(paths[op] for op in part.call.ops)
        if part.partition is not None:
            _name_places(sequential, part.partition)


def _read_hooks(sequential: Sequential) -> None:
    """Read, under the tracer, whether modules have hooks, or a forward of their own."""
    for held, _ in _GLOBAL_HOOKS:
        bool(held)
    for module in sequential:
        for called in _with_parts(module):
            _ = called.forward
            for name in HOOKS:
                bool(getattr(called, name))
        if type(module) is Sequential:
            _read_hooks(module)


def _with_parts(module: nn.Module) -> tuple[nn.Module, ...]:
    """A module and, where it is made of ops that are no modules of its tree, these."""
    return (module, *[op for op in getattr(module, "basic_ops", ()) if op is not module])


def _form(sequential: Sequential) -> tuple[Any, ...]:
    """A key that is equal for Sequentials that divide alike."""

    def of(members: Sequence[Member]) -> list[Any]:
        return [(type(m.module), m.why, m.require, of(m.inside), channels(m.ops)) for m in members]

    return sequential.require, of(_members(sequential))


def _members(sequential: Sequential) -> tuple[Member, ...]:
    """The modules, with nested Sequentials unfolded."""
    return tuple(member for module in sequential for member in _unfolded(module))


def _unfolded(module: nn.Module) -> Iterator[Member]:
    why = _why_no_part(module)
    nested = getattr(module, "as_sequential", None)  # also of one inside of a wrapper
    if isinstance(nested, Sequential) and not _has_own_forward(nested):
        inside = _members(nested)
        if why is None:
            yield from inside
        else:
            ops = tuple(op for member in inside for op in member.ops)
            yield Member(module, ops, why, inside, nested.require)
        return
    called = _innermost(module)
    ops = getattr(called, "basic_ops", ())
    if ops and all(isinstance(op, BasicOperation) for op in ops):
        _check_owns_parameters(called)
        of_parts = [why_called(op) for op in ops]
        if why is None and any(of_parts):
            yield from (Member(op, (op,), of) for op, of in zip(ops, of_parts, strict=True))
        else:
            yield Member(module, tuple(ops), why)
    else:
        ops = (ForeignModule(module),) if hasattr(module, "num_extra_inputs") else ()
        yield Member(module, ops, why or "is an ordinary module")


def _innermost(module: nn.Module) -> nn.Module:
    """The module that peft's wrappers around it call; they pass no attributes on."""
    while not hasattr(module, "basic_ops") and isinstance(
        inner := getattr(module, "base_layer", None), nn.Module
    ):
        module = inner
    return module


def _why_no_part(module: nn.Module) -> str | None:
    """Why ``module`` is called, and no part of a run; None if it is one."""
    if (why := why_called(module)) is not None:
        return why
    for held, words in _GLOBAL_HOOKS:
        if held:
            return f"has {words}, as all modules"
    if not isinstance(module, FusibleOperation | Sequential):
        wraps = hasattr(_innermost(module), "basic_ops") or hasattr(module, "as_sequential")
        return "is a wrapper of ops" if wraps else "is an ordinary module"
    if _has_own_forward(module):
        return "has a forward of its own"
    if isinstance(module, Sequential) and module.require:
        return "requires rules"
    is_derived = isinstance(module, Sequential) and type(module) is not Sequential
    return "is a subclass of Sequential" if is_derived else None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether only a call of an op or of a Sequential runs what is its own."""
    forwards = (FusibleOperation.forward, Linear.forward, Sequential.forward)
    return type(module).forward not in forwards or "forward" in vars(module)


def _check_owns_parameters(op: Any) -> None:
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


# --- execution -----------------------------------------------------------------------------------


def _call_part(
    partition: Partition,
    kwargs: dict[nn.Module, dict[str, Any]] | None,
    part: Part,
    x: Any,
    inputs: list[Any],
) -> Any:
    """Call a part with its input and extra inputs; its output, with extra outputs if it has any."""
    ops = partition.ops[part.ops]
    if isinstance(part.call, Run):
        of_ops = None if kwargs is None else [kwargs.get(op, {}) for op in ops]
        return part.call(x, *inputs, kwargs=of_ops)
    given: dict[str, Any] = {}
    if part.partition is not None:
        given["_partition"] = part.partition
    own = {op: kwargs[op] for op in ops if op in kwargs} if kwargs else {}
    if own and part.nested:
        given["op_kwargs"] = own
    elif own:
        given = own[ops[0]]
    returned, count = part.call(x, *inputs, **given), part.num_outputs
    if count and (not isinstance(returned, tuple | list) or len(returned) != 1 + count):
        raise TypeError(
            f"a call of {type(part.call).__name__}, which {part.why}, must return its output "
            f"and {count} extra outputs, got {kind_of(returned)}; a hook may replace "
            "them, not leave them out"
        )
    return returned


def _plans(partition: Partition) -> list[Any]:
    plans: list[Any] = []
    for part in partition.parts:
        nested = part.partition
        plans.extend([getattr(part.call, "plan", None)] if nested is None else _plans(nested))
    return plans


def _by_op(
    sequential: Sequential, partition: Partition, op_kwargs: OpKwargs
) -> dict[nn.Module, dict[str, Any]]:
    """``op_kwargs`` by op, refused for what is no basic op of this module or takes no such."""
    if not isinstance(op_kwargs, Mapping) or not all(
        isinstance(kwargs, Mapping) for kwargs in op_kwargs.values()
    ):
        values = op_kwargs.values() if isinstance(op_kwargs, Mapping) else ()
        of = f" of {sorted({type(value).__name__ for value in values})}" if values else ""
        raise TypeError(
            "op_kwargs must map basic ops, or their indices, to their keyword arguments, such as "
            f'{{-1: {{"output": t}}}}, got a {type(op_kwargs).__name__}{of}'
        )
    by_op: dict[nn.Module, dict[str, Any]] = {}
    for key, kwargs in op_kwargs.items():
        op = sequential[key] if isinstance(key, int) else key
        is_module = isinstance(op, nn.Module)
        parts: Sequence[Any] = getattr(_innermost(op), "basic_ops", ()) if is_module else ()
        op = parts[0] if len(parts) == 1 else op
        if op not in partition.ops or not isinstance(op, BasicOperation):
            of = ""
            if len(parts) > 1:
                of = f", which is {' + '.join(type(part).__name__ for part in parts)}"
            raise ValueError(
                f"op_kwargs must be keyed by a basic op of this Sequential or its index, got "
                f"{f'index {key}, ' if isinstance(key, int) else ''}{type(op).__name__}{of}"
            )
        check_kwargs(op, kwargs)
        if kwargs and (places := sum([one is op for one in partition.ops])) > 1:
            raise ValueError(
                f"an op with op_kwargs must be once in its Sequential, got {type(op).__name__} "
                f"{places} times; use two ops with one weight"
            )
        by_op[op] = kwargs
    for part in partition.parts:
        run = partition.ops[part.ops]
        if part.nested or not run:
            continue
        for name, at in zip(buffers.NAMES, (run[-1], run[0]), strict=True):
            if any(name in by_op.get(op, {}) for op in run if op is not at):
                raise ValueError(
                    f"op_kwargs must give {name!r} to the {'last' if at is run[-1] else 'first'} "
                    f"op of a run, here {type(at).__name__}, got it for another: what is inside "
                    "of a run may not be computed as such"
                )
    return by_op
