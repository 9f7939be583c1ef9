"""Kernels kept on disk: none is taken for another, nor for one of other sources."""

import ast
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fusible
from fusible import logs, versions
from fusible.kernels.dense.spec import ActivationBiasSpec, RMSNormSpec
from fusible.kernels.moe.spec import RouteSpec, RowsSpec, SortSpec
from fusible.kernels.quantize.spec import DequantizeSpec, QuantizeSpec
from fusible.kernels.runtime import cache, launch
from fusible.kernels.sm90.spec import Spec, Tile
from fusible.kernels.sm100.spec import PackedQuantizeSpec
from fusible.recipes.formats import E5M2, fp8_block, mxfp8, nvfp4

PACKAGE = Path(fusible.__file__).parent


def imported(path):
    """The files of the package that a file imports from, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fusible."):
            continue
        file = PACKAGE.joinpath(*node.module.split(".")[1:])
        yield from [file.with_suffix(".py"), *[file / f"{a.name}.py" for a in node.names]]
        yield file / "__init__.py"


def test_every_source_of_a_kernel_is_told_apart():
    """All that device code imports, however far away."""
    sources = set(versions.source_files())
    waiting = [path for path in sources if path.parent.name == "device"]
    assert len(waiting) > 20
    seen = set()
    while waiting:
        path = waiting.pop()
        if path.exists() and path not in seen:
            seen.add(path)
            waiting.extend(imported(path))
    assert PACKAGE / "recipes" / "formats.py" in seen
    assert seen <= sources


def test_a_changed_source_is_another_folder(monkeypatch, tmp_path):
    pytest.importorskip("cutlass")
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1")
    other.write_text("2")
    monkeypatch.setattr(versions, "source_files", lambda: [one, other])
    monkeypatch.setattr(cache, "sources_digest", versions.sources_digest.__wrapped__)
    before = cache.directory.__wrapped__()
    assert cache.directory.__wrapped__() == before
    other.write_text("3")
    assert cache.directory.__wrapped__() != before


KERNELS = [
    ("quantize.quantize.quantize", (QuantizeSpec(mxfp8(), "bf16", False, False, True, True),)),
    ("quantize.quantize.amax", (QuantizeSpec(mxfp8(), "bf16", False, False, True, True),)),
    ("quantize.quantize.quantize", (QuantizeSpec(mxfp8(E5M2), "bf16", False, False, True, True),)),
    ("quantize.quantize.quantize", (QuantizeSpec(mxfp8(), "bf16", False, False, True, False),)),
    ("quantize.quantize.quantize", (QuantizeSpec(fp8_block(), "bf16", True, False, True, True),)),
    ("quantize.quantize.quantize",
     (QuantizeSpec(fp8_block(amax_epsilon=0.5), "bf16", True, False, True, True),)),
    ("quantize.dequantize.dequantize", (DequantizeSpec(mxfp8(), "bf16", False, False, False),)),
    ("moe.rows.scatter", (RowsSpec("bf16", 8, 2),)),
    ("moe.rows.gather", (RowsSpec("bf16", 8, 2),)),
    ("moe.router.route", (RouteSpec(8, 2, False, True, 1.0),)),
    ("moe.router.route", (RouteSpec(8, 2, False, True, 1.0000001),)),
    ("moe.placement.permutation", (SortSpec(8, False, 8),)),
    ("moe.placement.permutation", (SortSpec(8, True, 8),)),
    ("dense.activation_bias.activation_bias", (ActivationBiasSpec("gelu", "bf16"),)),
    ("dense.rms_norm.rms_norm_backward", (RMSNormSpec(64, "bf16", True),)),
    ("sm100.quantize.quantize", (PackedQuantizeSpec(nvfp4(), True, True, False, False, True),)),
    ("sm100.quantize.sum_blocks", (32, True)),
    ("sm90.gemm.GroupedGemm", (Spec("store", Tile(128, 128), "bfloat16"),)),
    ("sm90.gemm.GroupedGemm", (Spec("store", Tile(128, 128), "float16"),)),
    ("grouped.vectors.GroupEnds", ("int32",)),
    ("grouped.vectors.GroupEnds", ("int64",)),
    ("grouped.vectors.TileSums", ("float32",)),
    ("grouped.vectors.TileSums", ("bfloat16",)),
]  # fmt: skip


def test_no_kernel_is_taken_for_another(monkeypatch):
    names = []
    monkeypatch.setattr(launch, "load_or_compile", lambda name, _: names.append(name))
    for path, constants in KERNELS:
        for gpu in ("sm_90a", "sm_100a"):
            launch.load_kernel.__wrapped__(path, constants, gpu)
    assert len(set(names)) == len(names) == 2 * len(KERNELS)


def test_a_launch_passes_addresses_and_numbers(monkeypatch):
    """Floats too, of the constants of an activation."""
    called = []
    kernels = {("moe.rows.scatter", (8,), "sm_90a"): lambda *numbers: called.append(numbers)}
    monkeypatch.setattr(launch, "load_kernel", lambda *of: kernels[of])
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    t = torch.zeros(2)
    launch.launch("moe.rows.scatter", (8,), torch.device("cuda", 0), t, 3, None, 1.702)
    assert called == [(t.data_ptr(), 3, 0, 1.702, 5)]


def test_the_numbers_of_a_kernel_are_those_of_its_signature(monkeypatch):
    cutlass = pytest.importorskip("cutlass")
    given = []
    monkeypatch.setattr(cutlass.cute, "compile", lambda *args, **_: given.append(args))
    spec = RowsSpec("bf16", 8, 2)
    launch.compile_kernel("moe.rows.scatter", (spec,))
    launch.compile_kernel("grouped.vectors.TileSums", ("bfloat16",))
    kinds = [[type(a).__name__ for a in args[1:]] for args in given]
    assert [k[:7] for k in kinds] == [["Int64"] * 5 + ["Int32"] * 2, kinds[1]]
    assert given[0][-1] is spec
    assert kinds[1][:4] == ["Int64", "Int64", "Int32", "Int32"]
    assert len(given[1]) == 6


def test_a_kernel_is_compiled_once(monkeypatch, tmp_path):
    """Then read from disk; where nothing can be written, it is taken as it was compiled."""
    pytest.importorskip("cutlass")
    times = []

    compile_kernel, what = launch.compile_kernel, ("sm100.quantize.sum_blocks", (32, True))

    def counted(*arguments):
        times.append(arguments)
        return compile_kernel(*arguments)

    monkeypatch.setattr(launch, "compile_kernel", counted)
    monkeypatch.setattr(cache, "directory", lambda: tmp_path / "kept")
    found = [launch.load_kernel.__wrapped__(*what, "sm_90a") for _ in range(2)]
    assert times == [(*what, "--gpu-arch sm_90a")]
    assert all(map(callable, found))
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".o"]

    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "directory", lambda: tmp_path / "file" / "kept")
    assert callable(launch.load_kernel.__wrapped__(*what, "sm_90a"))
    assert len(times) == 2


def test_threads_compile_one_after_another(monkeypatch, tmp_path):
    """The compiler is not made for two at once; what one thread kept another takes."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    times = []

    compile_kernel = launch.compile_kernel

    def counted(*arguments):
        times.append(arguments)
        return compile_kernel(*arguments)

    monkeypatch.setattr(launch, "compile_kernel", counted)

    def load(vectors):
        constants = (RowsSpec("bf16", vectors, 2),)
        return launch.load_kernel.__wrapped__("moe.rows.scatter", constants, "sm_90a")

    with ThreadPoolExecutor(6) as threads:
        assert all(map(callable, threads.map(load, [1, 2, 3, 1, 2, 3])))
    assert len(times) == 3


