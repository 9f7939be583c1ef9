"""The code of the NVFP4 quantizers, run thread by thread on the CPU: bits of the definition."""

import pytest
import simt
import torch

pytest.importorskip("cutlass")

from fusible.kernels.quantize.spec import QuantizeSpec
from fusible.kernels.runtime.gpu import PTX_NAMES
from fusible.recipes.formats import nvfp4
from fusible.recipes.matrix import Uses, as_bytes
from fusible.recipes.quantization import dequantize
from fusible.recipes.quantize_ops import empty, quantize_by_formulas

FORMATS = [
    nvfp4(),
    nvfp4(hadamard=True),
    nvfp4(stochastic=True),
    nvfp4(hadamard=True, stochastic=True),
    nvfp4((16, 16)),
]
ENDS = {"none": None, "ragged": [0, 1, 33, 49, 49, 80, 95], "tail": [5, 5, 40], "beyond": [32, 999]}
ROWS = 100


def rows(columns, dtype, seed=0):
    """Numbers of many magnitudes, blocks of zeros, an outlier, NaN and infinity."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, columns, generator=g) * 2.0 ** torch.randint(
        -9, 3, (1, columns), generator=g
    )
    x[:, 16:32] = 0
    x[3, 40] = 1000
    x[35, 8], x[60, 70] = float("nan"), float("inf")
    x[20, 50:54] = torch.tensor([0.0, -0.0, 1e-9, -1e-9])
    return x.to(dtype)


def codes(matrix):
    return torch.stack((matrix.data & 15, matrix.data >> 4), -1).flatten(-2)


def same(got, want, fmt, ends):
    for a, b in zip(got[:2], want[:2], strict=True):
        if b is None:
            continue
        # Under a scale that is NaN elements are any: on a GPU, NaN has no sign to keep.
        number = ~dequantize(b).isnan()
        assert torch.equal(codes(a)[number], codes(b)[number])
        blocks = len(b.scale)
        if a.columnwise and ends is not None:  # spare blocks, which other code writes, come after
            starts = [0, *ends[:-1]]
            blocks = sum(-(-(min(e, ROWS) - s) // 16) for s, e in zip(starts, ends, strict=True))
        assert torch.equal(
            as_bytes(a.scale)[:blocks].view(torch.uint8),
            as_bytes(b.scale)[:blocks].view(torch.uint8),
        )
    for a, b in zip(got[2:], want[2:], strict=True):
        if b is not None:
            assert torch.equal(a.float().isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(7), b.to(a.dtype).nan_to_num(7))


@pytest.mark.parametrize("dtype", PTX_NAMES, ids=PTX_NAMES.values())
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_kernels_code_gives_the_bits_of_the_definition(fmt, ends, dtype, monkeypatch):
    if ends is not None and not fmt.directional:
        pytest.skip("blocks of 16x16 are not grouped")
    x = rows(72, dtype)
    if ends is None or len(ends) < 4:  # else a group each, which becomes NaN
        x = torch.where(x.isfinite(), x, 1)
    uses = Uses(True, True, True, True) if fmt.directional else Uses(True, False, True, False)
    key = torch.tensor([-(2**40) - 17, 2**35 + 5]) if fmt.stochastic else None
    tensor = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    made = empty(x, tensor, fmt, uses)
    # The kernels write values in BF16.
    made = made._replace(**{
        name: torch.zeros_like(t, dtype=torch.bfloat16)
        for name, t in made._asdict().items()
        if name.endswith("values") and t is not None
    })  # fmt: skip
    spec = QuantizeSpec(fmt, PTX_NAMES[dtype], ends is not None, False, *uses)
    simt.quantize_nvfp4(monkeypatch, x, ends, key, made, spec)
    same(made, quantize_by_formulas(x, tensor, fmt, uses, key), fmt, ends)
