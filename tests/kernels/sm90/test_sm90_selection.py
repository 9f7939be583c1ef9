"""The kernels that run a grouped product on a GPU are those that a plan for it names."""

import itertools
from types import SimpleNamespace

import pytest
import reference as ref
import torch

import fusible as fz
from fusible.kernels import grouped
from fusible.kernels.grouped import Glu, cuda, definitions
from fusible.kernels.sm90 import checks, limits
from fusible.testing import assume_target
from fusible.versions import CUTLASS_DSL, Version

DEVICES = itertools.count()  # a device of its own for each case: the choice is kept


@pytest.fixture
def gpu(monkeypatch):
    """Sets what the library ops find on a GPU; gives that GPU."""
    checks.supports.cache_clear()

    def pretend(sm, cutlass=True):
        monkeypatch.setattr(checks, "capability", lambda _: divmod(sm, 10))
        monkeypatch.setattr(checks, "has_cutlass", lambda: cutlass)
        return torch.device("cuda", next(DEVICES) % 100)

    yield pretend
    checks.supports.cache_clear()


def planned(sm, dtype, features, cutlass):
    """Whether a plan for the machine names the SM90 kernels for a grouped linear."""
    linear = fz.GroupedLinear(2, *features, bias=False, dtype=dtype)
    version = CUTLASS_DSL if cutlass else Version(1, 0)
    x, splits = torch.randn(6, features[0], dtype=dtype), torch.tensor([2, 4])
    with assume_target(fz.Target("cuda", sm, cutlass_dsl=version)):
        (plan,) = fz.explain(linear, x, splits).plans
    return "grouped_linear_sm90" in plan.fired


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 103, 120])
def test_the_choice_at_run_time_is_that_of_the_plan(sm, gpu):
    chosen = set()
    for dtype, *features in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32, torch.float64), (8, 12, 64), (4, 24)
    ):
        for cutlass in (True, False):
            checks.supports.cache_clear()
            runs = checks.supports(gpu(sm, cutlass), dtype, *features)
            assert runs == planned(sm, dtype, features, cutlass), (dtype, features, cutlass)
            chosen.add(runs)
    assert chosen == ({True, False} if sm == 90 else {False})


@pytest.mark.parametrize(
    ("sm", "dtype", "features", "interleave", "ran"),
    [
        (90, torch.bfloat16, 16, 0, "sm90.grouped_glu"),
        (90, torch.float16, 64, 32, "sm90.grouped_glu"),
        (90, torch.bfloat16, 24, 0, "sm90.grouped_mm"),  # 12 gates are no whole 16 bytes
        (90, torch.bfloat16, 24, 3, "sm90.grouped_mm"),
        (90, torch.bfloat16, 12, 0, "pytorch.grouped_mm"),
        (90, torch.float32, 16, 0, "definitions.grouped_mm"),
        (80, torch.bfloat16, 16, 0, "pytorch.grouped_mm"),
        (100, torch.float16, 16, 0, "definitions.grouped_mm"),
    ],
)
def test_each_call_runs_the_kernels_that_take_it(
    gpu, monkeypatch, sm, dtype, features, interleave, ran
):
    """With the definition's values, whoever multiplies."""
    device, called = gpu(sm), []
    monkeypatch.setattr(cuda.sm90, "supports", lambda _, *case: checks.supports(device, *case))

    def noting(name):
        def run(*args):
            called.append(name)
            return getattr(definitions, name.partition(".")[2])(*args)

        return run

    own = SimpleNamespace(**vars(definitions))
    for name in ("grouped_mm", "grouped_glu"):
        monkeypatch.setattr(cuda.sm90, name, noting(f"sm90.{name}"))
    monkeypatch.setattr(cuda, "pytorch", SimpleNamespace(grouped_mm=noting("pytorch.grouped_mm")))
    own.grouped_mm = noting("definitions.grouped_mm")
    x, w = torch.randn(6, 8, dtype=dtype), torch.randn(2, features, 8, dtype=dtype)
    ends, scales, glu = torch.tensor([2, 5]).int(), torch.rand(6), Glu(interleave=interleave)
    want = grouped.grouped_glu(x, [w], ends, scales, glu)
    monkeypatch.setattr(cuda, "definitions", own)
    got = cuda.grouped_glu(x, [w], ends, scales, glu, None, True)
    assert called == [ran]
    ref.assert_equal(got, want)


def test_the_limits_of_an_epilogue():
    """Whole stripes of gate columns, which are whole 16 bytes; of an activation that it has."""
    for interleave, columns in itertools.product((0, 1, 3, 8, 64, 2048), (4, 8, 64, 72, 4096)):
        fits = columns % 8 == 0 and interleave in limits.INTERLEAVES
        fits = fits and columns % max(interleave, 1) == 0
        assert limits.takes_glu("swiglu", interleave, 2 * columns) == fits
    assert not limits.takes_glu("geglu", 0, 64)
