"""Checkpoints as they are published, loaded into linears with the bits that they store."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fusible.arguments import check_bools
from fusible.integrations.checkpoint_layouts import (
    LAYOUTS,
    CheckpointLayout,
    decoded,
    in_format,
    joined_weights,
    layout_of,
    quantized_tensor,
    stacked_weights,
)
from fusible.ops import GroupedLinear
from fusible.ops.weights import WeightedOperation, weighted_ops
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import OperandData, QuantizedMatrix
from fusible.recipes.sharding import local
from fusible.recipes.tensor import QuantizedTensor

__all__ = ["LAYOUTS", "load_checkpoint"]

Names = Mapping[str, str | Sequence[str]]
"""By path of a linear, the name of its weight in a checkpoint, or those of its parts."""


def load_checkpoint(
    module: nn.Module,
    checkpoint: Mapping[str, Tensor],
    names: Names,
    *,
    prefix: str = "",
    glu_interleave_size: int | None = None,
    transposed: bool = False,
    requantize: bool = False,
) -> dict[str, str]:
    """Load weights and biases of linears in ``module`` from a checkpoint in one of ``LAYOUTS``.

    A weight that the module stores quantized gets the elements and scales of the checkpoint as they
    are, one in high precision their values, rounded once to its dtype. Values that would have to be
    rounded a second time are an error, unless ``requantize`` allows it. Everything is checked
    before anything is written; then linears are read and written one after the other, so that
    besides ``module`` and ``checkpoint`` there is memory for one weight at a time.

    Args:
        module: has the linears: `GroupedLinear`, `Linear` or `BasicLinear`.
        checkpoint: its entries by name, as ``safetensors.torch.load_file`` returns them; only those
            of ``names`` are read.
        names: by the path of each linear in ``module`` (``""`` for itself) the name of its weight
            in the checkpoint, without its ending: that of a module (``"experts.*.down_proj"``) or
            of a parameter (``"experts.gate_up_proj"``). ``*`` stands for the number of the expert;
            without it the weight of a `GroupedLinear` is one entry for all experts. A tuple
            (``("experts.*.gate_proj", "experts.*.up_proj")``) names the parts of a weight from its
            first output feature to the last.
        prefix: of all names.
        glu_interleave_size: parts alternate in blocks of so many output features, as the activation
            of that argument reads them; by default one part follows the other. An entry that holds
            all features is loaded as it is.
        transposed: entries in high precision are ``[..., in, out]``.
        requantize: round values again where the bits cannot be kept.

    Returns:
        What was done, by path: the layout, and whether bits were kept, values decoded, ...

    Raises:
        ValueError: entries are missing or unexpected, or have other shapes or dtypes; there is no
            such linear; values would be rounded a second time; ``glu_interleave_size`` without
            parts.
        TypeError: a flag is no bool, ``glu_interleave_size`` no int, or ``names`` no mapping.
    """
    check_bools("load_checkpoint", transposed=transposed, requantize=requantize)
    _check_names(names, glu_interleave_size)
    readers: list[_Reader] = []
    wrong: list[str] = []
    keys = sorted(checkpoint)
    for path, given in names.items():
        bases = [prefix + base for base in ([given] if isinstance(given, str) else given)]
        interleave = glu_interleave_size if len(bases) > 1 else None
        linear = _linear_at(module, path)
        reader = _Reader(path, *linear, checkpoint, keys, bases, interleave, transposed)
        readers.append(reader)
        try:
            weights = reader.read(on_meta=True)
            if not requantize:
                _check_rounding(reader, weights)
        except _Wrong as error:
            wrong += error.args
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}; nothing was loaded")
    return {reader.path: _load(reader, reader.read()) for reader in readers}


def _check_names(names: Names, size: int | None) -> None:
    """Raise unless ``names`` are names, and parts of some weight if ``glu_interleave_size`` is."""
    given = names.values() if isinstance(names, Mapping) else [None]
    parts = [[one] if isinstance(one, str) else one for one in given]
    if not all([
        isinstance(one, list | tuple) and one and all([isinstance(name, str) for name in one])
        for one in parts
    ]):  # fmt: skip
        raise TypeError(
            "names of load_checkpoint must map paths of linears to names in the checkpoint, or to "
            f'tuples of them, such as {{"": "experts.down_proj"}}, got {names!r:.80}'
        )
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"glu_interleave_size of load_checkpoint must be an int, got {size!r}")
    if all([len(one or ()) < 2 for one in parts]):
        raise ValueError(
            "names of load_checkpoint must have a tuple of parts with glu_interleave_size, which "
            f"interleaves these, got {dict(names)}; load an entry that holds gate and linear "
            "features without it, for an activation whose glu_interleave_size is that of the entry"
        )


class _Wrong(Exception):
    """Reasons to refuse a checkpoint, a sentence each."""


def _refuse(reasons: Sequence[str]) -> None:
    """Raise `_Wrong` if there are reasons."""
    if reasons:
        raise _Wrong(*reasons)


def _linear_at(module: nn.Module, path: str) -> tuple[nn.Module, WeightedOperation]:
    """The module at a path, and the linear that it is; ValueError if it is none."""
    holder = dict(module.named_modules()).get(path)
    ops = [] if holder is None else weighted_ops([holder])
    if holder is None or len(ops) != 1:
        known = [n for n, m in module.named_modules() if len(weighted_ops([m])) == 1]
        raise ValueError(
            f"names of load_checkpoint must be paths of linears of fusible, got {path!r}, "
            f"which is none; there are {', '.join(map(repr, known)) or 'none'}"
        )
    return holder, ops[0]


class _ReadWeights(NamedTuple):
    """The entries of a checkpoint for a linear."""

    layout: CheckpointLayout
    parts: list[OperandData]
    """From the first output feature to the last, ``[out, in]`` or ``[experts, out, in]``."""
    interleave: int | None
    bias: Tensor | None

    def whole(self) -> OperandData | None:
        """The parts as one weight; None where no tensor of their format has their values."""
        return joined_weights(self.parts, self.interleave)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values of the weight, rounded once to ``dtype``."""
        return _joined([decoded(part, dtype) for part in self.parts], self.interleave)

    def kept(self, fmt: NumberFormat) -> QuantizedMatrix | None:
        """The bits in the format of a parameter, None if values must be rounded."""
        whole = self.whole()
        return in_format(whole, fmt) if isinstance(whole, QuantizedMatrix) else None


