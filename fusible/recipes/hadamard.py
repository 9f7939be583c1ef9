"""The random Hadamard transform of the weight gradient's operands, and its inverse.

Each block of 16 rows ``x`` of a column becomes ``H S x``, where ``S`` flips the signs of ten rows
and ``H`` is the orthogonal 16x16 Hadamard matrix of Sylvester, of entries 1/4 and -1/4: outliers
spread over the block (arXiv 2509.25149, section 4.2). Both operands are transformed, so their
product is unchanged: ``(H S y)^T (H S x) = y^T x``. The signs are those of Transformer Engine
(``get_wgrad_sign_vector`` in its ``nvfp4_tensor.py``).

Blocks are those of the scales. A short one, of the last rows of a matrix or of a group, is left as
it is, in both operands: so rows stay in their places, whatever the sizes of groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusible.recipes.blocks import column_blocks
from fusible.recipes.formats import HADAMARD

NEGATIVE = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)
"""Rows of a block whose sign is flipped."""
SCALE = HADAMARD**-0.5


def transform(x: Tensor, ends: Tensor | None = None) -> Tensor:
    """Return ``H S x`` of every whole block of rows of ``x`` ``[..., rows, columns]``.

    In FP32, the sums in the order of the fast transform; rounded to BF16, as Transformer Engine
    rounds, unless ``x`` is FP32. ``ends`` are the end rows of groups, at which blocks restart.
    """
    signs = _signs(x.device)
    out = _map_whole_blocks(x.float(), ends, lambda blocks: _hadamard(blocks * signs))
    return out if x.dtype == torch.float32 else out.to(torch.bfloat16)


def inverse(y: Tensor, ends: Tensor | None = None) -> Tensor:
    """Undo `transform`, in FP32."""
    signs = _signs(y.device)
    return _map_whole_blocks(y.float(), ends, lambda blocks: _hadamard(blocks) * signs)


def _signs(device: torch.device) -> Tensor:
    # By arithmetic: a table would be copied to the device in every call.
    mask = sum(1 << row for row in NEGATIVE)
    bits = mask >> torch.arange(HADAMARD, device=device) & 1
    return (1 - 2 * bits).float()[:, None]


def _hadamard(blocks: Tensor) -> Tensor:
    """``H`` times blocks ``[..., 16, columns]``."""
    rows, step = list(blocks.unbind(-2)), 1
    while step < HADAMARD:
        for i in range(HADAMARD):
            if not i & step:
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = a + b, a - b
        step *= 2
    return torch.stack(rows, -2) * SCALE


def _map_whole_blocks(
    x: Tensor, ends: Tensor | None, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """``x`` with ``function`` of its whole blocks ``[..., 16, columns]``."""
    rows = x.shape[-2]
    if ends is None:
        whole = rows // HADAMARD * HADAMARD
        blocks = x[..., :whole, :].unflatten(-2, (whole // HADAMARD, HADAMARD))
        return torch.cat((function(blocks).flatten(-3, -2), x[..., whole:, :]), -2)
    if not rows:
        return x
    found = column_blocks(ends, rows, HADAMARD)
    if not found.rows.shape[0]:
        return x
    of_blocks = function(x[found.rows])[found.block_of_row, found.place_in_block]
    whole_block = found.inside.all(1)[found.block_of_row]
    live = torch.arange(rows, device=x.device) < ends[-1]
    return torch.where((whole_block & live)[:, None], of_blocks, x)
