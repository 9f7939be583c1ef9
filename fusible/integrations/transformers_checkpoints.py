"""``from_pretrained`` of checkpoints in ``LAYOUTS``: experts stored as they are, the rest decoded.

A module of its own, since its classes need those of transformers (5.23) to be defined.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
)
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fusible.integrations.checkpoint_layouts import (
    LAYOUTS,
    CheckpointLayout,
    decoded,
    joined_weights,
    layout_of,
    quantized_tensor,
    stacked_weights,
)
from fusible.integrations.transformers_experts import NAME
from fusible.recipes.matrix import OperandData, QuantizedMatrix
from fusible.recipes.tensor import QuantizedTensor

logger = logging.getLogger(__name__)

METHODS = NAME, "modelopt"
"""Values of ``quant_method``: what a user writes, and what ModelOpt does."""

_UNUSED = {ending for row in LAYOUTS for ending in row.unused}
_ENDINGS = tuple(dict.fromkeys([e for row in LAYOUTS for e in (*row.endings, *row.unused) if e]))
_FUSED = "gate_up_proj", "down_proj"
"""The weights of all experts as one parameter each."""


class CheckpointConfig(QuantizationConfigMixin):
    """``quantization_config`` of ``config.json``; the entries' dtypes say how they are stored."""

    def __init__(self, quant_method: str = NAME, **_: Any) -> None:
        self.quant_method: Any = quant_method
        self.dequantize = False


