"""Quantized tensors in state dicts: plain tensors only, nothing pickled.

A parameter ``weight`` is saved as ``weight.values``, ``weight.scale`` (and column-wise ones, and
tensor scales, where there are any) and ``weight.format``, JSON as bytes. E8M0 scales are saved as
bytes, which every file format knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusible.arguments import described
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import as_bytes
from fusible.recipes.quantization import HIGH_PRECISION
from fusible.recipes.sharding import is_sharded, local, shard, sharded_as
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.wrapper import PIECES, kinds_of_pieces

_KEYS = {
    "rowwise_data": "values",
    "scale_inv": "scale",
    "tensor_scale": "tensor_scale",
    "columnwise_data": "columnwise_values",
    "columnwise_scale_inv": "columnwise_scale",
    "columnwise_tensor_scale": "columnwise_tensor_scale",
}
_SUFFIXES = (*_KEYS.values(), "format")
_FORMAT = "name", "element", "block", "scale", "amax_epsilon", "hadamard", "stochastic"
"""The arguments of ``NumberFormat.from_constants``."""
_SCALES = "scale_inv", "columnwise_scale_inv"
_DTYPES = {str(d): d for d in HIGH_PRECISION}


def tensor_state(q: Tensor) -> dict[str, Tensor]:
    """Return ``q`` as plain tensors, by suffix of the parameter's name.

    ``q`` is a ``QuantizedTensor``, or a ``DTensor`` of shards of one, and then so are its pieces.
    """
    part = local(q)
    state = {_KEYS[name]: as_bytes(piece) for name, piece in part.pieces().items()}
    if part is not q:
        state = {name: sharded_as(q, piece) for name, piece in state.items()}
    fmt = part.format
    facts = {name: getattr(fmt, name) for name in _FORMAT} | {"element": fmt.element.name}
    facts |= {"dtype": str(q.dtype), "shape": tuple(q.shape)}
    data = list(json.dumps(facts).encode())
    state["format"] = torch.tensor(data, dtype=torch.uint8, device="cpu")
    return state


class PiecesError(ValueError):
    """Pieces of a quantized tensor that do not make one."""

    def __init__(self, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
        self.missing, self.unexpected, self.wrong = missing, unexpected, wrong
        sentences = [f"{piece} is missing" for piece in missing]
        sentences += [f"{piece} must not be there" for piece in unexpected]
        super().__init__("; ".join([*sentences, *wrong]))


def tensor_from_state(state: Mapping[str, Tensor]) -> Tensor:
    """Undo ``tensor_state``.

    Raises:
        PiecesError: a ValueError, if the format is none that this version knows, or a piece is
            missing, not of the format, or not of its sizes, dtype or device.
    """
    fmt, shape, dtype = _facts(state.get("format"))
    stored = {name: state[key] for name, key in _KEYS.items() if key in state}
    _check(stored, fmt, shape)
    pieces = {name: local(piece) for name, piece in stored.items()}
    for name in _SCALES:
        if name in pieces and fmt.scale_dtype == torch.float8_e8m0fnu:
            pieces[name] = pieces[name].view(fmt.scale_dtype)
    data = next(iter(pieces))
    if pieces[data] is stored[data]:
        return QuantizedTensor(pieces, fmt, shape, dtype)
    shape = [*pieces[data].shape[:-1], shape[-1]]
    return sharded_as(stored[data], QuantizedTensor(pieces, fmt, shape, dtype))


def _facts(data: Any) -> tuple[NumberFormat, list[int], torch.dtype]:
    """Read what ``tensor_state`` says of the format, the shape and the dtype."""
    if data is None:
        raise PiecesError(["format"], [], [])
    try:
        facts = json.loads(bytes(local(data).tolist()).decode())
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        got = described(data)
        raise PiecesError([], [], [f"format must be bytes of JSON, got {got}"]) from error
    try:
        name, *options = [facts[field] for field in _FORMAT]
        fmt = NumberFormat.from_constants(str(name), *options)
        dtype, shape = _DTYPES[facts["dtype"]], [int(n) for n in facts["shape"]]
        if min(shape, default=0) < 0:
            raise ValueError(shape)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        wrong = (
            f"format must be one of this version of fusible, got {facts}; load the checkpoint "
            "with the version that wrote it"
        )
        raise PiecesError([], [], [wrong]) from error
    return fmt, shape, dtype


def _check(stored: dict[str, Any], fmt: NumberFormat, shape: list[int]) -> None:
    """Raise PiecesError unless the pieces are those of a tensor of this format and shape."""
    kinds, uses = kinds_of_pieces(fmt, shape), (PIECES[:3], PIECES[3:])
    used = [names for names in uses if stored.keys() & set(names) & kinds.keys()] or uses[:1]
    wanted = [name for names in used for name in names if name in kinds]
    other = next((t for t in stored.values() if isinstance(t, Tensor)), None)
    wrong = []
    for name in wanted:
        dtype, size = kinds[name]
        saved = torch.uint8 if dtype == torch.float8_e8m0fnu else dtype
        if name in stored and not _fits(stored[name], other, (saved, dtype), size):
            wrong.append(
                f"{_KEYS[name]} must be {saved} of shape {size} on the device of the others, "
                f"for {fmt.name} of shape {tuple(shape)}, got {described(stored[name])}"
            )
    missing = [_KEYS[name] for name in wanted if name not in stored]
    unexpected = [_KEYS[name] for name in stored if name not in wanted]
    if missing or unexpected or wrong:
        raise PiecesError(missing, unexpected, wrong)


def _fits(piece: Any, other: Any, dtypes: Sequence[torch.dtype], size: tuple[int, ...]) -> bool:
    """Whether a piece has its dtype and size, and the device and placements of another one."""
    return (
        isinstance(piece, Tensor)
        and piece.dtype in dtypes
        and piece.shape == size
        and piece.device == other.device
        and getattr(piece, "placements", None) == getattr(other, "placements", None)
    )


def register_state_hooks(module: nn.Module) -> None:
    """Make ``module`` save its own quantized parameters as plain tensors and load them again.

    What is loaded may be quantized or in high precision, and whole or sharded, whatever the
    parameter is.
    """
    module.register_state_dict_post_hook(save_pieces)
    module.register_load_state_dict_pre_hook(prepare_load)


def save_pieces(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace ``module``'s own quantized parameters in a state dict by their pieces."""
    for name, parameter in module.named_parameters(recurse=False):
        saved = state.get(prefix + name)
        if saved is not None and isinstance(local(parameter), QuantizedTensor):
            del state[prefix + name]
            parts = tensor_state(saved)
            state.update({f"{prefix}{name}.{suffix}": part for suffix, part in parts.items()})
            for suffix in parts:
                # torch.distributed.checkpoint.state_dict looks up the attribute of every key.
                if not hasattr(parameter, suffix):
                    setattr(parameter, suffix, None)


