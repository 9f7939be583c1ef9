"""Every kernel in the tile table compiles for sm_90a without a GPU, and spills no register."""

import struct

import pytest
from pairs import every_pair

from fusible.kernels.runtime.launch import compile_kernel
from fusible.kernels.sm90.spec import BACKWARD, SHARED_BYTES, Spec, Tile
from fusible.kernels.sm90.tiles import FP8_TILES, TILES, supports_tile
from fusible.recipes.formats import fp8_block

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

SWIGLU = {"activation": "swiglu", "row_scale": "float32"}
QGEGLU = {"activation": "clamped_qgeglu", "row_scale": "bfloat16"}
BLOCKS_OF_16 = {"paired": False, "stripe": 16}
SINGLE_COLUMNS = {"paired": False, "stripe": 1}


def variants(kind, tile):
    """Options that change a kernel's code, each at least once; in most tiles those that need most.

    ``supports_tile`` says which a tile need not have.
    """
    halves = {"paired": True, "stripe": tile.n // 2 if kind == "glu" else 32}
    usual = str(tile) == "128x128pp12d"
    if kind == "store":
        yield {"weight_major": "n", "table": True}
        half = {"dtype": "float16", "out_dtype": "float16"}
        yield half | (
            {"bias": True, "row_scale": "float32"}
            if supports_tile(kind, tile, "k", 0, True)
            else {}
        )
        yield from [{"reads_ahead": True}] * Spec("store", tile).can_read_ahead
        if usual:
            yield {"weight_major": "k"}
    elif kind == "glu" and not supports_tile("glu", tile, "n", 0, True):
        yield {**QGEGLU, **halves, "save_preact": False, "table": True}
        yield {**SWIGLU, **halves, "save_preact": True}
        if tile.cluster_m == 1:
            clamped = supports_tile(kind, tile, "k", 8, False, "clamped_qgeglu")
            of_eight = QGEGLU if clamped else SWIGLU
            yield {**of_eight, "paired": False, "stripe": 8, "save_preact": True}
            yield {**QGEGLU, "paired": False, "stripe": 32, "save_preact": True, "table": True}
    elif kind == "glu":
        yield {**QGEGLU, **SINGLE_COLUMNS, "save_preact": True, "bias": True, "weight_major": "n"}
        major = "n" if supports_tile(kind, tile, "n", 0, True) else "k"
        with_bias = {"bias": True, "row_scale": "", "weight_major": major}
        yield {**SWIGLU, **halves, "save_preact": True, **with_bias}
        if usual:
            yield {**SWIGLU, **halves, "save_preact": True}
            yield {**SWIGLU, **BLOCKS_OF_16, "save_preact": False, "weight_major": "n"}
            yield {**QGEGLU, **BLOCKS_OF_16, "save_preact": True, "bias": True, "table": True}
    elif kind == "dglu":
        yield {**SWIGLU, **halves, "weight_major": "n"}
        yield {**QGEGLU, **SINGLE_COLUMNS, "weight_major": "n"}
        if usual:
            yield {**QGEGLU, **BLOCKS_OF_16, "table": True}
    elif kind == "act":
        yield {"activation": "gelu", "save_preact": True, "bias": True, "row_scale": "float32"}
    elif kind == "dact":
        yield {"activation": "gelu", "row_scale": "float32", "weight_major": "n"}
    else:
        yield {"out_dtype": "float32", "accumulate": True, "table": True}
        yield {}


def other_activations():
    """Those left, each with its backward, on the tiles that leave the fewest registers.

    Of each shape that is the last, whose clusters mostly have two rows: see ``supports_tile``.
    """
    act, dact = [*TILES["act"]][-1], [*TILES["dact"]][-1]
    yield Spec("act", act, activation="srelu", save_preact=False, weight_major="n", table=True)
    for name, scale in (("qgelu", "float32"), ("relu", "float32"), ("silu", ""), ("srelu", "")):
        yield Spec("dact", dact, activation=name, row_scale=scale, weight_major="n")
    for name, scale in (
        ("glu", ""), ("geglu", "float32"), ("qgeglu", ""), ("reglu", "float32"),
        ("sreglu", "float32"), ("situglu", "float32"), ("swiglu", ""),
    ):  # fmt: skip
        for kind in ("glu", "dglu") if name in ("geglu", "situglu") else ("dglu",):
            fit = [t for t in TILES[kind] if supports_tile(kind, t, "k", 0, False, name)]
            sums = max(tile.slabs * tile.n for tile in fit)
            large = [tile for tile in fit if tile.slabs * tile.n == sums]
            for tile in {(tile.m, tile.n): tile for tile in large}.values():
                stripe = tile.n // 2 if kind == "glu" else 32
                layout = {"paired": True, "stripe": stripe, "save_preact": kind == "glu"}
                major = "k" if kind == "glu" else "n"
                of = {"activation": name, "row_scale": scale, "weight_major": major}
                yield Spec(kind, tile, **of, **layout)


FP8 = {"dtype": "float8_e4m3fn", "b_scale_layout": "blocks", "out_dtype": "bfloat16"}


def quantized_variants(tile, halves):
    """Those of a gated activation that is quantized."""
    quantized = {**FP8, "b_dtype": "float8_e4m3fn", "out_format": fp8_block()}
    kept = {**quantized, **halves, "quantize_preact": True}
    yield {**quantized, **QGEGLU, **SINGLE_COLUMNS, "save_preact": True}
    yield {**kept, **SWIGLU}
    for save in (False, True):
        yield {**quantized, **SWIGLU, **halves, "save_preact": save}
    if not tile.pingpong:  # a thread has as many values in all of these tiles
        yield {**quantized, **QGEGLU, **SINGLE_COLUMNS, "save_preact": False}
        yield {**quantized, **QGEGLU, **BLOCKS_OF_16, "save_preact": True}
        for name in ("geglu", "glu", "qgeglu", "reglu", "sreglu"):
            yield {**quantized, "activation": name, **halves, "save_preact": True}
        yield {**kept, "activation": "geglu"}


def fp8_variants(kind, tile):
    """The same of FP8 operands."""
    halves = {"paired": True, "stripe": tile.n // 2}
    usual = str(tile) == "128x128pp12d"
    bias = supports_tile(kind, tile, "k", 0, True, fp8=True)
    if kind == "store":
        yield {**FP8, "b_dtype": "float8_e5m2", "bias": bias, "row_scale": "float32"}
        if usual:
            yield FP8
    elif kind == "glu":
        yield {**FP8, **QGEGLU, **SINGLE_COLUMNS, "save_preact": True, "bias": bias}
        yield {**FP8, **SWIGLU, **halves, "save_preact": True}
        if supports_tile(kind, tile, "k", 0, False, "", True, quantized=True):
            yield from quantized_variants(tile, halves)
        if supports_tile(kind, tile, "k", 0, False, "situglu", True):
            situglu = {"activation": "situglu", "row_scale": "float32"}
            yield {**FP8, **situglu, **halves, "save_preact": True}
        if usual:
            yield {**FP8, **SWIGLU, **halves, "save_preact": False}
            yield {**FP8, **QGEGLU, **BLOCKS_OF_16, "save_preact": True, "bias": True}
    elif kind == "act":
        of_rows = {"activation": "gelu", "row_scale": "float32", "bias": bias}
        yield {**FP8, **of_rows, "save_preact": True}
        if supports_tile(kind, tile, "k", 0, bias, "gelu", True, quantized=True):
            yield {**FP8, **of_rows, "save_preact": True, "out_format": fp8_block()}
            yield {**FP8, **of_rows, "quantize_preact": True, "out_format": fp8_block()}
    elif kind == "wgrad":
        into = {"out_dtype": "float32", "accumulate": True, "table": True}
        yield {**FP8, "b_scale_layout": "rows", **into}
        yield {**FP8, "b_scale_layout": "rows", "dtype": "float8_e5m2", "b_dtype": "float8_e4m3fn"}
        yield {**FP8, "b_scale_layout": "blocks", **into}
        if usual:
            yield {**FP8, "b_scale_layout": "rows"}
            yield {**FP8, "b_scale_layout": "blocks"}


KERNELS = [
    Spec(kind, tile, **options)
    for kind, choices in TILES.items()
    for tile in choices
    for options in variants(kind, tile)
]
KERNELS += [
    Spec(kind, tile, **options)
    for kind, choices in FP8_TILES.items()
    for tile in choices
    for options in fp8_variants(kind, tile)
]
KERNELS += other_activations()
# With stripes of 16, of the tiles that leave the fewest registers, those that may have them.
KERNELS += [
    Spec("dglu", tile, **SWIGLU, **BLOCKS_OF_16, weight_major="n")
    for tile in TILES["dglu"]
    if tile.is_register_bound and supports_tile("dglu", tile, "n", 16, False)
]


def parts(spec):
    """The pairs of options that the code treats together.

    The accumulators and the epilogue depend on the options and the tile's shape; loads on its
    cluster and each of `LOADS`; how tiles are assigned, and slots of pre-activations, on the kind.
    """
    tile, kind = spec.tile, (spec.kind, spec.b_scale_layout)
    shape = tile._replace(cluster_m=1, cluster_n=1, dynamic=False, ahead=3)
    options = spec._replace(tile=shape, stripe=-1 if spec.paired else spec.stripe)
    cluster = tile.cluster_m, tile.cluster_n
    loads = [(kind, cluster, field, getattr(spec, field)) for field in LOADS]
    return [options, (kind, tile), *loads]


LOADS = "dtype", "b_dtype", "weight_major", "table", "paired"


def resources(cubin):
    """Registers and stack bytes of each kernel in an ELF image, from its ``.nv.info`` sections."""
    table, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)
    ]
    names = headers[names_index][4]

    def name(header):
        start = names + header[0]
        return cubin[start : cubin.index(b"\0", start)].decode()

    registers, stack = [], []
    for header in headers:
        if name(header) != ".nv.info":
            continue
        at, end = header[4], header[4] + header[5]
        while at < end:
            form, attribute, size = struct.unpack_from("<BBH", cubin, at)
            if form == 4 and attribute in (0x11, 0x2F):  # a function and its frame or registers
                found = registers if attribute == 0x2F else stack
                found.append(struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (size if form == 4 else 0)
    return registers, stack


GEMM = "sm90.gemm.GroupedGemm"
NAMES = {spec: f"{spec.kind}-{spec.tile}-{i}" for i, spec in enumerate(KERNELS)}


@pytest.mark.parametrize("spec", every_pair(KERNELS, parts), ids=NAMES.get)
def test_kernel_compiles_without_spills(spec, tmp_path, record_property, capfd):
    options = f"--gpu-arch sm_90a --keep-cubin --dump-dir={tmp_path} remarks{{ptx}}"
    compiled = compile_kernel(GEMM, (spec,), options)
    report = "".join(capfd.readouterr())
    assert "spill stores" in report
    # Which ptxas tells of as a loss of performance: it takes twice the time.
    assert "serialized" not in report
    registers, stack = resources(compiled.__cubin__)
    assert len(registers) == 1
    assert set(stack) == {0}  # of the kernel, and of a division's slow path
    record_property("registers", f"{registers[0]}: {spec.kind} {spec.tile}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("GroupEnds", "int32"),
        ("GroupEnds", "int64"),
        ("TileSums", "float32"),
        ("TileSums", "bfloat16"),
        ("TileSums", "float64"),
    ],
)
def test_vector_kernel_compiles_without_spills(name, dtype, tmp_path, record_property):
    options = f"--gpu-arch sm_90a --keep-cubin --dump-dir={tmp_path}"
    compiled = compile_kernel(f"grouped.vectors.{name}", (dtype,), options)
    registers, stack = resources(compiled.__cubin__)
    assert len(registers) == 1
    assert registers[0] <= 48
    assert stack == [0]
    record_property("registers", f"{registers[0]}: {name} {dtype}")