def _joined(parts: Sequence[Tensor], interleave: int | None) -> Tensor:
    joined = joined_weights(parts, interleave)
    assert isinstance(joined, Tensor)
    return joined


_Entry = tuple[CheckpointLayout, OperandData, Tensor | None]
"""The layout, the weight and the bias under one name."""


@dataclass
class _Reader:
    """Reads the entries of one linear; `_Wrong` says what is wrong with them."""

    path: str
    holder: nn.Module
    """The module of that path, which has the parameters."""
    op: WeightedOperation
    checkpoint: Mapping[str, Tensor]
    keys: Sequence[str]
    """Sorted: a checkpoint may have more than 100000 entries, of which each base needs few."""
    bases: Sequence[str]
    interleave: int | None
    transposed: bool
    on_meta: bool = False
    memory: set[int] = field(default_factory=set)
    """The addresses of the memory of entries that were read."""

    @property
    def experts(self) -> int | None:
        """The number of experts of all processes, None of a dense linear."""
        if not isinstance(self.op, GroupedLinear):
            return None
        return self.op.num_groups * (self.op.expert_processes or 1)

    @property
    def weight(self) -> Tensor:
        """The first parameter that is a weight, or its local part."""
        return local(self.op.weights()[0])

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias."""
        if isinstance(self.op, GroupedLinear):
            return self.op.has_bias
        return getattr(self.holder, "bias", None) is not None

    def read(self, *, on_meta: bool = False) -> _ReadWeights:
        """The parts of the weight, checked; ``on_meta``, only scales have values."""
        self.on_meta = on_meta
        parts = [self._part(base) for base in self.bases]
        layouts = {layout for layout, _, _ in parts}
        if len(layouts) > 1:
            raise _Wrong(f"parts of {self.path} must be of one layout, got {_names(layouts)}")
        weights = [weight for _, weight, _ in parts]
        self._check_shapes(weights)
        biases = [bias.unsqueeze(-1) for _, _, bias in parts if bias is not None]
        wrong = [
            f"the bias of {base} must be of {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}"
            for base, (_, weight, bias) in zip(self.bases, parts, strict=True)
            if bias is not None and bias.shape != weight.shape[:-1]
        ]
        _refuse(wrong)
        bias = _joined(biases, self.interleave).squeeze(-1) if biases else None
        return _ReadWeights(parts[0][0], weights, self.interleave, bias)

    def _part(self, base: str) -> _Entry:
        """One part of the weight, and of the bias."""
        if "*" not in base:
            return self._entry(base)
        experts, found = self.experts, self._expert_numbers(base)
        if experts is None or found != set(range(experts)):
            raise _Wrong(
                f"{base} must be of {'no experts' if experts is None else f'{experts} experts'}"
                f", as {self.path or 'the module'} is, got "
                f"{f'the numbers {sorted(found)}' if found else 'none'}"
            )
        each: list[_Entry] = []
        wrong: list[str] = []
        for expert in range(experts):
            try:
                each.append(self._entry(base.replace("*", str(expert), 1)))
            except _Wrong as error:
                wrong += error.args
        _refuse(wrong)
        layouts = {layout for layout, _, _ in each}
        biases = [bias for _, _, bias in each if bias is not None]
        for shapes in {tuple(w.shape) for _, w, _ in each}, {tuple(b.shape) for b in biases}:
            if len(layouts) > 1 or len(shapes) > 1:
                got = ", ".join(map(str, sorted(shapes)))
                raise _Wrong(f"experts of {base} must be alike, got {got} in {_names(layouts)}")
        weight = stacked_weights([weight for _, weight, _ in each])
        return each[0][0], weight, torch.stack(biases) if biases else None

    def _entry(self, base: str) -> _Entry:
        """The weight and bias under one name."""
        layout, missing = layout_of(self.checkpoint, base)
        of_module = layout is None or layout.values.startswith(".")
        bias_name = f"{base}{'.' if of_module else '_'}bias"
        bias = self.checkpoint.get(bias_name)
        if self.has_bias and bias is None:
            missing = [*missing, bias_name]
        known = () if layout is None else (*layout.endings, *layout.unused)
        known = (*known, bias_name.removeprefix(base)) if self.has_bias else known
        extra = [key for key in self._under(base) if key.removeprefix(base) not in known]
        if layout is None and extra:
            got = ", ".join(f"{key} of {self.checkpoint[key].dtype}" for key in extra)
            raise _Wrong(f"{base} must be stored in one of LAYOUTS, got {got}")
        wrong = [self._missing(name, layout) for name in missing]
        wrong += [f"{name} must not be there" for name in extra]
        if layout is None or wrong:
            raise _Wrong(*wrong)
        entries = {ending: self.checkpoint[base + ending] for ending in layout.endings}
        try:
            weight = layout.read(entries)
        except (ValueError, RuntimeError) as error:
            raise _Wrong(f"{base} is not as {layout.name} has it: {error}") from error
        if self.on_meta:
            if isinstance(weight, QuantizedMatrix):
                weight = weight._replace(data=weight.data.to("meta"))
            else:
                weight = weight.to("meta")
            bias = None if bias is None else bias.to("meta")
        read = entries.values() if bias is None else (*entries.values(), bias)
        self.memory |= {entry.untyped_storage().data_ptr() for entry in read}
        if self.transposed and isinstance(weight, Tensor):
            weight = weight.mT
        return layout, weight, bias

    def _missing(self, name: str, layout: CheckpointLayout | None) -> str:
        """The message for an entry that is missing or not of the layout's dtype."""
        entry = self.checkpoint.get(name)
        if entry is None or layout is None:
            return f"{name} is missing"
        dtypes = " or ".join(map(str, layout.scale_dtypes))
        return f"{name} must be of {dtypes} in {layout.name}, got {entry.dtype}"

    def _under(self, base: str) -> Iterator[str]:
        """The entries whose names begin with that of a module or a parameter."""
        for key in self._beginning_with(base):
            rest = key.removeprefix(base)
            if rest[:1] in ("", ".") or re.fullmatch(r"_\w+", rest):
                yield key

    def _beginning_with(self, prefix: str) -> Iterator[str]:
        first = bisect_left(self.keys, prefix)
        rest = (self.keys[i] for i in range(first, len(self.keys)))
        return takewhile(lambda key: key.startswith(prefix), rest)

    def _expert_numbers(self, base: str) -> set[int]:
        before, _, after = base.partition("*")
        pattern = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}(?=[._]|$)")
        matches = map(pattern.match, self._beginning_with(before))
        return {int(match[1]) for match in matches if match}

    def _check_shapes(self, parts: Sequence[OperandData]) -> None:
        op, size = self.op, self.interleave
        lead = () if self.experts is None else (self.experts,)
        hint = "" if self.transposed else "; transposed=True takes entries [..., in, out]"
        shapes = [tuple(part.shape) for part in parts]
        wrong = [
            f"{base} must be of {(*lead, 'out', op.in_features)}, got {shape}{hint}"
            for base, shape in zip(self.bases, shapes, strict=True)
            if len(shape) != len(lead) + 2 or shape[:-2] != lead or shape[-1] != op.in_features
        ]
        _refuse(wrong)
        rows = [shape[-2] for shape in shapes]
        if sum(rows) != op.out_features:
            wrong.append(
                f"{' and '.join(self.bases)} must have {op.out_features} output features, got "
                f"{' + '.join(map(str, rows))}"
            )
        if size is not None and (len(set(rows)) > 1 or size < 1 or rows[0] % size):
            wrong.append(
                f"parts of {self.path} must have equally many output features, a multiple "
                f"of glu_interleave_size, to alternate in blocks of {size}, got {rows}"
            )
        _refuse(wrong)


