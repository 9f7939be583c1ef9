# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Rows to experts and back: scatter, gather and sum, dot products (CuTe DSL).

A thread owns 16 bytes at one place of a few tokens. It loads a token's once and stores it to the
rows of all its choices, or loads those of all choices, in flight together, and stores their sum: so
every byte is read once and written once, and sums have the order of the choices.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from fusible.kernels.device import bits
from fusible.kernels.device.dependent_launch import has_pdl, wait
from fusible.kernels.moe.spec import ROWS_THREADS as THREADS

TOGETHER = 8  # choices a thread has in flight


def _row(row_map, index, inside):
    """Entry of the row map, -1 where not ``inside``."""
    found = bits.load(row_map + Int64(index) * 4, Int32(inside), 1)[0]
    return Int32(bits.select(inside, found, 0xFFFFFFFF))


def _place(tokens, rank, spec):
    """The process whose tokens a thread moves, that process's first token, and the thread's places.

    A place is the number of a token within the process, its 16-byte column, and whether it exists.
    Blocks take the processes in turns, from ``rank`` on, so that all links are busy at once.
    """
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    process, cta = (cta + rank) % spec.processes, cta // spec.processes
    of_process = tokens // spec.processes
    places = []
    for u in range(spec.unroll):
        vector = (cta * spec.unroll + u) * THREADS + thread
        token, column = vector // spec.vectors, vector % spec.vectors
        places.append((token, column, token < of_process))
    return process, process * of_process, places


def _tokens_of(process, address, offset, spec):
    """Where a process's tokens begin: ``offset`` bytes into its memory, of whose beginnings
    ``address`` is the table; at ``address`` if there is one process.
    """
    if spec.processes == 1:
        return address
    return bits.load_address(address + Int64(process) * 8) + offset


