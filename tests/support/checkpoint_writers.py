"""Checkpoints in published layouts, written with NumPy from their documentation; nothing of ours.

Each writer returns the entries of one matrix, by ending, and its values in FP64.
"""

import numpy as np
import torch

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def bytes_of(a, dtype):
    return torch.from_numpy(np.ascontiguousarray(a, dtype=np.uint8)).view(dtype)


def random_fp4(rng, rows, columns):
    """Codes of two numbers in each byte, the first in the lower bits, and the numbers."""
    codes = rng.integers(0, 16, (rows, columns))
    values = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes & 7]
    return codes[:, ::2] + 16 * codes[:, 1::2], values


def random_e4m3(rng, shape, low=0):
    """Bytes of finite E4M3 numbers from sign, exponent and mantissa, and the numbers."""
    code = rng.integers(low, 127, shape)
    exponent, mantissa = code >> 3, code & 7
    magnitude = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    negative = rng.integers(0, 2, shape) if low == 0 else np.zeros(shape, int)
    return code + 128 * negative, magnitude * np.where(negative, -1.0, 1.0)


def spread(scale, rows, columns, shape):
    whole = scale.repeat(rows, 0).repeat(columns, 1)
    return whole[: shape[0], : shape[1]]


def nvfp4_modelopt(rng, rows, columns, scale_2=0.0173):
    packed, values = random_fp4(rng, rows, columns)
    scale, scales = random_e4m3(rng, (rows, columns // 16), low=1)
    scale_2 = np.float32(scale_2)
    entries = {
        ".weight": bytes_of(packed, torch.uint8),
        ".weight_scale": bytes_of(scale, torch.float8_e4m3fn),
        ".weight_scale_2": torch.tensor(scale_2),
        ".input_scale": torch.tensor(0.003),
    }
    return entries, values * spread(scales, 1, 16, values.shape) * np.float64(scale_2)


def nvfp4_compressed(rng, rows, columns, global_scale=731.5):
    packed, values = random_fp4(rng, rows, columns)
    scale, scales = random_e4m3(rng, (rows, columns // 16), low=1)
    entries = {
        ".weight_packed": bytes_of(packed, torch.uint8),
        ".weight_scale": bytes_of(scale, torch.float8_e4m3fn),
        ".weight_global_scale": torch.tensor([global_scale], dtype=torch.float32),
        ".input_global_scale": torch.tensor([12.0]),
    }
    return entries, values * spread(scales, 1, 16, values.shape) / global_scale


def deepseek(rng, rows, columns, power_of_two=False):
    elements, values = random_e4m3(rng, (rows, columns))
    shape = -(-rows // 128), -(-columns // 128)
    scale = rng.uniform(1e-4, 3e-3, shape).astype(np.float32)
    if power_of_two:
        scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
    entries = {
        ".weight": bytes_of(elements, torch.float8_e4m3fn),
        ".weight_scale_inv": torch.from_numpy(scale),
    }
    return entries, values * spread(scale.astype(np.float64), 128, 128, values.shape)


def mxfp4(rng, rows, columns, endings=("_blocks", "_scales"), in_blocks=True):
    packed, values = random_fp4(rng, rows, columns)
    exponent = rng.integers(115, 124, (rows, columns // 32))
    if in_blocks:
        packed = packed.reshape(rows, columns // 32, 16)
    entries = dict(
        zip(endings, (bytes_of(packed, torch.uint8), bytes_of(exponent, torch.uint8)), strict=True)
    )
    return entries, values * spread(2.0 ** (exponent - 127.0), 1, 32, values.shape)


def mxfp4_compressed(rng, rows, columns):
    return mxfp4(rng, rows, columns, (".weight_packed", ".weight_scale"), in_blocks=False)


def mxfp8(rng, rows, columns):
    elements, values = random_e4m3(rng, (rows, columns))
    exponent = rng.integers(110, 120, (rows, columns // 32))
    entries = {
        ".weight": bytes_of(elements, torch.float8_e4m3fn),
        ".weight_scale": bytes_of(exponent, torch.uint8),
    }
    return entries, values * spread(2.0 ** (exponent - 127.0), 1, 32, values.shape)


def fp8_tensor(rng, rows, columns, scale=0.0071):
    elements, values = random_e4m3(rng, (rows, columns))
    entries = {
        ".weight": bytes_of(elements, torch.float8_e4m3fn),
        ".weight_scale": torch.tensor(scale),
        ".input_scale": torch.tensor(0.5),
    }
    return entries, values * np.float64(np.float32(scale))


def plain(rng, rows, columns):
    values = torch.from_numpy(rng.standard_normal((rows, columns))).to(torch.bfloat16)
    return {".weight": values}, values.double().numpy()


def experts(writer, rng, count, rows, columns, name, **options):
    """Entries ``experts.E.NAME...`` of several experts, and their values ``[E, rows, columns]``."""
    state, values = {}, []
    for expert in range(count):
        entries, value = writer(rng, rows, columns, **options)
        state |= {f"experts.{expert}.{name}{ending}": t for ending, t in entries.items()}
        values.append(value)
    return state, np.stack(values)


def stacked(writer, rng, count, rows, columns, name, **options):
    """Entries ``experts.NAME...`` with a leading dimension, and their values."""
    made = [writer(rng, rows, columns, **options) for _ in range(count)]
    names = made[0][0]
    state = {
        f"experts.{name}{ending}": torch.stack([entries[ending] for entries, _ in made])
        for ending in names
    }
    return state, np.stack([value for _, value in made])
