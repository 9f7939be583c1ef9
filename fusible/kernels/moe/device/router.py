# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Top-k of a router's logits, the weights of those chosen, and their gradient (CuTe DSL).

A warp owns a token, and a lane every 32nd logit of it, in registers. Numbers are compared as
integers of the same order (NaN the largest, as sorting has it), so that of equals the first expert
wins. Lane j keeps the j-th choice.

`route_tokens` computes the logits first: a CTA those of one expert. The CTA that finishes last
chooses for all tokens.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from fusible.kernels.device import bits
from fusible.kernels.device.dependent_launch import has_pdl, wait
from fusible.kernels.moe.spec import ROUTER_WARPS as WARPS

TOKENS_AT_ONCE = 4  # that a CTA multiplies by its row of the weight, to bound registers


def _order(value):
    """An integer above zero that is larger for larger numbers; zeros are equal, NaN is largest."""
    word = bits.to_bits(bits.add(value, Float32(0)))
    key = bits.select(word >= 0x80000000, word ^ 0xFFFFFFFF, word | 0x80000000)
    return bits.select((word & 0x7FFFFFFF) > bits.INF, 0xFFFFFFFF, key)


def _value(key):
    """The number of that order."""
    return bits.to_float(key ^ bits.select(key >= 0x80000000, 0x80000000, 0xFFFFFFFF))


def _larger(first, second=None):
    """Of two keys with their places the larger, of equals the first."""
    if second is None:
        return first
    larger = second[0] > first[0]
    return tuple(bits.select(larger, b, a) for a, b in zip(first, second, strict=True))


def _largest(keys, lane):
    """The largest of a token's keys and its first place."""
    found = [(key, i * 32 + lane) for i, key in enumerate(keys)]
    while len(found) > 1:
        found = [_larger(*found[i : i + 2]) for i in range(0, len(found), 2)]
    ((best, at),) = found
    most = cute.arch.warp_redux_sync(Uint32(best), "umax")
    place = bits.select(Uint32(best) == most, at, 0x7FFFFFFF)
    return most, Int32(cute.arch.warp_redux_sync(Uint32(place), "umin"))


def _without(keys, place, lane):
    """The keys with the one of that place gone."""
    return [bits.select(place == i * 32 + lane, 0, key) for i, key in enumerate(keys)]


def _sum(value):
    """Sum over the warp."""
    for step in range(5):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
    return value


def _exp(value):
    return cute.math.exp(value, fastmath=False)


def _sigmoid(value):
    return bits.divide(Float32(1), Float32(1) + _exp(-value))


def _kept(condition, value):
    """``value`` where the condition holds, else zero."""
    return bits.to_float(bits.select(condition, bits.to_bits(value), 0))


def _softmax_of(value, values, valid):
    """``exp(value)`` over the sum of those of the warp's values of which ``valid`` says so."""
    orders = [bits.select(m, _order(v), 0) for v, m in zip(values, valid, strict=True)]
    top = _value(_largest(orders, Int32(0))[0])
    total = Float32(0)
    for v, m in zip(values, valid, strict=True):
        total = total + _kept(m, _exp(v - top))
    total = _sum(total)
    return [bits.divide(_exp(v - top), total) for v in value]


def _token_logits(logits, token, exists, lane, spec):
    """A lane's logits of a token, and whether each is there."""
    values, valid = [], []
    for i in range(0, spec.experts, 32):
        inside = Boolean(exists) & (i + lane < spec.experts)
        at = logits + (Int64(token) * spec.experts + i + lane) * 4
        values.append(bits.to_float(bits.load(at, Int32(inside), 1)[0]))
        valid.append(inside)
    return values, valid