@pytest.mark.parametrize("spec", KERNELS, ids=NAMES.get)
def test_shared_memory_fits(spec):
    used = spec.stages * spec.stage_bytes
    used += (2 * spec.out_blocks + spec.sides * spec.preact_slots) * spec.block_bytes
    used += spec.zero_bytes
    assert used <= SHARED_BYTES - 1024
    assert spec.stages % spec.rings == 0
    assert spec.stages >= (3 if spec.rings == 1 else 4)
    assert spec.out_blocks >= (1 if spec.is_backward else 4 if spec.is_fp8 else 2)


@pytest.mark.parametrize("kind", BACKWARD)
def test_the_activations_backward_takes_turns(kind):
    """Without them its warpgroups would wait for each other for ever."""
    spec = Spec(kind, Tile(128, 128, pingpong=False, cluster_n=2), activation="swiglu")
    with pytest.raises(ValueError, match=r"must be ping-pong, .* got 128x128co12; pass pingpong"):
        compile_kernel(GEMM, (spec,))


@pytest.mark.parametrize(
    "spec",
    [
        Spec("store", Tile(64, 128, cluster_n=2), reads_ahead=True),
        Spec("store", Tile(64, 128, dynamic=True), reads_ahead=True),
        Spec("act", Tile(64, 128), reads_ahead=True, activation="gelu"),
        Spec("store", Tile(64, 128), reads_ahead=True, table=True),
    ],
    ids=str,
)
def test_only_a_block_s_own_first_tile_is_read_ahead(spec):
    with pytest.raises(ValueError, match=r"can read ahead, got .*; pass reads_ahead=False"):
        compile_kernel(GEMM, (spec,))


def test_a_ring_has_two_stages():
    with pytest.raises(ValueError, match=r"must have two stages.* got 1 for 1 rings"):
        compile_kernel(GEMM, (Spec("store", Tile(512, 512, pingpong=False)),))


@pytest.mark.parametrize(
    "spec",
    [
        Spec("store", Tile(32, 64)),
        Spec("store", Tile(64, 128, pingpong=False)),
        Spec("store", Tile(16, 128, pingpong=False)),
        Spec("wgrad", Tile(16, 128)),
        Spec("dglu", Tile(16, 128), activation="swiglu"),
    ],
    ids=str,
)
def test_the_rows_of_a_tile_are_those_of_instructions_or_16(spec):
    """Other rows would be stored over the next tile's."""
    with pytest.raises(ValueError, match=r"must have a multiple of 64 rows .* pass other rows"):
        compile_kernel(GEMM, (spec,))
