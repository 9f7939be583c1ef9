"""The kernels that move rows compile for Hopper and Blackwell on a machine with no GPU."""

import pytest
from checks import assert_no_spills

pytest.importorskip("cutlass")

from fusible.kernels.moe import cuda
from fusible.kernels.moe.spec import MAX_GROUPS, RouteSpec, RowsSpec, SortSpec

ARCHITECTURES = ("sm_90a", "sm_100a")
KERNELS = [
    ("sources", RowsSpec("f32", 0, 8, "choice")),
    ("sources", RowsSpec("bf16", 0, 6, "choice", "bf16")),
    ("scatter", RowsSpec("bf16", 256, 8, "choice")),
    ("scatter", RowsSpec("f16", 896, 8, "choice", "bf16", scale=True)),
    ("scatter", RowsSpec("bf16", 3, 1)),
    ("scatter", RowsSpec("f32", 128, 5, "row", scale=True)),
    ("gather", RowsSpec("bf16", 256, 8, values="f32")),
    ("gather", RowsSpec("f16", 896, 12, "row", "f16")),
    ("gather", RowsSpec("f32", 5, 2, "choice", values="bf16")),
    ("dots", RowsSpec("bf16", 256, 8)),
    ("dots", RowsSpec("f32", 5, 10, "row")),
    ("group_sums", RowsSpec("bf16", 360, 1)),
    ("group_sums", RowsSpec("f16", 5, 1, "row", "bf16")),
    ("group_sums", RowsSpec("f32", 720, 1, "row")),
    ("group_sums", RowsSpec("bf16", 360, 1, "row", indexed=True)),
    ("group_dots", RowsSpec("bf16", 360, 1)),
    ("group_dots", RowsSpec("bf16", 360, 1, indexed=True)),
    ("group_dots", RowsSpec("f32", 5, 1)),
    ("route", RouteSpec(128, 8, sigmoid=False, normalize=True, scaling_factor=1.0)),
    ("route", RouteSpec(60, 4, sigmoid=False, normalize=False, scaling_factor=1.0)),
    ("route", RouteSpec(256, 8, True, True, 2.5, biased=True, groups=(8, 4, 2))),
    ("route_backward", RouteSpec(128, 8, sigmoid=False, normalize=True, scaling_factor=1.0)),
    ("route_backward", RouteSpec(60, 4, sigmoid=False, normalize=False, scaling_factor=1.0)),
    ("route_backward", RouteSpec(320, 10, sigmoid=True, normalize=True, scaling_factor=2.5)),
    ("permutation", SortSpec(128, wide=True, ctas=8)),
    ("permutation", SortSpec(MAX_GROUPS, wide=False, ctas=8)),
    ("permutation", SortSpec(60, wide=True, ctas=1)),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "spec"), KERNELS, ids=lambda v: str(v)[:60])
def test_kernels_compile_without_spills(kernel, spec, architecture, capfd):
    cuda.compiled(kernel, spec, f"--gpu-arch {architecture} remarks{{ptx}}")
    assert_no_spills("".join(capfd.readouterr()), architecture)
