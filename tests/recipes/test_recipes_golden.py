"""Every bit of the formats against golden vectors, on the CPU and on a GPU.

``tests/golden/make.py``, an independent program, made them from the specifications.
"""

import gzip
import json
import struct
from pathlib import Path

import pytest
import torch
from number_formats import FORMATS
from torch.nn import functional

from fusible.recipes.encoding import DECODERS, e8m0_value
from fusible.recipes.formats import E2M1, E4M3, E5M2, nvfp4
from fusible.recipes.matrix import Uses
from fusible.recipes.quantization import quantize
from fusible.recipes.quantize_ops import quantize_for, quantize_matrix

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads(gzip.decompress((GOLDEN / "blocks.json.gz").read_bytes()))
VALUES = {k: bytes.fromhex(v) for k, v in json.loads((GOLDEN / "values.json").read_text()).items()}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def floats(raw, device="cpu"):
    return torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw), device=device)


def raw(tensor):
    return bytes(tensor.cpu().flatten().view(torch.uint8).tolist())


def same_values(a, b):
    """Equal with signs of zeros, all NaN alike."""
    a, b = (torch.where(t.isnan(), torch.nan, t.float()).cpu() for t in (a, b))
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def device_of(name):
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i]['format']}")
def test_golden_blocks(case, device):
    case, fmt, device = CASES[case], FORMATS[CASES[case]["format"]], device_of(device)
    x = floats(bytes.fromhex(case["input"]), device).view(-1, case["columns"])
    for columnwise in (False, True) if fmt.directional else (False,):
        along = x.mT.contiguous() if columnwise else x
        if columnwise:
            # Packing needs an even number of columns, the kernels on CUDA one of eight.
            along = functional.pad(along, (0, -along.shape[1] % 8))
        quantized = quantize_matrix(along, fmt, rowwise=not columnwise, columnwise=columnwise)[
            columnwise
        ]
        scale = quantized.scale.mT[: x.shape[0]] if columnwise else quantized.scale
        assert raw(scale) == bytes.fromhex(case["scale"])
        if quantized.tensor_scale is not None:
            assert raw(quantized.tensor_scale) == bytes.fromhex(case["tensor_scale"])
        elements = DECODERS[fmt.element](quantized.data)
        if columnwise:
            rowwise = quantize(x, fmt)
            assert same_values(elements.mT[: x.shape[0]], DECODERS[fmt.element](rowwise.data))
        else:
            assert raw(quantized.data) == bytes.fromhex(case["data"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    json.loads((GOLDEN / "training.json").read_text()),
    ids=lambda c: f"{c['columns']}-{c['hadamard']}-{c['key']}",
)
def test_golden_transform_and_stochastic_rounding(case, device):
    device, key = device_of(device), case["key"]
    x = floats(bytes.fromhex(case["input"]), device).view(-1, case["columns"]).bfloat16()
    fmt = nvfp4(hadamard=case["hadamard"], stochastic=key is not None)
    key = None if key is None else torch.tensor(key, device=device)
    made = quantize_for(x, fmt, Uses(False, True), key=key).column
    assert raw(made.data) == bytes.fromhex(case["data"])
    assert raw(made.scale) == bytes.fromhex(case["scale"])
    assert raw(made.tensor_scale) == bytes.fromhex(case["tensor_scale"])


def test_golden_values_of_every_code():
    for element in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(element.dtype)
        assert same_values(codes.float(), floats(VALUES[element.name]))
    low = torch.arange(16, dtype=torch.uint8)
    packed = low | (low.flip(0) << 4)
    decoded = DECODERS[E2M1](packed)
    want = floats(VALUES["e2m1"])
    assert torch.equal(decoded[0::2], want)
    assert torch.equal(decoded[1::2], want.flip(0))
    assert same_values(e8m0_value(torch.arange(256, dtype=torch.uint8)), floats(VALUES["e8m0"]))
