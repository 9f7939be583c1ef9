"""Quantized tensors in state dicts: plain tensors only, nothing pickled.

A parameter ``weight`` is saved as ``weight.values``, ``weight.scale`` (and column-wise ones, and
tensor scales, where there are any) and ``weight.format``, JSON as bytes. E8M0 scales are saved as
bytes, which every file format knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusible.recipes.rows import NumberFormat
from fusible.recipes.tensor import QuantizedTensor

_KEYS = {
    "rowwise_data": "values",
    "scale_inv": "scale",
    "tensor_scale": "tensor_scale",
    "columnwise_data": "columnwise_values",
    "columnwise_scale_inv": "columnwise_scale",
    "columnwise_tensor_scale": "columnwise_tensor_scale",
}
_DTYPES = {str(d): d for d in (torch.float32, torch.bfloat16, torch.float16)}


def tensor_state(q: QuantizedTensor) -> dict[str, Tensor]:
    """Return ``q`` as plain tensors, by suffix of the parameter's name."""
    state = {
        _KEYS[name]: piece.view(torch.uint8) if piece.dtype == torch.float8_e8m0fnu else piece
        for name, piece in q.pieces().items()
    }
    fmt = q.format
    facts = {
        "name": fmt.name,
        "element": fmt.element.name,
        "block": fmt.block,
        "scale": fmt.scale,
        "amax_epsilon": fmt.amax_epsilon,
        "dtype": str(q.dtype),
        "shape": tuple(q.shape),
    }
    state["format"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    return state


def tensor_from_state(state: Mapping[str, Tensor]) -> QuantizedTensor:
    """Undo ``tensor_state``; ValueError for a format this version does not know."""
    facts = json.loads(bytes(state["format"].tolist()).decode())
    try:
        fmt = NumberFormat.from_spelled(
            str(facts["name"]),
            facts["element"],
            facts["block"] or (),
            facts["scale"],
            float(facts["amax_epsilon"]),
        )
        dtype, shape = _DTYPES[facts["dtype"]], [int(n) for n in facts["shape"]]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"a saved format must be one of this version of fusible, got {facts}; "
            "load the checkpoint with the version that wrote it"
        ) from error
    pieces = {name: state[key] for name, key in _KEYS.items() if key in state}
    for name in ("scale_inv", "columnwise_scale_inv"):
        if name in pieces and fmt.scale_dtype == torch.float8_e8m0fnu:
            pieces[name] = pieces[name].view(fmt.scale_dtype)
    return QuantizedTensor.from_pieces(pieces, fmt, shape, dtype)


def register_state_hooks(module: nn.Module) -> None:
    """Make ``module`` save its own quantized parameters as plain tensors and load them again.

    What is loaded may be quantized or in high precision, whatever the parameter is.
    """
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        saved = state.get(prefix + name)
        if isinstance(parameter, QuantizedTensor) and isinstance(saved, QuantizedTensor):
            del state[prefix + name]
            parts = tensor_state(saved)
            state.update({f"{prefix}{name}.{suffix}": part for suffix, part in parts.items()})


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        start = f"{prefix}{name}."
        if f"{start}format" in state:
            parts = {
                suffix: state.pop(start + suffix)
                for suffix in (*_KEYS.values(), "format")
                if start + suffix in state
            }
            state[prefix + name] = tensor_from_state(parts)