# --- whose files are run -------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A place for kernels under a home of its own, and the lines that are said of it."""
    home = tmp_path / "home" / ".cache" / "fusible" / "version"
    monkeypatch.setattr(cache, "directory", lambda: home)
    logs._log.cache_clear()
    yield home
    logs._log.cache_clear()


class Kernel:
    """Stands in for a compiled kernel."""

    def export_to_c(self, object_file_path, function_name):
        Path(object_file_path).write_text(function_name)


def kept_twice(monkeypatch):
    """How often a kernel that is asked for twice is compiled; what is read is its file's text."""
    runtime = pytest.importorskip("cutlass.cute").runtime
    monkeypatch.setattr(
        runtime, "load_module", lambda path, enable_tvm_ffi: {"launch": Path(path).read_text()}
    )
    compiled = []

    def compile_it():
        compiled.append(Kernel())
        return compiled[-1]

    for _ in range(2):
        kernel = cache.load_or_compile("a kernel", compile_it)
        assert kernel == "launch" or kernel is compiled[-1]
    return len(compiled)


def mode(path):
    return path.stat().st_mode & 0o7777


def test_kernels_are_kept_in_folders_of_this_user_alone(monkeypatch, folder):
    assert kept_twice(monkeypatch) == 1
    assert (mode(folder), mode(folder.parent)) == (0o700, 0o700)
    (kernel,) = folder.iterdir()
    assert mode(kernel) == 0o600


