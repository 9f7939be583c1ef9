"""The kernels of a grouped MLP, prepared: what layouts decide is decided once, not in each call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.launch import Start, prepared
from fusible.kernels.sm90.ops import glu_layout, is_direct, spec_of, sum_up


class PreparedMLP:
    """The products of a grouped MLP with contiguous operands that need no check any more.

    ``w1`` is ``[groups, 2 * inner, hidden]``, ``w2`` ``[groups, hidden, inner]``; there are rows.
    Each method is one launch, and equals the function of `fusible.kernels.sm90` that it names.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        scale: torch.dtype,
        sizes: tuple[int, int, int],
        many_rows: bool,
        activation: str,
        interleave: int,
        constants: tuple[float, float, float],
    ) -> None:
        self._device, self._dtype, self._scale, self._many_rows = device, dtype, scale, many_rows
        self._groups, self._hidden, self._inner = sizes
        self._glu, self._constants = (activation, interleave), constants
        self._sums = -(-self._inner // tiles.choose("dglu", many_rows, self._inner).n)

    def _product(
        self, kind: str, columns: int, depth: int, major: str, keep: bool = False
    ) -> Start:
        """A product of grouped rows, ``[rows, depth]``, into ``columns`` columns."""
        tile, dtype = tiles.choose(kind, self._many_rows, columns), self._dtype
        gated = kind != "store"
        glu = (self._scale, *self._glu, keep) if gated else ()
        weight_rows = 2 * columns if kind == "glu" else columns
        return prepared(
            spec_of(kind, tile, dtype, dtype, major, False, False, *glu),
            self._device,
            columns,
            depth,
            self._groups,
            a_pitch=depth,
            b_pitch=depth if major == "k" else weight_rows,
            b_group_pitch=weight_rows * depth,
            out_pitch=columns,
            preact_pitch=2 * columns if kind == "dglu" else 0,
            d_preact_pitch=2 * columns if gated else 0,
            glu_layout=glu_layout(self._glu[1], columns) if gated else (1, 0),
            constants=self._constants if gated else (0.0, 0.0, 0.0),
        )

    def _weight_gradient(self, columns: int, depth: int) -> Start:
        tile, dtype = tiles.choose("wgrad", self._many_rows, depth, columns), self._dtype
        return prepared(
            spec_of("wgrad", tile, dtype, dtype, "k", False),
            self._device,
            columns,
            depth,
            self._groups,
            a_pitch=columns,
            b_pitch=depth,
            b_group_pitch=columns * depth,
            out_pitch=depth,
        )

    @functools.cached_property
    def _glu_keep(self) -> Start:
        return self._product("glu", self._inner, self._hidden, "k", keep=True)

    @functools.cached_property
    def _glu_drop(self) -> Start:
        return self._product("glu", self._inner, self._hidden, "k")

    @functools.cached_property
    def _fc2(self) -> Start:
        return self._product("store", self._hidden, self._inner, "k")

    @functools.cached_property
    def _dglu(self) -> Start:
        return self._product("dglu", self._inner, self._hidden, "n")

    @functools.cached_property
    def _dgrad1(self) -> Start:
        return self._product("store", self._hidden, 2 * self._inner, "n")

    @functools.cached_property
    def _wgrad1(self) -> Start:
        return self._weight_gradient(2 * self._inner, self._hidden)

    @functools.cached_property
    def _wgrad2(self) -> Start:
        return self._weight_gradient(self._hidden, self._inner)

    def glu(
        self, x: Tensor, w1: Tensor, ends: Tensor, scales: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """`grouped_gemm_glu`."""
        rows, inner = x.shape[0], self._inner
        preact, out = x.new_empty(rows if keep else 0, 2 * inner), x.new_empty(rows, inner)
        (self._glu_keep if keep else self._glu_drop)(
            rows,
            a=x.data_ptr(),
            b=w1.data_ptr(),
            out=out.data_ptr(),
            ends=ends.data_ptr(),
            d_preact=(preact if keep else out).data_ptr(),
            scales=scales.data_ptr(),
        )
        return preact, out

    def fc2(self, hidden: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
        """`grouped_gemm`."""
        return self._into(
            self._fc2, hidden.new_empty(hidden.shape[0], self._hidden), hidden, w2, ends
        )

    def dgrad1(self, d_preact: Tensor, w1: Tensor, ends: Tensor) -> Tensor:
        """`grouped_gemm`, transposed."""
        dx = d_preact.new_empty(d_preact.shape[0], self._hidden)
        return self._into(self._dgrad1, dx, d_preact, w1, ends)

    def dglu(
        self, dy: Tensor, w2: Tensor, ends: Tensor, preact: Tensor, scales: Tensor, overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`grouped_gemm_dglu`."""
        rows, sums = dy.shape[0], self._sums
        d_preact = preact if overwrite else torch.empty_like(preact)
        act = dy.new_empty(rows, self._inner)
        partials = scales.new_empty(sums * rows, dtype=torch.float32)
        self._dglu(
            rows,
            a=dy.data_ptr(),
            b=w2.data_ptr(),
            out=act.data_ptr(),
            ends=ends.data_ptr(),
            preact=preact.data_ptr(),
            d_preact=d_preact.data_ptr(),
            scales=scales.data_ptr(),
            partials=partials.data_ptr(),
        )
        return d_preact, act, sum_up(partials, rows, scales.dtype)

    def wgrad1(self, d_preact: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """`grouped_wgrad`."""
        dw = x.new_empty(self._groups, 2 * self._inner, self._hidden)
        return self._into(self._wgrad1, dw, d_preact, x, ends)

    def wgrad2(self, dy: Tensor, hidden: Tensor, ends: Tensor) -> Tensor:
        """`grouped_wgrad`."""
        dw = dy.new_empty(self._groups, self._hidden, self._inner)
        return self._into(self._wgrad2, dw, dy, hidden, ends)

    @staticmethod
    def _into(start: Start, out: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        start(a.shape[0], a=a.data_ptr(), b=b.data_ptr(), out=out.data_ptr(), ends=ends.data_ptr())
        return out


_PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may hold anything
_mlp = functools.lru_cache(maxsize=1024)(PreparedMLP)


def prepared_mlp(
    rows: Sequence[Tensor],
    w1: Sequence[Tensor],
    w2: Sequence[Tensor],
    scales: Tensor,
    *,
    activation: str,
    interleave: int,
    limit: float = 0.0,
    alpha: float = 0.0,
    offset: float = 0.0,
) -> PreparedMLP | None:
    """The products of a grouped MLP over these operands, or None if it takes more to run them.

    ``rows`` lists the matrices of as many rows as ``scales`` has that are at hand: the input first.
    """
    if len(w1) != 1 or len(w2) != 1 or not is_direct(rows[0]):
        return None
    (a,), (b,) = w1, w2
    x, operands = rows[0], (*rows, a, b)
    dtype, device, shape = x.dtype, x.device, a.shape
    if (
        len(shape) != 3
        or b.shape != (shape[0], shape[2], shape[1] // 2)
        or x.shape[0] == 0
        or scales.dim() != 1
        or not scales.is_contiguous()
        or not all(
            [
                type(t) in _PLAIN
                and t.is_contiguous()
                and t.data_ptr() % limits.ALIGNMENT_BYTES == 0
                and t.dtype == dtype
                and t.device == device
                for t in operands
            ]
        )
    ):
        return None
    groups, wide, hidden = shape
    return _mlp(
        device,
        dtype,
        scales.dtype,
        (groups, hidden, wide // 2),
        tiles.has_many_rows(x.shape[0], groups),
        activation,
        interleave,
        (limit, alpha, offset),
    )
