"""The kernels that move rows compile for Hopper and Blackwell on a machine with no GPU."""

import pytest
from checks import assert_no_spills

pytest.importorskip("cutlass")

from fusible.kernels.moe.spec import (
    MAX_GROUPS,
    PermuteSpec,
    RouteSpec,
    RouteTokensSpec,
    RowsSpec,
    SortSpec,
)
from fusible.kernels.runtime.launch import compile_kernel
from fusible.recipes.formats import E5M2, fp8_block

KERNELS = [
    ("moe.rows.sources", RowsSpec("f32", 0, 8, "choice")),
    ("moe.rows.sources", RowsSpec("bf16", 0, 6, "choice", "bf16")),
    ("moe.rows.scatter", RowsSpec("bf16", 256, 8, "choice")),
    ("moe.rows.scatter", RowsSpec("f16", 896, 8, "choice", "bf16", scale=True)),
    ("moe.rows.scatter", RowsSpec("bf16", 3, 1)),
    ("moe.rows.scatter", RowsSpec("f32", 128, 5, "row", scale=True)),
    ("moe.rows.gather", RowsSpec("bf16", 256, 8, values="f32")),
    ("moe.rows.gather", RowsSpec("f16", 896, 12, "row", "f16")),
    ("moe.rows.gather", RowsSpec("f32", 5, 2, "choice", values="bf16")),
    ("moe.rows.gather", RowsSpec("bf16", 256, 12, reads_ahead=True)),
    ("moe.rows.scatter", RowsSpec("bf16", 256, 8, "choice", processes=2)),
    ("moe.rows.gather", RowsSpec("bf16", 256, 8, values="f32", processes=4)),
    ("moe.rows.dots", RowsSpec("bf16", 256, 8)),
    ("moe.rows.dots", RowsSpec("f32", 5, 10, "row")),
    ("moe.bias.group_sums", RowsSpec("bf16", 360, 1)),
    ("moe.bias.group_sums", RowsSpec("f16", 5, 1, "row", "bf16")),
    ("moe.bias.group_sums", RowsSpec("f32", 720, 1, "row")),
    ("moe.bias.group_sums", RowsSpec("bf16", 360, 1, "row", indexed=True)),
    ("moe.bias.group_dots", RowsSpec("bf16", 360, 1)),
    ("moe.bias.group_dots", RowsSpec("bf16", 360, 1, indexed=True)),
    ("moe.bias.group_dots", RowsSpec("f32", 5, 1)),
    ("moe.router.route", RouteSpec(128, 8, False, True, 1.0)),
    ("moe.router.route", RouteSpec(60, 4, False, False, 1.0)),
    ("moe.router.route", RouteSpec(256, 8, True, True, 2.5, biased=True, groups=(8, 4, 2))),
    (
        "moe.router.route_tokens",
        RouteTokensSpec(RouteSpec(128, 8, False, True, 1.0), "bf16", 256),
    ),
    (
        "moe.router.route_tokens",
        RouteTokensSpec(RouteSpec(60, 4, True, False, 1.0), "f16", 5, "bf16"),
    ),
    (
        "moe.router.route_tokens",
        RouteTokensSpec(
            RouteSpec(256, 8, True, True, 2.5, biased=True, groups=(8, 4, 2)),
            "f32",
            1792,
            "f32",
        ),
    ),
    ("moe.router.route_backward", RouteSpec(128, 8, False, True, 1.0)),
    ("moe.router.route_backward", RouteSpec(60, 4, False, False, 1.0)),
    ("moe.router.route_backward", RouteSpec(320, 10, True, True, 2.5)),
    ("moe.placement.permutation", SortSpec(128, wide=True, ctas=8)),
    ("moe.placement.permutation", SortSpec(MAX_GROUPS, wide=False, ctas=8)),
    ("moe.placement.permutation", SortSpec(60, wide=True, ctas=1)),
    ("moe.permuted_rows.permute_rows", PermuteSpec(RowsSpec("bf16", 256, 8, "choice"), 128, True)),
    (
        "moe.permuted_rows.permute_rows",
        PermuteSpec(RowsSpec("f16", 896, 32, "choice", "bf16", scale=True), MAX_GROUPS, False),
    ),
    ("moe.permuted_rows.permute_rows", PermuteSpec(RowsSpec("f32", 5, 1, "choice"), 60, True)),
    (
        "moe.permuted_rows.permute_rows",
        PermuteSpec(RowsSpec("bf16", 896, 8, "choice"), 256, True, fp8_block(E5M2)),
    ),
]


# Of each kernel one: the code is that for Hopper, which is compiled in every form.
ON_BLACKWELL = dict(KERNELS)


@pytest.mark.parametrize(
    ("kernel", "spec", "architecture"),
    [
        *[(*case, "sm_90a") for case in KERNELS],
        *[(*case, "sm_100a") for case in ON_BLACKWELL.items()],
    ],
    ids=lambda v: str(v)[:60],
)
def test_kernels_compile_without_spills(kernel, spec, architecture, capfd, tmp_path):
    options = f"--gpu-arch {architecture} remarks{{ptx}} --keep-ptx --dump-dir={tmp_path}"
    compile_kernel(kernel, (spec,), options)
    assert_no_spills("".join(capfd.readouterr()), architecture)
    # They start before the kernel ahead has ended, whose results they read.
    (ptx,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    before, after = ptx.split("griddepcontrol.wait")
    ahead = 4 * spec.top_k if getattr(spec, "reads_ahead", False) else 0  # the row map
    assert before.count("ld.global") == ahead
    assert "ld.global" in after


def test_kernels_for_older_gpus_do_not_overlap(tmp_path):
    options = f"--gpu-arch sm_80 --keep-ptx --dump-dir={tmp_path}"
    compile_kernel("moe.rows.scatter", (RowsSpec("bf16", 256, 8, "choice"),), options)
    (ptx,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert "griddepcontrol" not in ptx