def _names(layouts: set[CheckpointLayout]) -> str:
    return ", ".join(sorted(layout.name for layout in layouts))


@torch.no_grad()
def _load(target: _Reader, given: _ReadWeights) -> str:
    """Write a linear's weight and bias, as ``load_state_dict`` does; what was done.

    Parameters that were on the meta device do not get the memory of the checkpoint.
    """
    own = target.weight
    weight: Tensor
    if isinstance(own, QuantizedTensor):
        weight, what = _stored(given, own)
    else:
        first = given.parts[0]
        how = f"{'converted' if isinstance(first, Tensor) else 'decoded'} to {own.dtype}"
        if isinstance(first, Tensor) and first.dtype == own.dtype:
            how = "bits kept"
        weight, what = given.values(own.dtype), f"{given.layout.name}, {how}"
    state = {"weight": weight}
    if given.bias is not None:
        named = target.holder.named_parameters()
        dtypes = [p.dtype for name, p in named if name.rpartition(".")[2].startswith("bias")]
        state["bias"] = given.bias.to(dtypes[0]) if dtypes else given.bias
    assign = any([p.is_meta for p in target.holder.parameters()])
    if assign:
        state = {name: _unshared(t, target.memory) for name, t in state.items()}
    target.holder.load_state_dict(state, assign=assign)
    return what