def _my_choices():
    """The first choice of a thread and the distance to its next."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return cta * THREADS + thread, ctas * THREADS


@cute.jit
def _values_to_rows(
    values: Int64,
    row_map: Int64,
    out: Int64,
    sources: Int64,
    tokens: Int32,
    rows: Int32,
    spec: cutlass.Constexpr,
    named: cutlass.Constexpr = False,
):
    """One number of each choice to its row, zeros to the rows of the tail; if ``named`` its token.

    That goes to ``sources``.
    """
    first, step = _my_choices()
    for choice in cutlass.range(first, tokens * spec.top_k, step, unroll=1):
        entry = _row(row_map, choice, True)
        value = bits.load_number(values, choice, entry >= 0, spec.weight_dtype)
        row = cutlass.max(entry, ~entry)
        bits.store_number(out, row, value, row < rows, spec.weight_dtype)
        if cutlass.const_expr(named):
            token = Uint32(choice // spec.top_k)
            bits.store(sources + Int64(row) * 4, [token], Int32(row < rows))


@cute.jit
def _values_to_choices(
    values: Int64, row_map: Int64, out: Int64, choices: Int32, dtype: cutlass.Constexpr
):
    """One number of each row to its choice, zeros where there is no row."""
    first, step = _my_choices()
    for choice in cutlass.range(first, choices, step, unroll=1):
        row = _row(row_map, choice, True)
        bits.store_number(out, choice, bits.load_number(values, row, row >= 0, dtype), True, dtype)


def _weight(weights, token, j, row, computed, spec):
    """Weight of a choice, zero if it is not computed."""
    index = row if spec.weights == "row" else token * spec.top_k + j
    return bits.load_number(weights, index, computed, spec.weight_dtype)


def store_rows(words, found, at, weights, out, rows, zero_tail, spec):
    """Store 16 bytes of a token to the rows of its choices, whose entries of the row map are given.

    ``at``: the token, the 16-byte column, whether it exists.
    """
    token, column, exists = at
    numbers = bits.unpack(words, spec.dtype) if spec.scale else None
    for j, entry in enumerate(found):
        computed = entry >= 0
        row = cutlass.max(entry, ~entry)
        inside = Boolean(exists) & (row < rows) & (computed | (zero_tail != 0))
        kept = words
        if spec.scale:
            weight = _weight(weights, token, j, row, inside & computed, spec)
            kept = bits.pack([bits.mul(n, weight) for n in numbers], spec.dtype)
        kept = [bits.select(computed, word, 0) for word in kept]
        bits.store(out + (Int64(row) * spec.vectors + column) * 16, kept, Int32(inside))


@cute.kernel
def _scatter(
    x: Int64,
    row_map: Int64,
    weights: Int64,
    out: Int64,
    moved: Int64,
    tokens: Int32,
    rows: Int32,
    zero_tail: Int32,
    offset: Int64,
    rank: Int32,
    spec: cutlass.Constexpr,
):
    wait()
    if cutlass.const_expr(spec.weights == "choice"):
        _values_to_rows(weights, row_map, moved, Int64(0), tokens, rows, spec)
    process, first, places = _place(tokens, rank, spec)
    x = _tokens_of(process, x, offset, spec)
    loaded = []
    for token, column, exists in places:
        at = x + (Int64(token) * spec.vectors + column) * 16
        loaded.append(bits.load(at, Int32(exists), 4))
    for (number, column, exists), words in zip(places, loaded, strict=True):
        token = first + number
        found = [_row(row_map, token * spec.top_k + j, exists) for j in range(spec.top_k)]
        store_rows(words, found, (token, column, exists), weights, out, rows, zero_tail, spec)


@cute.kernel
def _sources(
    row_map: Int64,
    weights: Int64,
    sources: Int64,
    moved: Int64,
    tokens: Int32,
    rows: Int32,
    spec: cutlass.Constexpr,
):
    wait()
    _values_to_rows(weights, row_map, moved, sources, tokens, rows, spec, True)


def _rows_ahead(row_map, first, places, spec):
    """Of each place the rows of all choices with `RowsSpec.reads_ahead`, else none."""
    choices = range(spec.top_k if spec.reads_ahead else 0)
    return [
        [_row(row_map, (first + token) * spec.top_k + j, exists) for j in choices]
        for token, _, exists in places
    ]


@cute.kernel
def _gather(
    rows: Int64,
    row_map: Int64,
    weights: Int64,
    values: Int64,
    out: Int64,
    picked: Int64,
    tokens: Int32,
    offset: Int64,
    rank: Int32,
    spec: cutlass.Constexpr,
):
    process, first, places = _place(tokens, rank, spec)
    known = _rows_ahead(row_map, first, places, spec)
    wait()
    out = _tokens_of(process, out, offset, spec)
    totals = [[Float32(0)] * spec.per_vector for _ in places]
    for start in cutlass.range_constexpr(0, spec.top_k, TOGETHER):
        loaded = []
        for of_place, (token, column, exists) in zip(known, places, strict=True):
            for j in cutlass.range_constexpr(start, min(start + TOGETHER, spec.top_k)):
                if cutlass.const_expr(spec.reads_ahead):
                    row = of_place[j]
                else:
                    row = _row(row_map, (first + token) * spec.top_k + j, exists)
                at = rows + (Int64(row) * spec.vectors + column) * 16
                loaded.append((row, bits.load(at, Int32(row >= 0), 4)))
        at = iter(loaded)
        for i, (token, _, _) in enumerate(places):
            for j in cutlass.range_constexpr(start, min(start + TOGETHER, spec.top_k)):
                row, words = next(at)
                numbers = bits.unpack(words, spec.dtype)
                if cutlass.const_expr(spec.weights != ""):
                    weight = _weight(weights, first + token, j, row, row >= 0, spec)
                    numbers = [bits.mul(n, weight) for n in numbers]
                totals[i] = [bits.add(t, n) for t, n in zip(totals[i], numbers, strict=True)]
    for (token, column, exists), total in zip(places, totals, strict=True):
        at = out + (Int64(token) * spec.vectors + column) * 16
        bits.store(at, bits.pack(total, spec.dtype), Int32(exists))
    if cutlass.const_expr(spec.values != ""):
        _values_to_choices(values, row_map, picked, tokens * spec.top_k, spec.values)


@cute.kernel
def _dots(
    rows: Int64,
    x: Int64,
    row_map: Int64,
    out: Int64,
    tokens: Int32,
    row_count: Int32,
    spec: cutlass.Constexpr,
):
    """A warp for each token."""
    wait()
    lane = cute.arch.lane_idx()
    cta, _, _ = cute.arch.block_idx()
    token = cta * (THREADS // 32) + cute.arch.warp_idx()
    exists = token < tokens
    for start in cutlass.range_constexpr(0, spec.top_k, TOGETHER):
        choices = range(start, min(start + TOGETHER, spec.top_k))
        found = [_row(row_map, token * spec.top_k + j, exists) for j in choices]
        sums = cute.make_rmem_tensor(len(choices), Float32)
        sums.fill(0.0)
        for column in cutlass.range(lane, spec.vectors, 32, unroll=1):
            at = x + (Int64(token) * spec.vectors + column) * 16
            values = bits.unpack(bits.load(at, Int32(exists), 4), spec.dtype)
            loaded = [
                bits.load(rows + (Int64(row) * spec.vectors + column) * 16, Int32(row >= 0), 4)
                for row in found
            ]
            for i, words in enumerate(loaded):
                for a, b in zip(values, bits.unpack(words, spec.dtype), strict=True):
                    sums[i] = sums[i] + a * b
        for i, (j, entry) in enumerate(zip(choices, found, strict=True)):
            total = sums[i]
            for step in cutlass.range_constexpr(5):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
            # Not what zeros make of an infinite x.
            total = bits.to_float(bits.select(entry >= 0, bits.to_bits(total), 0))
            inside = Boolean(exists) & (lane == 0)
            index = token * spec.top_k + j
            if cutlass.const_expr(spec.weights == "row"):
                index = cutlass.max(entry, ~entry)
                inside = inside & (index < row_count)
            bits.store_number(out, index, total, inside, "f32")


def _blocks(tokens, spec):
    per_block = THREADS * spec.unroll
    of_process = tokens // spec.processes
    return spec.processes * ((of_process * spec.vectors + per_block - 1) // per_block)


@cute.jit
def sources(
    row_map: Int64,
    weights: Int64,
    sources: Int64,
    moved: Int64,
    tokens: Int32,
    rows: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``definitions.row_sources`` names them."""
    _sources(row_map, weights, sources, moved, tokens, rows, spec).launch(
        grid=[(tokens * spec.top_k + THREADS - 1) // THREADS, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )


@cute.jit
def scatter(
    x: Int64,
    row_map: Int64,
    weights: Int64,
    out: Int64,
    moved: Int64,
    tokens: Int32,
    rows: Int32,
    zero_tail: Int32,
    offset: Int64,
    rank: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``definitions.scatter_rows`` names them.

    Of several processes, ``x`` is the table of `_tokens_of`, ``rank`` this process.
    """
    _scatter(x, row_map, weights, out, moved, tokens, rows, zero_tail, offset, rank, spec).launch(
        grid=[_blocks(tokens, spec), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=has_pdl()
    )


@cute.jit
def gather(
    rows: Int64,
    row_map: Int64,
    weights: Int64,
    values: Int64,
    out: Int64,
    picked: Int64,
    tokens: Int32,
    offset: Int64,
    rank: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``definitions.gather_sum`` names them.

    Of several processes, ``out`` is the table of `_tokens_of`, ``rank`` this process.
    """
    _gather(rows, row_map, weights, values, out, picked, tokens, offset, rank, spec).launch(
        grid=[_blocks(tokens, spec), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=has_pdl()
    )


@cute.jit
def dots(
    rows: Int64,
    x: Int64,
    row_map: Int64,
    out: Int64,
    tokens: Int32,
    row_count: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``definitions.row_dots`` names them."""
    warps = THREADS // 32
    _dots(rows, x, row_map, out, tokens, row_count, spec).launch(
        grid=[(tokens + warps - 1) // warps, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )
