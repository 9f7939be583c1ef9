"""The grouped products in Triton: run by its interpreter, compiled for GPUs that are not here."""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fusible.kernels.grouped import portable

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA"
)
SHARED_BYTES = 99 * 1024  # of a block on SM 8.6, 8.9 and 12.0, the least of all


def test_in_the_interpreter():
    """In a process of its own: Triton decides when it is imported."""
    file = Path(__file__).parent / "portable_products.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("sm", "dtype"), [(80, torch.bfloat16), (120, torch.float16), (89, torch.float32)]
)
@pytest.mark.parametrize("name", ["rows_grouped", "reduction_grouped"])
def test_compiled(sm, dtype, name):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusible.kernels.grouped.device import products

    kernel, blocks = getattr(products, name), portable.tile_options(dtype, name)
    warps = {"num_warps": blocks.pop("num_warps")}
    names = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    flags = {"has_bias": True, "has_scale": True, "slots": 256}
    constants = {key: value for key, value in (flags | blocks).items() if key in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    matrices = [key for key in ("x", "w", "dy", "bias", "row_scale", "out") if key in types]
    types |= dict.fromkeys(matrices, names[dtype]) | {"ends": "*i32"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=warps)
    assert made.metadata.shared <= SHARED_BYTES
    assert ("mma." in made.asm["ptx"]) == (dtype != torch.float32)
