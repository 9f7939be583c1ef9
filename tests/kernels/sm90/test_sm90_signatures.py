"""Launches have the number and kinds of arguments that the compiled kernels take.

The kernels are compiled, and called as on a GPU: what a machine without one then says is that it
has no driver, which is after it has looked at the arguments.
"""

from functools import cache

import pytest
import torch
from sm90_launches import forget_launches, load_kernels, take_cpu_tensors

from fusible.kernels.glu import Glu
from fusible.kernels.runtime.launch import load_kernel
from fusible.kernels.sm90 import checked_products as ops

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would run the kernels")

ENDS = torch.tensor([100, 100, 230], dtype=torch.int32)
PADDED = torch.tensor([128, 128, 384], dtype=torch.int32)
ROWS, INNER, OUTER = 230, 128, 256


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The names of the kernels that were called, each compiled for a GPU that is not there."""
    called = []

    @cache
    def load(path, what, gpu):
        function = load_kernel(path, what, gpu)

        def call(*arguments):
            called.append(what[0])
            with pytest.raises(RuntimeError, match=r"(?i)cuda"):
                function(*arguments)

        return call

    load_kernels(monkeypatch, load)
    take_cpu_tensors(monkeypatch)
    yield called
    forget_launches()


def operands(fp8):
    """``x``, ``dy``, weights for each, and scales by the names of the ops' arguments."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    x, dy = torch.zeros(ROWS, INNER).to(dtype), torch.zeros(ROWS, OUTER).to(dtype)
    w, w2 = torch.zeros(3, OUTER, INNER).to(dtype), torch.zeros(3, 2 * INNER, OUTER).to(dtype)
    return x, dy, w, w2


def scale(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_products_of_rows(fp8, compiled):
    x, dy, w, w2 = operands(fp8)
    scales, preact = torch.ones(ROWS), torch.zeros(ROWS, 4 * INNER).bfloat16()
    of_x = {"x_scale": scale(ROWS, 1), "w_scale": scale(3, 2, 1)} if fp8 else {}
    ops.grouped_mm(x, [w], ENDS, **of_x)
    ops.grouped_glu(x, [w], ENDS, scales, Glu(), **of_x)
    if not fp8:
        ops.grouped_dglu(dy, [w2.mT.contiguous()], ENDS, preact, scales, Glu())
    kinds = [getattr(spec, "kind", spec) for spec in compiled]
    assert kinds == ["store", "glu"] + ([] if fp8 else ["dglu", "float32"])


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_weight_gradients(fp8, compiled):
    x, dy, *_ = operands(False)
    ends, scales = ENDS, {}
    if fp8:
        ends, scales = PADDED, {"dy_scale": scale(3, OUTER), "x_scale": scale(3, INNER)}
        x, dy = [torch.zeros(n, 384).to(torch.float8_e4m3fn).t() for n in (INNER, OUTER)]
    ops.grouped_wgrad(dy, x, ends, **scales)
    out = torch.zeros(3, OUTER, INNER)
    ops.grouped_wgrad_([out], dy, x, ends, True, **scales)
    assert [spec.out_dtype for spec in compiled] == ["bfloat16", "float32"]


def test_end_rows(compiled):
    ops.group_ends(torch.tensor([100, 0, 130]), ROWS)
    assert compiled == ["int64"]
