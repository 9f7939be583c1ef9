"""Gate and linear columns that alternate in stripes of 1, 2 or 4, as threads hold them.

Stripes of 8 suit a warpgroup's accumulator: a thread holds gates and linears of the same activation
columns, 2 of each 8. Narrower stripes are brought into that order, 16 columns at a time. With ``c``
and ``lane % 4 = low + 2 * high`` the activation column is ``c + 2 * low + 4 * high`` of 8; the
column among the 16 has one bit more, which says gate or linear, at the place of the stripe.
"""

from cutlass import Boolean, cute, select_

from fusible.kernels.sm90.spec import WARPGROUP_ROWS


def _stride(bit, stripe):
    """Columns that a bit of the activation column counts among gate and linear columns."""
    return bit if bit < stripe else 2 * bit


def fragment_order(stripe):
    """Places in a `fragment_layout` of gates ``c + 2 * half``, then of linears."""
    side, c = (1, 2) if stripe == 1 else (2, 1)
    return [(i % 2) * c + (i // 2 % 2) * 4 + (i // 4) * side for i in range(8)]


def fragment_layout(stripe):
    """Threads and their values, in the order of columns, to 64 rows by 16 columns.

    Also how many neighbouring columns a thread holds.
    """
    c, low, high, side = (
        WARPGROUP_ROWS * columns for columns in (*(_stride(b, stripe) for b in (1, 2, 4)), stripe)
    )
    threads = ((2, 2, 8, 4), (low, high, 1, 16))
    values = ((2, 2, 2), (side, c, 8) if stripe == 1 else (c, side, 8))
    shape, strides = zip(threads, values, strict=True)
    return cute.make_layout(shape, stride=strides), 2 if stripe == 4 else 4


def to_stripes_of_8(first, second, stripe, thread):
    """Gates and linears, as of stripes of 8, from a thread's 4 values in each 8 of 16 columns.

    Of each value there are two, one from ``first`` and one from ``second``, which go to different
    threads; so each thread sends either, then the other.
    """
    low, high = thread & 1, thread >> 1 & 1
    mine = Boolean((high if stripe == 4 else low) == 1)
    here = Boolean(high == 1)
    sources = []
    for turn in range(2):
        across = high ^ turn
        sources.append((thread & 28) + (low + 2 * across if stripe == 4 else across + 2 * low))
    gates, linears = [], []
    for half in range(2):
        found = []
        for i in (2 * half, 2 * half + 1):
            sent = (
                select_(mine, second[i], first[i]),
                select_(mine, first[i], second[i]),
            )
            got = [cute.arch.shuffle_sync(*pair) for pair in zip(sent, sources, strict=True)]
            found.append((select_(here, got[1], got[0]), select_(here, got[0], got[1])))
        # found[a][b]: a is a bit of the column within the thread that held it, b between threads.
        (gate0, linear0), (gate1, linear1) = zip(*found, strict=True) if stripe == 1 else found
        gates += [gate0, gate1]
        linears += [linear0, linear1]
    return gates, linears