def prepare_load(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    *errors: list[str],
) -> None:
    """Convert entries of a state dict to what ``module``'s own parameters load.

    Pieces become quantized tensors, full tensors are sharded as the parameter is, and with
    ``assign=True`` a value for a quantized parameter is quantized here.
    """
    load_pieces(module, state, prefix, *errors)
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor):
            continue
        if is_sharded(parameter) and not is_sharded(value):
            value = shard(value, parameter)
        own, part = local(parameter), local(value)
        assigned = metadata.get("assign_to_params_buffers", False)
        if assigned and isinstance(own, QuantizedTensor):
            part = own.stored_alike(part)
            value = sharded_as(value, part) if is_sharded(value) else part
        state[prefix + name] = value


def load_pieces(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
) -> None:
    """Put together the quantized tensors of a state dict that belong to ``module`` itself.

    ``missing`` and ``unexpected`` keys and ``wrong``, messages, are the lists of
    ``nn.Module.load_state_dict``. A parameter whose pieces do not make a tensor keeps its values.
    """
    for name in _names_of_pieces(module, state, prefix):
        keys = {suffix: f"{name}.{suffix}" for suffix in _SUFFIXES}
        parts = {suffix: state.pop(key) for suffix, key in keys.items() if key in state}
        try:
            made = tensor_from_state(parts)
        except PiecesError as error:
            missing.extend(keys[piece] for piece in error.missing)
            unexpected.extend(keys[piece] for piece in error.unexpected)
            wrong.extend(f"{name}.{sentence}" for sentence in error.wrong)
            if (own := module._parameters.get(name.removeprefix(prefix))) is not None:
                state[name] = own
        else:
            state[name] = made


def _names_of_pieces(module: nn.Module, state: dict[str, Any], prefix: str) -> list[str]:
    """The keys, without their suffixes, of pieces that belong to ``module`` itself."""
    keys = [key.rpartition(".") for key in state if key.startswith(prefix)]
    names = dict.fromkeys(name for name, _, suffix in keys if suffix in _SUFFIXES)
    own = [(name, name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
    return [
        name for name, short in own if short and "." not in short and short not in module._modules
    ]