class CheckpointQuantizer(HfQuantizer):
    """Loads weights in any of ``LAYOUTS``.

    With ``experts_implementation="fusible"`` the weights of experts become quantized tensors with
    the bits of the checkpoint, ``[experts, out, in]`` and frozen. All others are decoded, and
    rounded once to the dtype of the model.
    """

    quantization_config: Any
    serialized_names = {  # noqa: RUF012 - declared by the base class
        "weight": [ending[1:] for ending in _ENDINGS if ending[0] == "."],
        "gate_up_proj": ["gate_up_proj_blocks", "gate_up_proj_scales"],
        "down_proj": ["down_proj_blocks", "down_proj_scales"],
    }
    keeps = False
    """Whether experts keep their bits."""

    def update_parallel_plan(self, model: Any, plan: Any) -> None:
        """Refuse to share weights among processes: there is no plan for their scales."""
        distributed = getattr(model.config, "distributed_config", None)
        for name in ("tp_size", "ep_size"):
            size = getattr(distributed, name, None) or 1
            if size > 1:
                raise ValueError(
                    f"{name} must be 1 for a checkpoint of quantized weights, got {size}; load it "
                    "in one process"
                )

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> Any:
        """Refuse scales of a layout that is not known, which transformers would leave out."""
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):
                continue
            with safe_open(file, "pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a mapping
                    weight, _, scale = name.rpartition(".")[2].rpartition("_scale")
                    if weight in _FUSED and scale in ("", "_inv"):
                        raise ValueError(
                            f"weights must be stored in one of LAYOUTS, got {name} in {file}; "
                            "dequantize the weight, or store each expert by itself"
                        )
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a parameter may get another shape: stored transposed, it does."""
        return _is_transposed(model, param_name)

    def get_load_operations(self) -> dict[str, Any]:
        """The first operations of the converters of the model's names."""
        return {"dequantize": Decode}

    def get_weight_conversions(self) -> list[Any]:
        """The converters of weights that no converter of the model has."""
        return [
            WeightConverter(list(names), name, [self._kept([Decode(self)])])
            for name, names in self.serialized_names.items()
        ]

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Let the model's converters read what is stored of a weight."""
        self.keeps = getattr(model.config, "_experts_implementation", None) == NAME
        self.quantization_config.dequantize = not self.keeps
        updated = super().update_weight_conversions(weight_conversions, model)
        for converter in updated:
            operations = getattr(converter, "operations", [])
            if operations and isinstance(operations[0], Decode):
                converter.operations = [self._kept(operations)]
        return updated

    def _kept(self, operations: list[Any]) -> Any:
        merges = all([isinstance(op, MergeModulelist | Concatenate) for op in operations[1:]])
        return Convert(operations, keeps=self.keeps and merges)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Tell peft, and whoever asks, of weights that are stored as ``[experts, out, in]``."""
        for module in model.modules():
            weights = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
            if weights and all([isinstance(p, QuantizedTensor) for p in weights]):
                module.is_transposed = False
        return model

    def is_serializable(self) -> bool:
        """Not in the layout that was read."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Decoded weights are trainable."""
        return True


class Decode(ConversionOps):
    """From entries by pattern of their names to weights, in the dtype of the parameter."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """The weights by pattern; see ``ConversionOps``."""
        model, name = kwargs["model"], kwargs["full_layer_name"]
        dtype = model.get_parameter_or_buffer(name).dtype
        made: dict[str, Any] = {}
        for pattern, layout, weights in _weights(input_dict):
            values = [decoded(weight, dtype) for weight in weights]
            if "." in pattern:
                made[pattern] = values
            elif layout.in_blocks and _is_transposed(model, name):
                made[name] = values[0].mT.contiguous()
            else:
                made[name] = values[0]
        return made


class Convert(ConversionOps):
    """The parameter of a weight: stored, if it ``keeps`` the bits, or what ``operations`` make."""

    def __init__(self, operations: Sequence[Any], *, keeps: bool) -> None:
        self.operations, self.keeps = operations, keeps
        self.hf_quantizer = operations[0].hf_quantizer  # so that no dtype is changed before

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """The parameter by name; see ``ConversionOps``."""
        model, name = kwargs["model"], kwargs["full_layer_name"]
        own = model.get_parameter_or_buffer(name)
        if self.keeps and own.dim() == 3:
            found = list(_weights(input_dict))
            whole = _whole([weights for _, _, weights in found])
            out_in = found[0][1].in_blocks or not _is_transposed(model, name)
            if whole is not None and out_in:
                kept = quantized_tensor(whole, whole.format, own.dtype)
                return {name: nn.Parameter(kept, requires_grad=False)}
            if found[0][1].format is not None:
                logger.warning("%s is decoded: no tensor of its format has all of its scales", name)
        collected: Any = input_dict
        for operation in self.operations:
            collected = operation.convert(collected, **kwargs)
        return collected


def _whole(parts: Sequence[list[OperandData]]) -> QuantizedMatrix | None:
    """All experts with all parts of their weights; None if no tensor of a format has them."""
    if not all([isinstance(w, QuantizedMatrix) for weights in parts for w in weights]):
        return None
    experts = [w[0] if w[0].data.dim() == 3 else stacked_weights(w) for w in parts]
    whole = joined_weights(experts, None)
    return whole if isinstance(whole, QuantizedMatrix) else None


def _is_transposed(model: Any, name: str) -> bool:
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def _weights(given: Mapping[str, Any]) -> Iterator[tuple[str, CheckpointLayout, list[OperandData]]]:
    """By pattern of name, the layout and the weights of entries, one for each that matches."""
    flat = CheckpointQuantizer.serialized_names["weight"]
    entries: dict[str, list[Tensor]] = {
        f".{name}" if name in flat else name: t if isinstance(t, list) else [t]
        for name, t in given.items()
    }
    ends = sorted(_ENDINGS, key=len, reverse=True)
    bases = dict.fromkeys([n[: -len(next(e for e in ends if n.endswith(e)))] for n in entries])
    for base in bases:
        own = {e: entries[base + e] for e in ends if base + e in entries}
        layout, missing = layout_of({base + e: tensors[0] for e, tensors in own.items()}, base)
        read = () if layout is None else layout.endings
        others = own.keys() - {*read, *_UNUSED}
        # Of all experts, whose entries are lists.
        kinds = {e: [*dict.fromkeys([t.dtype for t in tensors])] for e, tensors in own.items()}
        alike = len({len(own[e]) for e in read if e in own}) <= 1 and all(
            [len(kinds[e]) == 1 for e in read if e in own]
        )
        if layout is None or missing or others or not alike:
            got = ", ".join(
                f"{len(tensors)} {base + e} of {' and '.join(map(str, kinds[e]))}"
                for e, tensors in own.items()
            )
            raise ValueError(
                f"{base or 'a weight'} must be stored in one of LAYOUTS, all experts in the same, "
                f"got {got}"
            )
        weights = [
            layout.read({e: own[e][i] for e in layout.endings})
            for i in range(len(own[layout.values]))
        ]
        yield f"{base}.weight" if base and not layout.in_blocks else "", layout, weights


def register() -> None:
    """Register the quantizer under those of ``METHODS`` that transformers does not know."""
    for method in METHODS:
        if method not in AUTO_QUANTIZER_MAPPING:
            register_quantization_config(method)(CheckpointConfig)
            register_quantizer(method)(CheckpointQuantizer)
