"""A grouped MLP's prepared launches are those that the checked entries make; nothing runs."""

import contextlib

import pytest
import torch

from fusible.kernels.sm90 import launch, mlp, ops
from fusible.kernels.sm90.spec import Spec, Tile

NO_OPTIONS = ("swiglu", 0, 0.0, 0.0, 0.0)
QGEGLU = ("clamped_qgeglu", 32, 7.0, 1.702, 1.0)
OUTPUTS = {"out", "d_preact", "partials"}
ADDRESSES = ("a", "b", "preact", "out", "d_preact", "ends", "table", "bias", "scales", "partials")


@pytest.fixture
def launches(monkeypatch):
    """What kernels are started with, instead of starting them; tensors may be on the CPU."""
    made = []

    def kernel(spec):
        return lambda *arguments: made.append((spec, arguments))

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "_tile_sums", lambda _: lambda *_: None)
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(launch, "tile_counter", lambda *_: 0)
    monkeypatch.setattr(launch, "_on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(ops, "_check_matrix", lambda _, x: (*x.shape, x.stride(0)))
    monkeypatch.setattr(mlp, "is_direct", lambda _: True)
    yield made
    launch.prepared.cache_clear()
    mlp._mlp.cache_clear()


def test_kernels_are_kept_by_the_source_they_are_made_from(monkeypatch):
    kept = {}
    monkeypatch.setattr(launch, "kept", lambda folder, name, _: kept.setdefault(name, folder))
    launch.kernel.__wrapped__(Spec("store", Tile(128, 128)))
    launch._group_ends.__wrapped__(torch.int64)
    launch._tile_sums.__wrapped__(torch.float32)
    assert len(kept) == 3
    for folder in kept.values():
        assert (folder / "device" / "gemm.py").exists()


def equal(one, other):
    """Whether two launches agree in all but where new tensors lie."""
    (spec, arguments), (other_spec, other_arguments) = one, other
    changed = {
        ADDRESSES[i] if i < len(ADDRESSES) else i
        for i, (a, b) in enumerate(zip(arguments, other_arguments, strict=True))
        if a != b
    }
    return spec == other_spec and changed <= OUTPUTS


@pytest.mark.parametrize("sizes", [(8, 64, 32, 64), (3, 128, 640, 90), (4, 256, 384, 4000)])
@pytest.mark.parametrize("options", [NO_OPTIONS, QGEGLU], ids=["swiglu", "qgeglu"])
def test_prepared_launches_are_the_checked_ones(launches, sizes, options):
    groups, hidden, inner, rows = sizes

    def random(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16)

    x, dy, act = random(rows, hidden), random(rows, hidden), random(rows, inner)
    preact, w1 = random(rows, 2 * inner), random(groups, 2 * inner, hidden)
    w2, scales, ends = random(groups, hidden, inner), torch.rand(rows), torch.zeros(groups).int()
    names = ("activation", "interleave", "limit", "alpha", "offset")
    it = mlp.prepared_mlp(
        [x, dy, preact], [w1], [w2], scales, **dict(zip(names, options, strict=True))
    )
    assert it is not None
    dglu = (dy, [w2], ends, preact, scales, *options)
    pairs = (
        (it.glu(x, w1, ends, scales, True),
         ops.grouped_gemm_glu(x, [w1], ends, None, scales, *options, True)),
        (it.glu(x, w1, ends, scales, False),
         ops.grouped_gemm_glu(x, [w1], ends, None, scales, *options, False)),
        (it.fc2(act, w2, ends), ops.grouped_gemm(act, [w2], ends, None, None, False)),
        (it.dglu(dy, w2, ends, preact, scales, False), ops.grouped_gemm_dglu(*dglu)),
        (it.dglu(dy, w2, ends, preact, scales, True), ops.grouped_gemm_dglu(*dglu, overwrite=True)),
        (it.dgrad1(preact, w1, ends), ops.grouped_gemm(preact, [w1], ends, None, None, True)),
        (it.wgrad1(preact, x, ends), ops.grouped_wgrad(preact, x, ends, None)),
        (it.wgrad2(dy, act, ends), ops.grouped_wgrad(dy, act, ends, None)),
    )  # fmt: skip
    assert len(launches) == 2 * len(pairs)
    for i, results in enumerate(pairs):
        assert equal(launches[2 * i], launches[2 * i + 1]), i
        for one, other in zip(*map(_as_tuple, results), strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype


def _as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a | {"w1": [*a["w1"], *a["w1"]]},
        lambda a: a | {"w2": [a["w2"][0].float()]},
        lambda a: a | {"w2": [a["w2"][0].mT.contiguous().mT]},
        lambda a: a | {"rows": [a["rows"][0][::2]]},
        lambda a: a | {"rows": [a["rows"][0][:0]]},
        lambda a: a | {"scales": a["scales"][:, None]},
    ],
    ids=["separate", "dtype", "transposed", "pitched", "no rows", "scales"],
)
def test_what_is_laid_out_otherwise_is_not_prepared(launches, change):
    given = {
        "rows": [torch.zeros(16, 64).bfloat16()],
        "w1": [torch.zeros(2, 64, 64).bfloat16()],
        "w2": [torch.zeros(2, 64, 32).bfloat16()],
        "scales": torch.ones(16),
    }
    options = {"activation": "swiglu", "interleave": 0}
    assert mlp.prepared_mlp(**given, **options) is not None
    assert mlp.prepared_mlp(**change(given), **options) is None