def give_away(path):
    try:
        os.chown(path, 12345, -1)
    except OSError as error:  # also of root in some containers
        pytest.skip(f"gives a file to another user: {error}")


UNSAFE = {
    "its folder may be written by all": lambda f: f.chmod(0o777),
    "its folder may be written by the group": lambda f: f.chmod(0o770),
    "its folder is another's": give_away,
    "its folder has the sticky bit": lambda f: f.chmod(0o1777),
    "a parent may be written by all": lambda f: f.parents[2].chmod(0o777),
    "a parent may be written by the group": lambda f: f.parents[1].chmod(0o775),
    "a parent is another's": lambda f: give_away(f.parents[1]),
    "the file may be written by all": lambda f: next(f.iterdir()).chmod(0o666),
    "the file is another's": lambda f: give_away(next(f.iterdir())),
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_what_others_could_have_written_is_not_run(monkeypatch, folder, unsafe, caplog):
    assert kept_twice(monkeypatch) == 1
    UNSAFE[unsafe](folder)
    assert kept_twice(monkeypatch) == 2
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "not cached on disk" in line
    assert "can be written by others" in line or "belongs to user 12345" in line


def test_links_are_followed(monkeypatch, folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parents[1].mkdir(parents=True)
    folder.parent.symlink_to(elsewhere)
    assert kept_twice(monkeypatch) == 1
    assert (elsewhere / "version").exists()
    elsewhere.chmod(0o777)  # where it leads
    assert kept_twice(monkeypatch) == 2
    elsewhere.chmod(0o700)
    assert kept_twice(monkeypatch) == 0
    folder.parents[1].chmod(0o777)  # where the link lies
    assert kept_twice(monkeypatch) == 2


def test_without_a_place_to_keep_them_kernels_are_compiled(monkeypatch, folder, caplog):
    folder.parents[2].mkdir(parents=True)
    folder.parents[1].write_text("a file")
    assert kept_twice(monkeypatch) == 2
    assert sum("cannot be used" in r.getMessage() for r in caplog.records) == 1


def test_a_full_disk_keeps_no_part_of_a_kernel(monkeypatch, folder, caplog):
    def full(self, object_file_path, function_name):
        Path(object_file_path).write_text("a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Kernel, "export_to_c", full)
    assert kept_twice(monkeypatch) == 2
    assert list(folder.iterdir()) == []
    assert sum("cannot be cached on disk" in r.getMessage() for r in caplog.records) == 1
