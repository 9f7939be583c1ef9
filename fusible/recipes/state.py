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

from fusible.recipes.formats import HIGH_PRECISION, NumberFormat
from fusible.recipes.sharding import is_sharded, local, shard, sharded_as
from fusible.recipes.tensor import QuantizedTensor

_KEYS = {
    "rowwise_data": "values",
    "scale_inv": "scale",
    "tensor_scale": "tensor_scale",
    "columnwise_data": "columnwise_values",
    "columnwise_scale_inv": "columnwise_scale",
    "columnwise_tensor_scale": "columnwise_tensor_scale",
}
_DTYPES = {str(d): d for d in HIGH_PRECISION}


def tensor_state(q: Tensor) -> dict[str, Tensor]:
    """Return ``q`` as plain tensors, by suffix of the parameter's name.

    ``q`` is a ``QuantizedTensor``, or a ``DTensor`` of shards of one, and then so are its pieces.
    """
    part = local(q)
    state = {
        _KEYS[name]: piece.view(torch.uint8) if piece.dtype == torch.float8_e8m0fnu else piece
        for name, piece in part.pieces().items()
    }
    if part is not q:
        state = {name: sharded_as(q, piece) for name, piece in state.items()}
    fmt = part.format
    facts = {
        "name": fmt.name,
        "element": fmt.element.name,
        "block": fmt.block,
        "scale": fmt.scale,
        "amax_epsilon": fmt.amax_epsilon,
        "dtype": str(q.dtype),
        "shape": tuple(q.shape),
    }
    spelled = list(json.dumps(facts).encode())
    state["format"] = torch.tensor(spelled, dtype=torch.uint8, device="cpu")
    return state


def tensor_from_state(state: Mapping[str, Tensor]) -> Tensor:
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
    stored = {name: state[key] for name, key in _KEYS.items() if key in state}
    pieces = {name: local(piece) for name, piece in stored.items()}
    for name in ("scale_inv", "columnwise_scale_inv"):
        if name in pieces and fmt.scale_dtype == torch.float8_e8m0fnu:
            pieces[name] = pieces[name].view(fmt.scale_dtype)
    data = next(iter(pieces))
    if pieces[data] is stored[data]:
        return QuantizedTensor.from_pieces(pieces, fmt, shape, dtype)
    shape = [*pieces[data].shape[:-1], shape[-1]]
    return sharded_as(stored[data], QuantizedTensor.from_pieces(pieces, fmt, shape, dtype))


def register_state_hooks(module: nn.Module) -> None:
    """Make ``module`` save its own quantized parameters as plain tensors and load them again.

    What is loaded may be quantized or in high precision, and whole or sharded, whatever the
    parameter is.
    """
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def _save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        saved = state.get(prefix + name)
        if saved is not None and isinstance(local(parameter), QuantizedTensor):
            del state[prefix + name]
            parts = tensor_state(saved)
            state.update({f"{prefix}{name}.{suffix}": part for suffix, part in parts.items()})
            for suffix in parts:
                # torch.distributed.checkpoint.state_dict asks for what every name stands for.
                if not hasattr(parameter, suffix):
                    setattr(parameter, suffix, None)


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    load_pieces(module, state, prefix)
    for name, parameter in module.named_parameters(recurse=False):
        given = state.get(prefix + name)
        if is_sharded(parameter) and isinstance(given, Tensor) and not is_sharded(given):
            state[prefix + name] = shard(given, parameter)


def load_pieces(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put together the quantized tensors of a state dict that belong to ``module`` itself."""
    for key in [key for key in state if key.startswith(prefix) and key.endswith(".format")]:
        name = key.removesuffix(".format")
        if "." in name.removeprefix(prefix):
            continue  # a submodule's
        parts = {
            suffix: state.pop(f"{name}.{suffix}")
            for suffix in (*_KEYS.values(), "format")
            if f"{name}.{suffix}" in state
        }
        state[name] = tensor_from_state(parts)
