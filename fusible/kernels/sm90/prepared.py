"""A grouped linear's products, prepared: what layouts decide is decided once, not in each call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.calls import is_traced, is_transformed
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.checks import check_scale, layout
from fusible.kernels.sm90.launch import Launch, launch_group_ends, launch_of
from fusible.kernels.sm90.ops import glu_layout, spec_of, sum_up


class Glu(NamedTuple):
    """A gated activation as `fusible.kernels.sm90.grouped_gemm_glu` takes it."""

    activation: str = "swiglu"
    interleave: int = 0
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0


class _Variant(NamedTuple):
    """Which kernel reads the weight, beside what the weight decides."""

    kind: str
    transpose: bool
    bias: bool = False
    scale: torch.dtype | None = None
    glu: Glu | None = None
    keep: bool = False


class Products:
    """The products with a weight ``[groups, N, K]``, over operands that need no check any more.

    Rows are contiguous, ``[rows, K]`` and ``[rows, N]``, and there are some; scales are contiguous,
    one for each; ``w`` is the weight's address. Each method is one launch, with `dglu` one more for
    its sums, and equals the function of `fusible.kernels.sm90` that it names.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        strides: tuple[int, int, int],
        many_rows: bool,
    ) -> None:
        self._device, self._dtype, self._many_rows = device, dtype, many_rows
        self._groups, self._columns, self._depth = shape
        self._layouts = [layout("w", shape, strides, transpose) for transpose in (False, True)]
        self._sums = -(-self._depth // tiles.choose("dglu", many_rows, self._depth).n)
        self._starts: dict[_Variant | tuple, Launch] = {}

    def _make(self, launch: _Variant) -> Launch:
        """The launch of a product of rows, made once."""
        kind, transpose, bias, scale, glu, keep = launch
        if scale is not None:
            check_scale("scales", scale)
        pitch, group_pitch, major, features, depth, _ = self._layouts[transpose]
        columns = features // 2 if kind == "glu" else features
        wide = glu is None or kind != "glu" or tiles.takes_wide(major, glu.interleave, bias)
        tile, dtype = tiles.choose(kind, self._many_rows, columns, 0, wide), self._dtype
        gated = () if glu is None else (glu.activation, glu.interleave, keep)
        start = self._starts[launch] = launch_of(
            spec_of(kind, tile, dtype, dtype, major, False, bias, scale, *gated),
            self._device,
            columns,
            depth,
            self._groups,
            a_pitch=depth,
            b_pitch=pitch,
            b_group_pitch=group_pitch,
            out_pitch=columns,
            preact_pitch=2 * columns if kind == "dglu" else 0,
            d_preact_pitch=0 if glu is None else 2 * columns,
            glu_layout=(1, 0) if glu is None else glu_layout(glu.interleave, columns),
            constants=(0.0, 0.0, 0.0) if glu is None else glu[2:],
        )
        return start

    def _make_wgrad(self, columns: int, depth: int) -> Launch:
        tile, dtype = tiles.choose("wgrad", self._many_rows, depth, columns), self._dtype
        start = self._starts["wgrad", columns, depth] = launch_of(
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
        return start

    @staticmethod
    def of(w: Sequence[Tensor]) -> int:
        """A weight as the methods take it."""
        return w[0].data_ptr()

    def ends(self, split_sizes: Tensor, rows: int) -> Tensor:
        """`group_ends`, of contiguous ``split_sizes``."""
        ends = torch.empty(self._groups, dtype=torch.int32, device=self._device)
        launch_group_ends(split_sizes, ends, rows)
        return ends

    def fits(self, bias: Tensor) -> bool:
        """Whether the kernels read a bias as it lies."""
        shape = self._groups, self._columns
        fits = bias.shape == shape and bias.device == self._device
        return fits and _is_plain(bias, self._dtype)

    def forward(
        self,
        x: Tensor,
        w: int,
        ends: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`grouped_gemm`."""
        if bias is None:
            row_scale = None  # it multiplies the bias only
        scale = None if row_scale is None else row_scale.dtype
        launch = "store", False, bias is not None, scale, None, False
        start = self._starts.get(launch) or self._make(_Variant(*launch))
        y = x.new_empty(x.shape[0], self._columns) if out is None else out
        start(
            x.shape[0],
            x.data_ptr(),
            w,
            y.data_ptr(),
            ends.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            scales=0 if row_scale is None else row_scale.data_ptr(),
        )
        return y

    def glu(
        self,
        x: Tensor,
        w: int,
        ends: Tensor,
        scales: Tensor,
        glu: Glu,
        bias: Tensor | None = None,
        keep: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """`grouped_gemm_glu`."""
        launch = "glu", False, bias is not None, scales.dtype, glu, keep
        start = self._starts.get(launch) or self._make(_Variant(*launch))
        rows, columns = x.shape[0], self._columns
        preact, out = x.new_empty(rows if keep else 0, columns), x.new_empty(rows, columns // 2)
        start(
            rows,
            x.data_ptr(),
            w,
            out.data_ptr(),
            ends.data_ptr(),
            d_preact=(preact if keep else out).data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            scales=scales.data_ptr(),
        )
        return preact, out

    def dgrad(self, dy: Tensor, w: int, ends: Tensor, out: Tensor | None = None) -> Tensor:
        """`grouped_gemm`, transposed."""
        launch = "store", True, False, None, None, False
        start = self._starts.get(launch) or self._make(_Variant(*launch))
        dx = dy.new_empty(dy.shape[0], self._depth) if out is None else out
        start(dy.shape[0], dy.data_ptr(), w, dx.data_ptr(), ends.data_ptr())
        return dx

    def dglu(
        self,
        dy: Tensor,
        w: int,
        ends: Tensor,
        preact: Tensor,
        scales: Tensor,
        glu: Glu,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`grouped_gemm_dglu`."""
        launch = "dglu", True, False, scales.dtype, glu, False
        start = self._starts.get(launch) or self._make(_Variant(*launch))
        rows = dy.shape[0]
        d_preact = preact if overwrite else torch.empty_like(preact)
        act = dy.new_empty(rows, self._depth)
        partials = scales.new_empty(self._sums * rows, dtype=torch.float32)
        start(
            rows,
            dy.data_ptr(),
            w,
            act.data_ptr(),
            ends.data_ptr(),
            preact=preact.data_ptr(),
            d_preact=d_preact.data_ptr(),
            scales=scales.data_ptr(),
            partials=partials.data_ptr(),
        )
        return d_preact, act, sum_up(partials, rows, scales.dtype)

    def wgrad(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """`grouped_wgrad`, of ``dy`` and ``x``, or the other way round for its transpose."""
        (rows, columns), depth = a.shape, b.shape[1]
        start = self._starts.get(("wgrad", columns, depth)) or self._make_wgrad(columns, depth)
        dw = a.new_empty(self._groups, columns, depth)
        start(rows, a.data_ptr(), b.data_ptr(), dw.data_ptr(), ends.data_ptr())
        return dw


_PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may hold anything


@functools.lru_cache(maxsize=1024)
def _products(*kind: Any) -> Products | None:
    try:
        return Products(*kind)
    except ValueError:  # TMA cannot read the weight as it lies
        return None


def products(
    rows: Sequence[Tensor], *linears: tuple[tuple[int, int, int], Sequence[Tensor]]
) -> list[Products] | None:
    """The products of grouped linears; None if these operands take more to run.

    ``rows`` are the operands at hand, matrices with the same number of rows. Each linear is the
    shape of its weight, ``[groups, N, K]``, and the tensors that it is made of. Gradients are not
    recorded, whether they are enabled or not.
    """
    x = rows[0]
    dtype, device = x.dtype, x.device
    if not (_runs_as_is(x) and all([_is_plain(t, dtype) and t.dim() == 2 for t in rows])):
        return None
    found = []
    for shape, w in linears:
        strides = _strides(w, shape, dtype, device)
        if strides is None:
            return None
        many = tiles.has_many_rows(x.shape[0], shape[0])
        product = _products(device, dtype, shape, strides, many)
        if product is None:
            return None
        found.append(product)
    return found


def fit_again(
    rows: Sequence[Tensor], weights: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]]
) -> bool:
    """Whether `products` of operands with the same dtype and device would find what it has found.

    So it is for matrices on one device, and contiguous weights of these shapes.
    """
    x = rows[0]
    dtype, device = x.dtype, x.device
    if len(weights) != len(shapes) or not _runs_as_is(x):
        return False
    for t in rows:
        if not (_is_plain(t, dtype) and t.dim() == 2):
            return False
    for w, shape in zip(weights, shapes, strict=True):
        if not (_is_plain(w, dtype) and w.shape == shape and w.device == device):
            return False
    return True


def _runs_as_is(x: Tensor) -> bool:
    """Whether there is something to run, and nothing traces, transforms or intercepts it."""
    return x.is_cuda and x.shape[0] > 0 and not (is_traced() or is_transformed())


def _is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel reads memory as an array's, and nothing but memory makes up the tensor."""
    return (
        t.is_contiguous()
        and t.data_ptr() % limits.ALIGNMENT_BYTES == 0
        and t.dtype == dtype
        and type(t) in _PLAIN
    )


def _strides(
    w: Sequence[Tensor], shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[int, ...] | None:
    """Strides of a weight as one tensor, if it is one or its matrices lie side by side."""
    first, (groups, rows, columns) = w[0], shape
    if len(w) == 1:
        aligned = first.data_ptr() % limits.ALIGNMENT_BYTES == 0
        fits = type(first) in _PLAIN and first.dtype == dtype and first.device == device
        return first.stride() if aligned and fits and first.shape == shape else None
    if not _is_plain(first, dtype) or first.device != device or len(w) != groups:
        return None
    start, step = first.data_ptr(), rows * columns * dtype.itemsize
    if [t.data_ptr() for t in w] != list(range(start, start + groups * step, step)):
        return None
    matrix = rows, columns
    alike = all([t.shape == matrix and t.is_contiguous() and t.dtype == dtype for t in w])
    return (rows * columns, columns, 1) if alike and all([type(t) in _PLAIN for t in w]) else None