def _unshared(t: Tensor, memory: set[int]) -> Tensor:
    """A tensor, or a copy, that is contiguous and in none of the allocations ``memory``."""
    if isinstance(t, QuantizedTensor):
        return t.with_pieces({name: _unshared(p, memory) for name, p in t.pieces().items()})
    own = t.is_contiguous() and t.untyped_storage().data_ptr() not in memory
    return t if own else t.clone(memory_format=torch.contiguous_format)


def _stored(given: _ReadWeights, own: QuantizedTensor) -> tuple[QuantizedTensor, str]:
    """A weight for a parameter that is stored quantized, and what was done to it."""
    source, name = given.parts[0], given.layout.name
    kept, columnwise = given.kept(own.format), own.columnwise_data is not None
    if kept is None or columnwise:
        values = given.values(torch.float32)
        made = QuantizedTensor.quantize(values, own.format, columnwise=columnwise)
        again = made.with_pieces(made.pieces(), dtype=own.dtype)
    if kept is None:
        how = "quantized" if isinstance(source, Tensor) else "quantized again"
        return again, f"{name}, {how} to {own.format.name}"
    quantized = quantized_tensor(kept, own.format, own.dtype)
    if columnwise:
        quantized = quantized.with_pieces(again.pieces() | quantized.pieces())
        return quantized, f"{name}, bits kept row-wise and quantized again column-wise"
    if isinstance(source, QuantizedMatrix) and source.format.element != own.format.element:
        return quantized, f"{name}, encoded as {own.format.name} with the same values"
    return quantized, f"{name}, bits kept"


def _check_rounding(target: _Reader, given: _ReadWeights) -> None:
    """Refuse to round values of a weight a second time; elements may be on the meta device."""
    own, first = target.weight, given.parts[0]
    if not isinstance(own, QuantizedTensor) or isinstance(first, Tensor):
        return
    source, stored = first.format, own.format
    if given.whole() is None:
        why = (
            "its parts have scales of their own for the whole matrix, or blocks that would be cut; "
            "keep the parts in linears of their own, or the weight in high precision"
        )
    elif given.kept(stored) is None:
        why = (
            f"the checkpoint has {source.scaling} ({source.name}), the module stores "
            f"{stored.scaling} ({stored.name}); build it with the recipe of the checkpoint's format"
        )
    elif own.columnwise_data is not None and stored.directional:
        why = (
            "the module stores a column-wise form too, which the checkpoint has not; store "
            'weights with usage="inference"'
        )
    else:
        return
    raise _Wrong(
        f"{target.path or 'the weight'} would be rounded a second time: {why}; or pass "
        "requantize=True"
    )
