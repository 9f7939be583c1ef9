"""What a TMA descriptor can address beyond one dense tensor.

A descriptor holds a base address, sizes and strides; the address of a box is
``base + sum(coordinate * stride)`` modulo 2**64, and a coordinate past its size reads zeros and
writes nothing. Two consequences are used here, both without ever rewriting a descriptor:

*Group rows.* To end a box at the last row of a group, wherever that row is, the row mode gets the
size 2**30 and the coordinate ``2**30 - rows_left``; two further modes lead the address back to
where it belongs. (Triton's ragged descriptors use the same arithmetic.)

*Pointer tables.* Three modes whose strides are 2**4, 2**20 and 2**39 bytes reach any multiple of
16 bytes away from the base, so one descriptor serves matrices that were allocated separately.
"""

from cutlass import Int32, Int64, cute

_ROWS = 1 << 30  # size of the row mode; times _WRAP elements it is a multiple of 2**64 bytes
_WRAP = 1 << 34
_MAX = (1 << 31) - 1


def address_rows_by_group(matrix: cute.Tensor, row_mode: int) -> cute.Tensor:
    """``matrix`` with its rows addressed by group; use `group_rows` on its TMA tensor."""
    shape, stride = list(matrix.shape), list(matrix.stride)
    pitch = stride[row_mode]
    shape[row_mode] = _ROWS
    back = cute.assume(Int64(_WRAP) - pitch, divby=8)
    return cute.make_tensor(
        matrix.iterator, cute.make_layout((*shape, _MAX, _MAX), stride=(*stride, back, pitch))
    )


def group_rows(tma_tensor: cute.Tensor, row_mode: int, start: Int32, rows: Int32) -> cute.Tensor:
    """The rows ``[start, start + rows)``: row 0 is the group's first, rows past its end are out."""
    offset = [0, 0]
    offset[row_mode] = Int32(_ROWS) - rows
    return cute.domain_offset(tuple(offset), tma_tensor[None, None, Int32(_ROWS), start + rows])


def address_by_distance(matrix: cute.Tensor) -> cute.Tensor:
    """``matrix``, and every matrix of its shape and strides at a multiple of 16 bytes from it."""
    element_bytes = matrix.element_type.width // 8
    strides = tuple(Int64((1 << bit) // element_bytes) for bit in (4, 20, 39))
    strides = tuple(cute.assume(stride, divby=16 // element_bytes) for stride in strides)
    return cute.make_tensor(
        matrix.iterator,
        cute.make_layout(
            (*matrix.shape, 1 << 16, 1 << 19, 1 << 25), stride=(*matrix.stride, *strides)
        ),
    )


def at_distance(tma_tensor: cute.Tensor, distance: Int64) -> cute.Tensor:
    """The matrix ``distance`` bytes (modulo 2**64) from the descriptor's own."""
    low = Int32((distance >> 4) & 0xFFFF)
    middle = Int32((distance >> 20) & 0x7FFFF)
    high = Int32((distance >> 39) & 0x1FFFFFF)
    return tma_tensor[None, None, low, middle, high]
