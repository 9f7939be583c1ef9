"""Device code of the quantizers on the CPU: every register is an array over blocks and threads.

The plain functions of device code are traced by the CuTe DSL with its values; here they run on
arrays of numpy instead. Memory is bytes by address, and every access is checked.
"""

from types import SimpleNamespace

import numpy as np
import torch

from fusible.recipes.encoding import ENCODERS

THREADS = 128
_FIRST = 1 << 40  # addresses of tensor i begin at (i + 1) times this


def _as(dtype):
    return lambda number: np.asarray(number).astype(dtype)


u32, f32 = _as(np.uint32), _as(np.float32)
_TYPES = {
    "Int32": _as(np.int32), "Int64": _as(np.int64), "Uint32": u32, "Float32": f32,
    "Boolean": _as(bool),
}  # fmt: skip


class Memory:
    """Bytes of tensors, each at an address."""

    def __init__(self):
        self.bytes = []

    def place(self, tensor):
        """The address of a contiguous tensor, which is written to."""
        self.bytes.append(tensor.flatten().view(torch.uint8).numpy())
        return len(self.bytes) * _FIRST

    def _where(self, address, inside, size):
        address, inside = np.broadcast_arrays(address, np.asarray(inside) != 0)
        at = address[inside]
        assert (at % min(size, 16) == 0).all()
        tensors = np.unique(at // _FIRST)
        assert len(tensors) <= 1
        content = self.bytes[int(tensors[0]) - 1] if len(tensors) else np.zeros(0, np.uint8)
        at = at % _FIRST
        assert (at + size <= len(content)).all()
        return inside, content, at[:, None] + np.arange(size)

    def load(self, address, inside, count):
        inside, content, at = self._where(address, inside, 4 * count)
        words = np.zeros((*inside.shape, count), np.uint32)
        words[inside] = content[at].view(np.uint32)
        return list(np.moveaxis(words, -1, 0))

    def store_byte(self, address, byte, inside):
        inside, content, at = self._where(address, inside, 1)
        content[at[:, 0]] = np.broadcast_to(u32(byte), inside.shape)[inside].astype(np.uint8)

    def raise_to(self, address, word, inside):
        inside, content, at = self._where(np.broadcast_to(address, np.shape(word)), inside, 4)
        np.maximum.at(content.view(np.uint32), at[:, 0] // 4, u32(word)[inside])

    def store(self, address, words, inside):
        inside, content, at = self._where(address, inside, 4 * len(words))
        words = np.stack([np.broadcast_to(word, inside.shape) for word in words], -1)
        content[at] = u32(words)[inside].view(np.uint8)


class _Shared:
    """Shared memory: for each block a tensor of ``shape``."""

    def __init__(self, blocks, shape):
        self.content = np.zeros((blocks, *shape), np.uint32)

    def _at(self, index):
        block = np.arange(len(self.content))[:, None]
        return (block, *np.broadcast_arrays(*index, np.zeros(THREADS, int))[:-1])

    def __setitem__(self, index, words):
        self.content[self._at(index)] = words

    def __getitem__(self, index):
        return self.content[self._at(index)]


def _floats(word, dtype):
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16}
    halves = torch.from_numpy(u32(word)[..., None].view(np.int16)).view(kinds[dtype]).float()
    return [halves[..., i].numpy() for i in (0, 1)]


def _larger_magnitude(a, b, dtype):
    kind, sign = (np.uint32, 1 << 31) if dtype == "f32" else (np.uint16, 1 << 15)
    a, b = [np.ascontiguousarray(u32(w))[..., None].view(kind) & (sign - 1) for w in (a, b)]
    return np.maximum(a, b).view(np.uint32)[..., 0]


def _unpack(words, dtype):
    if dtype == "f32":
        return [_to_float(word) for word in words]
    return [value for word in words for value in _floats(word, dtype)]


def _to_float(word):
    return u32(word).view(np.float32)


def _to_bits(value):
    return f32(value).view(np.uint32)


def _select(condition, a, b):
    return np.where(np.asarray(condition) != 0, u32(a), u32(b))


def _pack_fp8(values, element):
    values = torch.from_numpy(np.stack(np.broadcast_arrays(*[f32(v) for v in values]), -1))
    codes = ENCODERS[element](values).view(torch.uint8).numpy()
    return np.ascontiguousarray(codes).view(np.uint32)[..., 0]


def _unpack_fp8(word, count, element):
    codes = np.ascontiguousarray(u32(word)[..., None]).view(np.uint8)
    values = torch.from_numpy(codes).view(element.dtype).float().numpy()
    return [values[..., i] for i in range(count)]


def _multiply_wide(a, b):
    product = np.asarray(a).astype(np.uint64) * np.asarray(b).astype(np.uint64)
    return u32(product & 0xFFFFFFFF), u32(product >> 32)


def _pack(values, dtype):
    if dtype == "f32":
        return [_to_bits(value) for value in values]
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16}
    pairs = torch.from_numpy(np.stack([f32(v) for v in values], -1)).to(kinds[dtype])
    words = pairs.view(torch.int16).numpy().view(np.uint32)
    return [words[..., i] for i in range(len(values) // 2)]


_ARITHMETIC = {
    "rcp_approx": lambda x: 1 / f32(x),
    "fmin": lambda a, b: np.fmin(f32(a), f32(b)),
    "fmax": lambda a, b, nan=False: (np.maximum if nan else np.fmax)(f32(a), f32(b)),
}
_MATH = SimpleNamespace(exp2=lambda x, fastmath: np.exp2(f32(x)))


def emulate_activations(monkeypatch):
    """Make the functions of activations run on arrays."""
    from fusible.kernels.device import activations

    cute = SimpleNamespace(arch=SimpleNamespace(**_ARITHMETIC), math=_MATH)
    monkeypatch.setattr(activations, "cute", cute)
    monkeypatch.setattr(activations, "Float32", f32)
    monkeypatch.setattr(activations, "select_", lambda which, a, b: np.where(which, f32(a), f32(b)))


def emulate(monkeypatch, blocks, memory):
    """Make device code run over ``blocks`` groups of threads."""
    from fusible.kernels.device import bits
    from fusible.kernels.quantize.device import (
        glu_backward,
        hadamard,
        k_major,
        magnitudes,
        numbers,
        philox,
        quantize,
    )
    from fusible.kernels.sm90.device import quantized_rows

    thread = np.arange(THREADS)

    def from_lane(word, lane):
        lane = np.broadcast_to(thread - thread % 32 + lane % 32, word.shape)
        return np.take_along_axis(word, lane, -1)

    arch = SimpleNamespace(
        thread_idx=lambda: (thread, 0, 0),
        lane_idx=lambda: thread % 32,
        alloc_smem=lambda kind, size: size,
        sync_threads=lambda: None,
        shuffle_sync=from_lane,
        shuffle_sync_bfly=lambda word, step: from_lane(word, thread % 32 ^ step),
        **_ARITHMETIC,
    )
    cute = SimpleNamespace(
        arch=arch,
        math=_MATH,
        make_layout=lambda shape: shape,
        make_tensor=lambda size, shape: _Shared(blocks, shape),
    )
    allocator = SimpleNamespace(allocate_tensor=lambda kind, shape: _Shared(blocks, shape))
    functions = {
        "load": memory.load, "store": memory.store, "to_float": _to_float, "to_bits": _to_bits,
        "select": _select, "divide": lambda a, b: f32(a) / f32(b), "unpack": _unpack,
        "larger_magnitude": _larger_magnitude, "pack_fp8": _pack_fp8, "pack": _pack,
        "add": lambda a, b: f32(a) + f32(b),
        "opaque": lambda n: n, "raise_to": memory.raise_to,
        "store_byte": memory.store_byte, "unpack_fp8": _unpack_fp8,
        "smaller": lambda a, b: np.fmin(f32(a), f32(b)), "multiply_wide": _multiply_wide,
        "SmemAllocator": lambda: allocator, "cute": cute,
        "cutlass": SimpleNamespace(max=np.maximum, min=np.minimum), **_TYPES,
    }  # fmt: skip
    emulate_activations(monkeypatch)
    modules = bits, numbers, magnitudes, quantize, k_major, glu_backward
    for module in (*modules, hadamard, philox, quantized_rows):
        for name, function in functions.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)


def _coords(rows, columns, groups, ends, matrix_rows, size=128, width=128):
    """Block, chunk, first row, end row, whether it is of a group, and the group."""
    last = [*ends, rows] if ends is not None else [(g + 1) * matrix_rows for g in range(groups)]
    first, block = 0, 0
    for group, end in enumerate(last):
        for start in range(first, end, size):
            for chunk in range(-(-columns // width)):
                live = ends is None or group < len(ends)
                yield block, chunk, start, min(start + size, end), live, min(group, groups - 1)
            block += 1
        first = end


def quantize_glu_backward(monkeypatch, dy, preact, scales, ends, glu, results, spec):
    """Write what the kernel writes, of contiguous operands, in groups up to ``ends``.

    ``results`` are `KMajorPieces`, the partial sums, the values, and elements and scales of the
    activation. Where values are quantized in another launch, by the magnitudes found in the first,
    that of both.
    """
    from fusible.kernels.quantize.device import glu_backward, quantize
    from fusible.kernels.quantize.device.blocks import BlockCoord
    from fusible.kernels.quantize.device.k_major import KMajorOut

    preact, preact_scale = preact if spec.quantized_preact else (preact, None)
    rows, columns = preact.shape
    width = 256 if spec.both_sides else 128
    coords = list(_coords(rows, columns, len(ends), ends, rows, width=width))
    coords = np.array(coords)[:, :, None]
    block, chunk, *coord = np.moveaxis(coords, 1, 0)
    if spec.both_sides:
        chunk = glu_backward.first_chunk(chunk, glu.interleave or columns // 2, spec)
    memory = Memory()
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        emulate(patch, len(coords), memory)
        patch.setattr(quantize, "block_coord", lambda *_: BlockCoord(*coord))
        pieces, (partials, values, *act) = results[:4], results[5:]
        sizes = rows, columns, len(ends), rows
        tile = quantize.thread_tile(block, chunk, *sizes, None, spec.quantize)
        operands = [0 if t is None else memory.place(t) for t in (dy, preact, preact_scale, scales)]
        stripe = glu.interleave or columns // glu.sides
        source = glu_backward.GluSource(*operands, stripe, rows, tuple(map(f32, glu[2:])))
        pitch = max(t.shape[-1] for t in (pieces[2], act[0]))
        out = KMajorOut(*[memory.place(t) for t in pieces], pitch)
        data, scale = [memory.place(t) for t in act]
        act_out = out._replace(col_data=data, col_scale=scale)
        amax = torch.zeros(len(ends), dtype=torch.int32)
        more = act_out, *[memory.place(t) for t in (partials, values)]
        given = source, tile, rows, columns, memory.place(amax), out, *more
        glu_backward.quantize_gradients(*given, spec)
    if spec.quantize.has_matrix_scales:
        quantize_k_major(monkeypatch, values, ends, None, results[:4], spec.quantize, amax)


def largest_magnitudes(monkeypatch, x, ends, index, spec):
    """What `amax_bits` gives of ``x``, with contiguous rows, for the quantizer of ``spec``."""
    from fusible.kernels.quantize.device import quantize
    from fusible.kernels.quantize.device.blocks import BlockCoord

    spec = spec._replace(k_major=index is not None, rowwise=True)
    matrix_rows, columns = x.shape[-2:]
    rows = x.numel() // columns
    if index is not None:
        rows = matrix_rows = len(index)
    groups = len(ends) if ends is not None else rows // matrix_rows
    layout = spec.rows, THREADS // spec.parts * spec.vector
    coords = np.array(list(_coords(rows, columns, groups, ends, matrix_rows, *layout)))
    block, chunk, *coord = np.moveaxis(coords[:, :, None], 1, 0)
    memory, amax = Memory(), torch.zeros(groups, dtype=torch.int32)
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        emulate(patch, len(coords), memory)
        patch.setattr(quantize, "block_coord", lambda *_: BlockCoord(*coord))
        source, target = memory.place(x), memory.place(amax)
        named = 0 if index is None else memory.place(index)
        sizes = rows, columns, groups, matrix_rows
        tile = quantize.thread_tile(block, chunk, *sizes, None, spec)
        words = quantize.load_input(source, named, columns, tile, spec)
        quantize.raise_to_largest(target + tile.group * 4, words, spec.dtype)
    return amax


def quantize_k_major(monkeypatch, x, ends, index, pieces, spec, amax=None):
    """Write what the kernel writes of ``x``, with contiguous rows, in groups up to ``ends``.

    ``index``, if any, says which of them each row is. ``amax`` is found before, unless given.
    """
    from fusible.kernels.quantize.device import k_major, quantize
    from fusible.kernels.quantize.device.blocks import BlockCoord

    matrix_rows, columns = x.shape[-2:]
    rows = x.numel() // columns
    if index is not None:
        rows = matrix_rows = len(index)
    groups = len(ends) if ends is not None else rows // matrix_rows
    coords = np.array(list(_coords(rows, columns, groups, ends, matrix_rows)))[:, :, None]
    block, chunk, *coord = np.moveaxis(coords, 1, 0)
    memory = Memory()
    if amax is None and spec.has_matrix_scales:
        amax = largest_magnitudes(monkeypatch, x, ends, index, spec)
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        emulate(patch, len(coords), memory)
        patch.setattr(quantize, "block_coord", lambda *_: BlockCoord(*coord))
        source, *outputs = [memory.place(t) for t in (x, *pieces[:4])]
        named = 0 if index is None else memory.place(index)
        sizes = rows, columns, groups, matrix_rows
        tile = quantize.thread_tile(block, chunk, *sizes, None, spec)
        out = k_major.KMajorOut(*outputs, pieces[2].shape[-1])
        largest = 0 if amax is None else memory.place(amax)
        given = source, named, columns, tile, rows, columns, matrix_rows, largest, out
        k_major.quantize_block(*given, spec)


def quantize_nvfp4(monkeypatch, x, ends, key, made, spec):
    """Write to ``made`` what the two kernels write of contiguous ``x``, in groups up to ``ends``.

    Column-wise scales of blocks of no rows are left as they are, and scales of whole matrices.
    """
    from fusible.kernels.quantize.device import philox, quantize
    from fusible.kernels.quantize.device.blocks import BlockCoord
    from fusible.kernels.quantize.device.hadamard import transformed

    matrix_rows, columns = x.shape[-2:]
    rows = x.numel() // columns
    ends = None if ends is None else [min(end, rows) for end in ends]
    groups = len(ends) if ends is not None else rows // matrix_rows
    coords = np.array(list(_coords(rows, columns, groups, ends, matrix_rows, 16, 1024)))
    amax, memory = torch.zeros(2 * groups, dtype=torch.int32), Memory()
    addresses = [memory.place(t) for t in (x, amax)]
    keyed = 0 if key is None else memory.place(key)
    pieces = [t for use in made[:2] for t in (use[:3] if use else (None,) * 3)]
    out = quantize.QuantizedOut(
        *[0 if t is None else memory.place(t) for t in (*pieces, *made[2:])]
    )
    col_blocks = 0 if made.column is None else made.column.scale.numel() // columns
    sizes = rows, columns, groups, matrix_rows

    def each_kind():
        is_whole = coords[:, 3] - coords[:, 2] == 16
        for whole in (True, False):
            of_kind = coords[is_whole == whole][:, :, None]
            if not len(of_kind):
                continue
            block, chunk, *coord = np.moveaxis(of_kind, 1, 0)
            with monkeypatch.context() as patch, np.errstate(all="ignore"):
                emulate(patch, len(of_kind), memory)
                patch.setattr(quantize, "block_coord", lambda *_, c=coord: BlockCoord(*c))
                yield whole, quantize.thread_tile(block, chunk, *sizes, None, spec)

    hadamard = spec.format.hadamard
    for whole, tile in each_kind():
        words = quantize.load_rows(addresses[0], columns, tile, spec)
        target = addresses[1] + np.broadcast_to(tile.group, words[0][0].shape) * 4
        quantize.raise_to_largest(target, words, spec.dtype)
        if hadamard:
            of_columns = transformed(words, spec.dtype, whole)
            quantize.raise_to_largest(target + 4 * groups, *of_columns)
    for whole, tile in each_kind():
        outers, common = quantize._matrix_scales(addresses[1], groups, tile, spec)
        given = (
            addresses[0],
            columns,
            tile,
            outers,
            common,
            philox.load_key(keyed) if keyed else None,
        )
        quantize._quantize_block(*given, 0, out, columns, col_blocks, spec, whole=whole)