def _allowed(keys, lane, spec):
    """The keys with those outside the best groups gone."""
    number, kept, summed = spec.groups
    size = spec.experts // number
    group_of = [(i * 32 + lane) // size for i in range(len(keys))]
    worth = Uint32(0)
    for group in range(number):
        of_group = [bits.select(g == group, key, 0) for key, g in zip(keys, group_of, strict=True)]
        total = Float32(0)
        for _ in range(summed):
            most, place = _largest(of_group, lane)
            total = bits.add(total, _value(most))
            of_group = _without(of_group, place, lane)
        worth = bits.select(lane == group, _order(total), worth)
    best = Uint32(0)
    for _ in range(kept):
        _, place = _largest([worth], lane)
        best = best | (Uint32(1) << Uint32(place))
        worth = bits.select(lane == place, 0, worth)
    return [
        bits.select((best >> Uint32(g)) & 1, key, 0) for key, g in zip(keys, group_of, strict=True)
    ]


def _scores(values, valid, spec):
    """Softmax or sigmoid of all of a token's logits."""
    return [_sigmoid(v) for v in values] if spec.sigmoid else _softmax_of(values, values, valid)


def _weight(logit, chosen, values, valid, spec):
    """Weight of the choice that a lane keeps, zero in the lanes past the last."""
    if spec.sigmoid:
        score = _kept(chosen, _sigmoid(logit))
        return bits.divide(score, _sum(score) + Float32(1e-20)) if spec.normalize else score
    given = ([logit], [chosen]) if spec.normalize else (values, valid)
    return _kept(chosen, _softmax_of([logit], *given)[0])


def _place(tokens):
    cta, _, _ = cute.arch.block_idx()
    token = cta * WARPS + cute.arch.warp_idx()
    return token, token < tokens


@cute.jit
def _route_token(
    logits: Int64,
    expert_bias: Int64,
    probs: Int64,
    ids: Int64,
    token: Int32,
    exists: Boolean,
    spec: cutlass.Constexpr,
):
    """A warp chooses a token's experts."""
    lane = cute.arch.lane_idx()
    values, valid = _token_logits(logits, token, exists, lane, spec)
    ranked = values
    if cutlass.const_expr(spec.biased or spec.groups[0] > 1):
        ranked = _scores(values, valid, spec)
    if cutlass.const_expr(spec.biased):
        shifts, _ = _token_logits(expert_bias, Int32(0), exists, lane, spec)
        ranked = [bits.add(score, shift) for score, shift in zip(ranked, shifts, strict=True)]
    keys = [bits.select(m, _order(value), 0) for value, m in zip(ranked, valid, strict=True)]
    if cutlass.const_expr(spec.groups[0] > 1):
        keys = _allowed(keys, lane, spec)
    chosen_id, chosen_key = Int32(0), Uint32(0)
    for j in cutlass.range_constexpr(spec.top_k):
        most, place = _largest(keys, lane)
        keys = _without(keys, place, lane)
        chosen_id = Int32(bits.select(lane == j, place, chosen_id))
        chosen_key = bits.select(lane == j, most, chosen_key)
    chosen = Boolean(exists) & (lane < spec.top_k)
    logit = _value(chosen_key)
    if cutlass.const_expr(ranked is not values):
        at = logits + (Int64(token) * spec.experts + chosen_id) * 4
        logit = bits.to_float(bits.load(at, Int32(chosen), 1)[0])
    weight = _weight(logit, chosen, values, valid, spec) * Float32(spec.scaling_factor)
    at = Int64(token) * spec.top_k + lane
    bits.store(probs + at * 4, [bits.to_bits(weight)], Int32(chosen))
    bits.store(ids + at * 8, [Uint32(chosen_id), Uint32(0)], Int32(chosen))


@cute.kernel
def _route(
    logits: Int64,
    expert_bias: Int64,
    probs: Int64,
    ids: Int64,
    tokens: Int32,
    spec: cutlass.Constexpr,
):
    wait()
    token, exists = _place(tokens)
    _route_token(logits, expert_bias, probs, ids, token, exists, spec)


def _partial_dots(x, row, places, first, tokens, spec):
    """A thread's partial sums: `TOKENS_AT_ONCE` tokens, from ``first`` on, times a weight row.

    ``places``: the 16-byte pieces of a row that the thread reads.
    """
    sums = [Float32(0)] * TOKENS_AT_ONCE
    for place in places:
        inside = Boolean(place < spec.vectors)
        factors = bits.unpack(bits.load(row + place * 16, Int32(inside), 4, True), spec.dtype)
        for j in range(TOKENS_AT_ONCE):
            there = inside & (first + j < tokens)
            at = x + (Int64(first + j) * spec.vectors + place) * 16
            values = bits.unpack(bits.load(at, Int32(there), 4, True), spec.dtype)
            for value, factor in zip(values, factors, strict=True):
                sums[j] = sums[j] + value * factor
    return sums


@cute.kernel
def _route_tokens(
    x: Int64,
    weight: Int64,
    bias: Int64,
    expert_bias: Int64,
    logits: Int64,
    probs: Int64,
    ids: Int64,
    counter: Int64,
    tokens: Int32,
    spec: cutlass.Constexpr,
):
    """A CTA for each expert computes its logits; the one that finishes last chooses the experts.

    ``counter`` is 0 before and after.
    """
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    experts, vectors = spec.route.experts, spec.vectors
    shared = SmemAllocator()
    parts = shared.allocate_tensor(Float32, cute.make_layout((TOKENS_AT_ONCE, spec.warps)))
    arrived = shared.allocate_tensor(Int32, cute.make_layout(1))
    threads = 32 * spec.warps
    places = [i * threads + thread for i in range(-(-vectors // threads))]
    row = weight + Int64(expert) * vectors * 16
    for i in cutlass.range_constexpr(len(places)):  # while the kernel ahead ends
        if places[i] < vectors:
            bits.prefetch(row + places[i] * 16)
    wait()
    for first in cutlass.range(0, tokens, TOKENS_AT_ONCE, unroll=1):
        sums = _partial_dots(x, row, places, first, tokens, spec)
        for j in cutlass.range_constexpr(TOKENS_AT_ONCE):
            total = _sum(sums[j])
            if lane == 0:
                parts[j, warp] = total
        cute.arch.sync_threads()
        if (warp < TOKENS_AT_ONCE) & (first + warp < tokens):
            part = Float32(0)
            if lane < spec.warps:
                part = parts[warp, lane]
            total = _sum(part)
            if cutlass.const_expr(spec.bias != ""):
                total = total + bits.load_number(bias, expert, True, spec.bias)
            at = logits + (Int64(first + warp) * experts + expert) * 4
            bits.store(at, [bits.to_bits(total)], Int32(lane == 0))
        cute.arch.sync_threads()
    # Release: the barrier orders the CTA's logits before this addition. Acquire: for the CTA that
    # counts last, it orders every CTA's logits before the loads below. The next launch that uses
    # the counter waits until this one has ended, so a plain store resets it.
    counts = bits.vector(counter, Int32, 1)
    if thread == 0:
        arrived[0] = cute.arch.atomic_add(counts.iterator, Int32(1), sem="acq_rel", scope="gpu")
    cute.arch.sync_threads()
    if arrived[0] == experts - 1:
        if thread == 0:
            counts[0] = Int32(0)
        _route_token(logits, expert_bias, probs, ids, warp, warp < tokens, spec.route)


@cute.kernel
def _route_backward(
    dprobs: Int64,
    logits: Int64,
    ids: Int64,
    dlogits: Int64,
    tokens: Int32,
    spec: cutlass.Constexpr,
):
    wait()
    (token, exists), lane = _place(tokens), cute.arch.lane_idx()
    chosen = Boolean(exists) & (lane < spec.top_k)
    at = Int64(token) * spec.top_k + lane
    chosen_id = Int32(bits.load(ids + at * 8, Int32(chosen), 2)[0])
    grad = bits.to_float(bits.load(dprobs + at * 4, Int32(chosen), 1)[0])
    grad = grad * Float32(spec.scaling_factor)
    at = logits + (Int64(token) * spec.experts + chosen_id) * 4
    logit = bits.to_float(bits.load(at, Int32(chosen), 1)[0])
    values, valid = _token_logits(logits, token, exists, lane, spec)
    dense = [Float32(0) for _ in values]
    if cutlass.const_expr(spec.sigmoid):
        score = _kept(chosen, _sigmoid(logit))
        if cutlass.const_expr(spec.normalize):
            total = _sum(score) + Float32(1e-20)
            grad = bits.divide(grad - bits.divide(_sum(grad * score), total), total)
        grad = grad * score * (Float32(1) - score)
    else:
        weight = _weight(logit, chosen, values, valid, spec)
        dot = _sum(grad * weight)
        if cutlass.const_expr(spec.normalize):
            grad = weight * (grad - dot)
        else:
            grad = weight * grad
            scores = _softmax_of(values, values, valid)
            dense = [Float32(0) - score * dot for score in scores]
    for j in cutlass.range_constexpr(spec.top_k):
        where, value = cute.arch.shuffle_sync(chosen_id, j), cute.arch.shuffle_sync(grad, j)
        dense = [total + _kept(where == i * 32 + lane, value) for i, total in enumerate(dense)]
    for i, (total, inside) in enumerate(zip(dense, valid, strict=True)):
        at = dlogits + (Int64(token) * spec.experts + i * 32 + lane) * 4
        bits.store(at, [bits.to_bits(total)], Int32(inside))


@cute.jit
def route(
    logits: Int64,
    expert_bias: Int64,
    probs: Int64,
    ids: Int64,
    tokens: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as in ``definitions.route``; ids in 64 bits."""
    _route(logits, expert_bias, probs, ids, tokens, spec).launch(
        grid=[(tokens + WARPS - 1) // WARPS, 1, 1],
        block=[32 * WARPS, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )


@cute.jit
def route_tokens(
    x: Int64,
    weight: Int64,
    bias: Int64,
    expert_bias: Int64,
    logits: Int64,
    probs: Int64,
    ids: Int64,
    counter: Int64,
    tokens: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as in ``moe.route_tokens``."""
    _route_tokens(
        x, weight, bias, expert_bias, logits, probs, ids, counter, tokens, spec
    ).launch(
        grid=[spec.route.experts, 1, 1],
        block=[32 * spec.warps, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )  # fmt: skip


@cute.jit
def route_backward(
    dprobs: Int64,
    logits: Int64,
    ids: Int64,
    dlogits: Int64,
    tokens: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``formulas.router_probs_backward`` names them;
    ids in 64 bits.
    """
    _route_backward(dprobs, logits, ids, dlogits, tokens, spec).launch(
        grid=[(tokens + WARPS - 1) // WARPS, 1, 1],
        block=[32 * WARPS, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )
