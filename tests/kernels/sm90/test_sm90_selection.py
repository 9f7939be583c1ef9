"""The kernels that run a grouped product on a GPU are those that a plan for it names."""

import itertools

import pytest
import reference as ref
import torch
from sm90_launches import sm90_on_cpu

import fusible as fz
from fusible import versions
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions, pytorch
from fusible.kernels.sm90 import checked_products, grouped_products, limits, operands
from fusible.testing import assume_target
from fusible.versions import CUTLASS_DSL, Version

DEVICES = itertools.count()  # a device of its own for each case: the choice is kept


@pytest.fixture
def gpu(monkeypatch):
    """Sets what the library ops find on a GPU; gives that GPU."""
    operands.supports.cache_clear()

    def pretend(sm, cutlass=True):
        monkeypatch.setattr(operands, "sm_of", lambda _: sm)
        monkeypatch.setattr(operands, "has_cutlass", lambda: cutlass)
        return torch.device("cuda", next(DEVICES) % 100)

    yield pretend
    operands.supports.cache_clear()


def planned(sm, dtype, features, cutlass):
    """Whether a plan for the machine names the SM90 kernels for a grouped linear."""
    linear = fz.GroupedLinear(2, *features, bias=False, dtype=dtype)
    version = CUTLASS_DSL if cutlass else Version(1, 0)
    x, splits = torch.randn(6, features[0], dtype=dtype), torch.tensor([2, 4])
    with assume_target(fz.Target("cuda", sm, cutlass_dsl=version)):
        (plan,) = fz.explain(linear, x, splits).plans
    return "sm90" in plan.kernels


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 103, 120])
def test_the_choice_at_run_time_is_that_of_the_plan(sm, gpu):
    chosen = set()
    for dtype, *features in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32, torch.float64), (8, 12, 64), (4, 24)
    ):
        for cutlass in (True, False):
            operands.supports.cache_clear()
            runs = operands.supports(gpu(sm, cutlass), dtype, *features)
            assert runs == planned(sm, dtype, features, cutlass), (dtype, features, cutlass)
            chosen.add(runs)
    assert chosen == ({True, False} if sm == 90 else {False})


@pytest.mark.parametrize(
    ("sm", "dtype", "features", "interleave", "ran"),
    [
        (90, torch.bfloat16, 16, 0, "glu"),
        (90, torch.float16, 64, 32, "glu"),
        (90, torch.bfloat16, 24, 0, "store"),  # 12 gates are no whole 16 bytes
        (90, torch.bfloat16, 24, 3, "store"),
        (90, torch.bfloat16, 12, 0, "pytorch"),
        (90, torch.float32, 16, 0, "definitions"),
        (80, torch.bfloat16, 16, 0, "pytorch"),
        (100, torch.float16, 16, 0, "definitions"),
    ],
)
def test_each_call_runs_the_kernels_that_take_it(
    gpu, monkeypatch, sm, dtype, features, interleave, ran
):
    """With the definition's values, whoever multiplies."""
    x, w = torch.randn(6, 8, dtype=dtype), torch.randn(2, features, 8, dtype=dtype)
    ends, scales, glu = torch.tensor([2, 5]).int(), torch.rand(6), Glu(interleave=interleave)
    want = grouped.grouped_glu(x, [w], ends, scales, glu)
    called = []

    def grouped_mm(x, w, offs):
        called.append("pytorch")
        return definitions.grouped_mm(x, [w], offs, None, None, True)

    device = gpu(sm)
    with sm90_on_cpu() as loaded, monkeypatch.context() as patch:
        for module in (checked_products, grouped_products):
            patch.setattr(module, "supports", lambda _, *case: operands.supports(device, *case))
        patch.setattr(pytorch.F, "grouped_mm", grouped_mm)
        patch.setattr(versions, "has_triton", lambda: False)
        got = grouped.grouped_glu(x, [w], ends, scales, glu)
    assert [*[spec.kind for spec in loaded], *called, "definitions"][0] == ran
    ref.assert_equal_elsewhere(got, want)


def test_the_limits_of_an_epilogue():
    """Whole stripes of gate columns, which are whole 16 bytes; of an activation that it has."""
    for interleave, columns in itertools.product((0, 1, 3, 8, 64, 2048), (4, 8, 64, 72, 4096)):
        fits = columns % 8 == 0 and interleave in limits.INTERLEAVES
        fits = fits and columns % max(interleave, 1) == 0
        assert limits.supports_activation("swiglu", interleave, 2 * columns) == fits
        assert limits.supports_activation("srelu", interleave, columns) == (
            fits and interleave == 0
        )
    assert not limits.supports_activation("another", 0, 64)
